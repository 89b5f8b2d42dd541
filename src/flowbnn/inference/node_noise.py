"""Node noise: the posterior of document 000, flows on the multiplicative noise of every layer, fitted by the ELBO."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.convert import to_deterministic, to_stochastic
from flowbnn.diagnostics import health_warnings, posterior_health
from flowbnn.errors import FlowBNNError, FlowBNNWarning, some_of
from flowbnn.inference.axes import align_batch_axes
from flowbnn.inference.batches import count_data, repeat_each, rows, split_batch
from flowbnn.inference.fitting import check_rate, optimizer_for, prepare, run, run_options
from flowbnn.inference.plans import observe
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.sampling import Sampler, device_of
from flowbnn.layers import InputNoise, hold_noise, noise, noise_layers, parameter_groups, recipe_from_dict
from flowbnn.likelihoods import Likelihood
from flowbnn.objectives import ELBO, warm_up
from flowbnn.training import Clock, capturable, is_main_process

__all__ = ["NoisePosterior", "fit"]


class NoisePosterior(Posterior):
    """A stochastic network whose noise has been fitted."""

    kind = "node noise"
    parts = ("likelihood", "history", "recipes")

    def drawing(self, samples: int, **options: Any) -> Sampler:
        return Sampler(self.model, samples, **options)

    def sample(self, seed: int | None = None) -> nn.Module:
        """One network of the posterior: a copy whose noise is held at one draw, the same for every input."""
        from copy import deepcopy

        network = deepcopy(self.model).eval()
        hold_noise(network, "shared", samples=1, seed=seed)
        return network

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """Noise vectors ``{layer: [samples, dim]}``; the same seed gives those that a prediction with it uses.

        At site ``position`` these are the vectors at one position of the feature map.
        """
        if not isinstance(samples, int) or samples < 1:
            raise FlowBNNError(f"samples is a whole number of at least 1, not {samples}")
        device = device_of(self.model)
        with torch.no_grad(), noise(self.model, "shared", samples, seed):
            found = {}
            for name, layer in noise_layers(self.model).items():
                layer.part, layer.repeat = (0, samples), 1
                found[name] = layer.shared_vectors(device)
        return found

    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """Log-density ``[S]`` of noise vectors ``{layer: [S, dim]}`` of all layers, as :meth:`draws` gives them."""
        layers = noise_layers(self.model)
        if set(values) != set(layers):
            raise FlowBNNError("log_prob takes the noise of every layer, as draws gives it")
        for name, layer in layers.items():
            if not isinstance(layer, InputNoise):
                raise FlowBNNError(f"the noise of layer '{name}' is {layer.label}, which has no density")
        with torch.no_grad():
            found = [layers[name].posterior().log_prob(value) for name, value in values.items()]  # type: ignore[operator]
        return torch.stack(found).sum(0)

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
        restored = cls.restore(network, tensors, document, path)
        for layer in noise_layers(restored.model).values():
            layer.fitted = True
        return restored


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
    validation_samples: int = 8,
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
        validation: a loader; its negative log-likelihood is recorded each epoch as ``validation_nll``, with
            ``validation_samples`` draws.
        options: of the run, as in :class:`~flowbnn.training.TrainingOptions`: ``checkpoint``, ``resume``, ``early_stop``,
            ``seed``, ``precision``, ``devices``, ``progress``, ``tensorboard`` and the rest.

    Returns:
        A posterior that predicts. Its ``history`` has ELBO, log-likelihood, KL and entropy of every epoch in nats, those of
        each layer as ``kl/name`` and ``entropy/name``. A layer whose posterior has collapsed to a point or fallen back onto
        its prior is warned of by name, all of one kind in one warning.
    """
    if not noise_layers(model):
        raise FlowBNNError("this network has no noise; convert it first with to_stochastic(network, rules)")
    for name, value in (("samples", samples), ("validation_samples", validation_samples)):
        if not isinstance(value, int) or value < 1:
            raise FlowBNNError(f"{name} is at least 1, not {value!r}")
    rates = {"weight_lr": weight_lr, "noise_lr": noise_lr, "weight_decay": weight_decay}
    for name, rate in {**rates, "beta": beta, "gamma": gamma}.items():
        check_rate(name, rate)
    if num_data is not None and (not isinstance(num_data, int) or num_data < 1):
        raise FlowBNNError(f"num_data is a whole number of at least 1, not {num_data!r}")
    if not isinstance(warmup, int | float) or not 0.0 <= warmup <= 1.0:
        raise FlowBNNError(f"warmup is a share of the run, between 0 and 1, not {warmup}")
    settings = run_options(epochs, options, "fitting the noise", list(signature(fit).parameters)[2:-1])
    if settings.precision in ("bf16-true", "16-true"):
        warnings.warn(
            f"precision={settings.precision!r} keeps the noise itself in half precision, where flows lose their footing; "
            "'bf16-mixed' keeps noise and flows in float32",
            FlowBNNWarning,
        )
    chosen, inputs, check = prepare(model, loader, likelihood, settings.seed)
    align_batch_axes(model, inputs)
    idle = sorted(set(noise_layers(model)) - set(observe(model, inputs)))
    if idle:
        subject, them, their = ("layer", "it", "its") if len(idle) == 1 else ("layers", "them", "their")
        warnings.warn(
            f"{subject} {some_of(idle)} {'carries' if len(idle) == 1 else 'carry'} noise but the network never calls {them} ({their} "
            f"weights are read by another module), so {their} noise has no effect; leave {them} plain with None in the rules",
            FlowBNNWarning,
        )
    objective = ELBO(chosen, count_data(loader) if num_data is None else num_data, beta, gamma)
    groups = parameter_groups(model, weight_lr, noise_lr, weight_decay)
    extra = [p for p in chosen.parameters() if p.requires_grad]
    if extra:
        groups.append({"name": "likelihood", "params": extra, "lr": noise_lr, "weight_decay": 0.0})
    engine = optimizer_for(groups, optimizer)

    @capturable(check)
    def step(wrapped: nn.Module, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
        some, targets = split_batch(batch)
        if samples > 1:
            some, targets = repeat_each(some, samples), repeat_each(targets, samples)
        known = objective.ahead(model, rows(some))
        outputs = wrapped(some)
        # a check waits for the device: on one, only the first epoch is checked
        if not clock.recording and (clock.epoch == 0 or targets.device.type == "cpu"):
            chosen.check(outputs, targets)
        terms = objective(model, outputs, targets, warm_up(clock.progress, warmup), known)
        return terms.loss, terms.logs()

    posterior = NoisePosterior(model, chosen)
    with noise(model, "sample"):
        posterior.history = run(
            posterior,
            step,
            engine,
            loader,
            settings,
            schedule,
            validation,
            samples=validation_samples,
            settings={
                "beta": beta,
                "gamma": gamma,
                "warmup": warmup,
                "samples": samples,
                "num_data": objective.num_data,
            },
        )
    for layer in noise_layers(model).values():
        layer.fitted = True
        if layer.group is not None:
            layer.group.prepared = []
    if is_main_process():
        called = (health for health in posterior_health(model) if health.layer not in idle)
        for ailment in health_warnings(called):
            warnings.warn(ailment)
    return posterior
