"""Functions that the benchmarks share: interleaved timing, ratios to the network without noise, a table and a JSON file."""

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
    "CLOCKS",
    "MODELS",
    "TrainingStep",
    "input_shape",
    "interleave",
    "make_parser",
    "parse_arguments",
    "parse_with",
    "positive_int",
    "print_ratios",
    "rules",
    "select_variants",
    "write_results",
]


def mlp(channels: int = 1) -> nn.Module:
    """Returns a small network for tabular data: twenty inputs, two hidden layers of 64 units, ten classes."""
    layers = {
        "fc1": nn.Linear(20, 64),
        "act1": nn.ReLU(),
        "fc2": nn.Linear(64, 64),
        "act2": nn.ReLU(),
        "fc3": nn.Linear(64, 10),
    }
    return nn.Sequential(OrderedDict(layers))


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MODELS: dict[str, Callable[..., nn.Module]] = {"lenet": LeNet, "mlp": mlp, "vgg16": VGG16}
# layers with flows in Xiong's report: convolutional and linear ones
FLOWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mlp": ((), ("fc2",)),
    "lenet": (("conv2",), ("fc1",)),
    "vgg16": (("conv4", "conv8", "conv11"), ("fc2",)),
}


def rules(model: str, kind: str, site: str) -> dict[str, Any] | None:
    """Returns conversion rules, or None for a network without noise.

    Args:
        model: Name of the model.
        kind: ``"plain"`` (no noise), ``"dropout"``, ``"gaussian"``, ``"mixture"`` or ``"flow"``, with flows on the layers of Xiong's
            report.
        site: Site of the noise, ``"channel"`` or ``"position"``.
    """
    if kind == "plain":
        return None
    if kind == "dropout":
        return {"*": fb.noise.Dropout(0.1, site=site)}
    if kind == "mixture":
        return {"*": fb.noise.NormalAffine(site=site, components=4)}
    conversion: dict[str, Any] = {"*": fb.noise.NormalAffine(site=site)}
    if kind == "flow":
        convolutions, linear = FLOWS[model]
        conversion |= {name: fb.noise.NormalInvConv(site=site) for name in convolutions}
        conversion |= {name: fb.noise.NormalPlanar(length=2, site=site) for name in linear}
    return conversion


def input_shape(model: str) -> tuple[int, ...]:
    """Returns the shape of one input of a model."""
    return {"mlp": (20,), "lenet": (1, 28, 28)}.get(model, (3, 32, 32))


class TrainingStep:
    """A network with its optimizer and one batch. Calling it runs one training step.

    Args:
        model: Name of the model.
        kind: Kind of noise, as in :func:`rules`, or conversion rules.
        site: Site of the noise.
        batch: Batch size.
        device: ``"cpu"`` or ``"cuda"``.
        precision: Precision of a GPU.
        acceleration: ``"off"``, ``"graph"`` or ``"compile"``.
    """

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
        raise_malloc_trim_threshold()  # every training does this
        network: nn.Module = MODELS[model]().to(device)
        images, labels = (
            torch.randn(batch, *input_shape(model), device=device),
            torch.randint(10, (batch,), device=device),
        )
        conversion = rules(model, kind, site) if isinstance(kind, str) else kind
        likelihood, objective = (
            fb.likelihoods.Categorical(),
            ELBO(fb.likelihoods.Categorical(), num_data=50_000),
        )
        if conversion is None:
            self.model, groups = network, [{"params": list(network.parameters()), "lr": 2e-4}]
        else:
            self.model = fb.to_stochastic(network, conversion)
            groups = fb.parameter_groups(self.model)
        self.model.train()
        self.optimizer = torch.optim.Adam(groups, fused=True)

        def loss(
            outputs_of: Callable[[Any], torch.Tensor], batch: Any, clock: Clock
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if conversion is None:
                return -likelihood.log_prob(outputs_of(batch[0]), batch[1]).mean(), {}
            terms = objective(self.model, batch[0], batch[1], forward=outputs_of)
            return terms.loss, {"kl": terms.kl.detach()}

        self.objective = Objective(self.model, likelihood, loss, check_batch=lambda batch: None)
        self.batch = (images, labels)
        options = TrainingOptions(precision=precision, acceleration=acceleration)  # type: ignore[arg-type]
        self.recorder = None
        if device == "cuda":
            self.recorder = Recorder(self.objective, self.optimizer, options, torch.device("cuda", 0))
            self.eager = acceleration == "off"
        self.clock = Clock(0, 1, 100, 10)

    def __call__(self) -> None:
        if self.recorder is None:
            self.optimizer.zero_grad()
            loss, _ = self.objective(self.batch, self.clock)
            loss.backward()
            self.optimizer.step()
            return
        if self.eager:
            self.recorder.warmup_steps = 0  # never record, so that every step launches its kernels one by one
        self.recorder.step(self.batch, self.clock)


def interleave(
    steps: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: str,
    each: int = 1,
    warm: int = 10,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Measures variants in turns, so that other load of the machine affects all of them.

    Args:
        steps: Functions to measure, by name.
        rounds: Number of rounds.
        device: ``"cpu"`` or ``"cuda"``.
        each: Number of calls in a round.
        warm: Number of rounds that are not counted.
        clock: Clock to read, ``time.process_time`` for the CPU time of all threads.

    Returns:
        Seconds per call of each variant in every round.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + warm):
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            for _ in range(each):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
            if index >= warm:
                times[name].append((clock() - start) / each)
    return times


def print_ratios(title: str, times: Mapping[str, list[float]], base: str = "plain") -> list[dict[str, Any]]:
    """Prints a table of ratios to the variant ``base`` and returns its rows."""
    print(title)
    rows = []
    for name, values in times.items():
        ratios = sorted(value / other for value, other in zip(values, times[base], strict=True))
        row = {
            "variant": name,
            "milliseconds": 1e3 * statistics.median(values),
            "ratio": statistics.median(ratios),  # other load of the machine affects both in a round
            "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        }
        rows.append(row)
        low, high = row["ratio_quartiles"]
        text = f"{row['ratio']:.3f} x {base}   (quartiles {low:.2f} to {high:.2f})"
        print(f"  {name:38} {row['milliseconds']:9.3f} ms   {text}", flush=True)
    return rows


def positive_int(text: str) -> int:
    """Parses an integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text}")
    return int(text)


def make_parser(description: str | None, **counts: int) -> argparse.ArgumentParser:
    """Returns a parser with integer options.

    Args:
        description: Text of the help.
        counts: Names and defaults of the options.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default)
    return parser


def select_variants(only: str, names: Iterable[str]) -> list[str]:
    """Returns ``plain`` and the names that contain one of the words of ``only``.

    Args:
        only: Words with commas between them. All names are returned if it is empty.
        names: Names to choose from.
    """
    words, names = [word.strip() for word in only.split(",") if word.strip()], list(names)
    if words and not any(word in name for word in words for name in names):
        raise SystemExit(f"no variant contains '{only}'; variants: {'; '.join(names)}")
    return [name for name in names if name == "plain" or not words or any(word in name for word in words)]


def parse_arguments(
    description: str | None, on_cpu: bool = False, **extra: dict[str, Any]
) -> argparse.Namespace:
    """Parses the options that every benchmark has, and those of one benchmark.

    Args:
        description: Text of the help.
        on_cpu: If True, half precision and acceleration are allowed on a CPU.
        extra: Names of further options and their arguments of ``add_argument``.
    """
    parser = make_parser(description, batch=128, rounds=60, threads=2)
    parser.add_argument("--model", choices=sorted(MODELS), default="lenet")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--precision", choices=("32-true", "bf16-mixed"), default="32-true", help="precision of a GPU"
    )
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    for name, settings in extra.items():
        parser.add_argument(f"--{name}", **settings)
    options = parse_with(parser)
    if options.device == "cpu" and options.precision != "32-true" and not on_cpu:
        parser.error("--precision bf16-mixed needs --device cuda")
    if options.device == "cpu" and not on_cpu and "acceleration" in extra:
        if options.acceleration not in ("off", extra["acceleration"]["default"]):
            parser.error(f"--acceleration {options.acceleration} needs --device cuda")
        options.acceleration = "off"  # the JSON file states it
    return options


def parse_with(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line, checks ``--device`` and ``--out``, and sets the number of threads."""
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device is available")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is a file; expected a folder")
    torch.set_num_threads(options.threads)
    return options


def write_results(options: argparse.Namespace, name: str, rows: Any) -> None:
    """Writes the JSON file of a benchmark into the folder ``--out``, if that is set."""
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(0) if options.device == "cuda" else platform.machine(),
        "settings": {key: str(value) for key, value in vars(options).items() if key != "out"},
        "rows": rows,
    }
    (options.out / f"{name}.json").write_text(json.dumps(document, indent=1))
