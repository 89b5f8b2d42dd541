"""Recipes that serve images as well as vectors."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from flowbnn.distributions import Flow
from flowbnn.errors import FlowBNNError
from flowbnn.flows.base import Bins, Steps, Widths, recipe
from flowbnn.flows.vectors import couplings
from flowbnn.nets.convolution import GatedConvNet
from flowbnn.nets.mlp import ConditionalNormal
from flowbnn.options import Count, Probability
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


@recipe
class ImageFlow(Steps):
    """A flow of vectors, or of images of a shape ``(channels, height, width)``, for which :meth:`step` makes the steps of a level."""

    dim: Count | Widths  # type: ignore[assignment]
    levels: Count = 3

    def step(self, channels: int, number: int) -> Transform:
        """A step for so many channels."""
        raise NotImplementedError

    def side(self, axis: int, channels: int) -> int:
        """Height (1) or width (2) at the level of so many channels, which double when the sides are halved."""
        return 2 * self.dim[0] * self.dim[axis] // channels  # type: ignore[index]

    def scales(self, noise: Callable[[int, int], nn.Module] | None = None) -> MultiScale:
        """The levels, channels last."""
        shape = () if isinstance(self.dim, int) else tuple(self.dim)
        if len(shape) != 3 or not self.hidden:
            raise FlowBNNError(
                f"an image has the shape (channels, height, width), and its networks at least one width, not {shape}",
                kind="shape",
                argument="dim",
            )
        sizes = self.hidden[0], len(self.hidden), self.context_dim
        return MultiScale((*shape[1:], shape[0]), self.levels, self.length, self.step, noise, *sizes)


@recipe
class PixelFlow(ImageFlow):
    """A flow of real vectors, :meth:`vectors`, or of images, whose pixels are dequantized integers where they have ``values``."""

    values: Bins | None = 256
    data_start: bool = False

    def parts(self) -> Sequence[Transform]:
        if isinstance(self.dim, int):
            return self.vectors(self.dim)
        scales = self.scales()
        if self.values is None:
            return [scales, ChannelsFirst()]
        return [
            scales,
            Dequantization(self.values, self.noise(self.dim[0]), self.context_dim),
            ChannelsFirst(),
        ]

    def vectors(self, dim: int) -> Sequence[Transform]:
        """The transforms of a flow of vectors."""
        raise NotImplementedError

    def noise(self, channels: int) -> nn.Module | None:
        """Of the dequantization; uniform for None."""


@recipe
class Glow(PixelFlow):
    """Steps of ActNorm, an invertible linear map and an affine coupling (Kingma & Dhariwal 2018, https://arxiv.org/abs/1807.03039).

    For images, ``Glow((3, 32, 32), length=8, levels=3)``, the linear maps are 1x1 convolutions, the couplings have gated convolutions,
    and at every level but the last half of the channels leave, as in :class:`~flowbnn.transforms.MultiScale`.

    Args:
        dim: length of the vectors, or the shape ``(channels, height, width)`` of images.
        length: number of steps; of images, at each level.
        hidden: widths of the networks; of images, one residual block of so many channels for each.
        levels, values: of images: number of levels, and of values of a pixel, which is an integer from 0. Such densities are
            bounds on log-probabilities by uniform dequantization; with ``values=None`` pixels are real numbers.
        data_start: ActNorm normalises the first training batch, for densities of data; noise starts at the identity.
        context_dim, base: as in :class:`NICE`.

    >>> import torch
    >>> flow = Glow((1, 4, 4), length=1, levels=2, hidden=(4,))
    >>> flow().log_prob(torch.randint(256, (5, 1, 4, 4))).shape
    torch.Size([5])
    """

    def vectors(self, dim: int) -> Sequence[Transform]:
        if dim == 1:  # which has nothing to mix, but may have a context to read
            maps = couplings(self, AffineMap()) if self.context_dim else ()
            return [ActNorm(1, data_start=self.data_start), *maps]
        given: dict[str, Any] = {"hidden": self.hidden, "context_dim": self.context_dim}
        halves = [bool(number % 2) for number in range(self.length)]
        return [GlowStep(dim, data_start=self.data_start, flip=flip, **given) for flip in halves]

    def step(self, channels: int, number: int) -> Transform:
        net = image_net(channels // 2, channels - channels // 2, AffineMap(), self.hidden, self.context_dim)
        return GlowStep(channels, permute=True, data_start=self.data_start, net=net)


@recipe
class ResidualFlow(PixelFlow):
    """Contractive residual blocks between ActNorms (Behrmann et al. 2019, https://arxiv.org/abs/1811.00995; Chen et al. 2019,
    https://arxiv.org/abs/1906.02735).

    Densities cost one pass, a draw a fixed point for each block; turned with ``cheap="forward"``, the reverse. For images,
    ``ResidualFlow((3, 32, 32))``, the blocks are convolutions, and the levels those of :class:`Glow`.

    Args:
        lipschitz, log_det: of each :class:`~flowbnn.transforms.Residual`; exact in few dimensions, else estimated.
        cheap: the direction that costs one pass: densities of points (``"inverse"``) or draws.
        dim, context_dim, length, hidden, levels, values, data_start, base: as in :class:`Glow`.
    """

    length: Count = 8
    lipschitz: Probability = 0.9
    log_det: Literal["exact", "truncated", "roulette"] | None = None
    cheap: Literal["forward", "inverse"] = "inverse"

    def vectors(self, dim: int) -> Sequence[Transform]:
        start = ActNorm(dim, data_start=self.data_start)
        return [start, *(self.block(dim, dim) for _ in range(self.length))]

    def step(self, channels: int, number: int) -> Transform:
        return self.block((self.side(1, channels), self.side(2, channels), channels), channels)

    def block(self, shape: int | Sequence[int], channels: int) -> Transform:
        """A residual block and a normalization of its channels."""
        residual = Residual(shape, self.hidden, self.context_dim, self.lipschitz, self.log_det)
        turned = residual if self.cheap == "forward" else Inverse(residual)
        return Compose(turned, ActNorm(channels, data_start=self.data_start))


def image_net(
    kept: int, moved: int, univariate: Univariate, hidden: Widths, context_dim: int
) -> GatedConvNet:
    return GatedConvNet(kept, univariate.per_entry * moved, hidden[0], len(hidden), context_dim)


@recipe
class FlowPP(PixelFlow):
    """Flow++: couplings of mixtures of logistics, with variational dequantization (Ho et al. 2019, https://arxiv.org/abs/1902.00275).

    Of images, ``FlowPP((3, 32, 32))``, couplings keep channels and, where the width is even, squares of a checkerboard in turn, and
    pixels are dequantized by learned noise. Densities cost one pass; a draw also finds a root for each entry.

    Args:
        components: of the mixture of each :class:`~flowbnn.transforms.LogisticMixtureMap`.
        dim, context_dim, length, hidden, levels, values, data_start, base: as in :class:`Glow`.

    >>> import torch
    >>> flow = FlowPP((1, 4, 4), length=1, levels=1, hidden=(4,))
    >>> flow().log_prob(torch.randint(256, (5, 1, 4, 4))).shape
    torch.Size([5])
    """

    levels: Count = 2
    components: Count = 8

    def vectors(self, dim: int) -> Sequence[Transform]:
        steps = list(couplings(self, LogisticMixtureMap(self.components)))
        return [self.mixed(dim, coupling) for coupling in steps]

    def noise(self, channels: int) -> nn.Module:
        return _PixelNoise(channels, self.hidden, self.context_dim)

    def step(self, channels: int, number: int) -> Transform:
        mixture = LogisticMixtureMap(self.components)
        if number % 2 and self.side(2, channels) % 2 == 0:
            net = image_net(channels, channels, mixture, self.hidden, self.context_dim)
            return self.mixed(channels, checkered(Coupling(2 * channels, mixture, net=net)))
        net = image_net(channels // 2, channels - channels // 2, mixture, self.hidden, self.context_dim)
        return self.mixed(channels, Coupling(channels, mixture, net=net))

    def mixed(self, size: int, coupling: Transform) -> Transform:
        """A coupling after a normalization and a linear map."""
        return Compose(ActNorm(size, data_start=self.data_start), LULinear(size), coupling)


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
        return Flow(self.normal(given), self.transform)
