"""Whether predictions of many threads from one posterior are right, for every method, and what the posterior's lock costs.

    python benchmarks/threads.py [--threads 8] [--calls 48] [--samples 8] [--rows 64] [--only laplace sgld]

Every thread makes ``calls`` predictions with seeds of its own; ``wrong`` counts those that are not, bit for bit, what the same call
gives alone. ``shared`` and ``own`` are the time of all calls by threads, with one posterior and with a copy for each thread, which
has a lock of its own; both relative to the same calls one after the other. ``lock`` is what taking the free lock adds to a
prediction, as a share of it.
"""

import argparse
import copy
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import options
from torch import nn

import flowbnn as fb
from flowbnn.methods import METHODS

SHORT: dict[str, dict[str, Any]] = {
    "hmc": {"samples": 6, "warmup": 30, "chains": 2},
    "nuts": {"samples": 6, "warmup": 30, "chains": 2, "max_depth": 3},
    "sgld": {"samples": 6, "cycles": 2},
    "swag": {"epochs": 20},
    "deep-ensemble": {"members": 3},
    "mode-ensemble": {"members": 3, "steps": 20},
    "temperature": {"method": fb.MAP(epochs=10)},
}


def run(threads: int, work: Callable[[int], None]) -> float:
    """Seconds until all threads are done."""
    started = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    begin = time.perf_counter()
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return time.perf_counter() - begin


def lock_seconds(posterior: Any, times: int = 2_000) -> float:
    """To take the free lock and give it back, at the quietest of ten moments."""
    found = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(times):
            with posterior.cache.lock:
                pass
        found.append((time.perf_counter() - begin) / times)
    return min(found)


def measure(posterior: Any, x: torch.Tensor, args: argparse.Namespace) -> tuple[int, list[float]]:
    """How many calls were wrong; seconds of a call, and the three ratios."""

    def predicted(seed: int, own: Any = posterior) -> torch.Tensor:
        return own.predict(x, args.samples, seed=seed).samples

    def of(number: int) -> range:
        return range(number * args.calls, (number + 1) * args.calls)

    found: dict[int, torch.Tensor] = {}
    copies = [copy.deepcopy(posterior) for _ in range(args.threads)]

    def together(number: int) -> None:
        found.update({seed: predicted(seed) for seed in of(number)})

    def apart(number: int) -> None:
        for seed in of(number):
            predicted(seed, copies[number])

    predicted(0)
    begin = time.perf_counter()
    alone = [predicted(seed) for seed in range(args.threads * args.calls)]
    single = time.perf_counter() - begin
    ratios = [run(args.threads, work) / single for work in (together, apart)]
    wrong = sum(not torch.equal(found[seed], right) for seed, right in enumerate(alone))
    each = single / len(alone)
    return wrong, [each, *ratios, lock_seconds(posterior) / each]


def main() -> None:
    parser = options(__doc__, threads=8, calls=48, samples=8, rows=64)
    names = [*METHODS, "own-dropout"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(240) % 3
    inputs = 3 * torch.eye(3, 4)[labels] + torch.randn(240, 4, generator=generator)
    batches, x = list(zip(inputs.split(40), labels.split(40), strict=True)), inputs[: args.rows]
    print(f"{'method':20}{'calls':>7}{'wrong':>7}{'ms a call':>11}{'shared':>8}{'own':>8}{'lock':>9}")
    total = 0
    for name in args.only:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)]
        network = nn.Sequential(
            *(layer for layer in layers if name == "own-dropout" or layer is not layers[2])
        )
        kind = "mc-dropout" if name == "own-dropout" else name
        method = METHODS[kind](**SHORT.get(kind, {"epochs": 10}))
        posterior = method.fit(network, batches, seed=0, progress=False)
        wrong, (each, shared, own, lock) = measure(posterior, x, args)
        total += wrong
        calls = args.threads * args.calls
        print(f"{name:20}{calls:7}{wrong:7}{1e3 * each:11.2f}{shared:8.2f}{own:8.2f}{lock:9.1e}", flush=True)
    print(f"{total} wrong")
    raise SystemExit(total > 0)


if __name__ == "__main__":
    main()
