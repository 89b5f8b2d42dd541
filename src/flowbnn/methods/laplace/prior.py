r"""The evidence of a Laplace approximation, the prior precision at which it is highest, and the mode under that prior.

.. math:: \log p(D) \approx \log p(D \mid \hat w) + \tfrac12 \sum_g (n_g \log \delta_g - \delta_g \|\hat w_g\|^2)
          - \tfrac12 \log\det (H + \delta)

with one precision :math:`\delta_g` for all layers or for each (MacKay 1992; Daxberger et al. 2021, https://arxiv.org/abs/2106.14806).
"""

import math

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.methods.laplace.blocks import Block, Full
from flowbnn.methods.laplace.curvature import Curvature, Problem

__all__ = ["best_precision", "best_precisions", "newton_step", "with_prior"]

LEAST, MOST = 1e-10, 1e10  # of a prior precision


def best_precision(eigenvalues: list[Tensor], square: float) -> float:
    r"""The prior precision at which the evidence is highest, for a curvature with these eigenvalues and :math:`\|\hat w\|^2`.

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
    deltas = [start] * len(sizes)
    for _ in range(rounds):
        root = torch.linalg.cholesky(curvature + _diagonal(curvature, sizes, deltas))
        traces = [float(part.sum()) for part in torch.cholesky_inverse(root).diagonal().split(sizes)]
        last = deltas
        deltas = [
            min(max((size - delta * trace) / max(square, 1e-300), LEAST), MOST)
            for size, delta, trace, square in zip(sizes, last, traces, squares, strict=True)
        ]
        if max(abs(math.log(new / old)) for new, old in zip(deltas, last, strict=True)) < 1e-8:
            break
    return deltas


def _diagonal(like: Tensor, sizes: list[int], deltas: list[float]) -> Tensor:
    parts = [like.new_full((size,), delta) for size, delta in zip(sizes, deltas, strict=True)]
    return torch.cat(parts).diag()


def with_prior(
    problem: Problem, curvature: Curvature, scale: float | None, per_layer: bool
) -> tuple[list[Block], dict[str, float], float]:
    """The blocks with their prior, its precision for each layer, and the log evidence.

    Without a ``scale`` of the prior it is the one with the highest evidence, of all layers together or of each (``per_layer``).
    """
    layers = problem.layers
    weights = [[problem.weights[name].detach() for name in shapes] for shapes in layers.values()]
    sizes = [sum(weight.numel() for weight in parts) for parts in weights]
    squares = [sum(float(weight.double().square().sum()) for weight in parts) for parts in weights]
    blocks, matrix = curvature.blocks, curvature.matrix
    eigenvalues = [block.eigenvalues for block in blocks]
    separate = scale is None and per_layer and len(layers) > 1
    if scale is not None:
        deltas = [scale**-2] * len(layers)
    elif separate and matrix is None:
        deltas = [best_precision([each], square) for each, square in zip(eigenvalues, squares, strict=True)]
    else:
        deltas = [best_precision(eigenvalues, sum(squares))] * len(layers)
    priors = deltas[: len(blocks)]
    if separate and matrix is not None:
        deltas = best_precisions(matrix, sizes, squares, start=deltas[0])
        # different precisions are not diagonal in the eigenbasis of the curvature: they become part of the matrix
        blocks = [Full.of(blocks[0].shapes, matrix + _diagonal(matrix, sizes, deltas), weights[0][0].dtype)]
        priors = [0.0]
    for block, prior in zip(blocks, priors, strict=True):
        block.prior = prior
    evidence = curvature.log_likelihood - 0.5 * sum(block.log_det() for block in blocks)
    for size, delta, square in zip(sizes, deltas, squares, strict=True):
        evidence += 0.5 * (size * math.log(delta) - delta * square)
    return blocks, dict(zip(layers, deltas, strict=True)), evidence


def newton_step(
    problem: Problem, curvature: Curvature, blocks: list[Block], precisions: dict[str, float]
) -> Curvature | None:
    """A step of Newton's method to the mode of the posterior, halved until the density grows.

    Returns the curvature there; None, with the weights as they were, if no step makes it grow.
    """
    priors = {name: precisions[layer] for layer, shapes in problem.layers.items() for name in shapes}
    weights = problem.weights
    start = {name: value.detach().clone() for name, value in weights.items()}
    slope = problem.gradient(1.0 if problem.total is None else problem.total / curvature.seen)
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
            after = problem.measure()
        except FlowBNNError:  # too far: the likelihood is not finite there
            continue
        if log_density(after) >= before - slack * abs(before):
            return after
    move_by(0.0)
    return None
