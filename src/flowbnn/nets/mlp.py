"""Fully connected conditioners, masked ones too, and distributions that a conditioner computes."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import signature
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError, describe_value
from flowbnn.numerics import soft_clamp
from flowbnn.options import Count, Ge, Positive, call_factory, checked

Length = Annotated[int, Ge(0)]


def check_context(context: Tensor | None, context_dim: int, owner: str = "") -> Tensor:
    """The context, if it has the length that a network reads; whose it is, its transform says."""
    if isinstance(context, Tensor) and context.shape[-1:] == (context_dim,):
        return context
    given, rows = "no context" if context is None else describe_value(context), ""
    if isinstance(context, Tensor):
        given = f"a context of shape {tuple(context.shape)}"
        if context.ndim == 1 and context_dim:
            rows = f"torch.nn.functional.one_hot(labels, {context_dim})" if context_dim > 1 else "x[:, None]"
    text = f"was made with context_dim={context_dim}, and is given {given}{rows and '; give ' + rows}"
    of_whom = {} if owner else {"unsigned": text}
    raise FlowBNNError(f"{owner or 'this network'} {text}", kind="shape", argument="context", **of_whom)


def with_context(value: Tensor, context: Tensor | None, context_dim: int, event_dim: int = 1) -> Tensor:
    """The value with the context behind it on the last axis, at every place of its events; a length of 0 ignores any context."""
    if context_dim == 0:
        return value
    context = check_context(context, context_dim)
    rows = context.to(value.dtype).reshape(*context.shape[:-1], *(1,) * (event_dim - 1), context_dim)
    try:
        rows = rows.expand(*value.shape[:-1], context_dim)
    except RuntimeError:
        text = f"gets a context of shape {tuple(context.shape)}, which does not broadcast to the batch of {tuple(value.shape)}"
        raise FlowBNNError(f"this network {text}", kind="shape", argument="context", unsigned=text) from None
    return torch.cat([value, rows], dim=-1)


def check_net(net: nn.Module, owner: str) -> None:
    """Refuse a net that does not take a context beside the values."""
    try:
        with suppress(ValueError):  # a traced module does not say what it takes
            signature(net.forward).bind(None, None)
    except TypeError:
        text = f"the net of {owner} is called as net(value, context), and {type(net).__name__} takes no second argument"
        raise FlowBNNError(f"{text}; nets such as flowbnn.nets.MLP do", argument="net") from None


def zero_init(layer: Any) -> Any:
    """A last layer that starts at zero, so that what it conditions starts at the identity."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def register_data_init(module: Any, wanted: bool) -> None:
    """Keep whether a module has ``started``, which may wait for the first batch; a loaded one does not start again."""
    module.register_buffer("initialized", torch.tensor(not wanted))
    # the same fact for Python, because a compiled graph must not branch on a tensor
    module.is_initialized = not wanted
    module.register_load_state_dict_post_hook(_read_initialized)


def _read_initialized(module: Any, keys: Any) -> None:
    module.is_initialized = bool(module.initialized)


def _stack_layers(
    layers: Sequence[nn.Module], last: nn.Module, activation: Callable[[], nn.Module]
) -> nn.Module:
    """Layers with activations after each, and a last one of zeros."""
    pairs = ((layer, call_factory(activation, name="activation", kind=nn.Module)) for layer in layers)
    return nn.Sequential(*(part for pair in pairs for part in pair), zero_init(last))


class MLP(nn.Module):
    r"""Fully connected network on the last axis, :math:`y = W_n\,\sigma(\dots\sigma(W_1 [x, c] + b_1)\dots) + b_n`.

    The last layer starts at zero, so that the network gives zeros for every input and what it conditions starts at
    the identity (Kingma & Dhariwal 2018, section 3.3). The hidden layers receive gradients from the second step on.

    Args:
        dim_in, dim_out: lengths of the input and output vectors.
        hidden: width of each hidden layer; ``()`` makes a linear map.
        activation: makes the nonlinearity between layers, for instance ``nn.ReLU`` or ``nn.Tanh``.
        context_dim: length of the context vectors that are concatenated to the input; 0 ignores any context.

    >>> net = MLP(3, 2, hidden=(16,), context_dim=4)
    >>> net(torch.ones(5, 3), torch.ones(4)).shape
    torch.Size([5, 2])
    """

    @checked
    def __init__(
        self,
        dim_in: Count,
        dim_out: Count,
        hidden: Sequence[Count] = (64, 64),
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Length = 0,
    ) -> None:
        super().__init__()
        widths = [dim_in + context_dim, *hidden, dim_out]
        self.context_dim = context_dim
        layers = [nn.Linear(before, after) for before, after in pairwise(widths[:-1])]
        self.layers = _stack_layers(layers, nn.Linear(widths[-2], dim_out), activation)

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """``value`` is ``(..., dim_in)``; ``context`` is ``(..., context_dim)`` and broadcasts to its batch axes."""
        return self.layers(with_context(value, context, self.context_dim))


class ConditionalNormal(nn.Module):
    r"""Independent normals :math:`\mathcal N(m, e^{2s})` whose :math:`m` and :math:`s` a net computes from what is given.

    Args:
        net: gives all means and then all log-scales on the last axis.
        bound: largest size of the log-scales, which are bounded softly.

    >>> ConditionalNormal(nn.Linear(3, 4))(torch.ones(5, 3)).rsample().shape
    torch.Size([5, 2])
    """

    @checked
    def __init__(self, net: nn.Module, bound: Positive = 4.0) -> None:
        super().__init__()
        self.net, self.bound = net, bound
        self.event_dim = int(getattr(net, "event_dim", 1))

    def forward(self, given: Tensor) -> Normal:
        loc, raw = (both := self.net(given)).chunk(2, dim=-1)
        if loc.shape != raw.shape:  # which would broadcast
            text = f"the net of ConditionalNormal gives means and as many log-scales, not {both.shape[-1]} numbers"
            raise FlowBNNError(text, kind="shape", argument="net")
        return Normal(loc, soft_clamp(raw, self.bound).exp(), validate_args=False)


class MaskedLinear(nn.Linear):
    r"""A linear map :math:`y = (M \circ W) x + b` with a fixed mask :math:`M`, which is kept in the ``state_dict``."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.to(self.weight.dtype))  # products with booleans are slow

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(value, self.weight * self.mask, self.bias)


class MaskedMLP(MLP):
    r"""The masked autoencoder MADE: output :math:`i` depends on the inputs that come before :math:`i` in an order, and on the context.

    Germain, Gregor, Murray & Larochelle 2015, https://arxiv.org/abs/1502.03509. Every unit has a degree: an input its place
    :math:`1 \dots D` in the order, the context 0, hidden units degrees spread evenly up to :math:`D - 1`. A hidden unit
    reads what has at most its degree, an output what has less. The last layer starts at zero.

    Args:
        dim: number :math:`D` of entries.
        params_per_entry: numbers for each entry, ``params_per_entry * dim`` on the last axis.
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
        params_per_entry: Count,
        hidden: Sequence[Count] = (64, 64),
        order: Sequence[int] | None = None,
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Length = 0,
        interleaved: bool = False,
        features: Count = 1,
    ) -> None:
        nn.Module.__init__(self)
        order = range(dim) if order is None else order
        if sorted(order) != list(range(dim)):
            text = f"an order names each of the {dim} entries exactly once, from 0 to {dim - 1}"
            raise FlowBNNError(text, argument="order")
        self.dim, self.context_dim, self.interleaved = dim, context_dim, interleaved
        place = torch.argsort(torch.tensor(list(order))) + 1
        if dim == 1 and not context_dim:
            hidden = ()  # there is nothing to read
        degrees = [torch.cat([place.repeat_interleave(features), place.new_zeros(context_dim)])]
        for width in hidden:
            degrees.append(torch.linspace(0 if context_dim else 1, dim - 1, width).floor().long())
        outputs = place.repeat_interleave(params_per_entry) if interleaved else place.repeat(params_per_entry)
        layers = [MaskedLinear(after[:, None] >= before) for before, after in pairwise(degrees)]
        self.layers = _stack_layers(layers, MaskedLinear(outputs[:, None] > degrees[-1]), activation)

    def passes(self, shape: Any) -> int:
        """The longest chain of entries that depend on each other, for events of this shape."""
        return self.dim
