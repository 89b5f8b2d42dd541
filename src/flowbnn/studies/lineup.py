"""The methods that the studies set against each other: one list, with the same names and colours everywhere.

A rival is the name of a method, settings that make it that one, and words for it. The list names every method there is; what a study
leaves out, it leaves out by name and says why.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.inference import METHODS, Method, make_method

__all__ = ["FAMILIES", "PLAIN", "RIVALS", "Rival", "find_rivals", "rivals"]

FAMILIES: dict[str, tuple[str, str]] = {  # name in figures, colour
    "point": ("one network", "slate"),
    "dropout": ("dropout", "purple"),
    "ensemble": ("ensembles", "green"),
    "variational": ("variational weights", "blue"),
    "laplace": ("Laplace", "amber"),
    "chain": ("Markov chains", "violet"),
    "noise": ("node noise", "vermillion"),
}

NOISE = ("prior_scale",)  # that of the noise is another thing than that of the weights


@dataclass(frozen=True)
class Rival:
    """One method with its settings.

    Args:
        key: short name, used in files and on the command line.
        label: what tables and figures call it.
        method: its name in :data:`~flowbnn.inference.METHODS`.
        family: which of :data:`FAMILIES` it belongs to.
        settings: that differ from the method's defaults.
        own: names of common settings that it does not take over, because they mean another thing to it.
        cost: of one training, roughly, against the plain network's: the dear ones are begun first.
        held_out: whether it learns from held-out data, as calibration does.
        most_weights: networks of more weights than this are not given to it, because it would take hours.
    """

    key: str
    label: str
    method: str
    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    cost: float = 1.0
    held_out: bool = False
    most_weights: int | None = None

    @property
    def colour(self) -> str:
        return FAMILIES[self.family][1]

    def make(self, specific: Mapping[str, Any] | None = None, **common: Any) -> Method:
        """The method: of the common settings those that it has, then its own, then what is specific to a study."""
        known = {one.name for one in fields(METHODS[self.method])} - set(self.own)
        given = {name: value for name, value in common.items() if name in known}
        return make_method(self.method, **{**given, **self.settings, **(specific or {})})


RIVALS: tuple[Rival, ...] = (
    Rival("mle", "Maximum likelihood", "mle", "point"),
    Rival("map", "MAP", "map", "point"),
    Rival("temperature", "Temperature scaling", "temperature", "point", cost=1.2, held_out=True),
    Rival("mc-dropout", "MC dropout", "mc-dropout", "dropout", cost=2),
    Rival("ensemble", "Deep ensemble of 5", "ensemble", "ensemble", {"members": 5}, cost=5),
    Rival("swag", "SWAG", "swag", "ensemble", cost=1.5),
    Rival("bbb", "Bayes by Backprop", "bayes-by-backprop", "variational", cost=2),
    Rival(
        "bbb-mixture",
        "Bayes by Backprop, mixture prior",
        "bayes-by-backprop",
        "variational",
        {"prior": "scale-mixture"},
        cost=2.5,
    ),
    Rival("mnf", "Multiplicative flows", "mnf", "variational", cost=5),
    Rival("laplace", "Laplace, last layer", "laplace", "laplace", own=("prior_scale",), cost=1.5),
    Rival(
        "laplace-all",
        "Laplace, all layers",
        "laplace",
        "laplace",
        {"layers": "all"},
        own=("prior_scale",),
        cost=2,
    ),
    Rival("sgld", "SGLD", "sgld", "chain", own=("optimizer",), cost=3),
    Rival(
        "hmc",
        "HMC",
        "hmc",
        "chain",
        {"samples": 50, "warmup": 50, "chains": 2, "steps": 16},
        cost=30,
        most_weights=100_000,
    ),
    Rival(
        "nuts",
        "NUTS",
        "nuts",
        "chain",
        {"samples": 50, "warmup": 50, "chains": 2, "max_depth": 4},
        cost=30,
        most_weights=100_000,
    ),
    Rival(
        "noise-gaussian", "Node noise, Gaussian", "node-noise", "noise", {"kind": "gaussian"}, NOISE, cost=2
    ),
    Rival("noise-mixture", "Node noise, mixture", "node-noise", "noise", {"kind": "mixture"}, NOISE, cost=3),
    Rival(
        "noise-planar", "Node noise, planar flow", "node-noise", "noise", {"kind": "planar"}, NOISE, cost=4
    ),
)
PLAIN = "mle"  # what times are measured against


def rivals(without: Iterable[str] = ()) -> list[Rival]:
    """Every rival whose method is there, in the order of the tables.

    >>> [rival.key for rival in rivals()][:2]
    ['mle', 'map']
    """
    left = set(without)
    return [rival for rival in RIVALS if rival.method in METHODS and rival.key not in left]


def find_rivals(keys: Sequence[str]) -> list[Rival]:
    """Rivals by key, or by the name of their method, which may stand for several; in the order of the tables.

    >>> [rival.key for rival in find_rivals(["node-noise", "map"])]
    ['map', 'noise-gaussian', 'noise-mixture', 'noise-planar']
    """
    there = rivals()
    for key in keys:
        if not any(key in (rival.key, rival.method) for rival in there):
            names = [*(rival.key for rival in there), *(rival.method for rival in there)]
            raise FlowBNNError(f"there is no method '{key}' to compare{nearest(key, names)}")
    return [rival for rival in there if rival.key in keys or rival.method in keys]
