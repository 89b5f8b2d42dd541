"""Fitting a distribution of weights by the ELBO: the step that Bayes by Backprop and its kin share."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError
from flowbnn.methods.base import Method, check_scale, check_whole
from flowbnn.methods.fitting import optimizer_for, run
from flowbnn.noise import Divergences
from flowbnn.objectives import ELBO, warm_up
from flowbnn.posterior.batches import repeat, split_batch
from flowbnn.posterior.weights import WeightPosterior
from flowbnn.training import Clock, TrainingOptions

__all__ = ["Variational", "fit_elbo"]

VALIDATION_SAMPLES = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class Variational(Method):
    """What every method that maximises an ELBO can be told.

    Args:
        base_scale: how wide the posterior is at the start.
        noise_lr: learning rate of all but the weights or their means.
        beta, warmup: weight of the KL, and the first share of the run over which it grows from 0.
        samples: draws per step.
    """

    base_scale: float = 0.1
    noise_lr: float = 5e-3
    beta: float = 1.0
    warmup: float = 0.0
    samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "samples"):
            check_whole(name, getattr(self, name))
        for name in ("base_scale", "noise_lr"):
            check_scale(name, getattr(self, name))
        if not _within(self.beta, 0.0, math.inf) or math.isinf(self.beta):
            raise FlowBNNError(f"beta weighs the KL and is at least 0, not {self.beta!r}")
        if not _within(self.warmup, 0.0, 1.0):
            raise FlowBNNError(f"warmup is a share of the run, between 0 and 1, not {self.warmup!r}")


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def fit_elbo(
    posterior: WeightPosterior,
    around: nn.Module,
    divergence: Callable[[], Divergence],
    groups: list[dict[str, Any]],
    method: Variational,
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
        method: whose settings these are.
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

    def loss(
        outputs_of: Callable[[Any], Tensor], batch: Any, clock: Clock
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets = split_batch(batch)
        outputs = outputs_of(inputs)
        if samples > 1:  # each with weights of its own, which all examples share
            outputs = torch.cat([outputs, *(outputs_of(inputs) for _ in range(samples - 1))])
            targets = repeat(targets, samples)
        # a check waits for the device: on one, only the first epoch is checked
        if not clock.recording and (clock.epoch == 0 or targets.device.type == "cpu"):
            likelihood.check(outputs, targets)
        known = Divergences({}, divergence())
        terms = objective(around, outputs, targets, warm_up(clock.progress, method.warmup), known)
        logs = terms.logs()
        return terms.loss, {name: logs[name] for name in ("elbo", "log_likelihood", "kl")}

    posterior.history = run(
        posterior,
        loss,
        engine,
        loader,
        settings,
        method.schedule,
        validation,
        VALIDATION_SAMPLES,
        around,
        {"beta": method.beta, "warmup": method.warmup, "samples": samples, "num_data": num_data},
        check,
    )
