"""Where the examples lie in what a layer multiplies by noise, found by running a few of them."""

import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import apply, call, rows
from flowbnn.errors import FlowBNNWarning
from flowbnn.noise.modes import noise_layers, noise_mode

__all__ = ["align_batch_axes"]


def align_batch_axes(model: nn.Module, inputs: Any) -> list[str]:
    """Find the axis of the examples in every layer that takes noise.

    A sequence-first layer has it on axis 1, and a layer whose input is the same whatever the examples are (the embedding of positions)
    has none: one draw then serves them all. Rules that name a ``batch_axis`` are left alone.

    Args:
        inputs: a batch; some of its rows are run with the noise off.

    Returns:
        The layers that the network never calls.
    """
    count = min(3, rows(inputs) // 2)
    more = _observed(model, inputs if count < 2 else _take(inputs, 0, count))
    if count < 2:
        return [name for name in noise_layers(model) if more and name not in more]
    fewer = _observed(
        model, _take(inputs, count, 2 * count - 1)
    )  # others: what depends on the examples changes
    for name, layer in noise_layers(model).items():
        first, second = more.get(name), fewer.get(name)
        if first is None or second is None or first.ndim != second.ndim or layer.recipe is None:
            continue
        if layer.recipe.batch_axis is not None:
            continue
        axes = [
            axis
            for axis, (a, b) in enumerate(zip(first.shape, second.shape, strict=True))
            if a != b and a * (count - 1) == b * count
        ]
        if first.shape == second.shape and first.numel() and torch.equal(first, second):
            warnings.warn(
                FlowBNNWarning(
                    f"the input of layer '{name}' does not depend on the examples, so one draw of its noise serves a whole batch; "
                    "leave it plain with None in the rules if that is not meant",
                    kind="axis",
                    layer=name,
                )
            )
            layer.layout = layer.layout._replace(batch_axis=None)
            layer.recipe = replace(layer.recipe, batch_axis="none")
        elif len(axes) == 1 and axes[0] not in (
            layer.layout.batch_axis,
            first.ndim + layer.layout.feature_axis,
        ):
            layer.layout = layer.layout._replace(batch_axis=axes[0], unbatched_ndim=first.ndim - 1)
            layer.recipe = replace(layer.recipe, batch_axis=axes[0])
    _order_folded_rows(model, inputs, count, more)
    return [name for name in noise_layers(model) if more and name not in more]


def _order_folded_rows(model: nn.Module, inputs: Any, count: int, seen: dict[str, Tensor]) -> None:
    """Where rows are time steps or frames of examples: whether those of one example follow each other."""
    folded = {
        name: layer
        for name, layer in noise_layers(model).items()
        if name in seen
        and layer.layout.batch_axis == 0
        and seen[name].shape[0] > count
        and not seen[name].shape[0] % count
    }
    if not folded:
        return
    changed = apply(inputs, lambda tensor: torch.cat([tensor[count : count + 1], tensor[1:count]]))
    for name, other in _observed(model, changed).items():
        if name in folded and other.shape == seen[name].shape:
            differs = (other != seen[name]).flatten(1).any(1).nonzero().flatten().tolist()
            if differs == list(range(0, len(other), count)):
                folded[name].layout = folded[name].layout._replace(examples_first=False)


def _take(inputs: Any, start: int, stop: int) -> Any:
    return apply(inputs, lambda tensor: tensor[start:stop])


def _train(modules: list[nn.Module]) -> None:
    for module in modules:
        module.training = True


def _observed(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """What each noisy layer multiplies at its first call; nothing where the network fails on these inputs."""
    seen: dict[str, Tensor] = {}
    training = [module for module in model.modules() if module.training]
    with ExitStack() as stack:
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
                seen.setdefault(name, value if isinstance(value, Tensor) else torch.empty(0))

            handle = model.get_submodule(name).register_forward_hook(record, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(noise_mode(model, "off"))
        stack.callback(_train, training)
        model.eval()
        try:
            call(model, inputs)
        except Exception:  # a network made for one size of batch: take its layers at their word
            return {}
    return seen
