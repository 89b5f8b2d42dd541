"""The figures of the studies on images, from their parts alone."""

from collections.abc import Sequence
from typing import Any

from flowbnn_studies.images.findings import present
from flowbnn_studies.images.pictures import KINDS, STRENGTHS
from flowbnn_studies.images.published import EPOCHS, Published
from flowbnn_studies.images.recipes import METHODS, split_key
from flowbnn_studies.runner.base import Parts, Variant
from flowbnn_studies.runner.figures import curve, figure, pooled_histogram, reliability_figure
from flowbnn_studies.runner.statistics import summary

__all__ = ["figures"]

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

    found = [
        _training(parts, some("document", "position"), published, source, "position"),
        _training(parts, some("document", "channel"), None, source, "channel"),
        _training(parts, some("best"), None, source, ""),
    ]
    for recipe, words in (("best", "the best recipe"), ("document", "the document's recipe")):
        chosen = some(recipe)
        if chosen:
            caption = f"Test images, {words}; bins of all seeds together, the ECE is the mean over seeds."
            found.append(reliability_figure(f"Accuracy against confidence, {words}", caption, chosen, parts))
    final = some("best") or some("document")
    found += [_shift(parts, final), _novelty(parts, final, novel), _cost(parts)]
    return [one for one in found if one is not None]


def _training(
    parts: Parts, variants: Sequence[Variant], published: Published | None, source: str, site: str
) -> dict[str, Any] | None:
    """The five panels of document 000's figures 5 and 6, with its own curves where they are given.

    None where nothing is left to draw: a second figure needs noise at its site.
    """
    variants = [v for v in variants if v.key != "document-plain"]  # another, shorter training
    if published is None and site and not any(split_key(v.key)[2] == site for v in variants):
        return None
    panels = []
    for key, (title, unit) in PANELS.items():
        stored, scale = ("elbo", -1.0) if key == "negative_elbo" else (key, 1.0)
        drawn = [v for v in variants if all(stored in part["curves"] for part in parts.of(v.key))]
        if key == "kl":
            drawn = [v for v in drawn if any(any(part["curves"]["kl"]) for part in parts.of(v.key))]
        lines = [curve(v.label, [part["curves"][stored] for part in parts.of(v.key)], scale) for v in drawn]
        panel: dict[str, Any] = {"title": title, "y_label": unit, "log": False, "lines": lines}
        if published is not None and lines:
            panel["lines"] += _document(published, key, {v.key: v.label for v in drawn})
            panel["levels"] = [
                {"label": label, "value": value} for label, value in published.levels.get(key, {}).items()
            ]
        if lines:
            panels.append(panel)
    if not panels:
        return None
    if published is not None:
        title = f"{source.split(', ')[-1].capitalize()} of document 000, redrawn"
        text = f"The document's recipe, site {site}. Dashed, in the colours of ours: the document's curves; dotted: its levels."
    elif site:
        title, text = f"The same at site {site}", f"The document's recipe with one draw for each {site}."
    else:
        title, text = "Training, the best recipe", "From scratch, with augmentation."
    text += " Mean over seeds of each epoch; the band is one standard deviation."
    if any(panel["title"] == PANELS["ece"][0] for panel in panels):
        text += " The curves on the test set are for display; no epoch was chosen by them."
    return figure("curves", title, text, {"x_label": "epoch", "panels": panels})


def _document(published: Published, key: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    """Document 000's curves of a panel, each in the colour of ours."""
    return [
        {
            "label": f"Document: {METHODS[method].lower().replace('gaussian noise', 'no flow')}",
            "x": list(EPOCHS),
            "mean": list(curves[key]),
            "std": None,
            "style": "dashed",
            "like": labels[f"document-{method}-position"],
        }
        for method, curves in (("gaussian", published.gaussian), ("flow", published.flow))
        if key in curves and f"document-{method}-position" in labels
    ]


def _shift(parts: Parts, variants: Sequence[Variant]) -> dict[str, Any] | None:
    """Accuracy and ECE against the strength of each corruption."""
    if not variants:
        return None

    def line(variant: Variant, kind: str, name: str) -> dict[str, Any]:
        cells = [
            summary([part["shift"][kind][name][place] for part in parts.of(variant.key)])
            for place in range(len(STRENGTHS))
        ]
        many = len(parts.of(variant.key)) > 1
        return {
            "label": variant.label,
            "x": list(STRENGTHS),
            "mean": [cell["mean"] for cell in cells],
            "std": [cell["std"] for cell in cells] if many else None,
        }

    panels = [
        {
            "title": f"{kind.capitalize()}: {'accuracy' if name == 'accuracy' else 'ECE'}",
            "y_label": "",
            "log": False,
            "lines": [line(variant, kind, name) for variant in variants],
        }
        for name in ("accuracy", "ece")
        for kind in KINDS
    ]
    caption = "Corrupted test images, five strengths of each kind; mean over seeds, the band is one standard deviation."
    return figure(
        "curves",
        "Under corruption",
        caption,
        {"x_label": "strength", "panels": panels, "columns": len(KINDS)},
    )


def _novelty(parts: Parts, variants: Sequence[Variant], novel: dict[str, str]) -> dict[str, Any] | None:
    if not variants:
        return None
    groups = {"known": "test images", **novel}
    panels = [
        {
            "title": variant.label,
            "groups": [
                pooled_histogram(label, [part["entropy"][key] for part in parts.of(variant.key)])
                for key, label in groups.items()
            ],
        }
        for variant in variants
    ]
    return figure(
        "histogram",
        "Entropy of known and of novel images",
        "Predictive entropy in nats; all seeds together. Images the network has never seen should lie to the right.",
        {"x_label": "predictive entropy (nats)", "panels": panels},
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
            {"label": method.replace("-", ", "), "value": ratios[name]}
            for method, ratios in content["ratios"].items()
            if ratios.get(name) is not None
        ]
        if bars:
            panels.append({"title": title, "x_label": "over the plain network", "bars": bars, "level": 1.0})
    return figure("bars", "What the noise costs", content["caption"], {"panels": panels}) if panels else None
