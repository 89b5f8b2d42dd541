r"""Units of the targets: fresh weights give numbers around zero of size one, targets come in any unit.

.. math:: \hat y = m + s \circ f(x)

Mean :math:`m` and spread :math:`s` of the training targets are two buffers of the network, which a forward hook applies. So the weights
are trained as if targets had been standardised, and what the network gives, handed out, exported or sampled, is in the user's units.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of, split_batch
from flowbnn.likelihoods import Gaussian, Likelihood

__all__ = ["LOC", "SCALE", "far_from_units", "learn_units", "set_units", "units_of"]

LOC, SCALE = "flowbnn_loc", "flowbnn_scale"


def in_units(network: nn.Module, args: Any, outputs: Tensor) -> Tensor:
    """Forward hook of a network with units."""
    return outputs * network.get_buffer(SCALE) + network.get_buffer(LOC)


def set_units(network: nn.Module, loc: Tensor, scale: Tensor) -> None:
    """Let a network give ``loc + scale * outputs``, in place of the units it may have."""
    if SCALE not in network._buffers:
        network.register_forward_hook(in_units)
    network.register_buffer(LOC, loc)
    network.register_buffer(SCALE, scale)


def units_of(network: nn.Module, width: int) -> tuple[Tensor, Tensor]:
    """Mean and spread of the first ``width`` outputs; 0 and 1 where the network has none."""
    if SCALE not in network._buffers:
        return torch.zeros(width, dtype=torch.float64), torch.ones(width, dtype=torch.float64)
    loc, scale = (network.get_buffer(name).cpu().double()[:width] for name in (LOC, SCALE))
    return loc, scale


@torch.no_grad()
def far_from_units(network: nn.Module, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Which targets a fresh network does not reach in the units it has: their mean or spread is far from its own.

    A network that explains some of them, or gives larger numbers than fresh weights do, speaks units already.
    """
    if not isinstance(likelihood, Gaussian) or len(targets) < 2:
        return torch.tensor([False])
    predicted = likelihood.moments(outputs)[0].cpu().double()
    truth = targets.cpu().double().reshape(predicted.shape)
    loc, scale = units_of(network, predicted.shape[1])
    raw, seen = (predicted - loc) / scale, (truth - loc) / scale
    center, spread = seen.mean(0), seen.std(0)
    explains = (truth - predicted).square().mean(0) < 0.9 * truth.var(0)
    fresh = raw.square().mean(0) < 9.0
    off = (center.abs() > 2.0) | ((spread > 1e-6 * center.abs()) & ((spread > 3.0) | (spread < 1.0 / 3.0)))
    return fresh & off & ~explains


@torch.no_grad()
def learn_units(network: nn.Module, likelihood: Likelihood, far: Tensor, loader: Iterable[Any]) -> None:
    """Give the network the mean and the spread of all targets, for those that are ``far``."""
    loc, scale = units_of(network, len(far))
    count, near, (first, second) = 0, None, torch.zeros(2, len(far), dtype=torch.float64)
    for batch in loader:
        truth = split_batch(batch)[1].cpu().double().reshape(-1, len(far))
        near = truth.mean(0) if near is None else near  # close to the mean, so that no digits are lost
        first, second = first + (truth - near).sum(0), second + (truth - near).square().sum(0)
        count += len(truth)
    if near is None:
        return
    spread = (second / count - (first / count) ** 2).clamp_min(0.0).sqrt()
    mean = near + first / count
    loc = torch.where(far, mean, loc)
    scale = torch.where(far & (spread > 1e-6 * mean.abs()), spread, scale)
    if (
        isinstance(likelihood, Gaussian) and likelihood.noise == "predicted"
    ):  # the log-variance comes with the outputs
        loc, scale = torch.cat([loc, 2.0 * scale.log()]), torch.cat([scale, torch.ones_like(scale)])
    device, dtype = device_of(network), dtype_of(network)
    set_units(network, loc.to(device, dtype), scale.to(device, dtype))
