"""The training loop of every method. An objective computes the loss of a batch, and the loop does everything else."""

import math
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

from flowbnn.batches import check_finite_tensors, fingerprint, named_tensors
from flowbnn.errors import FlowBNNError, warn
from flowbnn.training.checkpoint import RunState
from flowbnn.training.compatibility import move_optimizer_state
from flowbnn.training.cuda_graph import make_recorder
from flowbnn.training.device import Process, connect, move_batch, preserve_training_modes
from flowbnn.training.distributed import Worker
from flowbnn.training.finite import FiniteGuard
from flowbnn.training.history import History
from flowbnn.training.interrupts import Interrupts, explain_interruption
from flowbnn.training.logs import open_log
from flowbnn.training.options import Clock, Epoch, TrainingOptions, check_arguments, check_result, length_of
from flowbnn.training.progress import TrainingDisplay, terminal
from flowbnn.training.randomness import RandomState, loader_generators, seed_all
from flowbnn.training.storage import check_writable

Validate = Callable[[], Mapping[str, float]]
NumEpochs = Callable[[History], int]
END = object()  # marks the end of an epoch


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
    num_epochs: NumEpochs | None = None,
) -> History:
    """Minimizes an objective over batches, in place, and returns the record of the run.

    A run that is killed and resumed on a CPU ends in bitwise equal weights. The exception is randomness that a data set draws inside
    ``persistent_workers``. A run may be resumed on another number of devices.

    Args:
        objective: Module whose ``forward(batch, clock)`` returns the scalar loss of a batch and a dictionary of scalars to record, such
            as ``elbo``, ``log_likelihood`` and ``kl``. It contains everything that is trained (network, likelihood, noise) and stays on
            the device it was trained on. If its attribute ``capturable`` is True, a step may be recorded as a CUDA graph.
            The objective must then read only ``progress`` of its clock, and must not decide anything on the host. Its method
            ``check_batch(batch)``, if there is one, is called for the batches of the first epoch.
        optimizer: Optimizer of the objective's parameters whose ``step`` needs no closure.
        loader: ``DataLoader``, or any object that can be iterated once per epoch, such as a list of batches.
        options: Options of the run.
        schedule: Learning-rate schedule, stepped at every step or epoch (``options.schedule_every``). ``ReduceLROnPlateau`` reads the
            value that early stopping monitors, or else the loss.
        validate: Function called after every epoch with the objective in evaluation mode. Its values are recorded as
            ``validation_...``.
        settings: Plain values to store in the checkpoint, such as the weight of the KL. A resumed run warns if they have changed.
        structure: Plain values of each layer that must not change when a run is resumed, such as the recipe of its noise.
        name_prefix: Name of a submodule that messages leave out. With ``"network"``, a layer ``network.fc1`` is called ``fc1``.
        num_epochs: Function that returns the number of epochs of the run from its record so far. It is called after every epoch and
            when a run is resumed. ``options.epochs`` is then the largest number.

    Returns:
        Record of the run, epoch by epoch.

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
    run = TrainingRun(
        objective,
        optimizer,
        loader,
        options or TrainingOptions(),
        schedule=schedule,
        validate=validate,
        settings=settings,
        structure=structure,
        name_prefix=name_prefix,
        num_epochs=num_epochs,
    )
    return run.train()


class TrainingRun:
    """Training run of an objective. The arguments are those of :func:`train`."""

    def __init__(
        self,
        objective: nn.Module,
        optimizer: Optimizer,
        loader: Iterable[Any],
        options: TrainingOptions,
        *,
        schedule: LRScheduler | None = None,
        validate: Validate | None = None,
        settings: Mapping[str, Any] | None = None,
        structure: Mapping[str, Mapping[str, Any]] | None = None,
        name_prefix: str = "",
        num_epochs: NumEpochs | None = None,
    ) -> None:
        check_arguments(objective, optimizer, options, schedule, validate is not None)
        self.objective, self.optimizer, self.schedule = objective, optimizer, schedule
        self.options, self.validate, self.num_epochs = options, validate, num_epochs
        self.path: Path | None = options.checkpoint_path
        if self.path is not None:
            check_writable(self.path)
        self.process = process = Process(options) if connect(options) == 1 else Worker(options)
        self.is_main, self.on_cpu = process.rank == 0, process.device.type == "cpu"
        self.random = RandomState(
            loader_generators(loader), process.device if process.num_processes > 1 else None
        )
        self.steps_per_epoch = length_of(loader) or None  # a loader with batches may claim a length of zero
        self.state = RunState(
            objective,
            optimizer,
            schedule,
            self.random,
            options=options,
            steps_per_epoch=self.steps_per_epoch,
            scaler=process.scaler,
            settings=settings or {},
            structure=structure or {},
            name_prefix=name_prefix,
        )
        self.position, self.parameters = self.state.position, self.state.parameters
        self.module = process.wrap(objective)
        move_optimizer_state(optimizer)
        self.loader = process.shard(loader)
        self.guard = FiniteGuard(self.state, process)
        self.recorder = make_recorder(objective, optimizer, options, process.device, process.num_processes)
        self.is_updating = False  # True while weights and position may disagree
        self.batch: Any = END
        self._begin()
        self.start_time = time.monotonic() - self.position.history.seconds

    def _begin(self) -> None:
        """Loads the checkpoint of a resumed run, or seeds a new one."""
        options, process, state = self.options, self.process, self.state
        if options.resume and self.path is not None and process.broadcast(self.path.exists()):
            state.load(warn=self.is_main)
            self.update_num_epochs()
            if process.num_processes == 1:
                state.warn_changed_data(lambda: next(self.iterate_epoch(0), END))
            if self.is_finished and state.last_step_rng is not None:
                self.random.restore(state.last_step_rng)  # code after the run continues from there
            return
        if options.seed is not None:
            seed_all(options.seed)
        # with resume=True, a file that appeared since belongs to a concurrent run
        if self.path is not None and self.is_main and not options.resume:
            state.warn_unfinished()

    def train(self) -> History:
        """Takes all steps of the run and returns its record."""
        with self.run_context() as interrupts:
            while not self.is_finished:
                with interrupts.defer():
                    batches = self.begin_epoch()
                    while self.step(batches) and interrupts.pending is None:
                        pass
                self.end_epoch(interrupts)
        if self.state.best_weights is not None:
            self.objective.load_state_dict(self.state.best_weights)
        return self.position.history

    @contextmanager
    def run_context(self) -> Iterator[Interrupts]:
        """Context manager of all epochs: signals, display, training mode and synchronization of the processes."""
        interrupts = Interrupts(terminate=self.process.num_processes > 1)
        console = terminal() if self.is_main and self.options.progress else None
        self.display: TrainingDisplay | None = None
        with ExitStack() as stack:
            self.log = open_log(self.options.log if self.is_main else None, self.position.history)
            if self.log is not None:
                stack.callback(self.log.close)
            interrupts.install()
            stack.callback(interrupts.remove)
            if console is not None:
                display = TrainingDisplay(
                    self.options, self.steps_per_epoch, console, self.position.epoch, self.position.step
                )
                self.display = stack.enter_context(display)
            stack.enter_context(self.process.synchronized_layers(self.objective))
            stack.enter_context(preserve_training_modes(self.objective))
            self.objective.train()
            for module in self.objective.modules():
                if isinstance(module, _BatchNorm) and module.affine and not module.weight.requires_grad:
                    module.eval()  # frozen weights imply frozen statistics
            try:
                yield interrupts
            except BaseException as error:
                explain_interruption(self, error, interrupts)
                raise

    @property
    def is_finished(self) -> bool:
        """True if no epoch is left."""
        return self.position.history.stopped_early or self.position.epoch >= self.state.epochs

    def update_num_epochs(self) -> None:
        """Updates the number of epochs, which depends on the record only and is the same in all processes."""
        if self.num_epochs is not None:
            self.state.epochs = min(self.options.epochs, self.num_epochs(self.position.history))

    def begin_epoch(self) -> Iterator[Any]:
        """Restores the random state of the epoch and returns its remaining batches."""
        position, state = self.position, self.state
        random_state = state.epoch_start_rng or state.last_step_rng
        if random_state is not None:
            self.random.restore(random_state)
        if self.process.num_processes > 1:
            # the states are equal unless a user's layer or data set draws as often as it has rows
            self.random.restore(self.process.broadcast(self.random.state()))
        if self.path is not None:
            state.epoch_start_rng = state.epoch_start_rng or self.random.state()
        batches = self.iterate_epoch(position.epoch)
        for number in range(position.batches):
            if next(batches, END) is END:
                place = f"batch {position.batches} of epoch {position.epoch + 1}"
                text = f"'{self.path}' is from {place}, this loader has {number}; restore it, or use resume=False"
                raise FlowBNNError(text, kind="checkpoint", argument="loader")
        if position.batches and state.last_step_rng is not None:
            self.random.restore(state.last_step_rng)
        state.last_step_rng = None
        return batches

    def iterate_epoch(self, epoch: int) -> Iterator[Any]:
        """Returns all batches of an epoch."""
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return iter(self.loader)

    def step(self, batches: Iterator[Any]) -> bool:
        """Takes one step on the next batch. Returns False at the end of the epoch.

        A loss or gradient that is not finite ends the run before it reaches the weights.
        """
        position, process, guard = self.position, self.process, self.guard
        batch, rows = self.next_batch(batches)
        if batch is END:
            return False
        epochs, length = self.options.epochs, self.steps_per_epoch
        progress = position.epoch / epochs if length is None else position.step / (length * epochs)
        clock = Clock(position.epoch, position.step, length, epochs, min(1.0, progress))
        if self.recorder is not None and self.replay(batch, clock):
            self.finish_step()
            return True
        random_state = {
            "torch": torch.get_rng_state(),
            "cuda": [] if self.on_cpu else self.random.cuda_state(),
        }
        for parameter in self.parameters:  # faster than zero_grad, which records a profiler event
            parameter.grad = None
        with process.autocast():
            result = self.module(batch, clock)
        if position.batches == 0:
            check_result(result)
        loss, logs = result
        if guard.loss_check is not None:
            guard.loss_check.start(loss)
        elif not math.isfinite(loss.item()):
            guard.fail_on_loss(batch, clock, logs, random_state)
        weighted_loss = loss if process.loss_weight == 1.0 else loss * process.loss_weight
        (weighted_loss if process.scaler is None else process.scaler.scale(weighted_loss)).backward()
        if guard.loss_check is not None and not guard.loss_check.is_finite():
            guard.fail_on_loss(batch, clock, logs, random_state)
        values: Mapping[str, Any] = {"loss": loss, **logs}
        if process.num_processes > 1:
            values = process.average(values)
        self.update()
        self.add_to_totals(values, process.global_rows or rows)
        self.finish_step()
        return True

    def next_batch(self, batches: Iterator[Any]) -> tuple[Any, int]:
        """Returns the next batch on the device and its number of rows, or ``END``."""
        position, state = self.position, self.state
        state.last_step_rng = self.random.torch_state() if self.path is not None else None
        batch = self.batch = next(batches, END)
        if batch is END:
            state.last_step_rng = None
            return END, 0
        if position.step == 0 and self.process.num_processes == 1 and self.path is not None:
            state.first_batch = {"random": state.epoch_start_rng, "fingerprint": fingerprint(batch)}
        if self.guard.loss_check is not None:
            self.guard.check_last_step(self.recorder)
        tensors = named_tensors(batch)
        if self.on_cpu:
            check_finite_tensors(tensors, position.epoch, position.batches)
        for _, tensor in tensors:
            if tensor.device != self.process.device or tensor.is_inference():
                batch = move_batch(batch, self.process.device)
                break
        # the targets are last; their number is that of the examples, also if the inputs are a graph
        return batch, tensors[-1][1].shape[0] if tensors and tensors[-1][1].dim() else 1

    def update(self) -> None:
        """Clips the gradients and steps the optimizer."""
        max_norm, scaler = self.options.clip_gradient, self.process.scaler
        gradients, dense = [], []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None:
                gradients.append(gradient)
                dense.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
        if not gradients:
            text = "no parameter of the optimizer has a gradient"
            raise FlowBNNError(text, kind="gradient", argument="optimizer")
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.on_cpu or max_norm is not None:
            # the formula of torch.nn.utils.get_total_norm without its grouping by device, which costs more than the sum
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense)))
            if self.on_cpu and not math.isfinite(norm.item()):
                self.guard.fail_on_gradient(str(self.position))
            if max_norm is not None:
                # a norm of NaN leaves the gradients unchanged, so that the one at fault can be named
                clip_grads_with_norm_(self.parameters, max_norm, torch.where(torch.isnan(norm), 0.0, norm))
        self.is_updating = True
        if self.guard.gradient_check is not None:
            self.guard.gradient_check.update(gradients)
        elif scaler is not None:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()

    def add_to_totals(self, values: Mapping[str, Any], rows: int) -> None:
        """Adds the values of a batch to the totals of the epoch, without waiting for a GPU."""
        totals, weights = self.position.totals, self.position.weights
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = value.detach().double() if value.is_cuda else value.item()
            totals[name] = totals.get(name, 0.0) + value * rows
            weights[name] = weights.get(name, 0.0) + rows

    def finish_step(self) -> None:
        """Advances the schedule and the position, and saves and shows them if due."""
        position, options = self.position, self.options
        if self.schedule is not None and options.schedule_every == "step":
            self.schedule.step()
        position.step += 1
        position.batches += 1
        self.state.last_step_rng = None
        self.is_updating = False
        if options.checkpoint_every is not None and position.step % options.checkpoint_every == 0:
            self.save()
        if self.display is not None and self.display.is_due():
            self.synchronize()
            self.display.update(position.epoch, position.step, self.means(), self.state.epochs)

    def means(self) -> dict[str, float]:
        """Returns the recorded values of this epoch so far, as means over its examples."""
        position = self.position
        return {name: float(total) / position.weights[name] for name, total in position.totals.items()}

    def replay(self, batch: Any, clock: Clock) -> bool:
        """Takes one step by the recorded CUDA graph. Returns False if the batch does not fit it or recording fails."""
        assert self.recorder is not None
        if self.recorder.step(batch, clock):
            self.is_updating = True
            return True
        if self.recorder.failure:
            self.synchronize()
            warn(self.recorder.failure, kind="acceleration")
            self.recorder = None
        else:  # a step that is not recorded must not follow one with a gradient that is not finite
            self.guard.check_last_step(self.recorder, wait=True)
        return False

    def synchronize(self) -> None:
        """Waits for the device, and adds the values that a recorder stores there to the totals."""
        self.guard.check_last_step(self.recorder, wait=True)
        if self.recorder is not None:
            self.add_to_totals(*self.recorder.means())

    def end_epoch(self, interrupts: Interrupts) -> None:
        """Validates, records the epoch, and applies the schedule, early stopping and the checkpoint."""
        position = self.position
        if position.batches == 0:
            text = f"epoch {position.epoch + 1} has no batches; iterators serve only one"
            raise FlowBNNError(text, kind="loader", argument="loader")
        self.synchronize()
        self.process.synchronize_buffers(self.objective)
        self.state.last_step_rng = self.random.state() if self.path is not None else None
        if (self.validate is not None or self.options.callbacks) and self.state.saved_step != position.step:
            # validation and callbacks may take long or fail, and are repeated if the run is resumed
            with interrupts.defer():
                self.save()
        record = self.means() | {"learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        if self.validate is not None:
            with preserve_training_modes(self.objective), torch.no_grad():
                self.objective.eval()
                values = self.validate()
            for name, value in values.items():
                record[f"validation_{name.removeprefix('validation_')}"] = float(value)
        record = self.process.broadcast(record)
        stop = False
        if self.options.callbacks:
            stop = self.process.broadcast(self.is_main and self._call_callbacks(record))
        with interrupts.defer():
            self._record_epoch(record, stop)
        if self.display is not None:
            self.display.update(position.epoch, position.step, record, self.state.epochs)

    def _call_callbacks(self, record: dict[str, float]) -> bool:
        """Calls all callbacks with the record of this epoch. Returns True if one of them returns True."""
        epoch = Epoch(
            self.position.epoch + 1,
            self.state.epochs,
            dict(record),
            time.monotonic() - self.start_time,
            self.options.description,
            self.objective.get_submodule(self.state.name_prefix),
        )
        state = self.random.state()
        with preserve_training_modes(self.objective):
            self.objective.eval()
            results = [callback(epoch) for callback in self.options.callbacks]
        self.random.restore(state)
        return any(map(_is_true, results))

    def _record_epoch(self, record: dict[str, float], stop: bool) -> None:
        """Ends an epoch: schedule, early stopping, record and checkpoint. The run ends if ``stop``."""
        position, options, state = self.position, self.options, self.state
        self.is_updating = True
        if self.schedule is not None and options.schedule_every == "epoch":
            metric = options.early_stop.read(record) if options.early_stop else record["loss"]
            self.schedule.step(*([metric] if isinstance(self.schedule, ReduceLROnPlateau) else []))  # type: ignore[arg-type]
        if options.early_stop is not None and position.update_best(options.early_stop, record):
            state.best_weights = deepcopy(self.objective.state_dict())
        if stop:
            position.stopped_by_callback = position.history.stopped_early = True
        position.history.records.append(record)
        position.history.steps = position.step
        position.history.seconds = time.monotonic() - self.start_time
        position.epoch, position.batches = position.epoch + 1, 0
        self.update_num_epochs()
        position.totals, position.weights = {}, {}
        state.epoch_start_rng = state.last_step_rng = None
        self.is_updating = False
        if options.checkpoint_every is None or self.is_finished:
            self.save()
        if self.log is not None:
            self.log.write(position.history)

    def save(self) -> None:
        """Writes the checkpoint on the main process."""
        if self.path is None or not self.is_main:
            return
        self.synchronize()
        self.guard.check_weights()
        self.position.history.seconds = time.monotonic() - self.start_time
        self.state.save()


def _is_true(result: Any) -> bool:
    """Returns True for True, and for the same value of numpy or torch. Other results, such as numbers, do not count."""
    is_flag = str(getattr(result, "dtype", "")) in ("bool", "torch.bool")
    return result is True or (is_flag and bool(result))
