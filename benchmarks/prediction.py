"""Measures the cost of predictions with many samples, relative to the network without noise at its best batch size in the same run.

    python benchmarks/prediction.py [--model lenet|vgg16] [--batch 128] [--samples 128] [--rounds 10] [--threads 2] [--device cpu]
                                    [--precision bf16-mixed] [--compile] [--channels 3] [--only channel] [--out results]
    python benchmarks/prediction.py --batch 1 --samples 32 --plain-rows 32 --rounds 200 --threads 1 --clock cpu --only channel

The network without noise is compiled and in half precision if the options say so. It is measured with 128 to 16,384 rows in a pass (up
to 2,048 on a CPU), and the fastest of these is the reference. ``images/s`` counts images with all their samples. ``speed`` is the
number of samples per second relative to the reference: 1 means that a sample costs as much as a row of the network without noise. The
time of a prediction includes everything from the inputs to the mean probabilities: draws, flows, passes and softmax.

``hand-written`` is a rival in a dozen lines of torch: every convolution and linear layer multiplies its inputs by Gaussian noise, and
all samples are rows of one batch.

With ``--plain-rows`` the reference is one pass of the network without noise, uncompiled, over this number of rows. The
second command measures a request to a server this way: one image with 32 samples beside 32 rows. ``--compile`` compiles the noisy
networks only then.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from common import (
    CLOCKS,
    MODELS,
    input_shape,
    interleave,
    parse_arguments,
    positive_int,
    rules,
    write_results,
)
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.posterior import NoisePosterior

EXTRA = {
    "samples": {"type": positive_int, "default": 128},
    "compile": {"action": "store_true"},
    "channels": {"type": int, "help": "channels of the images: 1 (28x28, the default of LeNet) or 3 (32x32)"},
    "only": {"default": "", "help": "variants whose name contains this word"},
    "plain-rows": {"type": positive_int, "help": "rows of the reference; the default is the fastest number"},
    "clock": {"choices": sorted(CLOCKS), "default": "wall"},
}
ROWS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}
HAND_WRITTEN_ROWS = {"cpu": 512, "cuda": 16384}  # rows in a pass of the hand-written rival


class HandWritten(nn.Module):
    """Network whose convolutions and linear layers multiply their inputs by noise, with all samples in one batch.

    Args:
        network: Network without noise. It is copied.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.draws, self.sizes = deepcopy(network), list[Tensor](), list[int]()
        for module in self.network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_pre_hook(partial(self.multiply, len(self.sizes)))
                self.sizes.append(module.weight.shape[1])

    def multiply(self, index: int, module: nn.Module, args: tuple[Tensor]) -> Tensor:
        """Multiplies the inputs of a layer by its noise ``[samples, channels]``."""
        (x,), noise = args, self.draws[index]
        shape = (len(noise), 1, -1) + (1,) * (x.dim() - 2)
        return (x.unflatten(0, (len(noise), -1)) * noise.to(x.dtype).view(shape)).flatten(0, 1)

    def forward(self, x: Tensor, draws: list[Tensor]) -> Tensor:
        self.draws = draws
        copies = x.expand(len(draws[0]), *x.shape).flatten(0, 1)
        return self.network(copies).unflatten(0, (len(draws[0]), -1))


@torch.no_grad()
def predict_by_hand(
    forward: Callable[..., Tensor], sizes: list[int], images: Tensor, options: argparse.Namespace
) -> Tensor:
    """Returns mean probabilities of the hand-written rival."""
    count = max(1, min(options.samples, HAND_WRITTEN_ROWS[options.device] // len(images)))
    total: Any = 0.0
    with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16-mixed"):
        for _ in range(0, options.samples, count):
            draws = [1 + 0.1 * torch.randn(count, size, device=images.device) for size in sizes]
            total = total + forward(images, draws).float().softmax(-1).sum(0)
    return total / options.samples


def plain_runs(
    network: nn.Module, options: argparse.Namespace, shape: tuple[int, ...]
) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yields numbers of rows, and a function that runs the network without noise over as many."""
    dtype = torch.bfloat16 if options.precision == "bf16-mixed" else torch.float32
    network = deepcopy(network).to(dtype)
    if options.compile and not options.plain_rows:
        mode = "reduce-overhead" if options.device == "cuda" else "default"
        network = torch.compile(network, mode=mode, dynamic=False)
    for rows in (options.plain_rows,) if options.plain_rows else ROWS[options.device]:
        inputs = torch.randn(rows, *shape, device=options.device, dtype=dtype)
        yield rows, torch.no_grad()(partial(network, channels_last(inputs, options.device)))


def channels_last(images: Tensor, device: str) -> Tensor:
    """Returns the images in the memory format that is fastest on the device."""
    on_gpu = device == "cuda" and images.ndim == 4
    return images.contiguous(memory_format=torch.channels_last) if on_gpu else images


def prediction_runs(
    network: nn.Module, images: Tensor, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the names of the variants, and functions that predict the images."""
    settings = {"seed": 0, "precision": options.precision, "compile": options.compile}
    for site in ("channel", "position"):
        for kind in ("gaussian", "flow", "mixture", "dropout"):
            model = fb.to_stochastic(network, rules(options.model, kind, site))
            posterior = NoisePosterior(model, fb.likelihoods.Categorical())

            def predict(posterior: NoisePosterior = posterior) -> Tensor:
                return posterior.predict(images, options.samples, **settings).probabilities

            yield f"{kind}, {site}", predict
    rival = HandWritten(network)
    forward = torch.compile(rival, dynamic=False) if options.compile else rival
    yield "hand-written, channel", partial(predict_by_hand, forward, rival.sizes, images, options)


def main() -> None:
    options = parse_arguments(__doc__, **EXTRA)
    rounds = options.rounds if options.plain_rows else min(options.rounds, 10)
    device, samples, clock = options.device, options.samples, CLOCKS[options.clock]
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    channels = options.channels or (1 if options.model == "lenet" else 3)
    if channels not in (1, 3) or (options.model == "vgg16" and channels == 1):
        raise SystemExit("--channels must be 1 (28x28) or 3 (32x32); VGG16 needs 3")
    side = 28 if channels == 1 else 32
    shape = input_shape("mlp") if options.model == "mlp" else (channels, side, side)
    network = MODELS[options.model](channels).eval().to(device)
    if device == "cuda" and len(shape) == 3:
        network = network.to(memory_format=torch.channels_last)
    images = channels_last(torch.randn(options.batch, *shape, device=device), device)

    rates: dict[int, float] = {}
    plain = dict(plain_runs(network, options, shape))
    for rows, run in plain.items():
        seconds = interleave({"plain": run}, 10, device, 4, warm=3, clock=clock)["plain"]
        rates[rows] = rows / statistics.median(seconds)
        print(f"  plain, {rows:6} rows in a pass: {rates[rows]:12,.0f} images/s", flush=True)
    best = max(rates, key=rates.__getitem__)

    runs = {name: run for name, run in prediction_runs(network, images, options) if options.only in name}
    if not runs:
        raise SystemExit(f"no variant contains '{options.only}'; variants are named like 'flow, channel'")
    times = interleave({"plain": plain[best], **runs}, rounds, device, warm=3, clock=clock)
    rate = best / statistics.median(times.pop("plain"))
    if not options.plain_rows:
        rate = max(rates[best], rate)
    print(
        f"{options.model} {'x'.join(map(str, shape))}, batch {options.batch}, {samples} samples, {device}, {options.precision}"
        f"{', compiled' if options.compile else ''}, {options.threads} threads, median of {rounds} rounds\n"
        f"  plain, best batch, {best} rows in a pass: {rate:,.0f} images/s, {rate / samples:,.1f} divided by {samples} samples"
    )
    rows = [{"variant": "plain", "rows": best, "images_per_second": rate, "by_rows": rates}]
    for name, seconds in times.items():
        speed = options.batch / statistics.median(seconds)
        rows.append({"variant": name, "images_per_second": speed, "speed": speed * samples / rate})
        print(
            f"  {name:38} {speed:9.1f} images/s   speed {rows[-1]['speed']:.3f}   time {1 / rows[-1]['speed']:.3f}"
        )
    write_results(options, f"prediction-{options.model}", rows)


if __name__ == "__main__":
    main()
