"""What the benchmarks share: variants that take turns, ratios to the plain network of the same run, a table and a JSON file."""

import argparse
import json
import platform
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flowbnn as fb
from flowbnn.methods.fitting import Objective
from flowbnn.models import VGG16, LeNet
from flowbnn.objectives import ELBO
from flowbnn.training import TrainingOptions
from flowbnn.training.cuda_graph import Recorder
from flowbnn.training.device import raise_malloc_trim_threshold
from flowbnn.training.options import Clock

__all__ = [
    "MODELS",
    "Stepping",
    "arguments",
    "chosen",
    "interleave",
    "options",
    "parsed",
    "positive",
    "report",
    "rules",
    "shape_of",
    "write",
]


def mlp(channels: int = 1) -> nn.Module:
    """Twenty numbers to ten classes by two layers of 64: as small as networks for tables often are."""
    layers = {
        "fc1": nn.Linear(20, 64),
        "act1": nn.ReLU(),
        "fc2": nn.Linear(64, 64),
        "act2": nn.ReLU(),
        "fc3": nn.Linear(64, 10),
    }
    return nn.Sequential(OrderedDict(layers))


MODELS: dict[str, Callable[..., nn.Module]] = {"lenet": LeNet, "mlp": mlp, "vgg16": VGG16}
FLOWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mlp": ((), ("fc2",)),
    "lenet": (("conv2",), ("fc1",)),
    "vgg16": (("conv4", "conv8", "conv11"), ("fc2",)),
}


def rules(model: str, kind: str, site: str) -> dict[str, Any] | None:
    """Conversion rules: ``plain``, ``dropout``, ``gaussian``, ``mixture`` or ``flow`` (Xiong's report's choice of layers)."""
    if kind == "plain":
        return None
    if kind == "dropout":
        return {"*": fb.noise.Dropout(0.1, site=site)}
    if kind == "mixture":
        return {"*": fb.noise.NormalAffine(site=site, components=4)}
    found: dict[str, Any] = {"*": fb.noise.NormalAffine(site=site)}
    if kind == "flow":
        convolutions, linear = FLOWS[model]
        found |= {name: fb.noise.NormalInvConv(site=site) for name in convolutions}
        found |= {name: fb.noise.NormalPlanar(length=2, site=site) for name in linear}
    return found


def shape_of(model: str) -> tuple[int, ...]:
    return {"mlp": (20,), "lenet": (1, 28, 28)}.get(model, (3, 32, 32))


class Stepping:
    """A network, its optimizer and its batch; calling it takes one training step."""

    def __init__(
        self,
        model: str,
        kind: str | dict[str, Any],
        site: str,
        batch: int,
        device: str,
        precision: str,
        acceleration: str,
    ) -> None:
        torch.manual_seed(0)
        raise_malloc_trim_threshold()  # as every training does
        network: nn.Module = MODELS[model]().to(device)
        images, labels = (
            torch.randn(batch, *shape_of(model), device=device),
            torch.randint(10, (batch,), device=device),
        )
        chosen = rules(model, kind, site) if isinstance(kind, str) else kind
        likelihood, objective = (
            fb.likelihoods.Categorical(),
            ELBO(fb.likelihoods.Categorical(), num_data=50_000),
        )
        if chosen is None:
            self.model, groups = network, [{"params": list(network.parameters()), "lr": 2e-4}]
        else:
            self.model = fb.to_stochastic(network, chosen)
            groups = fb.parameter_groups(self.model)
        self.model.train()
        self.optimizer = torch.optim.Adam(groups, fused=True)

        def loss(
            outputs_of: Callable[[Any], torch.Tensor], batch: Any, clock: Clock
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if chosen is None:
                return -likelihood.log_prob(outputs_of(batch[0]), batch[1]).mean(), {}
            terms = objective(self.model, batch[0], batch[1], forward=outputs_of)
            return terms.loss, {"kl": terms.kl.detach()}

        self.objective = Objective(self.model, likelihood, loss, check_batch=lambda batch: None)
        self.batch = (images, labels)
        options = TrainingOptions(precision=precision, acceleration=acceleration)  # type: ignore[arg-type]
        self.recorder = None
        if device == "cuda":
            self.recorder = Recorder(self.objective, self.optimizer, options, torch.device("cuda", 0))
            self.once = acceleration == "off"
        self.clock = Clock(0, 1, 100, 10)

    def __call__(self) -> None:
        if self.recorder is None:
            self.optimizer.zero_grad()
            loss, _ = self.objective(self.batch, self.clock)
            loss.backward()
            self.optimizer.step()
            return
        if self.once:
            self.recorder.warmup_steps = 0  # never record: every step is launched kernel by kernel
        self.recorder.step(self.batch, self.clock)


def interleave(
    steps: Mapping[str, Callable[[], Any]], rounds: int, device: str, each: int = 1, warm: int = 10
) -> dict[str, list[float]]:
    """Seconds of each variant in every round; the variants take turns, so that what else the machine does falls on all."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + warm):
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(each):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
            if index >= warm:
                times[name].append((time.perf_counter() - start) / each)
    return times


def report(title: str, times: Mapping[str, list[float]], base: str = "plain") -> list[dict[str, Any]]:
    """Print a table of ratios to ``base`` and return its rows."""
    print(title)
    rows = []
    for name, values in times.items():
        ratios = sorted(value / other for value, other in zip(values, times[base], strict=True))
        row = {
            "variant": name,
            "milliseconds": 1e3 * statistics.median(values),
            "ratio": statistics.median(ratios),  # of the rounds: what else the machine did fell on both
            "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        }
        rows.append(row)
        low, high = row["ratio_quartiles"]
        told = f"{row['ratio']:.3f} x {base}   (quartiles {low:.2f} to {high:.2f})"
        print(f"  {name:38} {row['milliseconds']:9.3f} ms   {told}", flush=True)
    return rows


def positive(text: str) -> int:
    """A whole number of at least 1, for an option."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text}")
    return int(text)


def options(description: str | None, **counts: int) -> argparse.ArgumentParser:
    """The options of a benchmark that are whole numbers, by their defaults; others are added to it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    return parser


def chosen(only: str, names: Iterable[str]) -> list[str]:
    """The names that contain one of the words of ``only``, with commas between, and ``plain``; all of them without words."""
    words, names = [word.strip() for word in only.split(",") if word.strip()], list(names)
    if words and not any(word in name for word in words for name in names):
        raise SystemExit(f"nothing has '{only}' in its name; there are: {'; '.join(names)}")
    return [name for name in names if name == "plain" or not words or any(word in name for word in words)]


def arguments(description: str | None, on_cpu: bool = False, **extra: dict[str, Any]) -> argparse.Namespace:
    """The options that every benchmark has, and those of this one; ``on_cpu``: half precision means something there too."""
    parser = options(description, batch=128, rounds=60, threads=2)
    parser.add_argument("--model", choices=sorted(MODELS), default="lenet")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true", help="of a GPU")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    for name, settings in extra.items():
        parser.add_argument(f"--{name}", **settings)
    found = parsed(parser)
    if found.device == "cpu" and found.precision != "32-true" and not on_cpu:
        parser.error("--precision bf16-mixed is for --device cuda: on a processor steps are taken in float32")
    if found.device == "cpu" and not on_cpu and "acceleration" in extra:
        if found.acceleration not in ("off", extra["acceleration"]["default"]):
            parser.error(
                f"--acceleration {found.acceleration} is for --device cuda: on a processor steps are taken one by one"
            )
        found.acceleration = "off"  # which is what the file then says
    return found


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Options with ``--device``, ``--threads`` and ``--out`` among them, which are looked at before any work."""
    found = parser.parse_args()
    if found.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device on this machine")
    if found.out is not None and found.out.exists() and not found.out.is_dir():
        parser.error(f"--out {found.out} is a file; name a folder")
    torch.set_num_threads(found.threads)
    return found


def write(found: argparse.Namespace, name: str, rows: Any) -> None:
    """The JSON file of a benchmark, where ``--out`` asks for it."""
    if found.out is None:
        return
    found.out.mkdir(parents=True, exist_ok=True)
    document = {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(0) if found.device == "cuda" else platform.machine(),
        "settings": {key: str(value) for key, value in vars(found).items()},
        "rows": rows,
    }
    (found.out / f"{name}.json").write_text(json.dumps(document, indent=1))
