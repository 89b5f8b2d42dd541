"""Standard normal numbers, by the fastest generator of the machine, and draws of any distribution."""

import platform
import threading
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

# torch fills normals one by one on these CPUs; numpy's ziggurat takes less than half the time
_SCALAR_FILL = platform.machine().lower() in ("aarch64", "arm64")
_WORTH_A_SEED = 4096  # numbers; below this, seeding costs what the ziggurat saves

GENERATOR_LOCK = (
    threading.RLock()
)  # of whoever seeds torch's global generators for a while, which all threads share


def standard_normal(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Independent standard normals that depend on ``generator`` (or torch's global one) alone.

    On ARM CPUs, large float32 draws come from numpy, seeded by one number of the torch generator, so that seeds,
    checkpoints and resumed runs keep their meaning.

    >>> first, second = (standard_normal(torch.Size((3, 2000)), torch.float32, torch.device("cpu"),
    ...                                  torch.Generator().manual_seed(1)) for _ in range(2))
    >>> torch.equal(first, second)
    True
    """
    fits = _SCALAR_FILL and device.type == "cpu" and dtype == torch.float32 and shape.numel() >= _WORTH_A_SEED
    # vmap and the compiler must see the draw
    if fits and not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is None:
        seed = int(torch.randint(2**62, (), generator=generator))
        ziggurat = numpy.random.Generator(numpy.random.SFC64(seed))
        return torch.from_numpy(ziggurat.standard_normal(tuple(shape), dtype=numpy.float32))
    # a generator that is named, if only as None, does not compile with sizes that vary
    named: dict[str, Any] = {} if generator is None else {"generator": generator}
    return torch.randn(shape, dtype=dtype, device=device, **named)


def draw_components(
    number: int, shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Which of ``number`` equal components each draw of a mixture comes from."""
    named: dict[str, Any] = {} if generator is None else {"generator": generator}
    return torch.randint(number, tuple(shape), device=device, **named)


def select_normal(loc: Tensor, scale: Tensor, which: Tensor, normal: Tensor) -> Tensor:
    r""":math:`\mu_k + \sigma_k \epsilon` with a component ``which`` of its own for every draw.

    ``loc`` and ``scale`` are ``[components, dim]``, ``which`` has any shape, and ``normal`` that shape and ``dim``.

    >>> loc = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    >>> select_normal(loc, torch.ones(2, 2), torch.tensor([1, 0]), torch.zeros(2, 2)).tolist()
    [[2.0, 3.0], [0.0, 1.0]]
    """
    if not (torch.is_grad_enabled() and (loc.requires_grad or scale.requires_grad)):
        return torch.addcmul(loc[which], scale[which], normal)
    # draws by the million share a few components: by products, which select exactly, their gradients are sums in a fixed order;
    # in half precision the backward pass rounds as the layers' does
    with torch.autocast(loc.device.type, enabled=False):
        chosen = (which.unsqueeze(-1) == torch.arange(len(loc), device=which.device)).to(loc.dtype)
        return torch.addcmul(chosen @ loc, chosen @ scale, normal)


def reparameterized_sample(
    distribution: Any, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None
) -> Tensor:
    """Draws that gradients pass through, from any distribution that has them.

    >>> reparameterized_sample(torch.distributions.Normal(0.0, 1.0), (3,)).shape
    torch.Size([3])
    """
    if not distribution.has_rsample:
        text = "has no rsample, so no gradient passes through its draws: use sample, or NormalMixture in place of a torch mixture"
        raise NotImplementedError(f"{type(distribution).__name__} {text}")
    if generator is None:
        return distribution.rsample(torch.Size(sample_shape))
    try:
        return distribution.rsample(torch.Size(sample_shape), generator=generator)
    except TypeError as error:
        text = "takes no generator; use flowbnn's DiagonalNormal or NormalMixture"
        raise FlowBNNError(f"{type(distribution).__name__} {text}", kind="unsupported") from error
