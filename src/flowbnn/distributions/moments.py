r"""Mean, variances and entropy of :math:`A z + b`, exact.

The matrix is never asked of the transform: it is read off the map, by sending points through it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal

from flowbnn.distributions.bases import DiagonalNormal, NormalMixture
from flowbnn.transforms.base import Transform

__all__ = ["affine_entropy", "affine_mean", "affine_variance", "spread"]


def _unknown(what: str, transform: Transform, estimate: str) -> NotImplementedError:
    return NotImplementedError(
        f"the {what} of a flow through {type(transform).__name__} has no closed form; estimate it by {estimate}"
    )


def affine_mean(base: Any, transform: Transform, context: Tensor | None) -> Tensor:
    r""":math:`E[f(z)] = f(E[z])`."""
    if transform.linearity == "none":
        raise _unknown("mean", transform, "flow.sample((10_000,)).mean(0)")
    return transform(base.mean, context)[0]


def spread(transform: Transform, context: Tensor | None, mean: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    r"""Variances of :math:`f(z)` for :math:`z` with independent entries, ``mean`` being :math:`f(\mathrm{loc})`."""
    if transform.linearity == "diagonal":
        return (transform(loc + scale, context)[0] - mean).square()
    return _sum_of_columns(transform, context, mean, loc, torch.diag_embed(scale))


def _sum_of_columns(
    transform: Transform, context: Tensor | None, mean: Tensor, loc: Tensor, factor: Tensor
) -> Tensor:
    """The diagonal of ``A F F' A'``; the columns stand on a leading axis, where draws would, so that a context broadcasts."""
    columns = transform(loc + factor.movedim(-1, 0), context)[0] - mean
    return columns.square().sum(0)


def affine_variance(base: Any, transform: Transform, context: Tensor | None) -> Tensor:
    """Variances of each entry; a full matrix needs to know how the base's entries go together."""
    if transform.linearity == "none":
        raise _unknown("variance", transform, "flow.sample((10_000,)).var(0)")
    if transform.linearity == "affine":
        if isinstance(base, NormalMixture):
            loc, scale = base.loc.movedim(-2, 0), base.scale.movedim(-2, 0)
            means = transform(loc, context)[0]
            inside = spread(transform, context, means, loc, scale)
            return inside.mean(0) + means.var(0, correction=0)
        mean = transform(base.mean, context)[0]
        if isinstance(base, MultivariateNormal):
            return _sum_of_columns(transform, context, mean, base.mean, base.scale_tril)
        if not _independent(base):
            raise NotImplementedError(
                f"the variance of a flow from {type(base).__name__} through a full matrix has no closed form here; "
                "estimate it by flow.sample((10_000,)).var(0)"
            )
        return spread(transform, context, mean, base.mean, base.stddev)
    return spread(transform, context, transform(base.mean, context)[0], base.mean, base.stddev)


def _independent(base: Any) -> bool:
    while isinstance(base, Independent):
        base = base.base_dist
    return isinstance(base, DiagonalNormal) or not base.event_shape


def affine_entropy(base: Any, transform: Transform, context: Tensor | None) -> tuple[Tensor, Tensor]:
    """The base's entropy and the log-det, whose sum is the entropy of the flow."""
    estimate = "-flow.rsample_and_log_prob((10_000,))[1].mean(0)"
    if transform.linearity == "none":
        raise _unknown("entropy", transform, estimate)
    try:
        entropy = base.entropy()
    except NotImplementedError:
        raise NotImplementedError(
            f"the entropy of {type(base).__name__} has no closed form; estimate the flow's by {estimate}"
        ) from None
    return entropy, transform(base.mean, context)[1]
