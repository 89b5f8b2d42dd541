r"""Many samples of a network's outputs, in few and full passes.

The sample axis is folded into the batch: ``S`` blocks of the same inputs. Where the network allows it the fold happens at the
first stochastic layer, so that what comes before is computed once; a skip connection around that layer, say, does not allow it.
A network in which some noisy layer sees no examples at all (the embedding of positions) cannot fold, and takes its samples one
by one. Which of the three it is, is found out on two rows, by comparing with samples taken one by one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import call, move, repeat, rows, take, tensors_of
from flowbnn.layers import noise, noise_layers

__all__ = ["device_of", "dtype_of", "evaluating", "max_rows", "observe", "plan_for", "sample_outputs"]


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """The precision of the network's weights, which its inputs are brought to."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def device_of(model: nn.Module) -> torch.device:
    tensor = next(iter(model.parameters()), None)
    return tensor.device if tensor is not None else torch.device("cpu")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; every module's own training flag comes back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


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


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (ValueError, OSError, AttributeError):
        pages = 2**30
    return min(pages, 2**28)  # past the caches a CPU gains nothing from more rows at once


def max_rows(model: nn.Module, inputs: Any) -> int:
    """How many rows fit a pass: the free memory of the device over what one row needs at the network's widest place."""
    widest = 0

    def measure(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal widest
        sizes = [t.numel() * t.element_size() for t in (*args, output) if isinstance(t, Tensor)]
        widest = max(widest, sum(sizes))

    handles = [module.register_forward_hook(measure) for module in model.modules()]
    few = take(inputs, 0, min(2, rows(inputs)))
    try:
        with evaluating(model), noise(model, "off") if noise_layers(model) else evaluating(model):
            call(model, few)
    finally:
        for handle in handles:
            handle.remove()
    # the noise and the product live beside a layer's input and output
    per_row = max(1, 3 * widest // rows(few))
    return int(min(max(_free_memory(device_of(model)) // per_row, 16), 2**17))


@dataclass(frozen=True)
class Plan:
    """How a network takes its samples: ``"late"`` (at the layer ``first``), ``"input"`` or ``"single"``; and its widest row."""

    fold: str
    first: str = ""


_PLANS: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def plan_for(model: nn.Module, inputs: Any) -> Plan:
    """The plan for inputs of this shape, found once and remembered with the network."""
    known = _PLANS.setdefault(model, {})
    layouts = tuple((name, layer.layout, layer.site) for name, layer in noise_layers(model).items())
    key = (layouts, tuple(tensor.shape[1:] for tensor in tensors_of(inputs)))
    if key not in known:
        known[key] = _find_plan(model, take(inputs, 0, 2)) if rows(inputs) > 1 else Plan("single")
        if rows(inputs) == 1:
            return known.pop(key)  # one row tells nothing; ask again when there are two
    return known[key]


def _find_plan(model: nn.Module, few: Any) -> Plan:
    order = list(observe(model, few))
    samples = 3
    with evaluating(model), noise(model, "shared", samples, seed=0):
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

        singles = [attempt("single", index, index + 1) for index in range(samples)]
        if any(single is None for single in singles):
            return Plan("single")  # the network itself fails: let the real call say why
        truth = torch.cat([single for single in singles if single is not None])
        for fold in ("late", "input"):
            if fold == "late" and not (order and layers[order[0]].layout.batch_axis == 0):
                continue
            found = attempt(fold, 0, samples)
            if (
                found is not None
                and found.shape == truth.shape
                and torch.allclose(found, truth, rtol=1e-3, atol=1e-4)
            ):
                return Plan(fold, order[0] if fold == "late" else "")
    return Plan("single")


def sample_outputs(
    model: nn.Module,
    inputs: Any,
    samples: int,
    *,
    shared: bool = True,
    seed: int | None = None,
    max_batch: int | None = None,
) -> Tensor:
    """Outputs ``[samples, batch, ...]`` of a stochastic network.

    Args:
        shared: the same draws for all inputs ("the same networks"), or a draw of its own for every example.
        seed: of the draws; None takes one from torch's global generator.
        max_batch: rows in one pass; None measures what the device holds.
    """
    if not isinstance(samples, int) or samples < 1:
        raise FlowBNNError(f"samples is a whole number of at least 1, not {samples}")
    if max_batch is not None and max_batch < 1:
        raise FlowBNNError(f"max_batch is at least 1, not {max_batch}")
    device = device_of(model)
    inputs = move(inputs, device, dtype_of(model))
    batch = rows(inputs)
    if batch == 0:
        raise FlowBNNError("there is nothing to predict: the batch holds no rows")
    limit = max_batch or max_rows(model, inputs)
    plan = plan_for(model, inputs)
    at_once = (
        1 if plan.fold == "single" else min(samples, limit)
    )  # samples in one pass, and below: inputs in one pass
    step = max(1, limit // at_once)
    seed = int(torch.randint(2**31 - 1, ())) if seed is None else seed
    generator = None if shared else torch.Generator(device).manual_seed(seed)
    with (
        evaluating(model),
        noise(model, "shared" if shared else "sample", samples if shared else 1, seed, generator),
    ):
        layers = noise_layers(model)
        columns = []
        for start in range(0, batch, step):
            some = take(inputs, start, min(start + step, batch))
            count = rows(some)
            blocks = []
            for low in range(0, samples, at_once):
                high = min(low + at_once, samples)
                for layer in layers.values():
                    layer.part = (low, high)
                if plan.fold == "late":
                    layers[plan.first].repeat = high - low
                outputs = call(model, repeat(some, high - low) if plan.fold == "input" else some)
                if outputs.shape[0] != (high - low) * count:
                    raise FlowBNNError(
                        f"the network gave {outputs.shape[0]} rows of outputs for {(high - low) * count} rows of inputs; "
                        "prediction needs one row each, with the examples on the first axis"
                    )
                blocks.append(outputs.view(high - low, count, *outputs.shape[1:]))
            columns.append(blocks[0] if len(blocks) == 1 else torch.cat(blocks))
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)
