"""Fits targets in extreme units, and classes with wrong labels.

A fit to targets ``offset + scale * y`` must predict ``offset + scale * f`` with one ``f`` for all units, which are a convention. The
judge is the fit with an offset and a scale of 1000. Offsets and scales range from 1e-12 to 1e12.
"""

import random
import warnings
from typing import Any

import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import network, small_method, vectors
from tests.stress.fuzz import describe_error
from torch import Tensor

import flowbnn as fb

__all__ = ["stress"]

METHODS = ("map", "node-noise", "swag", "deep-ensemble", "laplace")
NUM_ROWS = 24


def predict(method: str, targets: Tensor) -> Any:
    """Returns the prediction of a short fit for eight inputs."""
    loader = fb.data.TensorLoader(vectors(NUM_ROWS, 3), targets, batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = small_method(method).fit(network(), loader, seed=0, progress=False)
        return posterior.predict(vectors(8, 3), 4, seed=0)


def try_units(method: str, offset: float, scale: float) -> str:
    """Returns a description of the difference that the units of the targets make, or an empty string."""
    if 1e-2 <= scale <= 1e2 and abs(offset) <= 1e2:
        # a network that predicts in these units already is left as it is, and learns in other steps
        return ""
    standard = torch.randn(NUM_ROWS, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets = offset + scale * standard
    rounding = 1e-16 * abs(offset) / scale  # of the targets themselves, in units of their spread
    if rounding > 1e-4:
        return ""
    reference, found = predict(method, 1e3 + 1e3 * standard), predict(method, targets)
    expected = (reference.mean.double() - 1e3) / 1e3
    mean = (found.mean.double() - offset) / scale
    digits = torch.finfo(found.mean.dtype).eps * abs(offset) / scale
    allowed = 1e-2 + 4.0 * digits + 10.0 * rounding
    difference = float((mean - expected).abs().max())
    if not difference <= allowed:
        return f"means differ by {difference:.3g} spreads"
    spread = float(((found.std.double() / scale) / (reference.std.double() / 1e3)).log().abs().max())
    return "" if spread < 0.05 else f"standard deviations differ by a factor of {2.718**spread:.3g}"


def try_labels(method: str, share: float, seed: int) -> str:
    """Returns a description of a failure with a share of wrong labels, or an empty string."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(NUM_ROWS) % 2
    wrong = torch.rand(NUM_ROWS, generator=generator) < share
    prediction = predict(method, torch.where(wrong, 1 - labels, labels))
    sums = prediction.probabilities.sum(-1)
    return "" if bool((sums - 1.0).abs().max() < 1e-5) else f"probabilities sum to {sums.tolist()}"


def stress(seed: int, budget: Budget, methods: tuple[str, ...] = METHODS) -> StressResult:
    """Tries random offsets, scales and shares of wrong labels."""
    result, rng = StressResult("targets", seed), random.Random(seed)
    while budget.allows(result):
        method = rng.choice(methods)
        offset = rng.choice([0.0, 1.0, -1.0]) * 10.0 ** rng.randint(-12, 12)
        scale, share = 10.0 ** rng.randint(-12, 12), rng.random()
        labels = rng.random() < 0.2
        case = (
            f"{method}, {share:.0%} wrong labels"
            if labels
            else f"{method}, offset {offset:g}, scale {scale:g}"
        )
        try:
            failure = try_labels(method, share, seed) if labels else try_units(method, offset, scale)
        except fb.FlowBNNError as error:
            result.add("refused", "" if "\n" not in str(error) else f"{case}: several lines")
            continue
        except Exception as error:
            failure = describe_error(error)
        result.add("failed" if failure else "right", failure and f"{case}: {failure}")
    return result
