"""Smooth networks that know their Jacobian in closed form, and those of them whose outputs move less than their inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length, check_context
from flowbnn.numerics import at_least_single, inverse_softplus
from flowbnn.options import Count, Probability, checked

LinearMap = Callable[[Tensor], Tensor]


def apply_linear(x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Tensor:
    """A matrix on the last axis; or, for a weight of four axes, a convolution of images with the channels last."""
    shared = shift if shift is not None and shift.ndim == 1 else None
    if weight.ndim == 2:
        y = F.linear(x, weight, shared)
    else:
        y = _on_images(x, lambda rows: F.conv2d(rows, weight, shared, padding=weight.shape[-1] // 2))
    return y if shift is None or shift.ndim == 1 else y + shift


def apply_transpose(v: Tensor, weight: Tensor) -> Tensor:
    """The transpose of the linear part of :func:`applied`."""
    if weight.ndim == 2:
        return v @ weight
    return _on_images(v, lambda rows: F.conv_transpose2d(rows, weight, padding=weight.shape[-1] // 2))


def _on_images(x: Tensor, convolve: LinearMap) -> Tensor:
    first = x.movedim(-1, -3)
    y = convolve(first.reshape(-1, *first.shape[-3:]))
    return y.reshape(*first.shape[:-3], *y.shape[-3:]).movedim(-3, -1)


@dataclass(frozen=True)
class FixedContextNet:
    """A :class:`SmoothMLP` (or ``LipschitzConv``) with its weights and its context worked in: what a solver calls many times.

    ``shifts[0]`` may have batch axes, since the context is in it; ``rates`` are those of the Swish after every layer but the last.
    """

    weights: Sequence[Tensor]
    shifts: Sequence[Tensor]
    rates: Sequence[Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.slopes(x)[0]

    def slopes(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output, and the slopes of the activations on the way to it."""
        slopes = []
        for weight, shift, rate in zip(self.weights, self.shifts, self.rates, strict=False):
            x = apply_linear(x, weight, shift)
            gate = torch.sigmoid(rate * x)
            x = x * gate
            slopes.append(torch.lerp(gate, gate.new_ones(()), rate * x))  # gate + rate x (1 - gate)
        return apply_linear(x, self.weights[-1], self.shifts[-1]), slopes

    def linearize(self, x: Tensor) -> tuple[Tensor, LinearMap, LinearMap]:
        r"""The output, :math:`v \mapsto J^\top v` and :math:`u \mapsto J u`; further axes of the vectors come before the batch's."""
        y, slopes = self.slopes(x)

        def pull(v: Tensor) -> Tensor:
            for weight, slope in zip(self.weights[:0:-1], slopes[::-1], strict=True):
                v = apply_transpose(v, weight) * slope
            return apply_transpose(v, self.weights[0])

        def push(u: Tensor) -> Tensor:
            for weight, slope in zip(self.weights, slopes, strict=False):
                u = apply_linear(u, weight) * slope
            return apply_linear(u, self.weights[-1])

        return y, pull, push

    def trace_kernel(self) -> Tensor:
        r"""What :meth:`trace` needs: :math:`\operatorname{diag} W_1 W_2`, or :math:`W_2 \odot (W_1 W_3)^\top` for two hidden layers."""
        first, *middle, last = self.weights
        return middle[0] * (first @ last).mT if middle else (first * last.mT).sum(-1)

    @staticmethod
    def trace(slopes: Sequence[Tensor], kernel: Tensor) -> Tensor:
        """Trace of the Jacobian of a network of one or two hidden layers, of the same length on both ends."""
        inner = slopes[0] * kernel if kernel.ndim == 1 else F.linear(slopes[0], kernel) * slopes[1]
        return inner.sum(-1)


class SmoothMLP(nn.Module):
    r"""Fully connected network :math:`y = W_n\, s(\dots s(W_1 x + V c + b_1) \dots) + b_n` on the last axis, with Swish activations.

    The activation is :math:`s(a) = a\,\sigma(\beta a)` (Ramachandran, Zoph & Le 2017) with a learned rate :math:`\beta > 0` in each
    layer: smooth, so that log-determinants, which are made of its slopes, have gradients. A product with the Jacobian costs as much
    as the network itself, and no graph.

    Args:
        dim_in, dim_out: lengths of the input and output vectors.
        hidden: width of each hidden layer.
        context_dim: length of the context vectors; 0 ignores any context.
        start: the last layer's weights start at this multiple of the usual ones, its biases at zero.

    >>> net = SmoothMLP(3, 2, hidden=(16,), context_dim=4)
    >>> net(torch.ones(5, 3), torch.ones(4)).shape
    torch.Size([5, 2])
    """

    @checked
    def __init__(
        self,
        dim_in: Count,
        dim_out: Count,
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
        start: float = 1.0,
    ) -> None:
        super().__init__()
        widths = [dim_in, *hidden, dim_out]
        self._build([nn.Linear(before, after) for before, after in pairwise(widths)], context_dim, start)

    start_rate = 0.0  # the power of the number of units at which the rate of a layer starts

    def _build(self, layers: Sequence[nn.Module], context_dim: int, start: float) -> None:
        self.layers, self.context_dim = nn.ModuleList(layers), context_dim
        first, last = layers[0].weight, layers[-1]
        self.condition = nn.Linear(context_dim, len(first), bias=False) if context_dim else None  # type: ignore[arg-type]
        rates = torch.tensor([len(layer.weight) ** self.start_rate for layer in layers[:-1]])  # type: ignore[arg-type]
        self.raw_rate = nn.Parameter(inverse_softplus(rates))
        with torch.no_grad():
            last.weight.mul_(start)  # type: ignore[operator]
            last.bias.zero_()  # type: ignore[operator]

    def weights(self) -> list[Tensor]:
        """The matrices of the layers, as the network applies them."""
        return [layer.weight for layer in self.layers]  # type: ignore[misc]

    def at_context(self, context: Tensor | None = None) -> FixedContextNet:
        """The network for one context, its weights worked out once."""
        shifts: list[Tensor] = [layer.bias for layer in self.layers]  # type: ignore[misc]
        if self.condition is not None:
            context = check_context(context, self.context_dim)
            shift = F.linear(context, self.condition.weight, shifts[0])
            images = self.layers[0].weight.ndim == 4
            shifts[0] = shift[..., None, None, :] if images else shift
        return FixedContextNet(self.weights(), shifts, F.softplus(self.raw_rate).unbind())

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """``x`` is ``(..., dim_in)``; ``context`` is ``(..., context_dim)`` and broadcasts to its batch axes."""
        return self.at_context(context)(x)


@dataclass(frozen=True)
class AutogradNet:
    """A user's net, whose products with the Jacobian are traced."""

    net: Callable[..., Tensor]
    context: Tensor | None

    def __call__(self, z: Tensor) -> Tensor:
        moved = self.net(z, self.context)
        if moved.shape != z.shape:
            text = f"the net must give {tuple(z.shape)} here, as its input, not {tuple(moved.shape)}"
            raise FlowBNNError(text, kind="shape", argument="net")
        return moved

    def linearize(self, z: Tensor) -> tuple[Tensor, LinearMap, LinearMap]:
        step, apply_transpose, *_ = torch.func.vjp(self, z)

        def each(product: LinearMap, v: Tensor) -> Tensor:
            if v.ndim == z.ndim:
                return product(v)
            return torch.func.vmap(product)(v.expand(v.shape[0], *z.shape))

        return (
            step,
            lambda v: each(lambda one: apply_transpose(one)[0], v),
            lambda u: each(lambda one: torch.func.jvp(self, (z,), (one,))[1], u),
        )


SWISH_SLOPE = 1.1  # no Swish is steeper, whatever its rate
STEPS = 20  # of power iteration, where one is not enough


class LipschitzMLP(SmoothMLP):
    r"""A :class:`~flowbnn.nets.smooth.SmoothMLP` with :math:`\lVert g(x) - g(x') \rVert \le L \lVert x - x' \rVert`, :math:`L < 1`.

    A matrix whose largest singular value exceeds :math:`L^{1/n}` is scaled down to it (spectral normalization: Gouk et al. 2018,
    Behrmann et al. 2019); the activation is LipSwish, :math:`a\,\sigma(\beta a) / 1.1`, of slope at most one and with a bounded second
    derivative (Chen et al. 2019, section 3.4). A normalized matrix gives each of :math:`n` units about :math:`1 / \sqrt n` of its
    input, where Swish is nearly linear; so :math:`\beta`, on which the bound does not depend, starts at :math:`\sqrt n`. The
    context enters unbounded, since the map is inverted for one context at a time.

    In training the singular value is that of one step of power iteration, from vectors kept as buffers and saved; in ``eval()`` it is
    exact, so that the bound holds for the weights as they are, and nothing is changed.

    Args:
        dim_in, dim_out, hidden, context_dim, start: as in ``SmoothMLP``.
        lipschitz: the constant :math:`L`.

    >>> net = LipschitzMLP(2, 2, hidden=(8,), lipschitz=0.5).eval()
    >>> torch.nn.init.constant_(net.layers[0].weight, 100.0).shape
    torch.Size([8, 2])
    >>> round(torch.linalg.matrix_norm(net.weights()[0], 2).item() ** 2, 4)
    0.5
    """

    @checked
    def __init__(
        self,
        dim_in: Count,
        dim_out: Count,
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
        start: float = 0.1,
        lipschitz: Probability = 0.9,
    ) -> None:
        super().__init__(dim_in, dim_out, hidden, context_dim, start)
        self._limit(lipschitz, ())

    start_rate = 0.5

    def _limit(self, lipschitz: float, size: Sequence[int]) -> None:
        self.lipschitz = lipschitz
        for index, weight in enumerate(super().weights()):
            self.register_buffer(f"left_{index}", torch.randn(*size, len(weight)))
            for _ in range(STEPS):
                self._power_step(index, weight.detach())

    def weights(self) -> list[Tensor]:
        bound = self.lipschitz ** (1 / len(self.layers))
        scaled = []
        for index, weight in enumerate(super().weights()):
            size = self._power_step(index, weight) if self.training else self._size(index, weight, bound)
            gain = bound / (SWISH_SLOPE if index else 1.0)  # the activation before is divided here
            scaled.append(weight * (gain / size.clamp(min=bound)))
        return scaled

    def _power_step(self, index: int, weight: Tensor) -> Tensor:
        left = getattr(self, f"left_{index}")
        size, direction = power_step(weight, left)
        with torch.no_grad():
            left.copy_(direction)
        return size

    def _size(self, index: int, weight: Tensor, floor: float) -> Tensor:
        if weight.shape[2:].numel() == 1:  # a matrix, or a convolution that is one at each pixel
            matrix = weight.flatten(1)
            short = matrix if len(matrix) <= matrix.shape[1] else matrix.mT
            return torch.linalg.eigvalsh(at_least_single(short @ short.mT))[-1].clamp(min=floor**2).sqrt()
        left = getattr(self, f"left_{index}")
        with torch.no_grad():
            for _ in range(STEPS):
                left = power_step(weight, left)[1]
        return power_step(weight, left)[0]


class LipschitzConv(LipschitzMLP):
    r"""A contraction of images with the channels last: convolutions in place of the matrices of a :class:`LipschitzMLP`.

    The first and the last convolution are 3x3 with zeros around the image, those between are 1x1 (Chen et al. 2019, appendix E). The
    largest singular value of a 3x3 convolution is that of the map of whole images (Gouk et al. 2018), by power iteration; in
    ``eval()`` 20 steps are taken from the vectors kept. It approaches the value from below, so that the bound is exceeded a little
    before the iteration has settled: keep :math:`L` away from one.

    Args:
        shape: height, width and channels of an image.
        hidden: channels of each hidden layer.
        context_dim, start, lipschitz: as in ``LipschitzMLP``; a context shifts the channels of the first hidden layer.

    >>> LipschitzConv((8, 8, 3), hidden=(16, 16))(torch.ones(5, 8, 8, 3)).shape
    torch.Size([5, 8, 8, 3])
    """

    @checked
    def __init__(
        self,
        shape: tuple[Count, Count, Count],
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
        start: float = 0.1,
        lipschitz: Probability = 0.9,
    ) -> None:
        nn.Module.__init__(self)
        *size, channels = shape
        widths = list(pairwise([channels, *hidden, channels]))
        kernels = [3 if index in (0, len(widths) - 1) else 1 for index in range(len(widths))]
        layers = [nn.Conv2d(*ends, k, padding=k // 2) for ends, k in zip(widths, kernels, strict=True)]
        self._build(layers, context_dim, start)
        self._limit(lipschitz, size)


def power_step(weight: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """An estimate of the largest singular value, with its gradient, and the next left vector."""
    with torch.no_grad():
        right = apply_transpose(left, weight)
        right = right / torch.linalg.vector_norm(right).clamp(min=1e-12)
    image = apply_linear(right, weight)
    size = torch.linalg.vector_norm(image)
    # zeros have no vector to find
    return size, torch.where(size > 0, image / size.clamp(min=1e-12), left).detach()
