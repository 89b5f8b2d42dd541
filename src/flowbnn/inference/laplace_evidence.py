r"""The marginal likelihood of a Laplace approximation, and the prior precision that maximises it.

.. math:: \log p(D \mid \delta) \approx \log p(D \mid \hat w) - \frac\delta2 \|\hat w\|^2 + \frac P2 \log \delta
          - \frac12 \sum_i \log(\lambda_i + \delta)

(MacKay 1992). In :math:`\log \delta` its slope is half of :math:`\sum_i \lambda_i / (\lambda_i + \delta) - \delta \|\hat w\|^2`, which
falls throughout: there is one maximum, found by halving an interval, without another look at the data.
"""

import math

import torch
from torch import Tensor

__all__ = ["LEAST", "MOST", "best_precision", "best_precisions", "log_evidence"]

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
