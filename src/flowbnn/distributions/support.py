"""The support of a flow: domain and range of each map, and an inverse that notices points without a preimage."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import constraints, transform_to
from torch.distributions.constraints import Constraint

from flowbnn.errors import FlowBNNError
from flowbnn.options import Bounds
from flowbnn.transforms.base import Transform, transform_error
from flowbnn.transforms.compose import Compose, Inverse, add_location, apply_transform
from flowbnn.transforms.linear import Permutation
from flowbnn.transforms.univariate import CircularSplineMap

_REAL = constraints.real


class Step(NamedTuple):
    """A transform, whether it runs backwards, its place, and what a number is before and after."""

    part: Transform
    inverse: bool
    path: tuple[int, ...]
    domain: Any
    range: Any


def _steps(transform: Transform, inverse: bool = False, path: tuple[int, ...] = ()) -> list[Step]:
    """The simple maps that a transform is made of, in the order of application."""
    if isinstance(transform, Inverse):
        return _steps(transform.part, not inverse, path)
    if isinstance(transform, Compose):
        parts = list(enumerate(transform))[:: -1 if inverse else 1]
        return [step for place, part in parts for step in _steps(part, inverse, (*path, place))]
    return [Step(transform, inverse, path, *transform.ends()[:: -1 if inverse else 1])]


def _scalar_constraint(constraint: Any) -> Any:
    """What a constraint asks of each number, its events left aside."""
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    return constraint


def _is_real(constraint: Any) -> bool:
    return isinstance(constraint, type(_REAL))


def _same_constraint(first: Any, second: Any) -> bool:
    if first is second or (_is_real(first) and _is_real(second)):
        return True
    if not isinstance(first, type(constraints.unit_interval)) or not isinstance(second, type(first)):
        return False
    lower = torch.as_tensor(first.lower_bound == second.lower_bound)
    return bool((lower & torch.as_tensor(first.upper_bound == second.upper_bound)).all())


def _base_support(base: Any) -> Any:
    try:
        return base.support
    except (AttributeError, NotImplementedError):
        return _REAL


def has_full_support(distribution: Any) -> bool:
    """Whether a distribution has a density at all real points, as far as it says where it has one.

    >>> has_full_support(torch.distributions.Normal(0.0, 1.0)), has_full_support(torch.distributions.Gamma(1.0, 1.0))
    (True, False)
    """
    return _is_real(_scalar_constraint(_base_support(distribution)))


def _inside_point(constraint: Any, like: Tensor) -> Tensor:
    """A number that a constraint allows, as often as ``like`` has room for it."""
    if not like.is_floating_point():
        return torch.full_like(like, constraint.lower_bound)
    try:
        return transform_to(constraint)(torch.zeros_like(like))
    except NotImplementedError:  # a constraint that torch cannot reach: leave it to the others
        return like


def output_support(base: Any, transform: Transform) -> Constraint | None:
    """What the pushed distribution's numbers satisfy, or None where no simple constraint says it.

    >>> from flowbnn.transforms import Exp, Logit, Sigmoid
    >>> output_support(torch.distributions.Normal(0.0, 1.0), Compose(Sigmoid(), Logit(), Exp()))
    GreaterThan(lower_bound=0.0)
    """
    region = _scalar_constraint(_base_support(base))
    for step in _steps(transform):
        circular = isinstance(getattr(step.part, "univariate", None), CircularSplineMap)
        if circular and _is_real(region) and getattr(base, "periodic", None) is False:
            text = "takes angles, and in this flow it gets all real numbers; take CircularBase for its base"
            raise add_location(transform_error(step.part, text, "range"), step.part, step.path or (0,))
        if step.inverse and _is_real(region) and not _is_real(step.domain):
            wanted = Bounds(ge=step.domain.lower_bound, le=getattr(step.domain, "upper_bound", torch.inf))
            text = f"the inverse of {type(step.part).__name__} takes numbers {wanted}, and in this flow it gets all"
            text = f"{text} real numbers; take a base of such numbers, or put a map onto them before it"
            raise add_location(FlowBNNError(text, kind="range"), step.part, step.path or (0,))
        if _is_real(region) or _same_constraint(region, step.domain):
            region = step.range
        elif not isinstance(step.part, Permutation) or isinstance(getattr(region, "lower_bound", 0), Tensor):
            return None  # bounds that each number has of its own would have to move along
    return region


def has_full_range(base: Any, transform: Transform) -> bool:
    """Whether every point has a preimage, so that :func:`pull_back` has nothing to notice."""
    return has_full_support(base) and all(_is_real(step.range) for step in _steps(transform))


def any_rightmost(wrong: Tensor, axes: int) -> Tensor:
    return wrong.flatten(-axes).any(-1) if axes > 1 else wrong.any(-1) if axes else wrong


def pull_back(
    base: Any, transform: Transform, value: Tensor, context: Tensor | None, event_axes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The preimage, the log-det of the inverse, and whether there is no preimage; the latter two without event axes.

    Each range is checked on the way, and what lies outside goes on from a point inside, of the base's support in the end.
    """
    output_support(base, transform)  # which refuses a base that is larger than what the first maps take
    far = value.isinf()
    value, outside = torch.where(far, torch.zeros_like(value), value), any_rightmost(far, event_axes)
    log_det = value.new_zeros(value.shape[: value.ndim - event_axes])
    axes, part, path = event_axes, transform, (0,)
    for part, inverse, path, _, range_ in reversed(_steps(transform)):
        if not _is_real(range_):
            wrong = ~range_.check(value) & ~value.isnan()
            outside = outside | any_rightmost(wrong, axes)
            value = torch.where(wrong, _inside_point(range_, value), value)
        after, before = (part.event_dim, part.sample_dim)[:: 1 if inverse else -1]
        value, change = apply_transform(part, value, context, not inverse, axes - after, path or (0,))
        log_det, axes = log_det + change, axes - after + before
    shape = base.batch_shape + base.event_shape
    given, wanted = tuple(value.shape[value.ndim - axes :]), tuple(shape[len(shape) - axes :])
    if given != wanted:  # which would broadcast
        text = f"hands the base, {type(base).__name__}, events of shape {given}, not of {wanted}"
        raise add_location(transform_error(part, text, "shape"), part, path or (0,))
    support = _base_support(base)
    if not _is_real(_scalar_constraint(support)):
        wrong = ~support.check(value) & ~any_rightmost(value.isnan(), support.event_dim)
        outside = outside | any_rightmost(wrong, axes - support.event_dim)
    # a base that validates its arguments must not see the points that have no preimage
    moved = outside.reshape(outside.shape + (1,) * axes)
    return torch.where(moved, _inside_point(_scalar_constraint(support), value), value), log_det, outside
