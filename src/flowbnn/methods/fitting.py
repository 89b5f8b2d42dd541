"""Training that all methods trained by gradients share: the objective, held-out data, the optimizer and the training run."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    check_finite,
    device_of,
    dtype_of,
    first_parameter,
    move,
    split_weighted_batch,
)
from flowbnn.errors import FlowBNNError, requirement_error, warn
from flowbnn.likelihoods import Likelihood, learns_noise
from flowbnn.methods.data_summary import check_loader, count_examples, first_batch
from flowbnn.methods.fit_options import AnyFitOptions, FitOptions
from flowbnn.methods.loader_split import split_loader
from flowbnn.methods.preparation import cuda_devices, run_first_batch
from flowbnn.methods.schedule import Monitor, PlateauSchedule, SchedulerFactory, TrainingPlan, plan_training
from flowbnn.networks import evaluation_mode
from flowbnn.noise import Recipe, noise_layers
from flowbnn.objectives import mean_log_prob
from flowbnn.options import call_factory
from flowbnn.posterior.base import Posterior
from flowbnn.regression import with_fitted_noise
from flowbnn.training import Clock, EarlyStop, History
from flowbnn.training.loop import TrainingRun
from flowbnn.training.options import length_of

# learning rate of the logarithm of a noise scale: under Adam it halves or doubles within 70 steps
NOISE_LR = 0.01
# a tenth of fewer examples is one row, which says nothing
FEW_ROWS = 20
NetworkFunction = Callable[[Any], Tensor]
LossAndLogs = tuple[Tensor, dict[str, Tensor]]
Loss = Callable[[NetworkFunction, Any, Clock], LossAndLogs]


class NetworkObjective(nn.Module):
    """Base class for objectives: a network and a likelihood, as :func:`flowbnn.training.train` trains, saves and resumes them.

    Subclasses define ``forward(batch, clock)``, which returns the loss of a batch and a dictionary of logs.

    Args:
        network: Network, or a module that holds the network as ``network`` together with other parameters.
        likelihood: Likelihood of the targets.
        check_batch: Function that checks a batch on the host. If it is set, the loss makes no decision on the host, so that a step can
            be recorded as a CUDA graph.
        extra_state: Module with state that the loss collects, to be saved in checkpoints.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: Likelihood,
        check_batch: Callable[[Any], None] | None = None,
        extra_state: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.network, self.likelihood = network, likelihood
        self.check_batch, self.extra_state = check_batch, extra_state
        self.capturable = check_batch is not None

    @contextmanager
    def full_precision(self) -> Iterator[NetworkFunction]:
        """Disables autocast for the loss. Yields the function that runs the network, which alone computes in half precision."""
        weight = first_parameter(self.network)
        device = "cpu" if weight is None else weight.device.type
        if not torch.is_autocast_enabled(device):
            yield self.outputs
            return
        half = torch.get_autocast_dtype(device)

        def outputs(inputs: Any) -> Tensor:
            with torch.autocast(device, half):
                return self.outputs(inputs)

        with torch.autocast(device, enabled=False):
            yield outputs

    def is_ready(self, inputs: Any) -> bool:
        """Returns True if inputs are a tensor with the device and the dtype of the network."""
        weight = first_parameter(self.network)
        same_device = isinstance(inputs, Tensor) and weight is not None and inputs.device == weight.device
        return same_device and weight is not None and inputs.dtype == weight.dtype

    def outputs(self, inputs: Any) -> Tensor:
        """Returns the outputs of the network, at least in single precision."""
        if not self.is_ready(inputs):
            inputs = move(inputs, device_of(self.network), dtype_of(self.network))
        outputs = call(self.network, inputs)
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


class Objective(NetworkObjective):
    """Objective of a network whose loss is a function.

    Args:
        network: Network, or a module that holds the network as ``network`` together with other parameters.
        likelihood: Likelihood of the targets.
        loss: Function ``loss(forward, batch, clock)`` that returns the loss and a dictionary of logs. ``forward(inputs)`` runs the
            network.
        check_batch: Function that checks a batch on the host, see :class:`NetworkObjective`.
        extra_state: Module with state that the loss collects, to be saved in checkpoints.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: Likelihood,
        loss: Loss,
        check_batch: Callable[[Any], None] | None = None,
        extra_state: nn.Module | None = None,
    ) -> None:
        super().__init__(network, likelihood, check_batch, extra_state)
        self.loss = loss

    def forward(self, batch: Any, clock: Clock) -> LossAndLogs:
        with self.full_precision() as outputs:
            return self.loss(outputs, batch, clock)


def hold_out(
    loader: Iterable[Any], options: AnyFitOptions, fold: int = 0
) -> tuple[Iterable[Any], AnyFitOptions]:
    """Splits off held-out data if ``validation`` is a fraction.

    A warning is raised if the loader cannot be split. Fewer than :data:`FEW_ROWS` examples are not split.

    Args:
        loader: Batches of ``(inputs, targets)``.
        options: Options of the fit.
        fold: Index of the held-out block, see :class:`~flowbnn.methods.loader_split.RowSplit`.

    Returns:
        The training data, and options whose ``validation`` is a loader or None.
    """
    fraction = options.validation
    if not isinstance(fraction, float):
        return loader, options
    nothing = replace(options, validation=None)
    check_loader(loader)
    try:
        training, held_out = split_loader(loader, fraction, fold=fold)
    except FlowBNNError as error:
        warn(f"{error}, or to None", kind="split")
        return loader, nothing
    num_data = options.num_data
    count = count_examples(training)
    if count + count_examples(held_out) < FEW_ROWS:
        return loader, nothing
    if num_data is not None:
        num_data = max(1, round(num_data * (1.0 - fraction)))
    return training, replace(options, validation=held_out, num_data=num_data)


def plan_fit(
    epochs: int | None,
    schedule: SchedulerFactory | PlateauSchedule | Literal["cosine"] | None,
    loader: Iterable[Any],
    options: FitOptions,
    monitor: Monitor = "elbo",
    warmup: float = 0.0,
    stops_early: bool = True,
) -> tuple[TrainingPlan, FitOptions]:
    """Returns the length and the schedule of a fit, and its options with the largest number of epochs.

    With held-out data, a fit that stops early ends with the weights of the best epoch.

    Args:
        epochs: Number of epochs, or None to train until a plateau.
        schedule: Learning-rate schedule, see :func:`~flowbnn.methods.schedule.plan_training`.
        loader: Training data.
        options: Options of the fit.
        monitor: Name of the recorded value that a plateau is found in.
        warmup: Fraction of the run in which the weight of the KL divergence grows.
        stops_early: If True, a fit without a rule for early stopping gets one, unless its number of epochs is set.
    """
    plan = plan_training(epochs, schedule, length_of(loader), monitor, warmup)
    early_stop = options.early_stop
    if stops_early and epochs is None and early_stop is None and options.validation_loader is not None:
        early_stop = EarlyStop("validation_nll", patience=max(10, 2 * plan.plateau.window))
    return plan, replace(options, epochs=plan.epochs, early_stop=early_stop)


def make_validator(
    posterior: Posterior, validation: Iterable[Any] | None, samples: int, fits_noise: bool
) -> Callable[[], dict[str, float]] | None:
    """Returns a function that evaluates a posterior on held-out data, with the same draws at every call.

    The first batch is evaluated at once, so that errors appear before training.

    During the training of a regression the noise shrinks with the residuals of the training data. The NLL of held-out data then rises
    while their error still falls. With ``fits_noise``, all metrics are therefore those of the noise that fits the held-out data.

    Args:
        posterior: Posterior to evaluate.
        validation: Loader of held-out data, or None.
        samples: Number of networks per prediction.
        fits_noise: If True, learned noise is fitted to the held-out data for the evaluation.
    """
    if validation is None:
        return None
    inputs, targets = first_batch(validation, "validation")
    check_finite(inputs, "validation inputs")
    check_finite(targets, "validation targets")
    model, device = posterior.model, device_of(posterior.model)
    with evaluation_mode(model), torch.random.fork_rng(cuda_devices(device)):
        inputs = move(inputs, device, dtype_of(model))
        check = partial(posterior.likelihood.check, targets=targets)
        run_first_batch(model, inputs, "first validation batch", check)

    def validate() -> dict[str, float]:
        fits = fits_noise and learns_noise(posterior.likelihood)
        predictive, targets = posterior.predict_with_targets(
            validation, samples, seed=0, progress=False, keep_samples=True if fits else "auto"
        )
        if fits:
            predictive = with_fitted_noise(predictive, torch.as_tensor(targets))
        return {name: float(value) for name, value in predictive.evaluate(targets).items()}

    return validate


def make_optimizer(
    groups: list[dict[str, Any]], optimizer: Callable[..., torch.optim.Optimizer] | None
) -> torch.optim.Optimizer:
    """Returns an optimizer of the parameter groups, without empty groups.

    Args:
        groups: Parameter groups.
        optimizer: Function from parameter groups to an optimizer. Fused Adam by default, which is fast for many small vectors.
    """
    groups = [group for group in groups if group["params"]]
    if optimizer is None:
        complex_weights = any(value.is_complex() for group in groups for value in group["params"])
        return torch.optim.Adam(groups, fused=not complex_weights)  # fused kernels support real numbers only
    result: torch.optim.Optimizer = call_factory(
        optimizer, groups, name="optimizer", kind=torch.optim.Optimizer
    )
    if isinstance(result, torch.optim.SparseAdam):
        hint = "use torch.optim.Adam, which trains embeddings with sparse=True as well"
        raise requirement_error("SparseAdam", "sparse gradients", "dense ones", hint, argument="optimizer")
    return result


def total_steps(loader: Any, epochs: int, needs_length: str) -> int:
    """Returns the number of optimizer steps of a run.

    Args:
        loader: Loader with a length.
        epochs: Number of epochs.
        needs_length: Feature that needs the number, for the message if the loader has no length.
    """
    check_loader(loader, needs_length=needs_length)
    return len(loader) * epochs


def make_training_run(
    posterior: Posterior,
    objective: NetworkObjective,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    options: FitOptions,
    schedule: SchedulerFactory | None = None,
    samples: int = 1,
    *,
    fits_noise: bool = True,
    settings: dict[str, Any] | None = None,
    num_epochs: Callable[[History], int] | None = None,
) -> TrainingRun:
    """Returns the training run of a posterior. Its ``train()`` changes the network and the likelihood in place.

    The network is in evaluation mode before and after the run.

    Args:
        posterior: Posterior whose network and likelihood are trained.
        objective: Objective of the network, or of a module that holds it as ``network``.
        optimizer: Optimizer of all trained parameters.
        loader: Batches of ``(inputs, targets)``.
        options: Options of the fit.
        schedule: Function from the optimizer and the number of steps to a learning-rate scheduler.
        samples: Number of networks per prediction on the validation data.
        fits_noise: If True, learned noise is fitted to the validation data for their metrics.
        settings: Settings of the method that are saved in the checkpoint. A resumed run warns if they have changed.
        num_epochs: Function from the history to the number of epochs, see :func:`~flowbnn.training.train`.
    """
    validate = make_validator(posterior, options.validation_loader, samples, fits_noise)
    objective.network.eval()
    scheduler = None
    if schedule is not None:
        steps = total_steps(loader, options.epochs, "a learning-rate schedule")
        kind = torch.optim.lr_scheduler.LRScheduler
        scheduler = call_factory(schedule, optimizer, steps, name="schedule", kind=kind)
    return TrainingRun(
        objective,
        optimizer,
        loader,
        options,
        schedule=scheduler,
        validate=validate,
        settings=settings,
        structure={
            name: _plain_settings(layer.recipe) for name, layer in noise_layers(posterior.model).items()
        },
        name_prefix="network" if objective.network is posterior.model else "network.network",
        num_epochs=num_epochs,
    )


def _plain_settings(recipe: Any) -> dict[str, Any]:
    """Returns the settings of a recipe that a checkpoint stores."""
    if not isinstance(recipe, Recipe):  # a FlowNoise is code, which cannot be stored
        return {"recipe": "FlowNoise"}
    # the batch axis follows from the data
    names = [field.name for field in fields(recipe) if field.name != "batch_axis"]
    settings = {name: getattr(recipe, name) for name in names}
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float | None)}
    return {"recipe": type(recipe).__name__, **plain}


def negative_log_likelihood(
    likelihood: Likelihood, forward: NetworkFunction, batch: Any, clock: Clock
) -> LossAndLogs:
    """Returns the loss of a network without noise, and its logs. A partial with the likelihood is a loss of :class:`Objective`."""
    inputs, targets, weights = split_weighted_batch(batch)
    outputs = forward(inputs)
    if should_check_targets(targets, clock):
        likelihood.check(outputs, targets)
    log_likelihood = mean_log_prob(likelihood, outputs, targets, weights)
    return -log_likelihood, {"log_likelihood": log_likelihood.detach()}


def likelihood_not_finite(
    place: str = "at these weights; scale the inputs, or train again", argument: str | None = "network"
) -> FlowBNNError:
    """Returns the error for a log-likelihood or a gradient that is not finite.

    Args:
        place: Weights or noise where this happens, and advice.
        argument: Argument at fault.
    """
    message = f"the log-likelihood or its gradient is not finite {place}"
    return FlowBNNError(message, kind="not finite", argument=argument)


def should_check_targets(targets: Tensor, clock: Clock) -> bool:
    """Returns True if the targets are checked in this step. A check waits for the GPU, so there only the first epoch is checked."""
    return not clock.recording and (clock.epoch == 0 or targets.device.type == "cpu")
