"""Transforms that are made of other transforms: compositions, inverses and amortized transforms."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.func import functional_call, vmap

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import ConditionerMLP, batch_error, check_context
from flowbnn.numerics import sum_rightmost
from flowbnn.options import Count, Dim, Hint, checked
from flowbnn.transforms.base import (
    BidirectionalTransform,
    Transform,
    check_dense,
    check_tensor,
    transform_error,
)

# A composition declares the first of these values that one of its transforms has.
_WEAKEST_FIRST = {
    "linearity": ("none", "affine", "diagonal"),
    "inverse_kind": ("none", "numerical", "exact"),
    "log_det_kind": ("estimate", "exact"),
}
# For directions: the neutral value, and the value of a composition of transforms that have different ones.
_DIRECTIONS = {"draws": ("none", "both"), "solver": ("none", "both"), "cheap": ("both", "none")}


def apply_transform(
    transform: Transform,
    value: Tensor,
    context: Tensor | None,
    inverse: bool,
    extra_axes: int,
    path: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Applies one transform of a composition.

    Args:
        transform: The transform.
        value: Values to transform.
        context: Context vectors, which are broadcast to the batch.
        inverse: If True, applies the inverse.
        extra_axes: Number of axes that events of the composition have in addition to those of the transform.
        path: Position in the composition; (0, 2) is the third transform of the first one.

    Returns:
        The new values, and the log-determinants summed over the extra axes.

    Raises:
        FlowBNNError: An error of the transform, with its position in the composition.
    """
    try:
        if context is not None:
            check_dense(value, transform)
            check_dense(context, transform)
            context = context.to(value.dtype) if value.is_floating_point() else context
            context = context.reshape((*context.shape[:-1], *(1,) * extra_axes, *context.shape[-1:]))
            batch_dim = max(0, value.ndim - (transform.sample_dim if inverse else transform.event_dim))
            batch = broadcast_batch_shapes(value.shape[:batch_dim], context.shape[:-1], transform)
            value = value.expand(batch + value.shape[batch_dim:])
        value, log_det = transform.inverse(value, context) if inverse else transform.forward(value, context)
    except FlowBNNError as error:
        raise add_location(error, transform, path) from None
    return value, sum_rightmost(log_det, extra_axes)


def add_location(error: FlowBNNError, transform: Transform, path: tuple[int, ...]) -> FlowBNNError:
    """Returns an error with the position of the transform that raised it.

    Args:
        error: Error of the transform.
        transform: The transform, which is named if the error does not name one.
        path: Position of the transform in the composition.
    """
    fields = {"reason": str(error), **error.fields, "place": path[0]}
    fields["path"] = (*path, *error.fields.get("path", ()))
    if predicate := fields.pop("predicate", ""):
        fields["reason"] = f"{type(transform).__name__} {predicate}"
    location = ".".join(map(str, fields["path"]))
    return FlowBNNError(f"transform {location} of the flow: {fields['reason']}", **fields)


def broadcast_batch_shapes(batch: Sequence[int], context: Sequence[int], owner: object) -> torch.Size:
    """Returns the common batch shape of values and context vectors.

    Args:
        batch: Batch shape of the values.
        context: Batch shape of the context vectors.
        owner: Transform or distribution that is named in the message.

    Raises:
        FlowBNNError: The shapes do not broadcast.
    """
    try:
        return torch.broadcast_shapes(batch, context)
    except RuntimeError:
        raise batch_error(batch, context, type(owner).__name__) from None


class Compose(BidirectionalTransform):
    r"""Composition of transforms: ``Compose(f, g)`` maps :math:`z \mapsto g(f(z))`, the order of application.

    Events have as many axes as the transforms need, and log-determinants are summed to that shape. A transform of smaller events,
    such as one that acts on the channels of an image, reads the context at each of them. A composition declares the weakest property
    of its transforms. An empty ``Compose()`` is the identity on vectors.

    Args:
        transforms: Transforms in the order of application.

    >>> from flowbnn.transforms import Exp, Reverse
    >>> x, log_det = Compose(Exp(), Reverse(3))(torch.tensor([0.0, 1.0, 2.0]))
    >>> x, log_det
    (tensor([7.3891, 2.7183, 1.0000]), tensor(3.))
    """

    @checked
    def __init__(self, *transforms: Annotated[Transform, Hint("write Compose(*transforms)")]) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(transforms)
        gains = accumulate((each.sample_dim - each.event_dim for each in transforms), initial=0)
        axes_gained = list(gains)  # axes that events have gained before each transform, and after the last
        axes_needed = [each.event_dim - gain for each, gain in zip(transforms, axes_gained, strict=False)]
        self.event_dim = max(axes_needed, default=1)
        self.sample_axes = self.event_dim + axes_gained[-1]
        self._extra_axes = [self.event_dim - axes for axes in axes_needed]
        for name, order in _WEAKEST_FIRST.items():
            kinds = {getattr(each, name) for each in transforms}
            setattr(self, name, min(kinds, key=order.index, default=order[-1]))
        for name, (neutral, mixed) in _DIRECTIONS.items():
            kinds = {getattr(each, name) for each in transforms} - {neutral}
            setattr(self, name, mixed if len(kinds) > 1 else min(kinds, default=neutral))
        for each in transforms:  # the last transform that changes the kind of numbers decides
            self.discrete = each.discrete or (self.discrete and not each.discrete_base)
        for each in reversed(transforms):
            self.discrete_base = each.discrete_base or (self.discrete_base and not each.discrete)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        steps = list(enumerate(self))
        total: Tensor | None = None
        for index, transform in reversed(steps) if inverse else steps:
            extra_axes = self._extra_axes[index]
            value, log_det = apply_transform(transform, value, context, inverse, extra_axes, (index,))
            total = log_det if total is None else total + log_det
        if total is None:
            check_tensor(value, self)
            total = value.new_zeros(value.shape[:-1])
        return value, total

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        for transform in self:
            shape = transform.forward_shape(shape)
        return torch.Size(shape)

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        for transform in reversed(list(self)):
            shape = transform.inverse_shape(shape)
        return torch.Size(shape)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.transforms)

    def __getitem__(self, index: int) -> Transform:
        return self.transforms[index]  # type: ignore[return-value]


class Inverse(BidirectionalTransform):
    r"""Inverse of a transform: its forward is the inverse of that transform.

    The inverse of a surjection that gives a bound on log-densities gives them exactly, and vice versa.

    Args:
        transform: Transform to invert.

    >>> from flowbnn.transforms import Exp
    >>> Inverse(Exp())(torch.tensor([1.0]))[0]
    tensor([0.])
    """

    @checked
    def __init__(self, transform: Transform) -> None:
        super().__init__()
        if transform.inverse_kind == "none":
            raise transform_error(transform, "has no inverse", argument="transform")
        self.transform = transform
        self.event_dim, self.sample_axes = transform.sample_dim, transform.event_dim
        for name in _WEAKEST_FIRST:
            setattr(self, name, getattr(transform, name))
        opposite = {"forward": "inverse", "inverse": "forward"}
        for name in _DIRECTIONS:
            direction = getattr(transform, name)
            setattr(self, name, opposite.get(direction, direction))
        self.discrete, self.discrete_base = transform.discrete_base, transform.discrete

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        return self.transform.forward(value, context) if inverse else self.transform.inverse(value, context)

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        return self.transform.inverse_shape(shape)

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        return self.transform.forward_shape(shape)


class Amortized(BidirectionalTransform):
    r"""Transform whose parameters :math:`\theta + \mathrm{net}(c)` depend on the context :math:`c`.

    Planar, radial and Sylvester flows are conditioned on an encoder in this way (Rezende and Mohamed 2015; van den Berg et al. 2018).
    The last layer of the net starts at zero, so that every context starts with the transform's own parameters :math:`\theta`.

    Args:
        transform: Transform of vectors that reads no context itself.
        context_dim: Length of the context vectors.
        hidden: Widths of the hidden layers of the net; ``()`` makes it linear.

    >>> from flowbnn.transforms import Radial
    >>> flow = Amortized(Radial(3), context_dim=5)
    >>> flow(torch.ones(2, 3), torch.ones(2, 5))[0].shape
    torch.Size([2, 3])
    """

    @checked
    def __init__(self, transform: Transform, context_dim: Count, hidden: Sequence[Dim] = ()) -> None:
        super().__init__()
        self.transform, self.context_dim = transform, context_dim
        for name in ("event_dim", "inverse_kind", "linearity", "cheap", "solver"):
            setattr(self, name, getattr(transform, name))
        self.sizes = [parameter.numel() for parameter in transform.parameters()]
        regions = [
            (module.domain, module.codomain)
            for module in transform.modules()
            if isinstance(module, Transform)
        ]
        unbounded = all(region == (constraints.real, constraints.real) for region in regions)
        of_vectors = transform.event_dim == transform.sample_dim == 1
        if not of_vectors or not unbounded or transform.stochastic or not sum(self.sizes):
            text = "Amortized needs a deterministic transform of all real vectors that has parameters"
            raise FlowBNNError(f"{text}, got {type(transform).__name__}", argument="transform")
        # In a tuple, so that the parameters are not registered twice.
        self._inverse: tuple[Inverse, ...] = (Inverse(transform),) if transform.inverse_kind != "none" else ()
        self.net = ConditionerMLP(context_dim, sum(self.sizes), hidden)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        if inverse and not self._inverse:
            return Transform.inverse(self, value)
        context = check_context(context, self.context_dim)
        batch = broadcast_batch_shapes(value.shape[:-1], context.shape[:-1], self)
        if value.ndim == 0:
            raise transform_error(self, "needs vectors, got a number", "shape")
        value = value.expand(*batch, value.shape[-1])
        if not value.numel():  # vmap accepts no empty batch
            return self.transform.inverse(value) if inverse else self.transform.forward(value)
        flat = self.net(context)
        flat = flat.expand(*batch, flat.shape[-1]).flatten(0, -2) if batch else flat.unsqueeze(0)
        offsets = flat.split(self.sizes, -1)
        module, prefix = (self._inverse[0], "transform.") if inverse else (self.transform, "")
        parameters = {
            prefix + name: parameter + offset.reshape(-1, *parameter.shape)
            for (name, parameter), offset in zip(self.transform.named_parameters(), offsets, strict=True)
        }
        rows = value.reshape(-1, value.shape[-1])
        call = vmap(lambda row, parameters: functional_call(module, parameters, (row,)))
        result, log_det = call(rows, parameters)
        return result.reshape(*batch, result.shape[-1]), log_det.reshape(batch)
