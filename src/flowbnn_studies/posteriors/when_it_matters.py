"""Benefit of a richer posterior: gap per example and test NLL relative to the exact posterior, over the number of examples."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flowbnn.compare.results import Metric, SeedResults, figure
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
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

ROWS = {"factorized": "Factorized", "full": "Joint"}
MIN_EXCESS = 0.01  # smallest relevant difference of the test NLL, in nats
COLUMNS = {
    "per_example": ("Gap per example", "lower", ".4f", "Log-evidence minus ELBO, divided by the number of examples, in nats."),
    "excess": ("NLL - HMC", "lower", "+.4f", "Test NLL minus that of the chains."),
    "variation": ("TV", "lower", ".4f", "Total variation distance to the predictions of the chains on test inputs."),
    "k": ("k-hat", "lower", ".2f", "Pareto k-hat of the importance weights."),
}  # fmt: skip
METRICS = (
    *(
        Metric(f"{key}_{row}", f"{label}, {name.lower()}", better, form, meaning)
        for key, (label, better, form, meaning) in COLUMNS.items()
        for row, name in ROWS.items()
    ),
    Metric("rhat", "R-hat", "none", ".3f", "R-hat of the chains; above 1.01 they are not used."),
)


@options
class MattersSettings(Settings):
    """Settings of the study, in addition to :class:`~flowbnn_studies.posteriors.posterior_quality.Settings`.

    Args:
        sizes: Numbers of examples of the noise. Sizes that exceed a problem are omitted.
    """

    problems: tuple[ProblemName, ...] = ("blobs", "digits")
    sizes: tuple[int, ...] = (20, 50, 100, 200, 500, 1000, 2000)


MAX_SIZES = {"digits": 1000, "boston": 200}  # largest sizes that leave test examples


class WhenItMatters(Study):
    name = "when-it-matters"
    title = "When does a richer posterior improve predictions?"
    description = (
        "gap per example and NLL of factorized and joint Gaussians relative to HMC, for 20 to 2,000 examples"
    )
    question = (
        "The noise of a trained network is fitted to 20 to 2,000 examples by a factorized and by a joint Gaussian. From which gap "
        "per example on are their predictions worse than those of the exact posterior?"
    )
    source = "no published counterpart"
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
            numbers, _ = measure_posterior(posterior, chains, case, s, job.seed)
            values |= {f"{column}_{key}": numbers[column] for column in COLUMNS}
        return {"values": values}

    def story(self, numbers: Numbers) -> Story:
        gains = {}
        for row in numbers.rows:
            excess = (numbers.per_seed(row, f"excess_{kind}") for kind in ("factorized", "full"))
            gains[row] = paired_difference(*excess)
        won = [row for row, gain in gains.items() if gain.low > 0 and gain.mean > MIN_EXCESS]
        where = f" ({' and '.join(numbers.name(row) for row in won)})" if won else ""
        means = (
            [numbers.mean(row, f"per_example_{kind}") for row in gains] for kind in ("full", "factorized")
        )
        closer = sum(full < factorized for full, factorized in zip(*means, strict=True))
        return Story(
            "When does a joint posterior of the noise predict better than a factorized one?",
            f"Rarely: it is closer to the exact one in {closer} of {len(gains)} settings, but its test NLL is lower, significantly "
            f"and by more than {MIN_EXCESS} nats, in only {len(won)}{where}.",
            f"{len(won)} of {len(gains)}",
            f"settings in which a joint posterior gains more than {MIN_EXCESS} nats",
            ("excess_factorized", "excess_full", "per_example_factorized", "per_example_full"),
            figure="curves",
        )

    def findings(self, settings: MattersSettings, parts: SeedResults) -> Findings:
        convergence = describe_convergence(
            (f"{key} seed {seed}", part["values"]["rhat"])
            for (key, seed), part in sorted(parts.content.items())
        )
        trusted = {
            key: part | {"values": drop_unconverged(part["values"])} for key, part in parts.content.items()
        }
        parts = SeedResults(parts.seeds, trusted)
        rows = self.rows(settings, parts, METRICS)
        notes = [
            "Both Gaussians are fitted by fb.calibrate (structure='factorized' and 'full') with the prior N(1, 0.5²). The weights "
            "are trained on as few examples as in posterior-quality and then frozen.",
            convergence,
        ]
        figures = [self.curve(settings, parts), self.sizes(settings, parts)]
        return Findings(answer(settings, parts), METRICS, rows, figures, notes)

    def curve(self, settings: MattersSettings, parts: SeedResults) -> dict[str, Any]:
        """Returns the figure of the test NLL against the gap."""
        panels = []
        for name in settings.problems:
            keys = variant_keys(settings, name)
            gaps = {row: [parts.mean(key, f"per_example_{row}") for key in keys] for row in ROWS}
            lines = [
                sorted_line(label, parts, keys, f"excess_{row}", gaps[row]) for row, label in ROWS.items()
            ]
            panels.append(panel(problem_label(name), "test NLL minus that of HMC", lines))
        caption = (
            "Mean over seeds for every number of examples, with a band of one standard deviation. Few examples are on the right. "
            "At zero, a better posterior would not improve predictions."
        )
        data = {"x_label": "gap to the log-evidence per example (nats)", "log": True, "panels": panels}
        return figure("curves", "Test NLL against the gap", caption, data)

    def sizes(self, settings: MattersSettings, parts: SeedResults) -> dict[str, Any]:
        """Returns the figure of gap and test NLL against the number of examples."""
        panels = []
        for column in ("per_example", "excess"):
            for name in settings.problems:
                keys = variant_keys(settings, name)
                sizes = [float(key.partition("-")[2]) for key in keys]
                lines = [
                    sorted_line(label, parts, keys, f"{column}_{row}", sizes) for row, label in ROWS.items()
                ]
                panels.append(panel(f"{COLUMNS[column][0]}, {problem_label(name)}", "nats", lines))
        caption = "Mean over seeds, with a band of one standard deviation."
        data = {"x_label": "examples", "log": True, "panels": panels}
        return figure("curves", "Gap and test NLL against the number of examples", caption, data)


def problem_label(name: str) -> str:
    """Returns the name of a problem without its number of examples.

    >>> problem_label("blobs")
    'Blobs, D = 34'
    """
    return PROBLEMS[name].label.rpartition(", N")[0]


def variant_keys(settings: MattersSettings, name: ProblemName) -> list[str]:
    """Returns the keys of the variants of a problem."""
    return [variant.key for variant in WhenItMatters().variants(replace(settings, problems=(name,)))]


def sorted_line(
    label: str, parts: SeedResults, keys: Sequence[str], metric: str, x: Sequence[float]
) -> dict[str, Any]:
    """Returns a line of a figure, sorted by x."""
    order = sorted(range(len(keys)), key=lambda index: x[index] if math.isfinite(x[index]) else math.inf)
    # the axis is logarithmic, so only positive values are shown
    sorted_x = [x[index] if x[index] > 0 else None for index in order]
    return line(label, sorted_x, (parts.values(keys[index], metric) for index in order))


def answer(settings: MattersSettings, parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""
    lines = []
    points: list[tuple[float, float]] = []
    for name in settings.problems:
        keys = variant_keys(settings, name)
        points += [
            (parts.mean(key, f"per_example_{row}"), parts.mean(key, f"excess_{row}"))
            for key in keys
            for row in ROWS
            if parts.values(key, f"excess_{row}")
        ]
        gains = []
        for key in keys:
            if not parts.values(key, "excess_full"):
                continue
            gain = paired_difference(parts.values(key, "excess_factorized"), parts.values(key, "excess_full"))
            if gain.significant and gain.mean > MIN_EXCESS:
                gains.append(f"{int(key.partition('-')[2]):,} ({gain.describe(3)})")
        lines.append(
            f"{problem_label(name)}, {pluralize(len(parts.seeds))}: a joint Gaussian predicts significantly better than a factorized "
            f"one, by more than {MIN_EXCESS} nats, with {', '.join(gains) or 'no number of'} examples."
        )
    relevant_gaps = [gap for gap, cost in points if cost > MIN_EXCESS]
    irrelevant_gaps = [gap for gap, cost in points if cost <= MIN_EXCESS]
    if relevant_gaps:
        lines.append(
            f"No posterior with a gap below {min(relevant_gaps):.3f} nats per example has a test NLL more than {MIN_EXCESS} above "
            f"that of the exact posterior; the largest gap without such an effect is {max(irrelevant_gaps, default=math.nan):.3f}."
        )
    elif irrelevant_gaps:
        lines.append(
            f"No gap, up to {max(irrelevant_gaps):.3f} nats per example, raises the test NLL by more than {MIN_EXCESS}."
        )
    return "\n".join(lines)
