"""The checkpoint of a training run: everything needed to go on as if it had never stopped."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flowbnn.errors import FlowBNNError
from flowbnn.training.history import Averages, History
from flowbnn.training.options import EarlyStop
from flowbnn.training.state import decode_state, encode_state
from flowbnn.training.storage import load_tensors, save_tensors

__all__ = ["Position", "Trained", "check_architecture", "load_weights", "read_run", "write_run"]

REACHED = ("epoch", "batches", "step", "best", "waited")


@dataclass
class Position:
    """How far a run has come, and what it remembers on the way."""

    epoch: int = 0
    batches: int = 0
    step: int = 0
    averages: Averages = field(default_factory=Averages)
    history: History = field(default_factory=History)
    best: float | None = None
    best_weights: dict[str, Any] | None = None
    waited: int = 0
    saved_in: Path | None = None

    @property
    def words(self) -> str:
        """The position, for an error message."""
        return f"in epoch {self.epoch + 1}, step {self.step + 1}"

    @property
    def last_good(self) -> str:
        """Where to go back to, as the tail of an error message."""
        return f"; the last good checkpoint is '{self.saved_in}'" if self.saved_in else ""

    def judge(self, record: Mapping[str, float], rule: EarlyStop | None, trained: "Trained") -> None:
        """Apply the rule for stopping early to the record of the epoch that ends here."""
        if rule is None:
            return
        value = rule.read(record)
        if rule.improves(value, self.best):
            self.best, self.waited, self.history.best_epoch = value, 0, self.epoch
            self.best_weights = trained.copy_weights() if rule.restore_best else None
        else:
            self.waited += 1
            self.history.stopped_early = self.waited >= rule.patience


@dataclass
class Trained:
    """What a run changes: the module, the optimizer with any parameters of its own, the schedule."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None

    def __post_init__(self) -> None:
        names = {
            id(parameter): name for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }
        self.groups = [
            [names.get(id(p), "(not in the model)") for p in group["params"]]
            for group in self.optimizer.param_groups
        ]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.outside: list[Tensor] = [p for p in parameters if id(p) not in names]
        self.names = [name for group in self.groups for name in group]
        self.parameters: list[nn.Parameter] = parameters

    def weights(self) -> dict[str, Any]:
        """The module's state, and parameters that only the optimizer knows (a likelihood's noise, say)."""
        return {"model": self.model.state_dict(), "outside": [p.detach() for p in self.outside]}

    def copy_weights(self) -> dict[str, Any]:
        """:meth:`weights`, as a copy that training does not touch."""
        tensors: dict[str, Tensor] = {}
        tree = encode_state(self.weights(), "", tensors)
        return decode_state(tree, {name: tensor.detach().clone() for name, tensor in tensors.items()})

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Put back what :meth:`weights` gave."""
        self.model.load_state_dict(weights["model"])
        with torch.no_grad():
            for parameter, value in zip(self.outside, weights["outside"], strict=True):
                parameter.copy_(value)


def write_run(
    path: Path,
    trained: Trained,
    position: Position,
    random: Mapping[str, Any],
    scaler: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> None:
    """Write the run's state to ``path``, atomically."""
    tensors: dict[str, Tensor] = {}
    parts = {
        "weights": trained.weights(),
        "optimizer": trained.optimizer.state_dict(),
        "schedule": None if trained.schedule is None else trained.schedule.state_dict(),
        "scaler": dict(scaler),
        "random": dict(random),
        "best_weights": position.best_weights,
    }
    document = {
        "kind": "training",
        "position": {
            name: getattr(position, name) for name in ("epoch", "batches", "step", "best", "waited")
        },
        "averages": position.averages.to_dict(),
        "history": position.history.to_dict(),
        "groups": trained.groups,
        "state": {name: encode_state(value, name, tensors) for name, value in parts.items()},
        "extra": dict(extra),
        "torch": torch.__version__,
    }
    save_tensors(path, tensors, document)


def read_run(path: Path, trained: Trained) -> tuple[Position, dict[str, Any]]:
    """Read a run's state and check that it fits; nothing of ``trained`` is changed.

    Returns:
        the position, and the decoded ``weights``, ``optimizer``, ``schedule``, ``scaler`` and ``random`` parts.
    """
    tensors, document = load_tensors(path)
    if document.get("kind") != "training":
        raise FlowBNNError(f"'{path}' is no checkpoint of a training run, but holds {document.get('kind')!r}")
    try:
        parts = {name: decode_state(tree, tensors) for name, tree in document["state"].items()}
        reached = document["position"]
        position = Position(
            **{name: reached.pop(name) for name in REACHED},
            **reached,
            averages=Averages(**document["averages"]),
            history=History.from_dict(document["history"]),
            best_weights=parts["best_weights"],
        )
        model_state, groups, has_schedule = (
            parts["weights"]["model"],
            document["groups"],
            parts["schedule"] is not None,
        )
        random_parts = parts["random"]["now"], parts["random"]["epoch_start"]
        assert all(isinstance(part, dict) for part in (*random_parts, parts["optimizer"], model_state))
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
        raise FlowBNNError(
            f"'{path}' is damaged: its training state does not decode ({error!r:.150})"
        ) from None
    check_architecture(trained.model, model_state, path)
    if position.best_weights is not None:
        check_architecture(trained.model, position.best_weights.get("model", {}), path)
    if groups != trained.groups:
        raise FlowBNNError(
            f"'{path}' was written by an optimizer with other parameter groups; build it as before"
        )
    if has_schedule != (trained.schedule is not None):
        had, has = ("a", "none") if has_schedule else ("no", "one")
        raise FlowBNNError(f"'{path}' was written with {had} learning-rate schedule and this run has {has}")
    return position, parts


def check_architecture(model: nn.Module, state: Mapping[str, Any], source: str | Path) -> None:
    """Refuse a state that does not fit the model's names, shapes and kinds of numbers, naming the first few."""
    own = model.state_dict()
    complaints = [
        _few("it lacks", [name for name in own if name not in state]),
        _few("it has besides", [name for name in state if name not in own]),
        _few("it differs in", [_difference(name, state[name], own[name]) for name in own if name in state]),
    ]
    complaints = [complaint for complaint in complaints if complaint]
    if complaints:
        raise FlowBNNError(f"'{source}' is of another architecture: {'; '.join(complaints)}")


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights of a training checkpoint (those of the best epoch, where it kept them) into a model.

    The model is untouched when the file does not fit.
    """
    tensors, document = load_tensors(path)
    try:
        tree = document["state"]["best_weights"] or document["state"]["weights"]
        state = decode_state(tree, tensors)["model"]
        assert isinstance(state, dict)
    except (KeyError, TypeError, AssertionError, RecursionError):
        raise FlowBNNError(f"'{path}' is no checkpoint of a training run") from None
    check_architecture(model, state, path)
    model.load_state_dict(state)
    return model


def _difference(name: str, stored: Any, own: Any) -> str:
    if not isinstance(own, Tensor) or not isinstance(stored, Tensor):
        return "" if isinstance(own, Tensor) == isinstance(stored, Tensor) else name
    if stored.shape != own.shape:
        return f"{name} ({tuple(stored.shape)} there, {tuple(own.shape)} here)"
    if stored.dtype != own.dtype:
        kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (stored, own)]
        return f"{name} ({kinds[0]} there, {kinds[1]} here)"
    return ""


def _few(words: str, names: list[str], most: int = 3) -> str:
    names = [name for name in names if name]
    if not names:
        return ""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{words} {', '.join(names[:most])}{rest}"
