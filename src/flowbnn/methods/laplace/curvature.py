"""One pass over the data: the curvature of the chosen layers, as blocks, and the log-likelihood of the network as it is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.laplace.blocks import Block, Diagonal, Full, Kronecker
from flowbnn.methods.laplace.jacobian import Jacobian, flat_outputs
from flowbnn.methods.laplace.layers import NORMS, CoveredLayer, Survey
from flowbnn.methods.laplace.output_hessian import OutputCurvature, output_curvature
from flowbnn.posterior.batches import move, split_batch, take
from flowbnn.posterior.forward import device_of, dtype_of

__all__ = [
    "Curvature",
    "LastLayer",
    "LayerSums",
    "RowSums",
    "Sums",
    "gradient",
    "is_direct",
    "measure",
    "patches",
    "wide",
]

# -------------------- laplace_sums.py

PATCH_BYTES = 2**26
Curve = Callable[[Tensor], OutputCurvature]


def wide(device: torch.device) -> torch.dtype:
    """The precision in which to sum."""
    return torch.float32 if device.type == "mps" else torch.float64


class Sums:
    """What one pass over the data adds up. ``result`` holds tensors by the name of the layer."""

    def add(self, inputs: Any, curve: Curve) -> Tensor:
        """Count a batch; ``curve`` gives the curvature in its outputs. Returns the outputs ``[b, C]``."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the network as it was."""


class LastLayer(Sums):
    r"""The layer that gives the outputs, with the Jacobian :math:`I \otimes \phi^T` of its features: no pass goes backward."""

    def __init__(self, model: nn.Module, layer: CoveredLayer, structure: str) -> None:
        self.model, self.structure, self.seen = model, structure, 0
        module = model.get_submodule(layer.name)
        own = dict(model.named_parameters())
        kinds = {own[name].ndim for name in layer.names}
        self.weight, self.bias = 2 in kinds, 1 in kinds
        self.features: Tensor = torch.empty(0)
        self.handle = module.register_forward_pre_hook(self._see)
        self.sums: dict[str, Tensor] = {}

    def _see(self, module: nn.Module, args: Any) -> None:
        self.features = args[0].detach()

    def close(self) -> None:
        self.handle.remove()

    def _add(self, name: str, value: Tensor) -> None:
        value = value.to(wide(value.device))
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add(self, inputs: Any, curve: Curve) -> Tensor:
        with torch.no_grad():
            outputs = flat_outputs(self.model, inputs)
            curvature, features = curve(outputs), self.features
            if self.bias:
                ones = features.new_ones(len(features), 1)
                features = torch.cat([features, ones], 1) if self.weight else ones
            self.seen += len(features)
            if self.structure == "kron":
                self._add("inner", features.T @ features)
                self._add("outer", curvature.total())
            elif self.structure == "diag":
                self._add("values", curvature.diagonal().T @ features.square())
            else:
                count, width = outputs.shape[1], features.shape[1]
                found = features.new_empty(count, count, width, width)
                for index in range(count):
                    weighed = curvature.row(index)[:, index:].T.unsqueeze(2) * features  # [C - index, b, D]
                    part = weighed.transpose(1, 2) @ features
                    found[index, index:] = part
                    found[index:, index] = part
                self._add("matrix", found)
        return outputs

    def order(self, values: Tensor) -> Tensor:
        """From a row of weights and bias for each output to all weights and then all biases."""
        if not (self.weight and self.bias):
            return values.flatten()
        return torch.cat([values[:, :-1].flatten(), values[:, -1]])

    def diagonal(self, layer: CoveredLayer) -> Tensor:
        """Of the one layer there is."""
        return self.order(self.sums["values"])

    def matrix(self) -> Tensor:
        found = self.sums["matrix"].transpose(1, 2)
        size = found.shape[0] * found.shape[1]
        index = self.order(torch.arange(size, device=found.device).view(found.shape[:2]))
        return found.reshape(size, size)[index][:, index]


class LayerSums(Sums):
    """Linear, convolution and normalization layers called once, from their inputs and the gradients of their outputs."""

    def __init__(self, model: nn.Module, layers: list[CoveredLayer], structure: str) -> None:
        self.model, self.layers, self.structure = model, layers, structure
        self.sums: dict[str, dict[str, Tensor]] = {layer.name: {} for layer in layers}
        self.seen = dict.fromkeys(self.sums, 0)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        own = dict(model.named_parameters())
        self.chosen = {id(own[name]) for layer in layers for name in layer.names}
        self.kinds = {layer.name: [own[name].ndim > 1 for name in layer.names] for layer in layers}
        self.handles = [
            model.get_submodule(layer.name).register_forward_hook(self._see(layer.name)) for layer in layers
        ]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _see(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            output = output if output.requires_grad else output.detach().requires_grad_()
            self.outputs[name] = output
            if self.structure == "kron":
                self._inner(name, module, args[0].detach())
            else:
                self.inputs[name] = args[0].detach().clone()
            return output.clone()  # what changes it in place must not change what was kept

        return hook

    def _add(self, name: str, key: str, value: Tensor) -> None:
        sums, value = self.sums[name], value.to(wide(value.device))
        sums[key] = sums[key] + value if key in sums else value

    def _inner(self, name: str, module: nn.Module, values: Tensor) -> None:
        for some in _parts(module, values):
            flat = self._augmented(name, patches(module, some)).flatten(0, 1)
            self._add(name, "inner", flat.T @ flat)
            self.seen[name] += len(flat)

    def _augmented(self, name: str, values: Tensor) -> Tensor:
        """Patches ``[b, t, d]`` with a column of ones for a bias."""
        parts = [values if weight else values.new_ones(*values.shape[:-1], 1) for weight in self.kinds[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def add(self, inputs: Any, curve: Curve) -> Tensor:
        with torch.enable_grad():
            outputs = flat_outputs(self.model, inputs)
        curvature = curve(outputs.detach())
        kept = [self.outputs[layer.name] for layer in self.layers]
        for index in range(curvature.count):
            column = curvature.columns(index, index + 1)[:, 0]
            last = index == curvature.count - 1
            gradients = torch.autograd.grad(outputs, kept, column, retain_graph=not last, allow_unused=True)
            for layer, gradient in zip(self.layers, gradients, strict=True):
                if gradient is not None:
                    self._backward(layer.name, gradient)
        self.inputs.clear()
        self.outputs.clear()
        return outputs.detach()

    def _backward(self, name: str, gradient: Tensor) -> None:
        module = self.model.get_submodule(name)
        moved = gradient.unsqueeze(1) if gradient.ndim == 2 else gradient
        if not isinstance(module, nn.Linear) and gradient.ndim > 2:
            moved = gradient.flatten(2).transpose(1, 2)  # [b, t, out]
        if self.structure == "kron":
            flat = moved.reshape(-1, moved.shape[-1])
            self._add(name, "outer", flat.T @ flat)
            return
        values = self.inputs[name]
        if isinstance(module, nn.Linear):
            found = moved[:, 0].square().T @ self._augmented(name, values.unsqueeze(1))[:, 0].square()
        elif isinstance(module, NORMS):
            found = self._norm(module, values, gradient)
        else:
            found, start = torch.zeros((), device=values.device), 0
            for some in _parts(module, values):
                part = self._augmented(name, patches(module, some))
                each = moved[start : start + len(some)].transpose(1, 2) @ part  # [b, out, in]
                found, start = found + each.square().sum(0), start + len(some)
        self._add(name, "values", found)

    def _norm(self, module: Any, values: Tensor, gradient: Tensor) -> Tensor:
        shape = (1, -1, *(1,) * (values.ndim - 2))
        scale = (module.running_var + module.eps).rsqrt().view(shape)
        normal = (values - module.running_mean.view(shape)) * scale
        columns = []
        for key in ("weight", "bias"):
            parameter = getattr(module, key)
            if parameter is not None and id(parameter) in self.chosen:
                product = gradient * normal if key == "weight" else gradient
                columns.append(product.flatten(2).sum(2) if product.ndim > 2 else product)
        return torch.stack(columns, 2).square().sum(0)

    def diagonal(self, layer: CoveredLayer) -> Tensor:
        """In the order of the layer's names."""
        module = self.model.get_submodule(layer.name)
        values, kinds = self.sums[layer.name]["values"], self.kinds[layer.name]
        if isinstance(module, NORMS):
            return values.T.flatten()
        widths = [values.shape[1] - sum(not kind for kind in kinds) if kind else 1 for kind in kinds]
        return torch.cat([part.flatten() for part in values.split(widths, 1)])


class RowSums(Sums):
    """Any layers, from the Jacobians of single examples."""

    def __init__(self, model: nn.Module, names: list[str], structure: str) -> None:
        self.model, self.structure = model, structure
        self.jacobian = Jacobian(model, names)
        first = next(iter(self.jacobian.values.values()))
        size, kind = self.jacobian.size, wide(first.device)
        shape = (size,) if structure == "diag" else (size, size)
        self.sum = torch.zeros(shape, dtype=kind, device=first.device)

    def add(self, inputs: Any, curve: Curve) -> Tensor:
        with torch.no_grad():
            outputs = flat_outputs(self.model, inputs)
            curvature = curve(outputs)
            for start, stop, low, high in self.jacobian.chunks(inputs, curvature.count):
                columns = curvature.columns(low, high)[start:stop]
                found = self.jacobian.rows(take(inputs, start, stop), columns)
                flat = torch.cat([found[name].flatten(2) for name in self.jacobian.names], 2).flatten(0, 1)
                self.sum += flat.square().sum(0) if self.structure == "diag" else flat.T @ flat
        return outputs


def patches(module: nn.Module, values: Tensor) -> Tensor:
    """What a layer multiplies by its weights: ``[b, positions, in]``, for a convolution the windows it sees."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return values.reshape(-1, 1, values.shape[-1])
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(values, module._reversed_padding_repeated_twice, mode=mode)
    dims = len(module.kernel_size)
    for axis, (kernel, step, gap) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        padded = padded.unfold(2 + axis, (kernel - 1) * gap + 1, step)
        padded = padded[..., ::gap]
    # [b, channels, *positions, *kernel] to [b, positions, channels * kernel]
    order = (0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
    moved = padded.permute(order)
    positions = moved.shape[1 : 1 + dims].numel()
    return moved.reshape(len(values), positions, -1)


def _parts(module: nn.Module, values: Tensor) -> list[Tensor]:
    """Examples few enough that their patches fit."""
    if isinstance(module, nn.Linear) or not len(values):
        return [values]
    kernel = getattr(module, "kernel_size", (1,))
    each = values[0].numel() * values.element_size()
    for size in kernel:
        each *= size
    return list(values.split(max(1, PATCH_BYTES // max(1, each))))


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
