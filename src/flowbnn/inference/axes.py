"""Which axis of a layer's input holds the examples? Two batches of different size tell."""

import warnings
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flowbnn.errors import FlowBNNWarning
from flowbnn.inference.batches import call, rows, take
from flowbnn.inference.sampling import evaluating
from flowbnn.layers import noise, noise_layers

__all__ = ["align_batch_axes"]


def _shapes(model: nn.Module, inputs: Any) -> dict[str, tuple[int, ...]]:
    """The shape of what each noisy layer multiplies, at its first call."""
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
            if isinstance(value, PackedSequence):
                return
            if isinstance(value, Tensor) and name not in found:
                found[name] = tuple(value.shape)

        handles.append(model.get_submodule(name).register_forward_hook(record, with_kwargs=True))
    try:
        with evaluating(model), noise(model, "off"):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def align_batch_axes(model: nn.Module, inputs: Any) -> None:
    """Find the axis of the examples in every layer that takes noise, by running two rows and one.

    A sequence-first layer has it on axis 1, and a layer whose input does not depend on the examples (the embedding of positions)
    has none: one draw then serves them all. Rules that name a ``batch_axis`` are left alone.
    """
    if rows(inputs) < 2:
        return
    two, one = _shapes(model, take(inputs, 0, 2)), _shapes(model, take(inputs, 0, 1))
    for name, layer in noise_layers(model).items():
        if (
            name not in two
            or len(two[name]) != len(one.get(name, ()))
            or layer.recipe is None
            or layer.recipe.batch_axis is not None
        ):
            continue
        changed = [axis for axis, (a, b) in enumerate(zip(two[name], one[name], strict=True)) if a == 2 * b]
        same = all(a == b for a, b in zip(two[name], one[name], strict=True))
        axis = changed[0] if changed else None
        if len(changed) > 1 or (axis is None and not same) or axis == layer.layout.batch_axis:
            continue
        ndim = len(two[name])
        if axis is None:
            warnings.warn(
                f"the input of layer '{name}' does not depend on the examples, so one draw of its noise serves a whole batch; "
                "leave it plain with None in the rules if that is not meant",
                FlowBNNWarning,
            )
            layer.layout = layer.layout._replace(batch_axis=None)
            layer.recipe = replace(layer.recipe, batch_axis="none")
        elif axis != ndim + layer.layout.feature_axis:
            layer.layout = layer.layout._replace(batch_axis=axis, unbatched_ndim=ndim - 1)
            layer.recipe = replace(layer.recipe, batch_axis=axis)
