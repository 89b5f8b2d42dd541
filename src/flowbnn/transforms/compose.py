"""Transforms made of transforms."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import MLP, check_context
from flowbnn.numerics import sum_rightmost
from flowbnn.options import Count, Hint, checked
from flowbnn.transforms.base import (
    BidirectionalTransform,
    Transform,
    check_dense,
    check_tensor,
    transform_error,
)

# what a chain declares is the weakest of its parts: the first of these ...
_WEAKEST = {
    "linearity": ("none", "affine", "diagonal"),
    "inverse_kind": ("none", "numerical", "exact"),
    "log_det_kind": ("estimate", "exact"),
}
# ... or, of directions, what neither of two parts would have alone
_DIRECTIONS = {"draws": ("none", "both"), "solver": ("none", "both"), "cheap": ("both", "none")}
_TURNED = {"none": "none", "forward": "inverse", "inverse": "forward", "both": "both"}


def apply_transform(
    part: Transform, value: Tensor, context: Tensor | None, inverse: bool, extra: int, path: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """One part of a chain, whose events have ``extra`` axes more than the part's; an error tells its place."""
    try:
        if context is not None:
            check_dense(value, part)
            check_dense(context, part)
            if context.ndim == 0:
                raise transform_error(
                    part, f"takes a context of vectors, not the number {context.item():g}", "shape"
                )
            context = context.to(value.dtype) if value.is_floating_point() else context
            context = context.reshape(*context.shape[:-1], *(1,) * extra, *context.shape[-1:])
            cut = max(0, value.ndim - (part.sample_dim if inverse else part.event_dim))
            batch = broadcast_batch_shapes(
                value.shape[:cut], context.shape[:-1], f"the values of {type(part).__name__}"
            )
            value = value.expand(batch + value.shape[cut:])
        value, log_det = part.inverse(value, context) if inverse else part.forward(value, context)
    except FlowBNNError as error:
        raise add_location(error, part, path) from None
    return value, sum_rightmost(log_det, extra)


def add_location(error: FlowBNNError, part: Transform, path: tuple[int, ...]) -> FlowBNNError:
    """What a part of a chain says, with its place."""
    fields = {"reason": str(error), **error.fields, "place": path[0]}
    fields["path"] = (*path, *error.fields.get("path", ()))  # 0.2 is the third part of the first
    if text := fields.pop("unsigned", ""):
        fields["reason"] = f"{type(part).__name__} {text}"
    where = ".".join(map(str, fields["path"]))
    return FlowBNNError(f"part {where} of the flow: {fields['reason']}", **fields)


def broadcast_batch_shapes(batch: torch.Size, context: torch.Size, name: str) -> torch.Size:
    """The batch shape of what is named and of the context."""
    try:
        return torch.broadcast_shapes(batch, context)
    except RuntimeError:
        text = f"the batch shapes of {name}, {tuple(batch)}, and of the context, {tuple(context)}, do not fit each other"
        raise FlowBNNError(text, kind="shape", argument="context") from None


class Compose(BidirectionalTransform):
    r"""One transform after another: ``Compose(f, g)`` maps :math:`z \mapsto g(f(z))`, the order of application.

    Its events have as many axes as the parts need, and log-dets are summed to that shape; a part of smaller events, such as one that
    acts on the channels of an image, sees the context at each of them. What it declares is the weakest of its parts.
    An empty ``Compose()`` is the identity on vectors.

    >>> from flowbnn.transforms import Exp, Reverse
    >>> x, log_det = Compose(Exp(), Reverse(3))(torch.tensor([0.0, 1.0, 2.0]))
    >>> x, log_det
    (tensor([7.3891, 2.7183, 1.0000]), tensor(3.))
    """

    @checked
    def __init__(self, *parts: Annotated[Transform, Hint("for a list write Compose(*parts)")]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        changes = list(accumulate((part.sample_dim - part.event_dim for part in parts), initial=0))
        beyond = [part.event_dim - change for part, change in zip(parts, changes, strict=False)]
        self.event_dim = max(beyond, default=1)
        self.sample_axes = self.event_dim + changes[-1]
        self._extra = [self.event_dim - axes for axes in beyond]  # axes of events that are the part's batch
        for name, order in _WEAKEST.items():
            kinds = {getattr(part, name) for part in parts}
            setattr(self, name, min(kinds, key=order.index, default=order[-1]))
        for name, (least, most) in _DIRECTIONS.items():
            kinds = {getattr(part, name) for part in parts} - {least}
            setattr(self, name, most if len(kinds) > 1 else min(kinds, default=least))
        for part in parts:  # the last that says so
            self.discrete = part.discrete or (self.discrete and not part.discrete_base)
        for part in reversed(parts):
            self.discrete_base = part.discrete_base or (self.discrete_base and not part.discrete)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        parts = list(enumerate(self))
        total: Tensor | None = None
        for place, part in reversed(parts) if inverse else parts:
            value, log_det = apply_transform(part, value, context, inverse, self._extra[place], (place,))
            total = log_det if total is None else total + log_det
        if total is None:
            check_tensor(value, self)
            total = value.new_zeros(value.shape[:-1])
        return value, total

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        for part in self:
            shape = part.forward_shape(shape)
        return torch.Size(shape)

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        for part in reversed(list(self)):
            shape = part.inverse_shape(shape)
        return torch.Size(shape)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.parts)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Transform:
        return self.parts[index]  # type: ignore[return-value]


class Inverse(BidirectionalTransform):
    r"""The same map run backwards: its forward is the part's inverse.

    A surjection that gives a bound on log-densities gives them exactly when it is run backwards, and the reverse.

    >>> from flowbnn.transforms import Exp
    >>> Inverse(Exp())(torch.tensor([1.0]))[0]
    tensor([0.])
    """

    @checked
    def __init__(self, part: Transform) -> None:
        super().__init__()
        if part.inverse_kind == "none":
            raise FlowBNNError(f"{type(part).__name__} has no inverse, so Inverse cannot run it backwards")
        self.part = part
        self.event_dim, self.sample_axes = part.sample_dim, part.event_dim
        for name in _WEAKEST:
            setattr(self, name, getattr(part, name))
        for name in _DIRECTIONS:
            setattr(self, name, _TURNED[getattr(part, name)])
        self.discrete, self.discrete_base = part.discrete_base, part.discrete

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        return self.part.forward(value, context) if inverse else self.part.inverse(value, context)

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        return self.part.inverse_shape(shape)

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        return self.part.forward_shape(shape)


class Amortized(BidirectionalTransform):
    r"""A transform whose parameters are :math:`\theta + \mathrm{net}(c)`, others for every context :math:`c`.

    This is how planar, radial and Sylvester flows are conditioned on an encoder (Rezende and Mohamed 2015; van den Berg et al. 2018).
    The net's last layer starts at zero: at first every context has the transform's own parameters :math:`\theta`.

    Args:
        transform: of vectors, which reads no context itself.
        context_dim: length of the context.
        hidden: widths between; ``()`` makes the net linear.

    >>> from flowbnn.transforms import Radial
    >>> flow = Amortized(Radial(3), context_dim=5)
    >>> flow(torch.ones(2, 3), torch.ones(2, 5))[0].shape
    torch.Size([2, 3])
    """

    @checked
    def __init__(self, transform: Transform, context_dim: Count, hidden: Sequence[Count] = ()) -> None:
        super().__init__()
        self.transform, self.context_dim = transform, context_dim
        for declared in ("event_dim", "inverse_kind", "linearity", "cheap", "solver"):
            setattr(self, declared, getattr(transform, declared))
        self.sizes = [parameter.numel() for parameter in transform.parameters()]
        kinds = {getattr(type(part), "ends", Transform.ends) for part in transform.modules()}
        vectors = transform.event_dim == transform.sample_dim == 1 and kinds == {Transform.ends}
        if not vectors or transform.stochastic or not sum(self.sizes):
            text = "Amortized takes a transform of all real vectors that has parameters and draws nothing; put Sigmoid after it"
            raise FlowBNNError(f"{text}, not {type(transform).__name__}", argument="transform")
        # in a tuple, so that its parameters are not counted twice
        self._turned: tuple[Inverse, ...] = (Inverse(transform),) if transform.inverse_kind != "none" else ()
        self.net = MLP(context_dim, sum(self.sizes), hidden)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        if inverse and not self._turned:
            return Transform.inverse(self, value)
        context = check_context(context, self.context_dim)
        batch = broadcast_batch_shapes(value.shape[:-1], context.shape[:-1], "the values of Amortized")
        if value.ndim == 0:
            raise transform_error(self, "takes vectors, not a number", "shape")
        value = value.expand(*batch, value.shape[-1])
        if not value.numel():  # vmap takes no empty batch
            return self.transform.inverse(value) if inverse else self.transform.forward(value)
        flat = self.net(context)
        parts = flat.expand(*batch, flat.shape[-1]).flatten(0, -2) if batch else flat.unsqueeze(0)
        parts = parts.split(self.sizes, -1)
        whole, prefix = (self._turned[0], "part.") if inverse else (self.transform, "")
        given = {
            prefix + name: own + part.reshape(-1, *own.shape)
            for (name, own), part in zip(self.transform.named_parameters(), parts, strict=True)
        }
        rows = value.reshape(-1, value.shape[-1])
        result, log_det = vmap(lambda row, given: functional_call(whole, given, (row,)))(rows, given)
        return result.reshape(*batch, result.shape[-1]), log_det.reshape(batch)
