"""What is compared, and how one method is measured: the candidates, and quality and cost of one fit."""

import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowbnn.batches import device_of
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.methods import (
    DAMP,
    HMC,
    MAP,
    MLE,
    MNF,
    NUTS,
    SGLD,
    SWAG,
    BayesByBackprop,
    DeepEnsemble,
    Laplace,
    MCDropout,
    MemberPosterior,
    Method,
    ModeEnsemble,
    ModePosterior,
    NodeNoise,
    Posterior,
    Temperature,
)
from flowbnn.methods.fitting import LikelihoodName
from flowbnn.metrics import novelty_auroc, reliability
from flowbnn.posterior.evaluate import novelty_scores
from flowbnn.predictive import CategoricalPredictive

PLAIN = "mle"  # times are ratios to those of the plain network
HOURS = 100_000  # above this many weights HMC and NUTS take hours


@dataclass(frozen=True)
class Candidate:
    """One method with its settings.

    Args:
        key: short name, used in files and on the command line.
        label: name in tables and figures.
        method: its class.
        settings: those that differ from the method's defaults.
        own: common settings that it does not take over, because they mean another thing to it.
        cost: of one training, roughly, as a multiple of the plain network's: the expensive ones are started first.
        held_out: whether it learns from held-out data, as calibration does.
        most_weights: larger networks are skipped, because it would take hours.
        short: settings for a given number of epochs and of batches per epoch, where the defaults do not suit so few.
    """

    key: str
    label: str
    method: type[Method]
    settings: Mapping[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    cost: float = 1.0
    held_out: bool = False
    most_weights: float = math.inf
    short: Callable[[int, int | None], Mapping[str, Any]] | None = None

    @property
    def method_name(self) -> str:
        """The method's name, node noise with its kind: ``mc-dropout``, ``node-noise-planar``."""
        kind = self.settings.get("kind")
        return f"{self.method.name}-{kind}" if isinstance(kind, str) else self.method.name

    def make(
        self, specific: Mapping[str, Any] | None = None, batches: int | None = None, **common: Any
    ) -> Method:
        """The method with those ``common`` settings that it has, then its own, then the ``specific`` ones."""
        known = {one.name for one in fields(self.method)} - set(self.own)
        given = {name: value for name, value in common.items() if name in known}
        suited = self.short(given["epochs"], batches) if self.short and "epochs" in given else {}
        return self.method(**{**given, **suited, **self.settings, **(specific or {})})


def _short_sgld(epochs: int, batches: int | None) -> dict[str, Any]:
    """As many of SGLD's snapshots as fit into a short run, with fewer cycles where not even two do."""
    usual = SGLD()
    for cycles in (usual.cycles, 1, 0) if batches is not None else ():
        for samples in range(usual.samples, 1, -1):
            schedule = SGLD(cycles=cycles, samples=samples).step_schedule(epochs * (batches or 1))
            if len(schedule.snapshot_steps) == samples:
                return {"cycles": cycles, "samples": samples}
    return {}


def _short_swag(epochs: int, batches: int | None) -> dict[str, Any]:
    """Let SWAG collect two sets of weights in two or three epochs."""
    return {"snapshots_per_epoch": 2} if epochs in (2, 3) else {}


_CHAIN = {"samples": 50, "warmup": 50, "chains": 2}
_PRIOR = ("prior_scale",)  # that of the noise, or of Laplace, means another thing than that of the weights
# fmt: off
CANDIDATES: tuple[Candidate, ...] = (
    Candidate("mle", "Maximum likelihood", MLE),
    Candidate("map", "MAP", MAP),
    Candidate("damp", "DAMP", DAMP, cost=1.5),
    Candidate("temperature", "Temperature scaling", Temperature, cost=1.2, held_out=True),
    Candidate("mc-dropout", "MC dropout", MCDropout, cost=2),
    Candidate("deep-ensemble", "Deep ensemble of 5", DeepEnsemble, {"members": 5}, cost=5),
    Candidate("mode-ensemble", "Modes of the noise, 16", ModeEnsemble, own=_PRIOR, cost=4),
    Candidate("swag", "SWAG", SWAG, cost=1.5, short=_short_swag),
    Candidate("bayes-by-backprop", "Bayes by Backprop", BayesByBackprop, cost=2),
    Candidate("bayes-by-backprop-mixture", "Bayes by Backprop, mixture prior", BayesByBackprop, {"prior": "scale-mixture"}, cost=2.5),
    Candidate("mnf", "Multiplicative flows", MNF, cost=5),
    Candidate("laplace", "Laplace, last layer", Laplace, own=_PRIOR, cost=1.5),
    Candidate("laplace-all", "Laplace, all layers", Laplace, {"layers": "all"}, _PRIOR, cost=2),
    Candidate("sgld", "SGLD", SGLD, own=("optimizer", "schedule"), cost=3, short=_short_sgld),
    Candidate("hmc", "HMC", HMC, {**_CHAIN, "steps": 16}, cost=30, most_weights=HOURS),
    Candidate("nuts", "NUTS", NUTS, {**_CHAIN, "max_depth": 4}, cost=30, most_weights=HOURS),
    Candidate("node-noise-gaussian", "Node noise, Gaussian", NodeNoise, {"kind": "gaussian"}, _PRIOR, cost=2),
    Candidate("node-noise-mixture", "Node noise, mixture", NodeNoise, {"kind": "mixture"}, _PRIOR, cost=3),
    Candidate("node-noise-planar", "Node noise, planar flow", NodeNoise, {"kind": "planar"}, _PRIOR, cost=4),
)
# fmt: on


def find_candidates(keys: Iterable[str]) -> list[Candidate]:
    """Candidates in the order of the tables, by their key, by the name of their method, or by a glob of keys.

    >>> [one.key for one in find_candidates(["node-noise", "map", "laplace"])]
    ['map', 'laplace', 'node-noise-gaussian', 'node-noise-mixture', 'node-noise-planar']
    """
    chosen: set[str] = set()
    for key in keys:
        by_key = {one.key for one in CANDIDATES if one.key == key}
        by_method = {one.key for one in CANDIDATES if one.method.name == key}
        matches = by_key or by_method or {one.key for one in CANDIDATES if fnmatchcase(one.key, key)}
        if not matches:
            names = [name for one in CANDIDATES for name in (one.key, one.method.name)]
            raise FlowBNNError(
                f"there is no method '{key}' to compare{nearest(key, names)}", argument="methods"
            )
        chosen |= matches
    return [one for one in CANDIDATES if one.key in chosen]


# -------------------- time and memory


def clock(device: torch.device | None = None) -> float:
    """Seconds: CPU time where one thread computes, so that other processes do not count; else wall time."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class PeakMemory:
    """Peak memory since this was made, beyond what was in use then, in megabytes; None where the system does not say.

    On a GPU by torch's counter; on Linux by the high-water mark of the process, which is reset first.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device if device is not None and device.type == "cuda" else None
        gc.collect()
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before: float | None = torch.cuda.memory_allocated(self.device) / 2**20
            return
        with suppress(OSError, AttributeError):  # give back what earlier work left in the heap
            ctypes.CDLL(None).malloc_trim(0)
        self.before = None
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self.before = _status("VmRSS")

    def read(self) -> float | None:
        """Megabytes so far."""
        if self.before is None:
            return None
        if self.device is not None:
            return torch.cuda.max_memory_allocated(self.device) / 2**20 - self.before
        return max(0.0, _status("VmHWM") - self.before)


def _status(name: str) -> float:
    """A line of what Linux tells about this process, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


# -------------------- quality and cost of one fit

REPEATS, ENOUGH = 3, 2.0  # a prediction is timed so often, unless that takes more seconds than this


def kept_numbers(posterior: Posterior) -> int:
    """How many real numbers a posterior keeps in order to predict; of a list of networks, those of the list.

    >>> loader = [(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))]
    >>> kept_numbers(MLE(epochs=1).fit(nn.Linear(3, 2), loader, progress=False))  # 3 * 2 + 2
    8
    """
    inner = getattr(posterior, "posterior", posterior)  # temperature scaling wraps the posterior it scales
    replaced = {f"network.{name}" for name in inner.names} if isinstance(inner, MemberPosterior) else set()
    kept = {value.data_ptr(): value for name, value in inner.tensors().items() if name not in replaced}
    return sum(value.numel() for value in kept.values() if value.is_floating_point())


def sample_count(posterior: Posterior, wanted: int) -> int:
    """Networks to average: each once where there are few (or one), else as many as wanted."""
    inner = getattr(posterior, "posterior", posterior)  # temperature scaling wraps the posterior it scales
    listed = isinstance(inner, MemberPosterior | ModePosterior) or bool(getattr(inner, "size", 0))
    few = posterior.default_samples == 1 or listed
    return min(wanted, posterior.default_samples) if few else wanted


def warm_up(network: nn.Module, loader: Iterable[Any], likelihood: LikelihoodName = "auto") -> None:
    """Train and predict on one batch, so that what torch does once per process is not counted on the first method."""
    batch = list(islice(loader, 1))
    posterior = MLE(epochs=2).fit(network, batch, likelihood=likelihood, progress=False, accelerator="cpu")
    posterior.predict(batch, 1, progress=False)


def measure(
    method: Method,
    network: nn.Module,
    train: Iterable[Any],
    test: Iterable[Any],
    *,
    novel: Any = None,
    samples: int = 128,
    **options: Any,
) -> dict[str, Any]:
    """Fit one method on a copy of a network and evaluate it: plain values, the metrics under ``values``.

    Args:
        method: from :mod:`flowbnn.methods`.
        network: copied by the fit.
        train, test: loaders.
        novel: inputs unlike the training data, or a loader of them.
        samples: networks averaged in a prediction.
        options: of the fit, such as ``likelihood``, ``validation`` and ``seed``.
    """
    memory = PeakMemory(device_of(network))
    started = clock()
    posterior = method.fit(network, train, **{"progress": False, **options})
    device = device_of(posterior.model)
    seconds = clock(device) - started
    number = sample_count(posterior, samples)
    times: list[float] = []
    while not times or (len(times) < REPEATS and sum(times) < ENOUGH):
        started = clock(device)
        predictive, targets = posterior.predict_with_targets(test, number, seed=0, progress=False)
        times.append(clock(device) - started)
    if targets is None:
        raise FlowBNNError(
            "the test loader must give (inputs, targets), not inputs alone",
            kind="loader",
            argument="test_loader",
        )
    peak, predictive = memory.read(), predictive.cpu()
    values: dict[str, float | None] = dict(predictive.evaluate(targets))
    if novel is not None:
        strange = posterior.predict(novel, number, seed=0, progress=False).cpu()
        values["auroc"] = novelty_auroc(novelty_scores(predictive), novelty_scores(strange))
    values |= {"train_seconds": seconds, "predict_seconds": min(times)}
    values |= {"parameters": float(kept_numbers(posterior)), "memory": peak}
    content: dict[str, Any] = {"values": values, "samples": number}
    if isinstance(predictive, CategoricalPredictive):
        content["bins"] = reliability(predictive.probabilities, targets)
    return content
