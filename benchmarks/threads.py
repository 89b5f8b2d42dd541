"""Checks predictions of many threads from one posterior, for every method, and measures the cost of the lock.

    python benchmarks/threads.py [--threads 8] [--calls 48] [--samples 8] [--rows 64] [--only laplace sgld]

Every thread makes ``calls`` predictions with its own seeds. ``wrong`` counts predictions that differ in any bit from those of the
same call without threads. ``shared`` and ``copies`` are the time of all calls by threads, with one posterior and with a copy for each
thread, relative to the same calls one after the other. ``lock`` is the time to acquire the free lock, relative to a prediction.
"""

import argparse
import copy
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import make_parser
from torch import nn

import flowbnn as fb
from flowbnn.methods import METHODS

SHORT_SETTINGS: dict[str, dict[str, Any]] = {
    "hmc": {"samples": 6, "warmup": 30, "chains": 2},
    "nuts": {"samples": 6, "warmup": 30, "chains": 2, "max_depth": 3},
    "sgld": {"samples": 6, "cycles": 2},
    "swag": {"epochs": 20},
    "deep-ensemble": {"members": 3},
    "mode-ensemble": {"members": 3, "steps": 20},
    "temperature": {"method": fb.MAP(epochs=10)},
}


def run_threads(count: int, work: Callable[[int], None]) -> float:
    """Runs a function in several threads and returns the seconds until all are done."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def lock_seconds(posterior: Any, times: int = 2_000) -> float:
    """Returns the seconds to acquire and release the free lock, the smallest of ten measurements."""
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(times):
            with posterior.cache.lock:
                pass
        seconds.append((time.perf_counter() - begin) / times)
    return min(seconds)


def measure(posterior: Any, x: torch.Tensor, options: argparse.Namespace) -> tuple[int, list[float]]:
    """Returns the number of wrong predictions, and the seconds of a call with the three ratios."""

    def predict(seed: int, source: Any = posterior) -> torch.Tensor:
        return source.predict(x, options.samples, seed=seed).samples

    def seeds_of(number: int) -> range:
        return range(number * options.calls, (number + 1) * options.calls)

    results: dict[int, torch.Tensor] = {}
    copies = [copy.deepcopy(posterior) for _ in range(options.threads)]

    def use_shared(number: int) -> None:
        results.update({seed: predict(seed) for seed in seeds_of(number)})

    def use_copy(number: int) -> None:
        for seed in seeds_of(number):
            predict(seed, copies[number])

    predict(0)
    begin = time.perf_counter()
    expected = [predict(seed) for seed in range(options.threads * options.calls)]
    single = time.perf_counter() - begin
    ratios = [run_threads(options.threads, work) / single for work in (use_shared, use_copy)]
    wrong = sum(not torch.equal(results[seed], right) for seed, right in enumerate(expected))
    each = single / len(expected)
    return wrong, [each, *ratios, lock_seconds(posterior) / each]


def main() -> None:
    parser = make_parser(__doc__, threads=8, calls=48, samples=8, rows=64)
    names = [*METHODS, "network-dropout"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(240) % 3
    inputs = 3 * torch.eye(3, 4)[labels] + torch.randn(240, 4, generator=generator)
    batches, x = list(zip(inputs.split(40), labels.split(40), strict=True)), inputs[: options.rows]
    print(f"{'method':20}{'calls':>7}{'wrong':>7}{'ms per call':>12}{'shared':>8}{'copies':>8}{'lock':>9}")
    total = 0
    for name in options.only:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)]
        network = nn.Sequential(
            *(layer for layer in layers if name == "network-dropout" or layer is not layers[2])
        )
        kind = "mc-dropout" if name == "network-dropout" else name
        method = METHODS[kind](**SHORT_SETTINGS.get(kind, {"epochs": 10}))
        posterior = method.fit(network, batches, seed=0, progress=False)
        wrong, (each, shared, copies, lock) = measure(posterior, x, options)
        total += wrong
        calls = options.threads * options.calls
        print(
            f"{name:20}{calls:7}{wrong:7}{1e3 * each:12.2f}{shared:8.2f}{copies:8.2f}{lock:9.1e}", flush=True
        )
    print(f"{total} wrong")
    raise SystemExit(total > 0)


if __name__ == "__main__":
    main()
