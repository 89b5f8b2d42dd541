"""Standard normal numbers, by the quicker road where there is one."""

import platform

import numpy
import torch
from torch import Tensor

__all__ = ["standard_normal"]

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
