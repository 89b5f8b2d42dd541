"""One loop for every method: a step function gives the loss of a batch, the loop does the rest."""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training.checkpoint import (
    RECIPES,
    Position,
    Trained,
    changed_noise,
    changed_settings,
    read_run,
    write_run,
)
from flowbnn.training.device import make_engine
from flowbnn.training.finite import first_nonfinite_tensor
from flowbnn.training.history import Averages, History
from flowbnn.training.launch import Children
from flowbnn.training.options import TrainingOptions
from flowbnn.training.progress import Display, open_tensorboard
from flowbnn.training.randomness import Randomness, host_state, loader_generators, seed_all
from flowbnn.training.signals import Interrupts
from flowbnn.training.step import Step, Stepper
from flowbnn.training.storage import check_document, check_writable, keep_as, load_document

__all__ = ["Run", "Step", "loader_length", "train"]

# -------------------- run.py

Validate = Callable[[nn.Module], Mapping[str, float]]


def loader_length(loader: Any) -> int | None:
    """Batches per epoch, where the loader knows."""
    try:
        return len(loader)
    except TypeError:
        return None


def _unfinished(path: Path, epochs: int) -> tuple[int, str] | None:
    """Steps and words of how far a run has come that was cut; None where there is none, or nothing of it can be used.

    Args:
        epochs: it was to have, where an older file does not say.
    """
    try:
        document = load_document(path)
        check_document(document, path)
    except FlowBNNError:
        return None
    position, wanted = document["position"], document.get("epochs") or epochs
    epoch, batches, step = position["epoch"], position["batches"], position["step"]
    if step == 0 or document["history"]["stopped_early"] or epoch >= wanted:
        return None
    return step, f"{epoch} of {wanted} epochs" + (f" and {batches} batches" if batches else "")


class Run:
    """The state of one call of :func:`flowbnn.training.train`.

    The random state at the epoch's beginning is kept, because a loader can only be brought back to the middle of an
    epoch by letting it begin again; ``random_now`` is the state at the last whole step, when that is not the present.
    """

    def __init__(
        self,
        trained: Trained,
        step: Step,
        loader: Iterable[Any],
        options: TrainingOptions,
        validate: Validate | None,
        generators: Iterable[torch.Generator],
        extra: dict[str, Any],
    ) -> None:
        self.trained, self.options, self.validate, self.extra = trained, options, validate, extra
        self.path: Path | None = options.checkpoint_path
        if self.path is not None:
            check_writable(self.path)
        self.engine = make_engine(options)
        self.main = self.engine.rank == 0
        if self.engine.processes > 1 and self.path is not None:
            Children.advice = f"; its last checkpoint is '{self.path}', resume=True (flowbnn run: --resume) goes on from there"
        model, optimizer = self.engine.setup(trained.model, trained.optimizer)
        own = self.engine.device if self.engine.processes > 1 else None
        self.randomness = Randomness([*generators, *loader_generators(loader)], own)
        self.stepper = Stepper(step, model, optimizer, trained, self.engine, options, self.randomness)
        self.position = Position()
        self.saved_step: int | None = None
        self.random_start: dict[str, Any] | None = None
        self.random_now: dict[str, Any] | None = None
        parts: dict[str, Any] | None = None
        if options.resume and self.path is not None and self.engine.agree(self.path.exists()):
            self.position, parts = read_run(self.path, trained)
        self.loader = self.engine.prepare_loader(loader)
        self.steps_per_epoch = loader_length(self.loader)
        if parts is not None and self.path is not None:
            self.resume(self.path, parts)
        elif options.seed is not None:
            seed_all(options.seed)
        self.kept_as: Path | None = (
            None  # where the checkpoint of an earlier run goes before the first of this one
        )
        if parts is None and self.path is not None and self.main:
            self.tell_former(self.path)
        rule = options.early_stop
        self.position.batches_per_epoch = self.steps_per_epoch
        self.position.monitor, self.position.mode = (rule.monitor, rule.mode) if rule else (None, None)
        self.started = time.monotonic() - self.position.history.seconds

    def resume(self, path: Path, parts: Mapping[str, Any]) -> None:
        """Take over the parts of the file, which are known to fit, or change nothing."""
        other = changed_noise(parts["extra"].get(RECIPES), self.extra.get(RECIPES) or {})
        if other is not None:
            raise FlowBNNError(
                f"'{path}': {other}; convert the network as before, or begin anew with resume=False"
            )
        position, random = self.position, parts["random"]
        position.go_on(self.options, self.steps_per_epoch, path)
        if self.main:
            self.tell_changes(path, parts)
        self.randomness.try_out(random["now"], path)
        if position.batches:
            self.randomness.try_out(random["epoch_start"], path)
            self.random_start = random["epoch_start"]
        try:
            if parts["scaler"]:
                self.engine.load_scaler_state(parts["scaler"])
            self.trained.take_over(parts)
        except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise FlowBNNError(f"'{path}' does not fit this model or optimizer ({error!r:.150})") from None
        self.random_now = random["now"]
        position.saved_in, self.saved_step = path, position.step

    def tell_changes(self, path: Path, parts: Mapping[str, Any]) -> None:
        """Warn of settings that are not those the run began with."""
        rates = not isinstance(self.trained.schedule, ReduceLROnPlateau)
        groups = self.trained.optimizer.param_groups
        found = list(changed_settings(parts["extra"], self.extra, parts["optimizer"], groups, rates))
        if found:
            warnings.warn(
                f"going on with '{path}': {'; '.join(found)}; resume=False begins anew", FlowBNNWarning
            )

    def tell_former(self, path: Path) -> None:
        """Warn where this run takes the place of one that was cut, whose checkpoint is then kept under another name."""
        former = _unfinished(path, self.options.epochs)
        if former is None:
            return
        steps, words = former
        before = path.with_name(f"{path.stem}-before{path.suffix}")
        longer = _unfinished(before, self.options.epochs)
        if longer is None or longer[0] <= steps:
            self.kept_as, kept = before, f"keeps it as '{before.name}'"
        else:
            kept = f"'{before.name}', which had come further, stays"
        warnings.warn(
            f"'{path}' is of a run that was cut after {words}; this run begins anew, replaces it and {kept}: "
            "to go on from it, stop here and give resume=True",
            FlowBNNWarning,
        )

    @property
    def finished(self) -> bool:
        """Whether there is no epoch left to do."""
        return self.position.history.stopped_early or self.position.epoch >= self.options.epochs

    def go(self) -> History:
        """All epochs that are left."""
        modes = [(module, module.training) for module in self.trained.model.modules()]
        writer = open_tensorboard(self.options.tensorboard if self.main else None, self.position.epoch + 1)
        try:
            with ExitStack() as stack:
                if writer is not None:
                    stack.callback(writer.close)
                interrupts = stack.enter_context(Interrupts(terminate=self.engine.processes > 1))
                display = stack.enter_context(Display(self.options, self.main, self.steps_per_epoch))
                stack.enter_context(self.engine.sharing(self.trained.model))
                self.stepper.model.train()
                try:
                    while not self.finished:
                        self.run_epoch(interrupts, display)
                        self.end_epoch(interrupts, display, writer)
                    self.engine.barrier()
                except Exception as error:
                    self.end_without_others(error, interrupts)
                    raise
        except KeyboardInterrupt:
            self.save_interrupted()
            raise
        finally:
            for module, mode in modes:
                module.training = mode
        if self.position.best_weights is not None:
            self.trained.load_weights(self.position.best_weights)
        return self.position.history

    def run_epoch(self, interrupts: Interrupts, display: Display) -> None:
        """The steps of an epoch that are left."""
        position, every = self.position, self.options.checkpoint_every
        with interrupts.held():
            batches = self.begin_epoch()
        while True:
            with interrupts.held():
                self.random_now = self.randomness.torch_state() if self.path is not None else None
                try:
                    batch = next(batches)
                except StopIteration:
                    self.random_now = None
                    break
                self.stepper.take(batch, position, self.steps_per_epoch)
                self.random_now = None
                if every is not None and position.step % every == 0:
                    self.save()
            if display.due():
                self.stepper.flush(position)
                display.update(position.epoch, position.step, position.averages.means())
        if position.batches == 0:
            again = " (was it an iterator, which serves one epoch only?)" if position.epoch else ""
            raise FlowBNNError(f"the loader gave no batch in epoch {position.epoch + 1}{again}")

    def begin_epoch(self) -> Iterator[Any]:
        """The epoch's batches, without those that are done."""
        position = self.position
        if self.random_start is not None:
            self.randomness.restore(self.random_start)
        elif self.random_now is not None:
            self.randomness.restore(self.random_now)
        if self.engine.processes > 1:
            # they have drawn alike, unless a layer or a data set of the user's drew as often as it had rows
            self.randomness.restore(self.engine.agree(self.randomness.state()))
        self.random_start = self.random_start or self.randomness.state()
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(position.epoch)
        batches = iter(self.loader)
        for done in range(position.batches):
            if next(batches, batches) is batches:
                raise FlowBNNError(
                    f"'{self.path}' had done {position.batches} batches of epoch {position.epoch + 1}, but this "
                    f"loader has only {done}: give it the same data and batch size as before"
                )
        if position.batches and self.random_now is not None:
            self.randomness.restore(self.random_now)
        self.random_now = None
        return batches

    def end_epoch(self, interrupts: Interrupts, display: Display, writer: Any) -> None:
        """Validation, the record, the schedule, early stopping and the checkpoint."""
        position, options = self.position, self.options
        self.stepper.settle(position)
        self.random_now = self.randomness.state()
        if self.validate is not None and options.checkpoint_every is None:
            # before validation, which may take long or fail: a resumed run begins with it
            with interrupts.held():
                self.save_step()
        try:
            record = self.epoch_record()
        except Exception:
            with suppress(FlowBNNError):
                self.save_step()
            raise
        with interrupts.held():
            self.stepper.updating = True
            self.step_schedule(record)
            position.judge(record, options.early_stop, self.trained)
            position.history.records.append(record)
            position.history.steps = position.step
            position.history.seconds = time.monotonic() - self.started
            position.epoch, position.batches, position.averages = position.epoch + 1, 0, Averages()
            self.random_start = self.random_now = None
            self.stepper.updating = False
            if options.checkpoint_every is None or self.finished:
                self.save()
            if writer is not None:
                for name, value in record.items():
                    writer.add_scalar(name, value, position.epoch)
        display.validated(record)
        display.update(position.epoch, position.step, record)

    def epoch_record(self) -> dict[str, float]:
        """The numbers of the epoch that ends here; they hold the one that early stopping watches."""
        record = self.position.averages.means()
        record["learning_rate"] = float(self.trained.optimizer.param_groups[0]["lr"])
        record = self.engine.mean(record | self.validated())
        if self.options.early_stop is not None:
            self.options.early_stop.read(record)
        return record

    def step_schedule(self, record: Mapping[str, float]) -> None:
        """The learning-rate schedule, where it goes by epochs."""
        schedule, rule = self.trained.schedule, self.options.early_stop
        if schedule is None or self.options.schedule_every == "step":
            return
        if isinstance(schedule, ReduceLROnPlateau):
            self.stepper.step_schedule(rule.read(record) if rule else record["loss"])
        else:
            self.stepper.step_schedule()

    def validated(self) -> dict[str, float]:
        """The numbers of ``validate``, with the model in evaluation mode."""
        if self.validate is None:
            return {}
        model = self.trained.model
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                values = self.validate(model)
        finally:
            for module, mode in modes:
                module.training = mode
        prefix = "validation_"
        try:
            return {prefix + name.removeprefix(prefix): float(value) for name, value in values.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError):
            raise FlowBNNError(f"validate must return a dictionary of numbers, got {values!r:.100}") from None

    def save_step(self) -> None:
        """Write the checkpoint, unless the one that is there is of this very step."""
        if self.saved_step != self.position.step:
            self.save()

    def save(self) -> None:
        """Write the checkpoint; weights that are not finite never replace good ones."""
        if self.path is None or not self.main:
            return
        position = self.position
        self.stepper.settle(position)
        position.history.seconds = time.monotonic() - self.started
        broken = first_nonfinite_tensor(zip(self.trained.told_names, self.trained.parameters, strict=True))
        if broken is not None:
            raise FlowBNNError(f"parameter {broken!r} is not finite {position.words}{position.last_good}")
        now = {**host_state(), **(self.random_now or self.randomness.torch_state())}
        random = {"now": now, "epoch_start": self.random_start or {}}
        if self.kept_as is not None:
            keep_as(self.path, self.kept_as)
            self.kept_as = None
        scaler, epochs = self.engine.scaler_state(), self.options.epochs
        write_run(self.path, self.trained, position, random, scaler, self.extra, epochs)
        position.saved_in, self.saved_step = self.path, position.step

    def end_without_others(self, error: Exception, interrupts: Interrupts) -> None:
        """If another process has died, keep the last whole step and say what happened; else do nothing."""
        told, interrupts.ending = interrupts.ending, True  # from here on, being told to end changes nothing
        who = self.engine.lost(error)
        if who is None:
            interrupts.ending = told
            return
        if interrupts.waiting:
            raise KeyboardInterrupt
        raise FlowBNNError(f"{who} {self.position.words}, which ends the run; {self.saved_words()}") from None

    def saved_words(self) -> str:
        """Keep the last whole step, unless an update was torn apart, and say where the state is."""
        try:
            if not self.stepper.updating:
                self.save()
        except FlowBNNError as error:
            return str(error)
        saved = self.position.saved_in if self.main else self.path
        if saved is None or not saved.exists():
            return "nothing was saved"
        return f"its state is in '{saved}', resume=True (flowbnn run: --resume) goes on from there"

    def save_interrupted(self) -> None:
        """Save on Ctrl-C and say where the state is."""
        if self.path is not None and self.main:
            where = f"interrupted in epoch {self.position.epoch + 1}"
            print(f"flowbnn: {where}; {self.saved_words()}", file=sys.stderr)


def train(
    model: nn.Module,
    step: Step,
    optimizer: Optimizer,
    loader: Iterable[Any],
    options: TrainingOptions | None = None,
    *,
    schedule: LRScheduler | None = None,
    validate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    generators: Iterable[torch.Generator] = (),
    extra: Mapping[str, Any] | None = None,
    names_below: str = "",
) -> History:
    """Train ``model`` in place and return the record of the run.

    A run that is killed and resumed ends, on CPU processes, in the same weights to the bit: the checkpoint holds
    the model, the optimizer, the schedule, early stopping, the position within the epoch and every random state.
    (Not kept: what a data set draws inside ``persistent_workers``.) It may be resumed on another number of devices.

    Args:
        model: any module. It is put into training mode for the run and stays on the device it was trained on.
        step: ``step(model, batch, clock)`` returns the scalar loss and a dictionary of scalars to record, such as
            ``elbo``, ``log_likelihood`` and ``kl``. Its ``model`` may be wrapped by Lightning Fabric: call it as
            ``model(inputs)``, and use :func:`flowbnn.training.unwrap` for everything else.
        optimizer: any optimizer whose ``step`` needs no closure.
        loader: a ``DataLoader``, or anything that can be iterated once per epoch, such as a list of batches.
        options: a :class:`TrainingOptions`.
        schedule: stepped as ``options.schedule_every`` says. ``ReduceLROnPlateau`` goes by epochs, and by the value
            that early stopping watches, or else the loss.
        validate: called at the end of every epoch with the plain model in evaluation mode, without gradients; its
            numbers are recorded under ``validation_...``.
        generators: generators that the step draws from, to be kept in the checkpoint.
        extra: JSON values to keep in the checkpoint, such as the weight of the KL; a resumed run in which one of them has changed
            says so.
        names_below: a submodule's name that messages leave out: with ``"network"``, a layer ``network.fc1`` of the
            ``model`` is called ``fc1``, as the user who made the network calls it. Files keep the whole names.

    >>> network = nn.Linear(1, 1)
    >>> batches = [(torch.ones(4, 1), torch.zeros(4, 1))] * 5
    >>> def squared_error(model, batch, clock):
    ...     inputs, targets = batch
    ...     loss = (model(inputs) - targets).square().mean()
    ...     return loss, {"log_likelihood": -loss}
    >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    >>> history = train(network, squared_error, optimizer, batches, TrainingOptions(epochs=8))
    >>> history.epochs, history["loss"][-1] < 1e-3
    (8, True)
    """
    options = options or TrainingOptions()
    keep = dict(extra or {})
    _check(optimizer, loader, options, schedule, keep)
    rule = options.early_stop
    if rule is not None and validate is None and rule.monitor.startswith("validation_"):
        raise FlowBNNError(
            f"early stopping watches {rule.monitor!r}, but this run has no validation: give it validation data, or "
            "watch one of the training's own numbers, such as EarlyStop('loss')"
        )
    if names_below and names_below not in dict(model.named_modules()):
        raise FlowBNNError(f"names_below is {names_below!r}, which is no submodule of the model")
    trained = Trained(model, optimizer, schedule, names_below)
    return Run(trained, step, loader, options, validate, generators, keep).go()


def _check(
    optimizer: Optimizer,
    loader: Any,
    options: TrainingOptions,
    schedule: LRScheduler | None,
    extra: dict[str, Any],
) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise FlowBNNError("LBFGS needs a closure, which this loop does not give; use Adam or SGD")
    if isinstance(schedule, ReduceLROnPlateau) and options.schedule_every == "step":
        raise FlowBNNError("ReduceLROnPlateau looks at whole epochs: set schedule_every='epoch'")
    if not hasattr(loader, "__iter__"):
        raise FlowBNNError(
            f"the loader must be a DataLoader or a list of batches, got a {type(loader).__name__}"
        )
    if options.epochs > 1 and hasattr(loader, "__next__"):
        raise FlowBNNError(
            "the loader is an iterator, which serves one epoch only: pass a list or a DataLoader"
        )
    if loader_length(loader) == 0:
        raise FlowBNNError("the loader is empty: give it data, or drop_last=False if the data fill no batch")
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise FlowBNNError(f"extra must hold JSON values only ({error})") from None
