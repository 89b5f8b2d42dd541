"""What a flow costs beside zuko, normflows and nflows: value, log-determinant and backward pass, in turns in one process.

    python benchmarks/flows.py [--dim 16] [--batch 512] [--length 4] [--hidden 64] [--rounds 60] [--threads 1] [--out results]
    python benchmarks/flows.py --only spline-coupling

Each is run in its cheap direction. All have the same number of steps, the same widths (two hidden layers, an activation after each)
and 8 bins, and the networks of couplings are the same modules. "(reads q)" is ours as it is by default, with networks that read
z / (1 + |z| / 5), which no peer does. A peer that is not installed is left out and named. The ratio is ours to the fastest peer of
the round.
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
    """Steps one after the other, log-determinants summed; ``method`` is the direction that is run."""

    def __init__(self, steps: list[nn.Module], method: str) -> None:
        super().__init__()
        self.steps, self.method = nn.ModuleList(steps), method

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        total: Any = 0.0
        for step in self.steps:
            value, log_det = getattr(step, self.method)(value)
            total = total + log_det
        return value, total


class Lazy(nn.Module):
    """A zuko transform with its value and log-determinant."""

    def __init__(self, lazy: nn.Module) -> None:
        super().__init__()
        self.lazy = lazy

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.lazy().call_and_ladj(value)


def half(dim: int, step: int) -> Tensor:
    keep = torch.arange(dim) < dim // 2
    return ~keep if step % 2 else keep


def ours(kind: str, dim: int, length: int, hidden: int) -> Any:
    widths = (hidden, hidden)
    kind, _, rest = kind.partition(" ")
    plain = rest != "(reads q)"  # networks that read values as they are, as those of the peers do
    univariate = SplineMap(BINS, BOUND) if "spline" in kind else AffineMap()
    if "coupling" in kind:
        halves = [{"flip": bool(step % 2), "hidden": widths, "compress": not plain} for step in range(length)]
        flow = Compose(*(Coupling(dim, univariate, **given) for given in halves))
        return flow.inverse if kind.endswith("density") else flow.forward
    if kind in ("maf", "iaf", "spline-autoregressive"):
        cheap = "forward" if kind == "iaf" else "inverse"
        orders = [range(dim) if step % 2 else range(dim - 1, -1, -1) for step in range(length)]
        flow = Compose(
            *(Autoregressive(dim, univariate, cheap, widths, order, compress=not plain) for order in orders)
        )
        return getattr(flow, cheap)
    if kind == "planar":
        return PlanarLU(dim, [("planar", length)]).forward
    return Compose(*(Residual(dim, widths, log_det="roulette") for _ in range(length))).forward


def of_zuko(kind: str, dim: int, length: int, hidden: int) -> Any:
    from zuko.flows.autoregressive import MaskedAutoregressiveTransform
    from zuko.flows.coupling import GeneralCouplingTransform
    from zuko.transforms import MonotonicRQSTransform

    if kind in ("planar", "residual"):
        return None
    given: dict[str, Any] = {"hidden_features": (hidden, hidden)}
    if "spline" in kind:
        given |= {"univariate": MonotonicRQSTransform, "shapes": [(BINS,), (BINS,), (BINS - 1,)]}
    if "coupling" in kind:
        steps = [GeneralCouplingTransform(dim, mask=half(dim, step), **given) for step in range(length)]
    else:
        orders = [torch.arange(dim) if step % 2 else torch.arange(dim).flip(0) for step in range(length)]
        steps = [MaskedAutoregressiveTransform(dim, order=order, **given) for order in orders]
    return Stack([Lazy(step) for step in steps], "forward").forward


def activated(step: Any) -> Any:
    """A masked step of nflows or normflows with the activation after the first layer that they leave out without residual blocks."""
    made = step.autoregressive_net
    made.initial_layer = nn.Sequential(made.initial_layer, nn.ReLU())
    return step


def of_nflows(kind: str, dim: int, length: int, hidden: int) -> Any:
    from nflows import transforms as theirs

    def net(size: int, out: int) -> nn.Module:
        return fb.nets.MLP(size, out, (hidden, hidden))

    plain = {"num_blocks": 1, "use_residual_blocks": False}
    splines = {"num_bins": BINS, "tails": "linear", "tail_bound": BOUND}
    make: dict[str, Callable[[int], nn.Module]] = {
        "affine-coupling": lambda step: theirs.AffineCouplingTransform(half(dim, step).int(), net),
        "spline-coupling": lambda step: theirs.PiecewiseRationalQuadraticCouplingTransform(
            half(dim, step).int(), net, **splines
        ),
        "maf": lambda step: activated(theirs.MaskedAffineAutoregressiveTransform(dim, hidden, **plain)),
        "spline-autoregressive": lambda step: activated(
            theirs.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(dim, hidden, **plain, **splines)
        ),
    }
    make["iaf"] = make["maf"]
    kind = kind.removesuffix("-density")
    return Stack([make[kind](step) for step in range(length)], "forward").forward if kind in make else None


def of_normflows(kind: str, dim: int, length: int, hidden: int) -> Any:
    import normflows as theirs
    from normflows.flows.neural_spline.coupling import PiecewiseRationalQuadraticCoupling

    def net(size: int, out: int) -> nn.Module:
        return fb.nets.MLP(size, out, (hidden, hidden))

    make: dict[str, Callable[[int], nn.Module]] = {
        "affine-coupling": lambda step: theirs.flows.AffineCouplingBlock(net(dim // 2, 2 * (dim - dim // 2))),
        "spline-coupling": lambda step: PiecewiseRationalQuadraticCoupling(
            half(dim, step).int(), net, num_bins=BINS, tails="linear", tail_bound=BOUND
        ),
        "maf": lambda step: activated(
            theirs.flows.MaskedAffineAutoregressive(dim, hidden, num_blocks=1, use_residual_blocks=False)
        ),
        "planar": lambda step: theirs.flows.Planar((dim,)),
        "residual": lambda step: theirs.flows.Residual(
            theirs.nets.LipschitzMLP([dim, hidden, hidden, dim], 0.9), reverse=False
        ),
    }
    kind = {"iaf": "maf"}.get(kind.removesuffix("-density"), kind.removesuffix("-density"))
    return Stack([make[kind](step) for step in range(length)], "forward").forward if kind in make else None


BUILD: dict[str, Callable[[str, int, int, int], Any]] = {
    "flowbnn": ours,
    "zuko": of_zuko,
    "normflows": of_normflows,
    "nflows": of_nflows,
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


def step_of(run: Any, z: Tensor) -> Callable[[], None]:
    """One value with its log-determinant and the backward pass to the parameters."""
    module = run.__self__
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.no_grad():  # away from the identity, so that no peer has an easier task
        for parameter in parameters:
            parameter += 0.02 * torch.randn_like(parameter)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        value, log_det = run(z)
        (0.5 * value.square().sum() - log_det.sum()).backward()

    return step


def main() -> None:
    parser = make_parser(__doc__, dim=16, batch=512, length=4, hidden=64, rounds=60, threads=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    found = parse_with(parser)
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    rows = []
    for kind in found.only:
        steps = {}
        for name, build in BUILD.items():
            torch.manual_seed(0)
            named = kind if name == "flowbnn" else kind.partition(" ")[0]
            run = None if name in missing else build(named, found.dim, found.length, found.hidden)
            if run is not None:
                run.__self__.to(found.device)
                steps[name] = step_of(run, torch.randn(found.batch, found.dim, device=found.device))
        times = interleave(steps, found.rounds, found.device, each=3)
        peers = [times[name] for name in times if name != "flowbnn"]
        ratios = (
            [own / min(other) for own, *other in zip(times["flowbnn"], *peers, strict=True)] if peers else []
        )
        ratio = statistics.median(ratios) if ratios else None
        row = {
            "kind": kind,
            "milliseconds": {name: 1e3 * statistics.median(values) for name, values in times.items()},
            "ratio_to_fastest_peer": ratio,
        }
        rows.append(row)
        told = "   ".join(f"{name} {value:.2f} ms" for name, value in row["milliseconds"].items())
        print(f"{kind:26} {'no peer' if ratio is None else format(ratio, '.2f'):8} {told}", flush=True)
    write_results(found, "flows", rows)


if __name__ == "__main__":
    main()
