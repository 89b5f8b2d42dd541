"""What the digits study draws and says, from its parts alone."""

from collections.abc import Sequence
from typing import Any

from flowbnn_studies.runner.base import Parts, Variant
from flowbnn_studies.runner.figures import count_modes_of, curve, figure, pooled_histogram, reliability_figure
from flowbnn_studies.runner.statistics import paired

__all__ = ["answer", "figures"]


def answer(parts: Parts, variants: Sequence[Variant]) -> str:
    """The answer, put together from the numbers."""
    labels = {variant.key: variant.label for variant in variants}

    def compare(metric: str, higher: bool, words: str) -> str:
        order = sorted(labels, key=lambda key: parts.mean(key, metric), reverse=higher)
        best = order[0]
        line = ", ".join(f"{labels[key].lower()} {parts.mean(key, metric):.3f}" for key in order)
        rivals = [
            key
            for key in order[1:]
            if not paired(parts.values(best, metric), parts.values(key, metric)).clear
        ]
        if not rivals:
            tail = "ahead of all others by more than chance"
        elif len(rivals) == len(order) - 1:
            tail = "but ahead of none of the others by more than chance"
        else:
            tail = f"within chance of {' and '.join(labels[key].lower() for key in rivals)}"
        return f"{words}: {labels[best].lower()} is best, {tail} ({line})."

    flow = paired(parts.values("flow", "auroc"), parts.values("gaussian", "auroc"))
    if not flow.clear:
        verdict = "no clear difference between flow and Gaussian noise"
    else:
        verdict = f"flow noise does {'better' if flow.mean > 0 else 'worse'} than Gaussian noise"
    return (
        f"Over {len(parts.seeds)} splits. "
        + compare("nll", False, "Probabilities (NLL)")
        + " "
        + compare("auroc", True, "The unseen digit (AUROC by entropy)")
        + f" Accuracy lies between {min(parts.mean(key, 'accuracy') for key in labels):.3f} and "
        + f"{max(parts.mean(key, 'accuracy') for key in labels):.3f}. For novelty there is {verdict}: {flow.words(3)}."
    ).replace("there is flow noise does", "flow noise does")


def figures(parts: Parts, variants: Sequence[Variant], novel: int) -> list[dict[str, Any]]:
    """The figures, in the order of the page."""
    first = parts.seeds[0]
    flow = parts.content["flow", first]
    noisy = [variant for variant in variants if variant.key in ("gaussian", "flow")]

    def lines(name: str, chosen: Sequence[Variant]) -> list[dict[str, Any]]:
        return [
            curve(variant.label, [part["history"][name] for part in parts.of(variant.key)])
            for variant in chosen
        ]

    def panels(name: str) -> list[dict[str, Any]]:
        return [
            {
                "title": variant.label,
                "groups": [
                    pooled_histogram(label, [part[name][key] for part in parts.of(variant.key)])
                    for key, label in (("known", "known digits"), ("novel", f"the unseen {novel}"))
                ],
            }
            for variant in variants
        ]

    return [
        figure(
            "images",
            "Known and novel digits",
            f"Seed {first}, flow noise: known digits of middling and of the highest predictive entropy, then the unseen "
            f"{novel} with the lowest, a middling and the highest. Bars: the four likeliest digits.",
            {"panels": flow["images"]},
        ),
        figure(
            "histogram",
            "Entropy of known and of novel digits",
            "Predictive entropy in nats; all seeds together. Good noise moves the novel digits to the right and leaves the known ones.",
            {"x_label": "predictive entropy (nats)", "panels": panels("entropy")},
        ),
        figure(
            "histogram",
            "Confidence in known and in novel digits",
            "Probability of the likeliest class; all seeds together.",
            {"x_label": "confidence", "panels": panels("confidence")},
        ),
        reliability_figure(
            "Accuracy against confidence",
            "Known digits, bins of all seeds together; the ECE is the mean over seeds.",
            variants,
            parts,
        ),
        figure(
            "curves",
            "Training",
            "Mean over seeds of each epoch's mean, after the common start; the band is one standard deviation.",
            {
                "x_label": "epoch",
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
                        "lines": lines("log_likelihood", variants),
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
            f"Seed {first}: densities of the noise dimensions that moved farthest from their prior, and one pair of them. "
            + count_modes_of([part["densities"] for part in parts.of("flow")]),
            {"panels": flow["densities"], "pairs": [flow["pair"]]},
        ),
    ]
