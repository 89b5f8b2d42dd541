"""Compares the cost of flows with zuko, normflows and nflows: value, log-determinant and backward pass, alternating in one process.

    python benchmarks/flows.py [--dim 16] [--batch 512] [--length 4] [--hidden 64] [--rounds 60] [--threads 1] [--out results]
    python benchmarks/flows.py --only spline-coupling

Each flow runs in its cheap direction. All have the same number of steps, the same widths (two hidden layers with an activation after
each) and 8 bins, and the networks of couplings are the same modules. "(reads q)" is the default of flowbnn, whose networks read
z / (1 + |z| / 5); the other packages have no such option. Packages that are not installed are left out and listed. The ratio is the
time of flowbnn over that of the fastest other package of the round.
"""

import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import interleave, make_parser, parse_with, write_results
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.transforms import AffineMap, Autoregressive, Compose, Coupling, PlanarLU, Residual, SplineMap

PEERS = ("zuko", "normflows", "nflows")
BINS, BOUND = 8, 5.0


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
    """A lazy transform of zuko that returns its value and log-determinant."""

    def __init__(self, lazy: nn.Module) -> None:
        super().__init__()
        self.lazy = lazy

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.lazy().call_and_ladj(value)


def half_mask(dim: int, step: int) -> Tensor:
    """Returns a mask of the first half of the entries, or of the second half for every other step."""
    mask = torch.arange(dim) < dim // 2
    return ~mask if step % 2 else mask


def flowbnn_flow(kind: str, dim: int, length: int, hidden: int) -> Any:
    """Returns the function of a flow of this package."""
    widths = (hidden, hidden)
    kind, _, suffix = kind.partition(" ")
    compress = suffix == "(reads q)"  # otherwise networks read the values, as in the other packages
    univariate = SplineMap(BINS, BOUND) if "spline" in kind else AffineMap()
    if "coupling" in kind:
        settings = [
            {"flip": bool(step % 2), "hidden": widths, "compress": compress} for step in range(length)
        ]
        flow = Compose(*(Coupling(dim, univariate, **setting) for setting in settings))
        return flow.inverse if kind.endswith("density") else flow.forward
    if kind in ("maf", "iaf", "spline-autoregressive"):
        cheap = "forward" if kind == "iaf" else "inverse"
        orders = [range(dim) if step % 2 else range(dim - 1, -1, -1) for step in range(length)]
        flow = Compose(
            *(Autoregressive(dim, univariate, cheap, widths, order, compress=compress) for order in orders)
        )
        return getattr(flow, cheap)
    if kind == "planar":
        return PlanarLU(dim, [("planar", length)]).forward
    return Compose(*(Residual(dim, widths, log_det="roulette") for _ in range(length))).forward


def zuko_flow(kind: str, dim: int, length: int, hidden: int) -> Any:
    """Returns the function of a flow of zuko, or None if it has none of this kind."""
    from zuko.flows.autoregressive import MaskedAutoregressiveTransform
    from zuko.flows.coupling import GeneralCouplingTransform
    from zuko.transforms import MonotonicRQSTransform

    if kind in ("planar", "residual"):
        return None
    settings: dict[str, Any] = {"hidden_features": (hidden, hidden)}
    if "spline" in kind:
        settings |= {"univariate": MonotonicRQSTransform, "shapes": [(BINS,), (BINS,), (BINS - 1,)]}
    if "coupling" in kind:
        steps = [
            GeneralCouplingTransform(dim, mask=half_mask(dim, step), **settings) for step in range(length)
        ]
    else:
        orders = [torch.arange(dim) if step % 2 else torch.arange(dim).flip(0) for step in range(length)]
        steps = [MaskedAutoregressiveTransform(dim, order=order, **settings) for order in orders]
    return Stack([ZukoTransform(step) for step in steps], "forward").forward


def add_activation(step: Any) -> Any:
    """Adds the activation after the first layer, which nflows and normflows omit without residual blocks, and returns the step."""
    net = step.autoregressive_net
    net.initial_layer = nn.Sequential(net.initial_layer, nn.ReLU())
    return step


def nflows_flow(kind: str, dim: int, length: int, hidden: int) -> Any:
    """Returns the function of a flow of nflows, or None if it has none of this kind."""
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
    return stack_steps(makers, kind.removesuffix("-density"), length)


def normflows_flow(kind: str, dim: int, length: int, hidden: int) -> Any:
    """Returns the function of a flow of normflows, or None if it has none of this kind."""
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
        "residual": lambda step: flows.Residual(
            normflows.nets.LipschitzMLP([dim, hidden, hidden, dim], 0.9), reverse=False
        ),
    }
    makers["iaf"] = makers["maf"]
    return stack_steps(makers, kind.removesuffix("-density"), length)


def stack_steps(makers: dict[str, Callable[[int], nn.Module]], kind: str, length: int) -> Any:
    """Returns the function of a stack of steps, or None if no maker has this kind."""
    if kind not in makers:
        return None
    return Stack([makers[kind](step) for step in range(length)], "forward").forward


PACKAGES: dict[str, Callable[[str, int, int, int], Any]] = {
    "flowbnn": flowbnn_flow,
    "zuko": zuko_flow,
    "normflows": normflows_flow,
    "nflows": nflows_flow,
}
KINDS = (
    "affine-coupling",
    "affine-coupling (reads q)",
    "affine-coupling-density",
    "spline-coupling",
    "spline-coupling-density",
    "maf",
    "maf (reads q)",
    "iaf",
    "spline-autoregressive",
    "planar",
    "residual",
)


def training_step(function: Any, z: Tensor) -> Callable[[], None]:
    """Returns a function that computes a value, its log-determinant, and the gradients to the parameters."""
    module = function.__self__
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


def measure(kind: str, arguments: Any, missing: list[str]) -> dict[str, Any]:
    """Returns the times of all packages for one kind of flow."""
    steps = {}
    for name, make in PACKAGES.items():
        torch.manual_seed(0)
        package_kind = kind if name == "flowbnn" else kind.partition(" ")[0]
        sizes = arguments.dim, arguments.length, arguments.hidden
        function = None if name in missing else make(package_kind, *sizes)
        if function is not None:
            function.__self__.to(arguments.device)
            z = torch.randn(arguments.batch, arguments.dim, device=arguments.device)
            steps[name] = training_step(function, z)
    times = interleave(steps, arguments.rounds, arguments.device, each=3)
    peers = [times[name] for name in times if name != "flowbnn"]
    ratios = (
        [ours / min(others) for ours, *others in zip(times["flowbnn"], *peers, strict=True)] if peers else []
    )
    return {
        "kind": kind,
        "milliseconds": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "ratio_to_fastest_peer": statistics.median(ratios) if ratios else None,
    }


def main() -> None:
    parser = make_parser(__doc__, dim=16, batch=512, length=4, hidden=64, rounds=60, threads=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    arguments = parse_with(parser)
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
    rows = []
    for kind in arguments.only:
        row = measure(kind, arguments, missing)
        rows.append(row)
        ratio = row["ratio_to_fastest_peer"]
        times = "   ".join(f"{name} {value:.2f} ms" for name, value in row["milliseconds"].items())
        print(f"{kind:26} {'no peer' if ratio is None else format(ratio, '.2f'):8} {times}", flush=True)
    write_results(arguments, "flows", rows)


if __name__ == "__main__":
    main()
