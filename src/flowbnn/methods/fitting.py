"""What every method that trains by gradients shares."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from inspect import signature
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning, nearest, told
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, make_likelihood
from flowbnn.noise import Recipe, noise_layers
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.batches import apply, call, check_finite, failure, move, split_batch
from flowbnn.posterior.noise_sampler import device_of, dtype_of, evaluating
from flowbnn.posterior.point import PointPosterior
from flowbnn.training import Clock, History, TrainingOptions, train
from flowbnn.training.randomness import loader_generators

__all__ = [
    "Bundle",
    "Objective",
    "check_loader",
    "check_optimizer",
    "check_rate",
    "check_schedule",
    "checked_validation",
    "first_batch",
    "fit_point",
    "optimizer_for",
    "prepare",
    "run",
    "run_options",
    "undisturbed",
    "validator",
]

FEW, FAR = (
    8,
    5.0,
)  # rows from which on a spread tells something; spreads from which on outputs are far from their targets
Loss = Callable[[Callable[[Any], Tensor], Any, Clock], tuple[Tensor, dict[str, Tensor]]]


class Bundle(nn.Module):
    """A network and its likelihood as one module, whose outputs are the network's."""

    def __init__(self, network: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.network, self.likelihood = network, likelihood

    def forward(self, inputs: Any) -> Tensor:
        return call(self.network, cast(inputs, dtype_of(self.network)))


def cast(inputs: Any, wanted: torch.dtype | None) -> Any:
    """Real numbers in the precision of the weights, as prediction has them."""
    if isinstance(inputs, Tensor):
        return inputs.to(wanted) if inputs.is_floating_point() and wanted is not None else inputs
    return apply(inputs, lambda tensor: cast(tensor, wanted))


class Objective(nn.Module):
    """A network, its likelihood and the loss of a batch: what :func:`flowbnn.training.train` trains, saves and resumes.

    Under autocast the network alone computes in half precision; the loss is computed in float32.

    Args:
        network: or a module around it that holds other parameters, such as the spread of its weights.
        likelihood: the observation model.
        loss: ``loss(outputs_of, batch, clock)`` returns the loss and a dictionary of logs; ``outputs_of(inputs)`` runs the network.
        check_batch: looks at a batch on the host, where the loss decides nothing there and may be recorded as a CUDA graph.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: Likelihood,
        loss: Loss,
        check_batch: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        self.network, self.likelihood, self.loss = network, likelihood, loss
        self.capturable, self.check_batch = check_batch is not None, check_batch

    def forward(self, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
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
        outputs = call(self.network, cast(inputs, dtype_of(self.network)))
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


@contextmanager
def undisturbed(loader: Any, seed: int | None = None) -> Iterator[None]:
    """The loader may be gone through in the ``with`` block: torch's generator and the loader's own are put back afterwards.

    Args:
        seed: of torch's generator meanwhile, so that a shuffled loader gives the same batches whenever it is asked.
    """
    generators = [torch.default_generator, *loader_generators(loader)]
    states = [generator.get_state() for generator in generators]
    if seed is not None:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def check_loader(loader: Any, use: str = "training") -> None:
    """Refuse what is no loader, or an empty one, before anything is asked of it."""
    if not hasattr(loader, "__iter__") or isinstance(loader, Tensor):
        raise FlowBNNError(f"{use} takes a loader of batches, not a {type(loader).__name__}")
    if hasattr(loader, "__next__"):
        raise FlowBNNError(
            f"the loader for {use} can be gone through only once; give a DataLoader, or a list of batches"
        )
    if _is_pair(loader):
        raise FlowBNNError(
            f"{use} takes a loader of batches; of a pair of tensors flowbnn.data.TensorLoader(inputs, targets, batch_size=128, "
            "shuffle=True) is one"
        )
    if isinstance(loader, list | tuple) and not loader:
        raise FlowBNNError(f"the loader is empty: there is nothing for {use}")


def _is_pair(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and all(isinstance(part, Tensor) for part in found)


def first_batch(loader: Iterable[Any], seed: int | None = None, use: str = "training") -> tuple[Any, Any]:
    """A look at the data without disturbing the run: torch's generator is put back. The same seed sees the same batch."""
    check_loader(loader, use)
    with undisturbed(loader, seed):
        batch = next(iter(loader), None)
    if batch is None:
        raise FlowBNNError(f"the loader is empty: there is nothing for {use}")
    inputs, targets = split_batch(batch)
    if targets is None:
        raise FlowBNNError(f"{use} needs batches of (inputs, targets), but the loader gives inputs alone")
    return inputs, targets


def prepare(
    model: nn.Module, loader: Iterable[Any], likelihood: Likelihood | str, seed: int | None = None
) -> tuple[Likelihood, Any, Callable[[Any], None]]:
    """The likelihood, checked on the first batch, that batch's inputs, and a check for other batches.

    A likelihood that is given is copied: its noise is learned here, and it may serve another fit after this one.
    """
    inputs, targets = first_batch(loader, seed)
    device = device_of(model)
    inputs = move(inputs, device, dtype_of(model))
    places = [device] if device.type == "cuda" else []
    with evaluating(model), torch.random.fork_rng(places, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)  # a network with noise draws here
        outputs = _tried(model, inputs)
    chosen = deepcopy(make_likelihood(likelihood, outputs, targets)).to(device)
    chosen.check(outputs, targets)
    _warn_of_probabilities(model, chosen, outputs)
    _warn_of_units(chosen, outputs, targets)
    chosen.start(outputs, targets.to(outputs.device))
    like = outputs[:1].detach()

    def check(batch: Any) -> None:
        _, truth = split_batch(batch)
        chosen.check(like.expand(len(truth), *like.shape[1:]), truth)

    return chosen, inputs, check


def _tried(model: nn.Module, inputs: Any, what: str = "first batch") -> Tensor:
    """Outputs of the first batch, or one line on why there are none; what the network said stays below it."""
    try:
        return call(model, inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise FlowBNNError(f"the network fails on the {what}, of {failure(inputs, error)}") from error


def _warn_of_probabilities(model: nn.Module, likelihood: Likelihood, outputs: Tensor) -> None:
    """The likelihoods take logits: a network that ends in a softmax or a sigmoid would be squeezed twice."""
    inside = bool(((outputs >= 0) & (outputs <= 1)).all())
    last = list(model.modules())[-1]
    found = ""
    if isinstance(likelihood, Categorical) and inside and bool(((outputs.sum(-1) - 1).abs() < 1e-3).all()):
        found = "probabilities (every row sums to one)"
    elif isinstance(likelihood, Bernoulli) and inside and isinstance(last, nn.Sigmoid):
        found = "probabilities (it ends in a Sigmoid)"
    if found:
        warnings.warn(
            f"the network gives {found}, where logits are expected: it will be far less sure than it could be; leave out "
            "its last softmax or sigmoid",
            FlowBNNWarning,
            stacklevel=3,
        )


def _warn_of_units(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
    """Steps of a learning rate do not take a network to targets that are far away from it, measured by their own spread."""
    if not isinstance(likelihood, Gaussian) or len(targets) < FEW:
        return
    truth = targets.to("cpu", torch.float64).reshape(len(targets), -1)
    found = likelihood.moments(outputs.detach())[0].to("cpu", torch.float64).reshape(truth.shape)
    middle, spread, off = truth.mean(0), truth.std(0), (truth - found).square().mean(0).sqrt()
    far = (off > FAR * spread) & (spread > 0)
    if bool(far.any()):
        one = int((off / spread.clamp_min(1e-300) * far).argmax())
        warnings.warn(
            f"the network's outputs are about {off[one]:.3g} away from the targets, which spread by {spread[one]:.3g} around "
            f"{middle[one]:.3g}: train the network first, or standardise the targets (less their mean, over their standard deviation)",
            FlowBNNWarning,
            stacklevel=3,
        )


def checked_validation(posterior: Posterior, validation: Any) -> Any:
    """Validation data whose first batch has been tried before an epoch is spent; a pair of tensors is one batch."""
    if validation is None:
        return None
    validation = [validation] if _is_pair(validation) else validation
    inputs, targets = first_batch(validation, use="validation")
    check_finite(inputs, "validation inputs")
    check_finite(targets, "validation targets")
    model, device = posterior.model, device_of(posterior.model)
    with evaluating(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        outputs = _tried(model, move(inputs, device, dtype_of(model)), "first batch of the validation data")
    try:
        posterior.likelihood.check(outputs, targets)
    except FlowBNNError as error:
        raise FlowBNNError(f"the validation data do not fit: {error}") from None
    return validation


def optimizer_for(
    groups: list[dict[str, Any]], optimizer: Callable[..., torch.optim.Optimizer] | None
) -> torch.optim.Optimizer:
    if not groups:
        raise FlowBNNError("nothing is left to train: both the weights and the noise are frozen")
    check_optimizer(optimizer)
    if optimizer is None:  # one fused kernel for all the small vectors of the noise
        return torch.optim.Adam(groups, fused=True)
    made = optimizer(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise FlowBNNError(f"optimizer must give a torch.optim.Optimizer, but gave a {type(made).__name__}")
    return made


def check_optimizer(optimizer: Any) -> None:
    """Refuse what makes no optimizer: a name, or an optimizer itself."""
    if optimizer is not None and (not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer)):
        raise FlowBNNError(
            "optimizer is a function from parameter groups to an optimizer, such as torch.optim.Adam, "
            f"not {told(optimizer)}"
        )


def check_schedule(schedule: Any) -> None:
    """Refuse what makes no learning-rate schedule."""
    if schedule is not None and not callable(schedule):
        raise FlowBNNError(
            "schedule is a function from (optimizer, total steps) to a learning-rate schedule, such as "
            f"torch.optim.lr_scheduler.CosineAnnealingLR, not {told(schedule)}"
        )


def check_rate(name: str, value: Any) -> None:
    """Refuse what is no finite number of at least 0."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0.0 <= float(value) < math.inf:
        raise FlowBNNError(f"{name} is a number of at least 0, not {told(value)}")


def run(
    posterior: Posterior,
    loss: Loss,
    engine: torch.optim.Optimizer,
    loader: Any,
    options: TrainingOptions,
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None,
    validation: Iterable[Any] | None,
    samples: int,
    around: nn.Module | None = None,
    settings: dict[str, Any] | None = None,
    check_batch: Callable[[Any], None] | None = None,
) -> History:
    """Train the network and the likelihood of a posterior as one, and leave the network ready to predict.

    Args:
        around: what is trained where that is more than the network: a module that holds it as ``network`` beside other parameters.
        settings: plain values of the method, kept in the checkpoint, so that a resumed run warns of those that have changed.
        check_batch: as in :class:`Objective`.
    """
    check_schedule(schedule)
    if schedule is not None and not hasattr(loader, "__len__"):
        raise FlowBNNError("a learning-rate schedule needs a loader with a length")
    validation = checked_validation(posterior, validation)
    model = posterior.model if around is None else around
    model.train()
    history = train(
        Objective(model, posterior.likelihood, loss, check_batch),
        engine,
        loader,
        options,
        schedule=None if schedule is None else schedule(engine, len(loader) * options.epochs),
        validate=None if validation is None else validator(posterior, validation, samples),
        settings=settings,
        structure={name: _settings_of(layer.recipe) for name, layer in noise_layers(posterior.model).items()},
        names_below="network" if around is None else "network.network",
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


def run_options(
    epochs: int, options: dict[str, Any], description: str, accepted: Iterable[str] = ()
) -> TrainingOptions:
    """The options of a run; ``accepted`` are the names that its caller takes besides, for the error message."""
    known = TrainingOptions.__dataclass_fields__
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        names = [*accepted, *known]
        raise FlowBNNError(
            f"there is no option '{unknown}'{nearest(unknown, names)}",
            kind="unknown setting",
            argument=unknown,
        )
    return TrainingOptions(**{"epochs": epochs, "description": description, **options})


def validator(
    posterior: Posterior, loader: Iterable[Any], samples: int
) -> Callable[[nn.Module], dict[str, float]]:
    """Predictive negative log-likelihood (and accuracy or error) on held-out data, with the same draws at every epoch."""

    def validate(model: nn.Module) -> dict[str, float]:
        predictive, targets = posterior.predict_with_targets(loader, samples, seed=0, progress=False)
        if targets is None:
            raise FlowBNNError(
                "validation needs batches of (inputs, targets), but the loader gives inputs alone"
            )
        return {name: float(value) for name, value in predictive.evaluate(targets).items()}

    return validate


# -------------------- point.py


def fit_point(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    epochs: int = 20,
    likelihood: Likelihood | Literal["auto", "categorical", "bernoulli", "gaussian"] = "auto",
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
    validation: Iterable[Any] | None = None,
    **options: Any,
) -> PointPosterior:
    r"""Train a plain network by maximum likelihood, :math:`\max_\theta \frac1N \sum_i \log p(y_i \mid x_i, \theta)`.

    Takes the same loader, likelihood and run options as :func:`~flowbnn.fit` and returns a posterior with the same interface,
    whose one sample is the network itself.
    """
    if noise_layers(model):
        raise FlowBNNError(
            "this network has noise; fit_point trains plain networks, fit trains stochastic ones"
        )
    check_rate("lr", lr)
    check_rate("weight_decay", weight_decay)
    settings = run_options(
        epochs, options, "training the network", list(signature(fit_point).parameters)[2:-1]
    )
    chosen, _, check = prepare(model, loader, likelihood, settings.seed)
    groups = [
        {
            "params": [p for p in model.parameters() if p.requires_grad],
            "lr": lr,
            "weight_decay": weight_decay,
        },
        {"params": list(chosen.parameters()), "lr": lr, "weight_decay": 0.0},
    ]
    engine = optimizer_for([group for group in groups if group["params"]], optimizer)

    def loss(
        outputs_of: Callable[[Any], Tensor], batch: Any, clock: Clock
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets = split_batch(batch)
        outputs = outputs_of(inputs)
        if not clock.recording and (clock.epoch == 0 or targets.device.type == "cpu"):
            chosen.check(outputs, targets)
        log_likelihood = chosen.log_prob(outputs, targets).mean()
        return -log_likelihood, {"log_likelihood": log_likelihood.detach()}

    posterior = PointPosterior(model, chosen)
    posterior.history = run(
        posterior, loss, engine, loader, settings, schedule, validation, samples=1, check_batch=check
    )
    return posterior
