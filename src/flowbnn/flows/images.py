"""Named flows of images, which also work for vectors, and flows of integers and categories with exact probabilities."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flowbnn import transforms
from flowbnn.distributions import (
    Base,
    CategoricalBase,
    DiscretizedLogistic,
    DiscretizedLogisticBase,
    Flow,
)
from flowbnn.errors import FlowBNNError
from flowbnn.flows.base import Direction, FlowModel, NamedFlow, StackedFlow, Widths
from flowbnn.nets.convolution import GatedConvNet
from flowbnn.nets.mlp import ConditionalNormal, Length
from flowbnn.numerics import soft_clamp
from flowbnn.options import Count, Depth, Positive, Probability, checked
from flowbnn.transforms import ActNorm, AffineMap, Compose, Coupling, Inverse, Transform, Univariate
from flowbnn.transforms.surjective import AtLeastTwo

ImageShape = Count | Sequence[Count]


class ImageFlow(StackedFlow):
    """Base class for flows of vectors or of images ``(channels, height, width)``, with levels as in ``MultiScale``.

    Args:
        dim: Length of the vectors, or shape of the images.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of steps; for images, at each level.
        hidden: Widths of the networks; for images, one residual block of this many channels for each width.
        levels: Number of levels of images.
        base: Base of the same length; by default that of :meth:`default_base`.
    """

    final_splits: ClassVar[int] = 0
    coupling_bias: ClassVar[bool] = True  # biases in the networks of couplings
    initial_gain: ClassVar[float] = 0.0  # initial value of a learned factor of all networks; 0 for no factor

    def __init__(
        self,
        dim: ImageShape,
        context_dim: int,
        length: int,
        hidden: Widths,
        levels: int,
        base: Base | None,
    ) -> None:
        self.length, self.hidden, self.levels = length, hidden, levels
        NamedFlow.__init__(self, dim, context_dim, base)

    @property
    def is_image(self) -> bool:
        """True for a flow of images, False for a flow of vectors."""
        return not isinstance(self.dim, int)

    def make_transforms(self) -> Sequence[Transform]:
        steps = self.make_levels() if self.is_image else super().make_transforms()
        return [*steps, *self.make_output()]

    def make_levels(self) -> Sequence[Transform]:
        """Returns the multi-scale transform of images with channels last."""
        shape = tuple(self.dim)
        if len(shape) != 3 or not self.hidden:
            text = f"images need dim=(channels, height, width) and hidden, got {shape}, {self.hidden}"
            raise FlowBNNError(text, kind="shape", argument="dim")
        sizes = (*shape[1:], shape[0]), self.levels, self.length
        functions = self.make_step, self.make_split_noise
        return [transforms.MultiScale(*sizes, *functions, self.context_dim, self.final_splits)]

    def make_output(self) -> Sequence[Transform]:
        """Returns the transforms from real numbers with channels last to data."""
        return [transforms.ChannelsFirst()] if self.is_image else []

    def make_net(
        self, channels_in: int, channels_out: int, context_dim: int = 0, bias: bool = True
    ) -> nn.Module:
        """Returns a network of images."""
        net = GatedConvNet(channels_in, channels_out, self.hidden[0], len(self.hidden), context_dim, bias)
        return _ScaledNet(net, self.initial_gain) if self.initial_gain else net

    def coupling_options(self, size: int, index: int, univariate: Univariate) -> dict[str, Any]:
        if not self.is_image:
            return super().coupling_options(size, index, univariate)
        half = size // 2
        outputs = univariate.params_per_entry * (size - half)
        return {"net": self.make_net(half, outputs, self.context_dim, self.coupling_bias)}

    def make_split_noise(self, height: int, width: int, channels: int) -> nn.Module:
        """Returns a module for the distribution of the channels that are split off, given as many that stay."""
        return ConditionalNormal(self.make_net(channels + self.context_dim, 2 * channels))

    def side_length(self, axis: int, channels: int) -> int:
        """Returns the height (axis 1) or the width (axis 2) at the level with this many channels.

        Channels double when both sides are halved.
        """
        return 2 * self.dim[0] * self.dim[axis] // channels


class PixelFlow(ImageFlow):
    """Base class for flows of real vectors, or of images whose pixels are integers or real numbers.

    Integer pixels are dequantized and mapped to real numbers by a logit.

    Args:
        dim: Length of the vectors, or shape ``(channels, height, width)`` of images.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of steps; for images, at each level.
        hidden: Widths of the networks; for images, one residual block of this many channels for each width.
        levels: Number of levels of images.
        values: Number of values of a pixel, which is an integer from 0; None for real pixels.
        data_init: If True, ActNorm normalizes the first training batch.
        base: Base of the same length; standard normal by default.
    """

    @checked
    def __init__(
        self,
        dim: ImageShape,
        context_dim: Length = 0,
        length: Depth = 4,
        hidden: Widths = (64, 64),
        levels: Count = 3,
        values: AtLeastTwo | None = 256,
        data_init: bool = False,
        *,
        base: Base | None = None,
    ) -> None:
        self.values, self.data_init = values, data_init
        super().__init__(dim, context_dim, length, hidden, levels, base)

    def make_output(self) -> Sequence[Transform]:
        if not self.is_image or self.values is None:
            return super().make_output()
        pixels = transforms.Dequantization(self.values, self.make_pixel_noise(), self.context_dim)
        return [transforms.Sigmoid(margin=0.05), pixels, *super().make_output()]

    def make_pixel_noise(self) -> nn.Module | None:
        """Returns the noise of the dequantization, or None for uniform noise."""
        return None


class Glow(PixelFlow):
    """Glow: steps of ActNorm, an invertible linear map and an affine coupling (Kingma & Dhariwal 2018,
    https://arxiv.org/abs/1807.03039).

    For images, as in ``Glow((3, 32, 32), length=8, levels=3)``, the linear maps are 1x1 convolutions and the couplings have gated
    convolutions. At every level but the last, half of the channels are split off, as in :class:`~flowbnn.transforms.MultiScale`.

    Args:
        dim: Length of the vectors, or shape ``(channels, height, width)`` of images.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of steps; for images, at each level.
        hidden: Widths of the networks; for images, one residual block of this many channels for each width.
        levels: Number of levels of images.
        values: Number of values of a pixel, which is an integer from 0. Densities are then bounds on log-probabilities by uniform
            dequantization. With None pixels are real numbers.
        data_init: If True, ActNorm normalizes the first training batch, for densities of data. If False, it starts at the
            identity, for noise.
        base: Base of the same length; standard normal by default.

    >>> flow = Glow((1, 4, 4), length=1, levels=2, hidden=(4,))
    >>> flow().log_prob(torch.randint(256, (5, 1, 4, 4))).shape
    torch.Size([5])
    """

    def make_step(self, size: int, index: int) -> Transform:
        if size == 1:  # one number has no other to mix with
            return Compose(ActNorm(1, data_init=self.data_init), self.make_coupling(1, index, AffineMap()))
        options = self.coupling_options(size, index, AffineMap())
        return transforms.GlowStep(size, self.is_image, self.data_init, **options)


class ResidualFlow(PixelFlow):
    """Residual flow: contractive residual blocks with ActNorm between them (Behrmann et al. 2019, https://arxiv.org/abs/1811.00995;
    Chen et al. 2019, https://arxiv.org/abs/1906.02735).

    Densities cost one pass, and draws a fixed-point iteration for each block. With ``cheap="forward"`` draws cost one pass instead.
    For images, as in ``ResidualFlow((3, 32, 32))``, the blocks are convolutions, with the levels of :class:`Glow`.

    Args:
        dim: Length of the vectors, or shape ``(channels, height, width)`` of images.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of blocks; for images, at each level.
        hidden: Widths of the hidden layers of the blocks.
        levels: Number of levels of images.
        values: Number of values of a pixel, or None for real pixels, as in :class:`Glow`.
        data_init: If True, ActNorm normalizes the first training batch.
        lipschitz: Lipschitz constant of each block.
        log_det: Computation of the log-determinant, as in :class:`~flowbnn.transforms.Residual`.
        cheap: Direction that costs one pass: ``"inverse"`` for densities, ``"forward"`` for draws.
        base: Base of the same length; standard normal by default.

    >>> ResidualFlow(2, length=2, hidden=(8,))().log_prob(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    @checked
    def __init__(
        self,
        dim: ImageShape,
        context_dim: Length = 0,
        length: Depth = 8,
        hidden: Widths = (64, 64),
        levels: Count = 3,
        values: AtLeastTwo | None = 256,
        data_init: bool = False,
        lipschitz: Probability = 0.9,
        log_det: Literal["exact", "truncated", "roulette"] | None = None,
        cheap: Direction = "inverse",
        *,
        base: Base | None = None,
    ) -> None:
        self.lipschitz, self.log_det, self.cheap = lipschitz, log_det, cheap
        super().__init__(dim, context_dim, length, hidden, levels, values, data_init, base=base)

    def make_transforms(self) -> Sequence[Transform]:
        first = [] if self.is_image else [ActNorm(self.dim, data_init=self.data_init)]
        return [*first, *super().make_transforms()]

    def make_step(self, size: int, index: int) -> Transform:
        shape = (self.side_length(1, size), self.side_length(2, size), size) if self.is_image else size
        residual = transforms.Residual(shape, self.hidden, self.context_dim, self.lipschitz, self.log_det)
        block = residual if self.cheap == "forward" else Inverse(residual)
        return Compose(block, ActNorm(size, data_init=self.data_init))


class FlowPP(PixelFlow):
    """Flow++: couplings with mixtures of logistics, and variational dequantization (Ho et al. 2019,
    https://arxiv.org/abs/1902.00275).

    For images, as in ``FlowPP((3, 32, 32))``, couplings keep half of the channels and, if the width is even, squares of a
    checkerboard in turn. Pixels are dequantized by learned noise. Densities cost one pass. Draws also find a root for each entry.

    Args:
        dim: Length of the vectors, or shape ``(channels, height, width)`` of images.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of steps; for images, at each level.
        hidden: Widths of the networks; for images, one residual block of this many channels for each width.
        levels: Number of levels of images.
        values: Number of values of a pixel, or None for real pixels, as in :class:`Glow`.
        data_init: If True, ActNorm normalizes the first training batch.
        components: Number of components of the mixture of each :class:`~flowbnn.transforms.LogisticMixtureMap`.
        base: Base of the same length; standard normal by default.

    >>> flow = FlowPP((1, 4, 4), length=1, levels=1, hidden=(4,))
    >>> flow().log_prob(torch.randint(256, (5, 1, 4, 4))).shape
    torch.Size([5])
    """

    @checked
    def __init__(
        self,
        dim: ImageShape,
        context_dim: Length = 0,
        length: Depth = 4,
        hidden: Widths = (64, 64),
        levels: Count = 2,
        values: AtLeastTwo | None = 256,
        data_init: bool = False,
        components: Count = 8,
        *,
        base: Base | None = None,
    ) -> None:
        self.components = components
        super().__init__(dim, context_dim, length, hidden, levels, values, data_init, base=base)

    def make_step(self, size: int, index: int) -> Transform:
        checkerboard = self.is_image and index % 2 and self.side_length(2, size) % 2 == 0
        mixture = transforms.LogisticMixtureMap(self.components)
        coupling = self.make_coupling(2 * size if checkerboard else size, index, mixture)
        norm = ActNorm(size, data_init=self.data_init)
        coupling_step = _on_checkerboard(coupling) if checkerboard else coupling
        return Compose(norm, transforms.LULinear(size), coupling_step)

    def make_pixel_noise(self) -> nn.Module:
        channels = self.dim[0]
        normal = ConditionalNormal(self.make_net(channels + self.context_dim, 2 * channels))
        return _PixelNoise(
            normal, Coupling(2 * channels, AffineMap(), net=self.make_net(channels, 2 * channels))
        )


def _on_checkerboard(coupling: Transform) -> Transform:
    """Returns a coupling of the colours of a checkerboard, given a coupling of halves of the channels."""
    return Compose(transforms.Checkerboard(), coupling, Inverse(transforms.Checkerboard()))


class _PixelNoise(nn.Module):
    """Learned noise of pixels: a normal that depends on the image, followed by a coupling of neighbours.

    Args:
        normal: Module that returns the normal for an image.
        coupling: Coupling of halves of the channels.
    """

    event_dim = 3

    def __init__(self, normal: nn.Module, coupling: Transform) -> None:
        super().__init__()
        self.normal, self.transform = normal, _on_checkerboard(coupling)

    def forward(self, inputs: Tensor) -> Flow:
        return Flow(self.normal(inputs), self.transform)


class IDF(ImageFlow):
    """Integer discrete flow: couplings that shift integers by integers (Hoogeboom et al. 2019, https://arxiv.org/abs/1905.07376).

    Args:
        dim: Length of the vectors, or shape ``(channels, height, width)`` of images.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of couplings; for images, at each level.
        hidden: Widths of the networks; for images, one residual block of this many channels for each width.
        levels: Number of levels of images. Half of the channels are split off at every level, at the last one twice.
        values: Approximate number of values of an integer, which sets the scale of networks and base. All integers are allowed.
        components: Number of components of the mixtures of discretized logistics that are the base.
        data_init: If True, these mixtures are fitted to the first training batch, for densities of data.
        base: Base of integers of the same length.

    >>> flow = IDF(2, length=2, values=10)
    >>> flow().sample((5,)).dtype, flow.transform.lower_bound
    (torch.int64, False)
    """

    # Without biases zeros map to zeros, so that no training step moves the whole background of images.
    final_splits, coupling_bias, initial_gain = 2, False, 1 / 8

    @checked
    def __init__(
        self,
        dim: ImageShape,
        context_dim: Length = 0,
        length: Depth = 4,
        hidden: Widths = (64, 64),
        levels: Count = 2,
        values: Positive = 256,
        components: Count = 5,
        data_init: bool = False,
        *,
        base: Base | None = None,
    ) -> None:
        self.values, self.components, self.data_init = values, components, data_init
        super().__init__(dim, context_dim, length, hidden, levels, base)

    def make_step(self, size: int, index: int) -> Transform:
        coupling = self.make_coupling(size, index, transforms.IntegerShiftMap(float(self.values)))
        return Compose(transforms.Shuffle(size), coupling) if self.is_image else coupling

    def make_output(self) -> Sequence[Transform]:
        return [transforms.Integers(), *super().make_output()]

    def default_base(self, size: int) -> DiscretizedLogisticBase:
        return DiscretizedLogisticBase(size, self.components, self.values, self.data_init)

    def make_split_noise(self, height: int, width: int, channels: int) -> nn.Module:
        base = self.default_base(height * width * channels)
        return _IntegerNoise(self.make_net, base, channels, self.context_dim)


class _ScaledNet(nn.Module):
    """A net times a learned factor.

    The factor starts small, because large first steps move all images and blur the peaks of single integers.

    Args:
        net: The net.
        gain: Initial factor.
    """

    event_dim = 3

    def __init__(self, net: nn.Module, gain: float) -> None:
        super().__init__()
        self.net, self.gain = net, gain
        self.log_gain = nn.Parameter(torch.zeros(()))

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        return self.gain * soft_clamp(100 * self.log_gain, 8.0).exp() * self.net(value, context)


class _IntegerNoise(nn.Module):
    """Integers from the discretized logistic mixtures of a base, whose parameters a net moves depending on other integers.

    Args:
        make_net: Function that makes a network of images.
        base: The base.
        channels: Number of channels that the net reads, and of those that are drawn.
        context_dim: Length of the context vectors.
    """

    event_dim = 3

    def __init__(
        self,
        make_net: Callable[[int, int], nn.Module],
        base: DiscretizedLogisticBase,
        channels: int,
        context_dim: int,
    ) -> None:
        super().__init__()
        self.net = make_net(channels + context_dim, 3 * base.components * channels)
        self.base, self.channels = base, channels

    def forward(self, inputs: Tensor) -> DiscretizedLogistic:
        integers, context = inputs[..., : self.channels], inputs[..., self.channels :]
        return self.base.distribution(self.net(torch.cat([integers / self.base.values, context], dim=-1)))


class DiscreteFlow(FlowModel):
    """Discrete flow over categories: shifts and scales modulo their number (Tran et al. 2019, https://arxiv.org/abs/1905.10347).

    Args:
        dim: Number of variables.
        categories: Number of categories. Vectors have integers from 0 to ``categories - 1``.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of transforms.
        hidden: Widths of the hidden layers of their networks.
        kind: ``"bipartite"`` for couplings, or ``"autoregressive"``, whose draws cost ``dim`` passes and probabilities one.
        learn_scale: If True, learns scales as well as shifts, as in :class:`~flowbnn.transforms.ModularMap`.
        temperature: Temperature of the softmax that gradients pass through.

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
        length: Depth = 4,
        hidden: Widths = (64, 64),
        kind: Literal["bipartite", "autoregressive"] = "bipartite",
        learn_scale: bool = False,
        temperature: Positive = 1.0,
    ) -> None:
        modular, size = transforms.ModularMap(categories, learn_scale, temperature), dim * categories
        options: dict[str, Any] = {"hidden": hidden, "context_dim": context_dim}
        orders = range(dim), range(dim)[::-1]
        steps: list[Transform] = []
        for index in range(length):
            if kind == "bipartite":
                steps.append(Coupling(size, modular, "alternating", bool(index % 2), **options))
            else:
                steps.append(transforms.Autoregressive(size, modular, order=orders[index % 2], **options))
        transform = Compose(*steps, transforms.OneHot(dim, categories))
        super().__init__(CategoricalBase(dim, categories), transform, context_dim)
