"""The prior of a Laplace approximation, given or found by marginal likelihood, and steps to the mode under it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.laplace_blocks import Block, Full
from flowbnn.inference.laplace_curvature import Curvature
from flowbnn.inference.laplace_evidence import best_precision, best_precisions, log_evidence
from flowbnn.inference.laplace_layers import CoveredLayer

__all__ = ["names_of", "newton_step", "with_prior"]


def names_of(layers: list[CoveredLayer]) -> list[str]:
    return [name for layer in layers for name in layer.names]


def with_prior(
    found: Curvature,
    model: nn.Module,
    layers: list[CoveredLayer],
    scale: float | None,
    per_layer: bool,
    damping: float,
) -> tuple[list[Block], dict[str, float], float]:
    """The blocks with their prior, its precision for each layer, and the evidence."""
    own = dict(model.named_parameters())
    sizes = [sum(own[name].numel() for name in layer.names) for layer in layers]
    squares = [
        sum(float(own[name].detach().double().square().sum()) for name in layer.names) for layer in layers
    ]
    blocks, values = found.blocks, [block.eigenvalues for block in found.blocks]
    if scale is not None:
        deltas = [scale**-2] * len(layers)
    elif not per_layer or len(layers) == 1:
        deltas = [best_precision(values, sum(squares))] * len(layers)
    elif found.matrix is None:
        deltas = [best_precision([each], square) for each, square in zip(values, squares, strict=True)]
    else:
        start = best_precision(values, sum(squares))
        deltas = best_precisions(found.matrix, sizes, squares, start)
        spread = torch.cat(
            [found.matrix.new_full((size,), delta) for size, delta in zip(sizes, deltas, strict=True)]
        )
        dtype = own[layers[0].names[0]].dtype
        blocks = [Full.of(blocks[0].shapes, found.matrix + spread.diag(), dtype)]
        deltas_in = [0.0]
    if blocks is found.blocks:
        deltas_in = deltas[:1] if found.matrix is not None else deltas
    for block, delta in zip(blocks, deltas_in, strict=True):
        block.prior = delta
    log_det = sum(block.log_det() for block in blocks)
    evidence = log_evidence(found.log_likelihood, log_det, sizes, deltas, squares)
    for block in blocks:
        block.prior += damping
    return blocks, {layer.name: delta for layer, delta in zip(layers, deltas, strict=True)}, evidence


def newton_step(
    model: nn.Module,
    layers: list[CoveredLayer],
    blocks: list[Block],
    precisions: dict[str, float],
    slope: dict[str, Tensor],
    found: Curvature,
    curved: Callable[[], Curvature],
) -> Curvature | None:
    """A step of Newton's method, halved until the posterior density grows; None, with the weights as they were, if it cannot."""
    own = dict(model.named_parameters())
    start = {name: own[name].detach().clone() for name in names_of(layers)}
    prior = {name: precisions[layer.name] for layer in layers for name in layer.names}
    uphill = {name: slope[name] - prior[name] * value for name, value in start.items()}
    step = {name: value for block in blocks for name, value in block.solve(uphill).items()}

    def height(curvature: Curvature) -> float:
        return curvature.log_likelihood - 0.5 * sum(
            prior[name] * float(own[name].detach().double().square().sum()) for name in start
        )

    before = height(found)
    slack = 1e-9 if start[next(iter(start))].dtype == torch.float64 else 1e-6
    for halvings in range(12):
        with torch.no_grad():
            for name, value in start.items():
                own[name].copy_(value + 0.5**halvings * step[name])
        try:
            after = curved()
        except FlowBNNError:  # too far: the likelihood is not finite there
            continue
        if height(after) >= before - slack * abs(before):
            return after
    with torch.no_grad():
        for name, value in start.items():
            own[name].copy_(value)
    return None
