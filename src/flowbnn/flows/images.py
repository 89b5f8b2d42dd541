"""Recipes that serve images as well as vectors, and those of integers and categories, whose probabilities are exact."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flowbnn import transforms
from flowbnn.distributions import CategoricalBase, DiscretizedLogistic, DiscretizedLogisticBase, Flow
from flowbnn.errors import FlowBNNError
from flowbnn.flows.base import AtLeastTwo, FlowModel, Steps, Widths, recipe
from flowbnn.nets.convolution import GatedConvNet
from flowbnn.nets.mlp import ConditionalNormal, Length
from flowbnn.numerics import soft_clamp
from flowbnn.options import Count, Positive, Probability, checked
from flowbnn.transforms import ActNorm, AffineMap, Compose, Coupling, Inverse, Transform, Univariate


@recipe
class ImageFlow(Steps):
    """A flow of vectors, or of images of a shape ``(channels, height, width)``, level by level as in ``MultiScale``."""

    last: ClassVar[int] = 0
    bias: ClassVar[bool] = True  # of the networks of couplings
    gain: ClassVar[float] = 0.0  # a learned factor of all networks starts here; without one where it is zero

    dim: Count | Widths  # type: ignore[assignment]
    levels: Count = 3

    @property
    def images(self) -> bool:
        return not isinstance(self.dim, int)

    def parts(self) -> Sequence[Transform]:
        return [*(self.scales() if self.images else super().parts()), *self.door()]

    def scales(self) -> Sequence[Transform]:
        """The levels of images, channels last."""
        shape = tuple(self.dim)  # type: ignore[arg-type]
        if len(shape) != 3 or not self.hidden:
            text = "an image has the shape (channels, height, width), and its networks at least one width"
            raise FlowBNNError(f"{text}, not {shape}", kind="shape", argument="dim")
        sizes = (*shape[1:], shape[0]), self.levels, self.length
        return [transforms.MultiScale(*sizes, self.step, self.split_noise, self.context_dim, self.last)]

    def door(self) -> Sequence[Transform]:
        """What turns real numbers inside, channels last, into data."""
        return [transforms.ChannelsFirst()] if self.images else []

    def conv(self, channels_in: int, channels_out: int, context_dim: int = 0, bias: bool = True) -> nn.Module:
        """A network of images."""
        net = GatedConvNet(channels_in, channels_out, self.hidden[0], len(self.hidden), context_dim, bias)
        return _Gained(net, self.gain) if self.gain else net

    def net(self, size: int, number: int, univariate: Univariate) -> dict[str, Any]:
        if not self.images:
            return super().net(size, number, univariate)
        kept = size // 2
        return {
            "net": self.conv(kept, univariate.params_per_entry * (size - kept), self.context_dim, self.bias)
        }

    def split_noise(self, height: int, width: int, channels: int) -> nn.Module:
        """The distribution of the channels that leave, for as many that stay."""
        return ConditionalNormal(self.conv(channels + self.context_dim, 2 * channels))

    def side(self, axis: int, channels: int) -> int:
        """Height (1) or width (2) at the level of so many channels, which double when the sides are halved."""
        return 2 * self.dim[0] * self.dim[axis] // channels  # type: ignore[index]


@recipe
class PixelFlow(ImageFlow):
    """A flow of real vectors, or of images; pixels that have ``values`` are integers, dequantized and seen through a logit."""

    values: AtLeastTwo | None = 256
    data_init: bool = False

    def door(self) -> Sequence[Transform]:
        if not self.images or self.values is None:
            return super().door()
        pixels = transforms.Dequantization(self.values, self.pixel_noise(), self.context_dim)
        return [transforms.Sigmoid(margin=0.05), pixels, *super().door()]

    def pixel_noise(self) -> nn.Module | None:
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
        data_init: ActNorm normalises the first training batch, for densities of data; noise starts at the identity.
        context_dim, base: as in :class:`NICE`.

    >>> flow = Glow((1, 4, 4), length=1, levels=2, hidden=(4,))
    >>> flow().log_prob(torch.randint(256, (5, 1, 4, 4))).shape
    torch.Size([5])
    """

    def step(self, size: int, number: int) -> Transform:
        if size == 1:  # which has nothing to mix
            return Compose(ActNorm(1, data_init=self.data_init), self.coupling(1, number, AffineMap()))
        return transforms.GlowStep(size, self.images, self.data_init, **self.net(size, number, AffineMap()))


@recipe
class ResidualFlow(PixelFlow):
    """Contractive residual blocks between ActNorms (Behrmann et al. 2019, https://arxiv.org/abs/1811.00995; Chen et al. 2019,
    https://arxiv.org/abs/1906.02735).

    Densities cost one pass, a draw a fixed point for each block; turned with ``cheap="forward"``, the reverse. For images,
    ``ResidualFlow((3, 32, 32))``, the blocks are convolutions, and the levels those of :class:`Glow`.

    Args:
        lipschitz, log_det: of each :class:`~flowbnn.transforms.Residual`; exact in few dimensions, else estimated.
        cheap: the direction that costs one pass: densities of points (``"inverse"``) or draws.
        dim, context_dim, length, hidden, levels, values, data_init, base: as in :class:`Glow`.

    >>> ResidualFlow(2, length=2, hidden=(8,))().log_prob(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    length: Count = 8
    lipschitz: Probability = 0.9
    log_det: Literal["exact", "truncated", "roulette"] | None = None
    cheap: Literal["forward", "inverse"] = "inverse"

    def parts(self) -> Sequence[Transform]:
        start = [] if self.images else [ActNorm(self.dim, data_init=self.data_init)]  # type: ignore[arg-type]
        return [*start, *super().parts()]

    def step(self, size: int, number: int) -> Transform:
        shape = (self.side(1, size), self.side(2, size), size) if self.images else size
        residual = transforms.Residual(shape, self.hidden, self.context_dim, self.lipschitz, self.log_det)
        turned = residual if self.cheap == "forward" else Inverse(residual)
        return Compose(turned, ActNorm(size, data_init=self.data_init))


@recipe
class FlowPP(PixelFlow):
    """Flow++: couplings of mixtures of logistics, with variational dequantization (Ho et al. 2019, https://arxiv.org/abs/1902.00275).

    Of images, ``FlowPP((3, 32, 32))``, couplings keep channels and, where the width is even, squares of a checkerboard in turn, and
    pixels are dequantized by learned noise. Densities cost one pass; a draw also finds a root for each entry.

    Args:
        components: of the mixture of each :class:`~flowbnn.transforms.LogisticMixtureMap`.
        dim, context_dim, length, hidden, levels, values, data_init, base: as in :class:`Glow`.

    >>> flow = FlowPP((1, 4, 4), length=1, levels=1, hidden=(4,))
    >>> flow().log_prob(torch.randint(256, (5, 1, 4, 4))).shape
    torch.Size([5])
    """

    levels: Count = 2
    components: Count = 8

    def step(self, size: int, number: int) -> Transform:
        board = self.images and number % 2 and self.side(2, size) % 2 == 0
        mixture = transforms.LogisticMixtureMap(self.components)
        coupling = self.coupling(2 * size if board else size, number, mixture)
        start = ActNorm(size, data_init=self.data_init)
        return Compose(start, transforms.LULinear(size), _checkered(coupling) if board else coupling)

    def pixel_noise(self) -> nn.Module:
        channels = self.dim[0]  # type: ignore[index]
        normal = ConditionalNormal(self.conv(channels + self.context_dim, 2 * channels))
        return _PixelNoise(normal, Coupling(2 * channels, AffineMap(), net=self.conv(channels, 2 * channels)))


def _checkered(coupling: Transform) -> Transform:
    """A coupling of halves of the channels, as one of the colours of a checkerboard."""
    return Compose(transforms.Checkerboard(), coupling, Inverse(transforms.Checkerboard()))


class _PixelNoise(nn.Module):
    """Learned noise of pixels: a normal that depends on the image, carried through a coupling of neighbours."""

    event_dim = 3

    def __init__(self, normal: nn.Module, coupling: Transform) -> None:
        super().__init__()
        self.normal, self.transform = normal, _checkered(coupling)

    def forward(self, given: Tensor) -> Flow:
        return Flow(self.normal(given), self.transform)


@recipe
class IDF(ImageFlow):
    """Integer discrete flow: couplings that shift integers by integers (Hoogeboom et al. 2019, https://arxiv.org/abs/1905.07376).

    Args:
        dim: length of the vectors, or the shape ``(channels, height, width)`` of images.
        length: number of couplings; of images, at each level.
        hidden: widths of the networks; of images, one residual block of so many channels for each.
        levels: of images; half of the channels leave at every level, at the last one twice.
        values: about the number of values that an integer takes, which sets the units of networks and base; all integers are allowed.
        components: of the mixtures of discretized logistics that the integers have in the end.
        data_init: these mixtures start at the first training batch, for densities of data.
        context_dim, base: as in :class:`~flowbnn.flows.NICE`; the base has integers.

    >>> flow = IDF(2, length=2, values=10)
    >>> flow().sample((5,)).dtype, flow.transform.lower_bound
    (torch.int64, False)
    """

    last, bias, gain = 2, False, 1 / 8  # pixels among zeros stay: no step moves a whole background at once
    levels: Count = 2
    values: Positive = 256
    components: Count = 5
    data_init: bool = False

    def step(self, size: int, number: int) -> Transform:
        coupling = self.coupling(size, number, transforms.IntegerShiftMap(float(self.values)))
        return Compose(transforms.Shuffle(size), coupling) if self.images else coupling

    def door(self) -> Sequence[Transform]:
        return [transforms.Integers(), *super().door()]

    def own_base(self, size: int) -> DiscretizedLogisticBase:
        return DiscretizedLogisticBase(size, self.components, self.values, self.data_init)

    def split_noise(self, height: int, width: int, channels: int) -> nn.Module:
        return _IntegerNoise(self.conv, self.own_base(height * width * channels), channels, self.context_dim)


class _Gained(nn.Module):
    """A net times a learned factor: small at the start, where a step moves all images and blurs peaks of single integers."""

    event_dim = 3

    def __init__(self, net: nn.Module, gain: float) -> None:
        super().__init__()
        self.net, self.gain = net, gain
        self.log_gain = nn.Parameter(torch.zeros(()))

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        return self.gain * soft_clamp(100 * self.log_gain, 8.0).exp() * self.net(value, context)


class _IntegerNoise(nn.Module):
    """Integers whose mixtures of discretized logistics, those of a base, a net moves by other integers."""

    event_dim = 3

    def __init__(self, conv: Any, base: DiscretizedLogisticBase, kept: int, context_dim: int) -> None:
        super().__init__()
        self.net = conv(kept + context_dim, 3 * base.components * kept)
        self.base, self.kept = base, kept

    def forward(self, given: Tensor) -> DiscretizedLogistic:
        known = torch.cat([given[..., : self.kept] / self.base.values, given[..., self.kept :]], dim=-1)
        return self.base.distribution(self.net(known))


class DiscreteFlow(FlowModel):
    """Discrete flow over categories: shifts and scales modulo their number (Tran et al. 2019, https://arxiv.org/abs/1905.10347).

    Args:
        dim, categories: of the vectors, which have integers from 0 to ``categories - 1``.
        kind: ``"bipartite"``, couplings, or ``"autoregressive"``, whose draws cost ``dim`` passes and probabilities one.
        learn_scale, temperature: of each :class:`~flowbnn.transforms.ModularMap`.
        context_dim, length, hidden: as in :class:`~flowbnn.flows.NICE`.

    >>> flow = DiscreteFlow(3, categories=4)
    >>> flow().log_prob(torch.tensor([[0, 3, 1]])).exp()
    tensor([0.0156], grad_fn=<ExpBackward0>)
    """

    @checked
    def __init__(
        self,
        dim: AtLeastTwo,
        categories: AtLeastTwo,
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        kind: Literal["bipartite", "autoregressive"] = "bipartite",
        learn_scale: bool = False,
        temperature: Positive = 1.0,
    ) -> None:
        modular, size = transforms.ModularMap(categories, learn_scale, temperature), dim * categories
        given: dict[str, Any] = {"hidden": hidden, "context_dim": context_dim}
        turns, orders = [number % 2 for number in range(length)], (range(dim), range(dim)[::-1])
        parts: list[Transform]
        if kind == "bipartite":
            parts = [Coupling(size, modular, "alternating", bool(turned), **given) for turned in turns]
        else:
            parts = [transforms.Autoregressive(size, modular, order=orders[one], **given) for one in turns]
        transform = Compose(*parts, transforms.OneHot(dim, categories))
        super().__init__(CategoricalBase(dim, categories), transform, context_dim)
