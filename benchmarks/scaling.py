"""What more devices bring: images per second of training with flow noise in 1, 2, ... processes, as a ratio to one in the same run.

    python benchmarks/scaling.py [--model lenet] [--batch 128] [--rounds 3] [--device cpu] [--processes 1 2] [--out results]

The batch is the global one, shared out among the processes, so that all of them take the very steps that one would. On a CPU every
process has one thread; on GPUs every process has a device. The numbers of processes take turns in every round. A time is that of
one epoch of whole training (loader, noise, KL, gradients exchanged, update), the first one left out.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from common import MODELS, arguments, positive, rules, shape_of, write

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.training import is_main_process

EXTRA: dict[str, dict[str, Any]] = {
    "processes": {
        "type": positive,
        "nargs": "*",
        "help": "default: 1 and 2, or 1, 2, 4, ... as there are GPUs",
    },
    "steps": {"type": positive, "default": 40, "help": "in an epoch"},
    "site": {"choices": ("channel", "position"), "default": "channel"},
    "worker": {
        "type": int,
        "help": "train in so many processes and print the seconds; how this file calls itself",
    },
}


class Timed(TensorLoader):
    """Notes when each pass begins."""

    times: list[float]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        self.times.append(time.perf_counter())
        return super().__iter__()


def train(found: Any) -> None:
    """Epochs of training in ``found.worker`` processes; the first one prints their seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(found.batch * found.steps, *shape_of(found.model))
    labels = torch.randint(10, (len(images),))
    loader = Timed(
        images, labels, batch_size=found.batch, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    loader.times = []
    chosen = rules(found.model, "flow", found.site)
    assert chosen is not None
    model = fb.to_stochastic(MODELS[found.model](), chosen)
    where = {"accelerator": found.device, "precision": found.precision, "acceleration": "off"}
    fb.fit(model, loader, epochs=4, devices=found.worker, progress=False, **where)
    if is_main_process():
        # the first pass is a look at the data, the next one warms up
        times = [*loader.times[1:], time.perf_counter()]
        print(json.dumps([stop - start for start, stop in pairwise(times[1:])]))


def main() -> None:
    found = arguments(__doc__, **EXTRA)
    if found.worker:
        train(found)
        return
    there = torch.cuda.device_count() if found.device == "cuda" else 2
    numbers = found.processes or [number for number in (1, 2, 4, 8) if number <= there]
    times: dict[int, list[float]] = {number: [] for number in dict.fromkeys([1, *numbers])}
    for _ in range(max(1, min(found.rounds, 5))):
        for number, seconds in times.items():
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
            launcher = [sys.executable, "-W", "ignore", *(torchrun if number > 1 else [])]
            command = [*launcher, *sys.argv, "--worker", str(number)]
            seconds += json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    images = found.batch * found.steps
    alone = statistics.median(times[1])
    print(
        f"{found.model}, flow noise, site {found.site}, global batch {found.batch}, {found.device}, one thread for each process"
    )
    rows = []
    for number, seconds in times.items():
        middle = statistics.median(seconds)
        row = {"processes": number, "images_per_second": images / middle, "ratio": alone / middle}
        row["quartiles"] = [images / s for s in statistics.quantiles(seconds, n=4)[::-2]]
        rows.append(row)
        low, high = row["quartiles"]
        speed = f"{row['images_per_second']:9.0f} images/s (quartiles {low:.0f} to {high:.0f})"
        print(
            f"  {number} process{'es' if number > 1 else '  '} {speed}   {row['ratio']:.2f} x one, {row['ratio'] / number:.0%} each"
        )
    write(found, "scaling", rows)


if __name__ == "__main__":
    main()
