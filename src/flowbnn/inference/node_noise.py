"""Node noise: the posterior of document 000, flows on the multiplicative noise of every layer, fitted by the ELBO."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.convert import to_deterministic, to_stochastic
from flowbnn.diagnostics import posterior_health
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.inference.axes import align_batch_axes
from flowbnn.inference.batches import call, count_data, move, repeat, split_batch
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.sampling import call_order, device_of, dtype_of, evaluating, sample_outputs
from flowbnn.layers import hold_noise, noise, noise_layers, parameter_groups, recipe_from_dict
from flowbnn.likelihoods import Likelihood, make_likelihood
from flowbnn.objectives import ELBO, warm_up
from flowbnn.training import Clock, TrainingOptions, train

__all__ = ["NoisePosterior", "fit"]


class NoisePosterior(Posterior):
    """A stochastic network whose noise has been fitted."""

    kind = "node noise"
    parts = ("likelihood", "history", "recipes")

    def outputs(
        self, inputs: Any, samples: int, *, shared: bool, seed: int | None, max_batch: int | None
    ) -> Tensor:
        return sample_outputs(self.model, inputs, samples, shared=shared, seed=seed, max_batch=max_batch)

    def sample(self, seed: int | None = None) -> nn.Module:
        """One network of the posterior: a copy whose noise is held at one draw, the same for every input."""
        from copy import deepcopy

        network = deepcopy(self.model)
        hold_noise(network, "shared", samples=1, seed=seed)
        return network

    def mean_network(self) -> nn.Module:
        """The plain network at the mean of the noise, which is absorbed into the weights."""
        return to_deterministic(self.model, absorb=True)

    def document(self) -> dict[str, Any]:
        recipes = {
            name: {"recipe": "FlowNoise"} if layer.recipe is None else layer.recipe.to_dict()
            for name, layer in noise_layers(self.model).items()
        }
        return {**super().document(), "recipes": recipes}

    @classmethod
    def load(cls, path: str | Path, network: nn.Module) -> "Posterior":
        """Read a saved posterior.

        Args:
            network: the plain network, which is converted by the recipes in the file, or one that is converted already.
        """
        tensors, document = cls.read(path)
        if not noise_layers(network):
            names = dict(network.named_modules())
            absent = [name for name in document["recipes"] if name not in names]
            if absent:
                raise FlowBNNError(
                    f"'{path}' was saved from another architecture: this network has no layer '{absent[0]}'"
                )
            try:
                recipes = {name: recipe_from_dict(recipe) for name, recipe in document["recipes"].items()}
            except FlowBNNError as error:
                raise FlowBNNError(f"'{path}' cannot be loaded into a plain network: {error}") from None
            if not recipes:
                raise FlowBNNError(f"'{path}' is damaged: it names no layer with noise")
            network = to_stochastic(
                network, {("*" if name == "" else name): recipe for name, recipe in recipes.items()}
            )
        return cls.restore(network, tensors, document, path)


class Bundle(nn.Module):
    """A network and its likelihood as one module: what is trained, saved and resumed together."""

    def __init__(self, network: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.network, self.likelihood = network, likelihood

    def forward(self, inputs: Any) -> Tensor:
        return call(self.network, inputs)


def first_batch(loader: Iterable[Any]) -> tuple[Any, Any]:
    """A look at the data without disturbing the run: torch's generator is put back."""
    if not hasattr(loader, "__iter__"):
        raise FlowBNNError(f"training takes a loader of batches, not a {type(loader).__name__}")
    if hasattr(loader, "__next__"):
        raise FlowBNNError(
            "this loader can be gone through only once; give a DataLoader, or a list of batches"
        )
    state = torch.get_rng_state()
    own = getattr(loader, "generator", None)
    own_state = own.get_state() if isinstance(own, torch.Generator) else None
    batch = next(iter(loader), None)
    torch.set_rng_state(state)
    if own_state is not None:
        own.set_state(own_state)  # type: ignore[union-attr]
    if batch is None:
        raise FlowBNNError("the loader is empty: there is nothing to train on")
    inputs, targets = split_batch(batch)
    if targets is None:
        raise FlowBNNError("training needs batches of (inputs, targets), but the loader gives inputs alone")
    return inputs, targets


def prepare(model: nn.Module, loader: Iterable[Any], likelihood: Likelihood | str) -> tuple[Likelihood, Any]:
    """The likelihood, checked on the first batch, and that batch's inputs."""
    inputs, targets = first_batch(loader)
    inputs = move(inputs, device_of(model), dtype_of(model))
    with evaluating(model):
        outputs = call(model, inputs)
    chosen = make_likelihood(likelihood, outputs, targets).to(device_of(model))
    chosen.check(outputs, targets)
    return chosen, inputs


def optimizer_for(
    groups: list[dict[str, Any]], optimizer: Callable[..., torch.optim.Optimizer] | None
) -> torch.optim.Optimizer:
    if not groups:
        raise FlowBNNError("nothing is left to train: both the weights and the noise are frozen")
    if optimizer is None:  # one fused kernel for all the small vectors of the noise
        return torch.optim.Adam(groups, fused=True)
    return optimizer(groups)


def fit(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    epochs: int = 20,
    likelihood: Likelihood | Literal["auto", "categorical", "bernoulli", "gaussian"] = "auto",
    weight_lr: float = 2e-4,
    noise_lr: float = 2e-3,
    weight_decay: float = 0.0,
    beta: float = 1.0,
    warmup: float = 0.0,
    gamma: float = 0.0,
    samples: int = 1,
    num_data: int | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
    validation: Iterable[Any] | None = None,
    **options: Any,
) -> NoisePosterior:
    r"""Fit the noise (and the weights) of a stochastic network by the ELBO.

    .. math:: \max \; E_q[\log p(D \mid z)] - \beta \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \gamma \sum_l H(q(z_l))

    Args:
        model: from :func:`~flowbnn.to_stochastic`; it is trained in place.
        loader: batches of ``(inputs, targets)``.
        epochs: passes over the loader.
        likelihood: ``"auto"`` takes integers for classes and real numbers for regression with learned noise.
        weight_lr, noise_lr: learning rates of the weights and of the noise; ``freeze(model, "weights")`` fits the noise alone.
        beta, warmup, gamma: weights of KL and entropy; the KL's weight grows from 0 over the first ``warmup`` share of the run.
        samples: draws per example and step.
        num_data: :math:`N`; taken from the loader where it has a length.
        optimizer: a class or function from parameter groups to an optimizer; Adam unless given.
        schedule: from ``(optimizer, total steps)`` to a learning-rate schedule, stepped at every batch.
        validation: a loader; its negative log-likelihood is recorded each epoch as ``validation_nll``.
        options: of the run, as in :class:`~flowbnn.training.TrainingOptions`: ``checkpoint``, ``resume``, ``early_stop``,
            ``seed``, ``precision``, ``devices``, ``progress``, ``tensorboard`` and the rest.

    Returns:
        A posterior that predicts. Its ``history`` has ELBO, log-likelihood, KL and entropy of every epoch in nats, those of
        each layer as ``kl/name`` and ``entropy/name``. A layer whose posterior has collapsed to a point or fallen back onto
        its prior is warned of by name.
    """
    if not noise_layers(model):
        raise FlowBNNError("this network has no noise; convert it first with to_stochastic(network, rules)")
    if samples < 1:
        raise FlowBNNError(f"samples is at least 1, not {samples}")
    if not 0.0 <= warmup <= 1.0:
        raise FlowBNNError(f"warmup is a share of the run, between 0 and 1, not {warmup}")
    settings = run_options(epochs, options, "fitting the noise")
    chosen, inputs = prepare(model, loader, likelihood)
    align_batch_axes(model, inputs)
    idle = set(noise_layers(model)) - set(call_order(model, inputs))
    for name in sorted(idle):
        warnings.warn(
            f"layer '{name}' carries noise but the network never calls it (its weights are read by another module), so its noise "
            "has no effect; leave it plain with None in the rules",
            FlowBNNWarning,
        )
    objective = ELBO(chosen, count_data(loader) if num_data is None else num_data, beta, gamma)
    bundle = Bundle(model, chosen)
    groups = parameter_groups(model, weight_lr, noise_lr, weight_decay)
    extra = [p for p in chosen.parameters() if p.requires_grad]
    if extra:
        groups.append({"name": "likelihood", "params": extra, "lr": noise_lr, "weight_decay": 0.0})
    engine = optimizer_for(groups, optimizer)

    def step(wrapped: nn.Module, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
        some, targets = split_batch(batch)
        if samples > 1:
            some, targets = repeat(some, samples), repeat(targets, samples)
        outputs = wrapped(some)
        # a check waits for the device: on one, only the first epoch is checked
        if clock.epoch == 0 or targets.device.type == "cpu":
            chosen.check(outputs, targets)
        terms = objective(model, outputs, targets, warm_up(clock.progress, warmup))
        return terms.loss, terms.logs()

    model.train()
    with noise(model, "sample"):
        history = train(
            bundle,
            step,
            engine,
            loader,
            settings,
            schedule=None if schedule is None else schedule(engine, total_steps(loader, settings)),
            names_below="network",
            validate=None
            if validation is None
            else validator(NoisePosterior(model, chosen), validation, samples=8),
        )
    model.eval()
    posterior = NoisePosterior(model, chosen, history)
    for health in posterior_health(model):
        if health.state != "healthy":
            warnings.warn(health.message, FlowBNNWarning)
    return posterior


def run_options(epochs: int, options: dict[str, Any], description: str) -> TrainingOptions:
    try:
        return TrainingOptions(**{"epochs": epochs, "description": description, **options})
    except TypeError as error:
        known = ", ".join(TrainingOptions.__dataclass_fields__)
        raise FlowBNNError(f"{str(error).rpartition('() ')[2]}; the options of a run are {known}") from None


def total_steps(loader: Any, options: TrainingOptions) -> int:
    if not hasattr(loader, "__len__"):
        raise FlowBNNError("a learning-rate schedule needs a loader with a length")
    return len(loader) * options.epochs


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
