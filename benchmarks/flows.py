"""Compares the cost of flows with zuko, normflows, nflows and torchflows: value, log-determinant and backward pass.

    python benchmarks/flows.py [--dims 2 16 64] [--batches 64 1024] [--length 4] [--hidden 64] [--seconds 8] [--out results]
    python benchmarks/flows.py --compile --dims 16 --batches 1024          # every package compiled
    python benchmarks/flows.py --only spline-coupling --clock wall --threads 2

Every family is measured in both directions: "density" from data to base points, "sample" from base points to data. All packages
have the same number of steps, the same widths (two hidden layers with an activation after each) and 8 bins. "flowbnn, defaults" is
the flow with the default networks of flowbnn, which read z / (1 + |z| / 5).

Packages that are not installed, do not have a flow or do not compile are left out. So is, beyond 16 entries, the direction of
autoregressive flows that takes a pass for every entry. The variants take turns within every round. The ratio is the time of flowbnn
over that of the package with the smallest median, and the median over rounds.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import CLOCKS, interleave, make_parser, parse_with, write_results
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.transforms import (
    AffineMap,
    Autoregressive,
    Compose,
    Coupling,
    PlanarLU,
    Radial,
    Residual,
    SplineMap,
    Sylvester,
)

PEERS = ("zuko", "normflows", "nflows", "torchflows")
BINS, BOUND = 8, 5.0
# one-pass direction of autoregressive flows; the other takes a pass for every entry
ONE_PASS = {"maf": "density", "iaf": "sample", "spline-autoregressive": "density"}
MAX_SEQUENTIAL_DIM = 16  # autograd keeps all passes of the other direction in memory
COUPLINGS = ("affine-coupling", "spline-coupling")
DIRECTIONS = ("density", "sample")
# flows of which no peer has both directions
SAMPLE_ONLY = ("planar", "radial", "sylvester")
KINDS = (*COUPLINGS, *ONE_PASS, *SAMPLE_ONLY, "residual")

Flow = Callable[[Tensor], tuple[Tensor, Tensor]]


class Stack(nn.Module):
    """Steps one after the other, with summed log-determinants.

    Args:
        steps: The steps.
        method: Name of the method of the steps that is called.
    """

    def __init__(self, steps: list[nn.Module], method: str) -> None:
        super().__init__()
        self.steps, self.method = nn.ModuleList(steps), method

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        total: Any = 0.0
        for step in self.steps:
            value, log_det = getattr(step, self.method)(value)
            total = total + log_det
        return value, total


class ZukoTransform(nn.Module):
    """A lazy transform of zuko that returns its values and log-determinants."""

    def __init__(self, lazy: nn.Module) -> None:
        super().__init__()
        self.lazy = lazy

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.lazy().call_and_ladj(value)

    def inverse(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.lazy().inv.call_and_ladj(value)


def half_mask(dim: int, step: int) -> Tensor:
    """Returns a mask of the first half of the entries, or of the second half for every other step."""
    mask = torch.arange(dim) < dim // 2
    return ~mask if step % 2 else mask


def peer_method(kind: str, direction: str) -> str:
    """Returns the method of packages whose ``forward`` computes densities: the one-pass direction of autoregressive steps."""
    return "forward" if direction == ONE_PASS.get(kind, "density") else "inverse"


def flowbnn_flow(
    kind: str, direction: str, dim: int, length: int, hidden: int, compress: bool = False
) -> tuple[nn.Module, Flow]:
    """Returns a flow of this package and the function of a direction. Networks read the values unless ``compress`` is True."""
    widths = (hidden, hidden)
    univariate = SplineMap(BINS, BOUND) if "spline" in kind else AffineMap()
    flow: Any
    if kind in COUPLINGS:
        flow = Compose(
            *(
                Coupling(dim, univariate, flip=bool(step % 2), hidden=widths, compress=compress)
                for step in range(length)
            )
        )
    elif kind in ONE_PASS:
        cheap = "inverse" if ONE_PASS[kind] == "density" else "forward"
        orders = [range(dim) if step % 2 else range(dim - 1, -1, -1) for step in range(length)]
        flow = Compose(
            *(Autoregressive(dim, univariate, cheap, widths, order, compress=compress) for order in orders)
        )
    elif kind == "planar":
        flow = PlanarLU(dim, [("planar", length)])
    elif kind == "residual":
        flow = Compose(*(Residual(dim, widths, log_det="roulette") for _ in range(length)))
    else:
        make = {"radial": Radial, "sylvester": Sylvester}[kind]
        flow = Compose(*(make(dim) for _ in range(length)))
    return flow, flow.inverse if direction == "density" else flow.forward


def zuko_flow(
    kind: str, direction: str, dim: int, length: int, hidden: int
) -> tuple[list[nn.Module], str] | None:
    """Returns the steps of a flow of zuko and the method of a direction, or None if it has none of this kind."""
    from zuko.flows.autoregressive import MaskedAutoregressiveTransform
    from zuko.flows.coupling import GeneralCouplingTransform
    from zuko.transforms import MonotonicRQSTransform

    settings: dict[str, Any] = {"hidden_features": (hidden, hidden)}
    if "spline" in kind:
        settings |= {"univariate": MonotonicRQSTransform, "shapes": [(BINS,), (BINS,), (BINS - 1,)]}
    if kind in COUPLINGS:
        steps = [
            GeneralCouplingTransform(dim, mask=half_mask(dim, step), **settings) for step in range(length)
        ]
    elif kind in ONE_PASS:
        orders = [torch.arange(dim) if step % 2 else torch.arange(dim).flip(0) for step in range(length)]
        steps = [MaskedAutoregressiveTransform(dim, order=order, **settings) for order in orders]
    else:
        return None
    return [ZukoTransform(step) for step in steps], peer_method(kind, direction)


def add_activation(step: Any) -> Any:
    """Adds the activation after the first layer, which nflows and normflows omit without residual blocks, and returns the step."""
    net = step.autoregressive_net
    net.initial_layer = nn.Sequential(net.initial_layer, nn.ReLU())
    return step


def nflows_flow(
    kind: str, direction: str, dim: int, length: int, hidden: int
) -> tuple[list[nn.Module], str] | None:
    """Returns the steps of a flow of nflows and the method of a direction, or None if it has none of this kind."""
    from nflows import transforms

    def net(size: int, out: int) -> nn.Module:
        return fb.nets.ConditionerMLP(size, out, (hidden, hidden))

    plain = {"num_blocks": 1, "use_residual_blocks": False}
    splines = {"num_bins": BINS, "tails": "linear", "tail_bound": BOUND}
    makers: dict[str, Callable[[int], nn.Module]] = {
        "affine-coupling": lambda step: transforms.AffineCouplingTransform(half_mask(dim, step).int(), net),
        "spline-coupling": lambda step: transforms.PiecewiseRationalQuadraticCouplingTransform(
            half_mask(dim, step).int(), net, **splines
        ),
        "maf": lambda step: add_activation(
            transforms.MaskedAffineAutoregressiveTransform(dim, hidden, **plain)
        ),
        "spline-autoregressive": lambda step: add_activation(
            transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
                dim, hidden, **plain, **splines
            )
        ),
    }
    makers["iaf"] = makers["maf"]
    return make_steps(makers, kind, length, peer_method(kind, direction))


def normflows_flow(
    kind: str, direction: str, dim: int, length: int, hidden: int
) -> tuple[list[nn.Module], str] | None:
    """Returns the steps of a flow of normflows and the method of a direction, or None if it has none of this kind."""
    import normflows
    from normflows.flows.neural_spline.coupling import PiecewiseRationalQuadraticCoupling

    def net(size: int, out: int) -> nn.Module:
        return fb.nets.ConditionerMLP(size, out, (hidden, hidden))

    flows = normflows.flows
    makers: dict[str, Callable[[int], nn.Module]] = {
        "affine-coupling": lambda step: flows.AffineCouplingBlock(net(dim // 2, 2 * (dim - dim // 2))),
        "spline-coupling": lambda step: PiecewiseRationalQuadraticCoupling(
            half_mask(dim, step).int(), net, num_bins=BINS, tails="linear", tail_bound=BOUND
        ),
        "maf": lambda step: add_activation(
            flows.MaskedAffineAutoregressive(dim, hidden, num_blocks=1, use_residual_blocks=False)
        ),
        "planar": lambda step: flows.Planar((dim,)),
        "radial": lambda step: flows.Radial((dim,)),
        "residual": lambda step: flows.Residual(
            normflows.nets.LipschitzMLP([dim, hidden, hidden, dim], 0.9), reverse=False
        ),
    }
    makers["iaf"] = makers["maf"]
    forward_samples = kind not in ONE_PASS and kind != "spline-coupling"
    method = (
        ("forward" if direction == "sample" else "inverse")
        if forward_samples
        else peer_method(kind, direction)
    )
    return make_steps(makers, kind, length, method)


def torchflows_flow(
    kind: str, direction: str, dim: int, length: int, hidden: int
) -> tuple[list[nn.Module], str] | None:
    """Returns the steps of a flow of torchflows and the method of a direction, or None if it has none of this kind."""
    from torchflows.bijections.finite.autoregressive import layers
    from torchflows.bijections.finite.residual.planar import Planar as TorchflowsPlanar
    from torchflows.bijections.finite.residual.radial import Radial as TorchflowsRadial
    from torchflows.bijections.finite.residual.sylvester import HouseholderSylvester

    network: dict[str, Any] = {"n_layers": 3, "n_hidden": hidden}
    splines = {"transformer_kwargs": {"boundary": BOUND, "n_bins": BINS}}
    coupling = {"conditioner_kwargs": network | {"nonlinearity": nn.ReLU}}
    masked = {"conditioner_kwargs": network}

    def with_relu(step: Any) -> Any:
        net = step.conditioner_transform.sequential
        for index, layer in enumerate(net):
            if isinstance(layer, nn.Tanh):
                net[index] = nn.ReLU()
        return step

    makers: dict[str, Callable[[int], nn.Module]] = {
        "affine-coupling": lambda step: layers.AffineCoupling((dim,), **coupling),
        "spline-coupling": lambda step: layers.RQSCoupling((dim,), **coupling, **splines),
        "maf": lambda step: with_relu(layers.AffineForwardMaskedAutoregressive((dim,), **masked)),
        "spline-autoregressive": lambda step: with_relu(
            layers.RQSForwardMaskedAutoregressive((dim,), **masked, **splines)
        ),
        "planar": lambda step: TorchflowsPlanar((dim,)),
        "radial": lambda step: TorchflowsRadial((dim,)),
        "sylvester": lambda step: HouseholderSylvester((dim,), m=dim),
    }
    makers["iaf"] = makers["maf"]
    return make_steps(makers, kind, length, peer_method(kind, direction))


def make_steps(
    makers: dict[str, Callable[[int], nn.Module]], kind: str, length: int, method: str
) -> tuple[list[nn.Module], str] | None:
    """Returns the steps of a kind with their method, or None if no maker has this kind."""
    return ([makers[kind](step) for step in range(length)], method) if kind in makers else None


PACKAGES: dict[str, Callable[[str, str, int, int, int], tuple[list[nn.Module], str] | None]] = {
    "zuko": zuko_flow,
    "normflows": normflows_flow,
    "nflows": nflows_flow,
    "torchflows": torchflows_flow,
}


def make_flow(package: str, kind: str, direction: str, *sizes: int) -> tuple[nn.Module, Flow] | None:
    """Returns a flow and the function of a direction, or None if the package has none of this kind."""
    if package.startswith("flowbnn"):
        return flowbnn_flow(kind, direction, *sizes, compress=package.endswith("defaults"))
    steps = PACKAGES[package](kind, direction, *sizes)
    if steps is None:
        return None
    stack = Stack(*steps)
    return stack, stack.forward


def training_step(module: nn.Module, function: Flow, z: Tensor) -> Callable[[], None]:
    """Returns a function that computes values, log-determinants, and the gradients to the parameters."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.no_grad():  # away from the identity, where some packages would be faster
        for parameter in parameters:
            parameter += 0.02 * torch.randn_like(parameter)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        value, log_det = function(z)
        (0.5 * value.square().sum() - log_det.sum()).backward()

    return step


def measure(
    kind: str, direction: str, dim: int, batch: int, arguments: argparse.Namespace
) -> dict[str, Any] | None:
    """Returns the times of all packages for one kind of flow, or None if no other package has it."""
    steps: dict[str, Callable[[], None]] = {}
    failures: dict[str, str] = {}
    with_defaults = ["flowbnn, defaults"] if kind in (*COUPLINGS, *ONE_PASS) else []
    for package in ("flowbnn", *with_defaults, *arguments.packages):
        torch.manual_seed(0)
        flow = make_flow(package, kind, direction, dim, arguments.length, arguments.hidden)
        if flow is None:
            continue
        module, function = flow[0].to(arguments.device), flow[1]
        if arguments.compile:
            torch.compiler.reset()
            function = torch.compile(function, dynamic=False)
        step = training_step(module, function, torch.randn(batch, dim, device=arguments.device))
        try:
            step()
        except Exception as error:  # the package is left out of this row
            if package.startswith("flowbnn"):
                raise
            failures[package] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            continue
        steps[package] = step
    peers = [package for package in steps if not package.startswith("flowbnn")]
    if not peers:
        return None
    clock = CLOCKS[arguments.clock]
    trial = interleave(steps, 1, arguments.device, warm=1, clock=clock)
    rounds = int(arguments.seconds / max(1e-9, sum(seconds[0] for seconds in trial.values())))
    times = interleave(steps, max(5, min(rounds, 200)), arguments.device, warm=1, clock=clock)
    medians = {package: statistics.median(seconds) for package, seconds in times.items()}
    fastest = min(peers, key=medians.__getitem__)
    row: dict[str, Any] = {"kind": kind, "direction": direction, "dim": dim, "batch": batch}
    row |= {"rounds": len(times["flowbnn"]), "fastest_peer": fastest, "failures": failures}
    row["milliseconds"] = {package: 1e3 * median for package, median in medians.items()}
    for package in ("flowbnn", *with_defaults):
        ratios = sorted(ours / other for ours, other in zip(times[package], times[fastest], strict=True))
        row[f"ratio of {package}"] = statistics.median(ratios)
        row[f"quartiles of {package}"] = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
    return row


def main() -> None:
    parser = make_parser(__doc__, length=4, hidden=64, threads=1)
    parser.add_argument("--dims", type=int, nargs="*", default=[2, 16, 64])
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--seconds", type=float, default=8.0, help="time of a row; it has 5 to 200 rounds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu", help="cpu: CPU time")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument("--directions", choices=DIRECTIONS, nargs="*", default=DIRECTIONS)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    arguments = parse_with(parser)
    if arguments.device == "cuda":
        arguments.clock = "wall"
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
    arguments.packages = [name for name in PEERS if name not in missing]
    arguments.versions = {name: version(name) for name in arguments.packages}
    rows = []
    for kind, direction in product(arguments.only, arguments.directions):
        if kind in SAMPLE_ONLY and direction == "density":
            continue
        for dim, batch in product(arguments.dims, arguments.batches):
            if direction != ONE_PASS.get(kind, direction) and dim > MAX_SEQUENTIAL_DIM:
                continue
            row = measure(kind, direction, dim, batch, arguments)
            if row is None:
                continue
            rows.append(row)
            write_results(arguments, "flows_compiled" if arguments.compile else "flows", rows)
            ratios = "  ".join(format(row[key], ".2f") for key in row if key.startswith("ratio"))
            times = "  ".join(f"{name} {value:.2f}" for name, value in row["milliseconds"].items())
            label = f"{kind} {direction}, D={dim}, batch {batch}"
            print(f"{label:48} {ratios:12} ({row['fastest_peer']})  ms: {times}", flush=True)
            for name, text in row["failures"].items():
                print(f"    {name}: {text}")


if __name__ == "__main__":
    main()
