"""Measurement of the quality and the cost of one fit."""

import ctypes
import gc
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowbnn.batches import device_of, require_targets
from flowbnn.methods import MLE, MemberPosterior, Method, ModePosterior, Posterior
from flowbnn.methods.fit_options import LikelihoodName
from flowbnn.metrics import novelty_auroc, reliability
from flowbnn.posterior.evaluate import novelty_scores


def clock(device: torch.device | None = None) -> float:
    """Returns a time in seconds. Only differences of two times have a meaning.

    It is CPU time if torch uses one thread, so that other processes do not count, and wall-clock time otherwise.

    Args:
        device: Device to wait for before the time is read.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class PeakMemory:
    """Measures the peak memory since its construction, beyond the memory that was in use then.

    On a GPU it uses the counter of torch. On Linux it resets and reads the high-water mark of the process.

    Args:
        device: Device whose memory is measured.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device if device is not None and device.type == "cuda" else None
        gc.collect()
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before: float | None = torch.cuda.memory_allocated(self.device) / 2**20
            return
        with suppress(OSError, AttributeError):  # return freed memory of the heap to the system
            ctypes.CDLL(None).malloc_trim(0)
        self.before = None
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self.before = _process_status("VmRSS")

    def read(self) -> float | None:
        """Returns the peak memory in megabytes, or None if the system does not report it."""
        if self.before is None:
            return None
        if self.device is not None:
            return torch.cuda.max_memory_allocated(self.device) / 2**20 - self.before
        return max(0.0, _process_status("VmHWM") - self.before)


def _process_status(name: str) -> float:
    """Returns an entry of ``/proc/self/status`` in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def count_stored_numbers(posterior: Posterior) -> int:
    """Returns the number of real numbers that a posterior stores in order to predict.

    Args:
        posterior: Fitted posterior. For a list of networks, all of them count.

    >>> loader = [(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))]
    >>> count_stored_numbers(MLE(epochs=1).fit(nn.Linear(3, 2), loader, progress=False))  # 3 * 2 + 2
    8
    """
    inner = getattr(posterior, "posterior", posterior)  # temperature scaling wraps a posterior
    replaced = {f"network.{name}" for name in inner.names} if isinstance(inner, MemberPosterior) else set()
    tensors = {value.data_ptr(): value for name, value in inner.tensors().items() if name not in replaced}
    return sum(value.numel() for value in tensors.values() if value.is_floating_point())


def sample_count(posterior: Posterior, samples: int) -> int:
    """Returns the number of networks to average in a prediction.

    Args:
        posterior: Fitted posterior. A posterior that is a list of networks uses each at most once.
        samples: Preferred number.
    """
    inner = getattr(posterior, "posterior", posterior)  # temperature scaling wraps a posterior
    is_list = isinstance(inner, MemberPosterior | ModePosterior) or bool(getattr(inner, "size", 0))
    if is_list or posterior.default_samples == 1:
        return min(samples, posterior.default_samples)
    return samples


def warm_up(network: nn.Module, loader: Iterable[Any], likelihood: LikelihoodName = "auto") -> None:
    """Trains and predicts on one batch, so that one-time work of torch is not part of the time of the first method.

    Args:
        network: Network. It is copied.
        loader: Loader of batches.
        likelihood: Observation model.
    """
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
    """Fits a method to a copy of a network and evaluates it.

    Args:
        method: Method of :mod:`flowbnn.methods`.
        network: Network. It is copied.
        train: Loader of the training data.
        test: Loader of the test data.
        novel: Inputs unlike the training data, or a loader of them.
        samples: Number of networks averaged in a prediction.
        options: Options of the fit, such as ``likelihood``, ``validation`` and ``seed``.

    Returns:
        Plain values: the metrics under ``values``, the number of ``samples``, and the reliability ``bins`` of a classification.

    Raises:
        FlowBNNError: If the test loader has no targets.
    """
    memory = PeakMemory(device_of(network))
    start = clock()
    posterior = method.fit(network, train, **{"progress": False, **options})
    device = device_of(posterior.model)
    train_seconds = clock(device) - start
    number = sample_count(posterior, samples)
    times: list[float] = []
    while not times or (len(times) < 3 and sum(times) < 2.0):  # the fastest of three, within two seconds
        start = clock(device)
        predictive, targets = posterior.predict_with_targets(test, number, seed=0, progress=False)
        times.append(clock(device) - start)
    targets = require_targets(targets, "test_loader")
    peak, predictive = memory.read(), predictive.cpu()
    values: dict[str, float | None] = dict(predictive.evaluate(targets))
    if novel is not None:
        novel_predictive = posterior.predict(novel, number, seed=0, progress=False).cpu()
        novel_scores = novelty_scores(novel_predictive)
        columns = {
            "entropy": "auroc",
            "std": "auroc",
            "mutual_information": "auroc_mi",
            "energy": "auroc_energy",
        }
        for name, scores in novelty_scores(predictive).items():
            if name in columns:
                values[columns[name]] = novelty_auroc(scores, novel_scores[name])
    values |= {"train_seconds": train_seconds, "predict_seconds": min(times)}
    values |= {"parameters": float(count_stored_numbers(posterior)), "memory": peak}
    content: dict[str, Any] = {"values": values, "samples": number}
    if "entropy" in predictive.uncertainties:
        content["bins"] = reliability(predictive.probabilities, targets)
    return content
