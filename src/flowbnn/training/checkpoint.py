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
from flowbnn.training.guard import name_below
from flowbnn.training.history import Averages, History
from flowbnn.training.optimizer_state import fitting_optimizer_state, fitting_schedule_state
from flowbnn.training.options import EarlyStop, TrainingOptions
from flowbnn.training.schema import POSITION, check_document
from flowbnn.training.state import decode_state, encode_state
from flowbnn.training.storage import load_tensors, save_tensors
from flowbnn.training.weights import check_architecture, check_finite_weights, check_same_kind

__all__ = ["Position", "Trained", "read_run", "write_run"]


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
    batches_per_epoch: int | None = None
    monitor: str | None = None
    mode: str | None = None

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

    def go_on(self, options: TrainingOptions, batches_per_epoch: int | None, source: Path) -> None:
        """Take a stored position up under the options of this run, or say why that makes no sense."""
        begun = self.epoch + (self.batches > 0)
        if begun > options.epochs:
            raise FlowBNNError(
                f"'{source}' is in its epoch {begun} already and only {options.epochs} are asked for: "
                "ask for more epochs, or begin anew with resume=False"
            )
        stored, rule = self.batches_per_epoch, options.early_stop
        if stored is not None and batches_per_epoch is not None and stored != batches_per_epoch:
            raise FlowBNNError(
                f"'{source}' was written with {stored} batches per epoch, this loader has {batches_per_epoch}: "
                "give it the same data and batch size as before, or begin anew with resume=False"
            )
        if (
            rule is not None
            and self.monitor is not None
            and (self.monitor, self.mode) != (rule.monitor, rule.mode)
        ):
            raise FlowBNNError(
                f"'{source}' was written while early stopping watched {self.monitor!r} ({self.mode}), and this run "
                f"watches {rule.monitor!r} ({rule.mode}): keep the rule, or begin anew with resume=False"
            )
        if rule is None:
            self.best, self.waited, self.history.best_epoch = None, 0, None
        if rule is None or not rule.restore_best:
            self.best_weights = None
        self.history.stopped_early = rule is not None and self.waited >= rule.patience


@dataclass
class Trained:
    """What a run changes: the module, the optimizer with any parameters of its own, the schedule."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    names_below: str = ""

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
        self.told_names = [name_below(name, self.names_below) for name in self.names]
        self.parameters: list[nn.Parameter] = parameters

    def weights(self) -> dict[str, Any]:
        """The module's state, and parameters that only the optimizer knows (a likelihood's noise, say)."""
        return {"model": self.model.state_dict(), "outside": [p.detach() for p in self.outside]}

    def copy_weights(self) -> dict[str, Any]:
        """:meth:`weights`, as a copy that training does not touch."""
        tensors: dict[str, Tensor] = {}
        tree = encode_state(self.weights(), "", tensors)
        return decode_state(tree, {name: tensor.detach().clone() for name, tensor in tensors.items()})

    def check_architecture(self, weights: Any, source: Path) -> None:
        """Refuse stored :meth:`weights` of another model; nothing is changed."""
        if not isinstance(weights, dict) or weights.keys() != {"model", "outside"}:
            raise FlowBNNError(
                f"'{source}' is damaged: its weights are not those of a model and an optimizer"
            )
        if not isinstance(weights["model"], dict) or not isinstance(weights["outside"], list):
            raise FlowBNNError(f"'{source}' is damaged: its weights are no mapping and list of tensors")
        check_architecture(self.model, weights["model"], source, self.names_below)

    def check_weights(self, weights: Any, source: Path) -> None:
        """Refuse stored :meth:`weights` that do not fit or are not finite; nothing is changed."""
        self.check_architecture(weights, source)
        mine, theirs = (
            {f"parameter {number} of the optimizer alone": p for number, p in enumerate(parameters)}
            for parameters in (self.outside, weights["outside"])
        )
        check_same_kind(mine, theirs, source)
        check_finite_weights(weights["model"], self.names, source, self.names_below)
        check_finite_weights(theirs, theirs, source)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Put back what :meth:`weights` gave."""
        self.model.load_state_dict(weights["model"])
        with torch.no_grad():
            for parameter, value in zip(self.outside, weights["outside"], strict=True):
                parameter.copy_(value)

    def take_over(self, parts: Mapping[str, Any]) -> None:
        """Load the checked parts of a file; if one is refused after all, what was there before comes back."""
        before = (
            self.copy_weights(),
            self.optimizer.state_dict(),
            None if self.schedule is None else self.schedule.state_dict(),
        )
        try:
            self._load(parts["weights"], parts["optimizer"], parts["schedule"])
        except Exception:
            self._load(*before)
            raise

    def _load(self, weights: Mapping[str, Any], optimizer: dict[str, Any], schedule: Any) -> None:
        self.load_weights(weights)
        self.optimizer.load_state_dict(optimizer)
        self._lay_out_state()
        if self.schedule is not None:
            self.schedule.load_state_dict(schedule)

    @torch.no_grad()
    def _lay_out_state(self) -> None:
        """Momenta in the memory layout of their weights: a file has them in the plain one, and fused updates walk raw memory."""
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if (
                    isinstance(value, Tensor)
                    and value.shape == parameter.shape
                    and value.stride() != parameter.stride()
                ):
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def write_run(
    path: Path,
    trained: Trained,
    position: Position,
    random: Mapping[str, Any],
    scaler: Mapping[str, Any],
    extra: Mapping[str, Any],
    epochs: int | None = None,
) -> None:
    """Write the run's state to ``path``, atomically; :mod:`flowbnn.training.schema` says what the document holds."""
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
        "position": {name: getattr(position, name) for name in POSITION},
        "averages": position.averages.to_dict(),
        "history": position.history.to_dict(),
        "groups": trained.groups,
        "optimizer": type(trained.optimizer).__name__,
        "schedule": None if trained.schedule is None else type(trained.schedule).__name__,
        "state": {name: encode_state(value, name, tensors) for name, value in parts.items()},
        "extra": dict(extra),
        "epochs": epochs,
        "torch": torch.__version__,
    }
    save_tensors(path, tensors, document)


def read_run(path: Path, trained: Trained) -> tuple[Position, dict[str, Any]]:
    """Read a run's state and check that it fits; nothing of ``trained`` is changed.

    Returns:
        the position, and the decoded ``weights``, ``optimizer``, ``schedule``, ``scaler``, ``random`` and ``extra`` parts.
    """
    tensors, document = load_tensors(path)
    check_document(document, path)
    try:
        parts = {name: decode_state(tree, tensors) for name, tree in document["state"].items()}
        random = parts["random"]["now"], parts["random"]["epoch_start"]
        if not all(isinstance(part, dict) for part in random):
            raise TypeError("its random states are no mappings")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError) as error:
        raise FlowBNNError(
            f"'{path}' is damaged: its training state does not decode ({error!r:.150})"
        ) from None
    position = Position(
        **document["position"],
        averages=Averages(**document["averages"]),
        history=History.from_dict(document["history"]),
        best_weights=parts["best_weights"],
    )
    trained.check_architecture(parts["weights"], path)
    _check_class("optimizer", document["optimizer"], trained.optimizer, path)
    if document["groups"] != trained.groups:
        raise FlowBNNError(
            f"'{path}' was written by an optimizer with other parameter groups; build it as before"
        )
    _check_class("learning-rate schedule", document["schedule"], trained.schedule, path)
    parts["extra"] = document["extra"]
    for weights in (parts["weights"], parts["best_weights"]):
        if weights is not None:
            trained.check_weights(weights, path)
    parts["optimizer"] = fitting_optimizer_state(
        parts["optimizer"], trained.optimizer, trained.told_names, path
    )
    if trained.schedule is not None:
        parts["schedule"] = fitting_schedule_state(parts["schedule"], trained.schedule, path)
    return position, parts


def _check_class(what: str, stored: str | None, own: object | None, source: Path) -> None:
    mine = None if own is None else type(own).__name__
    if stored != mine:
        had, has = (f"the {what} {stored}" if stored else f"no {what}"), (mine or "none")
        raise FlowBNNError(
            f"'{source}' was written with {had} and this run has {has}: build it as before, or begin with resume=False"
        )
