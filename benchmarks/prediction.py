"""What prediction with many samples costs, next to the plain network's cost for as many rows in the same run.

    python benchmarks/prediction.py [--model lenet|vgg16] [--batch 128] [--samples 128] [--rounds 10] [--threads 2] [--device cpu]
                                    [--precision bf16-mixed] [--compile] [--channels 3] [--only x] [--sizes 128] [--out results]

The plain network runs as many rows as there are images times samples, in passes of each of ``--sizes`` rows, and its best size counts:
that is what a user could have had. ``images/s`` counts images that have all their samples; ``speed`` is that number over the plain
network's images/s divided by the samples, so that 1 means samples at the plain network's price, and the ratio of times is its inverse.
Everything from the inputs to the mean probabilities is in the stochastic time: draws, flows, passes, softmax. In half precision all
networks, the plain one too, have their weights cast once for a prediction. ``--several 1`` has compiled passes take one sample.
"""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from common import MODELS, arguments, interleave, positive, report, rules, shape_of, write

import flowbnn as fb
from flowbnn.posterior import compiled as compiling
from flowbnn.posterior.base import HALF
from flowbnn.posterior.compiled import HalfWeights
from flowbnn.posterior.forward import Kept, casting, compiled, record

EXTRA = {
    "samples": {"type": positive, "default": 128},
    "compile": {"action": "store_true"},
    "channels": {"type": int, "help": "of the images: 1 (28x28, LeNet unless told otherwise) or 3 (32x32)"},
    "sizes": {
        "default": "128,512,2048,4096,16384",
        "help": "rows in a pass of the plain network; the quickest counts",
    },
    "several": {"type": positive, "help": "samples in a compiled pass, instead of what fills the device"},
    "only": {"default": "", "help": "variants whose name holds this word"},
}


def main() -> None:
    found = arguments(__doc__, **EXTRA)
    rounds = min(found.rounds, 10)  # a round takes seconds
    device, samples = found.device, found.samples
    torch.manual_seed(0)
    channels = found.channels or (1 if found.model == "lenet" else 3)
    if channels not in (1, 3) or (found.model == "vgg16" and channels == 1):
        raise SystemExit(
            "--channels is 1 (28x28) or 3 (32x32); VGG16 halves its maps five times and takes 32x32"
        )
    side = 28 if channels == 1 else 32
    shape = shape_of("mlp") if found.model == "mlp" else (channels, side, side)
    plain = MODELS[found.model](channels).eval().to(device)
    images = torch.randn(found.batch, *shape, device=device)
    if device == "cuda" and images.ndim == 4:
        plain = plain.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    options = {"seed": 0, "precision": found.precision, "compile": found.compile}
    forward = compiled(Kept(), graphs=device == "cuda") if found.compile else lambda network, x: network(x)

    sizes = [int(size) for size in found.sizes.split(",")]
    sizes = [size for size in sizes if size <= samples * found.batch] or [found.batch]
    half = HALF.get(found.precision or "")
    lying = torch.channels_last if device == "cuda" else torch.preserve_format

    def passes_of(size: int) -> Callable[[], None]:
        """As many rows as the predictions have, in passes of so many."""
        some = images.repeat(-(-size // len(images)), *(1,) * len(shape))[:size]
        if device == "cuda" and images.ndim == 4:
            some = some.contiguous(memory_format=torch.channels_last)

        @torch.no_grad()
        def run_plain() -> None:
            # weights in half precision are cast once for all passes, as they are for the noisy networks
            weights = nullcontext() if half is None else HalfWeights(plain, half, lying, halves)
            with casting(torch.device(device), half), weights:
                for _ in range(-(-samples * found.batch // size)):
                    forward(plain, some)

        return run_plain

    halves: dict[Any, Any] = {}
    runs: dict[str, Callable[[], None]] = {f"plain, {size} rows": passes_of(size) for size in sizes}
    for site in ("channel", "position"):
        for kind in ("gaussian", "flow", "mixture", "dropout"):
            if found.only in (name := f"{kind}, {site}"):
                network = fb.to_stochastic(plain, rules(found.model, kind, site))
                posterior = fb.NoisePosterior(network, fb.Categorical())
                if found.several:
                    work = record(network, images[:2]).flops or 0.0
                    compiling.FILLED[device] = found.several * found.batch * work

                def predict(posterior: fb.NoisePosterior = posterior) -> None:
                    _ = posterior.predict(images, samples, **options).probabilities

                runs[name] = predict
    if len(runs) == len(sizes):
        raise SystemExit(
            f"no variant has '{found.only}' in its name; they are like 'flow, channel' and 'gaussian, position'"
        )
    times = interleave(runs, rounds, device, warm=1)
    plainly = {name: times.pop(name) for name in list(times) if name.startswith("plain")}
    best = min(plainly, key=lambda name: statistics.median(plainly[name]))
    times = {"plain": plainly[best], **times}
    for name, each in plainly.items():
        print(
            f"  {name}: {samples * found.batch / statistics.median(each):,.0f} rows/s{' (best)' if name == best else ''}"
        )
    rows = report(
        f"{found.model} {'x'.join(map(str, shape))}, batch {found.batch}, {samples} samples, {device}, {found.precision}"
        f"{', compiled' if found.compile else ''}, {found.threads} threads, median of {rounds} rounds",
        times,
    )
    base = statistics.median(times["plain"]) / found.batch  # seconds for an image with all its samples
    print(f"\n  plain: {samples / base:.1f} images/s, {1 / base:.1f} over {samples} samples")
    for row in rows[1:]:
        row["images_per_second"] = found.batch / statistics.median(times[row["variant"]])
        row["speed"] = row["images_per_second"] * base
        print(
            f"  {row['variant']:38} {row['images_per_second']:9.1f} images/s   {row['speed']:.3f} of plain / {samples}"
        )
    write(found, f"prediction-{found.model}", rows)


if __name__ == "__main__":
    main()
