"""Sampled networks whose draws multiply the rows of one network: noise and dropout masks.

The network runs once on K blocks of B rows, ``[K * B, ...]``. The draws of sample k multiply the rows of block k. Weights are therefore
stored once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flowbnn.batches import apply, call, tensors_of
from flowbnn.methods.dropout import DropoutMasks, DropoutPosterior, MaskedDropout, example_axes
from flowbnn.noise import Noise, noise_layers
from flowbnn.noise.base import make_noise_modes
from flowbnn.noise.contexts import RowCountChanged, forward_sample
from flowbnn.noise.gaussians import SharedDraws
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.prediction import Prediction, clone_sharing_tensors


class SampledNetworks(nn.Module, ABC):
    """Base class for the sampled networks of a prediction. Subclasses define ``forward(inputs, draws)``.

    Args:
        network: Network in evaluation mode.
        draws: Weights, noise or masks of the samples, ``[K, ...]``, by name.
        samples: Number K of samples.
    """

    def __init__(self, network: nn.Module, draws: Mapping[str, Tensor], samples: int) -> None:
        super().__init__()
        self.network, self.draws, self.samples = network, dict(draws), samples

    @abstractmethod
    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        """Returns outputs ``[K, B, ...]``.

        Args:
            inputs: Inputs of B examples.
            draws: Draws by name, such as the attribute ``draws``.
        """


def batch_rows(inputs: Any) -> Any:
    """Returns the number of rows of inputs, which is symbolic in a graph."""
    return next(tensor.shape[0] for tensor in tensors_of(inputs) if tensor.ndim)


def repeat_rows(tensor: Tensor, samples: int, axis: int = 0) -> Tensor:
    """Returns K copies of the rows of a tensor, those of each sample adjacent: ``[..., B, ...]`` becomes ``[..., K * B, ...]``.

    >>> repeat_rows(torch.tensor([1, 2]), 2)
    tensor([1, 2, 1, 2])
    """
    shape = list(tensor.shape)
    expanded = tensor.unsqueeze(axis).expand(*shape[:axis], samples, *shape[axis:])
    return expanded.reshape(*shape[:axis], samples * shape[axis], *shape[axis + 1 :])


def as_blocks(tensor: Tensor, samples: int, rows: Any, axis: int = 0) -> Tensor:
    """Returns a tensor with an axis of samples before its axis of rows: size K, or 1 if no draw has changed the rows yet.

    Args:
        tensor: Tensor with B rows, or K blocks of B rows.
        samples: Number K of samples.
        rows: Number B of rows of the inputs.
        axis: Axis of the rows.

    Raises:
        RowCountChanged: If the tensor has another number of rows.

    >>> as_blocks(torch.zeros(6, 4), 3, 2).shape, as_blocks(torch.zeros(2, 4), 3, 2).shape
    (torch.Size([3, 2, 4]), torch.Size([1, 2, 4]))
    """
    if tensor.ndim > axis:
        size = tensor.shape[axis]
        if isinstance(size, int) and size == 1:  # the same for all rows, such as an embedding of positions
            return tensor.unsqueeze(axis)
        if size == samples * rows:
            return tensor.unflatten(axis, (samples, -1))
        if size == rows:
            return tensor.unsqueeze(axis)
    raise RowCountChanged(f"shape {tuple(tensor.shape)} for {rows} rows")


def add_row_axis(tensor: Tensor) -> Tensor:
    """Returns a tensor that is the same for all examples with a first axis of one row."""
    size = tensor.shape[0]
    return tensor if isinstance(size, int) and size == 1 else tensor.unsqueeze(0)


def join_blocks(blocks: Tensor, rows: Any, axis: int = 0) -> Tensor:
    """Returns K blocks of B rows as one axis of rows. A block of one row, which serves all, is expanded."""
    size = blocks.shape[axis + 1]
    if isinstance(size, int) and size == 1:
        blocks = blocks.expand(*blocks.shape[: axis + 1], rows, *blocks.shape[axis + 2 :])
    return blocks.flatten(axis, axis + 1)


def split_samples(outputs: Tensor, samples: int, rows: Any) -> Tensor:
    """Returns outputs ``[K, B, ...]`` of a network that ran on K blocks of B rows, or on B rows that no draw has changed.

    Raises:
        RowCountChanged: If the network returned another number of rows.
    """
    if outputs.shape[0] == samples * rows:
        return outputs.reshape(samples, rows, *outputs.shape[1:])
    if outputs.shape[0] == rows:
        return outputs.unsqueeze(0).expand(samples, *outputs.shape)
    raise RowCountChanged(f"the network returned {outputs.shape[0]} rows")


# -------------------- noise


class NoiseDraws(SampledNetworks):
    """Base class for sampled networks with multiplicative noise.

    Args:
        posterior: Posterior with noise.
        inputs: Few examples on the device of the network.
        prediction: Prediction with the seed and the number of samples.
        samples: Number of samples.
    """

    def __init__(self, posterior: NoisePosterior, inputs: Any, prediction: Prediction, samples: int) -> None:
        layers, trace = noise_layers(posterior.model), prediction.measure(inputs)
        modes = make_noise_modes(layers, "shared", prediction.samples, prediction.seed)
        shared = SharedDraws(list(layers.values()), modes, prediction.device)
        labels = {layer.key: name or "network" for name, layer in layers.items()}
        keys, draws = dict[str, tuple[int, int]](), dict[str, Tensor]()
        for (key, number), tensor in shared.tensors(trace.noise_shapes, 0, samples).items():
            name = f"noise.{labels[key]}" + (f".{number}" if number else "")
            keys[name], draws[name] = (key, number), tensor.detach().clone()
        super().__init__(clone_sharing_tensors(prediction.model), draws, samples)
        self.keys, self.modes = keys, modes
        # hooks stay; a file does not need the parameters of the noise
        for module in list(self.network.modules()):
            for name, child in list(module._modules.items()):
                if isinstance(child, Noise) and not child.is_constant:
                    del module._modules[name]


class NoiseRows(NoiseDraws):
    """Sampled networks with multiplicative noise: each block of rows has the noise of one sample.

    Args:
        posterior: Posterior with noise.
        inputs: Few examples on the device of the network.
        prediction: Prediction with the seed and the number of samples.
        samples: Number of samples.
        shares_prefix: If True, rows are repeated by the first noise, so that what comes before is computed once. Networks in which
            noisy and other rows meet need False.
    """

    def __init__(
        self,
        posterior: NoisePosterior,
        inputs: Any,
        prediction: Prediction,
        samples: int,
        shares_prefix: bool,
    ) -> None:
        super().__init__(posterior, inputs, prediction, samples)
        self.shares_prefix, self.blocks = shares_prefix, list[BlockNoise]()
        names = {key: name for name, key in self.keys.items()}
        for module in self.network.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for number, hook in list(hooks.items()):
                    noise = getattr(hook, "__self__", None)
                    if isinstance(noise, Noise) and not noise.is_constant:
                        block = BlockNoise(
                            noise, {call: name for (key, call), name in names.items() if key == noise.key}
                        )
                        self.blocks.append(block)
                        hooks[number] = partial(getattr(Noise, hook.__name__), block)

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        rows = batch_rows(inputs)
        for block in self.blocks:
            block.begin(draws, self.samples, rows)
        if not self.shares_prefix:
            inputs = apply(inputs, partial(repeat_rows, samples=self.samples))
        return split_samples(call(self.network, inputs), self.samples, rows)


class BlockNoise:
    """Noise of one layer that multiplies K blocks of rows by the draws of K samples.

    It takes the place of a :class:`~flowbnn.noise.Noise` in the hooks of a layer.

    Args:
        noise: Noise of the layer.
        names: Name of the draws of each call of the layer.
    """

    def __init__(self, noise: Noise, names: Mapping[int, str]) -> None:
        self.noise, self.layout, self.names = noise, noise.layout, names
        self.draws: Mapping[str, Tensor] = {}
        self.samples, self.rows, self.calls = 1, None, 0

    def begin(self, draws: Mapping[str, Tensor], samples: int, rows: Any) -> None:
        """Begins a forward pass.

        Args:
            draws: Draws by name.
            samples: Number of samples.
            rows: Number of rows of the inputs.
        """
        self.draws, self.samples, self.rows, self.calls = draws, samples, rows, 0

    def multiply(self, inputs: tuple[Tensor, ...], module: nn.Module | None = None) -> tuple[Tensor, ...]:
        """Multiplies the inputs of the layer, or its output; see :meth:`Noise.multiply`."""
        axis, feature_axis = self.layout.batch_axis, self.layout.feature_axis
        if axis is None or inputs[0].ndim <= self.layout.unbatched_ndim:
            # the same for all examples, such as an embedding of positions
            axis, inputs = 0, tuple([add_row_axis(x) for x in inputs])
        factors: dict[tuple[Any, ...], Tensor] = {}
        results: list[Tensor] = []
        offset = 0
        for index, x in enumerate(inputs):
            if not self.layout.split and index and x is inputs[index - 1]:
                results.append(results[-1])
                continue
            skipped = (axis, x.ndim + feature_axis)
            positions = tuple([size for number, size in enumerate(x.shape) if number not in skipped])
            positions = positions if self.noise.site == "position" else (1,) * len(positions)
            if positions not in factors:
                factors[positions] = self._factor(positions, axis).to(x.dtype)
            factor = factors[positions]
            if self.layout.split:
                factor = factor.narrow(feature_axis, offset, self.layout.split[index])
                offset += self.layout.split[index]
            blocks = as_blocks(x, self.samples, self.rows, axis)
            blocks = blocks * factor if module is None else self._scale_output(module, blocks, factor)
            results.append(join_blocks(blocks, self.rows, axis))
        return tuple(results)

    def _multiply_packed(self, packed: PackedSequence) -> PackedSequence:
        raise RowCountChanged("packed sequences interleave their rows")

    def _factor(self, positions: tuple[Any, ...], axis: int) -> Tensor:
        """Returns the draws of the next call, with the samples at ``axis`` and an axis of size 1 for the rows after it."""
        call = self.calls if self.noise.site == "position" else 0
        self.calls += 1
        draws = self.draws.get(self.names.get(call, ""))
        if draws is None or draws[0].numel() != self.layout.dim * math.prod(positions):
            raise RowCountChanged(f"no draws at {positions}, call {call}")
        vectors = draws.reshape(self.samples, *positions, self.layout.dim).movedim(
            -1, self.layout.feature_axis
        )
        return vectors.movedim(0, axis).unsqueeze(axis + 1)

    def _scale_output(self, module: nn.Module, blocks: Tensor, factor: Tensor) -> Tensor:
        """Returns what the layer would give for a multiplied input, from its output for the plain input."""
        if self.layout.fan_out > 1:
            factor = factor.repeat_interleave(self.layout.fan_out, self.layout.feature_axis)
        bias: Any = getattr(module, "bias", None)
        if bias is None:
            return blocks * factor
        bias = bias.to(blocks.dtype).view(-1, *(1,) * (-1 - self.layout.feature_axis))
        return (blocks - bias) * factor + bias  # the difference has fewer rows than the product


class NoiseLoop(NoiseDraws):
    """Sampled networks with multiplicative noise, one after the other: correct even if the rows of a batch interact.

    The graph holds the weights once, and the operations once per sample.
    """

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        keys = tuple(self.keys.values())
        vectors = ([draws[name][index] for name in self.keys] for index in range(self.samples))
        return torch.stack([forward_sample(self.network, keys, each, inputs) for each in vectors])


# -------------------- dropout


class DropoutRows(SampledNetworks):
    """Sampled networks with dropout masks: each block of rows has the masks of one sample.

    Args:
        posterior: Posterior with dropout layers.
        inputs: Few examples on the device of the network.
        prediction: Prediction with the seed and the number of samples.
        samples: Number of samples.
        shares_prefix: If True, rows are repeated at the first dropout layer, so that what comes before is computed once.
    """

    def __init__(
        self,
        posterior: DropoutPosterior,
        inputs: Any,
        prediction: Prediction,
        samples: int,
        shares_prefix: bool,
    ) -> None:
        network = clone_sharing_tensors(prediction.model)
        axes = posterior.axes if posterior.axes is not None else example_axes(network, inputs)
        masks, drawn = DropoutMasks(network, axes), dict[str, list[Tensor]]()
        names = {module: name for name, module in network.named_modules()}
        with masks:
            for index in range(samples):
                masks.select(prediction.seed, index)
                call(network, inputs)
                for layer, masked in masks.layers.items():
                    for (number, *_), mask in masked.masks.items():
                        drawn.setdefault(f"mask.{names[layer]}.{number}", []).append(mask)
        super().__init__(network, {name: torch.stack(each) for name, each in drawn.items()}, samples)
        self.shares_prefix, self.masks = shares_prefix, DropoutMasks(network, axes)
        self.masks.layers = {
            layer: BlockMasks(layer, names[layer], axes.get(names[layer], [])) for layer in self.masks.layers
        }

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        rows = batch_rows(inputs)
        layers: Any = self.masks.layers  # of BlockMasks
        for masked in layers.values():
            masked.draws, masked.rows, masked.samples = draws, rows, self.samples
        if not self.shares_prefix:
            inputs = apply(inputs, partial(repeat_rows, samples=self.samples))
        with self.masks:
            return split_samples(call(self.network, inputs), self.samples, rows)


class BlockMasks(MaskedDropout):
    """Forward hook that applies the masks of K samples to K blocks of rows.

    Args:
        layer: Dropout layer.
        name: Name of the layer.
        axes: Axis of the examples at each call of the layer.
    """

    draws: Mapping[str, Tensor]
    rows: Any
    samples: int

    def __init__(self, layer: nn.Module, name: str, axes: Any) -> None:
        super().__init__(layer, axes)
        self.name = name

    def __call__(self, layer: nn.Module | None, args: Any, x: Tensor) -> Tensor:
        number, axis = self.next_call()
        if axis is None:
            raise RowCountChanged("no batch axis")
        mask = self.draws[f"mask.{self.name}.{number}"].to(x).movedim(0, axis)
        blocks = self.apply_mask(as_blocks(x, self.samples, self.rows, axis), mask)
        return join_blocks(blocks, self.rows, axis)
