r"""Kullback-Leibler divergence and entropy: in closed form where there is one, else on fresh draws."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Independent, kl_divergence, register_kl

from flowbnn.distributions.bases import DiagonalNormal, as_diagonal_normal
from flowbnn.distributions.draws import reparameterized
from flowbnn.distributions.flow import Flow, spread
from flowbnn.errors import FlowBNNError


class Divergence(NamedTuple):
    """Both in nats, for one event (one noise vector)."""

    kl: Tensor
    entropy: Tensor


def divergence(q: Any, prior: Any, samples: int = 16, generator: torch.Generator | None = None) -> Divergence:
    r""":math:`\mathrm{KL}(q \| p)` and the entropy :math:`H(q)` of a noise posterior.

    Equation 15 of Xiong's report: :math:`\mathrm{KL} = E_{q_0}[\log q_0(z_0) - \sum_i \log|\det J_{g_i}| - \log p(z_k)]`.
    For normals pushed through affine maps everything is exact, full matrices included. Otherwise the whole bracket is
    averaged over ``samples`` fresh draws: near the prior its terms cancel draw by draw, which an exact :math:`E[\log q_0]`
    beside a sampled :math:`E[\log p]` would forgo. The entropy has nothing to cancel with, so there the base's share is exact.

    >>> from flowbnn.transforms import Affine
    >>> prior = DiagonalNormal(torch.ones(3), torch.full((3,), 0.5))
    >>> divergence(Flow(prior, Affine(3)), prior).kl.item()
    0.0
    """
    if q.event_shape != prior.event_shape:
        text = f"a KL compares distributions of one space, not of events {tuple(q.event_shape)} and {tuple(prior.event_shape)}"
        raise FlowBNNError(text, kind="shape")
    known = _closed_form(q, prior)
    if known is not None:
        return known
    if not isinstance(q, Flow):
        x = reparameterized(q, (samples,), generator)
        log_q = q.log_prob(x)
        entropy = -log_q.mean(0)
    else:
        x, log_base, log_det = q._draw((samples,), generator)
        log_q = log_base - log_det
        base = as_diagonal_normal(q.base, len(q.event_shape))
        entropy = -log_q.mean(0) if base is None else base.entropy() + log_det.mean(0)
    return Divergence((log_q - prior.log_prob(x)).mean(0), entropy)


def _closed_form(q: Any, p: Any) -> Divergence | None:
    prior = _as_normal(p)
    base = as_diagonal_normal(q.base if isinstance(q, Flow) else q, len(q.event_shape))
    if prior is None or base is None or (isinstance(q, Flow) and q.transform.linearity == "none"):
        return None
    mean, variance, log_det = base.loc, base.variance, None
    if isinstance(q, Flow):
        mean, log_det = q.transform(base.loc, q.context)
        variance = spread(q.transform, q.context, mean, base.loc, base.scale)
        log_det = q._batch_log_det(log_det)
    square = (variance + (mean - prior.loc).square()) / prior.scale.square()
    kl = (0.5 * (square - 1.0) + prior.scale.log() - base.scale.log()).sum(-1)
    entropy = base.entropy()
    return Divergence(kl, entropy) if log_det is None else Divergence(kl - log_det, entropy + log_det)


def _as_normal(p: Any) -> DiagonalNormal | None:
    if not isinstance(p, Flow):
        return as_diagonal_normal(p)
    base = as_diagonal_normal(p.base, len(p.event_shape))
    if base is None or p.transform.linearity != "diagonal":
        return None
    return DiagonalNormal(p.mean, p.stddev)


def _kl(q: Any, p: Any) -> Tensor:
    if q.event_shape == p.event_shape:
        flows = isinstance(q, Flow) and isinstance(p, Flow)
        if flows and q.transform is p.transform and q.context is p.context:
            return q._batch_base(kl_divergence(q.base, p.base))  # a bijection leaves the KL as it is
        known = _closed_form(q, p)
        if known is not None:
            return known.kl
    text = f"no closed form for the KL of {q!r} to {p!r}; flowbnn.distributions.divergence(q, p, samples=...) estimates it"
    raise NotImplementedError(text)


for _q in (DiagonalNormal, Independent, Flow):
    for _p in (DiagonalNormal, Independent, Flow):
        if (_q, _p) != (Independent, Independent):  # torch has its own
            register_kl(_q, _p)(_kl)
