"""What the studies on images conclude, from their parts alone: rows, paired comparisons, answer, notes and figures."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from flowbnn.compare.results import Metric, Parts, figure, reliability_figure, summary
from flowbnn.metrics import calibration_floor
from flowbnn_studies.images.settings import EPOCHS, METHODS, NAMES, SITES, ImageSettings, Published, split_key
from flowbnn_studies.runner.findings import (
    PairedDifference,
    curve,
    histogram_panels,
    line,
    paired_difference,
    panel,
    pluralize,
)
from flowbnn_studies.runner.study import Variant

RECIPES = {"xiong": "Xiong's recipe", "best": "best recipe", "long": "longer recipe"}
PLAIN = {"xiong": "xiong-longer", "best": "best-plain", "long": "long-plain"}
MAIN = ("accuracy", "nll", "ece")
VIEWS = {
    "": "Best means",
    "mirror_": "Of an image and its mirror image together",
    "moved_": "Of six views of an image together",
}
PANELS = {
    "negative_elbo": ("Negative ELBO", "nats per image"),
    "log_likelihood": ("Log-likelihood", "nats per image"),
    "kl": ("KL / N", "nats per image"),
    "accuracy": ("Test accuracy", ""),
    "ece": ("ECE on the test set", ""),
}


def _is_shift_metric(metric: Metric) -> bool:
    """Whether a metric is of corrupted or novel images."""
    return metric.key.startswith(("auroc", "shift_accuracy", "shift_matched_nll", "shift_ece"))


def trained_variants(parts: Parts, variants: Sequence[Variant]) -> list[Variant]:
    """The variants with a row of their own that have been trained."""
    return [variant for variant in variants if variant.in_table and parts.of(variant.key)]


def missing_seeds(parts: Parts, shown: Sequence[Variant]) -> dict[str, str]:
    """For variants with fewer seeds than others of their recipe: how many they have, in words."""
    counts = {v.key: len(parts.of(v.key)) for v in shown}
    recipes = {key: split_key(key)[0] for key in counts}
    full = {key: max(counts[other] for other in counts if recipes[other] == recipes[key]) for key in counts}
    return {key: f"{counts[key]} of {full[key]} seeds" for key in counts if counts[key] < full[key]}


def complete_variants(parts: Parts, variants: Sequence[Variant]) -> list[Variant]:
    """The variants that have as many seeds as the others of their recipe."""
    shown = trained_variants(parts, variants)
    missing = missing_seeds(parts, shown)
    return [variant for variant in shown if variant.key not in missing]


def table_rows(
    parts: Parts, variants: Sequence[Variant], metrics: Sequence[Metric], published: Published
) -> list[dict[str, Any]]:
    """Our rows with the values of Xiong's report beside them and what the methods cost, then rows of other sources."""
    costs = parts.of("cost")[0]["ratios"] if parts.of("cost") else {}
    shown = trained_variants(parts, variants)
    missing = missing_seeds(parts, shown)
    last = "best" if any(variant.key.startswith("best-") for variant in shown) else "xiong"
    table = []
    for variant in shown:
        row = parts.row(variant.key, variant.label, metrics, published.rows.get(variant.key), variant.method)
        recipe, _, method = variant.key.partition("-")
        ratios = costs.get(method, {}) if recipe == last else {}
        row["values"] |= {name: summary([value]) for name, value in ratios.items() if value is not None}
        if variant.key in missing:
            row["unfinished"] = missing[variant.key]
        table.append(row)
    others = (*published.cited, ("To be reached", "", published.target))
    for number, (label, method, values) in enumerate(others):
        cells = {name: summary([], value) for name, value in values.items()}
        row = {"key": f"cited-{number}", "label": label, "method": method, "values": cells, "cited": "yes"}
        table.append(row)
    return table


def compare(parts: Parts, first: str, second: str, metric: Metric) -> PairedDifference | None:
    """The difference of two variants seed by seed; None where they share no seed."""
    a, b = parts.common(first, second, metric.key)
    return paired_difference(a, b) if a else None


def comparisons(parts: Parts, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Every comparison on the metrics that count, for a table of their own."""
    table = []
    pairs = (
        *(("flow", "gaussian"), ("mixture", "gaussian"), ("joint", "gaussian"), ("output", "gaussian")),
        *(("gaussian", "plain"), ("flow", "plain"), ("joint", "plain"), ("output", "plain")),
    )
    for recipe, site, (method, other) in ((r, s, pair) for r in RECIPES for s in SITES for pair in pairs):
        first = f"{recipe}-{method}-{site}"
        second = PLAIN[recipe] if other == "plain" else f"{recipe}-{other}-{site}"
        words = f"{method} − {other}, {site}".replace("gaussian", "Gaussian")
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
    """``"better"``, ``"worse"``, or ``"even"`` where the interval includes zero."""
    if not result.significant:
        return "even"
    return "better" if (result.mean > 0) == (metric.better == "higher") else "worse"


def describe_comparison(
    parts: Parts, first: str, second: str, metrics: Sequence[Metric]
) -> tuple[str, list[str]]:
    """One comparison in words, on accuracy, NLL and ECE, and its verdicts."""
    lines: dict[str, list[str]] = {"better": [], "worse": [], "even": []}
    for metric in metrics:
        result = compare(parts, first, second, metric) if metric.key in MAIN else None
        if result is not None:
            interval = f"{result.low:+.4f} to {result.high:+.4f}, p {result.p:.2g}"
            one = interval if result.number > 1 else "one seed"
            name = metric.label if metric.label.isupper() else metric.label.lower()
            kind = verdict(result, metric)
            lines[kind].append(name if kind == "even" else f"{name} by {result.mean:+.4f} ({one})")
    even = "within chance" if len(parts.common(first, second, "nll")[0]) > 1 else "undecided with one seed"
    words = {"better": "better in ", "worse": "worse in ", "even": f"{even} in "}
    text = "; ".join(words[kind] + _join_words(some) for kind, some in lines.items() if some)
    return text, [kind for kind, some in lines.items() for _ in some]


def _describe_shift_differences(parts: Parts, first: str, second: str, metrics: Sequence[Metric]) -> str:
    """Where else the two differ by more than chance: on corrupted and on novel images."""
    lines = []
    for metric in metrics:
        result = compare(parts, first, second, metric) if _is_shift_metric(metric) else None
        if result is not None and result.significant:
            interval = f"({result.low:+.3f} to {result.high:+.3f})"
            lines.append(f"{verdict(result, metric)} in {metric.label} by {result.mean:+.3f} {interval}")
    return f" (besides, {_join_words(lines)})" if lines else ""


def _join_words(words: list[str]) -> str:
    """Words as a sentence lists them.

    >>> _join_words(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def answer(parts: Parts, variants: Sequence[Variant], metrics: Sequence[Metric], published: Published) -> str:
    """The answer, put together from the numbers; its first line is the short one."""
    lines, kinds = [], []
    for recipe, site in ((recipe, site) for recipe in RECIPES for site in SITES):
        flow, gaussian = f"{recipe}-flow-{site}", f"{recipe}-gaussian-{site}"
        text, some = describe_comparison(parts, flow, gaussian, metrics)
        if text:
            number = len(parts.common(flow, gaussian, "nll")[0])
            rest = _describe_shift_differences(parts, flow, gaussian, metrics)
            name = RECIPES[recipe][0].upper() + RECIPES[recipe][1:]
            lines.append(f"{name}, {site}, {pluralize(number)}: {text}{rest}.")
            kinds += some
    if kinds:
        better, worse = kinds.count("better"), kinds.count("worse")
        lead = "No" if worse else "Not by more than chance"
        if better:
            lead = "In some comparisons, and it is worse in others" if worse else "In some comparisons"
            lead = "Yes" if better == len(kinds) else lead
        lines.insert(
            0,
            f"Does the flow beat Gaussian noise? One seed decides none of {len(kinds)} comparisons (accuracy, NLL and ECE)."
            if len(parts.seeds) == 1
            else f"Does the flow beat Gaussian noise? {lead}: of {len(kinds)} comparisons over seeds (accuracy, NLL and ECE) it is "
            f"better by more than chance in {better}, worse in {worse}, and within chance in {kinds.count('even')}.",
        )
    for recipe, trained in (("xiong", "trained as long"), ("best", "trained as well")):
        keys = [split_key(v.key) for v in complete_variants(parts, variants)]
        noisy = [f"{recipe}-{method}-{site}" for one, method, site in keys if one == recipe and site]
        kinds = [kind for key in noisy for kind in describe_comparison(parts, key, PLAIN[recipe], metrics)[1]]
        if kinds and len(parts.of(PLAIN[recipe])) > 1:
            lines.append(
                f"Noise against the plain network {trained} ({RECIPES[recipe]}, {len(noisy)} kinds of noise): better by more than "
                f"chance in {kinds.count('better')} of {len(kinds)} comparisons, worse in {kinds.count('worse')}."
            )
    lines += _rivals(parts, metrics) if len(parts.of("best-gaussian-channel")) > 1 else []
    lines += _describe_targets(parts, variants, metrics, published)
    return "\n".join(lines) or "Too little has been trained for an answer."


def _rivals(parts: Parts, metrics: Sequence[Metric]) -> list[str]:
    """Other posteriors against Gaussian noise, where a study has them."""
    gaussian = "best-gaussian-channel"
    names = {
        "best-joint-channel": "Joint noise",
        "best-output-channel": "Noise on outputs",
        "best-swag": "SWAG",
        "best-ensemble": "A deep ensemble",
    }
    stated = {name: describe_comparison(parts, key, gaussian, metrics)[0] for key, name in names.items()}
    return [f"{name} against Gaussian noise: {text}." for name, text in stated.items() if text]


def _describe_targets(
    parts: Parts, variants: Sequence[Variant], metrics: Sequence[Metric], published: Published
) -> list[str]:
    """The best mean of each metric that has a target, whether it gets there, and who reaches all of them."""
    lines, labels = [], {metric.key: metric.label for metric in metrics}
    for prefix, words in VIEWS.items():
        reached: list[str] = []
        everywhere: list[str] | None = None
        for metric in metrics:
            name = metric.key.removeprefix(prefix)
            if not metric.key.startswith(prefix) or name not in published.target:
                continue
            all_means = {v.label: parts.mean(v.key, metric.key) for v in complete_variants(parts, variants)}
            means = {label: mean for label, mean in all_means.items() if mean == mean}
            if not means:
                continue
            target, sign = published.target[name], 1 if metric.better == "higher" else -1
            there = [label for label, mean in means.items() if sign * mean >= sign * target]
            best = max(means, key=lambda label: sign * means[label])
            verb = "reaches" if there else "misses"
            reached.append(f"{labels.get(name, metric.label)} {means[best]:.4f} ({best}; {verb} {target:g})")
            everywhere = there if everywhere is None else [label for label in everywhere if label in there]
        if len(reached) > 1:
            lines.append(
                f"{words}: {', '.join(reached)}; all at once: {' / '.join(everywhere or []) or 'none'}."
            )
        elif reached:
            lines.append(f"{words}: {reached[0]}.")
    return lines


def notes(
    parts: Parts,
    variants: Sequence[Variant],
    settings: ImageSettings,
    published: Published,
    remarks: Sequence[str] = (),
) -> list[str]:
    """How the numbers came about, for the reader who wants to doubt them; ``remarks`` are the study's own."""
    seeds = [
        max((len(parts.of(v.key)) for v in variants if v.key.startswith(recipe)), default=0)
        for recipe in RECIPES
    ]
    used = "all here is evaluated on those" if settings.choose else "the final training set is whole"
    chance = (
        " A p-value of the exact sign-flip test cannot be below 0.25 with 3 seeds or 0.0625 with 5, so more than chance means here "
        "that the 95 % interval by Student's t excludes zero; of many such intervals one in twenty does so by chance."
    )
    xiong = any(v.key.startswith("xiong-") for v in variants)
    shown = max(seeds) > 1
    lines = [
        f"Seeds: Xiong's recipe {seeds[0]}, the best one {seeds[1]}.{chance if shown else ''}"
        if xiong
        else f"Seeds: {seeds[1]}, of the longer recipe {seeds[2]}.{chance if shown else ''}",
        *(
            [
                f"Settings of the best recipe were chosen on {settings.validation} images put aside from the training set, with other "
                f"seeds; {used}. The curves of test accuracy and ECE are for display."
            ]
            if xiong
            else []
        ),
        *(remarks if settings.source == "files" else ()),
        f"Predictions on the test set average {settings.samples} networks; those on novel and corrupted images "
        f"{settings.shift_samples}, on the first {settings.shift_images} images; the curves {settings.curve_samples}. "
        f"The same for every method. Kinds of corruption: {', '.join(settings.corruptions)}.",
        "The time of the study is that of all trainings added up, of which several ran side by side on one device.",
        *(f"Cost: {part['caption']}" for part in parts.of("cost")[:1]),
    ]
    if xiong:
        lines.append(
            "The values of Xiong's report are read off its figures; its dropout line is for LeNet as a whole. Its site is position, "
            "with the KL averaged over positions, which tempers it."
        )
    floors = {
        v.label: fmean(calibration_floor(part["bins"], settings.tested) for part in parts.of(v.key))
        for v in trained_variants(parts, variants)
        if all("bins" in part for part in parts.of(v.key))
    }
    if floors:
        least, most = min(floors, key=floors.__getitem__), max(floors, key=floors.__getitem__)
        lines.append(
            f"No ECE is zero: on {settings.tested:,} images a network with such confidences shows, when every one of them is exactly "
            f"right, {floors[least]:.4f} ({least}) to {floors[most]:.4f} ({most}) by chance alone."
        )
    return lines + _describe_training_fit(parts, settings, published)


def _describe_training_fit(parts: Parts, settings: ImageSettings, published: Published) -> list[str]:
    """How well Xiong's recipe fits the training images at its end, here and in the report."""
    own, theirs = [], []
    for method, curves in (("gaussian", published.gaussian), ("flow", published.flow)):
        likelihoods = [
            part.get("curves", {}).get("log_likelihood") for part in parts.of(f"xiong-{method}-position")
        ]
        ends = [values[-1] for values in likelihoods if values]
        if ends:
            own.append(f"{sum(ends) / len(ends):.2f} ({METHODS[method]})")
            theirs.append(f"{curves['log_likelihood'][-1]:.2f}")
    if not own:
        return []
    unsaid = "does not state its batch"
    if not settings.xiong.padding:
        unsaid = "states neither its batch nor whether its images were moved and mirrored"
    return [
        f"Xiong's report {unsaid}; here the plain network has {settings.start.batch} images in a step and what starts from it "
        f"{settings.xiong.batch}. At the end of its recipe the log-likelihood of a training image is {_join_words(own)} here, "
        f"{_join_words(theirs)} in its figure: where the two are far apart, so are the ECEs, and this is not quite Xiong's recipe."
    ]


def figures(
    parts: Parts, variants: Sequence[Variant], published: Published, novel: dict[str, str], source: str
) -> list[dict[str, Any]]:
    """The figures, in the order of the page; those whose parts are missing are left out."""
    shown = trained_variants(parts, variants)

    def some(recipe: str, site: str = "") -> list[Variant]:
        keys = [(variant, *split_key(variant.key)) for variant in shown]
        return [v for v, r, _, s in keys if r == recipe and (not site or s in ("", site))]

    made = [
        training_figure(parts, some("xiong", "position"), published, source, "position"),
        training_figure(parts, some("xiong", "channel"), None, source, "channel"),
        training_figure(parts, some("best"), None, source, ""),
    ]
    for recipe in ("best", "long", "xiong"):
        labels = {variant.key: variant.label for variant in some(recipe)}
        if labels:
            words = RECIPES[recipe] if recipe == "xiong" else f"the {RECIPES[recipe]}"
            title = f"Accuracy against confidence, {words}"
            made.append(reliability_figure(f"Test images, {words}.", labels, parts, title))
    final = some("best") or some("xiong")
    if final:
        made += [_shift(parts, final), _novelty(parts, final, novel)]
    return [one for one in (*made, _cost(parts)) if one is not None]


def training_figure(
    parts: Parts, variants: Sequence[Variant], published: Published | None, source: str, site: str
) -> dict[str, Any] | None:
    """The five panels of figures 5 and 6 of Xiong's report, with its own curves where they are given.

    None where nothing is left to draw: a second figure needs noise at its site.
    """
    variants = [v for v in variants if v.key != "xiong-plain"]  # another, shorter training
    if published is None and site and not any(split_key(v.key)[2] == site for v in variants):
        return None
    panels = []
    for key, (title, unit) in PANELS.items():
        stored, scale = ("elbo", -1.0) if key == "negative_elbo" else (key, 1.0)
        drawn = [v for v in variants if all(stored in part["curves"] for part in parts.of(v.key))]
        if key == "kl":
            drawn = [v for v in drawn if any(any(part["curves"]["kl"]) for part in parts.of(v.key))]
        lines = [curve(v.label, [part["curves"][stored] for part in parts.of(v.key)], scale) for v in drawn]
        if lines and published is not None:
            levels = [{"label": label, "value": value} for label, value in published.levels(key).items()]
            lines += _published_lines(published, key, {v.key: v.label for v in drawn})
            panels.append(panel(title, unit, lines, levels=levels))
        elif lines:
            panels.append(panel(title, unit, lines))
    if not panels:
        return None
    if published is not None:
        title = f"{source.split(', ')[-1].capitalize()} of Xiong's report, redrawn"
        text = f"Xiong's recipe, site {site}."
    elif site:
        title, text = f"The same at site {site}", f"Xiong's recipe with one draw for each {site}."
    else:
        title, text = "Training, the best recipe", "From scratch, with augmentation."
    text += " Mean over seeds of each epoch; the band is one standard deviation."
    if any(one["title"] == PANELS["ece"][0] for one in panels):
        text += " The curves on the test set are for display; no epoch was chosen by them."
    made = figure("curves", title, text, {"x_label": "epoch", "panels": panels})
    if published is not None:
        made["published"] = "Dashed, in the colours of ours: the report's curves; dotted: its levels."
    return made


def _published_lines(published: Published, key: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    """The curves of Xiong's report in a panel, each in the colour of ours."""
    made = []
    for method, words, curves in (
        ("gaussian", "no flow", published.gaussian),
        ("flow", "flow noise", published.flow),
    ):
        ours = labels.get(f"xiong-{method}-position")
        if ours is not None and key in curves:
            columns = ([value] for value in curves[key])
            made.append(line(f"Xiong: {words}", EPOCHS, columns, style="dashed", like=ours))
    return made


def _shift(parts: Parts, variants: Sequence[Variant]) -> dict[str, Any]:
    """Accuracy and ECE against the strength of each corruption."""
    panels = []
    kinds = parts.of(variants[0].key)[0]["shift"]
    for name, words, better in (("accuracy", "accuracy", "higher"), ("ece", "ECE", "lower")):
        for kind in kinds:
            lines = [
                curve(v.label, [part["shift"][kind][name] for part in parts.of(v.key)]) for v in variants
            ]
            panels.append(panel(f"{kind.capitalize()}: {words}", "", lines, better=better))
    caption = "Corrupted test images, five strengths of each kind: the mean over seeds minus that of the plain network."
    data: dict[str, Any] = {"x_label": "strength", "panels": panels, "columns": min(7, len(kinds))}
    plain = next((v.label for v in variants if v.key in PLAIN.values()), None)
    if plain is not None:
        data["baseline"] = plain
    else:
        caption = "Corrupted test images, five strengths of each kind; mean over seeds, the band is one standard deviation."
    return figure("curves", "Under corruption", caption, data)


def _novelty(parts: Parts, variants: Sequence[Variant], novel: dict[str, str]) -> dict[str, Any]:
    """Entropies of test images and of those the network has never seen."""
    contents = {variant.label: [part["entropy"] for part in parts.of(variant.key)] for variant in variants}
    panels = histogram_panels(contents, {"known": "test images", **novel})
    caption = "Predictive entropy in nats; all seeds together. Images the network has never seen should lie to the right."
    data = {"x_label": "predictive entropy (nats)", "panels": panels}
    return figure("histogram", "Entropy of known and of novel images", caption, data)


def _cost(parts: Parts) -> dict[str, Any] | None:
    """Time and memory of every method over the plain network's."""
    if not parts.of("cost"):
        return None
    content = parts.of("cost")[0]
    names = {
        "step": "Training step, time",
        "memory": "Training, peak memory",
        "prediction": "Prediction, time for as many rows",
    }
    panels = []
    for name, title in names.items():
        bars = [
            {"label": key.replace("-", ", "), "method": NAMES[key.partition("-")[0]], "value": ratios[name]}
            for key, ratios in content["ratios"].items()
            if ratios.get(name) is not None
        ]
        if bars:
            panels.append({"title": title, "x_label": "over the plain network", "bars": bars, "level": 1.0})
    return figure("bars", "What the noise costs", content["caption"], {"panels": panels}) if panels else None
