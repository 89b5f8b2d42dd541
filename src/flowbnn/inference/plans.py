r"""How a network takes its samples: found out once, on two rows, by comparing with samples taken one by one.

The *fold* puts the sample axis into the batch, ``S`` blocks of the same inputs: ``"late"`` at the first stochastic layer, so that
what comes before is computed once, or at the ``"input"``, where a skip connection around that layer, say, does not allow it. A
network in which some noisy layer sees no examples at all (the embedding of positions) cannot fold, and takes its samples ``"single"``,
one by one.

To *absorb* is to multiply shared draws into the weights and to run the plain network for one sample after the other. No feature
map is multiplied, so ``S`` samples cost what the plain network costs for as many rows. Noise that no weight can take (recurrent layers,
attention, site ``position`` on a feature map) is multiplied as ever.

Absorbing is chosen for shared draws unless so much of the work (in multiplications, counted in the trial) comes before the first
noise that having it once, by a late fold, saves more than sparing the feature maps does, or unless a pass for one sample has so little
work that starting it would cost more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flowbnn.inference.absorbing import ScaledWeights, absorbable
from flowbnn.inference.batches import apply, call, join, mirrored, repeat, rows, take, tensors_of
from flowbnn.inference.passes import casting, device_of, evaluating
from flowbnn.layers import noise, noise_layers

__all__ = ["Plan", "observe", "plan_for"]

# products of feature maps cost some hundredths of a pass on a CPU, and a fifth or more on a GPU, which waits for its memory
LATE_SHARE = {"cpu": 0.05, "cuda": 0.2}  # of the work, before the first noise
LEAST_WORK = {"cpu": 5e8, "cuda": 2e11}  # floating-point operations of a pass for one sample


@dataclass(frozen=True)
class Plan:
    """What the trial found.

    Args:
        fold: ``"late"`` (at the layer ``first``), ``"input"`` or ``"single"``.
        first: the layer at which a late fold happens.
        absorbed: layers whose shared noise their weights can take.
        whole: whether no other noise is left then, so that a sample is the plain network.
        work: floating-point operations of one row in linear and convolution layers.
        before: the share of them before the first noise.
        half: whether the weights may stand in half precision when that is what layers run in.
    """

    fold: str
    first: str = ""
    absorbed: tuple[str, ...] = ()
    whole: bool = False
    work: float = 0.0
    before: float = 0.0
    half: bool = False

    def absorbs(self, rows: int, device: torch.device, compiled: bool = False) -> bool:
        """Whether to absorb shared draws when one sample has passes of this many rows."""
        if not self.absorbed:
            return False
        if self.fold == "single" or (compiled and self.whole):
            return True
        kind = "cpu" if device.type == "cpu" else "cuda"
        if self.fold == "late" and self.before > LATE_SHARE[kind]:
            return False
        return self.work * rows >= LEAST_WORK[kind]


_PLANS: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def plan_for(model: nn.Module, inputs: Any, half: torch.dtype | None = None) -> Plan:
    """The plan for inputs of this shape, found once and remembered with the network."""
    known = _PLANS.setdefault(model, {})
    layouts = tuple((name, layer.layout, layer.site) for name, layer in noise_layers(model).items())
    candidates = absorbable(model)
    key = (layouts, candidates, half, tuple(tensor.shape[1:] for tensor in tensors_of(inputs)))
    if key not in known:
        few = take(inputs, 0, 2)
        shaken = _shaken(inputs)
        if rows(inputs) == 1:
            few = join([few, mirrored(few)])
            try:
                return known.setdefault(
                    key, _find_plan(model, few, join([shaken, mirrored(shaken)]), candidates, half)
                )
            except Exception:  # a network for one row at a time
                return Plan("single")
        known[key] = _find_plan(model, few, shaken, candidates, half)
    return known[key]


def observe(model: nn.Module, inputs: Any) -> dict[str, tuple[int, ...]]:
    """The noisy layers in the order a pass calls them, with the shape of what each multiplies (empty if it is no tensor)."""
    found: dict[str, tuple[int, ...]] = {}
    handles = []
    for name, layer in noise_layers(model).items():

        def record(
            module: nn.Module,
            args: Any,
            kwargs: Any,
            output: Any,
            name: str = name,
            side: str = layer.layout.side,
        ) -> None:
            value = output if side == "output" else next(iter((*args, *kwargs.values())), None)
            found.setdefault(name, tuple(value.shape) if isinstance(value, Tensor) else ())

        handles.append(model.get_submodule(name).register_forward_hook(record, with_kwargs=True))
    try:
        with evaluating(model), noise(model, "off"):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _work(model: nn.Module, few: Any, first: str) -> tuple[float, float]:
    """Floating-point operations of one row, and the share of them before the noise of the layer ``first``."""
    counter = FlopCounterMode(display=False)
    before: list[float] = []

    def record(*_: Any) -> None:
        if not before:
            before.append(counter.get_total_flops())

    module = model.get_submodule(first)
    late = noise_layers(model)[first].passes_through or noise_layers(model)[first].layout.side == "output"
    handle = module.register_forward_hook(record) if late else module.register_forward_pre_hook(record)
    try:
        with evaluating(model), noise(model, "off"), counter:
            call(model, few)
    finally:
        handle.remove()
    total = float(counter.get_total_flops())
    return total / rows(few), (before[0] / total if total and before else 0.0)


@contextmanager
def _probing(model: nn.Module) -> Iterator[None]:
    """Draws between a half and one and a half in place of the posterior's, which may be too narrow to tell two plans apart."""
    layers = noise_layers(model).values()
    for layer in layers:

        def draw(
            shape: tuple[int, ...],
            generator: torch.Generator | None = None,
            dim: int = layer.layout.dim,
        ) -> Tensor:
            device = generator.device if generator is not None else device_of(model)
            return 0.5 + torch.rand((*shape, dim), generator=generator, device=device)

        vars(layer)["draw"] = draw
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["draw"]


def _shaken(inputs: Any) -> Any:
    """Two rows, moved at random by as much as inputs differ: rows of zeros, or two alike, would tell nothing about a plan."""
    source = torch.Generator().manual_seed(0)

    def shake(tensor: Tensor) -> Tensor:
        some = tensor[:2]
        if not tensor.is_floating_point():
            return some
        scale = tensor[:64].float().std() if tensor[:64].numel() > 1 else tensor.new_ones(()).float()
        scale = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
        noise = torch.randn(some.shape, generator=source).to(tensor.device)
        return (some + scale * noise).to(tensor.dtype)

    return apply(inputs, shake)


def _find_plan(
    model: nn.Module, few: Any, shaken: Any, candidates: tuple[str, ...], half: torch.dtype | None
) -> Plan:
    """The plan, tried on shaken rows where these tell something, else on the rows themselves."""
    seen = observe(model, few)
    if seen:
        for trial in (shaken, few):
            plan = _try_plan(model, trial, seen, candidates, half)
            if plan is not None:
                work, before = _work(model, few, next(iter(seen)))
                return replace(plan, work=work, before=before)
    return Plan("single")  # where the network itself fails, the real call says why


def _try_plan(
    model: nn.Module,
    few: Any,
    seen: dict[str, tuple[int, ...]],
    candidates: tuple[str, ...],
    half: torch.dtype | None,
) -> Plan | None:
    """The plan that these rows show to be right; None where the network refuses them or they cannot tell."""
    order = list(seen)
    device = device_of(model)
    samples = 3
    layers = noise_layers(model)

    def attempt(fold: str, low: int, high: int) -> Tensor | None:
        for layer in layers.values():
            layer.part, layer.repeat = (low, high), 1
        if fold == "late":
            layers[order[0]].repeat = high - low
        try:
            return call(model, repeat(few, high - low) if fold == "input" else few)
        except Exception:  # whatever the reason, this way does not serve this network
            return None

    def absorbed(names: tuple[str, ...], half: torch.dtype | None) -> Tensor | None:
        for layer in layers.values():
            layer.part, layer.repeat = (0, samples), 1
        outputs = []
        try:
            with ScaledWeights(model, names, half) as weights, casting(device, half):
                for index in range(samples):
                    weights.fill(index)
                    for layer in layers.values():
                        layer.part = (index, index + 1)
                    outputs.append(call(model, few))
        except Exception:  # as above
            return None
        return torch.cat(outputs)

    def right(found: Tensor | None) -> bool:
        return (
            found is not None and found.shape == truth.shape and bool((found - truth).abs().max() <= allowed)
        )

    with evaluating(model), _probing(model), noise(model, "shared", samples, seed=0):
        with torch.autocast(device.type, enabled=False):
            singles = [attempt("single", index, index + 1) for index in range(samples)]
            alone = [single for single in singles if single is not None]
            if len(alone) < samples or not all(bool(single.isfinite().all()) for single in alone):
                return None
            truth = torch.cat(alone)
            # a wrong plan errs by as much as samples differ; arithmetic by far less
            apart = (torch.stack(alone).float() - alone[0].float()).abs().max()
            if not bool(apart > 1e-4 * truth.abs().max()):
                return None
            allowed = 0.02 * apart + 1e-5 * truth.abs().max()
            folds = ("late", "input") if layers[order[0]].layout.batch_axis == 0 else ("input",)
            fold = next((fold for fold in folds if right(attempt(fold, 0, samples))), "single")
            names = tuple(
                name
                for name in order
                if name in candidates and (layers[name].site == "channel" or len(seen[name]) == 2)
            )
            names = names if names and right(absorbed(names, None)) else ()
        halves = bool(names) and half is not None and absorbed(names, half) is not None
    first = order[0] if fold == "late" else ""
    return Plan(fold, first, names, len(names) == len(order), half=halves)
