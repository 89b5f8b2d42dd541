"""Measures the cost of predictions with many samples beside the plain network at its best batch, in the same run.

    python benchmarks/prediction.py [--model lenet|vgg16] [--batch 128] [--samples 128] [--rounds 10] [--threads 2] [--device cpu]
                                    [--precision bf16-mixed] [--compile] [--channels 3] [--only channel] [--out results]

The plain network (compiled and in half precision where that is asked for) is measured with 128 to 16,384 rows in a pass (to 2,048 on a
CPU), and the yardstick is the best of these: what a user could have had. ``images/s`` counts images that have all their samples;
``speed`` is that number times the samples over the plain network's best images/s, so 1 means samples at the plain network's price.
Everything from the inputs to the mean probabilities is in the stochastic time: draws, flows, passes, softmax.
"""

import statistics
from collections.abc import Callable
from copy import deepcopy

import torch
from common import MODELS, input_shape, interleave, parse_arguments, positive_int, rules, write_results

import flowbnn as fb
from flowbnn.posterior import NoisePosterior

EXTRA = {
    "samples": {"type": positive_int, "default": 128},
    "compile": {"action": "store_true"},
    "channels": {"type": int, "help": "of the images: 1 (28x28, LeNet's default) or 3 (32x32)"},
    "only": {"default": "", "help": "variants whose name contains this word"},
}
ROWS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}


def plain_runs(
    plain: torch.nn.Module, found: object, shape: tuple[int, ...]
) -> dict[int, Callable[[], None]]:
    """A pass of the plain network for every number of rows."""
    device, half = found.device, found.precision == "bf16-mixed"  # type: ignore[attr-defined]
    network = deepcopy(plain)
    if half:
        network = network.to(torch.bfloat16)
    if found.compile:  # type: ignore[attr-defined]
        mode = "reduce-overhead" if device == "cuda" else "default"
        network = torch.compile(network, mode=mode, dynamic=False)
    runs = {}
    for rows in ROWS[device]:
        inputs = torch.randn(rows, *shape, device=device, dtype=torch.bfloat16 if half else torch.float32)
        if device == "cuda" and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)

        @torch.no_grad()
        def run(inputs: torch.Tensor = inputs) -> None:
            network(inputs)

        runs[rows] = run
    return runs


def main() -> None:
    found = parse_arguments(__doc__, **EXTRA)
    rounds, device, samples = min(found.rounds, 10), found.device, found.samples
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    channels = found.channels or (1 if found.model == "lenet" else 3)
    if channels not in (1, 3) or (found.model == "vgg16" and channels == 1):
        raise SystemExit(
            "--channels is 1 (28x28) or 3 (32x32); VGG16 halves its maps five times and takes 32x32"
        )
    side = 28 if channels == 1 else 32
    shape = input_shape("mlp") if found.model == "mlp" else (channels, side, side)
    plain = MODELS[found.model](channels).eval().to(device)
    images = torch.randn(found.batch, *shape, device=device)
    if device == "cuda" and images.ndim == 4:
        plain = plain.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    options = {"seed": 0, "precision": found.precision, "compile": found.compile}

    rates: dict[int, float] = {}
    for rows, run in plain_runs(plain, found, shape).items():
        seconds = interleave({"plain": run}, 10, device, each=4, warm=3)["plain"]
        rates[rows] = rows / statistics.median(seconds)
        print(f"  plain, {rows:6} rows in a pass: {rates[rows]:12,.0f} images/s", flush=True)
    best = max(rates, key=rates.__getitem__)

    runs: dict[str, Callable[[], None]] = {"plain": plain_runs(plain, found, shape)[best]}
    for site in ("channel", "position"):
        for kind in ("gaussian", "flow", "mixture", "dropout"):
            if found.only in (name := f"{kind}, {site}"):
                network = fb.to_stochastic(plain, rules(found.model, kind, site))
                posterior = NoisePosterior(network, fb.likelihoods.Categorical())

                def predict(posterior: NoisePosterior = posterior) -> None:
                    _ = posterior.predict(images, samples, **options).probabilities

                runs[name] = predict
    if len(runs) == 1:
        raise SystemExit(f"no variant has '{found.only}' in its name; they are like 'flow, channel'")
    times = interleave(runs, rounds, device, warm=1)
    # the yardstick is the quicker of the two measurements of the best batch
    rate = max(rates[best], best / statistics.median(times.pop("plain")))
    print(
        f"{found.model} {'x'.join(map(str, shape))}, batch {found.batch}, {samples} samples, {device}, {found.precision}"
        f"{', compiled' if found.compile else ''}, {found.threads} threads, median of {rounds} rounds\n"
        f"  plain at its best, {best} rows in a pass: {rate:,.0f} images/s, {rate / samples:,.1f} over {samples} samples"
    )
    rows = [{"variant": "plain", "rows": best, "images_per_second": rate, "by_rows": rates}]
    for name, seconds in times.items():
        speed = found.batch / statistics.median(seconds)
        rows.append({"variant": name, "images_per_second": speed, "speed": speed * samples / rate})
        print(
            f"  {name:38} {speed:9.1f} images/s   speed {rows[-1]['speed']:.3f}   time {1 / rows[-1]['speed']:.3f}"
        )
    write_results(found, f"prediction-{found.model}", rows)


if __name__ == "__main__":
    main()
