"""Measures an exported posterior in ONNX Runtime, relative to the network without noise in the same run.

    python benchmarks/export.py [--model lenet] [--samples 32] [--rounds 2000] [--threads 2] [--batch 1] [--out results]

The exported file predicts ``--batch`` inputs with all samples. The network without noise, exported by torch, gets as many rows as the
file computes, ``batch * samples``. Both run in turn, so that other load of the machine affects both. ``ratio`` is the time of the
posterior divided by the time of the network: the median over rounds, and of the best of all blocks of 100 rounds, by their medians.
"""

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from common import MODELS, input_shape, make_parser, parse_with, rules, write_results

import flowbnn as fb
from flowbnn.posterior import NoisePosterior

BLOCK = 100  # rounds


def open_session(path: Path, threads: int, inputs: torch.Tensor) -> Callable[[], Any]:
    """Returns a function that runs a file on inputs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options)
    feeds = {session.get_inputs()[0].name: inputs.numpy()}
    return lambda: session.run(None, feeds)


def export_plain(network: torch.nn.Module, path: Path, inputs: torch.Tensor) -> None:
    """Exports the network without noise, with a free number of rows."""
    logging.getLogger("torch.onnx").setLevel(logging.CRITICAL)
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            (inputs,),
            path,
            dynamo=True,
            dynamic_shapes=({0: batch},),
            external_data=False,
            verbose=False,
        )


def main() -> None:
    parser = make_parser(__doc__, batch=1, samples=32, rounds=2000, threads=2)
    parser.add_argument("--model", choices=sorted(MODELS), default="lenet")
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    options = parse_with(parser)
    torch.manual_seed(0)
    network, shape = MODELS[options.model]().eval(), input_shape(options.model)
    posterior = NoisePosterior(
        fb.to_stochastic(network, rules(options.model, "gaussian", "channel")), fb.likelihoods.Categorical()
    )
    inputs = torch.randn(options.batch * options.samples, *shape)
    with tempfile.TemporaryDirectory() as folder:
        file = fb.export(posterior, Path(folder) / "posterior.onnx", inputs[:3], samples=options.samples)
        plain = Path(folder) / "plain.onnx"
        export_plain(network, plain, inputs[:3])
        sizes = {"posterior": file.num_bytes, "plain": plain.stat().st_size}
        runs = {
            "posterior": open_session(file.path, options.threads, inputs[: options.batch]),
            "plain": open_session(plain, options.threads, inputs),
        }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round in range(-20, options.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round >= 0:
                times[name].append(time.perf_counter() - start)
    rows = []
    print(
        f"{options.model}, {options.batch} x {options.samples} rows, {options.threads} threads, {options.rounds} rounds"
    )
    for name, values in times.items():
        blocks = [values[start : start + BLOCK] for start in range(0, len(values), BLOCK)]
        best, median = 1e6 * min(map(statistics.median, blocks)), 1e6 * statistics.median(values)
        rows.append({"variant": name, "best_us": best, "median_us": median, "bytes": sizes[name]})
        print(f"  {name:10} best {best:9.1f} us   median {median:9.1f} us   {sizes[name]:,} bytes")
    ratios = [a / b for a, b in zip(times["posterior"], times["plain"], strict=True)]
    rows[0] |= {
        "ratio_best": rows[0]["best_us"] / rows[1]["best_us"],
        "ratio_median": statistics.median(ratios),
    }
    print(f"  ratio      best {rows[0]['ratio_best']:.3f}   median {rows[0]['ratio_median']:.3f}")
    write_results(options, f"export-{options.model}", rows)


if __name__ == "__main__":
    main()
