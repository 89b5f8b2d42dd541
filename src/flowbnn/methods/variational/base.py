"""Fitting a distribution of weights by the ELBO: the step that Bayes by Backprop and its kin share."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.methods.base import FitOptions, Method
from flowbnn.methods.fitting import checks_targets, optimizer_for, train_posterior
from flowbnn.noise import (
    Divergences,
    NormalAffine,
    NormalCoupling,
    NormalGlow,
    NormalInvConv,
    NormalPlanar,
    NormalRadial,
    NormalSylvester,
    Recipe,
)
from flowbnn.objectives import ELBO, warm_up
from flowbnn.options import Count, NonNegative, Positive, Share, options
from flowbnn.posterior.batches import repeat, split_batch
from flowbnn.posterior.weights import WeightPosterior
from flowbnn.training import Clock

__all__ = ["FLOWS", "Variational", "fit_elbo"]

VALIDATION_SAMPLES = 8
FLOWS: dict[str, Callable[..., Recipe]] = {  # noise by its name; "gaussian" has no flow
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
    """The settings of every method that maximises an ELBO.

    Args:
        epochs: at least 1.
        base_scale: how wide the posterior is at the start.
        noise_lr: learning rate of all but the weights or their means.
        beta, warmup: weight of the KL, and the first share of the run over which it grows from 0.
        samples: draws per step.
    """

    epochs: Count = 20
    base_scale: Positive = 0.1
    noise_lr: Positive = 5e-3
    beta: NonNegative = 1.0
    warmup: Share = 0.0
    samples: Count = 1


def fit_elbo(
    posterior: WeightPosterior,
    around: nn.Module,
    divergence: Callable[[], Divergence],
    groups: list[dict[str, Any]],
    method: Variational,
    loader: Iterable[Any],
    check: Callable[[Any], None],
    run: FitOptions,
) -> None:
    r"""Maximise :math:`E_q \log p(y \mid x, w) - \frac{\beta}{N} \mathrm{KL}` over the parameters in ``groups``.

    Args:
        posterior: its likelihood is trained too, its history is filled.
        around: the network with weights drawn in every pass.
        divergence: KL and entropy of the weights, from fresh draws where there is no closed form.
        groups: for the optimizer; the rest of the network's weights, and the likelihood's, are added here.
        method: whose settings these are.
        check: for the batches of a recorded step.
    """
    likelihood, samples = posterior.likelihood, method.samples
    varied = set(posterior.names)
    points = [p for name, p in posterior.model.named_parameters() if name not in varied and p.requires_grad]
    extra = [p for p in likelihood.parameters() if p.requires_grad]
    groups = [*groups, {"name": "points", "params": points, "lr": method.lr}]
    groups.append({"name": "likelihood", "params": extra, "lr": method.noise_lr})
    engine = optimizer_for(groups, method.optimizer)
    number = run.count(loader)
    objective = ELBO(likelihood, number, method.beta)

    def loss(
        outputs_of: Callable[[Any], Tensor], batch: Any, clock: Clock
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets = split_batch(batch)
        outputs = outputs_of(inputs)
        if samples > 1:  # each with weights of its own, which all examples share
            outputs = torch.cat([outputs, *(outputs_of(inputs) for _ in range(samples - 1))])
            targets = repeat(targets, samples)
        if checks_targets(targets, clock):
            likelihood.check(outputs, targets)
        known = Divergences({}, divergence())
        terms = objective.terms(outputs, targets, known, warm_up(clock.progress, method.warmup))
        logs = terms.logs()
        return terms.loss, {name: logs[name] for name in ("elbo", "log_likelihood", "kl")}

    posterior.history = train_posterior(
        posterior,
        loss,
        engine,
        loader,
        run,
        method.schedule,
        VALIDATION_SAMPLES,
        around,
        {"beta": method.beta, "warmup": method.warmup, "samples": samples, "num_data": number},
        check,
    )
