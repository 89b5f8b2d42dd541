"""Fitting a distribution of weights by the ELBO: the step that Bayes by Backprop and its kin share."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import repeat, split_batch
from flowbnn.inference.fitting import optimizer_for, run
from flowbnn.inference.weights import WeightPosterior
from flowbnn.layers import Divergences
from flowbnn.objectives import ELBO, warm_up
from flowbnn.training import Clock, TrainingOptions, capturable

__all__ = ["check_weighing", "fit_elbo"]

VALIDATION_SAMPLES = 8


def check_weighing(beta: Any, warmup: Any) -> None:
    """The KL's weight and its warm-up, or one clear line."""
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0.0 <= beta < float("inf"):
        raise FlowBNNError(f"beta weighs the KL and is at least 0, not {beta!r}")
    if isinstance(warmup, bool) or not isinstance(warmup, int | float) or not 0.0 <= warmup <= 1.0:
        raise FlowBNNError(f"warmup is a share of the run, between 0 and 1, not {warmup!r}")


def fit_elbo(
    posterior: WeightPosterior,
    around: nn.Module,
    divergence: Callable[[], Divergence],
    groups: list[dict[str, Any]],
    method: Any,
    loader: Iterable[Any],
    num_data: int,
    check: Callable[[Any], None],
    settings: TrainingOptions,
    validation: Iterable[Any] | None,
) -> None:
    r"""Maximise :math:`E_q \log p(y \mid x, w) - \frac{\beta}{N} \mathrm{KL}` over the parameters in ``groups``.

    Args:
        posterior: its likelihood is trained too, its history is filled.
        around: the network with weights drawn in every pass.
        divergence: KL and entropy of the weights, from fresh draws where there is no closed form.
        groups: for the optimizer; the rest of the network's weights, and the likelihood's, are added here.
        method: has ``lr``, ``noise_lr``, ``beta``, ``warmup``, ``samples``, ``optimizer`` and ``schedule``.
        check: for the batches of a recorded step.
    """
    likelihood, samples = posterior.likelihood, method.samples
    varied = set(posterior.names)
    points = [p for name, p in posterior.model.named_parameters() if name not in varied and p.requires_grad]
    extra = [p for p in likelihood.parameters() if p.requires_grad]
    groups = [*groups, {"name": "points", "params": points, "lr": method.lr}]
    groups.append({"name": "likelihood", "params": extra, "lr": method.noise_lr})
    engine = optimizer_for([group for group in groups if group["params"]], method.optimizer)
    objective = ELBO(likelihood, num_data, method.beta)

    @capturable(check)
    def step(wrapped: nn.Module, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets = split_batch(batch)
        outputs = wrapped(inputs)
        if samples > 1:  # each with weights of its own, which all examples share
            outputs = torch.cat([outputs, *(wrapped(inputs) for _ in range(samples - 1))])
            targets = repeat(targets, samples)
        # a check waits for the device: on one, only the first epoch is checked
        if not clock.recording and (clock.epoch == 0 or targets.device.type == "cpu"):
            likelihood.check(outputs, targets)
        known = Divergences({}, divergence())
        terms = objective(around, outputs, targets, warm_up(clock.progress, method.warmup), known)
        logs = terms.logs()
        return terms.loss, {name: logs[name] for name in ("elbo", "log_likelihood", "kl")}

    posterior.history = run(
        posterior, step, engine, loader, settings, method.schedule, validation, VALIDATION_SAMPLES, around
    )
