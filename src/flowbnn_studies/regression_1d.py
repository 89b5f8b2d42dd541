"""The toy regression of Blundell et al. 2015 (https://arxiv.org/abs/1505.05424): what each method says where it has seen nothing."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import Metric, Parts, figure
from flowbnn.data import SPAN, TensorLoader, curve_points, true_curve
from flowbnn.likelihoods import Gaussian
from flowbnn.methods import Posterior
from flowbnn.models import MLP
from flowbnn.options import Count, Positive, options
from flowbnn_studies.runner.findings import pluralize, ranking, round_values
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, predict, shuffled_loader
from flowbnn_studies.runner.study import Findings, Job

# fmt: off
METRICS = (
    Metric("nll", "NLL", "lower", ".3f", "Mean negative log-density of unseen targets in the training range."),
    Metric("rmse", "RMSE", "lower", ".4f", "Root mean squared error of the mean, in the training range."),
    Metric("coverage_90", "Coverage", "none", ".3f",
           "Share of unseen targets in the training range that lie inside their 90 % interval; 0.9 is right."),
    Metric("growth", "Growth", "higher", ".1f",
           "Epistemic standard deviation outside the training range, over that inside; a single network has none."),
    Metric("coverage_outside", "Coverage outside", "none", ".3f",
           "Share of targets of the same curve outside the training range that lie inside their 90 % interval."),
    Metric("nll_outside", "NLL outside", "lower", ".1f",
           "As NLL, outside the training range, where no method can know the curve."),
)
# fmt: on


@options
class Settings(MethodSettings):
    """What the study depends on, besides :class:`MethodSettings`.

    Args:
        train, test: number of points; as many test points lie outside the training range.
        low, high: the inputs that are drawn and tested; training inputs lie in [0, 0.5].
        noise: the standard deviation of the targets that all methods are given, the curve's root mean square one.
        hidden: width of the network between its two layers.
        grid: points along the axis of the pictures.
    """

    train: Count = 100
    test: Count = 500
    low: float = -0.25
    high: float = 0.75
    noise: Positive = 0.063
    hidden: Count = 50
    batch: Count = 25
    epochs: Count = 300
    lr: Positive = 1e-2
    samples: Count = 200
    grid: Count = 121


def scale_inputs(inputs: Tensor) -> Tensor:
    """Inputs as the network takes them: the training range is from -2 to 2."""
    middle, half = (SPAN[0] + SPAN[1]) / 2, (SPAN[1] - SPAN[0]) / 2
    return 2.0 * (inputs - middle) / half


def spread_growth(inputs: Tensor, deviation: Tensor) -> float | None:
    """Mean epistemic standard deviation outside the training range over that inside; None where there is none inside.

    >>> spread_growth(torch.tensor([-0.1, 0.1, 0.4, 0.7]), torch.tensor([3.0, 1.0, 1.0, 5.0]))
    4.0
    """
    inside = (inputs >= SPAN[0]) & (inputs <= SPAN[1])
    within, beyond = float(deviation[inside].mean()), float(deviation[~inside].mean())
    return beyond / within if within > 0 else None


class Regression1d(MethodStudy):
    name = "regression-1d"
    title = "A curve seen on half of its range"
    description = (
        "the toy regression of Blundell et al. 2015: all methods, with the bands of what they do not know"
    )
    question = (
        "A small network learns a noisy curve from points between 0 and 0.5. Which methods fit it there with the right "
        "spread, and which say that they do not know how it goes on?"
    )
    source = "Ahn and Lee's lecture, toy regression; the curve of Blundell et al. 2015, section 5.2"
    settings = Settings
    headline = ("nll", "coverage_90", "growth", "coverage_outside")
    specific: ClassVar[dict[str, dict[str, Any]]] = {
        "hmc": {"samples": 100, "warmup": 100, "chains": 4, "steps": 32},
        "nuts": {"samples": 60, "warmup": 60, "chains": 2, "max_depth": 6},
    }
    quick: ClassVar[dict[str, Any]] = {"epochs": 20, "test": 60, "samples": 16, "grid": 41, "hidden": 16}

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        s: Settings = job.settings
        network = MLP(1, (s.hidden,), 1)
        generator = torch.Generator().manual_seed(1000 + job.seed)
        inputs, targets = curve_points(s.train, generator)
        held_out = curve_points(s.train // 4, generator)
        loader = shuffled_loader((scale_inputs(inputs), targets), s.batch, job.seed)
        validation = TensorLoader(scale_inputs(held_out[0]), held_out[1], batch_size=s.train)
        posterior = self.fit(job, candidate, network, loader, validation, likelihood=Gaussian(noise=s.noise))
        axis = torch.linspace(s.low, s.high, s.grid)
        curve = predict(posterior, scale_inputs(axis.unsqueeze(1)), s.samples)
        spread = curve.epistemic.sqrt().squeeze(1)
        values = {**_values(posterior, s, generator), "growth": spread_growth(axis, spread)}
        content: dict[str, Any] = {"values": values}
        if job.seed == 0:
            mean, total = round_values(curve.mean.squeeze(1)), round_values(curve.std.squeeze(1))
            content["curve"] = {
                "x": round_values(axis),
                "mean": mean,
                "epistemic": round_values(spread),
                "total": total,
            }
            content["points"] = {"x": round_values(inputs.squeeze(1)), "y": round_values(targets.squeeze(1))}
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        chosen = self.evaluated_candidates(settings, parts)
        notes = [
            f"The lecture shows the curve without its formula; ours is that of Blundell et al., with the 0.02 taken as the standard "
            f"deviation of the noise. All methods are given a noise of {settings.noise:g}, the root mean square of what the "
            "formula gives to first order in [0, 0.5]; in truth it is wider where the curve is steep, which no network here can say.",
            f"All methods have the same network (one hidden layer of {settings.hidden}), the same {settings.train} points of their "
            f"seed and {settings.epochs} epochs or what their own settings say; nothing was chosen on the test points.",
        ]
        first = self.first_seed_parts(settings, parts, "curve")
        drawn = [gallery(settings, first)] if first else []
        rows = self.rows(settings, parts, METRICS)
        return Findings(answer(parts, chosen), METRICS, rows, drawn, notes)


def _values(posterior: Posterior, s: Settings, generator: torch.Generator) -> dict[str, float]:
    inside = curve_points(s.test, generator)
    left = curve_points(s.test // 2, generator, span=(s.low, SPAN[0]))
    right = curve_points(s.test - s.test // 2, generator, span=(SPAN[1], s.high))
    beyond = (torch.cat([left[0], right[0]]), torch.cat([left[1], right[1]]))
    near, far = (
        predict(posterior, scale_inputs(inputs), s.samples).evaluate(targets)
        for inputs, targets in (inside, beyond)
    )
    return {**near, "coverage_outside": far["coverage_90"], "nll_outside": far["nll"]}


def gallery(s: Settings, first: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One panel for each method, of the first seed."""
    panels = []
    for label, part in first.items():
        growth = part["values"].get("growth")
        note = "" if growth is None else f"spread × {growth:.1f} outside"
        panels.append({"title": label, "note": note, **part["curve"], "points": part["points"]})
    axis = torch.linspace(s.low, s.high, s.grid)
    truth = {"x": round_values(axis), "y": round_values(true_curve(axis))}
    return figure(
        "bands",
        "What each method says of the curve",
        "Seed 0. Dots: the points to learn from. Line: the predictive mean. Dark band: two epistemic standard deviations to either "
        "side, what the method does not know of the curve; light band: two of the whole prediction, with the noise of the targets. "
        "Dashed: the true curve. Behind a name: how many times larger the epistemic spread is outside the range than inside.",
        {"x_label": "x", "span": list(SPAN), "truth": truth, "panels": panels},
    )


def answer(parts: Parts, chosen: Sequence[Candidate]) -> str:
    """The answer, put together from the numbers."""
    rank = partial(ranking, parts, chosen)
    return (
        f"Inside the training range the best probabilities, {pluralize(len(parts.seeds))}, are those of {rank('nll')} (NLL).\n"
        f"Outside it the spread grows most with {rank('growth', higher=True, form='.1f')} (times that inside).\n"
        f"There the 90 % intervals hold {rank('coverage_outside', higher=True, form='.0%')} of the targets."
    )
