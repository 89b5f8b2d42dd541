"""Dropout layers of a network: their search, their deactivation, and masks that all inputs of a sample share."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.batches import call, evaluation_mode, has_row_axis, record_calls, repeat, take
from flowbnn.numerics import constant
from flowbnn.posterior.trace import try_call
from flowbnn.posterior.weights import generator_of


def dropout_layers(model: nn.Module) -> list[Any]:
    """Returns the dropout layers of a network with a positive rate.

    >>> dropout_layers(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2), nn.Dropout(0.0)))
    [Dropout(p=0.5, inplace=False)]
    """
    types = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    return [module for module in model.modules() if isinstance(module, types) and module.p > 0]


def layers_with_inner_dropout(model: nn.Module) -> dict[str, Any]:
    """Returns the layers that apply dropout internally, by name: attention, and recurrent networks of several layers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase)
        and module.dropout > 0
        and getattr(module, "num_layers", 2) > 1
    }


@contextmanager
def disable_dropout(model: nn.Module) -> Iterator[None]:
    """Context manager that sets all dropout rates to 0 and restores them at the end."""
    attributes = [(module, "p") for module in dropout_layers(model)]
    attributes += [(module, "dropout") for module in layers_with_inner_dropout(model).values()]
    rates = [getattr(module, name) for module, name in attributes]
    for module, name in attributes:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for (module, name), rate in zip(attributes, rates, strict=True):
            setattr(module, name, rate)


# -------------------- masks


def example_axes(model: nn.Module, inputs: Any) -> dict[str, list[int | None]]:
    """Returns the axis of the examples at each call of each dropout layer: the axis that grows with the batch.

    It is None at a call without such an axis. A layer that is never called has an empty list. The dictionary is empty if the network
    fails on two or three copies of the first example.
    """
    modules = {id(layer) for layer in dropout_layers(model)}
    layers = {name: module for name, module in model.named_modules() if id(module) in modules}
    shapes: list[dict[str, list[torch.Size]]] = []
    for size in (2, 3):
        with record_calls(layers) as calls, evaluation_mode(model):
            if not has_row_axis(inputs) or isinstance(
                try_call(partial(call, model, repeat(take(inputs, 0, 1), size))), Exception
            ):
                return {}
        shapes.append(
            {
                name: [layer_call.inputs.shape for layer_call in calls if layer_call.name == name]
                for name in layers
            }
        )
    return {
        name: [_growing_axis(*pair) for pair in zip(shapes[0][name], shapes[1][name], strict=False)]
        for name in layers
    }


def _growing_axis(two: torch.Size, three: torch.Size) -> int | None:
    """Returns the first axis whose size grows with the number of examples, from the shapes for two and for three examples."""
    axes = (axis for axis, (a, b) in enumerate(zip(two, three, strict=False)) if a * 3 == b * 2)
    return next(axes, None)


class MaskedDropout:
    """Forward hook that applies the masks of one sample to a dropout layer. A mask is drawn at the first input of its size.

    In evaluation mode the layer itself changes nothing. The hook also disables the fast path of torch's transformer layers, which calls
    no dropout layer.

    Args:
        layer: Dropout layer.
        axes: Axis of the examples at each call in a forward pass. The first axis by default.
    """

    def __init__(self, layer: Any, axes: Sequence[int | None]) -> None:
        self.rate, self.axes = float(layer.p), axes
        self.alpha = isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout)
        types = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
        self.map_axes = next((axes for axes, kind in enumerate(types, start=1) if isinstance(layer, kind)), 0)
        self.drops_features = isinstance(layer, nn.FeatureAlphaDropout)
        self.seed = 0
        self.generator: torch.Generator | None = None  # set if every example has its own mask
        self.masks: dict[Any, Tensor] = {}

    def __call__(self, layer: nn.Module | None, args: Any, x: Tensor) -> Tensor:
        number = _call_counts.counts.get(self, 0)
        _call_counts.counts[self] = number + 1
        axis = self.axes[number] if number < len(self.axes) else 0
        shape = list(x.shape)
        if axis is not None and self.generator is None:
            shape[axis] = 1
        for shared in range(2, x.ndim) if self.drops_features else range(x.ndim - self.map_axes, x.ndim):
            shape[shared] = 1
        mask = self._mask(number, tuple(shape), x)
        keep = max(1.0 - self.rate, 1e-9)
        if not self.alpha:
            return x * (mask / keep)
        limit = -1.7580993408473766  # limit of SELU, which alpha dropout uses instead of dropped values
        scale = (keep * (1.0 + self.rate * limit**2)) ** -0.5
        return scale * (x * mask + limit * (1.0 - mask)) - scale * limit * self.rate

    def _mask(self, number: int, shape: tuple[int, ...], x: Tensor) -> Tensor:
        """Returns the mask for a call, by its number in the forward pass."""
        if self.generator is not None:
            return (torch.rand(shape, generator=self.generator) >= self.rate).to(x)
        key = (number, shape, x.dtype, x.device)
        if key in self.masks:
            return self.masks[key]
        generator = torch.Generator().manual_seed((self.seed * 10_007 + number) % 2**63)
        mask = constant(lambda: (torch.rand(shape, generator=generator) >= self.rate).to(x))
        if not torch.compiler.is_exporting():
            self.masks[key] = mask
        return mask


class DropoutMasks:
    """Context manager that applies masks to all dropout layers of a network.

    Args:
        model: Network with dropout layers.
        axes: Axes of the examples, from :func:`example_axes`.
    """

    def __init__(self, model: nn.Module, axes: Mapping[str, list[int | None]]) -> None:
        modules = {id(layer) for layer in dropout_layers(model)}
        self.model, self.stack = model, ExitStack()
        self.layers = {
            module: MaskedDropout(module, axes.get(name, []))
            for name, module in model.named_modules()
            if id(module) in modules
        }

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            reset = partial(_reset_call_counts, list(self.layers.values()))
            stack.enter_context(self.model.register_forward_pre_hook(reset))
            for layer, masked in self.layers.items():
                stack.enter_context(layer.register_forward_hook(masked))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def select(self, seed: int, index: int, batch: int | None = None) -> None:
        """Selects the masks of a sample.

        Args:
            seed: Seed of the prediction.
            index: Index of the sample.
            batch: Index of the batch, if every example has its own mask.
        """
        first = generator_of(seed, index).initial_seed()
        for number, masked in enumerate(self.layers.values()):
            masked.seed, masked.masks = first * 10_007 + number, {}
            if batch is not None:
                masked.generator = torch.Generator().manual_seed((masked.seed * 10_007 + batch) % 2**63)


def _reset_call_counts(layers: list[MaskedDropout], model: nn.Module, args: Any) -> None:
    """Forward pre-hook of the network that resets the call counts of a new forward pass."""
    for layer in layers:
        _call_counts.counts[layer] = 0


class _CallCounts(threading.local):
    """Number of calls of each dropout layer in the current forward pass of this thread."""

    def __init__(self) -> None:
        self.counts: WeakKeyDictionary[MaskedDropout, int] = WeakKeyDictionary()


_call_counts = _CallCounts()
