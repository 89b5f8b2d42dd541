"""Recipes that serve images as well as vectors."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributions import Independent

from flowbnn.distributions import Base, Flow
from flowbnn.errors import FlowBNNError
from flowbnn.flows.base import Bins, Named, Widths
from flowbnn.flows.vectors import coupled
from flowbnn.nets.conditional import ConditionalNormal
from flowbnn.nets.convolution import GatedConvNet
from flowbnn.nets.mlp import Length
from flowbnn.options import Count, Probability, checked
from flowbnn.transforms import (
    ActNorm,
    AffineMap,
    ChannelsFirst,
    Checkerboard,
    Compose,
    Coupling,
    Dequantization,
    GlowStep,
    Inverse,
    LogisticMixtureMap,
    LULinear,
    MultiScale,
    Residual,
    Transform,
    Univariate,
)


class Glow(Named):
    """Steps of ActNorm, an invertible linear map and an affine coupling (Kingma & Dhariwal 2018, https://arxiv.org/abs/1807.03039).

    For images, ``Glow((3, 32, 32), length=8, levels=3)``, the linear maps are 1x1 convolutions, the couplings have gated convolutions,
    and at every level but the last half of the channels leave, as in :class:`~flowbnn.transforms.MultiScale`.

    Args:
        dim: length of the vectors, or the shape ``(channels, height, width)`` of images.
        length: number of steps; of images, at each level.
        hidden: widths of the networks; of images, one residual block of so many channels for each.
        data_start: ActNorm normalises the first training batch, for densities of data; noise starts at the identity.
        levels, values: of images: number of levels, and of values of a pixel, which is an integer from 0. Such densities are
            bounds on log-probabilities by uniform dequantization; with ``values=None`` pixels are real numbers.
        context_dim, base: as in :class:`NICE`.

    >>> import torch
    >>> flow = Glow((1, 4, 4), length=1, levels=2, hidden=(4,))
    >>> flow().log_prob(torch.randint(256, (5, 1, 4, 4))).shape
    torch.Size([5])
    """

    @checked
    def __init__(
        self,
        dim: Count | Sequence[Count],
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        data_start: bool = False,
        base: Base | None = None,
        levels: Count = 3,
        values: Bins | None = 256,
    ) -> None:
        settings: dict[str, Any] = {"hidden": hidden, "context_dim": context_dim, "data_start": data_start}

        def step(channels: int, number: int) -> Transform:
            net = image_net(channels // 2, channels - channels // 2, AffineMap(), hidden, context_dim)
            return GlowStep(channels, permute=True, data_start=data_start, net=net)

        if not isinstance(dim, int):
            scales = scales_of(dim, levels, length, step, hidden, context_dim)
            super().__init__(scales.dim, context_dim, base, scales, *pixels(values))
            return
        one = [ActNorm(1, data_start=data_start)] if dim == 1 else []  # which has nothing to mix
        steps = [GlowStep(dim, flip=bool(step % 2), **settings) for step in range(length) if dim > 1]
        super().__init__(dim, context_dim, base, *one, *steps)


class ResidualFlow(Named):
    """Contractive residual blocks between ActNorms (Behrmann et al. 2019, https://arxiv.org/abs/1811.00995; Chen et al. 2019,
    https://arxiv.org/abs/1906.02735).

    Densities cost one pass, a draw a fixed point for each block; turned with ``cheap="forward"``, the reverse. For images,
    ``ResidualFlow((3, 32, 32))``, the blocks are convolutions, and the levels those of :class:`Glow`.

    Args:
        lipschitz, log_det: of each :class:`~flowbnn.transforms.Residual`; exact in few dimensions, else estimated.
        cheap: the direction that costs one pass: densities of points (``"inverse"``) or draws.
        dim, context_dim, length, hidden, data_start, base, levels, values: as in :class:`Glow`.
    """

    @checked
    def __init__(
        self,
        dim: Count | Sequence[Count],
        context_dim: Length = 0,
        length: Count = 8,
        hidden: Widths = (64, 64),
        lipschitz: Probability = 0.9,
        log_det: Literal["exact", "truncated", "roulette"] | None = None,
        cheap: Literal["forward", "inverse"] = "inverse",
        data_start: bool = False,
        base: Base | None = None,
        levels: Count = 3,
        values: Bins | None = 256,
    ) -> None:
        def block(shape: int | Sequence[int], channels: int) -> Transform:
            residual = Residual(shape, hidden, context_dim, lipschitz, log_det)
            return Compose(
                residual if cheap == "forward" else Inverse(residual),
                ActNorm(channels, data_start=data_start),
            )

        def step(channels: int, number: int) -> Transform:
            sides = [2 * dim[0] * side // channels for side in dim[1:]]  # type: ignore[index]
            return block((*sides, channels), channels)  # whose channels double when the sides are halved

        if isinstance(dim, int):
            start = ActNorm(dim, data_start=data_start)
            super().__init__(dim, context_dim, base, start, *(block(dim, dim) for _ in range(length)))
            return
        scales = scales_of(dim, levels, length, step, hidden, context_dim)
        super().__init__(scales.dim, context_dim, base, scales, *pixels(values))


def image_net(
    kept: int, moved: int, univariate: Univariate, hidden: Widths, context_dim: int
) -> GatedConvNet:
    return GatedConvNet(kept, univariate.per_entry * moved, hidden[0], len(hidden), context_dim)


def scales_of(
    shape: Sequence[int],
    levels: int,
    length: int,
    step: Any,
    hidden: Widths,
    context_dim: int,
    noise: Any = None,
) -> MultiScale:
    if len(shape) != 3 or not hidden:
        raise FlowBNNError(
            f"an image has the shape (channels, height, width), and its networks at least one width, not {tuple(shape)}",
            kind="shape",
            argument="dim",
        )
    return MultiScale(
        (*shape[1:], shape[0]), levels, length, step, noise, hidden[0], len(hidden), context_dim
    )


def pixels(values: int | None, noise: nn.Module | None = None, context_dim: int = 0) -> list[Transform]:
    """What ends a flow of images: integers, if they are, and channels first."""
    return [*([] if values is None else [Dequantization(values, noise, context_dim)]), ChannelsFirst()]


class FlowPP(Named):
    """Flow++: couplings of mixtures of logistics, with variational dequantization (Ho et al. 2019, https://arxiv.org/abs/1902.00275).

    Of images, ``FlowPP((3, 32, 32))``, couplings keep channels and, where the width is even, squares of a checkerboard in turn, and
    pixels are dequantized by learned noise. Densities cost one pass; a draw also finds a root for each entry.

    Args:
        components: of the mixture of each :class:`~flowbnn.transforms.LogisticMixtureMap`.
        dim, context_dim, length, hidden, data_start, base, levels, values: as in :class:`Glow`.

    >>> import torch
    >>> flow = FlowPP((1, 4, 4), length=1, levels=1, hidden=(4,))
    >>> flow().log_prob(torch.randint(256, (5, 1, 4, 4))).shape
    torch.Size([5])
    """

    @checked
    def __init__(
        self,
        dim: Count | Sequence[Count],
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        data_start: bool = False,
        base: Base | None = None,
        levels: Count = 2,
        values: Bins | None = 256,
        components: Count = 8,
    ) -> None:
        mixture = LogisticMixtureMap(components)

        def mixed(size: int, coupling: Transform) -> Transform:
            return Compose(ActNorm(size, data_start=data_start), LULinear(size), coupling)

        def step(channels: int, number: int) -> Transform:
            width = 2 * dim[0] * dim[2] // channels  # type: ignore[index]  # channels double when the sides are halved
            if number % 2 and width % 2 == 0:
                net = image_net(channels, channels, mixture, hidden, context_dim)
                return mixed(channels, checkered(Coupling(2 * channels, mixture, net=net)))
            net = image_net(channels // 2, channels - channels // 2, mixture, hidden, context_dim)
            return mixed(channels, Coupling(channels, mixture, net=net))

        if isinstance(dim, int):
            couplings = [coupled(dim, mixture, number, hidden, context_dim) for number in range(length)]
            super().__init__(dim, context_dim, base, *(mixed(dim, coupling) for coupling in couplings))
            return
        scales = scales_of(dim, levels, length, step, hidden, context_dim)
        noise = None if values is None else _PixelNoise(dim[0], hidden, context_dim)
        super().__init__(scales.dim, context_dim, base, scales, *pixels(values, noise, context_dim))


def checkered(coupling: Transform) -> Transform:
    """A coupling of halves of the channels, as one of the colours of a checkerboard."""
    return Compose(Checkerboard(), coupling, Inverse(Checkerboard()))


class _PixelNoise(nn.Module):
    """Learned noise of pixels: a normal that depends on the image, carried through a coupling of neighbours."""

    event_dim = 3

    def __init__(self, channels: int, hidden: Widths, context_dim: int) -> None:
        super().__init__()
        self.normal = ConditionalNormal(
            GatedConvNet(channels + context_dim, 2 * channels, hidden[0], len(hidden))
        )
        net = image_net(channels, channels, AffineMap(), hidden, 0)
        self.transform = checkered(Coupling(2 * channels, AffineMap(), net=net))

    def forward(self, given: Tensor) -> Flow:
        return Flow(Independent(self.normal(given), 3), self.transform)
