"""One pass over the data: the curvature of the chosen layers, as blocks, and the log-likelihood of the network as it is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import move, split_batch
from flowbnn.inference.laplace_blocks import Block, Diagonal, Full, Kronecker
from flowbnn.inference.laplace_layers import CoveredLayer, Survey
from flowbnn.inference.laplace_outputs import OutputCurvature, output_curvature
from flowbnn.inference.laplace_rows import flat_outputs
from flowbnn.inference.laplace_sums import LastLayer, LayerSums, RowSums, Sums
from flowbnn.inference.passes import device_of, dtype_of
from flowbnn.likelihoods import Likelihood

__all__ = ["Curvature", "gradient", "is_direct", "measure"]


@dataclass
class Curvature:
    """What a pass found.

    Args:
        blocks: one for each layer, or one for all ("full").
        matrix: the full curvature, where there is one.
        log_likelihood: of all targets.
        seen: examples.
    """

    blocks: list[Block]
    matrix: Tensor | None
    log_likelihood: float
    seen: int


def is_direct(layers: list[CoveredLayer], seen: Survey) -> bool:
    """Whether the layer that gives the outputs is all there is to cover."""
    return len(layers) == 1 and layers[0].name == seen.direct


def by_layer(model: nn.Module, layers: list[CoveredLayer], seen: Survey) -> bool:
    """Whether a diagonal can be had from the inputs and output gradients of the layers, each called once with the examples first."""
    holders: dict[str, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[str(id(parameter))] = holders.get(str(id(parameter)), 0) + 1
    for layer in layers:
        module = model.get_submodule(layer.name)
        kind, shape = type(module), seen.shapes.get(layer.name, torch.Size())
        if seen.calls[layer.name] != 1 or not len(shape) or shape[0] != seen.rows:
            return False
        if any(holders[str(id(p))] > 1 for p in module.parameters(recurse=False)):
            return False
        if kind is nn.Linear and len(shape) == 2:
            continue
        if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.groups == 1:
            continue
        if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and module.running_mean is not None:
            continue
        return False
    return True


def measure(
    model: nn.Module,
    layers: list[CoveredLayer],
    structure: str,
    seen: Survey,
    likelihood: Likelihood,
    batches: Iterable[Any],
    kind: str,
    check: Callable[[Any], None],
    generator: torch.Generator,
    total: int | None = None,
) -> Curvature:
    """Go through the data once; with ``total``, what was seen stands for so many examples."""
    names = [name for layer in layers for name in layer.names]
    sums: Sums
    if is_direct(layers, seen):
        sums = LastLayer(model, layers[0], structure)
    elif structure == "kron" or (structure == "diag" and by_layer(model, layers, seen)):
        sums = LayerSums(model, layers, structure)
    else:
        sums = RowSums(model, names, structure)
    device, dtype = device_of(model), dtype_of(model)
    log_likelihood, count = torch.zeros((), dtype=torch.float64), 0
    try:
        for batch in batches:
            check(batch)
            inputs, targets = split_batch(batch)
            inputs, targets = move(inputs, device, dtype), targets.to(device)

            def curve(outputs: Tensor, targets: Tensor = targets) -> OutputCurvature:
                return output_curvature(likelihood, outputs, targets, kind, generator)

            with torch.no_grad():
                outputs = sums.add(inputs, curve)
                log_likelihood += likelihood.log_prob(outputs, targets).double().sum().cpu()
            count += len(outputs)
    finally:
        sums.close()
    if not count:
        raise FlowBNNError("the loader is empty: there is nothing to measure a curvature on")
    if not bool(torch.isfinite(log_likelihood)):
        raise FlowBNNError(
            "the network's log-likelihood of these data is not finite; train it, or clean the data"
        )
    weight = 1.0 if total is None else total / count
    own = dict(model.named_parameters())
    shapes = {layer.name: {name: tuple(own[name].shape) for name in layer.names} for layer in layers}
    with torch.no_grad():
        blocks, matrix = _blocks(sums, layers, shapes, structure, weight, own[names[0]].dtype)
    return Curvature(blocks, matrix, float(log_likelihood) * weight, count)


def _blocks(
    sums: Sums,
    layers: list[CoveredLayer],
    shapes: dict[str, dict[str, tuple[int, ...]]],
    structure: str,
    weight: float,
    dtype: torch.dtype,
) -> tuple[list[Block], Tensor | None]:
    if structure == "full":
        assert isinstance(sums, LastLayer | RowSums)
        matrix = (sums.matrix() if isinstance(sums, LastLayer) else sums.sum).mul_(
            weight
        )  # no copy: it may be large
        together = {name: shape for each in shapes.values() for name, shape in each.items()}
        return [Full.of(together, matrix, dtype)], matrix
    blocks: list[Block] = []
    if isinstance(sums, RowSums):
        sizes = [Block.count(shapes[layer.name]) for layer in layers]
        parts = sums.sum.split(sizes)
        for layer, part in zip(layers, parts, strict=True):
            blocks.append(Diagonal(shapes[layer.name], {"values": weight * part.clone()}))
        return blocks, None
    assert isinstance(sums, LastLayer | LayerSums)
    for layer in layers:
        own = shapes[layer.name]
        if structure == "diag":
            blocks.append(Diagonal(own, {"values": weight * sums.diagonal(layer)}))
            continue
        if isinstance(sums, LastLayer):
            inner, outer, count = sums.sums["inner"], sums.sums["outer"], sums.seen
        else:
            inner, count = sums.sums[layer.name]["inner"], sums.seen[layer.name]
            width = next(iter(own.values()))[0]
            outer = sums.sums[layer.name].get("outer", inner.new_zeros(width, width))
        blocks.append(Kronecker.of(own, weight * inner / count, outer, dtype))
    return blocks, None


def gradient(
    model: nn.Module, names: list[str], likelihood: Likelihood, batches: Iterable[Any], weight: float
) -> dict[str, Tensor]:
    """Of the log-likelihood of all data."""
    own = dict(model.named_parameters())
    device, dtype = device_of(model), dtype_of(model)
    found = {name: torch.zeros_like(own[name]) for name in names}
    flags = {name: own[name].requires_grad for name in names}
    for name in names:
        own[name].requires_grad_()
    try:
        for batch in batches:
            inputs, targets = split_batch(batch)
            with torch.enable_grad():
                outputs = flat_outputs(model, move(inputs, device, dtype))
                total = likelihood.log_prob(outputs, targets.to(device)).sum()
            parts = torch.autograd.grad(total, [own[name] for name in names], allow_unused=True)
            for name, part in zip(names, parts, strict=True):
                if part is not None:
                    found[name] += weight * part
    finally:
        for name, flag in flags.items():
            own[name].requires_grad_(flag)
    return found
