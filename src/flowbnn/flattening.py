"""Real-valued targets of pixels and tokens: a network returns one row of numbers for each example."""

from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import output_tensor
from flowbnn.likelihoods import RealLikelihood
from flowbnn.networks import set_forward_hook


class FlattenOutputs:
    """Forward hook that returns outputs of pixels or tokens as one row of numbers for each example.

    Args:
        parts: Number of outputs for each target, such as a mean and a log-variance.
        axis: Axis of an example that has the parts, 0 or -1.
    """

    def __init__(self, parts: int, axis: int) -> None:
        self.parts, self.axis = parts, axis

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Tensor:
        tensor = output_tensor(outputs)
        if tensor.ndim <= 2:
            return tensor
        parts = tensor.chunk(self.parts, 1 if self.axis == 0 else -1)
        return torch.cat([part.flatten(1) for part in parts], 1)


def flatten_outputs(network: nn.Module, parts: int, axis: int) -> nn.Module:
    """Makes a network return one row of numbers for each example, see :class:`FlattenOutputs`.

    >>> flatten_outputs(nn.Conv2d(1, 2, 1), parts=1, axis=0)(torch.zeros(5, 1, 3, 3)).shape
    torch.Size([5, 18])
    """
    set_forward_hook(network, FlattenOutputs(parts, axis))
    return network


def flattening_of(network: nn.Module) -> list[int] | None:
    """Returns the parts and the axis that :func:`flatten_outputs` has set, or None."""
    hooks = [hook for hook in network._forward_hooks.values() if isinstance(hook, FlattenOutputs)]
    return [hooks[0].parts, hooks[0].axis] if hooks else None


def flatten_as_targets(
    network: nn.Module, likelihood: RealLikelihood, outputs: Tensor, targets: Tensor
) -> Tensor:
    """Makes a network return one row of numbers for each example if its outputs have the axes of the targets.

    Axes of size one do not matter. The outputs may have several numbers for each target on the first or the last axis.

    Args:
        network: Network, to which a hook is added if its outputs have several axes.
        likelihood: Likelihood of the targets.
        outputs: Outputs of the network for the first batch, ``[B, ...]``.
        targets: Targets of the first batch, ``[B, ...]``.

    Returns:
        The outputs of the changed network.
    """
    parts = likelihood.outputs_per_target
    if parts is None or outputs.ndim <= 2:
        return outputs
    expected = [size for size in targets.shape[1:] if size != 1]
    for axis in (0, -1):
        shape = list(outputs.shape[1:])
        divisible = shape[axis] % parts == 0
        shape[axis] //= parts
        if divisible and [size for size in shape if size != 1] == expected:
            flatten_outputs(network, parts, axis)
            return FlattenOutputs(parts, axis)(network, (), outputs)
    return outputs
