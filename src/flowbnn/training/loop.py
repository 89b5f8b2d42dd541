"""One loop for every method: an objective gives the loss of a batch, the loop does the rest."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flowbnn.batches import batch_size, check_finite_batch, fingerprint, named_tensors
from flowbnn.errors import FlowBNNError, warn
from flowbnn.training.checkpoint import State
from flowbnn.training.cuda_graph import make_recorder
from flowbnn.training.device import Process, connect, move_batch, preserve_training_modes
from flowbnn.training.distributed import Interrupts, Worker
from flowbnn.training.finite import Guard, dense
from flowbnn.training.options import Clock, TrainingOptions, check_arguments, check_result, length_of
from flowbnn.training.progress import Display, History, open_tensorboard, terminal
from flowbnn.training.randomness import RandomState, loader_generators, seed_all
from flowbnn.training.storage import check_writable

Validate = Callable[[], Mapping[str, float]]
END = object()  # of an epoch


def train(
    objective: nn.Module,
    optimizer: Optimizer,
    loader: Iterable[Any],
    options: TrainingOptions | None = None,
    *,
    schedule: LRScheduler | None = None,
    validate: Validate | None = None,
    settings: Mapping[str, Any] | None = None,
    structure: Mapping[str, Mapping[str, Any]] | None = None,
    name_prefix: str = "",
    num_epochs: Callable[[History], int] | None = None,
) -> History:
    """Minimise an objective over batches, in place, and return the record of the run.

    A run that is killed and resumed ends, on a CPU, in the same weights to the bit, except for what a data set draws inside
    ``persistent_workers``. It may be resumed on another number of devices.

    Args:
        objective: a module whose ``forward(batch, clock)`` returns the scalar loss of a batch and a dictionary of scalars to record,
            such as ``elbo``, ``log_likelihood`` and ``kl``. All that is trained is part of it (network, likelihood, noise). It stays on
            the device it was trained on. With an attribute ``capturable`` that is True it promises to read nothing of its clock but
            ``progress`` and to decide nothing on the host, so that a step may be recorded as a CUDA graph; its ``check_batch(batch)``,
            where it has one, then looks at the batches of the first epoch.
        optimizer: any optimizer of the objective's parameters whose ``step`` needs no closure.
        loader: a ``DataLoader``, or anything that can be iterated once per epoch, such as a list of batches.
        options: a :class:`TrainingOptions`.
        schedule: stepped as ``options.schedule_every`` says; ``ReduceLROnPlateau`` by what early stopping monitors, or else the loss.
        validate: called after every epoch, while the objective is in evaluation mode; its numbers are recorded as ``validation_...``.
        settings: plain values to keep in the checkpoint, such as the weight of the KL; a resumed run warns of those that have changed.
        structure: plain values of each layer that must not change when a run is resumed, such as the recipe of its noise.
        name_prefix: a submodule's name that messages leave out: with ``"network"``, a layer ``network.fc1`` is called ``fc1``.
        num_epochs: asked after every epoch and when a run is resumed, gives the number of epochs of the run from its record so far;
            ``options.epochs`` is then the most that there are.

    >>> class SquaredError(nn.Module):
    ...     def __init__(self, network):
    ...         super().__init__()
    ...         self.network = network
    ...     def forward(self, batch, clock):
    ...         inputs, targets = batch
    ...         loss = (self.network(inputs) - targets).square().mean()
    ...         return loss, {"log_likelihood": -loss}
    >>> objective = SquaredError(nn.Linear(1, 1))
    >>> batches = [(torch.ones(4, 1), torch.zeros(4, 1))] * 5
    >>> optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    >>> history = train(objective, optimizer, batches, TrainingOptions(epochs=8))
    >>> history.epochs, history["loss"][-1] < 1e-3
    (8, True)
    """
    options = options or TrainingOptions()
    kept = {"settings": settings or {}, "structure": structure or {}, "name_prefix": name_prefix}
    check_arguments(objective, optimizer, options, schedule, validate is not None)
    run = Run(objective, optimizer, loader, options, schedule, validate, num_epochs, kept)
    with run.open() as interrupts:
        while not run.finished:
            with interrupts:
                batches = run.begin_epoch()
            more = True
            while more:
                with interrupts:
                    more = run.step(batches)
            run.end_epoch(interrupts)
    if run.state.best_weights is not None:
        objective.load_state_dict(run.state.best_weights)
    return run.position.history


class Run:
    """One call of :func:`train`: what it is made of, and its parts in the order in which they happen."""

    def __init__(
        self,
        objective: nn.Module,
        optimizer: Optimizer,
        loader: Iterable[Any],
        options: TrainingOptions,
        schedule: LRScheduler | None,
        validate: Validate | None,
        num_epochs: Callable[[History], int] | None,
        kept: dict[str, Any],
    ) -> None:
        self.objective, self.optimizer, self.schedule = objective, optimizer, schedule
        self.options, self.validate, self.num_epochs = options, validate, num_epochs
        self.path: Path | None = options.checkpoint_path
        if self.path is not None:
            check_writable(self.path)
        self.process = process = Process(options) if connect(options) == 1 else Worker(options)
        self.main, self.on_host = process.rank == 0, process.device.type == "cpu"
        own = process.device if process.num_processes > 1 else None
        self.randomness = RandomState(loader_generators(loader), own)
        self.steps_per_epoch = length_of(loader)
        kept |= {"options": options, "steps_per_epoch": self.steps_per_epoch, "scaler": process.scaler}
        self.state = State(objective, optimizer, schedule, self.randomness, **kept)
        self.position, self.parameters = self.state.position, self.state.parameters
        self.module = process.wrap(objective)
        self.loader = process.share_out(loader)
        self.guard = Guard(self.state, process)
        self.recorder = make_recorder(objective, optimizer, options, process.device, process.num_processes)
        self.updating = False  # whether weights and position do not belong together
        self.batch: Any = END
        if options.resume and self.path is not None and process.agree(self.path.exists()):
            self.state.load(warn=self.main)
            self.plan()
            if process.num_processes == 1:
                self.state.compare_data(lambda: next(self.batches(0), END))
            if self.finished and self.state.random_now is not None:
                self.randomness.restore(self.state.random_now)  # what comes after the run draws on from there
        else:
            if options.seed is not None:
                seed_all(options.seed)
            if self.path is not None and self.main and not options.resume:
                self.state.keep_former()  # with resume, a file that is there now is of a run beside this one
        self.started = time.monotonic() - self.position.history.seconds

    @contextmanager
    def open(self) -> Iterator[Interrupts]:
        """Around all epochs: signals, the display, training mode, and what several processes share."""
        interrupts = Interrupts(terminate=self.process.num_processes > 1)
        folder = self.options.tensorboard if self.main else None
        console = terminal() if self.main and self.options.progress else None
        self.display: Display | None = None
        with ExitStack() as stack:
            self.tensorboard = open_tensorboard(folder, self.position.epoch + 1)
            if self.tensorboard is not None:
                stack.callback(self.tensorboard.close)
            interrupts.install()
            stack.callback(interrupts.remove)
            if console is not None:
                self.display = stack.enter_context(Display(self.options, self.steps_per_epoch, console))
            stack.enter_context(self.process.sharing(self.objective))
            stack.enter_context(preserve_training_modes(self.objective))
            self.objective.train()
            for part in self.objective.modules():
                if isinstance(part, _BatchNorm) and part.affine and not part.weight.requires_grad:
                    part.eval()  # whose weights are frozen: so are its statistics
            try:
                yield interrupts
            except BaseException as error:
                self.explain(error, interrupts)
                raise

    @property
    def finished(self) -> bool:
        """Whether there is no epoch left to do."""
        return self.position.history.stopped_early or self.position.epoch >= self.state.epochs

    def plan(self) -> None:
        """Ask how many epochs there are to be, which follows from the record alone: in every process, and when resumed, the same."""
        if self.num_epochs is not None:
            self.state.epochs = min(self.options.epochs, self.num_epochs(self.position.history))

    def begin_epoch(self) -> Iterator[Any]:
        """The epoch's batches, without those that are done."""
        position, state = self.position, self.state
        known = state.random_start or state.random_now
        if known is not None:
            self.randomness.restore(known)
        if self.process.num_processes > 1:
            # they have drawn alike, unless a layer or a data set of the user's drew as often as it had rows
            self.randomness.restore(self.process.agree(self.randomness.state()))
        if self.path is not None:
            state.random_start = state.random_start or self.randomness.state()
        batches = self.batches(position.epoch)
        for done in range(position.batches):
            if next(batches, END) is END:
                raise FlowBNNError(
                    f"'{self.path}' had done {position.batches} batches of epoch {position.epoch + 1}, but this loader has only "
                    f"{done}: give it the same data and batch size as before",
                    kind="checkpoint",
                )
        if position.batches and state.random_now is not None:
            self.randomness.restore(state.random_now)
        state.random_now = None
        return batches

    def batches(self, epoch: int) -> Iterator[Any]:
        """All batches of an epoch."""
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return iter(self.loader)

    def step(self, batches: Iterator[Any]) -> bool:
        """Loss, gradient and update of the next batch, or False; what is not finite ends the run before it reaches the weights."""
        position, process, options, guard = self.position, self.process, self.options, self.guard
        self.state.random_now = self.randomness.torch_state() if self.path is not None else None
        batch = self.batch = next(batches, END)
        if batch is END:
            self.state.random_now = None
            return False
        if position.step == 0 and process.num_processes == 1 and self.path is not None:
            self.state.data = {"random": self.state.random_start, "first": fingerprint(batch)}
        epochs, length = options.epochs, self.steps_per_epoch
        done = position.epoch / epochs if length is None else position.step / (length * epochs)
        clock = Clock(position.epoch, position.step, length, epochs, min(1.0, done))
        if guard.loss_gate is not None:
            guard.check_last_step(self.recorder)
        tensors = named_tensors(batch)
        rows = tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 1
        if self.on_host:
            check_finite_batch(batch, position.epoch, position.batches)
        for _, tensor in tensors:
            if tensor.device != process.device:
                batch = move_batch(batch, process.device)
                break
        if self.recorder is None or not self.replay(batch, clock):
            before = self.randomness.torch_state()
            for parameter in self.parameters:  # what zero_grad does, less the time of its profiling
                parameter.grad = None
            with process.autocast():
                result = self.module(batch, clock)
            if position.batches == 0:
                check_result(result)
            loss, logs = result
            if guard.loss_gate is not None:
                guard.loss_gate.ask(loss)
            elif not math.isfinite(loss.item()):
                guard.explain_loss(batch, clock, logs, before)
            weighted = loss if process.weight == 1.0 else loss * process.weight
            (weighted if process.scaler is None else process.scaler.scale(weighted)).backward()
            if guard.loss_gate is not None and not guard.loss_gate.finite():
                guard.explain_loss(batch, clock, logs, before)
            numbers: Mapping[str, Any] = {"loss": loss, **logs}
            if process.num_processes > 1:
                numbers = process.average(numbers)
            self.update()
            self.count(numbers, process.rows or rows)
        if self.schedule is not None and options.schedule_every == "step":
            self.schedule.step()
        position.step += 1
        position.batches += 1
        self.state.random_now = None
        self.updating = False
        if options.checkpoint_every is not None and position.step % options.checkpoint_every == 0:
            self.save()
        if self.display is not None and self.display.due():
            self.settle()
            self.display.update(position.epoch, position.step, self.means(), self.state.epochs)
        return True

    def count(self, numbers: Mapping[str, Any], rows: int) -> None:
        """Add the logs of so many examples; those on a GPU are summed there, so that no step waits for the device."""
        totals, weights = self.position.totals, self.position.weights
        for name, value in numbers.items():
            if isinstance(value, Tensor):
                value = value.detach().double() if value.is_cuda else value.item()
            totals[name] = totals.get(name, 0.0) + value * rows
            weights[name] = weights.get(name, 0.0) + rows

    def means(self) -> dict[str, float]:
        """The logs of this epoch so far, as means over its examples."""
        position = self.position
        return {name: float(total) / position.weights[name] for name, total in position.totals.items()}

    def update(self) -> None:
        """Clip the gradients and let the optimizer take its step."""
        largest, scaler = self.options.clip_gradient, self.process.scaler
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            message = "no parameter of the optimizer has a gradient"
            raise FlowBNNError(message, kind="call", argument="optimizer")
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.on_host and self.guard.nonfinite(gradients).item():
            self.guard.explain_gradient(str(self.position))
        if largest is not None:
            # the formula of torch.nn.utils.get_total_norm without its sorting by device, which costs more than the sum
            norm = torch.linalg.vector_norm(
                torch.stack(torch._foreach_norm([dense(one) for one in gradients]))
            )
            # NaN leaves the gradients as they are, so that the one at fault can be named
            clip_grads_with_norm_(self.parameters, largest, torch.where(torch.isnan(norm), 0.0, norm))
        self.updating = True
        if self.guard.gradient_gate is not None:
            self.guard.gradient_gate.update(gradients)
        elif scaler is not None:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()

    def replay(self, batch: Any, clock: Clock) -> bool:
        """One step by the recording; False where the batch does not fit it, or nothing can be recorded."""
        assert self.recorder is not None
        if self.recorder.take(batch, clock):
            self.updating = True
            return True
        if self.recorder.trouble:
            self.settle()
            words = f"{self.recorder.trouble}; steps are taken one by one"
            warn(words, kind="acceleration")
            self.recorder = None
        else:  # a step that is taken by itself must not follow a bad one
            self.guard.check_last_step(self.recorder, wait=True)
        return False

    def settle(self) -> None:
        """Wait for the device; bring the averages, which a recording keeps there, up to date."""
        self.guard.check_last_step(self.recorder, wait=True)
        if self.recorder is not None:
            self.count(*self.recorder.means())

    def end_epoch(self, interrupts: Interrupts) -> None:
        """Validation, the record, the schedule, early stopping and the checkpoint."""
        position, options = self.position, self.options
        if position.batches == 0:
            words = f"the loader gave no batch in epoch {position.epoch + 1}: is it empty, or an iterator, which serves one epoch only?"
            raise FlowBNNError(words, kind="loader")
        self.settle()
        self.process.synchronize(self.objective)
        self.state.random_now = self.randomness.state() if self.path is not None else None
        if self.validate is not None and self.state.saved_step != position.step:
            with interrupts:  # before validation, which may take long or fail: a resumed run begins with it
                self.save()
        record = self.means() | {"learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        if self.validate is not None:
            with preserve_training_modes(self.objective), torch.no_grad():
                self.objective.eval()
                values = self.validate()
            for name, value in values.items():
                record[f"validation_{name.removeprefix('validation_')}"] = float(value)
        record = self.process.agree(record)
        with interrupts:
            self.updating = True
            if self.schedule is not None and options.schedule_every == "epoch":
                watched = options.early_stop.read(record) if options.early_stop else record["loss"]
                self.schedule.step(*([watched] if isinstance(self.schedule, ReduceLROnPlateau) else []))  # type: ignore[arg-type]
            if options.early_stop is not None and position.watch(options.early_stop, record):
                self.state.best_weights = deepcopy(self.objective.state_dict())
            position.history.records.append(record)
            position.history.steps = position.step
            position.history.seconds = time.monotonic() - self.started
            position.epoch, position.batches = position.epoch + 1, 0
            self.plan()
            position.totals, position.weights = {}, {}
            self.state.random_start = self.state.random_now = None
            self.updating = False
            if options.checkpoint_every is None or self.finished:
                self.save()
            if self.tensorboard is not None:
                for name, value in record.items():
                    self.tensorboard.add_scalar(name, value, position.epoch)
        if self.display is not None:
            self.display.update(position.epoch, position.step, record, self.state.epochs)

    def save(self) -> None:
        """Write the checkpoint, from the first process."""
        if self.path is None or not self.main:
            return
        self.settle()
        self.guard.check_weights()
        self.position.history.seconds = time.monotonic() - self.started
        self.state.save()

    def explain(self, error: BaseException, interrupts: Interrupts) -> None:
        """Keep the last whole step where the run is interrupted or another process has died, and say what happened."""
        position, message = self.position, ""
        asked, interrupts.ending = interrupts.ending, True  # from here on SIGTERM changes nothing
        who = self.process.lost(error)
        if who is not None:
            message = f"{who} {position}, which ends the run; {self.saved_words()}"
        elif "more than 1 value per channel" in str(error) and batch_size(self.batch) == 1:
            message = (
                f"epoch {position.epoch + 1}, batch {position.batches + 1}: the batch has a single example, which BatchNorm cannot be "
                "trained on; give the loader drop_last=True or another batch size"
            )
        interrupts.ending = asked or who is not None
        if message:
            raise FlowBNNError(message, kind="worker lost" if who else "batch") from error
        if isinstance(error, KeyboardInterrupt) and self.path is not None and self.main:
            words = f"flowbnn: interrupted in epoch {position.epoch + 1}; {self.saved_words()}"
            print(words, file=sys.stderr)

    def saved_words(self) -> str:
        """Keep the last whole step, unless an update was torn apart, and say where the state is."""
        try:
            if not self.updating:
                self.save()
        except FlowBNNError as error:
            return str(error)
        if self.path is None or not self.path.exists() or (self.main and self.state.saved_step is None):
            return "nothing was saved"
        return f"its state is in '{self.path}', resume=True (flowbnn run: --resume) goes on from there"
