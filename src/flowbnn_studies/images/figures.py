"""The figures of the studies on images, from their parts alone."""

from collections.abc import Sequence
from typing import Any

from flowbnn.results import Parts, figure, reliability_figure
from flowbnn_studies.images.findings import PLAIN, RECIPES, present
from flowbnn_studies.images.published import EPOCHS, Published
from flowbnn_studies.images.settings import NAMES, split_key
from flowbnn_studies.runner.figures import curve, histogram_panels, panel
from flowbnn_studies.runner.study import Variant

PANELS = {
    "negative_elbo": ("Negative ELBO", "nats per image"),
    "log_likelihood": ("Log-likelihood", "nats per image"),
    "kl": ("KL / N", "nats per image"),
    "accuracy": ("Test accuracy", ""),
    "ece": ("ECE on the test set", ""),
}


def figures(
    parts: Parts, variants: Sequence[Variant], published: Published, novel: dict[str, str], source: str
) -> list[dict[str, Any]]:
    """The figures, in the order of the page; those whose parts are missing are left out."""
    shown = present(parts, variants)

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
            known = published.levels(key).items()
            levels = [{"label": label, "value": value} for label, value in known]
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
    return [
        {
            "label": f"Xiong: {words}",
            "x": list(EPOCHS),
            "mean": list(curves[key]),
            "std": None,
            "style": "dashed",
            "like": labels[f"xiong-{method}-position"],
        }
        for method, words, curves in (
            ("gaussian", "no flow", published.gaussian),
            ("flow", "flow noise", published.flow),
        )
        if key in curves and f"xiong-{method}-position" in labels
    ]


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
    contents = {variant.label: [part["entropy"] for part in parts.of(variant.key)] for variant in variants}
    return figure(
        "histogram",
        "Entropy of known and of novel images",
        "Predictive entropy in nats; all seeds together. Images the network has never seen should lie to the right.",
        {
            "x_label": "predictive entropy (nats)",
            "panels": histogram_panels(contents, {"known": "test images", **novel}),
        },
    )


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
