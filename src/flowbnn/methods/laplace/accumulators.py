r"""Accumulators of the curvature :math:`H = \sum_i J_i^T \Lambda_i J_i` of selected layers over batches.

From the cheapest to the most general:

* :class:`LastLayerAccumulator`: the output layer alone. Its Jacobian is :math:`I \otimes \phi^T` in its features :math:`\phi`, so no
  backward pass is needed.
* :class:`LayerwiseAccumulator`: Linear, convolution and BatchNorm layers, from their inputs and the gradients of their outputs.
* :class:`JacobianAccumulator`: any layers, from the Jacobians of single examples.
"""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.batches import take
from flowbnn.errors import FlowBNNError
from flowbnn.methods.laplace.blocks import CurvatureBlock, DiagonalBlock, FullBlock, KroneckerBlock
from flowbnn.methods.laplace.derivatives import Jacobian, OutputHessian, batched_outputs, layer_rows
from flowbnn.methods.laplace.layer_selection import Layers, channels_last

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
HessianFunction = Callable[[Tensor], OutputHessian]


class CurvatureAccumulator:
    """Base class for sums over the batches of one pass, in float64.

    Args:
        model: Network in evaluation mode.
        layers: Layers whose curvature is accumulated.
        structure: Structure of the curvature, ``"kron"``, ``"diag"`` or ``"full"``.
    """

    max_columns = 2048  # backward passes over a batch, each of which takes about a millisecond at least

    def __init__(self, model: nn.Module, layers: Layers, structure: str) -> None:
        self.model, self.layers, self.structure = model, layers, structure
        self.sums: dict[tuple[str, str], Tensor] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.hooks = ExitStack()

    @abstractmethod
    def add(self, inputs: Any, hessian: HessianFunction) -> Tensor:
        """Adds a batch and returns its outputs as ``[b, C]``, or with their axes of positions.

        Args:
            inputs: Inputs of the network.
            hessian: Function from outputs to the Hessian of the loss in them.
        """

    def check_columns(self, count: int) -> None:
        """Raises FlowBNNError if a Hessian has so many columns that their backward passes would take hours."""
        if count > self.max_columns:
            text = f"exact curvature needs at most {self.max_columns:,} outputs, got {count:,}; set curvature='sampled'"
            raise FlowBNNError(text, kind="outputs", argument="curvature")

    def accumulate(self, layer: str, key: str, value: Tensor) -> None:
        """Adds a tensor to the sum of this layer and key."""
        if (layer, key) in self.sums:
            self.sums[layer, key] += value
        else:
            self.sums[layer, key] = value.double()

    def blocks(self, weight: float) -> tuple[list[CurvatureBlock], Tensor | None]:
        """Returns the sums times ``weight`` as Gaussians, and the full matrix where the structure is full."""
        all_shapes = {name: shape for shapes in self.layers.values() for name, shape in shapes.items()}
        dtype = self.model.get_parameter(next(iter(all_shapes))).dtype
        if self.structure == "full":
            matrix = self.matrix().mul_(weight)  # in place, because it may be large
            return [FullBlock.from_matrix(all_shapes, matrix, dtype)], matrix
        blocks: list[CurvatureBlock] = []
        for layer, shapes in self.layers.items():
            if self.structure == "diag":
                blocks.append(DiagonalBlock(shapes, {"values": weight * self.diagonal(layer)}))
                continue
            inner, width = self.sums[layer, "inner"], next(iter(shapes.values()))[0]
            outer = self.sums.get((layer, "outer"), inner.new_zeros(width, width))
            blocks.append(
                KroneckerBlock.from_factors(shapes, weight * inner / self.counts[layer], outer, dtype)
            )
        return blocks, None

    def diagonal(self, layer: str) -> Tensor:
        """Returns the diagonal of the curvature, in the order of the parameters of the layer."""
        values = self.sums.get((layer, "values"))
        if values is None:  # a layer that is never called has no curvature
            size = sum(math.prod(shape) for shape in self.layers[layer].values())
            return next(iter(self.sums.values())).new_zeros(size)
        return self.parameter_order(layer, values)

    def matrix(self) -> Tensor:
        """Returns the joint curvature matrix of all layers."""
        return self.sums["", "all"]

    def columns(self, layer: str, values: Tensor) -> Tensor:
        """Returns the factors of the parameters of a layer: its inputs ``[..., d]``, and a one for the bias."""
        ones = values.new_ones(*values.shape[:-1], 1)
        return torch.cat([values if len(shape) > 1 else ones for shape in self.layers[layer].values()], -1)

    def parameter_order(self, layer: str, values: Tensor) -> Tensor:
        """Flattens values ``[out, columns]`` in the order of the parameters of the layer."""
        widths = [math.prod(shape[1:]) for shape in self.layers[layer].values()]
        return torch.cat([piece.flatten() for piece in values.split(widths, 1)])


class LastLayerAccumulator(CurvatureAccumulator):
    """Curvature of the output layer, without a backward pass."""

    def __init__(self, model: nn.Module, layers: Layers, structure: str) -> None:
        super().__init__(model, layers, structure)
        self.name = next(iter(layers))
        layer = model.get_submodule(self.name)
        self.hooks.enter_context(layer.register_forward_pre_hook(self._store_features))

    def _store_features(self, module: nn.Module, args: Any) -> None:
        self.features = self.columns(self.name, channels_last(module, args[0].detach()).flatten(0, -2))

    def add(self, inputs: Any, hessian: HessianFunction) -> Tensor:
        outputs = batched_outputs(self.model, inputs)
        curvature: Any = layer_rows(hessian(outputs), outputs, self.model.get_submodule(self.name))
        features = self.features
        self.counts[self.name] += len(features)
        if self.structure == "kron":
            self.accumulate(self.name, "inner", features.T @ features)
            self.accumulate(self.name, "outer", curvature.total())
        elif self.structure == "diag":
            self.accumulate(self.name, "values", curvature.diagonal().T @ features.square())
        else:
            num_outputs, width = next(iter(self.layers[self.name].values()))[0], features.shape[1]
            matrix = features.new_empty(num_outputs, num_outputs, width, width)
            for index in range(num_outputs):
                weighted = curvature.row(index)[:, index:].T.unsqueeze(2) * features  # [C - index, b, D]
                block_row = weighted.transpose(1, 2) @ features
                matrix[index, index:] = block_row
                matrix[index:, index] = block_row
            self.accumulate(self.name, "matrix", matrix)
        return outputs

    def matrix(self) -> Tensor:
        matrix = self.sums[self.name, "matrix"].transpose(1, 2)
        size = matrix.shape[0] * matrix.shape[1]
        index = self.parameter_order(
            self.name, torch.arange(size, device=matrix.device).view(matrix.shape[:2])
        )
        return matrix.reshape(size, size)[index][:, index]


class LayerwiseAccumulator(CurvatureAccumulator):
    """Curvature of Linear, convolution and BatchNorm layers that are called once in a pass."""

    def __init__(self, model: nn.Module, layers: Layers, structure: str) -> None:
        super().__init__(model, layers, structure)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for name in layers:
            hook = partial(self._store_activations, name)
            self.hooks.enter_context(model.get_submodule(name).register_forward_hook(hook, prepend=True))

    def _store_activations(self, name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        self.outputs[name] = output
        if self.structure == "kron":
            for chunk in _chunks(module, args[0].detach()):
                flat = self.columns(name, input_patches(module, chunk)).flatten(0, 1)
                self.accumulate(name, "inner", flat.T @ flat)
                self.counts[name] += len(flat)
        else:
            self.inputs[name] = args[0].detach().clone()
        return output.clone()  # an in-place activation must not change the stored tensor

    def add(self, inputs: Any, hessian: HessianFunction) -> Tensor:
        with torch.enable_grad():
            outputs = batched_outputs(self.model, inputs)
            flat = outputs.reshape(len(outputs), -1)
        curvature = hessian(outputs.detach())
        self.check_columns(curvature.count)
        activations = [self.outputs[name] for name in self.layers]
        for index in range(curvature.count):
            column = curvature.columns(index, index + 1)[:, 0]
            retain = index < curvature.count - 1
            gradients = torch.autograd.grad(flat, activations, column, retain_graph=retain, allow_unused=True)
            for name, gradient in zip(self.layers, gradients, strict=True):
                if gradient is not None:
                    self._add_gradient(name, self.model.get_submodule(name), gradient)
        self.inputs.clear()
        self.outputs.clear()
        return outputs.detach()

    def _add_gradient(self, name: str, module: nn.Module, gradient: Tensor) -> None:
        """Adds the contribution of one column of the Hessian root, given its gradient in the output of the layer."""
        positions = gradient.unsqueeze(1) if gradient.ndim == 2 else gradient
        if not isinstance(module, nn.Linear) and gradient.ndim > 2:
            positions = gradient.flatten(2).transpose(1, 2)  # [b, t, out]
        if self.structure == "kron":
            flat = positions.reshape(-1, positions.shape[-1])
            self.accumulate(name, "outer", flat.T @ flat)
            return
        values = self.inputs[name]
        if isinstance(module, nn.Linear):
            total = gradient.square().T @ self.columns(name, values).square()
        elif isinstance(module, CONVOLUTIONS):
            total, start = torch.zeros((), device=values.device), 0
            for chunk in _chunks(module, values):
                windows = self.columns(name, input_patches(module, chunk))
                rows = positions[start : start + len(chunk)].transpose(1, 2) @ windows  # [b, out, in]
                total, start = total + rows.square().sum(0), start + len(chunk)
        else:
            total = self._batch_norm_squares(name, module, gradient)
        self.accumulate(name, "values", total)

    def _batch_norm_squares(self, name: str, module: nn.Module, gradient: Tensor) -> Tensor:
        """Returns the squared gradients in scale and shift of a BatchNorm layer, summed over examples."""
        values = self.inputs[name]
        shape = (1, -1, *(1,) * (values.ndim - 2))
        scale = (module.running_var + module.eps).rsqrt().view(shape)  # type: ignore[operator]
        normalized = (values - module.running_mean.view(shape)) * scale  # type: ignore[operator]
        products = [
            gradient * normalized if key.endswith("weight") else gradient for key in self.layers[name]
        ]
        columns = [product.flatten(2).sum(2) if product.ndim > 2 else product for product in products]
        return torch.stack(columns, 2).square().sum(0)


class JacobianAccumulator(CurvatureAccumulator):
    """Curvature of any layers, from the Jacobians of single examples."""

    def __init__(self, model: nn.Module, layers: Layers, structure: str) -> None:
        super().__init__(model, layers, structure)
        self.jacobian = Jacobian(model, [name for shapes in layers.values() for name in shapes])

    def add(self, inputs: Any, hessian: HessianFunction) -> Tensor:
        outputs = batched_outputs(self.model, inputs)
        curvature = hessian(outputs)
        self.check_columns(curvature.count)
        for start, stop, low, high in self.jacobian.chunks(inputs, curvature.count):
            columns = curvature.columns(low, high)[start:stop]
            rows = self.jacobian.rows(take(inputs, start, stop), columns)
            # a parameter without axes has rows without them
            matrices = [rows[name].reshape(*rows[name].shape[:2], -1) for name in self.jacobian.names]
            flat = torch.cat(matrices, 2).flatten(0, 1)
            total = flat.square().sum(0) if self.structure == "diag" else flat.T @ flat
            self.accumulate("", "all", total)
        return outputs

    def diagonal(self, layer: str) -> Tensor:
        sizes = [sum(math.prod(shape) for shape in shapes.values()) for shapes in self.layers.values()]
        return self.sums["", "all"].split(sizes)[list(self.layers).index(layer)].clone()


def input_patches(module: nn.Module, values: Tensor) -> Tensor:
    """Returns the inputs that a layer multiplies by its weights, ``[b, positions, in]``; windows for a convolution.

    >>> input_patches(nn.Conv1d(2, 3, kernel_size=3), torch.zeros(4, 2, 7)).shape
    torch.Size([4, 5, 6])
    """
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


def _chunks(module: nn.Module, values: Tensor, max_bytes: int = 2**26) -> list[Tensor]:
    """Splits examples so that the windows of a convolution take at most ``max_bytes``."""
    if not isinstance(module, CONVOLUTIONS) or not len(values):
        return [values]
    size = values[0].numel() * values.element_size() * math.prod(module.kernel_size)
    return list(values.split(max(1, max_bytes // max(1, size))))
