"""When does a richer posterior pay? The gap per example against what it costs in predictions, over the number of examples."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flowbnn.compare.results import Metric, Parts, figure
from flowbnn.options import options
from flowbnn_studies.posteriors.posterior_quality import (
    PROBLEMS,
    ProblemName,
    Settings,
    fit_by_calibrate,
    make_case,
    measure_posterior,
    sample_chains,
)
from flowbnn_studies.runner.findings import (
    describe_convergence,
    drop_unconverged,
    line,
    paired_difference,
    panel,
    pluralize,
)
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

ROWS = {"factorized": "Factorized", "full": "Joint"}
MIN_EXCESS = 0.01  # nats of a test example's log-likelihood
COLUMNS = {
    "per_example": ("Gap per example", "lower", ".4f", "Log-evidence less ELBO over the number of examples, in nats."),
    "excess": ("NLL - HMC's", "lower", "+.4f", "Test NLL less that of the chains' predictions."),
    "variation": ("TV", "lower", ".4f", "Total variation to the chains' predictions at test inputs."),
    "k": ("k-hat", "lower", ".2f", "Shape of the tail of the importance weights."),
}  # fmt: skip
METRICS = (
    *(
        Metric(f"{key}_{row}", f"{label}, {name.lower()}", better, form, meaning)
        for key, (label, better, form, meaning) in COLUMNS.items()
        for row, name in ROWS.items()
    ),
    Metric("rhat", "R-hat", "none", ".3f", "Of the chains; above 1.01 they are not taken for the truth."),
)


@options
class MattersSettings(Settings):
    """What the study depends on, besides the :class:`~flowbnn_studies.posteriors.posterior_quality.Settings` of weights and chains.

    Args:
        sizes: examples that the noise is fitted to; those beyond what a problem has are left out.
    """

    problems: tuple[ProblemName, ...] = ("blobs", "digits")
    sizes: tuple[int, ...] = (20, 50, 100, 200, 500, 1000, 2000)


MAX_SIZES = {"digits": 1000, "boston": 200}  # examples of the noise that leave some to test on


class WhenItMatters(Study):
    name = "when-it-matters"
    title = "When does a richer posterior pay?"
    description = "the gap per example of factorized and joint Gaussians against their NLL minus HMC's, for 20 to 2,000 examples"
    question = (
        "The noise of a trained network is fitted to 20 to 2,000 fresh examples by a factorized and by a joint Gaussian. From which "
        "gap per example on do their predictions fall behind those of the exact posterior?"
    )
    source = "flowbnn's own"
    settings = MattersSettings
    seeds = 10
    headline = ("per_example_factorized", "per_example_full", "excess_factorized", "excess_full")
    quick: ClassVar[dict[str, Any]] = {
        "problems": ("blobs",), "sizes": (20, 30), "epochs": 5, "chains": 2, "samples": 4, "warmup": 4, "predictions": 30,
    }  # fmt: skip

    def variants(self, settings: MattersSettings) -> tuple[Variant, ...]:
        return tuple(
            Variant(f"{name}-{size}", f"{problem_label(name)}, N = {size:,}", cost=200 + size)
            for name in settings.problems
            for size in settings.sizes
            if size <= MAX_SIZES.get(name, size)
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: MattersSettings = job.settings
        name, _, size = job.variant.partition("-")
        device = {"accelerator": job.accelerator}
        case = make_case(name, s, job.seed, device, int(size))
        posteriors = {key: fit_by_calibrate(case, job.seed, device, key) for key in ROWS}
        chains = sample_chains(posteriors["full"], case, s, job.seed)
        values: dict[str, float] = {"rhat": chains.rhat}
        for key, posterior in posteriors.items():
            own, _ = measure_posterior(posterior, chains, case, s, job.seed)
            values |= {f"{column}_{key}": own[column] for column in COLUMNS}
        return {"values": values}

    def findings(self, settings: MattersSettings, parts: Parts) -> Findings:
        told = describe_convergence(
            (f"{key} seed {seed}", part["values"]["rhat"])
            for (key, seed), part in sorted(parts.content.items())
        )
        trusted = {
            key: part | {"values": drop_unconverged(part["values"])} for key, part in parts.content.items()
        }
        parts = Parts(parts.seeds, trusted)
        rows = self.rows(settings, parts, METRICS)
        notes = [
            "Both Gaussians are those of fb.calibrate (structure='factorized' and 'full'), with the prior N(1, 0.5²); the weights are "
            "trained on as few examples as in posterior-quality, and frozen.",
            told,
        ]
        figures = [self.curve(settings, parts), self.sizes(settings, parts)]
        return Findings(answer(settings, parts), METRICS, rows, figures, notes)

    def curve(self, settings: MattersSettings, parts: Parts) -> dict[str, Any]:
        """What a gap costs."""
        panels = []
        for name in settings.problems:
            keys = variant_keys(settings, name)
            gaps = {row: [parts.mean(key, f"per_example_{row}") for key in keys] for row in ROWS}
            lines = [
                sorted_line(label, parts, keys, f"excess_{row}", gaps[row]) for row, label in ROWS.items()
            ]
            panels.append(panel(problem_label(name), "test NLL minus HMC's", lines))
        caption = (
            "Mean over seeds for every number of examples, the band is one standard deviation; few examples are on the right. Where a "
            "line is at zero, no posterior would predict better."
        )
        data = {"x_label": "gap to the log-evidence per example (nats)", "log": True, "panels": panels}
        return figure("curves", "What a gap costs", caption, data)

    def sizes(self, settings: MattersSettings, parts: Parts) -> dict[str, Any]:
        """Gap and cost over the number of examples."""
        panels = []
        for column in ("per_example", "excess"):
            for name in settings.problems:
                keys = variant_keys(settings, name)
                sizes = [float(key.partition("-")[2]) for key in keys]
                lines = [
                    sorted_line(label, parts, keys, f"{column}_{row}", sizes) for row, label in ROWS.items()
                ]
                panels.append(panel(f"{COLUMNS[column][0]}, {problem_label(name)}", "nats", lines))
        caption = "Mean over seeds, the band is one standard deviation."
        data = {"x_label": "examples", "log": True, "panels": panels}
        return figure("curves", "Over the number of examples", caption, data)


def problem_label(name: str) -> str:
    """The name of a problem without its number of examples.

    >>> problem_label("blobs")
    'Blobs, D = 34'
    """
    return PROBLEMS[name].label.rpartition(", N")[0]


def variant_keys(settings: MattersSettings, name: ProblemName) -> list[str]:
    """The variants of a problem."""
    return [one.key for one in WhenItMatters().variants(replace(settings, problems=(name,)))]


def sorted_line(
    label: str, parts: Parts, keys: Sequence[str], metric: str, x: Sequence[float]
) -> dict[str, Any]:
    """A line of a figure, in the order of its places."""
    order = sorted(range(len(keys)), key=lambda index: x[index] if math.isfinite(x[index]) else math.inf)
    places = [x[index] if x[index] > 0 else None for index in order]  # the axis is logarithmic
    return line(label, places, (parts.values(keys[index], metric) for index in order))


def answer(settings: MattersSettings, parts: Parts) -> str:
    """The answer, put together from the numbers."""
    lines = []
    found: list[tuple[float, float]] = []
    for name in settings.problems:
        keys = variant_keys(settings, name)
        found += [
            (parts.mean(key, f"per_example_{row}"), parts.mean(key, f"excess_{row}"))
            for key in keys
            for row in ROWS
            if parts.values(key, f"excess_{row}")
        ]
        pays = []
        for key in keys:
            if not parts.values(key, "excess_full"):
                continue
            gain = paired_difference(parts.values(key, "excess_factorized"), parts.values(key, "excess_full"))
            if gain.significant and gain.mean > MIN_EXCESS:
                pays.append(f"{int(key.partition('-')[2]):,} ({gain.describe(3)})")
        lines.append(
            f"{problem_label(name)}, {pluralize(len(parts.seeds))}: a joint Gaussian predicts significantly better than a factorized "
            f"one, by more than {MIN_EXCESS} nats, with {', '.join(pays) or 'no number of'} examples."
        )
    small = [gap for gap, cost in found if cost > MIN_EXCESS]
    large = [gap for gap, cost in found if cost <= MIN_EXCESS]
    if small:
        lines.append(
            f"No posterior with a gap below {min(small):.3f} nats per example has a test NLL more than {MIN_EXCESS} above that of the "
            f"exact posterior; the largest gap without such an effect is {max(large, default=math.nan):.3f}."
        )
    elif large:
        lines.append(
            f"No gap, up to {max(large):.3f} nats per example, raises the test NLL by more than {MIN_EXCESS}."
        )
    return "\n".join(lines)
