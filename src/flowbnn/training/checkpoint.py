"""The checkpoint of a training run, which holds everything needed to resume it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flowbnn.batches import fingerprint
from flowbnn.errors import FlowBNNError, warn
from flowbnn.options import Ge
from flowbnn.records import Record
from flowbnn.training.compatibility import (
    check_optimizer_state,
    check_tensors,
    check_weights,
    count_weights,
    describe_layers,
    load_optimizer,
    strip_prefix,
)
from flowbnn.training.history import History
from flowbnn.training.options import EarlyStop, TrainingOptions
from flowbnn.training.randomness import RandomState
from flowbnn.training.storage import TensorFile, copy_file, decode_state, save_state


@dataclass
class Position(Record):
    """Position of a run: epoch, step, totals of the current epoch, and history.

    Attributes:
        epoch: Index of the current epoch.
        batches: Number of batches of the current epoch that are done.
        step: Number of optimizer steps that are done.
        best: Best value that early stopping has seen.
        epochs_since_best: Number of epochs since the best value.
        stopped_by_callback: True if a callback has ended the run.
        totals: Sums of the logged values of the current epoch, weighted by examples.
        weights: Numbers of examples in these sums.
        history: Record of the finished epochs.
    """

    epoch: Annotated[int, Ge(0)] = 0
    batches: Annotated[int, Ge(0)] = 0
    step: Annotated[int, Ge(0)] = 0
    best: float | None = None
    epochs_since_best: Annotated[int, Ge(0)] = 0
    stopped_by_callback: bool = False
    totals: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    history: History = field(default_factory=History)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can store."""
        totals = {name: float(total) for name, total in self.totals.items()}
        return {**vars(self), "totals": totals, "history": self.history.to_dict()}

    def __str__(self) -> str:
        return f"in epoch {self.epoch + 1}, step {self.step + 1}"

    def set_early_stop(self, rule: EarlyStop | None, has_callbacks: bool) -> None:
        """Applies a rule for early stopping that may have been dropped or given more patience.

        Args:
            rule: Rule for early stopping, or None.
            has_callbacks: False if the resumed run has no callbacks. It then continues where a callback had ended it.
        """
        if rule is None:
            self.best, self.epochs_since_best, self.history.best_epoch = None, 0, None
        self.stopped_by_callback = self.stopped_by_callback and has_callbacks
        exhausted = rule is not None and self.epochs_since_best >= rule.patience
        self.history.stopped_early = exhausted or self.stopped_by_callback

    def update_best(self, rule: EarlyStop, record: Mapping[str, float]) -> bool:
        """Applies early stopping to the record of an epoch.

        Args:
            rule: Rule for early stopping.
            record: Record of the epoch that ends here.

        Returns:
            True if the weights of this epoch are to be kept as the best.
        """
        value = rule.read(record)
        if rule.improves(value, self.best):
            self.best, self.epochs_since_best, self.history.best_epoch = value, 0, self.epoch
            return rule.restore_best
        self.epochs_since_best += 1
        self.history.stopped_early = self.epochs_since_best >= rule.patience
        return False


@dataclass
class RunState:
    """Everything that a run changes and its checkpoint stores.

    Attributes:
        objective: Module that is trained.
        optimizer: Optimizer of its parameters.
        schedule: Learning-rate schedule, or None.
        random: Random generators of the run.
        scaler: Gradient scaler of float16 training, or None.
        options: Options of the run.
        steps_per_epoch: Number of batches per epoch, or None if unknown.
        settings: Plain values that a resumed run compares.
        structure: Plain values of each layer that must not change.
        name_prefix: Name of a submodule that messages leave out.
        position: Position of the run.
        best_weights: Weights of the best epoch, or None.
        epoch_start_rng: Random state at the beginning of the epoch. A loader can be brought to the middle of an epoch only by
            starting it again.
        last_step_rng: Random state after the last complete step, if it differs from the present one.
        first_batch: Random state before the first batch of the run, and the fingerprint of that batch.
        saved_step: Step of the checkpoint on the disk.
        backup_path: File that will hold the checkpoint of an earlier, unfinished run.
    """

    objective: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    random: RandomState
    scaler: torch.amp.GradScaler | None
    options: TrainingOptions
    steps_per_epoch: int | None
    settings: Mapping[str, Any]
    structure: Mapping[str, Mapping[str, Any]]
    name_prefix: str
    position: Position = field(default_factory=Position)
    best_weights: dict[str, Any] | None = None
    epoch_start_rng: dict[str, Any] | None = None
    last_step_rng: dict[str, Any] | None = None
    first_batch: dict[str, Any] | None = None
    saved_step: int | None = None
    backup_path: Path | None = None

    def __post_init__(self) -> None:
        names = {id(p): name for name, p in self.objective.named_parameters(remove_duplicate=False)}
        groups = [group["params"] for group in self.optimizer.param_groups]
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group]
        self.path = self.options.checkpoint_path
        self.arithmetic = {"precision": self.options.precision, "clip_gradient": self.options.clip_gradient}
        self.epochs = self.options.epochs  # may decrease when the length of the run depends on its record
        self.hyperparameters: dict[str, Any] = {}  # at the beginning of the run
        for number, group in enumerate(self.optimizer.param_groups):
            named = len(groups) > 1 or "name" in group
            suffix = f" of {group.get('name') or f'group {number}'}" if named else ""
            values = group | {"lr": group.get("initial_lr", group["lr"])}  # before any schedule
            compared = "lr", "momentum", "betas", "eps", "weight_decay", "nesterov", "alpha"
            self.hyperparameters |= {f"{name}{suffix}": values[name] for name in compared if name in values}
        groups = [[names[id(parameter)] for parameter in group] for group in groups]
        self.names = [name for group in groups for name in group]
        rule = self.options.early_stop
        self.invariants: dict[str, Any] = {  # must be equal in a resumed run; None means unknown
            "optimizer": type(self.optimizer).__name__,
            "parameter groups": groups,
            "learning-rate schedule": "none" if self.schedule is None else type(self.schedule).__name__,
            "batches per epoch": self.steps_per_epoch,
            "early stopping by": rule and f"{rule.monitor} ({rule.mode})",
            "random generators": len(self.random.generators),
        }
        for name, words in describe_layers(self.objective).items():
            layer = strip_prefix(name, self.name_prefix)
            # the functions of the network itself, whose class may differ
            if layer or (name and "=" in words):
                self.invariants[f"layer '{layer or 'network'}'"] = words
        for layer, facts in self.structure.items():
            self.invariants |= {f"{key} of layer '{layer}'": repr(value) for key, value in facts.items()}

    def save(self) -> None:
        """Writes the checkpoint."""
        assert self.path is not None
        if self.backup_path is not None:
            copy_file(self.path, self.backup_path)
            self.backup_path = None
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
                "last_step": {**self.random.state(), **(self.last_step_rng or {})},
                "epoch_start": self.epoch_start_rng,
            },
            "first_batch": self.first_batch,
            "invariants": self.invariants,
            "settings": self.settings,
            "arithmetic": self.arithmetic,
            "hyperparameters": self.hyperparameters,
        }
        save_state(self.path, contents)
        self.saved_step = self.position.step

    def warn_unfinished(self) -> None:
        """Warns if this run replaces the checkpoint of an unfinished run, which is kept under another name."""
        path = self.path
        if path is None or (earlier := unfinished(path)) is None:
            return
        backup = path.with_name(f"{path.stem}-before{path.suffix}")
        longer = unfinished(backup)
        if longer is None or longer.step <= earlier.step:
            self.backup_path = backup
        text = f"'{path}' holds a run interrupted in epoch {earlier.epoch + 1}, kept as '{backup.name}'; use resume=True to continue it"
        warn(text, kind="unfinished checkpoint", path=str(path), backup=str(backup), step=earlier.step)

    def load(self, warn: bool) -> None:
        """Loads the checkpoint, or raises an error and changes nothing if it does not fit.

        Args:
            warn: If True, warns about settings that have changed.
        """
        path, rule = self.path, self.options.early_stop
        assert path is not None
        stored, position = self._read(path)
        if warn:
            self.warn_changed_settings(stored)
        position.set_early_stop(rule, bool(self.options.callbacks))
        vars(self.position).update(vars(position))
        self.best_weights = stored["best_weights"] if rule is not None and rule.restore_best else None
        self.objective.load_state_dict(stored["weights"])
        load_optimizer(self.optimizer, stored["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(stored["schedule"])
        if self.scaler is not None and stored["scaler"]:
            self.scaler.load_state_dict(stored["scaler"])
        self.hyperparameters = stored["hyperparameters"]
        self.last_step_rng, self.epoch_start_rng = (
            stored["random"]["last_step"],
            stored["random"]["epoch_start"],
        )
        self.first_batch = stored["first_batch"]
        self.saved_step = self.position.step

    def _read(self, path: Path) -> tuple[dict[str, Any], Position]:
        """Returns the contents of the checkpoint and its position after checks of shapes, checksum and numbers, in this order."""
        file = TensorFile(path, count_weights(self.objective))
        if file.document.get("kind") != "training":
            text = f"'{path}' is no checkpoint of a training run; name another file or use resume=False"
            raise FlowBNNError(text, kind="checkpoint", argument="checkpoint")
        for source in ("views", "tensors"):  # shapes are checked before any tensor is read
            with file.reading():
                stored = decode_state(file.document, getattr(file, source))
                position = Position.from_dict(stored["position"])
                self._check_contents(path, stored, position, finite=source == "tensors")
        return stored, position

    def _check_contents(
        self, path: Path, stored: Mapping[str, Any], position: Position, finite: bool
    ) -> None:
        """Raises an error if the contents of the checkpoint do not fit this run.

        Args:
            path: Path of the checkpoint.
            stored: Contents of the checkpoint.
            position: Position of the checkpoint.
            finite: If True, tensors are in memory. They must be finite, and random states valid.
        """
        for weights in (stored["weights"], stored["best_weights"] or stored["weights"]):
            check_weights(self.objective, weights, path, self.name_prefix, finite)
        self._check_invariants(stored["invariants"], position)
        names = [strip_prefix(name, self.name_prefix) for name in self.names]
        check_optimizer_state(self.optimizer, stored["optimizer"], names, path, finite)
        if self.schedule is not None:
            check_tensors(self.schedule.state_dict(), stored["schedule"], path, owner="the schedule")
        random_states = [*stored["random"].values(), (stored["first_batch"] or {}).get("random")]
        for state in filter(None, random_states if finite else ()):
            self.random.check(state)

    def _check_invariants(self, stored: Mapping[str, Any], position: Position) -> None:
        """Raises an error if the checkpoint was written by a run of another kind."""
        changed = {}
        for name in {**stored, **self.invariants}:
            before, now = stored.get(name, "none"), self.invariants.get(name, "none")
            if before != now and before is not None and now is not None:
                changed[name] = (before, now)
        words = [f"{name} {before!s:.80}, now {now!s:.80}" for name, (before, now) in changed.items()]
        problem = f"was written with {'; '.join(words[:3])}; restore these settings" if words else ""
        epoch = position.epoch + (position.batches > 0)
        if epoch > self.options.epochs:
            changed["epochs"] = (epoch, self.options.epochs)
            problem = f"has reached epoch {epoch}, but epochs={self.options.epochs}; increase epochs"
        if problem:
            text = f"'{self.path}' {problem} or use resume=False"
            raise FlowBNNError(text, kind="checkpoint", changed=changed)

    def warn_changed_data(self, first_batch: Callable[[], Any]) -> None:
        """Warns if the first batch of the run is not the one it was.

        Args:
            first_batch: Function that returns the first batch of the loader.
        """
        if self.first_batch is None:
            return
        prints = []
        for _ in range(2):  # a loader whose batches differ at every pass proves nothing
            self.random.restore(self.first_batch["random"])
            prints.append(fingerprint(first_batch()))
            if prints[0] == self.first_batch["fingerprint"]:
                return
        if prints[0] == prints[1]:
            text = f"'{self.path}' is resumed with other data: its first batch has changed; to start again, use resume=False"
            warn(text, kind="changed data", path=str(self.path))

    def warn_changed_settings(self, stored: Mapping[str, Any]) -> None:
        """Warns about settings that differ from the stored ones.

        Settings of the method take their new values. Hyperparameters of the optimizer keep the stored ones.

        Args:
            stored: Contents of the checkpoint.
        """

        def differences(kind: str, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
            pairs = {name: (before, values.get(name, before)) for name, before in stored[kind].items()}
            return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

        changed = differences("settings", self.settings) | differences("arithmetic", self.arithmetic)
        ignored = differences("hyperparameters", self.hyperparameters)
        words = [f"{name} changes from {before} to {after}" for name, (before, after) in changed.items()]
        words += [f"{name} stays {before}, not {after}" for name, (before, after) in ignored.items()]
        if words:
            text = f"'{self.path}' is resumed with other settings: {'; '.join(words)}; to start again, use resume=False"
            warn(text, kind="changed settings", changed=changed, ignored=ignored)


def unfinished(path: Path) -> Position | None:
    """Returns the position of an unfinished run, or None if there is no usable checkpoint or the run is complete."""
    try:
        document = TensorFile(path).document
        position = Position.from_dict(document["position"])
    except (ValueError, KeyError, TypeError):
        return None
    finished = position.history.stopped_early or position.epoch >= document["epochs"]
    return None if finished or position.step == 0 else position
