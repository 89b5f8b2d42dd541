"""Steps of Newton's method to the mode of the posterior under the prior."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.laplace.blocks import Block
from flowbnn.methods.laplace.curvature import Curvature
from flowbnn.methods.laplace.jacobian import flat_outputs
from flowbnn.methods.laplace.layers import CoveredLayer
from flowbnn.posterior.batches import move, split_batch
from flowbnn.posterior.forward import device_of, dtype_of

__all__ = ["newton_step"]


def newton_step(
    model: nn.Module,
    layers: list[CoveredLayer],
    likelihood: Likelihood,
    batches: Iterable[Any],
    total: int | None,
    blocks: list[Block],
    precisions: dict[str, float],
    curvature: Curvature,
    measured: Callable[[], Curvature],
) -> Curvature | None:
    """A step, halved until the posterior density grows; None, with the weights as they were, if it cannot.

    Args:
        total: the number of examples that those of the batches stand for.
        blocks, precisions, curvature: at the present weights.
        measured: measures the curvature anew.
    """
    priors = {name: precisions[layer.name] for layer in layers for name in layer.shapes}
    weights = {name: model.get_parameter(name) for name in priors}
    start = {name: value.detach().clone() for name, value in weights.items()}
    weight = 1.0 if total is None else total / curvature.seen
    slope = _gradient(model, weights, likelihood, batches, weight)
    uphill = {name: slope[name] - priors[name] * value for name, value in start.items()}
    step = {name: value for block in blocks for name, value in block.solve(uphill).items()}

    def log_density(curvature: Curvature) -> float:
        squares = (
            priors[name] * float(value.detach().double().square().sum()) for name, value in weights.items()
        )
        return curvature.log_likelihood - 0.5 * sum(squares)

    @torch.no_grad()
    def move_by(share: float) -> None:
        for name, value in start.items():
            weights[name].copy_(value + share * step[name] if share else value)

    before = log_density(curvature)
    slack = 1e-9 if next(iter(start.values())).dtype == torch.float64 else 1e-6
    for halvings in range(12):
        move_by(0.5**halvings)
        try:
            after = measured()
        except FlowBNNError:  # too far: the likelihood is not finite there
            continue
        if log_density(after) >= before - slack * abs(before):
            return after
    move_by(0.0)
    return None


def _gradient(
    model: nn.Module,
    weights: dict[str, nn.Parameter],
    likelihood: Likelihood,
    batches: Iterable[Any],
    weight: float,
) -> dict[str, Tensor]:
    """Of the log-likelihood of all data."""
    total = {name: torch.zeros_like(value) for name, value in weights.items()}
    flags = {name: value.requires_grad for name, value in weights.items()}
    device, dtype = device_of(model), dtype_of(model)
    for value in weights.values():
        value.requires_grad_()
    try:
        for batch in batches:
            inputs, targets = split_batch(batch)
            with torch.enable_grad():
                outputs = flat_outputs(model, move(inputs, device, dtype))
                fitted = likelihood.log_prob(outputs, targets.to(device)).sum()
            parts = torch.autograd.grad(fitted, list(weights.values()), materialize_grads=True)
            for name, part in zip(total, parts, strict=True):
                total[name] += weight * part
    finally:
        for name, flag in flags.items():
            weights[name].requires_grad_(flag)
    return total
