"""Figures of the studies on images, as plain data for the report, computed from the parts alone."""

from collections.abc import Sequence
from typing import Any

from flowbnn.compare.results import SeedResults, figure, reliability_figure
from flowbnn_studies.images.findings import PLAIN, RECIPES, trained_variants
from flowbnn_studies.images.settings import EPOCHS, NAMES, Published, split_key
from flowbnn_studies.runner.findings import (
    curve,
    histogram_panels,
    line,
    panel,
)
from flowbnn_studies.runner.study import Variant

PANELS = {
    "negative_elbo": ("Negative ELBO", "nats per image"),
    "log_likelihood": ("Log-likelihood", "nats per image"),
    "kl": ("KL / N", "nats per image"),
    "accuracy": ("Test accuracy", ""),
    "ece": ("ECE on the test set", ""),
}


def figures(
    parts: SeedResults, variants: Sequence[Variant], published: Published, novel: dict[str, str], source: str
) -> list[dict[str, Any]]:
    """Returns the figures in the order of the page. Figures without data are omitted."""
    trained = trained_variants(parts, variants)

    def select(recipe: str, site: str = "") -> list[Variant]:
        keys = [(variant, *split_key(variant.key)) for variant in trained]
        return [v for v, r, _, s in keys if r == recipe and (not site or s in ("", site))]

    all_figures = [
        training_figure(parts, select("xiong", "position"), published, source, "position"),
        training_figure(parts, select("xiong", "channel"), None, source, "channel"),
        training_figure(parts, select("best"), None, source, ""),
    ]
    for recipe in ("best", "long", "xiong"):
        labels = {variant.key: variant.label for variant in select(recipe)}
        if labels:
            words = RECIPES[recipe] if recipe == "xiong" else f"the {RECIPES[recipe]}"
            title = f"Accuracy against confidence, {words}"
            all_figures.append(reliability_figure(f"Test images, {words}.", labels, parts, title))
    last_recipe = select("best") or select("xiong")
    if last_recipe:
        all_figures += [_shift(parts, last_recipe), _novelty(parts, last_recipe, novel)]
    return [entry for entry in (*all_figures, _cost(parts)) if entry is not None]


def training_figure(
    parts: SeedResults, variants: Sequence[Variant], published: Published | None, source: str, site: str
) -> dict[str, Any] | None:
    """Returns the five panels of figures 5 and 6 of Xiong's report, with its curves if available.

    The result is None if there is nothing to draw: a second figure needs noise at its site.
    """
    variants = [v for v in variants if v.key != "xiong-plain"]  # it has another, shorter training
    if published is None and site and not any(split_key(v.key)[2] == site for v in variants):
        return None
    panels = []
    for key, (title, unit) in PANELS.items():
        history_key, scale = ("elbo", -1.0) if key == "negative_elbo" else (key, 1.0)
        with_curves = [v for v in variants if all(history_key in part["curves"] for part in parts.of(v.key))]
        if key == "kl":
            with_curves = [
                v for v in with_curves if any(any(part["curves"]["kl"]) for part in parts.of(v.key))
            ]
        lines = [
            curve(v.label, [part["curves"][history_key] for part in parts.of(v.key)], scale)
            for v in with_curves
        ]
        if lines and published is not None:
            levels = [{"label": label, "value": value} for label, value in published.levels(key).items()]
            lines += _published_lines(published, key, {v.key: v.label for v in with_curves})
            panels.append(panel(title, unit, lines, levels=levels))
        elif lines:
            panels.append(panel(title, unit, lines))
    if not panels:
        return None
    if published is not None:
        title = f"{source.split(', ')[-1].capitalize()} of Xiong's report, redrawn"
        text = f"Xiong's recipe, noise site {site}."
    elif site:
        title, text = f"Training with noise site {site}", f"Xiong's recipe with one draw for each {site}."
    else:
        title, text = "Training by the best recipe", "Training from scratch with augmentation."
    text += " Mean over seeds at each epoch, with a band of one standard deviation."
    if any(entry["title"] == PANELS["ece"][0] for entry in panels):
        text += " The curves on the test set are for display only; they were not used to choose an epoch."
    result = figure("curves", title, text, {"x_label": "epoch", "panels": panels})
    if published is not None:
        result["published"] = (
            "Dashed lines: curves of the report, in the colours of ours. Dotted lines: its final values."
        )
    return result


def _published_lines(published: Published, key: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the curves of Xiong's report in a panel, each in the colour of ours."""
    lines = []
    for method, label, curves in (
        ("gaussian", "no flow", published.gaussian),
        ("flow", "flow noise", published.flow),
    ):
        ours = labels.get(f"xiong-{method}-position")
        if ours is not None and key in curves:
            columns = ([value] for value in curves[key])
            lines.append(line(f"Xiong: {label}", EPOCHS, columns, style="dashed", like=ours))
    return lines


def _shift(parts: SeedResults, variants: Sequence[Variant]) -> dict[str, Any]:
    """Returns the figure of accuracy and ECE against the strength of each corruption."""
    panels = []
    kinds = parts.of(variants[0].key)[0]["shift"]
    for name, words, better in (("accuracy", "accuracy", "higher"), ("ece", "ECE", "lower")):
        for kind in kinds:
            lines = [
                curve(v.label, [part["shift"][kind][name] for part in parts.of(v.key)]) for v in variants
            ]
            panels.append(panel(f"{kind.capitalize()}: {words}", "", lines, better=better))
    caption = "Corrupted test images, five strengths of each kind. Mean over seeds minus that of the deterministic network."
    data: dict[str, Any] = {"x_label": "strength", "panels": panels}
    plain = next((v.label for v in variants if v.key in PLAIN.values()), None)
    if plain is not None:
        data["baseline"] = plain
    else:
        caption = "Corrupted test images, five strengths of each kind. Mean over seeds, with a band of one standard deviation."
    return figure("curves", "Accuracy and ECE under corruption", caption, data)


def _novelty(parts: SeedResults, variants: Sequence[Variant], novel: dict[str, str]) -> dict[str, Any]:
    """Returns the figure of the entropies of test images and out-of-distribution images."""
    contents = {variant.label: [part["entropy"] for part in parts.of(variant.key)] for variant in variants}
    panels = histogram_panels(contents, {"known": "test images", **novel})
    caption = "Predictive entropy in nats, all seeds together. A good method has higher entropies for out-of-distribution images."
    data = {"x_label": "predictive entropy (nats)", "panels": panels}
    return figure("histogram", "Entropy of test images and out-of-distribution images", caption, data)


def _cost(parts: SeedResults) -> dict[str, Any] | None:
    """Returns the figure of time and memory of every method relative to the deterministic network."""
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
            panels.append(
                {
                    "title": title,
                    "x_label": "relative to the deterministic network",
                    "bars": bars,
                    "level": 1.0,
                }
            )
    return figure("bars", "Cost of the noise", content["caption"], {"panels": panels}) if panels else None
