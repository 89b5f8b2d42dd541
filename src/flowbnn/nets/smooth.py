"""Smooth networks with a Jacobian in closed form, and smooth networks with a bounded Lipschitz constant."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.nets.mlp import Length, check_context, check_output
from flowbnn.numerics import FORWARD_MODE_LOCK, at_least_single, inverse_softplus
from flowbnn.options import Count, Dim, Probability, checked

LinearMap = Callable[[Tensor], Tensor]


def apply_linear(x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Tensor:
    """Applies a matrix on the last axis or, for a weight of four axes, a convolution of images with channels last.

    Args:
        x: Vectors, or images with channels last.
        weight: Matrix, or weight of a convolution.
        shift: Bias, or a shift with batch axes.
    """
    bias = shift if shift is not None and shift.ndim == 1 else None
    if weight.ndim == 2:
        y = F.linear(x, weight, bias)
    else:
        y = _on_images(x, lambda rows: F.conv2d(rows, weight, bias, padding=weight.shape[-1] // 2))
    return y if shift is None or shift.ndim == 1 else y + shift


def apply_transpose(v: Tensor, weight: Tensor) -> Tensor:
    """Applies the transpose of the linear map of :func:`apply_linear`.

    Args:
        v: Vectors, or images with channels last.
        weight: Matrix, or weight of a convolution.
    """
    if weight.ndim == 2:
        return v @ weight
    return _on_images(v, lambda rows: F.conv_transpose2d(rows, weight, padding=weight.shape[-1] // 2))


def _on_images(x: Tensor, convolve: LinearMap) -> Tensor:
    """Applies a convolution to images with channels last and any number of batch axes."""
    images = x.movedim(-1, -3)
    y = convolve(images.reshape(-1, *images.shape[-3:]))
    return y.reshape(*images.shape[:-3], *y.shape[-3:]).movedim(-3, -1)


@dataclass(frozen=True)
class FixedContextNet:
    """A :class:`SmoothMLP` or ``LipschitzConv`` for one context, which a solver calls many times.

    Args:
        weights: Weights of the layers.
        shifts: Biases of the layers. The first one contains the context and may have batch axes.
        rates: Rates of the Swish activations, after every layer but the last.
    """

    weights: Sequence[Tensor]
    shifts: Sequence[Tensor]
    rates: Sequence[Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.slopes(x)[0]

    def slopes(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the output and the slopes of the activations."""
        slopes = []
        for weight, shift, rate in zip(self.weights, self.shifts, self.rates, strict=False):
            x = apply_linear(x, weight, shift)
            gate = torch.sigmoid(rate * x)
            x = x * gate
            slopes.append(torch.lerp(gate, gate.new_ones(()), rate * x))  # gate + rate x (1 - gate)
        return apply_linear(x, self.weights[-1], self.shifts[-1]), slopes

    def linearize(self, x: Tensor) -> tuple[Tensor, LinearMap, LinearMap]:
        r"""Returns the output, :math:`v \mapsto J^\top v` and :math:`u \mapsto J u`. Extra axes of the vectors come before the batch
        axes.
        """
        y, slopes = self.slopes(x)

        def vjp(v: Tensor) -> Tensor:
            for weight, slope in zip(self.weights[:0:-1], slopes[::-1], strict=True):
                v = apply_transpose(v, weight) * slope
            return apply_transpose(v, self.weights[0])

        def jvp(u: Tensor) -> Tensor:
            for weight, slope in zip(self.weights, slopes, strict=False):
                u = apply_linear(u, weight) * slope
            return apply_linear(u, self.weights[-1])

        return y, vjp, jvp

    def trace_kernel(self) -> Tensor:
        r"""Returns the matrix for :meth:`trace`: :math:`\operatorname{diag} W_1 W_2`, or :math:`W_2 \odot (W_1 W_3)^\top` for two
        hidden layers.
        """
        first, *middle, last = self.weights
        return middle[0] * (first @ last).mT if middle else (first * last.mT).sum(-1)

    @staticmethod
    def trace(slopes: Sequence[Tensor], kernel: Tensor) -> Tensor:
        """Returns the trace of the Jacobian of a network with one or two hidden layers and equal lengths of input and output.

        Args:
            slopes: Slopes of the activations.
            kernel: Result of :meth:`trace_kernel`.
        """
        inner = slopes[0] * kernel if kernel.ndim == 1 else F.linear(slopes[0], kernel) * slopes[1]
        return inner.sum(-1)


class SmoothMLP(nn.Module):
    r"""Fully connected network :math:`y = W_n\, s(\dots s(W_1 x + V c + b_1) \dots) + b_n` on the last axis, with Swish activations.

    The activation is :math:`s(a) = a\,\sigma(\beta a)` (Ramachandran, Zoph & Le 2017) with a learned rate :math:`\beta > 0` in each
    layer. It is smooth, so that log-determinants, which depend on its slopes, have gradients. A product with the Jacobian costs as
    much as the network itself and needs no graph.

    Args:
        dim_in: Length of the input vectors.
        dim_out: Length of the output vectors.
        hidden: Widths of the hidden layers.
        context_dim: Length of the context vectors; 0 ignores the context.
        init_scale: Factor of the initial weights of the last layer, whose biases start at zero.

    >>> net = SmoothMLP(3, 2, hidden=(16,), context_dim=4)
    >>> net(torch.ones(5, 3), torch.ones(4)).shape
    torch.Size([5, 2])
    """

    @checked
    def __init__(
        self,
        dim_in: Count,
        dim_out: Count,
        hidden: Sequence[Dim] = (64, 64),
        context_dim: Length = 0,
        init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        widths = [dim_in, *hidden, dim_out]
        self._build([nn.Linear(before, after) for before, after in pairwise(widths)], context_dim, init_scale)

    rate_exponent = 0.0  # the initial rate of a layer is the number of its units to this power

    def _build(self, layers: Sequence[nn.Module], context_dim: int, init_scale: float) -> None:
        """Registers the layers and the rates of the activations, and scales the last layer."""
        self.layers, self.context_dim = nn.ModuleList(layers), context_dim
        first, last = layers[0].weight, layers[-1]
        self.condition = nn.Linear(context_dim, len(first), bias=False) if context_dim else None  # type: ignore[arg-type]
        rates = torch.tensor([len(layer.weight) ** self.rate_exponent for layer in layers[:-1]])  # type: ignore[arg-type]
        self.raw_rate = nn.Parameter(inverse_softplus(rates))
        with torch.no_grad():
            last.weight.mul_(init_scale)  # type: ignore[operator]
            last.bias.zero_()  # type: ignore[operator]

    def weights(self) -> list[Tensor]:
        """Returns the weights of the layers as the network applies them."""
        return [layer.weight for layer in self.layers]  # type: ignore[misc]

    def at_context(self, context: Tensor | None = None) -> FixedContextNet:
        """Returns the network for one context, with its weights computed once."""
        shifts: list[Tensor] = [layer.bias for layer in self.layers]  # type: ignore[misc]
        if self.condition is not None:
            context = check_context(context, self.context_dim)
            shift = F.linear(context, self.condition.weight, shifts[0])
            images = self.layers[0].weight.ndim == 4
            shifts[0] = shift[..., None, None, :] if images else shift
        return FixedContextNet(self.weights(), shifts, F.softplus(self.raw_rate).unbind())

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the outputs ``(..., dim_out)``.

        Args:
            x: Inputs ``(..., dim_in)``.
            context: Context vectors ``(..., context_dim)``, which broadcast to the batch of the inputs.
        """
        return self.at_context(context)(x)


@dataclass(frozen=True)
class AutogradNet:
    """A custom net for one context, with products with the Jacobian by automatic differentiation.

    Args:
        net: The net, which is called as ``net(z, context)``.
        context: Context vectors.
    """

    net: Callable[..., Tensor]
    context: Tensor | None

    def __call__(self, z: Tensor) -> Tensor:
        return check_output(self.net(z, self.context), z.shape)

    def linearize(self, z: Tensor) -> tuple[Tensor, LinearMap, LinearMap]:
        r"""Returns the output, :math:`v \mapsto J^\top v` and :math:`u \mapsto J u`."""
        step, pullback, *_ = torch.func.vjp(self, z)

        def map_rows(product: LinearMap, v: Tensor) -> Tensor:
            if v.ndim == z.ndim:
                return product(v)
            return torch.func.vmap(product)(v.expand(v.shape[0], *z.shape))

        def vjp(v: Tensor) -> Tensor:
            return map_rows(lambda row: pullback(row)[0], v)

        def jvp(u: Tensor) -> Tensor:
            with FORWARD_MODE_LOCK:
                return map_rows(lambda row: torch.func.jvp(self, (z,), (row,))[1], u)

        return step, vjp, jvp


class LipschitzMLP(SmoothMLP):
    r"""A :class:`~flowbnn.nets.smooth.SmoothMLP` with :math:`\lVert g(x) - g(x') \rVert \le L \lVert x - x' \rVert`, :math:`L < 1`.

    A matrix whose largest singular value exceeds :math:`L^{1/n}` is scaled down to it (spectral normalization: Gouk et al. 2018,
    Behrmann et al. 2019). The activation is LipSwish, :math:`a\,\sigma(\beta a) / 1.1`, of slope at most one and with a bounded
    second derivative (Chen et al. 2019, section 3.4). A normalized matrix gives each of :math:`n` units about :math:`1 / \sqrt n` of
    its input, where Swish is nearly linear. The rate :math:`\beta`, on which the bound does not depend, therefore starts at
    :math:`\sqrt n`. The context is not bounded, because the map is inverted for one context at a time.

    In training the singular value comes from one step of power iteration, with vectors that are saved as buffers. In ``eval()`` it is
    exact, so that the bound holds for the current weights, and no buffer changes.

    Args:
        dim_in: Length of the input vectors.
        dim_out: Length of the output vectors.
        hidden: Widths of the hidden layers.
        context_dim: Length of the context vectors; 0 ignores the context.
        init_scale: Factor of the initial weights of the last layer.
        lipschitz: Lipschitz constant :math:`L`.

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
        hidden: Sequence[Dim] = (64, 64),
        context_dim: Length = 0,
        init_scale: float = 0.1,
        lipschitz: Probability = 0.9,
    ) -> None:
        super().__init__(dim_in, dim_out, hidden, context_dim, init_scale)
        self._set_lipschitz(lipschitz, ())

    rate_exponent = 0.5
    power_steps = 20  # enough power iterations from a random or a slightly outdated vector

    def _set_lipschitz(self, lipschitz: float, size: Sequence[int]) -> None:
        """Sets the Lipschitz constant, and registers the vectors of the power iteration for images of this size."""
        self.lipschitz = lipschitz
        for index, weight in enumerate(super().weights()):
            self.register_buffer(f"left_{index}", torch.randn(*size, len(weight)))
            for _ in range(self.power_steps):
                self._power_step(index, weight.detach())

    def weights(self) -> list[Tensor]:
        bound = self.lipschitz ** (1 / len(self.layers))
        scaled = []
        for index, weight in enumerate(super().weights()):
            if self.training:
                value = self._power_step(index, weight)
            else:
                value = self._singular_value(index, weight, bound)
            # The slope of the Swish before this layer is at most 1.1 for every rate.
            gain = bound / (1.1 if index else 1.0)
            scaled.append(weight * (gain / value.clamp(min=bound)))
        return scaled

    def _power_step(self, index: int, weight: Tensor) -> Tensor:
        """Returns an estimate of the largest singular value of a layer, and updates its vector."""
        left = getattr(self, f"left_{index}")
        value, direction = power_step(weight, left)
        with torch.no_grad():
            left.copy_(direction)
        return value

    def _singular_value(self, index: int, weight: Tensor, floor: float) -> Tensor:
        """Returns the largest singular value of a layer: exact for matrices, by power iteration for convolutions."""
        if weight.shape[2:].numel() == 1:  # a matrix, or a 1x1 convolution
            matrix = weight.flatten(1)
            short_matrix = matrix if len(matrix) <= matrix.shape[1] else matrix.mT
            return (
                torch.linalg.eigvalsh(at_least_single(short_matrix @ short_matrix.mT))[-1]
                .clamp(min=floor**2)
                .sqrt()
            )
        left = getattr(self, f"left_{index}")
        with torch.no_grad():
            for _ in range(self.power_steps):
                left = power_step(weight, left)[1]
        return power_step(weight, left)[0]


class LipschitzConv(LipschitzMLP):
    """Contraction of images with channels last: convolutions instead of the matrices of a :class:`LipschitzMLP`.

    The first and the last convolution are 3x3 with zero padding, those between are 1x1 (Chen et al. 2019, appendix E). The largest
    singular value of a 3x3 convolution is that of the map of whole images, by power iteration (Gouk et al. 2018). In ``eval()``, 20
    steps start from the saved vectors. The estimate approaches the value from below. The bound is therefore exceeded slightly until
    the iteration has converged. Keep :math:`L` well below one.

    Args:
        shape: Height, width and number of channels of an image.
        hidden: Numbers of channels of the hidden layers.
        context_dim: Length of the context vectors, which shift the channels of the first hidden layer; 0 ignores the context.
        init_scale: Factor of the initial weights of the last layer.
        lipschitz: Lipschitz constant :math:`L`.

    >>> LipschitzConv((8, 8, 3), hidden=(16, 16))(torch.ones(5, 8, 8, 3)).shape
    torch.Size([5, 8, 8, 3])
    """

    @checked
    def __init__(
        self,
        shape: tuple[Count, Count, Count],
        hidden: Sequence[Dim] = (64, 64),
        context_dim: Length = 0,
        init_scale: float = 0.1,
        lipschitz: Probability = 0.9,
    ) -> None:
        nn.Module.__init__(self)
        *size, channels = shape
        widths = list(pairwise([channels, *hidden, channels]))
        kernels = [3 if index in (0, len(widths) - 1) else 1 for index in range(len(widths))]
        layers = [nn.Conv2d(*pair, k, padding=k // 2) for pair, k in zip(widths, kernels, strict=True)]
        self._build(layers, context_dim, init_scale)
        self._set_lipschitz(lipschitz, size)


def power_step(weight: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Makes one step of power iteration.

    Args:
        weight: Matrix, or weight of a convolution.
        left: Current left singular vector, or image.

    Returns:
        An estimate of the largest singular value, with its gradient, and the next left vector.
    """
    with torch.no_grad():
        right = apply_transpose(left, weight)
        right = right / torch.linalg.vector_norm(right).clamp(min=1e-12)
    image = apply_linear(right, weight)
    value = torch.linalg.vector_norm(image)
    # A zero matrix has no singular vector.
    return value, torch.where(value > 0, image / value.clamp(min=1e-12), left).detach()
