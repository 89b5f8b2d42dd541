"""The checkpoint of a training run, everything needed to go on as if it had never stopped; whether a stored state fits a network."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flowbnn.batches import fingerprint, first_nonfinite_tensor
from flowbnn.errors import FlowBNNError, warn
from flowbnn.training.options import EarlyStop, TrainingOptions
from flowbnn.training.progress import History
from flowbnn.training.randomness import RandomState
from flowbnn.training.storage import TensorFile, copy_file, decode_state, save_state

# of an optimizer: how it computes, which is no state
HOW = ("foreach", "fused", "capturable", "differentiable")
HYPERPARAMETERS = ("lr", "momentum", "betas", "eps", "weight_decay", "nesterov", "alpha")


@dataclass
class Position:
    """How far a run has come, and what it remembers on the way."""

    epoch: int = 0
    batches: int = 0  # of the present epoch that are done
    step: int = 0
    best: float | None = None  # value of the monitored number
    waited: int = 0  # epochs since then
    totals: dict[str, Any] = field(default_factory=dict)  # of the logs of this epoch, weighted by examples
    weights: dict[str, float] = field(default_factory=dict)  # how many examples those are
    history: History = field(default_factory=History)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        totals = {name: float(total) for name, total in self.totals.items()}
        return {**vars(self), "totals": totals, "history": self.history.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Position":
        """The inverse of :meth:`to_dict`."""
        return cls(**{**values, "history": History.from_dict(values["history"])})

    def __str__(self) -> str:
        return f"in epoch {self.epoch + 1}, step {self.step + 1}"

    def follow(self, rule: EarlyStop | None) -> None:
        """Take over a rule for early stopping that may have been dropped or been given more patience."""
        if rule is None:
            self.best, self.waited, self.history.best_epoch = None, 0, None
        self.history.stopped_early = rule is not None and self.waited >= rule.patience

    def watch(self, rule: EarlyStop, record: Mapping[str, float]) -> bool:
        """Apply the rule to the record of the epoch that ends here; whether its weights are to be kept as the best."""
        value = rule.read(record)
        if rule.improves(value, self.best):
            self.best, self.waited, self.history.best_epoch = value, 0, self.epoch
            return rule.restore_best
        self.waited += 1
        self.history.stopped_early = self.waited >= rule.patience
        return False


@dataclass
class State:
    """All that a run changes and its checkpoint holds.

    The random state at the epoch's beginning is kept, because a loader can only be brought back to the middle of an
    epoch by letting it begin again; ``random_now`` is the state at the last whole step, when that is not the present.
    """

    objective: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    randomness: RandomState
    scaler: torch.amp.GradScaler | None
    options: TrainingOptions
    steps_per_epoch: int | None
    settings: Mapping[str, Any]
    structure: Mapping[str, Mapping[str, Any]]
    name_prefix: str
    position: Position = field(default_factory=Position)
    best_weights: dict[str, Any] | None = None
    random_start: dict[str, Any] | None = None
    random_now: dict[str, Any] | None = None
    # the random state before the run's first batch, and a fingerprint of that batch
    data: dict[str, Any] | None = None
    saved_step: int | None = None  # of the checkpoint that is there
    kept_as: Path | None = None  # where an earlier run's checkpoint goes before the first of this one

    def __post_init__(self) -> None:
        names = {id(p): name for name, p in self.objective.named_parameters(remove_duplicate=False)}
        groups = [group["params"] for group in self.optimizer.param_groups]
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group]
        self.path = self.options.checkpoint_path
        self.epochs = self.options.epochs  # of the run, as planned so far
        self.hyperparameters: dict[str, Any] = {}  # those that the run began with
        for number, group in enumerate(self.optimizer.param_groups):
            of = f" of {group.get('name') or f'group {number}'}" if len(groups) > 1 or "name" in group else ""
            given = group | {"lr": group.get("initial_lr", group["lr"])}  # without what a schedule made of it
            self.hyperparameters |= {f"{name}{of}": given[name] for name in HYPERPARAMETERS if name in given}
        groups = [[names[id(parameter)] for parameter in group] for group in groups]
        self.names = [name for group in groups for name in group]
        rule = self.options.early_stop
        self.facts = {  # which must not change when a run is resumed; None is not known
            "optimizer": type(self.optimizer).__name__,
            "parameter groups": groups,
            "learning-rate schedule": "none" if self.schedule is None else type(self.schedule).__name__,
            "batches per epoch": self.steps_per_epoch,
            "early stopping by": rule and f"{rule.monitor} ({rule.mode})",
            "random generators": len(self.randomness.generators),
        }
        for layer, values in self.structure.items():
            self.facts |= {f"{key} of layer '{layer}'": repr(value) for key, value in values.items()}

    def save(self) -> None:
        """Write the checkpoint."""
        assert self.path is not None
        if self.kept_as is not None:
            copy_file(self.path, self.kept_as)
            self.kept_as = None
        contents = {
            "kind": "training",
            "torch": torch.__version__,
            "epochs": self.epochs,
            "position": self.position.to_dict(),
            "weights": self.objective.state_dict(),
            "best_weights": self.best_weights,
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": {
                "now": {**self.randomness.state(), **(self.random_now or {})},
                "start": self.random_start,
            },
            "data": self.data,
            "facts": self.facts,
            "settings": self.settings,
            "hyperparameters": self.hyperparameters,
        }
        save_state(self.path, contents)
        self.saved_step = self.position.step

    def keep_former(self) -> None:
        """Warn where this run takes the place of an interrupted one, whose checkpoint is then kept under another name."""
        path = self.path
        if path is None or (former := unfinished(path)) is None:
            return
        other = path.with_name(f"{path.stem}-before{path.suffix}")
        longer = unfinished(other)
        if longer is None or longer.step <= former.step:
            self.kept_as, kept = other, f"keeps it as '{other.name}'"
        else:
            kept = f"'{other.name}', which had come further, stays"
        warn(
            f"'{path}' is of a run that was interrupted in epoch {former.epoch + 1}, after {former.batches} of its batches; this run "
            f"begins again, replaces it and {kept}: to continue it, stop here and give resume=True",
            kind="unfinished checkpoint",
            path=str(path),
            step=former.step,
        )

    def load(self, warn: bool) -> None:
        """Take over a checkpoint that fits, or change nothing and say in one line why it does not."""
        path, rule, epochs = self.path, self.options.early_stop, self.options.epochs
        assert path is not None
        file = TensorFile(path, sum(value.numel() for value in self.objective.state_dict().values()))
        trouble, changed = "is no checkpoint of a training run: name another file", []
        if file.document.get("kind") == "training":
            # shapes before anything is read
            for finite, tensors in (((), "views"), (self.names, "tensors")):
                with file.reading():
                    stored = decode_state(file.document, getattr(file, tensors))
                    kept = stored["weights"], stored["best_weights"] or stored["weights"]
                for weights in kept:
                    check_weights(self.objective, weights, path, self.name_prefix, finite)
            position = Position.from_dict(stored["position"])
            begun = position.epoch + (position.batches > 0)
            for what in stored["facts"] | self.facts:
                before, now = (facts.get(what, "none") for facts in (stored["facts"], self.facts))
                if before != now and before is not None and now is not None:
                    changed.append(f"{what} {before!s:.80} and this run has {now!s:.80}")
            trouble = f"was written with {', '.join(changed[:3])}: build it as before" if changed else ""
            if begun > epochs:
                trouble = (
                    f"is in its epoch {begun} already and only {epochs} are asked for: ask for more epochs"
                )
        if trouble:
            raise FlowBNNError(f"'{path}' {trouble}, or begin again with resume=False", kind="checkpoint")
        if warn:
            self.warn_of_changes(stored, path)
        position.follow(rule)
        vars(self.position).update(vars(position))
        self.best_weights = stored["best_weights"] if rule is not None and rule.restore_best else None
        self.objective.load_state_dict(stored["weights"])
        load_optimizer(self.optimizer, stored["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(stored["schedule"])
        if self.scaler is not None and stored["scaler"]:
            self.scaler.load_state_dict(stored["scaler"])
        self.hyperparameters = stored["hyperparameters"]
        self.random_now, self.random_start = stored["random"]["now"], stored["random"]["start"]
        self.data = stored["data"]
        self.saved_step = self.position.step

    def compare_data(self, first_batch: Callable[[], Any]) -> None:
        """Warn where the first batch, drawn again as it was then, is another one: the data are others, or in another order."""
        if self.data is None:
            return
        prints = []
        for _ in range(2):  # a loader that never gives the same batch twice says nothing
            self.randomness.restore(self.data["random"])
            prints.append(fingerprint(first_batch()))
            if prints[0] == self.data["first"]:
                return
        if prints[0] == prints[1]:
            warn(
                f"'{self.path}' is resumed with other data: its first batch was another one; resume=False begins again",
                kind="changed data",
                path=str(self.path),
            )

    def warn_of_changes(self, stored: Mapping[str, Any], path: Path) -> None:
        """Warn of settings that are not those the run began with: the method's, which change, and the optimizer's, which do not."""
        changed, kept = (
            {
                name: (before, own[name])
                for name, before in stored[kind].items()
                if own.get(name, before) != before
            }
            for kind, own in (("settings", self.settings), ("hyperparameters", self.hyperparameters))
        )
        words = [f"{name} was {before} and is now {after}" for name, (before, after) in changed.items()]
        words += [f"{name} stays {before}, not {given}" for name, (before, given) in kept.items()]
        if words:
            warn(
                f"'{path}' is resumed with other settings: {'; '.join(words)}; resume=False begins again",
                kind="changed settings",
                changed=changed,
                kept=kept,
            )


def unfinished(path: Path) -> Position | None:
    """How far an interrupted run has come; None where there is no file, it is finished, or nothing of it can be used."""
    try:
        document = TensorFile(path).document
        position = Position.from_dict(document["position"])
    except (FlowBNNError, KeyError, TypeError):
        return None
    finished = position.history.stopped_early or position.epoch >= document["epochs"]
    return None if finished or position.step == 0 else position


def load_optimizer(optimizer: Optimizer, stored: dict[str, Any]) -> None:
    """Load a stored state; how this run computes its steps (``fused``, ``foreach``) is no state and stays."""
    groups = [
        {**own, **group, **{name: own[name] for name in HOW if name in own}}
        for own, group in zip(optimizer.state_dict()["param_groups"], stored["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**stored, "param_groups": groups})
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # a file has momenta in the plain memory layout, and fused updates walk raw memory
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


# -------------------- does a stored state fit a network?


def strip_prefix(name: str, root: str) -> str:
    """The name of a module or parameter as seen from the submodule ``root``; one outside it keeps its name.

    >>> strip_prefix("network.fc1.weight", "network"), strip_prefix("likelihood.scale", "network")
    ('fc1.weight', 'likelihood.scale')
    """
    if not root:
        return name
    return "" if name == root else name.removeprefix(root + ".")


def check_weights(
    model: nn.Module,
    state: Mapping[str, Any],
    source: str | Path,
    name_prefix: str = "",
    finite: Iterable[str] = (),
) -> None:
    """Refuse a state that does not fit the model's names, shapes and kinds of numbers, or is not finite, naming the first few.

    Args:
        name_prefix: is left out of the names, as in :func:`flowbnn.training.train`.
        finite: names of tensors that must be.

    >>> check_weights(nn.Linear(2, 1), nn.Linear(3, 1).state_dict(), "a.safetensors")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: 'a.safetensors' is of another architecture: it differs in weight ((1, 3) there, (1, 2) here)
    """
    own = model.state_dict()
    unlike = {name: _unlike(state[name], own[name]) for name in own if name in state}
    differences = {
        "it lacks": [strip_prefix(name, name_prefix) for name in own if name not in state],
        "it has besides": [strip_prefix(name, name_prefix) for name in state if name not in own],
        "it differs in": [
            f"{strip_prefix(name, name_prefix)} ({how})" for name, how in unlike.items() if how
        ],
    }
    words = [f"{what} {_few(names)}" for what, names in differences.items() if names]
    trouble = f"is of another architecture: {'; '.join(words)}" if words else ""
    layer = None if trouble else first_nonfinite_tensor((name, state[name]) for name in finite)
    if layer is not None:
        layer = strip_prefix(layer, name_prefix)
        trouble = f"holds NaN or infinite weights in {layer!r}; take an earlier file or begin again"
    if trouble:
        raise FlowBNNError(
            f"'{source}' {trouble}", kind="not finite" if layer else "architecture", layer=layer
        )


def _unlike(stored: Any, own: Any) -> str:
    """How two entries of a state differ, in words."""
    if not isinstance(stored, Tensor) or not isinstance(own, Tensor):
        return "" if type(stored) is type(own) else "no tensor on one side"
    if stored.shape != own.shape:
        return f"{tuple(stored.shape)} there, {tuple(own.shape)} here"
    same = stored.dtype == own.dtype
    return "" if same else f"{stored.dtype} there, {own.dtype} here".replace("torch.", "")


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def layer_classes(model: nn.Module) -> dict[str, str]:
    """The class of every module that holds no others: what computes with the weights, or between them.

    >>> layer_classes(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    {'0': 'Linear', '1': 'ReLU'}
    """
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if name and next(module.children(), None) is None
    }


def warn_changed_layers(model: nn.Module, stored: Mapping[str, str], path: Any) -> None:
    """Weights fit a network whose activations are others, and mean something else there."""
    own = layer_classes(model)
    changed = {name: (stored[name], own[name]) for name in own if stored.get(name, own[name]) != own[name]}
    if changed:
        words = _few([f"'{name}' was {before} and is {now}" for name, (before, now) in changed.items()])
        warn(
            f"'{path}' was made from a network of other layers: {words}; its predictions here are not those of the network that "
            "was trained",
            kind="layers",
            changed=changed,
        )
