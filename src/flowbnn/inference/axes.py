"""Which axis of a layer's input holds the examples? Two batches of different size tell."""

import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from flowbnn.errors import FlowBNNWarning
from flowbnn.inference.batches import rows, take
from flowbnn.inference.plans import observe
from flowbnn.layers import noise_layers

__all__ = ["align_batch_axes"]


def align_batch_axes(model: nn.Module, inputs: Any) -> None:
    """Find the axis of the examples in every layer that takes noise, by running a few rows and one fewer.

    A sequence-first layer has it on axis 1, and a layer whose input does not depend on the examples (the embedding of positions)
    has none: one draw then serves them all. Rules that name a ``batch_axis`` are left alone.
    """
    count = min(3, rows(inputs))
    if count < 2:
        return
    try:
        more, fewer = observe(model, take(inputs, 0, count)), observe(model, take(inputs, 0, count - 1))
    except Exception:  # a network made for one size of batch: take its layers at their word
        return
    for name, layer in noise_layers(model).items():
        if (
            not more.get(name)
            or len(more[name]) != len(fewer.get(name, ()))
            or layer.recipe is None
            or layer.recipe.batch_axis is not None
        ):
            continue
        changed = [
            axis
            for axis, (a, b) in enumerate(zip(more[name], fewer[name], strict=True))
            if a != b and a * (count - 1) == b * count
        ]
        same = all(a == b for a, b in zip(more[name], fewer[name], strict=True))
        axis = changed[0] if changed else None
        if len(changed) > 1 or (axis is None and not same) or axis == layer.layout.batch_axis:
            continue
        ndim = len(more[name])
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
