"""What one method is worth on held-out data, and what it costs: its time, its size and its memory."""

import ctypes
import gc
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.methods import MLE, MemberPosterior, Method, Posterior
from flowbnn.methods.base import LikelihoodName
from flowbnn.metrics import novelty_auroc, reliability
from flowbnn.posterior.forward import device_of
from flowbnn.predictive import CategoricalPredictive
from flowbnn_studies.runner.rivalry import samples_of

__all__ = ["PeakMemory", "clock", "kept_numbers", "measure", "warm_up"]

REPEATS, ENOUGH = 3, 2.0  # times that a prediction is made, unless it takes more seconds than this


def clock(device: torch.device | None = None) -> float:
    """Seconds from some moment on: of the processor where one thread computes, so that neighbours do not count; else by the wall."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class PeakMemory:
    """The most memory that was held since it was made, beyond what was held then, in megabytes; None where that cannot be told.

    On a GPU as torch counts it there. On Linux by the process's high-water mark, which is set back first.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        gc.collect()
        if device is not None and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before: float | None = torch.cuda.memory_allocated(device) / 2**20
            return
        with suppress(OSError, AttributeError):  # let go of what earlier work left in the heap
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.before = None
            return
        self.before = _status("VmRSS")

    def read(self) -> float | None:
        """Megabytes so far."""
        if self.before is None:
            return None
        if self.device is not None and self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20 - self.before
        now = _status("VmHWM")
        return None if now is None else max(0.0, now - self.before)


def _status(name: str) -> float | None:
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return None if found is None else int(found[1]) / 1024
    return None


def kept_numbers(posterior: Posterior) -> int:
    """How many real numbers a posterior keeps in order to predict; of a list of networks, those of the list.

    >>> network = nn.Linear(3, 2)
    >>> loader = [(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))]
    >>> kept_numbers(MLE(epochs=1).fit(network, loader, progress=False))  # 3 * 2 + 2
    8
    """
    within = getattr(posterior, "posterior", posterior)  # a tempered one keeps the numbers of the one within
    replaced = {f"network.{name}" for name in within.names} if isinstance(within, MemberPosterior) else set()
    kept = {
        value.data_ptr(): value for name, value in within.tensors().items() if name not in replaced
    }.values()
    return sum(value.numel() for value in kept if value.is_floating_point())


def warm_up(network: nn.Module, loader: Iterable[Any], likelihood: LikelihoodName = "auto") -> None:
    """Train and predict on one batch, so that what torch does once per process is not counted on the first method."""
    batch = next(iter(loader), None)
    if batch is None:
        raise FlowBNNError("the training loader gives no batch")
    posterior = MLE(epochs=2).fit(network, [batch], likelihood=likelihood, progress=False, accelerator="cpu")
    posterior.predict([batch], 1, progress=False)


def measure(
    method: Method,
    network: nn.Module,
    train: Iterable[Any],
    test: Iterable[Any],
    *,
    novel: Any = None,
    validation: Iterable[Any] | None = None,
    likelihood: LikelihoodName = "auto",
    samples: int = 128,
    **options: Any,
) -> dict[str, Any]:
    """Fit one method and judge it: plain values, the metrics under ``values``.

    Args:
        method: from :mod:`flowbnn.methods`.
        network: which is copied.
        train, test: loaders.
        novel: inputs that training has not seen, or a loader of them.
        validation: held-out data, for methods that learn from it.
        likelihood: as in :meth:`Method.fit`.
        samples: networks averaged in a prediction.
        options: of the run.
    """
    memory = PeakMemory(device_of(network))
    started = clock()
    posterior = method.fit(
        network, train, likelihood=likelihood, validation=validation, **{"progress": False, **options}
    )
    device = device_of(posterior.model)
    trained = clock(device) - started
    number = samples_of(posterior, samples)
    times: list[float] = []
    while not times or (len(times) < REPEATS and sum(times) < ENOUGH):
        begun = clock(device)
        predictive, targets = posterior.predict_with_targets(test, number, seed=0, progress=False)
        times.append(clock(device) - begun)
    if targets is None:
        raise FlowBNNError(
            "a comparison needs test batches of (inputs, targets), but the loader gives inputs alone"
        )
    peak = memory.read()
    predictive = predictive.cpu()
    values: dict[str, float | None] = dict(predictive.evaluate(targets))
    if novel is not None:
        strange = posterior.predict(novel, number, seed=0, progress=False).cpu()
        values["auroc"] = novelty_auroc(_score(predictive), _score(strange))
    values |= {
        "train_seconds": trained,
        "predict_seconds": min(times),
        "parameters": float(kept_numbers(posterior)),
        "memory": peak,
    }
    content: dict[str, Any] = {"values": values, "samples": number}
    if isinstance(predictive, CategoricalPredictive):
        content["bins"] = reliability(predictive.probabilities, targets)
    return content


def _score(predictive: Any) -> Tensor:
    """What novelty is told by: the predictive entropy, or for numbers the epistemic variance."""
    entropy = getattr(predictive, "entropy", None)
    return predictive.epistemic.sum(-1) if entropy is None else entropy
