"""The prior of a Laplace approximation, given or found by marginal likelihood, and steps to the mode under it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.methods.laplace.blocks import Block, Full
from flowbnn.methods.laplace.curvature import Curvature
from flowbnn.methods.laplace.layers import CoveredLayer

__all__ = [
    "LEAST",
    "MOST",
    "best_precision",
    "best_precisions",
    "log_evidence",
    "names_of",
    "newton_step",
    "with_prior",
]

# -------------------- laplace_evidence.py

LEAST, MOST = 1e-10, 1e10


def log_evidence(
    log_likelihood: float, log_det: float, sizes: list[int], precisions: list[float], squares: list[float]
) -> float:
    r"""Of groups of weights with these sizes, prior precisions and squares :math:`\|\hat w\|^2`.

    ``log_det`` is that of the posterior's precision.
    """
    total = log_likelihood - 0.5 * log_det
    for size, delta, square in zip(sizes, precisions, squares, strict=True):
        total += 0.5 * (size * math.log(delta) - delta * square)
    return total


def best_precision(eigenvalues: list[Tensor], square: float) -> float:
    r"""The prior precision at which the evidence is highest.

    >>> round(best_precision([torch.tensor([3.0])], 0.75), 6)  # 3 / (3 + d) = 0.75 d
    1.0
    """
    low, high = math.log(LEAST), math.log(MOST)
    while high - low > 1e-12 * max(1.0, abs(high)):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        delta = math.exp(middle)
        gain = sum(float((values / (values + delta)).sum()) for values in eigenvalues)
        if gain > delta * square:
            low = middle
        else:
            high = middle
    return math.exp(0.5 * (low + high))


def best_precisions(
    curvature: Tensor, sizes: list[int], squares: list[float], start: float, rounds: int = 500
) -> list[float]:
    r"""One precision for each group of the rows of a full curvature, by MacKay's iteration.

    .. math:: \delta_g \leftarrow \frac{n_g - \delta_g \mathrm{tr}\, \Sigma_g}{\|\hat w_g\|^2}
    """
    found = [start] * len(sizes)
    for _ in range(rounds):
        diagonal = torch.cat(
            [curvature.new_full((size,), delta) for size, delta in zip(sizes, found, strict=True)]
        )
        root = torch.linalg.cholesky(curvature + diagonal.diag())
        traces = [float(part.sum()) for part in torch.cholesky_inverse(root).diagonal().split(sizes)]
        last = found
        found = [
            min(max((size - delta * trace) / max(square, 1e-300), LEAST), MOST)
            for size, delta, trace, square in zip(sizes, last, traces, squares, strict=True)
        ]
        if max(abs(math.log(new / old)) for new, old in zip(found, last, strict=True)) < 1e-8:
            break
    return found


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
