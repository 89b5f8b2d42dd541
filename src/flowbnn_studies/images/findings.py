"""Conclusions of the studies on images: rows, paired comparisons, answer and notes, computed from the parts alone."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from flowbnn.compare.results import Metric, SeedResults, summary
from flowbnn.metrics import calibration_floor
from flowbnn_studies.images.settings import METHODS, SITES, ImageSettings, Published, split_key
from flowbnn_studies.runner.findings import (
    PairedDifference,
    paired_difference,
    pluralize,
)
from flowbnn_studies.runner.study import Variant

RECIPES = {"xiong": "Xiong's recipe", "best": "best recipe", "long": "longer recipe"}
PLAIN = {"xiong": "xiong-longer", "best": "best-plain", "long": "long-plain"}
MAIN = ("accuracy", "nll", "ece")
VIEWS = {  # prefixes of metrics
    "": "Best mean values",
    "mirror_": "With two views (image and mirror image)",
    "moved_": "With six views",
}


def _is_shift_metric(metric: Metric) -> bool:
    """Returns True for metrics of corrupted or out-of-distribution images."""
    return metric.key.startswith(("auroc", "shift_accuracy", "shift_matched_nll", "shift_ece"))


def trained_variants(parts: SeedResults, variants: Sequence[Variant]) -> list[Variant]:
    """Returns the variants of the table that have been trained."""
    return [variant for variant in variants if variant.in_table and parts.of(variant.key)]


def missing_seeds(parts: SeedResults, variants: Sequence[Variant]) -> dict[str, str]:
    """Returns the number of seeds, in words, of variants that have fewer seeds than others of their recipe."""
    counts = {v.key: len(parts.of(v.key)) for v in variants}
    recipes = {key: split_key(key)[0] for key in counts}
    full = {key: max(counts[other] for other in counts if recipes[other] == recipes[key]) for key in counts}
    return {key: f"{counts[key]} of {full[key]} seeds" for key in counts if counts[key] < full[key]}


def complete_variants(parts: SeedResults, variants: Sequence[Variant]) -> list[Variant]:
    """Returns the variants that have as many seeds as the others of their recipe."""
    trained = trained_variants(parts, variants)
    missing = missing_seeds(parts, trained)
    return [variant for variant in trained if variant.key not in missing]


def table_rows(
    parts: SeedResults, variants: Sequence[Variant], metrics: Sequence[Metric], published: Published
) -> list[dict[str, Any]]:
    """Returns our rows with the values of Xiong's report and the costs of the methods, then the rows of other sources."""
    costs = parts.of("cost")[0]["ratios"] if parts.of("cost") else {}
    trained = trained_variants(parts, variants)
    missing = missing_seeds(parts, trained)
    cost_recipe = "best" if any(variant.key.startswith("best-") for variant in trained) else "xiong"
    table = []
    for variant in trained:
        row = parts.row(variant.key, variant.label, metrics, published.rows.get(variant.key), variant.method)
        recipe, _, method = variant.key.partition("-")
        ratios = costs.get(method, {}) if recipe == cost_recipe else {}
        row["values"] |= {name: summary([value]) for name, value in ratios.items() if value is not None}
        if variant.key in missing:
            row["unfinished"] = missing[variant.key]
        table.append(row)
    cited_rows = (*published.cited, ("Target", "", published.target))
    for number, (label, method, values) in enumerate(cited_rows):
        cells = {name: summary([], value) for name, value in values.items()}
        row = {"key": f"cited-{number}", "label": label, "method": method, "values": cells, "cited": "yes"}
        table.append(row)
    return table


def compare(parts: SeedResults, first: str, second: str, metric: Metric) -> PairedDifference | None:
    """Returns the paired difference of two variants; None if they share no seed."""
    a, b = parts.common(first, second, metric.key)
    return paired_difference(a, b) if a else None


def comparisons(parts: SeedResults, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Returns every comparison on the main metrics."""
    table = []
    pairs = (
        *(("flow", "gaussian"), ("mixture", "gaussian"), ("joint", "gaussian"), ("output", "gaussian")),
        *(("gaussian", "plain"), ("flow", "plain"), ("joint", "plain"), ("output", "plain")),
    )
    for recipe, site, (method, other) in ((r, s, pair) for r in RECIPES for s in SITES for pair in pairs):
        first = f"{recipe}-{method}-{site}"
        second = PLAIN[recipe] if other == "plain" else f"{recipe}-{other}-{site}"
        words = f"{method} − {other}, {site}".replace("gaussian", "Gaussian").replace(
            "plain", "deterministic"
        )
        title = f"{RECIPES[recipe].removesuffix(' recipe').capitalize()}: {words}"
        for metric in metrics:
            result = (
                compare(parts, first, second, metric)
                if metric.key in MAIN or _is_shift_metric(metric)
                else None
            )
            if result is not None and result.number > 1:
                table.append({"title": title, "metric": metric.key, **asdict(result)})
    return table


def verdict(result: PairedDifference, metric: Metric) -> str:
    """Returns ``"better"``, ``"worse"``, or ``"even"`` if the confidence interval includes zero."""
    if not result.significant:
        return "even"
    return "better" if (result.mean > 0) == (metric.better == "higher") else "worse"


def describe_comparison(
    parts: SeedResults, first: str, second: str, metrics: Sequence[Metric]
) -> tuple[str, list[str]]:
    """Describes one comparison on accuracy, NLL and ECE.

    Returns:
        Text, and the verdicts.
    """
    lines: dict[str, list[str]] = {"better": [], "worse": [], "even": []}
    for metric in metrics:
        result = compare(parts, first, second, metric) if metric.key in MAIN else None
        if result is not None:
            interval = f"95 % CI {result.low:+.4f} to {result.high:+.4f}, p = {result.p:.2g}"
            interval_text = interval if result.number > 1 else "one seed"
            name = metric.label if metric.label.isupper() else metric.label.lower()
            kind = verdict(result, metric)
            lines[kind].append(name if kind == "even" else f"{name} by {result.mean:+.4f} ({interval_text})")
    even = "not significant" if len(parts.common(first, second, "nll")[0]) > 1 else "undecided with one seed"
    words = {"better": "better in ", "worse": "worse in ", "even": f"{even} in "}
    text = "; ".join(words[kind] + _join_words(entries) for kind, entries in lines.items() if entries)
    return text, [kind for kind, entries in lines.items() for _ in entries]


def _describe_shift_differences(
    parts: SeedResults, first: str, second: str, metrics: Sequence[Metric]
) -> str:
    """Describes the significant differences on corrupted and out-of-distribution images."""
    lines = []
    for metric in metrics:
        result = compare(parts, first, second, metric) if _is_shift_metric(metric) else None
        if result is not None and result.significant:
            interval = f"({result.low:+.3f} to {result.high:+.3f})"
            lines.append(f"{verdict(result, metric)} in {metric.label} by {result.mean:+.3f} {interval}")
    return f" (also {_join_words(lines)})" if lines else ""


def _join_words(words: list[str]) -> str:
    """Joins words as in a sentence.

    >>> _join_words(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def answer(
    parts: SeedResults, variants: Sequence[Variant], metrics: Sequence[Metric], published: Published
) -> str:
    """Returns the answer, computed from the numbers. Its first line is the short answer."""
    lines = [
        *_describe_flow_comparisons(parts, metrics),
        *_describe_noise_comparisons(parts, variants, metrics),
    ]
    lines += _rivals(parts, metrics) if len(parts.of("best-gaussian-channel")) > 1 else []
    lines += _describe_targets(parts, variants, metrics, published)
    return "\n".join(lines) or "There are too few results for an answer."


def _describe_flow_comparisons(parts: SeedResults, metrics: Sequence[Metric]) -> list[str]:
    """Compares flow noise with Gaussian noise: a summary, and a line for each recipe and site."""
    lines, verdicts = [], []
    for recipe, site in ((recipe, site) for recipe in RECIPES for site in SITES):
        flow, gaussian = f"{recipe}-flow-{site}", f"{recipe}-gaussian-{site}"
        text, kinds = describe_comparison(parts, flow, gaussian, metrics)
        if text:
            number = len(parts.common(flow, gaussian, "nll")[0])
            shift = _describe_shift_differences(parts, flow, gaussian, metrics)
            name = RECIPES[recipe][0].upper() + RECIPES[recipe][1:]
            lines.append(f"{name}, {site}, {pluralize(number)}: {text}{shift}.")
            verdicts += kinds
    if not verdicts:
        return lines
    question = "Is flow noise better than Gaussian noise?"
    if len(parts.seeds) == 1:
        return [
            f"{question} One seed decides none of {len(verdicts)} comparisons (accuracy, NLL, ECE).",
            *lines,
        ]
    better, worse, even = (verdicts.count(kind) for kind in ("better", "worse", "even"))
    lead = "No" if worse else "Not significantly"
    if better:
        lead = "In some comparisons, and worse in others" if worse else "In some comparisons"
        lead = "Yes" if better == len(verdicts) else lead
    summary_line = (
        f"{question} {lead}: of {len(verdicts)} comparisons (accuracy, NLL, ECE), {better} are significantly better, {worse} "
        f"significantly worse and {even} not significant."
    )
    return [summary_line, *lines]


def _describe_noise_comparisons(
    parts: SeedResults, variants: Sequence[Variant], metrics: Sequence[Metric]
) -> list[str]:
    """Compares all kinds of noise with the deterministic network."""
    lines = []
    keys = [split_key(variant.key) for variant in complete_variants(parts, variants)]
    for recipe, training in (("xiong", "trained for as many epochs"), ("best", "trained by the same recipe")):
        noisy = [f"{recipe}-{method}-{site}" for name, method, site in keys if name == recipe and site]
        kinds = [kind for key in noisy for kind in describe_comparison(parts, key, PLAIN[recipe], metrics)[1]]
        if kinds and len(parts.of(PLAIN[recipe])) > 1:
            lines.append(
                f"Noise versus the deterministic network {training} ({RECIPES[recipe]}, {len(noisy)} kinds of noise): significantly "
                f"better in {kinds.count('better')} of {len(kinds)} comparisons, significantly worse in {kinds.count('worse')}."
            )
    return lines


def _rivals(parts: SeedResults, metrics: Sequence[Metric]) -> list[str]:
    """Compares other posteriors with Gaussian noise, if a study has them."""
    gaussian = "best-gaussian-channel"
    names = {
        "best-repeated-channel": "Noise with repeated images",
        "best-joint-channel": "Joint noise",
        "best-output-channel": "Noise on outputs",
        "best-swag": "SWAG",
        "best-ensemble": "Deep ensemble",
    }
    texts = {name: describe_comparison(parts, key, gaussian, metrics)[0] for key, name in names.items()}
    return [f"{name} versus Gaussian noise: {text}." for name, text in texts.items() if text]


def _describe_targets(
    parts: SeedResults, variants: Sequence[Variant], metrics: Sequence[Metric], published: Published
) -> list[str]:
    """Describes the best mean of each metric with a target, and the variants that reach all targets."""
    lines, labels = [], {metric.key: metric.label for metric in metrics}
    for prefix, words in VIEWS.items():
        entries: list[str] = []
        reach_all: list[str] | None = None
        for metric in metrics:
            name = metric.key.removeprefix(prefix)
            if not metric.key.startswith(prefix) or name not in published.target:
                continue
            all_means = {v.label: parts.mean(v.key, metric.key) for v in complete_variants(parts, variants)}
            means = {label: mean for label, mean in all_means.items() if mean == mean}
            if not means:
                continue
            target, sign = published.target[name], 1 if metric.better == "higher" else -1
            reaching = [label for label, mean in means.items() if sign * mean >= sign * target]
            best = max(means, key=lambda label: sign * means[label])
            verb = "reaches" if reaching else "misses"
            entries.append(f"{labels.get(name, metric.label)} {means[best]:.4f} ({best}; {verb} {target:g})")
            reach_all = reaching if reach_all is None else [label for label in reach_all if label in reaching]
        if len(entries) > 1:
            lines.append(
                f"{words}: {', '.join(entries)}; all targets reached by: {' / '.join(reach_all or []) or 'none'}."
            )
        elif entries:
            lines.append(f"{words}: {entries[0]}.")
    return lines


def notes(
    parts: SeedResults,
    variants: Sequence[Variant],
    settings: ImageSettings,
    published: Published,
    remarks: Sequence[str] = (),
) -> list[str]:
    """Returns remarks on the conditions of the numbers.

    Args:
        parts: Results by variant and seed.
        variants: Variants of the study.
        settings: Settings of the study.
        published: Published numbers.
        remarks: Remarks of the study itself.
    """
    xiong = any(variant.key.startswith("xiong-") for variant in variants)
    lines = _seed_notes(parts, variants, settings, xiong)
    lines += [
        *(remarks if settings.source == "files" else ()),
        f"Predictions on the test set average {settings.samples} networks, those on out-of-distribution and corrupted images "
        f"{settings.shift_samples} (on the first {settings.shift_images} images), and the curves {settings.curve_samples}, for "
        f"every method. Kinds of corruption: {', '.join(settings.corruptions)}.",
        "The time of the study is the sum over all trainings, of which several ran in parallel on one device.",
        *(f"Cost: {part['caption']}" for part in parts.of("cost")[:1]),
    ]
    if xiong:
        lines.append(
            "The values of Xiong's report are read off its figures. Its dropout line is for LeNet in general. Its noise site is "
            "position, with the KL averaged over positions, which tempers the KL."
        )
    return [
        *lines,
        *_calibration_floor_notes(parts, variants, settings),
        *_describe_training_fit(parts, settings, published),
    ]


def _seed_notes(
    parts: SeedResults, variants: Sequence[Variant], settings: ImageSettings, xiong: bool
) -> list[str]:
    """Returns the numbers of seeds, the meaning of significance, and the origin of the settings."""
    seeds = [
        max((len(parts.of(v.key)) for v in variants if v.key.startswith(recipe)), default=0)
        for recipe in RECIPES
    ]
    significance = (
        " The p-value of the exact sign-flip test cannot be below 0.25 with 3 seeds or 0.0625 with 5. A difference is therefore "
        "called significant if its 95 % confidence interval by Student's t excludes zero. One in twenty such intervals excludes "
        "zero by chance."
        if max(seeds) > 1
        else ""
    )
    if not xiong:
        return [f"Seeds: {seeds[1]}, and {seeds[2]} for the longer recipe.{significance}"]
    split = (
        "all results are for these images"
        if settings.choose
        else "the final trainings use the complete training set"
    )
    return [
        f"Seeds: {seeds[0]} for Xiong's recipe, {seeds[1]} for the best recipe.{significance}",
        f"Settings of the best recipe were chosen on {settings.validation} validation images with other seeds; {split}. The "
        "curves of test accuracy and ECE are for display only.",
    ]


def _calibration_floor_notes(
    parts: SeedResults, variants: Sequence[Variant], settings: ImageSettings
) -> list[str]:
    """Returns the ECE of perfectly calibrated networks with the same confidences, if there are reliability bins."""
    floors = {
        v.label: fmean(calibration_floor(part["bins"], settings.num_tested) for part in parts.of(v.key))
        for v in trained_variants(parts, variants)
        if all("bins" in part for part in parts.of(v.key))
    }
    if not floors:
        return []
    lowest, highest = min(floors, key=floors.__getitem__), max(floors, key=floors.__getitem__)
    return [
        f"Even a perfectly calibrated network has a positive ECE on {settings.num_tested:,} images: with these confidences "
        f"{floors[lowest]:.4f} ({lowest}) to {floors[highest]:.4f} ({highest})."
    ]


def _describe_training_fit(parts: SeedResults, settings: ImageSettings, published: Published) -> list[str]:
    """Compares the final training log-likelihood of Xiong's recipe here and in the report."""
    ours, published_ends = [], []
    for method, curves in (("gaussian", published.gaussian), ("flow", published.flow)):
        likelihoods = [
            part.get("curves", {}).get("log_likelihood") for part in parts.of(f"xiong-{method}-position")
        ]
        ends = [values[-1] for values in likelihoods if values]
        if ends:
            ours.append(f"{sum(ends) / len(ends):.2f} ({METHODS[method]})")
            published_ends.append(f"{curves['log_likelihood'][-1]:.2f}")
    if not ours:
        return []
    omission = "does not state its batch size"
    if not settings.xiong.padding:
        omission = "states neither its batch size nor its augmentation"
    return [
        f"Xiong's report {omission}. Here the deterministic network has {settings.start.batch} images in a step, and the variants "
        f"that start from it {settings.xiong.batch}. The final training log-likelihood is {_join_words(ours)} here and "
        f"{_join_words(published_ends)} in its figure. Where the two differ, the recipe is not exactly Xiong's, and the ECEs differ "
        "as well."
    ]
