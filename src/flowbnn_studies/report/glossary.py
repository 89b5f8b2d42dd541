"""What a reader must be told before the numbers: terms that the tables use, and the sources that they name."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["SOURCES", "TERMS", "Source", "explain", "sources_of"]

# Told at drawing time, so that results stored before a term was explained are explained too.
TERMS = {
    "NLL*": "How little the network trusts its own answer: minus the logarithm of the probability of the likeliest class, after the "
    "probabilities of all sampled networks are averaged. 0 when it is certain, log K when all K classes are equally likely. The star "
    "says that no true label is needed: plain NLL takes the probability of the right class instead.",
    "entropy*": "How spread out the averaged answer is: average the probabilities of all sampled networks, then take the entropy "
    "−Σ p log p over the classes, in nats. 0 when one class has all the probability, log K when all K classes are equally likely. The "
    "star says that it is that of the average, not of one network.",
    "total variance": "How much the sampled networks disagree: the variance of each class's probability over the sampled networks, "
    "summed over the classes. 0 when all of them say the same; a single network has none.",
}


@dataclass(frozen=True)
class Source:
    """A text that results refer to: ``name`` is what they call it, ``link`` is empty where none is known."""

    name: str
    author: str
    title: str
    link: str = ""


SOURCES = (
    Source(
        "document 000",
        "Weijiang Xiong (supervisor: Markus Heinonen)",
        "Normalizing Flows for Implicit Bayesian Neural Networks (project report)",
    ),
    Source(
        "document 001",
        "Sungsoo Ahn and Kimin Lee",
        "Bayesian Deep Learning (slides of lecture 8 of KAIST's EE807, Recent Advances in Deep Learning)",
    ),
    Source(
        "document 002",
        "Federico Ravenda",
        "Probabilistic Deep Learning (report, Università degli Studi di Milano Bicocca)",
    ),
    Source(
        "Trinh et al.",
        "Trung Trinh, Samuel Kaski and Markus Heinonen",
        "Scalable Bayesian neural networks by layer-wise input augmentation (2020)",
        "https://arxiv.org/abs/2010.13498",
    ),
    Source(
        "Blundell et al.",
        "Charles Blundell, Julien Cornebise, Koray Kavukcuoglu and Daan Wierstra",
        "Weight Uncertainty in Neural Networks (2015)",
        "https://arxiv.org/abs/1505.05424",
    ),
)


def explain(words: Iterable[str]) -> list[tuple[str, str]]:
    """The terms that occur in some labels or sentences, each with its meaning.

    >>> [term for term, _ in explain(["AUROC, entropy*", "Mean NLL of the right class"])]
    ['entropy*']
    """
    text = "\n".join(words).lower()
    return [(term, meaning) for term, meaning in TERMS.items() if term.lower() in text]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list) and not (value and isinstance(value[0], int | float)):
        for part in value:
            yield from _texts(part)


def sources_of(results: Iterable[dict[str, Any]]) -> list[Source]:
    """The sources that results mention anywhere in their words, in the order of :data:`SOURCES`.

    >>> [source.name for source in sources_of([{"source": "rivals of documents 001 and 002", "notes": ["As Trinh et al. do"]}])]
    ['document 001', 'document 002', 'Trinh et al.']
    """
    found: set[str] = set()
    for one in results:
        text = "\n".join(_texts(one))
        for numbers in re.findall(
            r"\bdocuments?\s+(\d{3}(?:(?:,\s*|\s+and\s+|\s+or\s+)\d{3})*)", text, re.IGNORECASE
        ):
            found |= {f"document {number}" for number in re.findall(r"\d{3}", numbers)}
        found |= {source.name for source in SOURCES if source.name in text}
    return [source for source in SOURCES if source.name in found]
