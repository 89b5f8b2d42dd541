r"""A flow: the distribution of :math:`x = f(z)` for a base distribution of :math:`z`, as a ``torch.distributions`` distribution.

The contract: ``rsample`` and ``log_prob`` as everywhere in torch, and ``rsample_and_log_prob``, which gives both in one forward pass
without an inverse.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    MultivariateNormal,
    constraints,
    kl_divergence,
    register_kl,
)

from flowbnn.distributions.bases import (
    Diagonal,
    DiagonalNormal,
    NormalMixture,
    as_diagonal_normal,
    unwrap_independent,
)
from flowbnn.distributions.draws import GENERATOR_LOCK, reparameterized_sample
from flowbnn.distributions.support import any_rightmost, has_full_range, output_support, pull_back
from flowbnn.errors import FlowBNNError
from flowbnn.numerics import full_precision, sum_rightmost
from flowbnn.options import checked
from flowbnn.transforms.base import Transform, check_dense, check_events, transform_error
from flowbnn.transforms.compose import Compose, Inverse, broadcast_batch_shapes
from flowbnn.transforms.linear import BlockTriangular


def affine_variance(
    transform: Transform, context: Tensor | None, mean: Tensor, loc: Tensor, scale: Tensor
) -> Tensor:
    r"""Variances of :math:`f(z)` for affine :math:`f`, ``mean`` being :math:`f(\mathrm{loc})`.

    ``scale`` is the deviation of each entry, or a matrix :math:`F` with the covariance :math:`F F^\top`.
    """
    if transform.linearity == "diagonal" and scale.ndim == loc.ndim:
        return (transform(loc + scale, context)[0] - mean).square()
    if isinstance(transform, BlockTriangular) and scale.ndim == loc.ndim == 1:
        return transform.variances(scale)
    factor = torch.diag_embed(scale) if scale.ndim == loc.ndim else scale
    # the columns stand on a leading axis, where draws would, so that a context broadcasts
    return (transform(loc + factor.movedim(-1, 0), context)[0] - mean).square().sum(0)


class Flow(Distribution):
    r"""The distribution of :math:`x = f(z)`, :math:`z \sim p_0`.

    .. math:: \log p(x) = \log p_0(f^{-1}(x)) + \log\left|\det \frac{\partial f^{-1}}{\partial x}\right|

    ``mean``, ``variance``, ``stddev`` and ``entropy()`` are exact where the map is affine and the base has them; elsewhere they
    raise ``NotImplementedError``. The density is zero outside ``support``.

    Args:
        base: any ``torch.distributions`` distribution; gradients pass through the draws if it has a reparameterized sampler.
        transform: a :class:`~flowbnn.transforms.Transform`.
        context: vectors handed to the transform's conditioners; one distribution for each, so that all axes but the last
            join the batch shape.

    >>> from flowbnn.transforms import Affine
    >>> flow = Flow(torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1), Affine(2))
    >>> x, log_prob = flow.rsample_and_log_prob((5,))
    >>> torch.allclose(log_prob, flow.log_prob(x)), flow.stddev.tolist()
    (True, [1.0, 1.0])
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    base: Any  # of whatever kind is given

    def __init__(
        self,
        base: Distribution,
        transform: Transform,
        context: Tensor | None = None,
        validate_args: bool | None = False,
    ) -> None:
        if not isinstance(base, Distribution):
            text = f"Flow takes a distribution as its base, not a {type(base).__name__}; of modules make"
            raise FlowBNNError(f"{text} flowbnn.flows.FlowModel(base, transform)", argument="base")
        shape = base.batch_shape + base.event_shape
        if len(shape) < transform.event_dim:
            vector = transform.event_dim == 1
            wish = "give the base a vector of parameters" if vector else "begin the flow with Reshape"
            text = f"works on {transform.event_dim}-dimensional events, but the base draws have shape {tuple(shape)}; {wish}"
            raise transform_error(transform, text, "shape")
        axes = max(len(base.event_shape), transform.event_dim)
        batch_shape, start = shape[: len(shape) - axes], shape[len(shape) - axes :]
        if context is not None:
            wide = broadcast_batch_shapes(batch_shape, context.shape[:-1], "the base")
            if wide != batch_shape:
                base = base.expand(wide + start[: axes - len(base.event_shape)])
                batch_shape = wide
        self.base, self.transform, self.context = base, transform, context
        self._start = start  # the shape of a base event, as the flow sees it
        super().__init__(batch_shape, transform.forward_shape(start), validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return self.base.has_rsample and not self.transform.discrete

    @property
    def support(self) -> constraints.Constraint:
        """Where the density is not zero, as far as the parts declare their ranges."""
        region = output_support(self.base, self.transform)
        if region is None:
            return _Image(self)
        return constraints.independent(region, len(self.event_shape)) if self.event_shape else region

    def _need_closed_form(self, what: str, estimate: str, known: bool = True) -> None:
        if self.transform.linearity == "none" or not known:
            through = type(self.base if self.transform.linearity != "none" else self.transform).__name__
            text = f"the {what} of a flow with {through} has no closed form; estimate it by {estimate}"
            raise NotImplementedError(text)

    @property
    def mean(self) -> Tensor:
        self._need_closed_form("mean", "flow.sample((10_000,)).mean(0)")
        return self.transform(self.base.mean, self.context)[0]

    @property
    def variance(self) -> Tensor:
        base, diagonal = self.base, self.transform.linearity == "diagonal"
        joint = isinstance(base, NormalMixture | MultivariateNormal)
        numbers = unwrap_independent(base)
        known = diagonal or joint or isinstance(numbers, Diagonal) or not numbers.event_shape
        self._need_closed_form("variance", "flow.sample((10_000,)).var(0)", known)
        if isinstance(base, NormalMixture) and not diagonal:
            loc, scale = base.loc.movedim(-2, 0), base.scale.movedim(-2, 0)
            means = self.transform(loc, self.context)[0]
            inside = affine_variance(self.transform, self.context, means, loc, scale)
            return inside.mean(0) + means.var(0, correction=0)
        scale = base.scale_tril if isinstance(base, MultivariateNormal) and not diagonal else base.stddev
        return affine_variance(self.transform, self.context, self.mean, base.mean, scale)

    def entropy(self) -> Tensor:
        known = type(self.base).entropy is not Distribution.entropy
        self._need_closed_form("entropy", "-flow.rsample_and_log_prob((10_000,))[1].mean(0)", known)
        log_det = self.transform(self.base.mean, self.context)[1]
        return self._batch_base(self.base.entropy()) + self._batch_log_det(log_det)

    def _batch_base(self, value: Tensor) -> Tensor:
        return sum_rightmost(value, len(self._start) - len(self.base.event_shape))

    def _batch_log_det(self, log_det: Tensor) -> Tensor:
        return sum_rightmost(log_det, len(self._start) - self.transform.event_dim)

    def rsample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        """Reparameterized draws of shape ``sample_shape + batch_shape + event_shape``."""
        if self.transform.discrete:
            raise NotImplementedError(
                "samples of this flow are integers, which no gradient passes: use sample"
            )
        return self._push(reparameterized_sample(self.base, sample_shape, generator), generator)[0]

    def _push(self, z: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The transform; while it draws, the global generator follows the given one."""
        known = generator is None or not self.transform.stochastic
        with full_precision(z), nullcontext() if known else _seed_global_generator(generator):
            return self.transform(z, self.context)

    def sample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            if self.has_rsample:
                return self.rsample(sample_shape, generator)
            named: dict[str, Any] = {} if generator is None else {"generator": generator}
            return self._push(self.base.sample(torch.Size(sample_shape), **named), generator)[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density anywhere, by the transform's inverse (numerical where it has no formula).

        Where ``transform.lower_bound``, it is a one-sample estimate of a lower bound, fresh at every call.
        Of integers it is a log-probability.
        """
        if self._validate_args:
            self._validate_sample(value)
        z, log_det, outside = self._pull_back(value)
        log_prob = self._batch_base(self.base.log_prob(z)) + log_det
        size = sum_rightmost(value.detach().abs(), len(self.event_shape))
        far = size > torch.finfo(log_prob.dtype).max ** 0.5
        outside = outside | (far & log_prob.isnan())  # overflowed on the way to the base, as inf - inf
        return torch.where(outside, torch.full_like(log_prob, -torch.inf), log_prob)

    @checked
    @torch.no_grad()
    def check(self, value: Tensor) -> None:
        """Refuse values where the density is zero, in a line that names the part of the flow that does not reach them."""
        if has_full_range(self.base, self.transform):
            return
        outside = self._pull_back(value)[2]
        if bool(outside.any()):
            self.transform.inverse(value, self.context)
            text = f"{int(outside.sum())} of {outside.numel()} values lie outside the support of the flow's"
            raise FlowBNNError(f"{text} base, {type(self.base).__name__}", kind="range")

    def _pull_back(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_dense(value, self.transform)
        if value.ndim < len(self.event_shape):
            check_events(value, self.event_shape, self)
        with full_precision(value):
            return pull_back(self.base, self.transform, value, self.context, len(self.event_shape))

    def rsample_and_log_prob(
        self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draws and their log-density in one forward pass, with no inverse."""
        x, log_base, log_det = self._draw(sample_shape, generator)
        return x, log_base - log_det

    def _draw(self, sample_shape: Any, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Draws, the base's log-density at their preimages, and the log-det."""
        z = reparameterized_sample(self.base, sample_shape, generator)
        x, log_det = self._push(z, generator)
        return x, self._batch_base(self.base.log_prob(z)), self._batch_log_det(log_det)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Flow":
        extra = len(self._start) - len(self.base.event_shape)
        inner = torch.Size(batch_shape) + self._start[:extra]
        return Flow(self.base.expand(inner), self.transform, self.context, self._validate_args)

    def __repr__(self) -> str:
        return f"Flow({self.base!r}, {_transform_name(self.transform)})"


@contextmanager
def _seed_global_generator(generator: Any) -> Iterator[None]:
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with GENERATOR_LOCK, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class _Image(constraints.Constraint):
    """The image of a base's support under a transform, known by the inverse only."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.event_dim = len(flow.event_shape)

    def check(self, value: Tensor) -> Tensor:
        z, _, outside = self.flow._pull_back(value)
        return ~outside & ~any_rightmost(z.isnan(), len(self.flow._start))


def _transform_name(transform: Transform) -> str:
    name = type(transform).__name__
    if isinstance(transform, Compose):
        return f"{name}({', '.join(_transform_name(part) for part in transform)})"
    return f"{name}({_transform_name(transform.part)})" if isinstance(transform, Inverse) else name


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
        x = reparameterized_sample(q, (samples,), generator)
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
    mean, variance, log_det = base.loc, base.variance, torch.zeros_like(base.loc[..., 0])
    if isinstance(q, Flow):
        mean, log_det = q.transform(base.loc, q.context)
        variance = affine_variance(q.transform, q.context, mean, base.loc, base.scale)
        log_det = q._batch_log_det(log_det)
    square = (variance + (mean - prior.loc).square()) / prior.scale.square()
    kl = (0.5 * (square - 1.0) + prior.scale.log() - base.scale.log()).sum(-1)
    return Divergence(kl - log_det, base.entropy() + log_det)


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
