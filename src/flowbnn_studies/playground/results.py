"""Predictions of a posterior as plain numbers for the figures of the page."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.methods import Posterior, TemperedPosterior
from flowbnn.plots.style import binomial_band
from flowbnn_studies.playground.points import RANGE, Points
from flowbnn_studies.playground.script import CLASS_GRID, CURVE_GRID

NUM_FUNCTIONS = 20  # sampled functions of a curve
NUM_BORDERS = 12  # sampled networks whose borders between classes are drawn
NUM_DRAWS = 400  # points of a scatter plot of two variables
BAND = 0.95  # probability of the band of calibrated predictions
NUM_BINS = 10


def predict(
    posterior: Posterior, points: Points, samples: int, temperature: float, seed: int
) -> dict[str, Any]:
    """Returns the prediction over the plane or along the curve, and the scores of the held-out points.

    Args:
        posterior: Fitted posterior.
        points: Points of the page.
        samples: Number of sampled networks.
        temperature: Temperature of the predictions; 1 leaves them as they are.
        seed: Seed of the samples.
    """
    if temperature != 1.0:
        posterior = TemperedPosterior(posterior, temperature)
    figure = _class_map if points.task == "classes" else _curve
    result = figure(posterior, samples, seed)
    result["samples"] = samples
    if points.held_out:
        held_out = posterior.predict(points.inputs(points.held_out), samples, seed=seed)
        targets = points.targets(points.held_out)
        result["scores"] = {name: round(value, 4) for name, value in held_out.evaluate(targets).items()}
        result["num_held_out"] = len(targets)
        result["reliability"] = (
            _reliability(held_out, targets) if points.task == "classes" else _coverage(held_out, targets)
        )
    return result


def _class_map(posterior: Posterior, samples: int, seed: int) -> dict[str, Any]:
    """Returns class probabilities and uncertainties on a grid, and the probabilities of single networks for their borders."""
    axis = torch.linspace(-RANGE, RANGE, CLASS_GRID)
    predictive = posterior.predict(torch.cartesian_prod(axis, axis), samples, seed=seed)
    single = predictive.samples[:NUM_BORDERS, :, 1:].movedim(-1, 1)
    return {
        "task": "classes",
        "range": RANGE,
        "size": CLASS_GRID,
        "probabilities": to_list(predictive.probabilities.T, 3),
        "entropy": to_list(predictive.entropy, 3),
        "mutual_information": to_list(predictive.mutual_information, 4),
        # percent of all classes but the first, as integers, because a hundred thousand decimals would be slow to send
        "networks": (100.0 * single).round().int().tolist(),
    }


def _curve(posterior: Posterior, samples: int, seed: int) -> dict[str, Any]:
    """Returns the mean, two intervals and sampled functions along the axis."""
    x = torch.linspace(-RANGE, RANGE, CURVE_GRID)
    predictive = posterior.predict(x[:, None], samples, seed=seed)
    intervals = []
    for mass in (0.5, 0.9):
        low, high = (to_list(end[:, 0], 3) for end in predictive.interval(mass))
        intervals.append({"mass": mass, "low": low, "high": high})
    return {
        "task": "curve",
        "range": RANGE,
        "x": to_list(x, 3),
        "mean": to_list(predictive.mean[:, 0], 3),
        "intervals": intervals,
        "functions": to_list(predictive.samples[:NUM_FUNCTIONS, :, 0], 3),
        "epistemic_std": to_list(predictive.epistemic[:, 0].sqrt(), 4),
        "aleatoric_std": to_list(predictive.aleatoric[:, 0].sqrt(), 4),
    }


def _reliability(predictive: Any, targets: Tensor) -> dict[str, Any]:
    """Returns accuracy against confidence in bins, with the band of calibrated predictions."""
    bars = [bar for bar in predictive.reliability(targets, NUM_BINS) if bar["fraction"] > 0]
    confidence, fraction = (np.array([bar[name] for bar in bars]) for name in ("confidence", "fraction"))
    low, high = binomial_band(BAND, np.round(fraction * len(targets)), confidence)
    points = [
        {
            "expected": round(float(bar["confidence"]), 4),
            "observed": round(float(bar["accuracy"]), 4),
            "fraction": round(float(bar["fraction"]), 4),
            "low": round(float(low[index]), 4),
            "high": round(float(high[index]), 4),
        }
        for index, bar in enumerate(bars)
    ]
    return {"kind": "confidence", "points": points}


def _coverage(predictive: Any, targets: Tensor) -> dict[str, Any]:
    """Returns the observed coverage of central intervals against their probability, with the band of calibrated predictions."""
    masses = np.linspace(0.0, 1.0, 21)
    deviation = 2.0 * (predictive.cdf(targets).double() - 0.5).abs().reshape(-1).numpy()
    covered = [float((deviation <= mass + 1e-12).mean()) for mass in masses]
    low, high = binomial_band(BAND, len(targets), masses)
    points = [
        {
            "expected": round(float(masses[index]), 4),
            "observed": round(covered[index], 4),
            "low": round(float(low[index]), 4),
            "high": round(float(high[index]), 4),
        }
        for index in range(len(masses))
    ]
    return {"kind": "coverage", "points": points}


def pair_of_variables(
    posterior: Posterior,
    layer: str | None = None,
    units: tuple[int, int] | None = None,
    prior: tuple[float, float] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Returns draws of two variables of one layer.

    Args:
        posterior: Fitted posterior.
        layer: Name of the layer or weight. None for the one with the variable that varies least, relative to its mean square.
        units: Indices of the two variables. None for the variable that the data determine most, and the one that is most correlated
            with it.
        prior: Mean and standard deviation of the prior of both, or None.
        seed: Seed of the draws.

    Raises:
        FlowBNNError: If there is no such layer or variable.
    """
    draws = {name: value.flatten(1).double() for name, value in posterior.draws(NUM_DRAWS, seed).items()}
    sizes = {name: value.shape[1] for name, value in draws.items()}
    if layer is not None and layer not in draws:
        text = f"the posterior has no {layer!r:.40}{nearest(layer, draws)}"
        raise FlowBNNError(text, kind="name", argument="layer")
    if layer is None:
        layer = _most_determined_layer(draws)
    if units is None:
        units = most_correlated_pair(draws[layer])
    if not all(0 <= unit < sizes[layer] for unit in units):
        text = f"units must be two numbers from 0 to {sizes[layer] - 1}, got {units}"
        raise FlowBNNError(text, argument="units")
    values = draws[layer][:, list(units)]
    correlation = float(torch.corrcoef(values.T)[0, 1]) if bool((values.std(0) > 0).all()) else None
    return {
        "layers": sizes,
        "layer": layer,
        "units": list(units),
        "draws": to_list(values, 4),
        "distinct": len(torch.unique(values, dim=0)),
        "correlation": None if correlation is None else round(correlation, 3),
        "prior": prior,
    }


def _most_determined_layer(draws: dict[str, Tensor]) -> str:
    """Returns the layer of the variable with the smallest spread, among layers of at least two variables that vary."""
    spreads = {name: value.std(0) for name, value in draws.items() if value.shape[1] > 1}
    varying = {name: spread[spread > 0] for name, spread in spreads.items()}
    candidates = {name: float(spread.min()) for name, spread in varying.items() if len(spread) > 1}
    if candidates:
        return min(candidates, key=candidates.__getitem__)
    return next(iter(spreads or draws))


def most_correlated_pair(draws: Tensor) -> tuple[int, int]:
    """Returns the variable with the smallest spread, and the one that is most correlated with it.

    Args:
        draws: Draws ``[N, D]``.

    >>> draws = torch.tensor([[0.0, 0.0, 5.0], [1.0, 0.0, -5.0], [0.0, 0.0, 4.0], [1.0, 0.0, -4.0]])
    >>> most_correlated_pair(draws)
    (0, 2)
    """
    if draws.shape[1] < 2:
        return 0, 0
    spread = draws.std(0)
    if int((spread > 0).sum()) < 2:
        return 0, 1
    first = int(torch.where(spread > 0, spread, torch.inf).argmin())
    centered = draws - draws.mean(0)
    scale = (spread * spread[first]).clamp_min(1e-12)
    correlation = ((centered * centered[:, first : first + 1]).mean(0) / scale).abs()
    correlation[first] = -1.0
    return first, int(torch.where(spread > 0, correlation, -1.0).argmax())


def to_list(values: Tensor, decimals: int) -> Any:
    """Returns rounded numbers as (nested) lists."""
    return torch.round(values.detach().double(), decimals=decimals).tolist()
