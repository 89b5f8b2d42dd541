"""One colour for one method, in all studies of a page: told by the label, whatever colour the results were stored with."""

import re
from dataclasses import dataclass

__all__ = ["METHODS", "Kind", "method_of"]


@dataclass(frozen=True)
class Kind:
    """A kind of method: what a key calls it, its colour, and the words of a label that tell it."""

    name: str
    colour: str
    words: str


# The first whose words a label has: "multiplicative flows" are weights, and only then is a flow noise.
METHODS = (
    Kind("variational weights", "crimson", r"backprop|multiplicative|\bmnf\b"),
    Kind("Laplace", "amber", r"\blaplace\b"),
    Kind("ensembles", "olive", r"\bensemble|\bswag\b"),
    Kind("Markov chains", "violet", r"\bsgld\b|\bhmc\b|\bnuts\b"),
    Kind("one network, trained as long", "brown", r"trained (as long|longer)"),
    Kind("dropout", "green", r"\bdropout\b"),
    Kind("mixture noise", "purple", r"\bmixture\b|\bcomponents\b"),
    Kind("Gaussian noise", "blue", r"\bgaussian\b|\bno flow\b"),
    Kind("flow noise", "vermillion", r"\bflows?\b|\bplanar\b|\bstochastic\b"),
    Kind("one network", "slate", r"\bplain\b|maximum likelihood|\bmle\b|\bmap\b|\btemperature\b|\bsgd\b"),
)


def method_of(label: str) -> Kind | None:
    """The kind of method that a label names, if it names one.

    >>> [method_of(label).name for label in ("Best: flow noise, channel", "Multiplicative flows", "Plain MLP, trained as long")]
    ['flow noise', 'variational weights', 'one network, trained as long']
    >>> method_of("Length 3")
    """
    return next((kind for kind in METHODS if re.search(kind.words, label, re.IGNORECASE)), None)
