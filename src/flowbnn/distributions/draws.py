"""Standard normal numbers, by the quicker road where there is one, and draws of any distribution."""

import platform
from typing import Any

import numpy
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = ["reparameterized", "standard_normal"]

# torch fills normals one by one on these processors; numpy's ziggurat takes less than half the time
_SCALAR_FILL = platform.machine().lower() in ("aarch64", "arm64")
_WORTH_A_SEED = 4096  # numbers; below this, seeding costs what the ziggurat saves


def standard_normal(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Independent standard normals that depend on ``generator`` (or torch's global one) alone.

    On ARM processors, large float32 draws come from numpy, seeded by one number of the torch generator, so that seeds,
    checkpoints and resumed runs keep their meaning.

    >>> first, second = (standard_normal(torch.Size((3, 2000)), torch.float32, torch.device("cpu"),
    ...                                  torch.Generator().manual_seed(1)) for _ in range(2))
    >>> torch.equal(first, second)
    True
    """
    if (
        not _SCALAR_FILL
        or device.type != "cpu"
        or dtype != torch.float32
        or shape.numel() < _WORTH_A_SEED
        or torch.compiler.is_compiling()
        or torch._C._functorch.maybe_current_level() is not None  # under vmap torch must see the draw
    ):
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)
    seed = int(torch.randint(2**62, (), generator=generator))
    stream = numpy.random.Generator(numpy.random.SFC64(seed))
    return torch.from_numpy(stream.standard_normal(tuple(shape), dtype=numpy.float32))


def reparameterized(
    distribution: Any, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None
) -> Tensor:
    """Draws that gradients pass through, from any distribution that has them.

    >>> reparameterized(torch.distributions.Normal(0.0, 1.0), (3,)).shape
    torch.Size([3])
    """
    if not distribution.has_rsample:
        raise NotImplementedError(
            f"{type(distribution).__name__} has no rsample, so no gradient passes through its draws: use sample, "
            "or NormalMixture in place of a torch mixture"
        )
    if generator is None:
        return distribution.rsample(torch.Size(sample_shape))
    try:
        return distribution.rsample(torch.Size(sample_shape), generator=generator)
    except TypeError as error:
        raise FlowBNNError(
            f"{type(distribution).__name__} takes no generator; use flowbnn's DiagonalNormal or NormalMixture"
        ) from error
