"""What the elephant study draws and says, from its parts alone."""

from typing import Any

from flowbnn_studies.runner.base import Parts
from flowbnn_studies.runner.figures import figure, pooled_histogram
from flowbnn_studies.runner.lineup import Rival
from flowbnn_studies.runner.rivalry import best_by, words

__all__ = ["answer", "figures"]


def figures(settings: Any, parts: Parts, chosen: list[Rival]) -> list[dict[str, Any]]:
    """The T distributions of two images, and the entropies of all."""
    found = []
    drawn = [rival for rival in chosen if "sides" in parts.content.get((rival.key, 0), {})]
    if drawn:
        first = parts.content[drawn[0].key, 0]
        panels = [
            {
                "title": rival.label,
                "sides": [
                    {
                        "note": f"entropy* {side['entropy']:.2f}, total variance {side['variance']:.2f}",
                        "samples": side["samples"],
                    }
                    for side in parts.content[rival.key, 0]["sides"]
                ],
            }
            for rival in drawn
        ]
        found.append(
            figure(
                "draws",
                "A known digit and a new one, seen by sampled networks",
                f"Seed 0, as in document 002's figure 6: for the same two images, the probabilities of the nine known digits in up to "
                f"{settings.drawn} sampled networks. The images are the first {settings.shown} of the test and the first "
                f"{settings.novel}. All answers to the new digit are wrong; what counts is whether the dots disagree.",
                {
                    "classes": first["classes"],
                    "images": [{"title": side["title"], "pixels": side["pixels"]} for side in first["sides"]],
                    "panels": panels,
                },
            )
        )
    if chosen:
        found.append(
            figure(
                "histogram",
                "Entropy* of known and of new digits",
                "Entropy of the mean probabilities in nats; all seeds together. The further apart the two are, the fewer known digits "
                "are lost when the new one is rejected.",
                {
                    "x_label": "entropy* (nats)",
                    "panels": [
                        {
                            "title": rival.label,
                            "groups": [
                                pooled_histogram(
                                    label, [part["entropy"][key] for part in parts.of(rival.key)]
                                )
                                for key, label in (
                                    ("known", "known digits"),
                                    ("novel", f"the new {settings.novel}"),
                                )
                            ],
                        }
                        for rival in chosen
                    ],
                },
            )
        )
    return found


def answer(parts: Parts, chosen: list[Rival]) -> str:
    """The answer, put together from the numbers."""
    order = best_by(parts, chosen, "with_new_entropy", higher=True)
    if not order:
        return "No method has numbers yet."
    best = order[0]
    text = (
        f"Over {len(parts.seeds)} splits, calling new what has a high entropy* is right most often with "
        f"{words(parts, order[:3], 'with_new_entropy')} (accuracy with “new” as a class), least with "
        f"{words(parts, order[-1:], 'with_new_entropy')}. {best.label} finds {parts.mean(best.key, 'found'):.0%} of the new digit and "
        f"loses {parts.mean(best.key, 'lost'):.0%} of the known ones; if it never rejected, it would be right in "
        f"{parts.mean(best.key, 'never'):.3f}."
    )
    spread = best_by(parts, chosen, "novel_variance", higher=True)
    if spread:
        text += (
            f" The sampled networks disagree most about the new digit with {words(parts, spread[:2], 'novel_variance')} (total "
            f"variance), least with {words(parts, spread[-1:], 'novel_variance')}."
        )
    by_variance = best_by(parts, chosen, "auroc_variance", higher=True)
    if by_variance:
        ahead = [
            rival
            for rival in by_variance
            if parts.mean(rival.key, "auroc_variance") > parts.mean(rival.key, "auroc_entropy")
        ]
        text += (
            f" Of the {len(by_variance)} methods that have a total variance, {len(ahead) or 'none'} tell"
            f"{'s' if len(ahead) == 1 else ''} the new digit better by it than by entropy*."
        )
    return text
