"""A smooth fully connected network that knows its Jacobian in closed form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.nets.mlp import Length, check_context
from flowbnn.options import Count, checked

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Evaluated:
    """A :class:`SmoothMLP` with its weights and its context worked in: what a solver calls many times.

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
            x = F.linear(x, weight, shift) if shift.ndim == 1 else F.linear(x, weight) + shift
            gate = torch.sigmoid(rate * x)
            x = x * gate
            slopes.append(torch.lerp(gate, torch.ones_like(rate), rate * x))  # gate + rate x (1 - gate)
        weight, shift = self.weights[-1], self.shifts[-1]
        return F.linear(x, weight, shift) if shift.ndim == 1 else F.linear(x, weight) + shift, slopes

    def linearize(self, x: Tensor) -> tuple[Tensor, Product, Product]:
        r"""The output, :math:`v \mapsto J^\top v` and :math:`u \mapsto J u`; further axes of the vectors come before the batch's."""
        y, slopes = self.slopes(x)

        def pull(v: Tensor) -> Tensor:
            for weight, slope in zip(self.weights[:0:-1], slopes[::-1], strict=True):
                v = (v @ weight) * slope
            return v @ self.weights[0]

        def push(u: Tensor) -> Tensor:
            for weight, slope in zip(self.weights, slopes, strict=False):
                u = F.linear(u, weight) * slope
            return F.linear(u, self.weights[-1])

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
        dim_in: length of the input vectors.
        dim_out: length of the output vectors.
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
        self.context_dim = context_dim
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.condition = nn.Linear(context_dim, widths[1], bias=False) if context_dim else None
        self.raw_rate = nn.Parameter(torch.full((len(hidden),), 0.5))
        with torch.no_grad():
            self.layers[-1].weight.mul_(start)  # type: ignore[operator]
            self.layers[-1].bias.zero_()  # type: ignore[operator]

    def weights(self) -> list[Tensor]:
        """The matrices of the layers, as the network applies them."""
        return [layer.weight for layer in self.layers]  # type: ignore[misc]

    def given(self, context: Tensor | None = None) -> Evaluated:
        """The network for one context, its weights worked out once."""
        shifts: list[Tensor] = [layer.bias for layer in self.layers]  # type: ignore[misc]
        if self.condition is not None:
            context = check_context(context, self.context_dim)
            shifts[0] = F.linear(context, self.condition.weight, shifts[0])
        return Evaluated(self.weights(), shifts, F.softplus(self.raw_rate).unbind())

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """``x`` is ``(..., dim_in)``; ``context`` is ``(..., context_dim)`` and broadcasts to its batch axes."""
        return self.given(context)(x)


class Traced:
    """A user's net, whose products with the Jacobian are traced."""

    def __init__(self, net: Callable[..., Tensor], context: Tensor | None) -> None:
        self.net, self.context = net, context

    def __call__(self, z: Tensor) -> Tensor:
        return self.net(z, self.context)

    def linearize(self, z: Tensor) -> tuple[Tensor, Product, Product]:
        step, transposed, *_ = torch.func.vjp(self, z)

        def each(product: Product, v: Tensor) -> Tensor:
            if v.ndim == z.ndim:
                return product(v)
            return torch.func.vmap(product)(v.expand(v.shape[0], *z.shape))

        return (
            step,
            lambda v: each(lambda one: transposed(one)[0], v),
            lambda u: each(lambda one: torch.func.jvp(self, (z,), (one,))[1], u),
        )
