"""Fully connected networks, masked networks, and distributions whose parameters a network computes."""

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
from flowbnn.options import Count, Dim, Ge, Positive, call_factory, checked

Length = Annotated[int, Ge(0)]


def check_context(context: Tensor | None, context_dim: int, owner: str = "") -> Tensor:
    """Returns the context. Raises FlowBNNError if its vectors do not have the length that a network reads.

    Args:
        context: Context vectors.
        context_dim: Length that the network reads.
        owner: Name of the owner of the network. A composition of transforms adds it if it is empty.
    """
    if isinstance(context, Tensor) and context.shape[-1:] == (context_dim,):
        return context
    description = "no context" if context is None else describe_value(context)
    if isinstance(context, Tensor):
        example = f"torch.nn.functional.one_hot(labels, {context_dim})" if context_dim > 1 else "x[:, None]"
        hint = f"; use {example}" if context_dim and context.ndim == 1 else ""
        description = f"context shape {tuple(context.shape)}{hint}"
    raise _context_error(f"has context_dim={context_dim}, got {description}", owner)


def _context_error(predicate: str, owner: str = "") -> FlowBNNError:
    """Returns an error about a context; its field ``predicate`` lets a composition add the owner."""
    fields = {} if owner else {"predicate": predicate}
    text = f"{owner or 'this network'} {predicate}"
    return FlowBNNError(text, kind="shape", argument="context", **fields)


def batch_error(batch: Sequence[int], context: Sequence[int], owner: str = "") -> FlowBNNError:
    """Returns the error of a context that does not broadcast to the values.

    Args:
        batch: Batch shape of the values.
        context: Batch shape of the context vectors.
        owner: Name of the owner of the network, as in :func:`check_context`.
    """
    text = f"needs a context that broadcasts to batch shape {tuple(batch)}, got {tuple(context)}"
    return _context_error(text, owner)


def check_output(output: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns the output of a net. Raises FlowBNNError if it does not have the expected shape."""
    if output.shape != shape:
        text = f"net must return shape {tuple(shape)}, got {tuple(output.shape)}"
        raise FlowBNNError(text, kind="shape", argument="net")
    return output


def check_order(order: Any, dim: int) -> None:
    """Raises FlowBNNError unless an order contains every index from 0 to ``dim - 1`` once."""
    if not dim or not isinstance(order, Sequence) or sorted(order) != list(range(dim)):
        raise FlowBNNError(f"order must be a permutation of range({dim}), got {order}", argument="order")


def with_context(value: Tensor, context: Tensor | None, context_dim: int, event_dim: int = 1) -> Tensor:
    """Appends the context to the last axis of a value, at every position of its events.

    Args:
        value: Events on the last ``event_dim`` axes.
        context: Context vectors, which broadcast to the batch.
        context_dim: Length of the context vectors; 0 ignores the context.
        event_dim: Number of axes of an event.
    """
    if context_dim == 0:
        return value
    context = check_context(context, context_dim)
    rows = context.to(value.dtype).reshape(*context.shape[:-1], *(1,) * (event_dim - 1), context_dim)
    try:
        rows = rows.expand(*value.shape[:-1], context_dim)
    except RuntimeError:
        raise batch_error(value.shape[: value.ndim - event_dim], context.shape[:-1]) from None
    return torch.cat([value, rows], dim=-1)


def check_net(net: nn.Module, owner: str) -> None:
    """Raises FlowBNNError if a net does not accept a context as second argument."""
    try:
        with suppress(ValueError):  # a traced module has no signature
            signature(net.forward).bind(None, None)
    except TypeError:
        text = f"{owner} calls net(value, context), {type(net).__name__} accepts one argument; use flowbnn.nets.ConditionerMLP"
        raise FlowBNNError(text, argument="net") from None


def zero_init(layer: Any) -> Any:
    """Sets all parameters of a last layer to zero, so that a transform starts at the identity. Returns the layer."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def register_data_init(module: Any, data_init: bool) -> None:
    """Registers the flag of a module that the first batch may initialize. Loaded modules are not initialized again.

    Args:
        module: The module.
        data_init: If True, the first batch will initialize the module. If False, it is initialized already.
    """
    module.register_buffer("initialized", torch.tensor(not data_init))
    # The same flag in Python, because a compiled graph cannot branch on a tensor.
    module.is_initialized = not data_init
    module.register_load_state_dict_post_hook(_read_initialized)


def _read_initialized(module: Any, incompatible_keys: Any) -> None:
    """Copies the flag from the loaded buffer."""
    module.is_initialized = bool(module.initialized)


def _stack_layers(
    layers: Sequence[nn.Module], last: nn.Module, activation: Callable[[], nn.Module]
) -> nn.Module:
    """Returns a network of layers with an activation after each, and a last layer of zeros."""
    pairs = ((layer, call_factory(activation, name="activation", kind=nn.Module)) for layer in layers)
    return nn.Sequential(*(module for pair in pairs for module in pair), zero_init(last))


class ConditionerMLP(nn.Module):
    r"""Fully connected network on the last axis, :math:`y = W_n\,\sigma(\dots\sigma(W_1 [x, c] + b_1)\dots) + b_n`.

    The last layer starts at zero, so that the network returns zeros and the transform that it conditions starts at the identity
    (Kingma & Dhariwal 2018, section 3.3). The hidden layers receive gradients from the second step on.

    Args:
        dim_in: Length of the input vectors.
        dim_out: Length of the output vectors.
        hidden: Widths of the hidden layers; ``()`` makes a linear map.
        activation: Function that makes the activation between layers, for instance ``nn.ReLU`` or ``nn.Tanh``.
        context_dim: Length of the context vectors that are concatenated to the input; 0 ignores the context.

    >>> net = ConditionerMLP(3, 2, hidden=(16,), context_dim=4)
    >>> net(torch.ones(5, 3), torch.ones(4)).shape
    torch.Size([5, 2])
    """

    @checked
    def __init__(
        self,
        dim_in: Count,
        dim_out: Count,
        hidden: Sequence[Dim] = (64, 64),
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Length = 0,
    ) -> None:
        super().__init__()
        widths = [dim_in + context_dim, *hidden, dim_out]
        self.context_dim = context_dim
        layers = [nn.Linear(before, after) for before, after in pairwise(widths[:-1])]
        self.layers = _stack_layers(layers, nn.Linear(widths[-2], dim_out), activation)

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the outputs ``(..., dim_out)``.

        Args:
            value: Inputs ``(..., dim_in)``.
            context: Context vectors ``(..., context_dim)``, which broadcast to the batch of the inputs.
        """
        return self.layers(with_context(value, context, self.context_dim))


class ConditionalNormal(nn.Module):
    r"""Independent normals :math:`\mathcal N(m, e^{2s})` whose :math:`m` and :math:`s` a net computes from its input.

    Args:
        net: Net that returns all means and then all log-scales on the last axis.
        bound: Largest absolute value of the log-scales, which are bounded softly.

    >>> ConditionalNormal(nn.Linear(3, 4))(torch.ones(5, 3)).rsample().shape
    torch.Size([5, 2])
    """

    @checked
    def __init__(self, net: nn.Module, bound: Positive = 4.0) -> None:
        super().__init__()
        self.net, self.bound = net, bound
        self.event_dim = int(getattr(net, "event_dim", 1))

    def forward(self, inputs: Tensor) -> Normal:
        output = self.net(inputs)
        loc, raw = output.chunk(2, dim=-1)
        check_output(output, (*loc.shape[:-1], 2 * loc.shape[-1]))  # different lengths would broadcast
        return Normal(loc, soft_clamp(raw, self.bound).exp(), validate_args=False)


class MaskedLinear(nn.Linear):
    r"""Linear map :math:`y = (M \circ W) x + b` with a fixed mask :math:`M`, which is saved in the ``state_dict``.

    Args:
        mask: Mask ``(out, in)``.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.to(self.weight.dtype))  # products with booleans are slow

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(value, self.weight * self.mask, self.bias)


class MaskedMLP(ConditionerMLP):
    r"""Masked autoencoder MADE: output :math:`i` depends on the context and on the inputs before :math:`i` in an order.

    Germain, Gregor, Murray & Larochelle 2015, https://arxiv.org/abs/1502.03509. Every unit has a degree. An input has its position
    :math:`1 \dots D` in the order, the context has 0, and hidden units have degrees spread evenly up to :math:`D - 1`. A hidden unit
    reads units of at most its degree, an output reads units of a lower degree. The last layer starts at zero.

    Args:
        dim: Number :math:`D` of entries.
        params_per_entry: Number of outputs for each entry; the last axis has ``params_per_entry * dim``.
        hidden: Widths of the hidden layers.
        order: Entries from first to last, every index from 0 to ``dim - 1`` once; by default in their own order.
        activation: Function that makes the activation between layers.
        context_dim: Length of the context vectors; 0 ignores the context.
        interleaved: If True, the outputs of one entry are adjacent. Otherwise the first outputs of all entries come first, and so on.
        features: Number of adjacent inputs for each entry.

    >>> net = MaskedMLP(3, 2, hidden=(16,), order=[2, 0, 1])
    >>> net(torch.ones(5, 3)).shape, net.passes((3,))
    (torch.Size([5, 6]), 3)
    """

    @checked
    def __init__(
        self,
        dim: Count,
        params_per_entry: Count,
        hidden: Sequence[Dim] = (64, 64),
        order: Sequence[int] | None = None,
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Length = 0,
        interleaved: bool = False,
        features: Count = 1,
    ) -> None:
        nn.Module.__init__(self)
        order = list(range(dim) if order is None else order)
        check_order(order, dim)
        self.dim, self.context_dim, self.interleaved = dim, context_dim, interleaved
        position = torch.argsort(torch.tensor(order)) + 1
        if dim == 1 and not context_dim:
            hidden = ()  # there are no inputs
        degrees = [torch.cat([position.repeat_interleave(features), position.new_zeros(context_dim)])]
        for width in hidden:
            degrees.append(torch.linspace(0 if context_dim else 1, dim - 1, width).floor().long())
        outputs = (
            position.repeat_interleave(params_per_entry) if interleaved else position.repeat(params_per_entry)
        )
        layers = [MaskedLinear(after[:, None] >= before) for before, after in pairwise(degrees)]
        self.layers = _stack_layers(layers, MaskedLinear(outputs[:, None] > degrees[-1]), activation)

    def passes(self, shape: Any) -> int:
        """Returns the length of the longest chain of dependent entries, for events of this shape."""
        return self.dim
