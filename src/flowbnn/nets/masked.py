"""Networks whose output for an entry depends only on the entries before it."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length, with_context, zeroed
from flowbnn.options import Count, checked, made_by


class MaskedLinear(nn.Linear):
    r"""A linear map :math:`y = (M \circ W) x + b` with a fixed mask :math:`M`, which is kept in the ``state_dict``."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.to(self.weight.dtype))  # products with booleans are slow

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(value, self.weight * self.mask, self.bias)


class MaskedMLP(nn.Module):
    r"""The masked autoencoder MADE: output :math:`i` depends on the inputs that come before :math:`i` in an order, and on the context.

    Germain, Gregor, Murray & Larochelle 2015, https://arxiv.org/abs/1502.03509. Every unit has a degree: an input its place
    :math:`1 \dots D` in the order, the context 0, hidden units degrees spread evenly up to :math:`D - 1`. A hidden unit
    reads what has at most its degree, an output what has less. The last layer starts at zero.

    Args:
        dim: number :math:`D` of entries.
        per_entry: numbers for each entry, ``per_entry * dim`` on the last axis.
        hidden: width of each hidden layer, any number of any width.
        order: the entries from first to last, every number from 0 to ``dim - 1`` once; by default as they are.
        activation: makes the nonlinearity between layers.
        context_dim: length of the context vectors; 0 ignores any context.
        interleaved: the numbers of one entry lie side by side; else the first number of every entry, then the second, and so on.
        features: numbers that it reads of each entry, side by side.

    >>> net = MaskedMLP(3, 2, hidden=(16,), order=[2, 0, 1])
    >>> net(torch.ones(5, 3)).shape, net.passes((3,))
    (torch.Size([5, 6]), 3)
    """

    @checked
    def __init__(
        self,
        dim: Count,
        per_entry: Count,
        hidden: Sequence[Count] = (64, 64),
        order: Sequence[int] | None = None,
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Length = 0,
        interleaved: bool = False,
        features: Count = 1,
    ) -> None:
        super().__init__()
        order = range(dim) if order is None else order
        if sorted(order) != list(range(dim)):
            text = f"an order names each of the {dim} entries exactly once, from 0 to {dim - 1}"
            raise FlowBNNError(text, argument="order")
        self.dim, self.context_dim = dim, context_dim
        place = torch.argsort(torch.tensor(list(order))) + 1
        if dim == 1 and not context_dim:
            hidden = ()  # there is nothing to read
        degrees = [torch.cat([place.repeat_interleave(features), place.new_zeros(context_dim)])]
        for width in hidden:
            degrees.append(torch.linspace(0 if context_dim else 1, dim - 1, width).floor().long())
        layers: list[nn.Module] = []
        for before, after in pairwise(degrees):
            layers += [MaskedLinear(after[:, None] >= before)]
            layers += [made_by(activation, name="activation", kind=nn.Module)]
        outputs = place.repeat_interleave(per_entry) if interleaved else place.repeat(per_entry)
        self.layers = nn.Sequential(*layers, zeroed(MaskedLinear(outputs[:, None] > degrees[-1])))

    def passes(self, shape: Any) -> int:
        """The longest chain of entries that depend on each other, for events of this shape."""
        return self.dim

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """``value`` is ``(..., features * dim)``; ``context`` is ``(..., context_dim)`` and broadcasts to its batch axes."""
        return self.layers(with_context(value, context, self.context_dim))
