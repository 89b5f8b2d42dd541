r"""One pass over the data: the curvature :math:`H = \sum_i J_i^T \Lambda_i J_i` of the chosen layers, and the log-likelihood.

Three ways to add it up, from the cheapest to the most general:

* :class:`LastLayer`: the layer that gives the outputs has the Jacobian :math:`I \otimes \phi^T` of its features; no backward pass.
* :class:`LayerSums`: Linear, convolution and BatchNorm layers, from their inputs and the gradients of their outputs.
* :class:`RowSums`: any layers, from the Jacobians of single examples.
"""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.batches import device_of, dtype_of, split_batch
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.laplace.blocks import Block, Diagonal, Full, Kronecker
from flowbnn.methods.laplace.jacobian import Jacobian, flat_outputs
from flowbnn.methods.laplace.layers import CoveredLayer, Survey, shares_weights
from flowbnn.methods.laplace.output_hessian import OutputHessian, output_hessian
from flowbnn.posterior.batches import move, take

__all__ = ["Curvature", "Problem", "patches"]

PATCH_BYTES = 2**26  # of a convolution's windows that are held at once
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Hessian = Callable[[Tensor], OutputHessian]


@dataclass
class Curvature:
    """What a pass measured.

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


class Sums:
    """What one pass over the data adds up, in float64 where the device has it."""

    def __init__(self, model: nn.Module, layers: list[CoveredLayer], structure: str) -> None:
        self.model, self.layers, self.structure = model, layers, structure
        self.dtype = model.get_parameter(next(iter(layers[0].shapes))).dtype
        self.sums: dict[tuple[str, str], Tensor] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.handles: list[Any] = []

    @abstractmethod
    def add(self, inputs: Any, hessian: Hessian) -> Tensor:
        """Count a batch; ``hessian`` is of the loss in its outputs, which are returned as ``[b, C]``."""

    def blocks(self, weight: float) -> tuple[list[Block], Tensor | None]:
        """The sums times ``weight`` as Gaussians, and the full matrix where there is one."""
        if self.structure == "full":
            matrix = self.matrix().mul_(weight)  # in place, because it may be large
            together = {name: shape for layer in self.layers for name, shape in layer.shapes.items()}
            return [Full.of(together, matrix, self.dtype)], matrix
        if self.structure == "diag":
            return [
                Diagonal(one.shapes, {"values": weight * self.diagonal(one)}) for one in self.layers
            ], None
        blocks: list[Block] = []
        for layer in self.layers:
            inner, width = self.sums[layer.name, "inner"], next(iter(layer.shapes.values()))[0]
            outer = self.sums.get((layer.name, "outer"), inner.new_zeros(width, width))
            inner = weight * inner / self.counts[layer.name]
            blocks.append(Kronecker.of(layer.shapes, inner, outer, self.dtype))
        return blocks, None

    @abstractmethod
    def diagonal(self, layer: CoveredLayer) -> Tensor:
        """Of the curvature, in the order of the layer's parameters."""

    def matrix(self) -> Tensor:
        """The curvature of all layers together."""
        return self.sums["", "all"]

    def accumulate(self, layer: str, key: str, value: Tensor) -> None:
        if (layer, key) in self.sums:
            self.sums[layer, key] += value
        else:
            self.sums[layer, key] = value.to(torch.float32 if value.device.type == "mps" else torch.float64)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


class LastLayer(Sums):
    """The layer that gives the outputs."""

    def __init__(self, model: nn.Module, layers: list[CoveredLayer], structure: str) -> None:
        super().__init__(model, layers, structure)
        self.name = layers[0].name
        ndims = {len(shape) for shape in layers[0].shapes.values()}
        self.weight, self.bias = 2 in ndims, 1 in ndims
        self.handles = [model.get_submodule(self.name).register_forward_pre_hook(self._keep)]

    def _keep(self, module: nn.Module, args: Any) -> None:
        self.features = args[0].detach()

    def add(self, inputs: Any, hessian: Hessian) -> Tensor:
        with torch.no_grad():
            outputs = flat_outputs(self.model, inputs)
            curvature, features = hessian(outputs), self.features
            if self.bias:
                ones = features.new_ones(len(features), 1)
                features = torch.cat([features, ones], 1) if self.weight else ones
            self.counts[self.name] += len(features)
            if self.structure == "kron":
                self.accumulate(self.name, "inner", features.T @ features)
                self.accumulate(self.name, "outer", curvature.total())
            elif self.structure == "diag":
                self.accumulate(self.name, "values", curvature.diagonal().T @ features.square())
            else:
                count, width = outputs.shape[1], features.shape[1]
                matrix = features.new_empty(count, count, width, width)
                for index in range(count):
                    weighed = curvature.row(index)[:, index:].T.unsqueeze(2) * features  # [C - index, b, D]
                    part = weighed.transpose(1, 2) @ features
                    matrix[index, index:] = part
                    matrix[index:, index] = part
                self.accumulate(self.name, "matrix", matrix)
        return outputs

    def _ordered(self, values: Tensor) -> Tensor:
        """From a row of weights and bias for each output to all weights and then all biases."""
        if not (self.weight and self.bias):
            return values.flatten()
        return torch.cat([values[:, :-1].flatten(), values[:, -1]])

    def diagonal(self, layer: CoveredLayer) -> Tensor:
        return self._ordered(self.sums[self.name, "values"])

    def matrix(self) -> Tensor:
        matrix = self.sums[self.name, "matrix"].transpose(1, 2)
        size = matrix.shape[0] * matrix.shape[1]
        index = self._ordered(torch.arange(size, device=matrix.device).view(matrix.shape[:2]))
        return matrix.reshape(size, size)[index][:, index]


class LayerSums(Sums):
    """Linear, convolution and BatchNorm layers called once, from their inputs and the gradients of their outputs."""

    def __init__(self, model: nn.Module, layers: list[CoveredLayer], structure: str) -> None:
        super().__init__(model, layers, structure)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.is_weight = {one.name: [len(shape) > 1 for shape in one.shapes.values()] for one in layers}
        for layer in layers:
            module = model.get_submodule(layer.name)
            self.handles.append(module.register_forward_hook(partial(self._keep, layer.name)))

    def _keep(self, name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        self.outputs[name] = output
        if self.structure == "kron":
            for chunk in _chunks(module, args[0].detach()):
                flat = self._augmented(name, patches(module, chunk)).flatten(0, 1)
                self.accumulate(name, "inner", flat.T @ flat)
                self.counts[name] += len(flat)
        else:
            self.inputs[name] = args[0].detach().clone()
        return output.clone()  # an activation in place must not change what was kept

    def _augmented(self, name: str, values: Tensor) -> Tensor:
        """Patches ``[b, t, d]`` with a column of ones for a bias."""
        parts = [
            values if weight else values.new_ones(*values.shape[:-1], 1) for weight in self.is_weight[name]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def add(self, inputs: Any, hessian: Hessian) -> Tensor:
        with torch.enable_grad():
            outputs = flat_outputs(self.model, inputs)
        curvature = hessian(outputs.detach())
        kept = [self.outputs[layer.name] for layer in self.layers]
        for index in range(curvature.count):
            column = curvature.columns(index, index + 1)[:, 0]
            last = index == curvature.count - 1
            gradients = torch.autograd.grad(outputs, kept, column, retain_graph=not last, allow_unused=True)
            for layer, gradient in zip(self.layers, gradients, strict=True):
                if gradient is not None:
                    self._backward(layer, gradient)
        self.inputs.clear()
        self.outputs.clear()
        return outputs.detach()

    def _backward(self, layer: CoveredLayer, gradient: Tensor) -> None:
        module, name = self.model.get_submodule(layer.name), layer.name
        moved = gradient.unsqueeze(1) if gradient.ndim == 2 else gradient
        if not isinstance(module, nn.Linear) and gradient.ndim > 2:
            moved = gradient.flatten(2).transpose(1, 2)  # [b, t, out]
        if self.structure == "kron":
            flat = moved.reshape(-1, moved.shape[-1])
            self.accumulate(name, "outer", flat.T @ flat)
            return
        values = self.inputs[name]
        if isinstance(module, nn.Linear):
            total = moved[:, 0].square().T @ self._augmented(name, values.unsqueeze(1))[:, 0].square()
        elif isinstance(module, CONVOLUTIONS):
            total, start = torch.zeros((), device=values.device), 0
            for chunk in _chunks(module, values):
                windows = self._augmented(name, patches(module, chunk))
                rows = moved[start : start + len(chunk)].transpose(1, 2) @ windows  # [b, out, in]
                total, start = total + rows.square().sum(0), start + len(chunk)
        else:
            shape = (1, -1, *(1,) * (values.ndim - 2))
            scale = (module.running_var + module.eps).rsqrt().view(shape)  # type: ignore[operator]
            normal = (values - module.running_mean.view(shape)) * scale  # type: ignore[operator]
            products = [gradient * normal if key.endswith("weight") else gradient for key in layer.shapes]
            columns = [one.flatten(2).sum(2) if one.ndim > 2 else one for one in products]
            total = torch.stack(columns, 2).square().sum(0)
        self.accumulate(name, "values", total)

    def diagonal(self, layer: CoveredLayer) -> Tensor:
        values, is_weight = self.sums[layer.name, "values"], self.is_weight[layer.name]
        if not any(is_weight):  # the scales and shifts of a norm, or a bias alone
            return values.T.flatten()
        biases = len(is_weight) - sum(is_weight)
        widths = [values.shape[1] - biases if weight else 1 for weight in is_weight]
        return torch.cat([part.flatten() for part in values.split(widths, 1)])


class RowSums(Sums):
    """Any layers, from the Jacobians of single examples."""

    def __init__(self, model: nn.Module, layers: list[CoveredLayer], structure: str) -> None:
        super().__init__(model, layers, structure)
        self.jacobian = Jacobian(model, [name for layer in layers for name in layer.shapes])

    def add(self, inputs: Any, hessian: Hessian) -> Tensor:
        with torch.no_grad():
            outputs = flat_outputs(self.model, inputs)
            curvature = hessian(outputs)
            for start, stop, low, high in self.jacobian.chunks(inputs, curvature.count):
                columns = curvature.columns(low, high)[start:stop]
                rows = self.jacobian.rows(take(inputs, start, stop), columns)
                flat = torch.cat([rows[name].flatten(2) for name in self.jacobian.names], 2).flatten(0, 1)
                self.accumulate(
                    "", "all", flat.square().sum(0) if self.structure == "diag" else flat.T @ flat
                )
        return outputs

    def diagonal(self, layer: CoveredLayer) -> Tensor:
        sizes = [sum(math.prod(shape) for shape in one.shapes.values()) for one in self.layers]
        return self.sums["", "all"].split(sizes)[self.layers.index(layer)].clone()


def patches(module: nn.Module, values: Tensor) -> Tensor:
    """What a layer multiplies by its weights: ``[b, positions, in]``, for a convolution the windows it sees."""
    if not isinstance(module, CONVOLUTIONS):
        return values.reshape(-1, 1, values.shape[-1])
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(values, module._reversed_padding_repeated_twice, mode=mode)
    dims = len(module.kernel_size)
    sizes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (kernel, stride, dilation) in enumerate(sizes):
        padded = padded.unfold(2 + axis, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    # [b, channels, *positions, *kernel] to [b, positions, channels * kernel]
    moved = padded.permute(0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
    return moved.reshape(len(values), moved.shape[1 : 1 + dims].numel(), -1)


def _chunks(module: nn.Module, values: Tensor) -> list[Tensor]:
    """Examples few enough that their patches fit."""
    if not isinstance(module, CONVOLUTIONS) or not len(values):
        return [values]
    size = values[0].numel() * values.element_size() * math.prod(module.kernel_size)
    return list(values.split(max(1, PATCH_BYTES // max(1, size))))


@dataclass
class Problem:
    """The loss of a network's data as a function of the weights of some layers.

    Args:
        model: the network, in evaluation mode.
        layers: those that get a posterior.
        seen: what a small pass of the network showed.
        likelihood: observation model of the targets given the outputs.
        batches: a pass over the data, by the description of its progress bar.
        check: of the targets of a batch.
        structure: of the curvature: ``"kron"``, ``"diag"`` or ``"full"``.
        kind: of the Hessian in the outputs: ``"ggn"``, ``"fisher"`` or ``"sampled"``, with targets drawn from ``seed``.
        total: the number of examples that those seen stand for.
    """

    model: nn.Module
    layers: list[CoveredLayer]
    seen: Survey
    likelihood: Likelihood
    batches: Callable[[str], Iterable[Any]]
    check: Callable[[Any], None]
    structure: str
    kind: str
    seed: int
    total: int | None = None

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters of the layers, by name."""
        return {name: self.model.get_parameter(name) for layer in self.layers for name in layer.shapes}

    @property
    def direct(self) -> str | None:
        """The layer that gives the outputs, where it is the only one covered."""
        return self.seen.direct if [layer.name for layer in self.layers] == [self.seen.direct] else None

    def examples(self, description: str) -> Iterator[tuple[Any, Tensor]]:
        """Inputs and targets of every batch, on the network's device."""
        device, dtype = device_of(self.model), dtype_of(self.model)
        for batch in self.batches(description):
            self.check(batch)
            inputs, targets = split_batch(batch)
            yield move(inputs, device, dtype), targets.to(device)

    def measure(self) -> Curvature:
        """Curvature and log-likelihood, by one pass over the data."""
        way: type[Sums] = RowSums
        if self.direct is not None:
            way = LastLayer
        elif self.structure == "kron" or (self.structure == "diag" and self._by_layer()):
            way = LayerSums
        sums = way(self.model, self.layers, self.structure)
        generator = torch.Generator().manual_seed(self.seed)
        log_likelihood, count = torch.zeros((), dtype=torch.float64), 0
        try:
            for inputs, targets in self.examples("curvature"):
                hessian = partial(
                    output_hessian, self.likelihood, targets=targets, kind=self.kind, generator=generator
                )
                with torch.no_grad():
                    outputs = sums.add(inputs, hessian)
                    log_likelihood += self.likelihood.log_prob(outputs, targets).double().sum().cpu()
                count += len(outputs)
        finally:
            sums.close()
        if not bool(torch.isfinite(log_likelihood)):
            raise FlowBNNError(
                "the log-likelihood of these data is not finite; train, or clean the data", kind="finite"
            )
        weight = 1.0 if self.total is None else self.total / count
        with torch.no_grad():
            blocks, matrix = sums.blocks(weight)
        return Curvature(blocks, matrix, float(log_likelihood) * weight, count)

    def _by_layer(self) -> bool:
        """Whether a diagonal can be had from inputs and output gradients: layers called once, with the examples first."""

        def serves(name: str) -> bool:
            module, shape = self.model.get_submodule(name), self.seen.shapes.get(name, torch.Size())
            kind = type(module)
            known = (
                (kind is nn.Linear and len(shape) == 2)
                or (kind in CONVOLUTIONS and module.groups == 1)
                or (kind in BATCH_NORMS and module.running_mean is not None)
            )
            called_once = self.seen.calls[name] == 1 and len(shape) > 0 and shape[0] == self.seen.rows
            return known and called_once and shares_weights(self.model, name) is None

        return all(serves(layer.name) for layer in self.layers)

    def gradient(self, weight: float) -> dict[str, Tensor]:
        """Of the log-likelihood of all data, each example counted ``weight`` times."""
        weights = self.weights
        total = {name: torch.zeros_like(value) for name, value in weights.items()}
        flags = {name: value.requires_grad for name, value in weights.items()}
        for value in weights.values():
            value.requires_grad_()
        try:
            for inputs, targets in self.examples("gradient"):
                with torch.enable_grad():
                    outputs = flat_outputs(self.model, inputs)
                    fitted = self.likelihood.log_prob(outputs, targets).sum()
                parts = torch.autograd.grad(fitted, list(weights.values()), materialize_grads=True)
                for name, part in zip(total, parts, strict=True):
                    total[name] += weight * part
        finally:
            for name, flag in flags.items():
                weights[name].requires_grad_(flag)
        return total
