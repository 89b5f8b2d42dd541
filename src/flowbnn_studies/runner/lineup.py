"""The methods that the studies set against each other: one list, with the same names and colours everywhere.

A rival is the name of a method, settings that make it that one, and words for it. The list names every method there is; what a study
leaves out, it leaves out by name and says why.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.methods import METHODS, SGLD, Method, make_method

__all__ = ["FAMILIES", "PLAIN", "RIVALS", "Rival", "find_rivals", "rivals"]

FAMILIES: dict[str, tuple[str, str]] = {  # name in figures, and the colour that the report gives it
    "point": ("one network", "slate"),
    "dropout": ("dropout", "green"),
    "ensemble": ("ensembles", "olive"),
    "variational": ("variational weights", "crimson"),
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
        method: its name in :data:`~flowbnn.methods.METHODS`.
        family: which of :data:`FAMILIES` it belongs to.
        settings: that differ from the method's defaults.
        own: names of common settings that it does not take over, because they mean another thing to it.
        cost: of one training, roughly, against the plain network's: the dear ones are begun first.
        held_out: whether it learns from held-out data, as calibration does.
        most_weights: networks of more weights than this are not given to it, because it would take hours.
        short: settings for a number of epochs of so many batches, where the method's defaults do not suit so few.
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
    short: Callable[[int, int | None], Mapping[str, Any]] | None = None

    @property
    def colour(self) -> str:
        return FAMILIES[self.family][1]

    def make(
        self, specific: Mapping[str, Any] | None = None, *, batches: int | None = None, **common: Any
    ) -> Method:
        """The method: of the common settings those that it has, then its own, then what is specific to a study.

        ``batches`` is how many an epoch has, None where nobody knows.
        """
        known = {one.name for one in fields(METHODS[self.method])} - set(self.own)
        given = {name: value for name, value in common.items() if name in known}
        suited = self.short(given["epochs"], batches) if self.short and "epochs" in given else {}
        return make_method(self.method, **{**given, **suited, **self.settings, **(specific or {})})


def _short_chain(epochs: int, batches: int | None) -> dict[str, Any]:
    """How SGLD keeps as many of its snapshots as fit into a short run: with fewer cycles where there are not even two."""
    if epochs < 1 or batches is None:
        return {}
    usual = SGLD()
    for cycles in (usual.cycles, 1, 0):
        for samples in range(usual.samples, 1, -1):
            with suppress(FlowBNNError):
                SGLD(cycles=cycles, samples=samples).plan(epochs * batches)
                return {"cycles": cycles, "samples": samples}
    return {}


def _short_walk(epochs: int, batches: int | None) -> dict[str, Any]:
    """How SWAG collects two sets of weights in a run too short for its defaults; one epoch leaves none to train in before."""
    if epochs == 3:
        return {"begin": 1 / 3}
    return {"per_epoch": 2} if epochs == 2 else {}


RIVALS: tuple[Rival, ...] = (
    Rival("mle", "Maximum likelihood", "mle", "point"),
    Rival("map", "MAP", "map", "point"),
    Rival("temperature", "Temperature scaling", "temperature", "point", cost=1.2, held_out=True),
    Rival("mc-dropout", "MC dropout", "mc-dropout", "dropout", cost=2),
    Rival("ensemble", "Deep ensemble of 5", "ensemble", "ensemble", {"members": 5}, cost=5),
    Rival("swag", "SWAG", "swag", "ensemble", cost=1.5, short=_short_walk),
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
    Rival("sgld", "SGLD", "sgld", "chain", own=("optimizer",), cost=3, short=_short_chain),
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
    """Rivals in the order of the tables: by key, which means that one alone; else by the name of their method or a glob of keys,
    which may stand for several.

    >>> [rival.key for rival in find_rivals(["node-noise", "map", "laplace"])]
    ['map', 'laplace', 'noise-gaussian', 'noise-mixture', 'noise-planar']
    >>> [rival.key for rival in find_rivals(["laplace*"])]
    ['laplace', 'laplace-all']
    """
    there = rivals()
    found: set[str] = set()
    for key in keys:
        meant = (
            {rival.key for rival in there if rival.key == key}
            or {rival.key for rival in there if rival.method == key}
            or {rival.key for rival in there if fnmatchcase(rival.key, key)}
        )
        if not meant:
            names = [*(rival.key for rival in there), *(rival.method for rival in there)]
            raise FlowBNNError(f"there is no method '{key}' to compare{nearest(key, names)}")
        found |= meant
    return [rival for rival in there if rival.key in found]
