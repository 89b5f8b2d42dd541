"""Methods that are compared, each with its settings."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.methods import (
    DAMP,
    HMC,
    IVON,
    MAP,
    MLE,
    MNF,
    NUTS,
    SGLD,
    SWAG,
    VBLL,
    BayesByBackprop,
    DeepEnsemble,
    Laplace,
    MCDropout,
    Method,
    ModeEnsemble,
    NodeNoise,
    Temperature,
)

BASELINE = "mle"  # key of the deterministic baseline, whose times are the unit of all times


@dataclass(frozen=True)
class Candidate:
    """A method with its settings.

    Args:
        key: Short name, used in files and on the command line.
        label: Name in tables and figures.
        method: Class of the method.
        settings: Settings that differ from the defaults of the method.
        inner: Method that is fitted first if the candidate is a calibrator, with all other settings.
        excluded: Names of common settings that the method ignores, because they have another meaning for it.
        cost: Approximate training time, as a multiple of the training time of the baseline. Expensive methods are started first.
        needs_held_out: If True, the method learns from held-out data, as temperature scaling does.
        max_weights: Largest number of weights for which the method takes less than hours. Larger networks are skipped.
        short_run: Function that returns settings for a small number of epochs, given the epochs and the batches per epoch.
    """

    key: str
    label: str
    method: type[Method]
    settings: Mapping[str, Any] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    cost: float = 1.0
    needs_held_out: bool = False
    max_weights: float = math.inf
    short_run: Callable[[int, int | None], Mapping[str, Any]] | None = None
    inner: type[Method] | None = None

    @property
    def method_name(self) -> str:
        """Name of the method. Node noise has its kind appended: ``mc-dropout``, ``node-noise-planar``."""
        kind = self.settings.get("kind")
        return f"{self.method.name}-{kind}" if isinstance(kind, str) else self.method.name

    def make(
        self, specific: Mapping[str, Any] | None = None, batches: int | None = None, **common: Any
    ) -> Method:
        """Returns the method. Later settings take precedence: common, short run, candidate, specific.

        Args:
            specific: Settings of this method.
            batches: Number of batches per epoch, if known.
            common: Settings of all methods. Settings that the method does not have are ignored.
        """
        names = {setting.name for setting in fields(self.inner or self.method)} - set(self.excluded)
        common = {name: value for name, value in common.items() if name in names}
        short = self.short_run(common["epochs"], batches) if self.short_run and "epochs" in common else {}
        settings = {**common, **short, **self.settings, **(specific or {})}
        if self.inner is None:
            return self.method(**settings)
        inner = {name: settings.pop(name) for name in names & set(settings)}
        return self.method(**{"method": self.inner(**inner), **settings})


def _short_sgld(epochs: int, batches: int | None) -> dict[str, Any]:
    """Returns settings of SGLD with as many snapshots as fit into a short run, with fewer cycles if fewer than two fit."""
    default = SGLD()
    for cycles in (default.cycles, 1, 0) if batches is not None else ():
        for samples in range(default.samples, 1, -1):
            schedule = SGLD(cycles=cycles, samples=samples).step_schedule(epochs * (batches or 1))
            if len(schedule.snapshot_steps) == samples:
                return {"cycles": cycles, "samples": samples}
    return {}


def _short_swag(epochs: int, batches: int | None) -> dict[str, Any]:
    """Returns settings of SWAG that collect two snapshots in two or three epochs."""
    return {"snapshots_per_epoch": 2} if epochs in (2, 3) else {}


_PRIOR = ("prior_scale",)  # the prior of the noise, or of Laplace, is not the common prior of the weights
# fmt: off
CANDIDATES: tuple[Candidate, ...] = (
    Candidate("mle", "Maximum likelihood", MLE),
    Candidate("map", "MAP", MAP),
    Candidate("damp", "DAMP", DAMP, cost=1.5),
    Candidate("temperature", "Temperature scaling", Temperature, cost=1.2, needs_held_out=True, inner=MAP),
    Candidate("mc-dropout", "MC dropout", MCDropout, cost=2),
    Candidate("deep-ensemble", "Deep ensemble of 5", DeepEnsemble, {"members": 5}, cost=5),
    Candidate("mode-ensemble", "Modes of the noise, 16", ModeEnsemble, excluded=_PRIOR, cost=4),
    Candidate("swag", "SWAG", SWAG, cost=1.5, short_run=_short_swag),
    Candidate("bayes-by-backprop", "Bayes by Backprop", BayesByBackprop, cost=2),
    Candidate("bayes-by-backprop-mixture", "Bayes by Backprop, mixture prior", BayesByBackprop, {"prior": "scale-mixture"}, cost=2.5),
    Candidate("ivon", "IVON", IVON, excluded=("lr", "optimizer", "schedule"), cost=1.5),
    Candidate("vbll", "Variational last layer", VBLL, cost=1.2),
    Candidate("mnf", "Multiplicative flows", MNF, cost=5),
    Candidate("laplace", "Laplace, last layer", Laplace, excluded=_PRIOR, cost=1.5),
    Candidate("laplace-all", "Laplace, all layers", Laplace, {"layers": "all"}, _PRIOR, cost=2),
    Candidate("sgld", "SGLD", SGLD, excluded=("optimizer", "schedule"), cost=3, short_run=_short_sgld),
    Candidate("hmc", "HMC", HMC, {"samples": 50, "warmup": 50, "chains": 2, "steps": 16}, cost=30, max_weights=100_000),
    Candidate("nuts", "NUTS", NUTS, {"samples": 50, "warmup": 50, "chains": 2, "max_depth": 4}, cost=30, max_weights=100_000),
    Candidate("node-noise-gaussian", "Node noise, Gaussian", NodeNoise, {"kind": "gaussian"}, _PRIOR, cost=2),
    Candidate("node-noise-mixture", "Node noise, mixture", NodeNoise, {"kind": "mixture"}, _PRIOR, cost=3),
    Candidate("node-noise-planar", "Node noise, planar flow", NodeNoise, {"kind": "planar"}, _PRIOR, cost=4),
)
# fmt: on


def find_candidates(keys: Iterable[str]) -> list[Candidate]:
    """Returns candidates in the order of the tables.

    Args:
        keys: Keys, names of methods, or glob patterns of keys.

    Raises:
        FlowBNNError: If a key matches no candidate.

    >>> [candidate.key for candidate in find_candidates(["node-noise", "map", "laplace"])]
    ['map', 'laplace', 'node-noise-gaussian', 'node-noise-mixture', 'node-noise-planar']
    """
    selected_keys: set[str] = set()
    for key in keys:
        by_key = {candidate.key for candidate in CANDIDATES if candidate.key == key}
        by_method = {candidate.key for candidate in CANDIDATES if candidate.method.name == key}
        by_pattern = {candidate.key for candidate in CANDIDATES if fnmatchcase(candidate.key, key)}
        if not (matches := by_key or by_method or by_pattern):
            names = [name for candidate in CANDIDATES for name in (candidate.key, candidate.method.name)]
            raise FlowBNNError(f"unknown method '{key}'{nearest(key, names)}", argument="methods")
        selected_keys |= matches
    return [candidate for candidate in CANDIDATES if candidate.key in selected_keys]
