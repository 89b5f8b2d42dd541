r"""Fits of a temperature :math:`T` to sampled outputs, with a Gaussian prior of :math:`\log T`.

.. math:: \hat T = \arg\min_T \; -\sum_i \log \frac1S \sum_s p(y_i \mid f_s(x_i) / T) + \frac{(\log T)^2}{2 \tau^2}

The prior keeps the temperature near 1 if the data hardly determine it, as with few examples or with examples that are almost all
classified correctly. A regression has no prior, because the unit of its scale is arbitrary.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import RealLikelihood
from flowbnn.posterior.base import Posterior
from flowbnn.predictive import CategoricalPredictive

PRIOR_SCALE = 0.5  # standard deviation of log T: 95 % of the prior lie between temperatures of 0.37 and 2.7


class TemperatureFit(NamedTuple):
    """Result of :func:`fit_temperatures` for one set of examples.

    Args:
        temperature: Temperature.
        bound: ``"low"`` or ``"high"`` if the likelihood alone is largest at a bound of the temperature, or an empty string.
    """

    temperature: float
    bound: Literal["", "low", "high"]


def fit_temperatures(
    posterior: Posterior,
    outputs: Tensor,
    targets: Tensor,
    subsets: Sequence[Tensor] | None = None,
    prior_scale: float | None = PRIOR_SCALE,
) -> list[TemperatureFit]:
    r"""Fits one temperature to each subset of the examples.

    The best point of a grid, which all subsets share, is refined by Newton's method, safeguarded by bisection within its cell.

    Args:
        posterior: Posterior of the outputs.
        outputs: Sampled outputs ``[S, N, ...]``, in float64.
        targets: Targets of the examples.
        subsets: Indices of the examples of each subset. The default is one set of all examples.
        prior_scale: Standard deviation :math:`\tau` of the prior of :math:`\log T`, or None for no prior.
    """
    subsets = [torch.arange(len(targets), device=targets.device)] if subsets is None else subsets
    if prior_scale is None or isinstance(posterior.likelihood, RealLikelihood):
        prior_scale = math.inf
    coldest, hottest = 1e-2, 1e2  # far outside of what calibration needs
    low, high = math.log(coldest), math.log(hottest)
    last = 16  # neighbours are a factor of 1.8 apart
    grid = [low + (high - low) * index / last for index in range(last + 1)]
    table = torch.stack([_nll_at(posterior, outputs, targets, u)[0] for u in grid])
    fits = []
    for subset in subsets:
        nll = table[:, subset].sum(1).tolist()
        values = [value + u**2 / (2.0 * prior_scale**2) for value, u in zip(nll, grid, strict=True)]
        bound: Literal["", "low", "high"] = "low" if nll[0] <= min(nll) else ""
        if not bound and nll[-1] <= min(nll):
            bound = "high"
        best = min(range(last + 1), key=lambda index: (values[index], abs(grid[index])))
        if bound and best in (0, last):
            fits.append(TemperatureFit(coldest if best == 0 else hottest, bound))
            continue
        cell = grid[max(0, best - 1)], grid[best], grid[min(last, best + 1)]
        u = _refine(posterior, outputs[:, subset], targets[subset], cell, prior_scale)
        fits.append(TemperatureFit(math.exp(u), bound))
    return fits


def _refine(
    posterior: Posterior,
    outputs: Tensor,
    targets: Tensor,
    cell: tuple[float, float, float],
    prior_scale: float,
) -> float:
    """Returns the minimum of the penalized NLL over the log-temperature within a cell of the grid."""
    left, u, right = cell
    for _ in range(60):
        _, slope, curvature = _nll_at(posterior, outputs, targets, u, derivatives=True)
        slope, curvature = slope + u / prior_scale**2, curvature + prior_scale**-2
        if slope == 0.0:
            break
        left, right = (u, right) if slope < 0 else (left, u)
        newton = u - slope / curvature if curvature > 0 else math.inf
        proposal = newton if left < newton < right else (left + right) / 2
        change, u = abs(proposal - u), proposal
        if change < 1e-7:  # the error after a step of Newton's method is about its square
            break
    return u


def _nll_at(
    posterior: Posterior,
    outputs: Tensor,
    targets: Tensor,
    u: float,
    derivatives: bool = False,
    max_elements: int = 2**21,
) -> tuple[Tensor, float, float]:
    """Returns the NLL of each example at ``T = exp(u)``, and the first two derivatives of the sum in ``u``.

    Args:
        posterior: Posterior of the outputs.
        outputs: Sampled outputs ``[S, N, ...]``.
        targets: Targets of the examples.
        u: Logarithm of the temperature.
        derivatives: If False, the derivatives are zero.
        max_elements: Number of outputs that are computed at once.
    """
    num_rows = max(1, max_elements // max(1, outputs[:, :1].numel()))
    values, slope, curvature = [], 0.0, 0.0
    with torch.set_grad_enabled(derivatives):
        for start in range(0, len(targets), num_rows):
            log_t = torch.tensor(u, dtype=outputs.dtype, device=outputs.device, requires_grad=derivatives)
            chunk = slice(start, start + num_rows)
            predictive = apply_temperature(posterior._predictive(outputs[:, chunk]), log_t.exp())
            nll = predictive.nll(targets[chunk])
            values.append(nll.detach())
            if derivatives:
                (first,) = torch.autograd.grad(nll.sum(), log_t, create_graph=True)
                (second,) = torch.autograd.grad(first, log_t)
                slope, curvature = slope + first.item(), curvature + second.item()
    return torch.cat(values), slope, curvature


def supports_temperature(predictive: Any) -> bool:
    """Returns True if a predictive distribution can be scaled by a temperature."""
    if isinstance(predictive, CategoricalPredictive):
        return True
    return hasattr(predictive, "rescale") and getattr(predictive, "can_rescale", True)


def apply_temperature(predictive: Any, temperature: Any, sample_counts: Tensor | None = None) -> Any:
    """Returns a predictive distribution at a temperature.

    Args:
        predictive: Predictive distribution of classes or of real-valued targets.
        temperature: Temperature, a float or a scalar tensor.
        sample_counts: Number of samples of each row, if it differs between rows.
    """
    if not supports_temperature(predictive):
        text = f"a {type(predictive).__name__} has no temperature; use the candidates 'plain', 'refit' and 'noise' of fb.calibrate"
        raise FlowBNNError(text, kind="unsupported", argument="likelihood")
    sample_counts = None if sample_counts is None else predictive.sample_counts
    if isinstance(predictive, CategoricalPredictive):
        return CategoricalPredictive(predictive.logits / temperature, sample_counts)
    return predictive.rescale(temperature)
