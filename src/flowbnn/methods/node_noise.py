r"""Node noise: every layer multiplies its input by noise, whose posterior is fitted by the ELBO.

.. math:: h_{l+1} = f_l(z_l \circ h_l), \qquad z_l \sim q(z_l), \qquad p(z_l) = \mathcal N(1, \sigma^2)

Mixtures of Gaussians are those of Trinh, Kaski and Heinonen 2020 (https://arxiv.org/abs/2010.13498), flows those of Xiong's report
"Normalizing Flows for Implicit Bayesian Neural Networks".
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.convert import to_stochastic
from flowbnn.diagnostics import health_warnings, posterior_health
from flowbnn.errors import FlowBNNError, FlowBNNWarning, some_of
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.fitting import checks_targets, optimizer_for, prepare, train_posterior
from flowbnn.methods.variational.base import FLOWS, Variational
from flowbnn.noise import NormalAffine, Recipe, align_batch_axes, noise_layers, noise_mode, parameter_groups
from flowbnn.objectives import ELBO, warm_up
from flowbnn.options import Count, NonNegative, Positive, Share, checked, options, takes
from flowbnn.posterior.batches import split_batch
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.training import Clock, is_main_process

__all__ = ["NodeNoise", "fit"]


@register_method
@options(repr=False)
class NodeNoise(Variational):
    r"""Every layer multiplies its input by noise whose posterior is fitted by the ELBO: this library's own method.

    Args:
        kind: ``"gaussian"``, ``"mixture"`` (Trinh et al. 2020), or a flow after a Gaussian: ``"planar"``, ``"radial"``,
            ``"sylvester"``, ``"coupling"``, ``"invconv"``, ``"glow"``; or a recipe, for all layers; or rules as
            :func:`~flowbnn.to_stochastic` takes them.
        components: of the mixture.
        site: ``"channel"`` or ``"position"``.
        base_scale: standard deviation of the noise at the start.
        noise_lr: learning rate of the noise.
        beta, gamma, warmup, samples: as in :func:`~flowbnn.fit`.
        prior_scale: standard deviation of the prior of the noise, which is around one.
    """

    kind: (
        Literal["gaussian", "mixture", "planar", "radial", "sylvester", "coupling", "invconv", "glow"]
        | Recipe
        | Mapping[Any, Recipe | None]
    ) = "gaussian"
    components: Count = field(default=16, kw_only=True)
    site: Literal["channel", "position"] = field(default="channel", kw_only=True)
    base_scale: Positive = field(default=0.5, kw_only=True)
    gamma: NonNegative = field(default=0.0, kw_only=True)
    prior_scale: Positive = field(default=0.5, kw_only=True)

    __hash__ = object.__hash__  # rules may be a dictionary

    def rules(self) -> Mapping[Any, Recipe | None]:
        """What :func:`~flowbnn.to_stochastic` is given."""
        if isinstance(self.kind, Mapping):
            return self.kind
        if isinstance(self.kind, Recipe):
            return {"*": self.kind}
        common: dict[str, Any] = {
            "site": self.site,
            "prior_scale": self.prior_scale,
            "base_scale": self.base_scale,
        }
        if self.kind == "mixture":
            return {"*": NormalAffine(components=self.components, **common)}
        return {"*": FLOWS[self.kind](**common)}

    @takes(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "NoisePosterior":
        """As :meth:`Method.fit`; weights and noise are trained together."""
        model, run = self.setup(network, loader, given)
        with torch.random.fork_rng([], enabled=run.seed is not None):
            if run.seed is not None:
                torch.default_generator.manual_seed(run.seed)
            noisy = to_stochastic(model, self.rules(), inplace=True)
        return fit(
            noisy,
            loader,
            epochs=self.epochs,
            weight_lr=self.lr,
            noise_lr=self.noise_lr,
            beta=self.beta,
            gamma=self.gamma,
            warmup=self.warmup,
            samples=self.samples,
            optimizer=self.optimizer,
            schedule=self.schedule,
            **given,
        )


@checked
@takes(FitOptions)
def fit(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    epochs: Count = 20,
    weight_lr: NonNegative = 2e-4,
    noise_lr: NonNegative = 2e-3,
    weight_decay: NonNegative = 0.0,
    beta: NonNegative = 1.0,
    warmup: Share = 0.0,
    gamma: NonNegative = 0.0,
    samples: Count = 1,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
    validation_samples: Count = 8,
    **options: Any,
) -> "NoisePosterior":
    r"""Fit the noise (and the weights) of a stochastic network by the ELBO.

    .. math:: \max \; E_q[\log p(D \mid z)] - \beta \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \gamma \sum_l H(q(z_l))

    Args:
        model: from :func:`~flowbnn.to_stochastic`; it is trained in place.
        loader: batches of ``(inputs, targets)``.
        epochs: passes over the loader.
        weight_lr, noise_lr: learning rates of the weights and of the noise; ``freeze(model, "weights")`` fits the noise alone.
        beta, warmup, gamma: weights of KL and entropy; the KL's weight grows from 0 over the first ``warmup`` share of the run.
        samples: draws per example and step.
        optimizer: a function from parameter groups to an optimizer; Adam unless given.
        schedule: a function from ``(optimizer, total steps)`` to a learning-rate schedule, stepped at every batch.
        validation_samples: draws for the negative log-likelihood of the validation data, recorded as ``validation_nll``.
        options: as in :class:`~flowbnn.methods.FitOptions`: ``likelihood``, ``num_data``, ``validation``, ``checkpoint``, ``resume``,
            ``early_stop``, ``seed``, ``precision``, ``devices``, ``progress``, ``tensorboard`` and the rest.

    Returns:
        A posterior that predicts. Its ``history`` has ELBO, log-likelihood, KL and entropy of every epoch in nats, those of
        each layer as ``kl/name`` and ``entropy/name``. A layer whose posterior has collapsed to a point or fallen back onto
        its prior is warned of by name, all of one kind in one warning.
    """
    run = FitOptions(**{"epochs": epochs, "description": "fitting the noise", **options})
    if not noise_layers(model):
        raise FlowBNNError("this network has no noise; convert it first with to_stochastic(network, rules)")
    if run.precision in ("bf16-true", "16-true"):
        warnings.warn(
            FlowBNNWarning(
                f"precision={run.precision!r} keeps the noise itself in half precision, which is too coarse for flows; "
                "'bf16-mixed' keeps noise and flows in float32",
                kind="precision",
            )
        )
    chosen, inputs, check_batch = prepare(model, loader, run.likelihood, run.seed)
    idle = align_batch_axes(model, inputs)
    if idle:
        subject, them, their = ("layer", "it", "its") if len(idle) == 1 else ("layers", "them", "their")
        warnings.warn(
            f"{subject} {some_of(idle)} {'carries' if len(idle) == 1 else 'carry'} noise but the network never calls {them} ({their} "
            f"weights are read by another module), so {their} noise has no effect; leave {them} plain with None in the rules",
            FlowBNNWarning,
        )
    objective = ELBO(chosen, run.count(loader), beta, gamma)
    groups = parameter_groups(model, chosen, weight_lr, noise_lr, weight_decay)
    engine = optimizer_for(groups, optimizer)

    def loss(
        outputs_of: Callable[[Any], Tensor], batch: Any, clock: Clock
    ) -> tuple[Tensor, dict[str, Tensor]]:
        some, targets = split_batch(batch)
        scale = warm_up(clock.progress, warmup)
        terms = objective(model, some, targets, scale, samples, outputs_of, checks_targets(targets, clock))
        return terms.loss, terms.logs()

    posterior = NoisePosterior(model, chosen)
    with noise_mode(model, "sample"):
        posterior.history = train_posterior(
            posterior,
            loss,
            engine,
            loader,
            run,
            schedule,
            validation_samples,
            settings={
                "beta": beta,
                "gamma": gamma,
                "warmup": warmup,
                "samples": samples,
                "num_data": objective.num_data,
            },
            check_batch=check_batch,
        )
    for layer in noise_layers(model).values():
        layer.fitted = True
    if is_main_process():
        called = (health for health in posterior_health(model) if health.layer not in idle)
        for ailment in health_warnings(called):
            warnings.warn(ailment)
    return posterior
