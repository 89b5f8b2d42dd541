"""Measures the training speed with flow noise in 1, 2, ... processes, as a ratio to one process in the same run.

    python benchmarks/scaling.py [--model lenet] [--batch 128] [--rounds 3] [--device cpu] [--processes 1 2] [--out results]

The batch is the global one. It is divided among the processes, so that they take the same steps as one process. On a CPU every process
has one thread, on GPUs one device. The numbers of processes take turns in every round. The time is that of one epoch of training
(loader, noise, KL divergence, exchange of gradients, update). The first epoch is left out.
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
from common import MODELS, input_shape, parse_arguments, positive_int, rules, write_results

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.training import is_main_process

EXTRA: dict[str, dict[str, Any]] = {
    "processes": {
        "type": positive_int,
        "nargs": "*",
        "help": "numbers of processes; default 1 and 2, or 1, 2, 4, ... up to the number of GPUs",
    },
    "steps": {"type": positive_int, "default": 40, "help": "steps in an epoch"},
    "site": {"choices": ("channel", "position"), "default": "channel"},
    "worker": {
        "type": int,
        "help": "train in this number of processes and print the seconds (internal)",
    },
}


class TimedLoader(TensorLoader):
    """Loader that records the time at which each pass begins."""

    times: list[float]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        self.times.append(time.perf_counter())
        return super().__iter__()


def train(options: Any) -> None:
    """Trains in ``options.worker`` processes. The main process prints the seconds of each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(options.batch * options.steps, *input_shape(options.model))
    labels = torch.randint(10, (len(images),))
    loader = TimedLoader(
        images, labels, batch_size=options.batch, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    loader.times = []
    conversion = rules(options.model, "flow", options.site)
    assert conversion is not None
    model = fb.to_stochastic(MODELS[options.model](), conversion)
    settings = {"accelerator": options.device, "precision": options.precision, "acceleration": "off"}
    fb.fit(model, loader, epochs=4, devices=options.worker, progress=False, **settings, validation=None)
    if is_main_process():
        # the first pass reads the data, the second one warms up
        times = [*loader.times[1:], time.perf_counter()]
        print(json.dumps([stop - start for start, stop in pairwise(times[1:])]))


def main() -> None:
    options = parse_arguments(__doc__, **EXTRA)
    if options.worker:
        train(options)
        return
    available = torch.cuda.device_count() if options.device == "cuda" else 2
    numbers = options.processes or [number for number in (1, 2, 4, 8) if number <= available]
    times: dict[int, list[float]] = {number: [] for number in dict.fromkeys([1, *numbers])}
    for _ in range(max(1, min(options.rounds, 5))):
        for number, seconds in times.items():
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
            launcher = [sys.executable, "-W", "ignore", *(torchrun if number > 1 else [])]
            command = [*launcher, *sys.argv, "--worker", str(number)]
            seconds += json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    images = options.batch * options.steps
    single = statistics.median(times[1])
    print(
        f"{options.model}, flow noise, site {options.site}, global batch {options.batch}, {options.device}, one thread for each process"
    )
    rows = []
    for number, seconds in times.items():
        middle = statistics.median(seconds)
        row = {"processes": number, "images_per_second": images / middle, "ratio": single / middle}
        row["quartiles"] = [images / s for s in statistics.quantiles(seconds, n=4)[::-2]]
        rows.append(row)
        low, high = row["quartiles"]
        speed = f"{row['images_per_second']:9.0f} images/s (quartiles {low:.0f} to {high:.0f})"
        print(
            f"  {number} process{'es' if number > 1 else '  '} {speed}   {row['ratio']:.2f} x one, {row['ratio'] / number:.0%} each"
        )
    write_results(options, "scaling", rows)


if __name__ == "__main__":
    main()
