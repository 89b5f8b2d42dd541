"""Draws of standard normal numbers by the fastest generator of the machine, and reparameterized draws of any distribution."""

import platform
import threading
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, describe_value, value_error

# torch draws normal numbers one by one on these CPUs; numpy's ziggurat takes less than half the time.
_SCALAR_FILL = platform.machine().lower() in ("aarch64", "arm64")

# Held while torch's global generators, which all threads share, are seeded.
GENERATOR_LOCK = threading.RLock()


def standard_normal(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Returns independent standard normal numbers that depend only on a torch generator.

    On ARM CPUs large float32 draws come from numpy, seeded by one number of the torch generator. Seeds, checkpoints and resumed runs
    therefore give the same numbers.

    Args:
        shape: Shape of the result.
        dtype: Dtype of the result.
        device: Device of the result.
        generator: Generator; torch's global one by default.

    >>> first, second = (standard_normal(torch.Size((3, 2000)), torch.float32, torch.device("cpu"),
    ...                                  torch.Generator().manual_seed(1)) for _ in range(2))
    >>> torch.equal(first, second)
    True
    """
    # Below 4096 numbers seeding costs as much as the ziggurat saves.
    large = device.type == "cpu" and dtype == torch.float32 and shape.numel() >= 4096
    # vmap and the compiler must trace the draw.
    traced = torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
    if _SCALAR_FILL and large and not traced:
        seed = int(torch.randint(2**62, (), generator=generator))
        ziggurat = numpy.random.Generator(numpy.random.SFC64(seed))
        return torch.from_numpy(ziggurat.standard_normal(tuple(shape), dtype=numpy.float32))
    # Even generator=None does not compile with dynamic shapes.
    option: dict[str, Any] = {} if generator is None else {"generator": generator}
    return torch.randn(shape, dtype=dtype, device=device, **option)


def draw_components(
    number: int, shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Returns the index of a mixture component for each draw. All components are equally likely.

    Args:
        number: Number of components.
        shape: Shape of the result.
        device: Device of the result.
        generator: Generator; torch's global one by default.

    >>> draw_components(4, (100,), torch.device("cpu")).max() < 4
    tensor(True)
    """
    option: dict[str, Any] = {} if generator is None else {"generator": generator}
    return torch.randint(number, tuple(shape), device=device, **option)


def select_normal(loc: Tensor, scale: Tensor, component: Tensor, normal: Tensor) -> Tensor:
    r"""Returns :math:`\mu_k + \sigma_k \epsilon` with a component :math:`k` for each draw.

    Args:
        loc: Means ``[components, dim]``.
        scale: Standard deviations ``[components, dim]``.
        component: Index of the component of each draw, of any shape.
        normal: Standard normal numbers, of that shape and ``dim``.

    >>> loc = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    >>> select_normal(loc, torch.ones(2, 2), torch.tensor([1, 0]), torch.zeros(2, 2)).tolist()
    [[2.0, 3.0], [0.0, 1.0]]
    """
    if not (torch.is_grad_enabled() and (loc.requires_grad or scale.requires_grad)):
        return torch.addcmul(loc[component], scale[component], normal)
    # Products with one-hot codes select exactly, and their gradients are sums in a fixed order.
    # In half precision the backward pass rounds as that of the layers does.
    with torch.autocast(loc.device.type, enabled=False):
        codes = (component.unsqueeze(-1) == torch.arange(len(loc), device=component.device)).to(loc.dtype)
        return torch.addcmul(codes @ loc, codes @ scale, normal)


def as_size(sample_shape: Any) -> torch.Size:
    """Returns the shape of draws. Raises FlowBNNError unless it is a sequence of integers.

    >>> as_size((3, 2))
    torch.Size([3, 2])
    """
    try:
        return torch.Size(sample_shape)
    except TypeError:
        raise value_error("sample_shape", "integers", describe_value(sample_shape)) from None


def reparameterized_sample(
    distribution: Any, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None
) -> Tensor:
    """Returns draws that gradients pass through.

    Args:
        distribution: A ``torch.distributions`` distribution.
        sample_shape: Shape of the draws.
        generator: Generator, for distributions that accept one.

    Raises:
        NotImplementedError: The distribution has no ``rsample``.
        FlowBNNError: The distribution accepts no generator.

    >>> reparameterized_sample(torch.distributions.Normal(0.0, 1.0), (3,)).shape
    torch.Size([3])
    """
    if not distribution.has_rsample:
        name = type(distribution).__name__
        raise NotImplementedError(f"{name} has no rsample; use sample, or NormalMixture for a mixture")
    shape = as_size(sample_shape)
    if generator is None:
        return distribution.rsample(shape)
    try:
        return distribution.rsample(shape, generator=generator)
    except TypeError as error:
        text = f"{type(distribution).__name__} accepts no generator; use flowbnn.distributions"
        raise FlowBNNError(text, kind="unsupported", argument="generator") from error
