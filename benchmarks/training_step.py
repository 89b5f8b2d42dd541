"""What a training step with noise costs, as a ratio to the plain network's in the same run.

    python benchmarks/training_step.py [--batch 128] [--rounds 60] [--threads 2] [--device cpu] [--out results]

LeNet on 28x28 inputs, fused Adam, one batch: forward, loss (with the KL), backward, optimizer step. The variants take turns within
every round, so that whatever else the machine does falls on all of them; the ratio is that of the medians.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import flowbnn as fb
from flowbnn.models import LeNet
from flowbnn.objectives import ELBO

FLOWS = {"conv2": fb.NormalInvConv(), "fc1": fb.NormalPlanar(length=2), "*": fb.NormalAffine()}
VARIANTS = {
    "plain": None,
    "dropout at every layer": {"*": fb.Dropout(0.1)},
    "NormalAffine, channel": {"*": fb.NormalAffine()},
    "NormalAffine, position": {"*": fb.NormalAffine(site="position")},
    "flow noise of document 000, channel": FLOWS,
}


def make_step(
    network: nn.Module, rules: dict | None, images: torch.Tensor, labels: torch.Tensor
) -> Callable[[], None]:
    likelihood = fb.Categorical()
    if rules is None:
        model = network
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, fused=True)
    else:
        model = fb.to_stochastic(network, rules)
        optimizer = torch.optim.Adam(fb.parameter_groups(model), fused=True)
    objective = ELBO(likelihood, num_data=60_000)

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(images)
        if rules is None:
            loss = -likelihood.log_prob(outputs, labels).mean()
        else:
            loss = objective(model, outputs, labels).loss
        loss.backward()
        optimizer.step()

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 10):
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if index >= 10:  # the first rounds warm up
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device = arguments.device
    images = torch.randn(arguments.batch, 1, 28, 28, device=device)
    labels = torch.randint(10, (arguments.batch,), device=device)
    steps = {name: make_step(LeNet().to(device), rules, images, labels) for name, rules in VARIANTS.items()}
    times = measure(steps, arguments.rounds, device)
    plain = statistics.median(times["plain"])
    rows = []
    print(
        f"LeNet 28x28, batch {arguments.batch}, {device}, {arguments.threads} threads, median of {arguments.rounds} rounds"
    )
    for name, values in times.items():
        ratios = sorted(value / base for value, base in zip(values, times["plain"], strict=True))
        row = {
            "variant": name,
            "milliseconds": 1e3 * statistics.median(values),
            "ratio": statistics.median(values) / plain,
            "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        }
        rows.append(row)
        low, high = row["ratio_quartiles"]
        print(
            f"  {name:38} {row['milliseconds']:8.2f} ms   {row['ratio']:.3f} x plain   (quartiles {low:.2f} to {high:.2f})"
        )
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        settings = {
            "batch": arguments.batch,
            "rounds": arguments.rounds,
            "threads": arguments.threads,
            "device": device,
        }
        document = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "settings": settings,
            "rows": rows,
        }
        (arguments.out / "training_step.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
