"""The plain network: maximum likelihood, or maximum a posteriori with weight decay. The start, and the rival, of all others."""

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import split_batch
from flowbnn.inference.fitting import check_rate, optimizer_for, prepare, run, run_options
from flowbnn.inference.point_posterior import PointPosterior
from flowbnn.layers import noise_layers
from flowbnn.likelihoods import Likelihood
from flowbnn.training import Clock, capturable

__all__ = ["fit_point"]


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

    @capturable(check)
    def step(wrapped: nn.Module, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets = split_batch(batch)
        outputs = wrapped(inputs)
        if not clock.recording and (clock.epoch == 0 or targets.device.type == "cpu"):
            chosen.check(outputs, targets)
        log_likelihood = chosen.log_prob(outputs, targets).mean()
        return -log_likelihood, {"log_likelihood": log_likelihood.detach()}

    posterior = PointPosterior(model, chosen)
    posterior.history = run(posterior, step, engine, loader, settings, schedule, validation, samples=1)
    return posterior
