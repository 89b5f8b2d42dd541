"""What a comparison says and draws, from its parts alone."""

from collections.abc import Sequence
from typing import Any

from flowbnn_studies.runner.base import CLASSIFICATION, Findings, Metric, Parts, Variant
from flowbnn_studies.runner.figures import figure, reliability_figure
from flowbnn_studies.runner.lineup import FAMILIES, PLAIN, Rival
from flowbnn_studies.runner.rivalry import best_by, words

__all__ = ["COSTS", "METRICS", "conclude", "pareto_front", "with_ratios"]

COSTS = (
    Metric(
        "training",
        "Training",
        "lower",
        ".2f",
        "Training time over that of the plain network (maximum likelihood).",
    ),
    Metric(
        "prediction",
        "Prediction",
        "lower",
        ".2f",
        "Time to predict the test set over that of the plain network's single pass.",
    ),
    Metric("parameters", "Parameters", "lower", ",.0f", "Real numbers that are kept in order to predict."),
    Metric(
        "memory",
        "Memory, MB",
        "lower",
        ".0f",
        "Most memory held while training and predicting, beyond what was held before.",
    ),
)
METRICS = (
    *CLASSIFICATION,
    Metric("rmse", "RMSE", "lower", ".4f", "Root mean squared error of the predictive mean."),
    Metric("coverage_90", "Coverage", "none", ".3f", "Share of targets inside their 90 % interval."),
    Metric(
        "auroc",
        "Novelty AUROC",
        "higher",
        ".4f",
        "Chance that a novel input is given a higher uncertainty than a test input; 0.5 is guessing.",
    ),
    *COSTS,
)


def with_ratios(parts: Parts, plain: str = PLAIN) -> Parts:
    """The parts with times over those of the plain network of the same seed."""
    content = {}
    for (key, seed), part in parts.content.items():
        values = dict(part["values"])
        base = parts.content.get((plain, seed), {}).get("values", {})
        for name, seconds in (("training", "train_seconds"), ("prediction", "predict_seconds")):
            mine, theirs = values.get(seconds), base.get(seconds)
            values[name] = mine / theirs if mine is not None and theirs else None
        content[key, seed] = {**part, "values": values if part["values"] else {}}
    return Parts(parts.seeds, content)


def pareto_front(parts: Parts, chosen: Sequence[Rival], cost: str, loss: str) -> list[Rival]:
    """The methods that none of the others beats: no other costs at most as much, loses at most as much, and one of both less.

    In the order of their cost.
    """
    having = [r for r in best_by(parts, chosen, cost) if r in best_by(parts, chosen, loss)]

    def at(rival: Rival) -> tuple[float, float]:
        return parts.mean(rival.key, cost), parts.mean(rival.key, loss)

    def beaten(rival: Rival) -> bool:
        x, y = at(rival)
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in map(at, having))

    return [rival for rival in having if not beaten(rival)]


def pareto_figure(parts: Parts, chosen: Sequence[Rival]) -> dict[str, Any]:
    """Quality against cost, both ways, low and left being better."""
    families = {rival.family: FAMILIES[rival.family] for rival in chosen}
    panels = []
    for loss, name in (("nll", "NLL"), ("ece", "ECE")):
        having = best_by(parts, chosen, loss)
        for cost, words_of in (("training", "training time"), ("prediction", "prediction time")):
            if having:
                panels.append(
                    {
                        "title": f"{name} against {words_of}",
                        "x_label": f"{words_of}, times the plain network's",
                        "y_label": name,
                        "items": [
                            {
                                "label": rival.label,
                                "colour": rival.colour,
                                "x": _number(parts.mean(rival.key, cost)),
                                "y": _number(parts.mean(rival.key, loss)),
                            }
                            for rival in having
                        ],
                    }
                )
    return figure(
        "pareto",
        "What a better answer costs",
        "Means over seeds; low and left is better. The line joins the methods that no other beats in both: whoever is above it or to "
        "the right of it is dearer than one on it and no better.",
        {
            "families": [{"label": label, "colour": colour} for label, colour in families.values()],
            "panels": panels,
        },
    )


def _number(value: float) -> float | None:
    return value if value == value else None


def conclude(
    parts: Parts, chosen: Sequence[Rival], notes: list[str], plain: str = PLAIN, more: str = "--seeds 3"
) -> Findings:
    """The sorted table, the figures and the answer.

    Args:
        parts: what :func:`~flowbnn_studies.comparing.measuring.measure` gave for each method and seed.
        chosen: the methods.
        notes: what to say besides.
        plain: key of the plain network.
        more: how the caller is told to take several seeds.
    """
    parts = with_ratios(parts, plain)
    ordered = best_by(parts, chosen, "nll")
    metrics = [
        m for m in METRICS if any(any(v is not None for v in parts.values(r.key, m.key)) for r in ordered)
    ]
    rows = [
        {**parts.row(Variant(rival.key, rival.label), metrics), "colour": rival.colour} for rival in ordered
    ]
    figures = [pareto_figure(parts, ordered)] if ordered else []
    calibrated = [rival for rival in ordered if all("bins" in part for part in parts.of(rival.key))]
    if calibrated:
        figures.append(
            reliability_figure(
                "Accuracy against confidence",
                "Test set, bins of all seeds together; the ECE is the mean over seeds.",
                [Variant(rival.key, rival.label) for rival in calibrated],
                parts,
            )
        )
    return Findings(answer(parts, ordered, more), metrics, rows, figures, notes)


def answer(parts: Parts, ordered: Sequence[Rival], more: str = "--seeds 3") -> str:
    """Which to use, and what it costs."""
    if not ordered:
        return "No method has numbers yet."
    best = ordered[0]
    seeds = len(parts.seeds)
    text = (
        f"By NLL {best.label} is best ({parts.mean(best.key, 'nll'):.4f}, {seeds} seed{'s' if seeds > 1 else ''}), then "
        f"{words(parts, ordered[1:3], 'nll', '.4f')}."
        if len(ordered) > 1
        else f"{best.label} is the only method here, with an NLL of {parts.mean(best.key, 'nll'):.4f}."
    )
    if len(ordered) > 1:
        text += chance(parts, ordered, more)
    cost = parts.mean(best.key, "training")
    if cost == cost:
        text += (
            f" It takes {cost:.1f} times the plain network's training time and {parts.mean(best.key, 'prediction'):.0f} times its "
            "prediction time."
        )
    front = pareto_front(parts, ordered, "training", "nll")
    if front:
        told = ", ".join(
            f"{r.label} ({parts.mean(r.key, 'training'):.1f} times, NLL {parts.mean(r.key, 'nll'):.4f})"
            for r in front
        )
        text += f" For a given training time nobody beats, from cheap to dear: {told}."
    calibrated, telling = best_by(parts, ordered, "ece"), best_by(parts, ordered, "auroc", higher=True)
    if calibrated:
        text += f" Best calibrated: {words(parts, calibrated[:1], 'ece', '.4f')} (ECE)."
    if telling and parts.mean(telling[0].key, "auroc") <= 0.5:
        told = words(parts, telling[:1], "auroc")
        text += f" No method tells novel inputs from known ones (best: {told} AUROC, where 0.5 is guessing)."
    elif telling:
        text += f" Best at telling novel inputs: {words(parts, telling[:1], 'auroc')} (AUROC)."
    return text


def chance(parts: Parts, ordered: Sequence[Rival], more: str = "--seeds 3") -> str:
    """How far the first place can be trusted."""
    if len(parts.seeds) < 2:
        return f" One seed does not tell a lead from chance; several ({more}) do."
    first = [value for value in parts.values(ordered[0].key, "nll") if value is not None]
    near = [
        rival.label
        for rival in ordered[1:]
        if min(value for value in parts.values(rival.key, "nll") if value is not None) <= max(first)
    ]
    if not near:
        return " No seed of another method comes near its worst."
    return f" Its worst seed is no better than the best of {len(near)} others: {'; '.join(near)}."
