r"""Kullback-Leibler divergence and entropy: in closed form where there is one, else on fresh draws."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import register_kl

from flowbnn.distributions.bases import DiagonalNormal
from flowbnn.distributions.flow import Flow

__all__ = ["Divergence", "divergence"]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Divergence(NamedTuple):
    """Both in nats, for one event (one noise vector)."""

    kl: Tensor
    entropy: Tensor


def _normal_cross_entropy(mean: Tensor, variance: Tensor, prior: DiagonalNormal) -> Tensor:
    square = (variance + (mean - prior.loc).square()) / prior.scale.square()
    return (0.5 * square + prior.scale.log() + _HALF_LOG_2PI).sum(-1)


def _affine_moments(q: Flow, base: DiagonalNormal) -> tuple[Tensor, Tensor]:
    """Mean and marginal variances of ``A z + b``; the matrix is read off the map by sending the unit vectors through."""
    mean = q.transform(base.loc)[0]
    if q.transform.linearity == "diagonal":
        return mean, (q.transform(base.loc + base.scale)[0] - mean).square()
    columns = q.transform(base.loc + torch.diag_embed(base.scale))[0] - mean
    return mean, columns.square().sum(-2)


def divergence(q: Any, prior: Any, samples: int = 16, generator: torch.Generator | None = None) -> Divergence:
    r""":math:`\mathrm{KL}(q \| p)` and the entropy :math:`H(q)` of a noise posterior.

    Equation 15 of document 000: :math:`\mathrm{KL} = E_{q_0}[\log q_0(z_0) - \sum_i \log|\det J_{g_i}| - \log p(z_k)]`.
    For a normal base and an affine map everything is exact, full matrices included. Otherwise the base's entropy stays exact
    where it is known and only the expected log-det and the prior's log-density are averaged over ``samples`` fresh draws.

    >>> from flowbnn.transforms import Affine
    >>> prior = DiagonalNormal(torch.ones(3), torch.full((3,), 0.5))
    >>> divergence(Flow(prior, Affine(3)), prior).kl.item()
    0.0
    """
    if isinstance(q, DiagonalNormal) and isinstance(prior, DiagonalNormal):
        entropy = q.entropy()
        return Divergence(_normal_cross_entropy(q.loc, q.variance, prior) - entropy, entropy)
    if not isinstance(q, Flow):
        return _sampled(q, prior, samples, generator)
    base = q.base
    if isinstance(base, DiagonalNormal) and q.transform.linearity != "none" and q.context is None:
        entropy = base.entropy() + q.transform(base.loc)[1]
        if isinstance(prior, DiagonalNormal):
            return Divergence(_normal_cross_entropy(*_affine_moments(q, base), prior) - entropy, entropy)
        cross = -prior.log_prob(q.rsample((samples,), generator)).mean(0)
        return Divergence(cross - entropy, entropy)
    if isinstance(base, DiagonalNormal):
        z = q._draw((samples,), generator)
        x, log_det = q.transform(z, q.context)
        entropy = base.entropy() + q._batch_log_det(log_det).mean(0)
        return Divergence(-prior.log_prob(x).mean(0) - entropy, entropy)
    return _sampled(q, prior, samples, generator)


def _sampled(q: Any, prior: Any, samples: int, generator: torch.Generator | None) -> Divergence:
    if hasattr(q, "rsample_and_log_prob"):
        x, log_prob = q.rsample_and_log_prob((samples,), generator)
    else:
        x = q.rsample((samples,), **({} if generator is None else {"generator": generator}))
        log_prob = q.log_prob(x)
    entropy = -log_prob.mean(0)
    return Divergence(-prior.log_prob(x).mean(0) - entropy, entropy)


@register_kl(DiagonalNormal, DiagonalNormal)
def _kl_normal_normal(q: DiagonalNormal, p: DiagonalNormal) -> Tensor:
    return divergence(q, p).kl


@register_kl(Flow, DiagonalNormal)
def _kl_flow_normal(q: Flow, p: DiagonalNormal) -> Tensor:
    if isinstance(q.base, DiagonalNormal) and q.transform.linearity != "none" and q.context is None:
        return divergence(q, p).kl
    raise NotImplementedError(
        "this flow's KL has no closed form; flowbnn.distributions.divergence(q, p, samples=...) estimates it"
    )
