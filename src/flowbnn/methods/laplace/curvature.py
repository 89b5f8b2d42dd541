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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.batches import device_of, dtype_of, move, split_batch, take
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.laplace.blocks import Block, Diagonal, Full, Kronecker
from flowbnn.methods.laplace.derivatives import Jacobian, OutputHessian, flat_outputs, output_hessian
from flowbnn.methods.laplace.layer_choice import Layers, Survey, shares_weights

PATCH_BYTES = 2**26  # of a convolution's windows that are held at once
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Hessian = Callable[[Tensor], OutputHessian]


class Curvature(NamedTuple):
    """What a pass measured."""

    blocks: list[Block]  # one for each layer, or one for all ("full")
    matrix: Tensor | None  # the full curvature, where there is one
    log_likelihood: float  # of all targets
    seen: int  # examples


class Sums:
    """What one pass over the data adds up, in float64."""

    def __init__(self, model: nn.Module, layers: Layers, structure: str) -> None:
        self.model, self.layers, self.structure = model, layers, structure
        self.sums: dict[tuple[str, str], Tensor] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.hooks = ExitStack()

    @abstractmethod
    def add(self, inputs: Any, hessian: Hessian) -> Tensor:
        """Count a batch; ``hessian`` is of the loss in its outputs, which are returned as ``[b, C]``."""

    def accumulate(self, layer: str, key: str, value: Tensor) -> None:
        if (layer, key) in self.sums:
            self.sums[layer, key] += value
        else:
            self.sums[layer, key] = value.double()

    def blocks(self, weight: float) -> tuple[list[Block], Tensor | None]:
        """The sums times ``weight`` as Gaussians, and the full matrix where there is one."""
        together = {name: shape for shapes in self.layers.values() for name, shape in shapes.items()}
        dtype = self.model.get_parameter(next(iter(together))).dtype
        if self.structure == "full":
            matrix = self.matrix().mul_(weight)  # in place, because it may be large
            return [Full.of(together, matrix, dtype)], matrix
        blocks: list[Block] = []
        for layer, shapes in self.layers.items():
            if self.structure == "diag":
                blocks.append(Diagonal(shapes, {"values": weight * self.diagonal(layer)}))
                continue
            inner, width = self.sums[layer, "inner"], next(iter(shapes.values()))[0]
            outer = self.sums.get((layer, "outer"), inner.new_zeros(width, width))
            blocks.append(Kronecker.of(shapes, weight * inner / self.counts[layer], outer, dtype))
        return blocks, None

    def diagonal(self, layer: str) -> Tensor:
        """Of the curvature, in the order of the layer's parameters."""
        return self.in_order(layer, self.sums[layer, "values"])

    def matrix(self) -> Tensor:
        """The curvature of all layers together."""
        return self.sums["", "all"]

    def columns(self, layer: str, values: Tensor) -> Tensor:
        """What multiplies the parameters of a layer: its inputs ``[..., d]``, and a one for the bias."""
        ones = values.new_ones(*values.shape[:-1], 1)
        return torch.cat([values if len(shape) > 1 else ones for shape in self.layers[layer].values()], -1)

    def in_order(self, layer: str, values: Tensor) -> Tensor:
        """Numbers ``[out, columns]`` as one vector in the order of the layer's parameters."""
        widths = [math.prod(shape[1:]) for shape in self.layers[layer].values()]
        return torch.cat([part.flatten() for part in values.split(widths, 1)])


class LastLayer(Sums):
    """The layer that gives the outputs."""

    def __init__(self, model: nn.Module, layers: Layers, structure: str) -> None:
        super().__init__(model, layers, structure)
        self.name = next(iter(layers))
        self.hooks.enter_context(model.get_submodule(self.name).register_forward_pre_hook(self._keep))

    def _keep(self, module: nn.Module, args: Any) -> None:
        self.features = self.columns(self.name, args[0].detach())

    def add(self, inputs: Any, hessian: Hessian) -> Tensor:
        outputs = flat_outputs(self.model, inputs)
        curvature, features = hessian(outputs), self.features
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

    def matrix(self) -> Tensor:
        matrix = self.sums[self.name, "matrix"].transpose(1, 2)
        size = matrix.shape[0] * matrix.shape[1]
        index = self.in_order(self.name, torch.arange(size, device=matrix.device).view(matrix.shape[:2]))
        return matrix.reshape(size, size)[index][:, index]


class LayerSums(Sums):
    """Linear, convolution and BatchNorm layers called once, from their inputs and the gradients of their outputs."""

    def __init__(self, model: nn.Module, layers: Layers, structure: str) -> None:
        super().__init__(model, layers, structure)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for name in layers:
            hook = partial(self._keep, name)
            self.hooks.enter_context(model.get_submodule(name).register_forward_hook(hook, prepend=True))

    def _keep(self, name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        self.outputs[name] = output
        if self.structure == "kron":
            for chunk in _chunks(module, args[0].detach()):
                flat = self.columns(name, patches(module, chunk)).flatten(0, 1)
                self.accumulate(name, "inner", flat.T @ flat)
                self.counts[name] += len(flat)
        else:
            self.inputs[name] = args[0].detach().clone()
        return output.clone()  # an activation in place must not change what was kept

    def add(self, inputs: Any, hessian: Hessian) -> Tensor:
        with torch.enable_grad():
            outputs = flat_outputs(self.model, inputs)
        curvature = hessian(outputs.detach())
        kept = [self.outputs[name] for name in self.layers]
        for index in range(curvature.count):
            column = curvature.columns(index, index + 1)[:, 0]
            last = index == curvature.count - 1
            gradients = torch.autograd.grad(outputs, kept, column, retain_graph=not last, allow_unused=True)
            for name, gradient in zip(self.layers, gradients, strict=True):
                if gradient is not None:
                    self._backward(name, self.model.get_submodule(name), gradient)
        self.inputs.clear()
        self.outputs.clear()
        return outputs.detach()

    def _backward(self, name: str, module: nn.Module, gradient: Tensor) -> None:
        moved = gradient.unsqueeze(1) if gradient.ndim == 2 else gradient
        if not isinstance(module, nn.Linear) and gradient.ndim > 2:
            moved = gradient.flatten(2).transpose(1, 2)  # [b, t, out]
        if self.structure == "kron":
            flat = moved.reshape(-1, moved.shape[-1])
            self.accumulate(name, "outer", flat.T @ flat)
            return
        values = self.inputs[name]
        if isinstance(module, nn.Linear):
            total = gradient.square().T @ self.columns(name, values).square()
        elif isinstance(module, CONVOLUTIONS):
            total, start = torch.zeros((), device=values.device), 0
            for chunk in _chunks(module, values):
                windows = self.columns(name, patches(module, chunk))
                rows = moved[start : start + len(chunk)].transpose(1, 2) @ windows  # [b, out, in]
                total, start = total + rows.square().sum(0), start + len(chunk)
        else:
            shape = (1, -1, *(1,) * (values.ndim - 2))
            scale = (module.running_var + module.eps).rsqrt().view(shape)  # type: ignore[operator]
            normal = (values - module.running_mean.view(shape)) * scale  # type: ignore[operator]
            names = self.layers[name]
            products = [gradient * normal if key.endswith("weight") else gradient for key in names]
            columns = [one.flatten(2).sum(2) if one.ndim > 2 else one for one in products]
            total = torch.stack(columns, 2).square().sum(0)
        self.accumulate(name, "values", total)


class RowSums(Sums):
    """Any layers, from the Jacobians of single examples."""

    def __init__(self, model: nn.Module, layers: Layers, structure: str) -> None:
        super().__init__(model, layers, structure)
        self.jacobian = Jacobian(model, [name for shapes in layers.values() for name in shapes])

    def add(self, inputs: Any, hessian: Hessian) -> Tensor:
        outputs = flat_outputs(self.model, inputs)
        curvature = hessian(outputs)
        for start, stop, low, high in self.jacobian.chunks(inputs, curvature.count):
            columns = curvature.columns(low, high)[start:stop]
            rows = self.jacobian.rows(take(inputs, start, stop), columns)
            flat = torch.cat([rows[name].flatten(2) for name in self.jacobian.names], 2).flatten(0, 1)
            total = flat.square().sum(0) if self.structure == "diag" else flat.T @ flat
            self.accumulate("", "all", total)
        return outputs

    def diagonal(self, layer: str) -> Tensor:
        sizes = [sum(math.prod(shape) for shape in shapes.values()) for shapes in self.layers.values()]
        return self.sums["", "all"].split(sizes)[list(self.layers).index(layer)].clone()


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
    """The loss of a network's data as a function of the weights of some layers."""

    model: nn.Module  # in evaluation mode
    layers: Layers  # those that get a posterior
    seen: Survey
    likelihood: Likelihood
    batches: Callable[[str], Iterable[Any]]  # a pass over the data, by the description of its progress bar
    check: Callable[[Any], None]  # of the targets of a batch
    structure: str  # of the curvature: "kron", "diag" or "full"
    kind: str  # of the Hessian in the outputs: "ggn", "fisher", or "sampled", by targets drawn from the seed
    seed: int
    total: int | None  # the number of examples that those of the loader stand for

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters of the layers, by name."""
        return {name: self.model.get_parameter(name) for shapes in self.layers.values() for name in shapes}

    @property
    def direct(self) -> str | None:
        """The layer that gives the outputs, where it is the only one covered."""
        return self.seen.direct if list(self.layers) == [self.seen.direct] else None

    def examples(self, description: str) -> Iterator[tuple[Any, Tensor]]:
        """Inputs and targets of every batch, on the network's device."""
        device, dtype = device_of(self.model), dtype_of(self.model)
        for batch in self.batches(description):
            self.check(batch)
            inputs, targets = split_batch(batch)
            yield move(inputs, device, dtype), targets.to(device)

    @torch.no_grad()
    def measure(self) -> Curvature:
        """Curvature and log-likelihood, by one pass over the data."""
        way: type[Sums] = RowSums
        if self.direct is not None:
            way = LastLayer
        elif self.structure == "kron" or (self.structure == "diag" and all(map(self._by_sums, self.layers))):
            way = LayerSums
        sums = way(self.model, self.layers, self.structure)
        generator = torch.Generator().manual_seed(self.seed)
        log_likelihood, count = torch.zeros((), dtype=torch.float64), 0
        with sums.hooks:
            for inputs, targets in self.examples("curvature"):
                hessian = partial(
                    output_hessian, self.likelihood, targets=targets, kind=self.kind, generator=generator
                )
                outputs = sums.add(inputs, hessian)
                log_likelihood += self.likelihood.log_prob(outputs, targets).double().sum().cpu()
                count += len(outputs)
        if not bool(torch.isfinite(log_likelihood)):
            raise FlowBNNError(
                "the log-likelihood of these data is not finite; train, or clean the data", kind="finite"
            )
        weight = self.weight(count)
        return Curvature(*sums.blocks(weight), float(log_likelihood) * weight, count)

    def weight(self, seen: int) -> float:
        """How many examples each of those that were seen stands for."""
        return 1.0 if self.total is None else self.total / seen

    def _by_sums(self, name: str) -> bool:
        """Whether the diagonal of a layer can be had by :class:`LayerSums`: it is called once, with the examples first."""
        module, shape = self.model.get_submodule(name), self.seen.shapes.get(name, torch.Size())
        known = (
            (type(module) is nn.Linear and len(shape) == 2)
            or (type(module) in CONVOLUTIONS and module.groups == 1)
            or (type(module) in BATCH_NORMS and module.running_mean is not None)
        )
        called_once = self.seen.calls[name] == 1 and shape[:1] == (self.seen.rows,)
        return known and called_once and shares_weights(self.model, name) is None

    def gradient(self, seen: int) -> dict[str, Tensor]:
        """Of the log-likelihood of all the data, of which ``seen`` examples are there."""
        jacobian = Jacobian(self.model, list(self.weights))
        leaves = jacobian.leaves()
        total = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        for inputs, targets in self.examples("gradient"):
            with torch.enable_grad():
                outputs = jacobian.outputs(leaves, inputs)
                fitted = self.likelihood.log_prob(outputs.reshape(len(outputs), -1), targets).sum()
            parts = torch.autograd.grad(fitted, list(leaves.values()), materialize_grads=True)
            for name, part in zip(total, parts, strict=True):
                total[name] += self.weight(seen) * part
        return total
