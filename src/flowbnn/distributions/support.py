"""Support of a flow: the domain and codomain of each transform, and an inverse that finds points without a preimage."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Independent, MixtureSameFamily, constraints, transform_to
from torch.distributions.constraints import Constraint

from flowbnn.errors import FlowBNNError
from flowbnn.numerics import sum_rightmost
from flowbnn.options import Bounds
from flowbnn.transforms.base import Transform, transform_error
from flowbnn.transforms.compose import Compose, Inverse, add_location, apply_transform
from flowbnn.transforms.linear import Permutation
from flowbnn.transforms.splines import CircularSplineMap


class Step(NamedTuple):
    """One simple transform of a composition.

    Args:
        transform: The transform.
        inverse: If True, the composition applies its inverse.
        path: Position in the composition.
        domain: Constraint of each number before the step.
        codomain: Constraint of each number after the step.
    """

    transform: Transform
    inverse: bool
    path: tuple[int, ...]
    domain: Any
    codomain: Any


def _steps(transform: Transform, inverse: bool = False, path: tuple[int, ...] = ()) -> list[Step]:
    """Returns the simple transforms of a composition in the order of application."""
    if isinstance(transform, Inverse):
        return _steps(transform.transform, not inverse, path)
    if isinstance(transform, Compose):
        members = list(enumerate(transform))[:: -1 if inverse else 1]
        return [step for index, member in members for step in _steps(member, inverse, (*path, index))]
    regions = transform.domain, transform.codomain
    return [Step(transform, inverse, path, *regions[:: -1 if inverse else 1])]


def _scalar_constraint(constraint: Any) -> Any:
    """Returns the constraint of each number, without event axes."""
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    return constraint


def _is_real(constraint: Any) -> bool:
    """Returns True for the constraint of all real numbers."""
    return isinstance(constraint, type(constraints.real))


def _same_constraint(first: Any, second: Any) -> bool:
    """Returns True if two constraints are both real, or intervals with the same ends."""
    if first is second or (_is_real(first) and _is_real(second)):
        return True
    if not isinstance(first, type(constraints.unit_interval)) or not isinstance(second, type(first)):
        return False
    lower = torch.as_tensor(first.lower_bound == second.lower_bound)
    return bool((lower & torch.as_tensor(first.upper_bound == second.upper_bound)).all())


class MixtureSupport(Constraint):
    """Union of the supports of the components of a mixture.

    The constraint of torch demands that a value lies in the supports of all components.

    Args:
        components: Distribution of the components, which are its last batch axis.

    >>> components = torch.distributions.Uniform(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    >>> MixtureSupport(components).check(torch.tensor([0.5, 1.5, 2.5])).tolist()
    [True, False, True]
    """

    def __init__(self, components: Any) -> None:
        self.components = components
        self.event_dim = len(components.event_shape)
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return self.components.support.check(value.unsqueeze(-1 - self.event_dim)).any(-1)


def _is_bounded_mixture(base: Any) -> bool:
    """Returns True for a mixture of components that are not positive on all real numbers."""
    return isinstance(base, MixtureSameFamily) and not has_full_support(base.component_distribution)


def base_log_prob(base: Any, value: Tensor) -> Tensor:
    """Returns log-densities of a base. Components of a mixture that a value lies outside of contribute nothing.

    >>> components = torch.distributions.Uniform(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 4.0]))
    >>> mixture = MixtureSameFamily(torch.distributions.Categorical(torch.ones(2)), components)
    >>> base_log_prob(mixture, torch.tensor([0.5, 1.5, 2.5])).exp().tolist()
    [0.5, 0.0, 0.25]
    """
    if isinstance(base, Independent):
        return sum_rightmost(base_log_prob(base.base_dist, value), base.reinterpreted_batch_ndims)
    if not _is_bounded_mixture(base):
        return base.log_prob(value)
    components = base.component_distribution
    value = value.unsqueeze(-1 - len(components.event_shape))
    inside = components.support.check(value)
    mask = inside.reshape(inside.shape + (1,) * len(components.event_shape))
    point = _inside_point(_scalar_constraint(components.support), torch.where(mask, value, 0.0))
    log_prob = components.log_prob(torch.where(mask, value, point))
    log_prob = torch.where(inside, log_prob, torch.full_like(log_prob, -torch.inf))
    return torch.logsumexp(log_prob + base.mixture_distribution.logits, -1)


def _base_support(base: Any) -> Any:
    """Returns the support of a distribution, or the real numbers if it declares none."""
    if isinstance(base, Independent):
        return constraints.independent(_base_support(base.base_dist), base.reinterpreted_batch_ndims)
    if _is_bounded_mixture(base):
        return MixtureSupport(base.component_distribution)
    try:
        return base.support
    except (AttributeError, NotImplementedError):
        return constraints.real


def has_full_support(distribution: Any) -> bool:
    """Returns True if a distribution declares a density at all real points, or declares no support.

    >>> has_full_support(torch.distributions.Normal(0.0, 1.0)), has_full_support(torch.distributions.Gamma(1.0, 1.0))
    (True, False)
    """
    return _is_real(_scalar_constraint(_base_support(distribution)))


def _inside_point(constraint: Any, like: Tensor) -> Tensor:
    """Returns numbers that satisfy a constraint, in the shape of a tensor."""
    if not like.is_floating_point():
        return torch.full_like(like, constraint.lower_bound)
    try:
        return transform_to(constraint)(torch.zeros_like(like))
    except NotImplementedError:  # torch has no transform to this constraint
        return like


def output_support(base: Any, transform: Transform) -> Constraint | None:
    """Returns the constraint of each number of a flow, or None if no simple constraint describes it.

    Args:
        base: Base distribution.
        transform: Transform from the base to the sample.

    Raises:
        FlowBNNError: A transform is not defined on all values that it receives.

    >>> from flowbnn.transforms import Exp, Logit, Sigmoid
    >>> output_support(torch.distributions.Normal(0.0, 1.0), Compose(Sigmoid(), Logit(), Exp()))
    GreaterThan(lower_bound=0.0)
    """
    region = _scalar_constraint(_base_support(base))
    for step in _steps(transform):
        if _is_real(region):
            _check_real_input(base, step)
        if _is_real(region) or _same_constraint(region, step.domain):
            region = step.codomain
        elif (
            not isinstance(step.transform, Permutation)
            or isinstance(region, MixtureSupport)
            or isinstance(getattr(region, "lower_bound", 0), Tensor)
        ):
            return None  # bounds of single numbers would have to move with the numbers
    return region


def _check_real_input(base: Any, step: Step) -> None:
    """Raises FlowBNNError if a step is not defined on all real numbers."""
    name = type(step.transform).__name__
    if isinstance(getattr(step.transform, "univariate", None), CircularSplineMap):
        if getattr(base, "periodic", None) is not False:
            return
        domain, remedy = "angles", "CircularBase"
    elif step.inverse and not _is_real(step.domain):
        limits = Bounds(ge=step.domain.lower_bound, le=getattr(step.domain, "upper_bound", torch.inf))
        name, domain, remedy = f"{name}.inverse", f"numbers {limits}", "another base"
    else:
        return
    text = f"{name} needs {domain}, got unbounded numbers; use {remedy}"
    raise add_location(FlowBNNError(text, kind="range"), step.transform, step.path or (0,))


def has_full_range(base: Any, transform: Transform) -> bool:
    """Returns True if every point has a preimage."""
    return has_full_support(base) and all(_is_real(step.codomain) for step in _steps(transform))


def any_rightmost(mask: Tensor, axes: int) -> Tensor:
    """Returns whether any value is true over the last ``axes`` axes."""
    return mask.flatten(-axes).any(-1) if axes > 1 else mask.any(-1) if axes else mask


def pull_back(
    base: Any, transform: Transform, value: Tensor, context: Tensor | None, event_axes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Maps values to the base and finds those without a preimage.

    The codomain of each transform is checked. Values outside continue from a point inside, at the end in the support of the base.

    Args:
        base: Base distribution.
        transform: Transform from the base to the sample.
        value: Values of the sample.
        context: Context vectors.
        event_axes: Number of event axes of the values.

    Returns:
        The preimages, the log-determinants of the inverse, and a mask of the events without a preimage.
    """
    output_support(base, transform)  # raises for a base with mass where the first transforms are undefined
    infinite = value.isinf()
    value = torch.where(infinite, torch.zeros_like(value), value)
    outside = any_rightmost(infinite, event_axes)
    log_det = value.new_zeros(value.shape[: value.ndim - event_axes])
    axes, member, path = event_axes, transform, (0,)
    for member, inverse, path, _, codomain in reversed(_steps(transform)):
        if not _is_real(codomain):
            invalid = ~codomain.check(value) & ~value.isnan()
            outside = outside | any_rightmost(invalid, axes)
            value = torch.where(invalid, _inside_point(codomain, value), value)
        axes_after, axes_before = (member.event_dim, member.sample_dim)[:: 1 if inverse else -1]
        value, change = apply_transform(member, value, context, not inverse, axes - axes_after, path or (0,))
        log_det, axes = log_det + change, axes - axes_after + axes_before
    base_shape = base.batch_shape + base.event_shape
    shape, expected = tuple(value.shape[value.ndim - axes :]), tuple(base_shape[len(base_shape) - axes :])
    if shape != expected:  # other shapes might broadcast
        text = f"maps to shape {shape}, {type(base).__name__} has shape {expected}"
        raise add_location(transform_error(member, text, "shape"), member, path or (0,))
    support = _base_support(base)
    if not _is_real(_scalar_constraint(support)):
        invalid = ~support.check(value) & ~any_rightmost(value.isnan(), support.event_dim)
        outside = outside | any_rightmost(invalid, axes - support.event_dim)
    # A base that validates its arguments must not receive points without a preimage.
    mask = outside.reshape(outside.shape + (1,) * axes)
    return torch.where(mask, _inside_point(_scalar_constraint(support), value), value), log_det, outside
