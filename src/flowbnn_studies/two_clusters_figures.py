"""What the two-clusters study says and draws, from its parts alone."""

from collections.abc import Sequence
from typing import Any

from flowbnn_studies.runner.base import Parts, Variant
from flowbnn_studies.runner.figures import count_modes_of, curve, figure, pooled_histogram, reliability_figure
from flowbnn_studies.runner.statistics import paired

__all__ = ["PUBLISHED", "answer", "figures"]

PUBLISHED = {"plain": {"accuracy": 0.953, "ece": 0.094}, "flow": {"ece": 0.009}}


def answer(parts: Parts, exact: Parts) -> str:
    """The answer, put together from the numbers."""

    def ece(variant: str) -> str:
        return f"{parts.mean(variant, 'ece'):.4f}"

    gain = paired(parts.values("plain", "ece"), parts.values("flow", "ece"))
    against_longer = paired(parts.values("longer", "ece"), parts.values("flow", "ece"))
    against_gaussian = paired(parts.values("gaussian", "ece"), parts.values("flow", "ece"))
    better = gain.mean > 0 and gain.clear
    head = "Yes" if better else "No" if gain.mean <= 0 else "Not clearly"
    published = (
        "at most the document's"
        if parts.mean("flow", "ece") <= PUBLISHED["flow"]["ece"]
        else "above the document's"
    )
    text = (
        f"{head}: with flow noise the ECE on unseen points is {ece('flow')} against {ece('plain')} for the plain MLP (mean of "
        f"{len(parts.seeds)} seeds), {published} 0.009, and the accuracy {parts.mean('flow', 'accuracy'):.4f} against "
        f"{parts.mean('plain', 'accuracy'):.4f}; the Bayes-optimal classifier scores {exact.mean('exact', 'ece'):.4f} and "
        f"{exact.mean('exact', 'accuracy'):.4f} on the same points."
    )
    if against_longer.clear and against_longer.mean > 0:
        text += f" The noise does more than the longer training that comes with it: without noise that gives {ece('longer')}."
    else:
        text += (
            f" But the credit belongs to the longer training as much as to the noise: the plain MLP trained for as many epochs "
            f"reaches {ece('longer')}, and the difference, {against_longer.words()}, "
            + ("is in its favour." if against_longer.clear else "is within chance.")
        )
    verdict = (
        "within chance of"
        if not against_gaussian.clear
        else "worse than"
        if against_gaussian.mean > 0
        else "better than"
    )
    return f"{text} Gaussian noise gives {ece('gaussian')}, {verdict} the flow."


def figures(variants: Sequence[Variant], parts: Parts) -> list[dict[str, Any]]:
    """The figures, in the order of the page."""
    labels = {variant.key: variant.label for variant in variants}
    first = parts.seeds[0]
    fields = []
    for key in ("plain", "flow"):
        part = parts.content[key, first]
        values = part["values"]
        fields.append(
            {
                "label": labels[key],
                "accuracy": values["accuracy"],
                "ece": values["ece"],
                **part["field"],
                "bins": part["bins"],
            }
        )
    noisy = ("flow", "gaussian")

    def lines(name: str, keys: tuple[str, ...], scale: float = 1.0) -> list[dict[str, Any]]:
        return [curve(labels[key], [part["history"][name] for part in parts.of(key)], scale) for key in keys]

    return [
        figure(
            "field",
            "Where each network is unsure",
            f"Seed {first}. Left: test points, the predicted class on a grid, and as the size of the dots the standard deviation of "
            "the predicted probability over sampled networks. Middle: share of the test points by confidence. Right: accuracy by "
            "confidence; on the diagonal a confidence means what it says.",
            {"models": fields, "seed": first},
        ),
        reliability_figure(
            "Accuracy against confidence",
            "Bins of all seeds together; the ECE is the mean over seeds.",
            variants,
            parts,
        ),
        figure(
            "histogram",
            "How confident are they?",
            "Share of the test points by confidence, all seeds together.",
            {
                "x_label": "confidence",
                "panels": [
                    {
                        "title": variant.label,
                        "groups": [
                            pooled_histogram(
                                variant.label, [part["confidence"] for part in parts.of(variant.key)]
                            )
                        ],
                    }
                    for variant in variants
                ],
            },
        ),
        figure(
            "curves",
            "Training",
            "Mean over seeds of each epoch's mean; the band is one standard deviation. In nats, the first two per example.",
            {
                "x_label": "epoch",
                "y_label": "nats",
                "panels": [
                    {
                        "title": "ELBO",
                        "y_label": "nats per example",
                        "log": False,
                        "lines": lines("elbo", noisy),
                    },
                    {
                        "title": "Log-likelihood",
                        "y_label": "nats per example",
                        "log": False,
                        "lines": lines("log_likelihood", (*noisy, "longer")),
                    },
                    {
                        "title": "KL to the prior",
                        "y_label": "nats",
                        "log": False,
                        "lines": lines("kl", noisy),
                    },
                ],
            },
        ),
        figure(
            "density",
            "The noise that was learned",
            f"Seed {first}: marginal densities of the dimensions that moved farthest from the prior. "
            + count_modes_of([part["densities"] for part in parts.of("flow")]),
            {"panels": parts.content["flow", first]["densities"]},
        ),
    ]
