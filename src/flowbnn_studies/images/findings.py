"""What the studies on images conclude, from their parts alone: rows, paired comparisons, the answer and the notes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flowbnn.metrics import calibration_floor
from flowbnn_studies.images.measures import RULE
from flowbnn_studies.images.published import Published
from flowbnn_studies.images.recipes import METHODS, SITES, split_key
from flowbnn_studies.images.settings import ImageSettings
from flowbnn_studies.runner.base import Metric, Parts, Variant
from flowbnn_studies.runner.statistics import Paired, paired, summary

__all__ = ["answer", "comparisons", "notes", "present", "rows"]

RECIPES = {"document": "document's recipe", "best": "best recipe"}
JUDGED = ("accuracy", "nll", "ece")


def present(parts: Parts, variants: Sequence[Variant]) -> list[Variant]:
    """The variants with a row of their own that have been trained."""
    return [variant for variant in variants if variant.shown and parts.of(variant.key)]


def rows(
    parts: Parts, variants: Sequence[Variant], metrics: Sequence[Metric], published: Published
) -> list[dict[str, Any]]:
    """Our rows with document 000's values beside them and what the methods cost, then rows of other sources."""
    costs = parts.of("cost")[0]["ratios"] if parts.of("cost") else {}
    shown = present(parts, variants)
    last = "best" if any(variant.key.startswith("best-") for variant in shown) else "document"
    found = []
    for variant in shown:
        row = parts.row(variant, metrics, published.rows.get(variant.key))
        recipe, method, site = split_key(variant.key)
        ratios = costs.get(f"{method}-{site}" if site else method, {}) if recipe == last else {}
        row["values"] |= {name: summary([value]) for name, value in ratios.items() if value is not None}
        if missing := unfinished(parts, shown, variant):
            row["unfinished"] = missing
        found.append(row)
    others = {**published.cited, "To be reached": published.target}
    for number, (label, values) in enumerate(others.items()):
        cells = {name: summary([], value) for name, value in values.items()}
        found.append({"key": f"cited-{number}", "label": label, "values": cells, "cited": "yes"})
    return found


def unfinished(parts: Parts, shown: Sequence[Variant], variant: Variant) -> str:
    """How many of its recipe's seeds a variant has, in words; nothing where it has all that others have."""
    recipe = split_key(variant.key)[0]
    most = max(len(parts.of(other.key)) for other in shown if split_key(other.key)[0] == recipe)
    number = len(parts.of(variant.key))
    return f"{number} of {most} seeds" if number < most else ""


def finished(parts: Parts, variants: Sequence[Variant]) -> list[Variant]:
    """The variants that have as many seeds as the others of their recipe."""
    shown = present(parts, variants)
    return [variant for variant in shown if not unfinished(parts, shown, variant)]


def compare(parts: Parts, first: str, second: str, metric: str) -> Paired | None:
    """The difference of two variants seed by seed; None where they share no seed."""
    a, b = parts.common(first, second, metric)
    return paired(a, b) if a else None


def pairs() -> list[tuple[str, str, str]]:
    """What is compared: a title and two variants, the second of which is the one to be beaten."""
    found = []
    for recipe in RECIPES:
        plain = "document-longer" if recipe == "document" else "best-plain"
        name = recipe.capitalize()
        for site in SITES:
            for method, rival in (
                ("flow", "gaussian"),
                ("mixture", "gaussian"),
                ("gaussian", "plain"),
                ("flow", "plain"),
            ):
                second = plain if rival == "plain" else f"{recipe}-{rival}-{site}"
                words = f"{name}: {method} − {rival}, {site}".replace("gaussian", "Gaussian")
                found.append((words, f"{recipe}-{method}-{site}", second))
    return found


def comparisons(parts: Parts, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Every comparison on the metrics that count, for a table of their own."""
    found = []
    for title, first, second in pairs():
        for metric in metrics:
            counts = metric.key in (*JUDGED, "shift_accuracy", "shift_ece") or metric.key.startswith("auroc")
            result = compare(parts, first, second, metric.key) if counts else None
            if result is not None and result.number > 1:
                found.append(
                    {
                        "title": title,
                        "metric": metric.key,
                        "mean": result.mean,
                        "low": result.low,
                        "high": result.high,
                        "p": result.p,
                        "number": result.number,
                    }
                )
    return found


def verdict(result: Paired, higher: bool) -> str:
    """``"better"``, ``"worse"``, or ``"even"`` where the interval holds nought."""
    if not result.clear:
        return "even"
    return "better" if (result.mean > 0) == higher else "worse"


def statement(parts: Parts, first: str, second: str, metrics: Sequence[Metric]) -> tuple[str, list[str]]:
    """One comparison in words, on accuracy, NLL and ECE, and its verdicts."""
    told: dict[str, list[str]] = {"better": [], "worse": [], "even": []}
    for metric in metrics:
        result = compare(parts, first, second, metric.key) if metric.key in JUDGED else None
        if result is None:
            continue
        span = (
            f"{result.low:+.4f} to {result.high:+.4f}, p {result.p:.2g}" if result.number > 1 else "one seed"
        )
        kind = verdict(result, metric.better == "higher")
        name = metric.label if metric.label.isupper() else metric.label.lower()
        told[kind].append(name if kind == "even" else f"{name} by {result.mean:+.4f} ({span})")
    words = {"better": "better in ", "worse": "worse in ", "even": "within chance in "}
    text = "; ".join(words[kind] + _listed(lines) for kind, lines in told.items() if lines)
    return text, [kind for kind, lines in told.items() for _ in lines]


def _elsewhere(parts: Parts, first: str, second: str, metrics: Sequence[Metric]) -> str:
    """Where else the two differ by more than chance: on corrupted and on novel images."""
    told = []
    for metric in metrics:
        if metric.key not in ("shift_accuracy", "shift_ece") and not metric.key.startswith("auroc"):
            continue
        result = compare(parts, first, second, metric.key)
        if result is not None and verdict(result, metric.better == "higher") != "even":
            kind = verdict(result, metric.better == "higher")
            told.append(
                f"{kind} in {metric.label} by {result.mean:+.3f} ({result.low:+.3f} to {result.high:+.3f})"
            )
    return f" (besides, {_listed(told)})" if told else ""


def _listed(words: list[str]) -> str:
    """Words as a sentence lists them.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def answer(parts: Parts, variants: Sequence[Variant], metrics: Sequence[Metric], published: Published) -> str:
    """The answer, put together from the numbers; its first line is the short one."""
    told, counted = [], []
    for recipe, words in RECIPES.items():
        for site in SITES:
            text, kinds = statement(parts, f"{recipe}-flow-{site}", f"{recipe}-gaussian-{site}", metrics)
            if text:
                number = len(parts.common(f"{recipe}-flow-{site}", f"{recipe}-gaussian-{site}", "nll")[0])
                rest = _elsewhere(parts, f"{recipe}-flow-{site}", f"{recipe}-gaussian-{site}", metrics)
                told.append(f"{words}, {site}, {number} seeds: {text}{rest}")
                counted += kinds
    lines = []
    if counted:
        better, worse = counted.count("better"), counted.count("worse")
        if better == len(counted):
            lead = "Yes"
        elif better:
            lead = "In some comparisons, and it is worse in others" if worse else "In some comparisons"
        else:
            lead = "No" if worse else "Not by more than chance"
        lines.append(
            f"Does the flow beat Gaussian noise? {lead}: of {len(counted)} comparisons over seeds (accuracy, NLL and ECE) it is "
            f"better by more than chance in {better}, worse in {worse}, and within chance in {counted.count('even')}."
        )
        lines += [f"{line[0].upper()}{line[1:]}." for line in told]
    for recipe, plain in (("document", "document-longer"), ("best", "best-plain")):
        line = _against_plain(parts, recipe, plain, variants, metrics)
        lines += [line] if line else []
    lines += _reached(parts, variants, metrics, published)
    return "\n".join(lines) or "Too little has been trained for an answer."


def _against_plain(
    parts: Parts, recipe: str, plain: str, variants: Sequence[Variant], metrics: Sequence[Metric]
) -> str:
    """Noise of any kind against the plain network that was trained as long: how often it wins."""
    noisy = [
        v.key for v in finished(parts, variants) if split_key(v.key)[0] == recipe and split_key(v.key)[2]
    ]
    kinds: list[str] = []
    for key in noisy:
        kinds += statement(parts, key, plain, metrics)[1]
    if not kinds:
        return ""
    trained = "trained as long" if recipe == "document" else "trained as well"
    return (
        f"Noise against the plain network {trained} ({RECIPES[recipe]}, {len(noisy)} kinds of noise): better by more than chance "
        f"in {kinds.count('better')} of {len(kinds)} comparisons, worse in {kinds.count('worse')}."
    )


def _reached(
    parts: Parts, variants: Sequence[Variant], metrics: Sequence[Metric], published: Published
) -> list[str]:
    """The best mean of each metric that has a target, whether it gets there, and who gets to all of them; of all seeds."""
    told = []
    for prefix, words in (
        ("", "Best means"),
        ("mirror_", "Of an image and its mirror image together"),
        ("moved_", "Of six views of an image together"),
    ):
        means = {
            metric: {v.label: parts.mean(v.key, metric.key) for v in finished(parts, variants)}
            for metric in metrics
            if metric.key.startswith(prefix) and metric.key.removeprefix(prefix) in published.target
        }
        known = {m: {label: mean for label, mean in of.items() if mean == mean} for m, of in means.items()}
        known = {metric: of for metric, of in known.items() if of}
        if not known:
            continue
        lines, there = [], set.intersection(*(set(of) for of in known.values()))
        for metric, of in known.items():
            wanted, higher = published.target[metric.key.removeprefix(prefix)], metric.better == "higher"
            arrived = {label for label, mean in of.items() if (mean >= wanted if higher else mean <= wanted)}
            label = (max if higher else min)(of, key=of.__getitem__)
            name = metric.label.partition(", ")[0]
            lines.append(f"{name} {of[label]:.4f} ({label}; {'reaches' if arrived else 'misses'} {wanted:g})")
            there &= arrived
        every = [label for label in next(iter(known.values())) if label in there]
        if len(known) > 1:
            lines.append(f"all at once: {' / '.join(every) or 'none'}")
        told.append(
            f"{words}: {', '.join(lines[:-1])}; {lines[-1]}." if len(lines) > 1 else f"{words}: {lines[0]}."
        )
    return told


def notes(
    parts: Parts,
    variants: Sequence[Variant],
    settings: ImageSettings,
    published: Published,
    remarks: Sequence[str] = (),
) -> list[str]:
    """How the numbers came about, for the reader who wants to doubt them; ``remarks`` are the study's own."""
    document, best = (
        max((len(parts.of(v.key)) for v in variants if v.key.startswith(recipe)), default=0)
        for recipe in RECIPES
    )
    withheld = (
        f"without the {settings.validation} images settings were chosen on" if settings.withhold else "whole"
    )
    told = [
        f"The document's recipe has {document} seeds, the best one {best}. A p-value of the exact sign-flip test cannot be below 0.25 "
        "with 3 seeds or 0.0625 with 5, so more than chance means here that the 95 % interval by Student's t leaves out nought; "
        "of many such intervals one in twenty does so by chance.",
        f"Settings of the best recipe were chosen on {settings.validation} images put aside from the training set, with other seeds; "
        f"the final training set is {withheld}. The curves of test accuracy and ECE are for display.",
        *(remarks if settings.source == "files" else ()),
        f"Predictions on the test set average {settings.samples} networks; those on novel and corrupted images "
        f"{settings.shift_samples}, on the first {settings.shift_images} images; the curves {settings.curve_samples}. "
        "The same for every method.",
        "The time of the study is that of all trainings added up, of which several ran side by side on one device.",
        *(f"Cost: {part['caption']}" for part in parts.of("cost")[:1]),
        "The values of document 000 are read off its figures; its dropout line is for LeNet as a whole. Its site is position, with the "
        "KL averaged over positions, which tempers it.",
    ]
    told += _by_chance(parts, variants, settings.tested)
    return (
        told + _pace(parts, settings, published) + _earlier_rule(parts, variants) + parts.warnings(variants)
    )


def _by_chance(parts: Parts, variants: Sequence[Variant], number: int) -> list[str]:
    """What chance alone makes of the ECE of the rows."""
    floors = {
        variant.label: sum(calibration_floor(part["bins"], number) for part in parts.of(variant.key))
        / len(parts.of(variant.key))
        for variant in present(parts, variants)
        if all("bins" in part for part in parts.of(variant.key))
    }
    if not floors:
        return []
    least, most = min(floors, key=floors.__getitem__), max(floors, key=floors.__getitem__)
    return [
        f"No ECE is nought: on {number:,} images a network with such confidences shows, when every one of them is exactly right, "
        f"{floors[least]:.4f} ({least}) to {floors[most]:.4f} ({most}) by chance alone."
    ]


def _earlier_rule(parts: Parts, variants: Sequence[Variant]) -> list[str]:
    """Rows whose adaptive sampling was measured when its rule was another."""
    names = [
        variant.label
        for variant in present(parts, variants)
        if any(
            "adaptive" in part["values"] and part.get("adaptive_rule") != asdict(RULE)
            for part in parts.of(variant.key)
        )
    ]
    if not names:
        return []
    return [
        "Adaptive samples and same decisions were measured with an earlier rule, which let an input stop at a tie, in these rows: "
        f"{', '.join(names)}."
    ]


def _pace(parts: Parts, settings: ImageSettings, published: Published) -> list[str]:
    """How well the document's recipe fits the training images at its end, here and there."""
    own, theirs = [], []
    for method, curves in (("gaussian", published.gaussian), ("flow", published.flow)):
        ends = [
            part["curves"]["log_likelihood"][-1]
            for part in parts.of(f"document-{method}-position")
            if part.get("curves", {}).get("log_likelihood")
        ]
        if ends:
            own.append(f"{sum(ends) / len(ends):.2f} ({METHODS[method]})")
            theirs.append(f"{curves['log_likelihood'][-1]:.2f}")
    if not own:
        return []
    unsaid = (
        "does not state its batch"
        if settings.document.padding
        else "states neither its batch nor whether its images were moved and mirrored"
    )
    return [
        f"Document 000 {unsaid}; here the plain network has "
        f"{settings.start.batch} images in a step and what starts from it {settings.document.batch}. At the end of its recipe the "
        f"log-likelihood of a training image is {_listed(own)} here, {_listed(theirs)} in its figure: where the two are far apart, "
        "so are the ECEs, and the document's recipe is not quite this one."
    ]
