r"""Units of the targets: fresh weights give numbers around zero of size one, targets come in any unit.

.. math:: \hat y = m + s \circ f(x)

Mean :math:`m` and spread :math:`s` of the training targets are two buffers of the network, which a forward hook applies. So the weights
are trained as if targets had been standardised, and what the network gives, handed out, exported or sampled, is in the user's units.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of
from flowbnn.errors import warn
from flowbnn.likelihoods.regression import Compared, Gaussian, varies

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


def far_from_units(network: nn.Module, seen: Compared) -> Tensor:
    """Which targets a fresh network does not reach in the units it has: their mean or spread is far from its own.

    A network speaks their units already where its outputs are around the targets and spread about as they do (from a tenth to four
    times as far) or, of a weak signal, rise and fall with them as far as they should; or where they are larger than those of fresh
    weights.

    Args:
        seen: its outputs and the targets, of all examples.
    """
    loc, scale = units_of(network, len(seen.center))
    center, spread = (seen.center - loc) / scale, seen.variance.sqrt() / scale
    own_center, own_spread = (seen.given_center - loc) / scale, seen.given_variance.sqrt() / scale
    off = (center.abs() > 2.0) | (
        varies(seen.center, seen.variance) & ((spread > 3.0) | (spread < 1.0 / 3.0))
    )
    fresh = own_center.square() + own_spread.square() < 9.0
    slope = seen.covariance / seen.given_variance  # of least squares to the targets, 1 of a fitted network
    alike = ((own_spread >= 0.1 * spread) & (own_spread <= 4.0 * spread)) | ((slope > 0.5) & (slope < 2.0))
    return off & fresh & ~(alike & ((center - own_center).abs() <= spread))


@torch.no_grad()
def take_units(network: nn.Module, likelihood: Gaussian, seen: Compared, trained: bool) -> bool:
    """Give a fresh network that is to be trained the mean and the spread of targets that are far from its own; whether it got any.

    Targets that stay more than five of their standard deviations away, which ordinary learning rates do not reach, are warned of;
    three, where the weights stay.
    """
    far = far_from_units(network, seen) & trained
    loc, scale = units_of(network, len(far))
    if changed := bool(far.any()):
        loc = torch.where(far, seen.center, loc)
        scale = torch.where(far & varies(seen.center, seen.variance), seen.variance.sqrt(), scale)
        if likelihood.noise == "predicted":  # the log-variance comes with the outputs
            loc, scale = torch.cat([loc, 2.0 * scale.log()]), torch.cat([scale, torch.ones_like(scale)])
        device, dtype = device_of(network), dtype_of(network)
        set_units(network, loc.to(device, dtype), scale.to(device, dtype))
    error, spread = seen.error.sqrt(), seen.variance.sqrt()
    away = ~far & (error > (5.0 if trained else 3.0) * spread) & varies(seen.center, seen.variance)
    if seen.examples >= 8 and bool(away.any()):
        worst = int((error / spread.clamp_min(1e-300) * away).argmax())
        warn(
            f"the network's outputs are about {error[worst]:.3g} away from the targets, which spread by {spread[worst]:.3g} around "
            f"{seen.center[worst]:.3g}: "
            + (
                "train the network first, or scale its inputs (subtract mean, divide by standard deviation)"
                if trained
                else "are they in other units than those that its weights were trained on? The network stays as it is"
            ),
            kind="units",
            output=worst,
        )
    return changed
