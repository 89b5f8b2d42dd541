"""Settings of variational methods, and the fit of a distribution of weights by the ELBO."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from flowbnn.batches import repeat, split_weighted_batch
from flowbnn.distributions import Divergence
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.base import FitOptions, Method
from flowbnn.methods.fitting import (
    Loss,
    LossAndLogs,
    NetworkFunction,
    Objective,
    hold_out,
    make_optimizer,
    make_training_run,
    plan_fit,
    should_check_targets,
)
from flowbnn.methods.network_layers import refuse_checkpointing
from flowbnn.methods.preparation import PreparedFit
from flowbnn.methods.schedule import WEIGHT_SCHEDULE, plan_training
from flowbnn.noise import (
    NormalAffine,
    NormalCoupling,
    NormalFlow,
    NormalGlow,
    NormalInvConv,
    NormalPlanar,
    NormalRadial,
    NormalSylvester,
    Recipe,
)
from flowbnn.noise.batched import Divergences
from flowbnn.objectives import ELBO, warm_up
from flowbnn.options import Count, NonNegative, Positive, UnitInterval, options
from flowbnn.posterior.weights import WeightPosterior
from flowbnn.regression import draw_variance_term, fit_noise_scale, widen_noise_scale
from flowbnn.training import Clock
from flowbnn.training.options import length_of

FlowName = Literal[
    "gaussian", "planar", "radial", "sylvester", "coupling", "invconv", "glow",
    "nice", "realnvp", "iaf", "nsf", "naf", "flowpp", "householder", "residualflow",
]  # fmt: skip
FLOWS: dict[str, Callable[..., Recipe]] = {  # recipes of noise by name; "gaussian" has no flow
    **{name: partial(NormalFlow, name) for name in get_args(FlowName)},
    "gaussian": NormalAffine,
    "planar": NormalPlanar,
    "radial": NormalRadial,
    "sylvester": NormalSylvester,
    "coupling": NormalCoupling,
    "invconv": NormalInvConv,
    "glow": NormalGlow,
}


@options(kw_only=True, repr=False)
class Variational(Method):
    """Base class for methods that maximize an ELBO.

    Args:
        epochs: Number of passes over the data. By default, training ends when the ELBO has reached a plateau, and the best epoch on a
            held-out tenth of the data is used.
        base_scale: Initial standard deviation. For weights it is relative to the root mean square of each weight tensor.
        lr: Learning rate of the weights, or of their means.
        noise_lr: Learning rate of all other parameters.
        beta: Weight of the KL divergence.
        warmup: Fraction of the run over which the weight of the KL divergence grows from 0 to ``beta``.
        repeats: Number of draws per step. Each draw serves a copy of every example.
    """

    epochs: Count | None = None
    base_scale: Positive = 0.1
    noise_lr: Positive = 5e-3
    beta: NonNegative = 1.0
    warmup: UnitInterval = 0.0
    repeats: Count = 1


def fit_elbo(
    posterior: WeightPosterior,
    module: nn.Module,
    divergence: Callable[[], Divergence],
    groups: list[dict[str, Any]],
    method: Variational,
    loader: Iterable[Any],
    prepared: PreparedFit,
    options: FitOptions,
) -> None:
    r"""Maximizes :math:`E_q \log p(y \mid x, w) - \frac{\beta}{N} \mathrm{KL}` over the parameters in ``groups``.

    The other weights of the network and the parameters of the likelihood are trained, too.

    Args:
        posterior: Posterior whose network and likelihood are trained in place.
        module: Module that draws weights in every forward pass.
        divergence: Function that returns the KL divergence and the entropy of the distribution of weights.
        groups: Parameter groups of the distribution of weights.
        method: Settings of the method.
        loader: Batches of ``(inputs, targets)``.
        prepared: Result of :func:`~flowbnn.methods.preparation.prepare`.
        options: Options of the fit.
    """
    likelihood, random_names = posterior.likelihood, set(posterior.names)
    point_weights = [
        p for name, p in posterior.model.named_parameters() if name not in random_names and p.requires_grad
    ]
    noise = [p for p in likelihood.parameters() if p.requires_grad]
    groups = [
        *groups,
        {"name": "points", "params": point_weights, "lr": method.lr},
        {"name": "likelihood", "params": noise, "lr": max(method.noise_lr, method.likelihood_lr)},
    ]
    training, plan = loader, plan_training(options.epochs, method.schedule, length_of(loader))
    num_data = prepared.data.require_num_examples()
    if method.epochs is None:
        training, options = hold_out(loader, options)
        plan, options = plan_fit(
            None, method.schedule or WEIGHT_SCHEDULE, training, options, warmup=method.warmup
        )
        num_data = options.num_examples(training)
    elbo = ELBO(likelihood, num_data, method.beta)
    settings = {name: getattr(method, name) for name in ("beta", "warmup", "repeats")}
    loss = make_weight_loss(elbo, divergence, method.repeats, method.warmup)
    run = make_training_run(
        posterior,
        Objective(module, likelihood, loss, prepared.check_batch),
        make_optimizer(groups, method.optimizer),
        training,
        options,
        plan.scheduler,
        samples=8,  # enough to follow the validation NLL from epoch to epoch
        settings={**settings, "num_data": num_data},
        num_epochs=plan.num_epochs,
    )
    with refuse_checkpointing(posterior.model):
        posterior.history = run.train()
    fit_noise_scale(posterior, training, options.seed)
    widen_noise_scale(posterior, options.validation_loader)


def make_weight_loss(
    elbo: ELBO, divergence: Callable[[], Divergence], repeats: int = 1, warmup: float = 0.0
) -> Loss:
    """Returns the negative ELBO as a loss of :class:`~flowbnn.methods.fitting.Objective`.

    Args:
        elbo: ELBO with its likelihood.
        divergence: Function that returns the KL divergence and the entropy of the distribution of weights.
        repeats: Number of draws of the weights per step.
        warmup: Fraction of the run over which the weight of the KL divergence grows.
    """
    likelihood = elbo.likelihood
    log_scale = likelihood.log_scale if learns_noise(likelihood) else None

    def loss(forward: NetworkFunction, batch: Any, clock: Clock) -> LossAndLogs:
        inputs, targets, weights = split_weighted_batch(batch)
        outputs = forward(inputs)
        if should_check_targets(targets, clock):
            likelihood.check(outputs, targets)
        correction: Tensor | float = 0.0
        if log_scale is not None:
            with torch.no_grad():
                second = forward(inputs)
            correction = draw_variance_term(log_scale, outputs, second)
        if repeats > 1:  # each draw of the weights serves all examples
            outputs = torch.cat([outputs, *(forward(inputs) for _ in range(repeats - 1))])
            targets, weights = repeat((targets, weights), repeats)
        weight = warm_up(clock.progress, warmup)
        terms = elbo.terms(outputs, targets, Divergences({}, divergence()), weight, weights)
        logs = terms.logs()
        return terms.loss + correction, {name: logs[name] for name in ("elbo", "log_likelihood", "kl")}

    return loss
