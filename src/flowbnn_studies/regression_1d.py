"""Toy regression of Blundell et al. 2015 (https://arxiv.org/abs/1505.05424): uncertainty inside and outside the training range."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import Metric, SeedResults, figure
from flowbnn.data import SPAN, TensorLoader, curve_points, true_curve
from flowbnn.likelihoods import Gaussian
from flowbnn.methods import Posterior
from flowbnn.models import MLP
from flowbnn.options import Count, Positive, options
from flowbnn_studies.runner.findings import pluralize, ranking, round_values
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, predict, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job

# fmt: off
METRICS = (
    Metric("nll", "NLL", "lower", ".3f",
           "Negative log-likelihood (NLL): mean negative log-density of test targets in the training range."),
    Metric("rmse", "RMSE", "lower", ".4f", "Root mean squared error of the predictive mean in the training range."),
    Metric("coverage_90", "Coverage", "none", ".3f",
           "Fraction of test targets in the training range inside their 90 % interval; ideally 0.9."),
    Metric("growth", "Growth", "higher", ".1f",
           "Ratio of the epistemic standard deviation outside the training range to that inside; a single network has none."),
    Metric("coverage_outside", "Coverage outside", "none", ".3f",
           "Fraction of targets of the same curve outside the training range inside their 90 % interval."),
    Metric("nll_outside", "NLL outside", "lower", ".1f",
           "NLL outside the training range, where the data do not determine the curve."),
)
# fmt: on


@options
class Settings(MethodSettings):
    """Settings of the study, in addition to :class:`MethodSettings`.

    Args:
        train, test: Number of training and test points. As many test points lie outside the training range.
        low, high: Range of the test inputs. Training inputs lie in [0, 0.5].
        noise: Standard deviation of the targets that all methods assume: the root mean square over the curve.
        hidden: Width of the hidden layer.
        grid: Number of points along the axis of the figures.
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
    """Scales inputs so that the training range is from -2 to 2."""
    middle, half = (SPAN[0] + SPAN[1]) / 2, (SPAN[1] - SPAN[0]) / 2
    return 2.0 * (inputs - middle) / half


def spread_growth(inputs: Tensor, deviation: Tensor) -> float | None:
    """Returns the mean epistemic standard deviation outside the training range relative to that inside; None if the latter is zero.

    >>> spread_growth(torch.tensor([-0.1, 0.1, 0.4, 0.7]), torch.tensor([3.0, 1.0, 1.0, 5.0]))
    4.0
    """
    inside = (inputs >= SPAN[0]) & (inputs <= SPAN[1])
    mean_inside, mean_outside = float(deviation[inside].mean()), float(deviation[~inside].mean())
    return mean_outside / mean_inside if mean_inside > 0 else None


class Regression1d(MethodStudy):
    name = "regression-1d"
    title = "Regression of a curve observed on half of its range"
    description = "toy regression of Blundell et al. 2015: predictive bands of all methods"
    question = (
        "A small network is trained on a noisy curve between 0 and 0.5. Which methods fit it with the right spread, and which "
        "become more uncertain outside this range?"
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

    def story(self, numbers: Numbers) -> Story:
        ordered = sorted(
            numbers.ranked("coverage_outside"), key=lambda key: numbers.mean(key, "coverage_outside")
        )
        worst, best = ordered[0], ordered[-1]
        low, high = (100 * numbers.mean(key, "coverage_outside") for key in (worst, best))
        ending = "which is still too few" if high < 90 else "which is enough"
        noise = numbers.label("node-noise-planar")
        return Story(
            "Do methods notice where a curve has no data?",
            f"Partly: outside the data, intervals that should hold 90 % of the targets hold {high:.0f} % with "
            f"{numbers.name(best)}, {ending}, {100 * numbers.mean('node-noise-planar', 'coverage_outside'):.0f} % with node noise, "
            f"and {low:.0f} % with {numbers.name(worst)}.",
            f"{low:.0f}–{high:.0f} %",
            "of the targets outside the data lie in 90 % intervals",
            ("coverage_outside", "coverage_90", "nll"),
            rows=numbers.main_rows(worst, best),
            figure="bands",
            panels=(numbers.label(worst), noise, numbers.label(best)),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        candidates = self.evaluated_candidates(settings, parts)
        notes = [
            "The lecture shows the curve without its formula. We use that of Blundell et al., with 0.02 as the standard deviation "
            f"of the noise. All methods assume a noise of {settings.noise:g}, the root mean square of the formula to first order in "
            "[0, 0.5]. The true noise is larger where the curve is steep, which no network here can represent.",
            f"All methods have the same network (one hidden layer of {settings.hidden}), the same {settings.train} points of their "
            f"seed and {settings.epochs} epochs unless their own settings differ. Nothing was chosen on the test points.",
        ]
        first = self.first_seed_parts(settings, parts, "curve")
        all_figures = [gallery(settings, first)] if first else []
        rows = self.rows(settings, parts, METRICS)
        return Findings(answer(parts, candidates), METRICS, rows, all_figures, notes)


def _values(posterior: Posterior, s: Settings, generator: torch.Generator) -> dict[str, float]:
    """Evaluates a posterior inside and outside the training range."""
    inside = curve_points(s.test, generator)
    left = curve_points(s.test // 2, generator, span=(s.low, SPAN[0]))
    right = curve_points(s.test - s.test // 2, generator, span=(SPAN[1], s.high))
    outside = (torch.cat([left[0], right[0]]), torch.cat([left[1], right[1]]))
    inside_values, outside_values = (
        predict(posterior, scale_inputs(inputs), s.samples).evaluate(targets)
        for inputs, targets in (inside, outside)
    )
    return {
        **inside_values,
        "coverage_outside": outside_values["coverage_90"],
        "nll_outside": outside_values["nll"],
    }


def gallery(s: Settings, first: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns a figure with a panel for each method, for the first seed."""
    panels = []
    for label, part in first.items():
        growth = part["values"].get("growth")
        note = "" if growth is None else f"{growth:.1f} times the spread outside"
        panels.append({"title": label, "note": note, **part["curve"], "points": part["points"]})
    axis = torch.linspace(s.low, s.high, s.grid)
    truth = {"x": round_values(axis), "y": round_values(true_curve(axis))}
    return figure(
        "bands",
        "Predictions of each method",
        "Seed 0. Dots: training points. Line: predictive mean. Dark band: ± 2 epistemic standard deviations. Light band: ± 2 "
        "predictive standard deviations, which include the noise of the targets. Dashed line: true curve. After a name: ratio of "
        "the epistemic standard deviation outside the training range to that inside.",
        {"x_label": "x", "span": list(SPAN), "truth": truth, "panels": panels},
    )


def answer(parts: SeedResults, candidates: Sequence[Candidate]) -> str:
    """Returns the answer, computed from the numbers."""
    rank = partial(ranking, parts, candidates)
    return (
        f"Best NLL inside the training range ({pluralize(len(parts.seeds))}): {rank('nll')}.\n"
        f"Largest growth of the epistemic standard deviation outside: {rank('growth', higher=True, form='.1f')} times that inside.\n"
        f"Fraction of targets outside that the 90 % intervals cover: {rank('coverage_outside', higher=True, form='.0%')}."
    )
