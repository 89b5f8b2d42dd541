"""What every method that trains by gradients shares: the options of a fit, the first look at the data, the training itself."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    as_loader,
    call,
    check_finite,
    count_data,
    device_of,
    dtype_of,
    evaluation_mode,
    move,
    rewrap_forward_errors,
    rows,
    split_batch,
)
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    learns_noise,
    make_likelihood,
)
from flowbnn.likelihoods.base import mean_log_prob
from flowbnn.noise import Recipe, noise_layers, weight_parameters
from flowbnn.options import Count, call_factory, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.prediction import check_rows, new_seed
from flowbnn.posterior.recording import Sigmoids
from flowbnn.regression import (
    TargetStatistics,
    noise_at_mean,
    outputs_and_targets,
    set_noise_scale,
    standardize_targets,
)
from flowbnn.training import Clock, History, TrainingOptions, train
from flowbnn.training.options import length_of
from flowbnn.training.randomness import preserve_rng_state

ROWS = 8  # of real-valued targets, which tell their noise
NOISE_RATE = 0.01  # of the logarithm of a Gaussian's noise, under Adam: halved or doubled within 70 steps
LikelihoodName = Likelihood | Literal["auto", "categorical", "bernoulli", "gaussian"]


@options(kw_only=True, of="fit")
class FitOptions(TrainingOptions):
    """What ``fit`` takes besides the network and the data: the options of the training run, and these.

    Args:
        likelihood: the observation model; ``"auto"`` takes classes for integer targets, a Gaussian with learned noise for real ones.
        num_data: number of training examples; taken from the loader where it knows.
        validation: a loader, whose negative log-likelihood and accuracy or error are recorded at every epoch.
    """

    likelihood: LikelihoodName = "auto"
    num_data: Count | None = None
    validation: Iterable[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "validation", as_loader(self.validation))

    def resolve_seed(self) -> int:
        """Returns the seed, or a random one from torch's generator if none is set."""
        return new_seed() if self.seed is None else self.seed

    def num_examples(self, loader: Iterable[Any]) -> int:
        """Returns the number of training examples."""
        number = count_data(loader) if self.num_data is None else self.num_data
        if not number:
            raise FlowBNNError("the loader gives no examples", kind="loader", argument="loader")
        return number

    def for_stage(self, name: str, description: str, **changes: Any) -> "FitOptions":
        """Returns the options of one of several training runs, which has its own file in the folder ``checkpoint``."""
        folder, board = self.checkpoint, self.tensorboard
        if folder is not None:
            changes["checkpoint"] = Path(str(folder).removesuffix(".safetensors")) / f"{name}.safetensors"
        if board is not None:
            changes["tensorboard"] = Path(board) / name
        return replace(self, description=description, **changes)


Forward = Callable[[Any], Tensor]
LossAndLogs = tuple[Tensor, dict[str, Tensor]]
SchedulerFactory = Callable[[torch.optim.Optimizer, int], Any]
Loss = Callable[[Forward, Any, Clock], LossAndLogs]


class Objective(nn.Module):
    """A network, its likelihood and the loss of a batch: what :func:`flowbnn.training.train` trains, saves and resumes.

    Under autocast the network alone computes in half precision; the loss is computed in float32.

    Args:
        network: or a module around it that holds other parameters, such as the spread of its weights.
        likelihood: the observation model.
        loss: ``loss(forward, batch, clock)`` returns the loss and a dictionary of logs; ``forward(inputs)`` runs the network.
        check_batch: looks at a batch on the host, where the loss decides nothing there and may be recorded as a CUDA graph.
        extra_state: what the loss collects on the way, to be kept in checkpoints.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: Likelihood,
        loss: Loss,
        check_batch: Callable[[Any], None] | None = None,
        extra_state: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.network, self.likelihood, self.loss = network, likelihood, loss
        self.capturable, self.check_batch, self.extra_state = (
            check_batch is not None,
            check_batch,
            extra_state,
        )

    def forward(self, batch: Any, clock: Clock) -> LossAndLogs:
        device = device_of(self.network).type
        if not torch.is_autocast_enabled(device):
            return self.loss(self.outputs, batch, clock)
        half = torch.get_autocast_dtype(device)

        def outputs(inputs: Any) -> Tensor:
            with torch.autocast(device, half):
                return self.outputs(inputs)

        with torch.autocast(device, enabled=False):
            return self.loss(outputs, batch, clock)

    def outputs(self, inputs: Any) -> Tensor:
        """What the network gives."""
        outputs = call(self.network, move(inputs, device_of(self.network), dtype_of(self.network)))
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def check_loader(loader: Any, use: str = "training", planned: str = "") -> None:
    """Refuse what is no loader, or an empty one, before anything is read from it; or one without a length for what is ``planned``."""
    reason = None
    if not hasattr(loader, "__iter__") or isinstance(loader, Tensor) or as_loader(loader) is not loader:
        reason = (
            f"{use} takes a loader of batches, such as flowbnn.data.TensorLoader(inputs, targets, batch_size=128, shuffle=True), "
            f"not a {type(loader).__name__}"
        )
    elif hasattr(loader, "__next__"):
        reason = f"the loader for {use} can be read only once; give a DataLoader, or a list of batches"
    elif isinstance(loader, list | tuple) and not loader:
        reason = f"the loader is empty: there is nothing for {use}"
    elif isinstance(loader, list | tuple) and split_batch(loader[0])[1] is None:
        known = "flowbnn.data.TensorLoader(inputs, targets) makes them"
        if isinstance(loader[0], Mapping):
            known = "where a dictionary holds its labels, give (batch, batch.pop('labels'))"
        reason = f"{use} needs batches of (inputs, targets), not inputs alone; {known}"
    elif planned and length_of(loader) is None:
        reason = f"{planned} is planned ahead and needs a loader with a length"
    if reason is not None:
        raise FlowBNNError(reason, kind="loader", argument="loader")


def first_batch(loader: Iterable[Any], seed: int | None = None, use: str = "training") -> tuple[Any, Any]:
    """Inputs and targets of the first batch; torch's generator is left as it was. The same seed gives the same batch."""
    return first_batches(loader, seed, 1, use)[0]


def first_batches(
    loader: Iterable[Any], seed: int | None = None, count: int = 1, use: str = "training"
) -> list[tuple[Any, Any]]:
    """Inputs and targets of the first batches: where targets are real numbers, so many that they have ``count`` rows, else one."""
    check_loader(loader, use)
    found: list[tuple[Any, Any]] = []
    with preserve_rng_state(loader, seed):
        for batch in loader:
            check_loader([batch], use)
            found.append(split_batch(batch))
            targets = found[-1][1]
            if use != "training" and len(targets) == 0:  # those of the training are named, one by one
                raise FlowBNNError(
                    f"the first batch has no examples: there is nothing for {use}",
                    kind="loader",
                    argument="loader",
                )
            count -= len(targets) if targets.is_floating_point() else count
            if count <= 0:
                return found
    check_loader(found, use)
    return found


def prepare(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: LikelihoodName,
    seed: int | None = None,
    trains: bool | None = True,
) -> tuple[Likelihood, Any, Callable[[Any], None]]:
    """The likelihood, checked on the first batch, that batch's inputs, and a check for other batches.

    A likelihood that is given is copied: its noise is learned, and it may serve another fit after this one.

    Args:
        trains: whether the weights are to be trained. Then a fresh network takes the units of real-valued targets that are far from
            its own (:mod:`flowbnn.regression`); one whose weights stay is left as it is. None leaves that to :func:`settle_units`.
    """
    batches = first_batches(loader, seed, ROWS)
    device = device_of(model)
    looked_at = [move(inputs, device, dtype_of(model)) for inputs, _ in batches]
    inputs, targets = looked_at[0], batches[0][1]

    def outputs_of_all() -> Tensor:
        return torch.cat([_outputs(model, some, "first batch") for some in looked_at])

    with evaluation_mode(model), noise_at_mean(model), torch.random.fork_rng(_cuda(device)):
        with Sigmoids() as sigmoids:
            outputs = _outputs(model, inputs, "first batch")
        by_sigmoid = sigmoids.gave(outputs)
        chosen = deepcopy(make_likelihood(likelihood, outputs, targets)).to(device)
        chosen.check(outputs, targets)
        if len(batches) > 1:
            outputs, targets = outputs_of_all(), torch.cat([truth for _, truth in batches])
            chosen.check(outputs, targets)
        if trains is not None and settle_units(model, chosen, loader, seed, trains):
            outputs = outputs_of_all()
    _warn_of_probabilities(chosen, outputs, by_sigmoid)
    chosen.start(outputs, targets.to(outputs.device))
    if learns_noise(chosen) and not bool(chosen.log_scale.any()):
        set_noise_scale(chosen, [(outputs, targets)])
    row = outputs[:1].detach()

    def check(batch: Any) -> None:
        _, truth = split_batch(batch)
        chosen.check(row.expand(len(truth), *row.shape[1:]), truth)

    return chosen, inputs, check


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _outputs(
    model: nn.Module, inputs: Any, what: str, check: Callable[[Tensor], Any] | None = None
) -> Tensor:
    """Outputs of a first batch, or one line that says why there are none, or why they do not pass the check."""
    with rewrap_forward_errors(inputs, f"the network fails on the {what}, of"):
        try:
            outputs = check_rows(call(model, inputs), rows(inputs))
            if check is not None:
                check(outputs)
            return outputs
        except FlowBNNError as error:
            raise FlowBNNError(f"the {what} does not fit: {error}", **error.fields) from error.__cause__


def _warn_of_probabilities(likelihood: Likelihood, outputs: Tensor, by_sigmoid: bool) -> None:
    """Likelihoods take logits: a softmax or a sigmoid at the end of the network would be applied twice."""
    inside = bool(((outputs >= 0) & (outputs <= 1)).all())
    evidence = ""
    if isinstance(likelihood, Categorical) and inside and bool(((outputs.sum(-1) - 1).abs() < 1e-3).all()):
        evidence = "every row sums to one"
    elif isinstance(likelihood, Bernoulli) and inside and by_sigmoid:
        evidence = "it ends in a sigmoid"
    if evidence:
        warn(
            f"the network gives probabilities ({evidence}), where logits are expected: it will be far less sure than it could be; "
            "leave out its last softmax or sigmoid",
            kind="probabilities",
        )


def settle_units(
    model: nn.Module, likelihood: Likelihood, loader: Iterable[Any], seed: int | None, trains: bool = True
) -> bool:
    """Let a network whose weights are trained take the units of the targets, where all of them are far from its own."""
    if not isinstance(likelihood, Gaussian):
        return False
    try:
        with preserve_rng_state(loader, seed), evaluation_mode(model), noise_at_mean(model):
            outputs, targets = map(torch.cat, zip(*outputs_and_targets(model, loader), strict=True))
        statistics = TargetStatistics.of(targets)
    except Exception:  # the training meets the same batches, and says what is wrong with them and where
        return False
    trains = trains and any(parameter.requires_grad for parameter in weight_parameters(model))
    return standardize_targets(model, likelihood, outputs, targets, statistics, trains)


def validator(
    posterior: Posterior, validation: Iterable[Any] | None, samples: int
) -> Callable[[], dict[str, float]] | None:
    """Predictive negative log-likelihood (and accuracy or error) on held-out data, with the same draws at every epoch.

    The first batch is tried before an epoch is spent.
    """
    if validation is None:
        return None
    inputs, targets = first_batch(validation, use="validation")
    check_finite(inputs, "validation inputs")
    check_finite(targets, "validation targets")
    model, device = posterior.model, device_of(posterior.model)
    with evaluation_mode(model), torch.random.fork_rng(_cuda(device)):
        inputs = move(inputs, device, dtype_of(model))
        check = partial(posterior.likelihood.check, targets=targets)
        _outputs(model, inputs, "first batch of the validation data", check)

    def validate() -> dict[str, float]:
        predictive, targets = posterior.predict_with_targets(validation, samples, seed=0, progress=False)
        return {name: float(value) for name, value in predictive.evaluate(targets).items()}

    return validate


def make_optimizer(
    groups: list[dict[str, Any]], optimizer: Callable[..., torch.optim.Optimizer] | None
) -> torch.optim.Optimizer:
    """The optimizer of the groups that have parameters; Adam unless given, fused for all the small vectors of the noise."""
    groups = [group for group in groups if group["params"]]
    if optimizer is None:
        return torch.optim.Adam(groups, fused=True)
    made: torch.optim.Optimizer = call_factory(
        optimizer, groups, name="optimizer", kind=torch.optim.Optimizer
    )
    return made


def total_steps(loader: Any, epochs: int, what: str) -> int:
    """The number of steps of a run, for what has to know it ahead."""
    check_loader(loader, planned=what)
    return len(loader) * epochs


def train_posterior(
    posterior: Posterior,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    options: FitOptions,
    schedule: SchedulerFactory | None = None,
    samples: int = 1,
    *,
    module: nn.Module | None = None,
    extra_state: nn.Module | None = None,
    settings: dict[str, Any] | None = None,
    check_batch: Callable[[Any], None] | None = None,
    num_epochs: Callable[[History], int] | None = None,
) -> History:
    """Train the network and the likelihood of a posterior as one, and leave the network ready to predict.

    Args:
        samples: of the predictions for the validation data.
        module: what is trained where that is more than the network: a module that holds it as ``network`` beside other parameters.
        settings: plain values of the method, kept in the checkpoint, so that a resumed run warns of those that have changed.
        extra_state, check_batch: as in :class:`Objective`.
        num_epochs: as in :func:`~flowbnn.training.train`.
    """
    validate = validator(posterior, options.validation, samples)
    model = posterior.model if module is None else module
    model.train()
    planned = None
    if schedule is not None:
        steps = total_steps(loader, options.epochs, "a learning-rate schedule")
        planned = call_factory(
            schedule, optimizer, steps, name="schedule", kind=torch.optim.lr_scheduler.LRScheduler
        )
    history = train(
        Objective(model, posterior.likelihood, loss, check_batch, extra_state),
        optimizer,
        loader,
        options,
        schedule=planned,
        validate=validate,
        settings=settings,
        structure={name: _settings_of(layer.recipe) for name, layer in noise_layers(posterior.model).items()},
        name_prefix="network" if module is None else "network.network",
        num_epochs=num_epochs,
    )
    model.eval()
    return history


def _settings_of(recipe: Any) -> dict[str, Any]:
    if not isinstance(recipe, Recipe):  # code, which does not travel to other processes
        return {"recipe": "FlowNoise"}
    # the batch axis is found out from the data
    settings = {one.name: getattr(recipe, one.name) for one in fields(recipe) if one.name != "batch_axis"}
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float | None)}
    return {"recipe": type(recipe).__name__, **plain}


def negative_log_likelihood(
    likelihood: Likelihood, forward: Forward, batch: Any, clock: Clock
) -> LossAndLogs:
    """The loss of a plain network, and its logs."""
    inputs, targets = split_batch(batch)
    outputs = forward(inputs)
    if should_check_targets(targets, clock):
        likelihood.check(outputs, targets)
    log_likelihood = mean_log_prob(likelihood, outputs, targets)
    return -log_likelihood, {"log_likelihood": log_likelihood.detach()}


def should_check_targets(targets: Tensor, clock: Clock) -> bool:
    """Whether targets are checked in this step: on a GPU, where that waits for the device, in the first epoch only."""
    return not clock.recording and (clock.epoch == 0 or targets.device.type == "cpu")
