"""Flow: the distribution of :math:`x = f(z)` for a base distribution of :math:`z`, as a ``torch.distributions`` distribution.

``rsample`` and ``log_prob`` work as in torch. ``rsample_and_log_prob`` returns both in one forward pass without an inverse.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any, NamedTuple

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

from flowbnn.distributions.draws import GENERATOR_LOCK, as_size, reparameterized_sample
from flowbnn.distributions.support import (
    any_rightmost,
    base_log_prob,
    has_full_range,
    output_support,
    pull_back,
)
from flowbnn.distributions.vectors import (
    Diagonal,
    DiagonalNormal,
    NormalMixture,
    as_diagonal_normal,
    unwrap_independent,
)
from flowbnn.errors import FlowBNNError
from flowbnn.numerics import full_precision, sum_rightmost
from flowbnn.options import Count, Hint, check, checked
from flowbnn.transforms.base import Transform, check_dense, check_events, transform_error
from flowbnn.transforms.compose import Compose, Inverse, broadcast_batch_shapes
from flowbnn.transforms.linear import BlockTriangular


def affine_variance(
    transform: Transform, context: Tensor | None, mean: Tensor, loc: Tensor, scale: Tensor
) -> Tensor:
    r"""Returns the variances of :math:`f(z)` for an affine :math:`f`.

    Args:
        transform: Affine transform :math:`f`.
        context: Context vectors.
        mean: Mean of the result, :math:`f(\mathrm{loc})`.
        loc: Mean of :math:`z`.
        scale: Standard deviation of each entry of :math:`z`, or a matrix :math:`F` with the covariance :math:`F F^\top`.
    """
    if transform.linearity == "diagonal" and scale.ndim == loc.ndim:
        return (transform(loc + scale, context)[0] - mean).square()
    if isinstance(transform, BlockTriangular) and scale.ndim == loc.ndim == 1:
        return transform.variances(scale)
    factor = torch.diag_embed(scale) if scale.ndim == loc.ndim else scale
    # Columns on a leading axis, like draws, so that a context broadcasts.
    return (transform(loc + factor.movedim(-1, 0), context)[0] - mean).square().sum(0)


class Flow(Distribution):
    r"""Distribution of :math:`x = f(z)` with :math:`z \sim p_0`.

    .. math:: \log p(x) = \log p_0(f^{-1}(x)) + \log\left|\det \frac{\partial f^{-1}}{\partial x}\right|

    ``mean``, ``variance``, ``stddev`` and ``entropy()`` are exact if the transform is affine and the base has them. Otherwise they
    raise ``NotImplementedError``. The density is zero outside ``support``.

    Args:
        base: A ``torch.distributions`` distribution. Gradients pass through draws if it has a reparameterized sampler.
        transform: A :class:`~flowbnn.transforms.Transform`.
        context: Context vectors of the transform. There is one distribution for each, so that all axes but the last join the batch
            shape.
        validate_args: If True, checks values, as in ``torch.distributions``.

    >>> from flowbnn.transforms import Affine
    >>> flow = Flow(torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1), Affine(2))
    >>> x, log_prob = flow.rsample_and_log_prob((5,))
    >>> torch.allclose(log_prob, flow.log_prob(x)), flow.stddev.tolist()
    (True, [1.0, 1.0])
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    base: Any

    def __init__(
        self,
        base: Distribution,
        transform: Transform,
        context: Tensor | None = None,
        validate_args: bool | None = False,
    ) -> None:
        if not isinstance(base, Distribution):
            check("base", base, Annotated[Distribution, Hint("or use fb.flows.FlowModel")], "Flow")
        if not isinstance(transform, Transform):
            check("transform", transform, Transform, "Flow")
        if not isinstance(context, Tensor | None):
            check("context", context, Tensor | None, "Flow")
        if not isinstance(validate_args, bool | None):
            check("validate_args", validate_args, bool | None, "Flow")
        shape = base.batch_shape + base.event_shape
        if len(shape) < transform.event_dim:
            text = f"needs {transform.event_dim} event axes, got base shape {tuple(shape)}; use Reshape"
            raise transform_error(transform, text, "shape", argument="base")
        axes = max(len(base.event_shape), transform.event_dim)
        batch_shape, base_event = shape[: len(shape) - axes], shape[len(shape) - axes :]
        if context is not None:
            common = broadcast_batch_shapes(batch_shape, context.shape[:-1], base)
            if common != batch_shape:
                base = base.expand(common + base_event[: axes - len(base.event_shape)])
                batch_shape = common
        self.base, self.transform, self.context = base, transform, context
        self._base_event = base_event  # shape of an event before the transform
        super().__init__(batch_shape, transform.forward_shape(base_event), validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return self.base.has_rsample and not self.transform.discrete

    @property
    def support(self) -> constraints.Constraint:
        """Region where the density is not zero, as far as the transforms declare their codomains."""
        region = output_support(self.base, self.transform)
        if region is None:
            return _Image(self)
        return constraints.independent(region, len(self.event_shape)) if self.event_shape else region

    def _require_closed_form(self, quantity: str, estimate: str, base_known: bool = True) -> None:
        """Raises NotImplementedError unless the transform is affine and the base has the quantity in closed form."""
        if self.transform.linearity == "none" or not base_known:
            cause = type(self.base if self.transform.linearity != "none" else self.transform).__name__
            raise _closed_form_error(f"the {quantity} of {cause}", estimate)

    @property
    def mean(self) -> Tensor:
        self._require_closed_form("mean", "flow.sample((10_000,)).mean(0)")
        return self.transform(self.base.mean, self.context)[0]

    @property
    def variance(self) -> Tensor:
        base, diagonal = self.base, self.transform.linearity == "diagonal"
        has_covariance = isinstance(base, NormalMixture | MultivariateNormal)
        scalar = unwrap_independent(base)
        base_known = diagonal or has_covariance or isinstance(scalar, Diagonal) or not scalar.event_shape
        self._require_closed_form("variance", "flow.sample((10_000,)).var(0)", base_known)
        if isinstance(base, NormalMixture) and not diagonal:
            loc, scale = base.loc.movedim(-2, 0), base.scale.movedim(-2, 0)
            means = self.transform(loc, self.context)[0]
            variances = affine_variance(self.transform, self.context, means, loc, scale)
            return variances.mean(0) + means.var(0, correction=0)
        scale = base.scale_tril if isinstance(base, MultivariateNormal) and not diagonal else base.stddev
        return affine_variance(self.transform, self.context, self.mean, base.mean, scale)

    def entropy(self) -> Tensor:
        base_known = type(self.base).entropy is not Distribution.entropy
        self._require_closed_form("entropy", "-flow.rsample_and_log_prob((10_000,))[1].mean(0)", base_known)
        log_det = self.transform(self.base.mean, self.context)[1]
        return self._batch_base(self.base.entropy()) + self._batch_log_det(log_det)

    def _batch_base(self, value: Tensor) -> Tensor:
        """Sums a quantity of the base over event axes that are batch axes of the base."""
        return sum_rightmost(value, len(self._base_event) - len(self.base.event_shape))

    def _batch_log_det(self, log_det: Tensor) -> Tensor:
        """Sums a log-determinant over event axes that are batch axes of the transform."""
        return sum_rightmost(log_det, len(self._base_event) - self.transform.event_dim)

    def rsample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        """Returns reparameterized draws of shape ``sample_shape + batch_shape + event_shape``."""
        if self.transform.discrete:
            raise NotImplementedError(f"{type(self.transform).__name__} draws integers; use sample")
        return self._push(reparameterized_sample(self.base, sample_shape, generator), generator)[0]

    def _push(self, z: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Applies the transform. If it draws random numbers, the global generator is seeded from the given one."""
        deterministic = generator is None or not self.transform.stochastic
        with full_precision(z), nullcontext() if deterministic else _seed_global_generator(generator):
            return self.transform(z, self.context)

    def sample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            if self.has_rsample:
                return self.rsample(sample_shape, generator)
            option: dict[str, Any] = {} if generator is None else {"generator": generator}
            z = self.base.sample(as_size(sample_shape), **option)
            return self._push(z, generator)[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the log-density by the inverse of the transform.

        If ``transform.lower_bound`` is true, the result is a one-sample estimate of a lower bound, with new draws at every call. For
        integers it is a log-probability.
        """
        if self._validate_args:
            self._validate_sample(value)
        z, log_det, outside = self._pull_back(value)
        log_prob = self._batch_base(base_log_prob(self.base, z)) + log_det
        size = sum_rightmost(value.detach().abs(), len(self.event_shape))
        huge = size > torch.finfo(log_prob.dtype).max ** 0.5
        outside = outside | (huge & log_prob.isnan())  # overflow on the way to the base: inf - inf
        return torch.where(outside, torch.full_like(log_prob, -torch.inf), log_prob)

    @checked
    @torch.no_grad()
    def check(self, value: Tensor) -> None:
        """Raises FlowBNNError if the density of a value is zero. The message names the transform that does not reach it."""
        if has_full_range(self.base, self.transform):
            return
        outside = self._pull_back(value)[2]
        if bool(outside.any()):
            self.transform.inverse(value, self.context)
            text = f"{int(outside.sum())} of {outside.numel()} values lie outside the support of {type(self.base).__name__}"
            raise FlowBNNError(text, kind="range")

    def _pull_back(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns preimages, log-determinants of the inverse, and a mask of the events without a preimage."""
        check_dense(value, self.transform)
        if value.ndim < len(self.event_shape):
            check_events(value, self.event_shape, self)
        with full_precision(value):
            return pull_back(self.base, self.transform, value, self.context, len(self.event_shape))

    def rsample_and_log_prob(
        self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns draws and their log-densities in one forward pass, without an inverse."""
        x, log_base, log_det = self._draw(sample_shape, generator)
        return x, log_base - log_det

    def _draw(self, sample_shape: Any, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns draws, the log-densities of the base at their preimages, and the log-determinants."""
        z = reparameterized_sample(self.base, sample_shape, generator)
        x, log_det = self._push(z, generator)
        return x, self._batch_base(self.base.log_prob(z)), self._batch_log_det(log_det)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Flow":
        extra_axes = len(self._base_event) - len(self.base.event_shape)
        base_batch = torch.Size(batch_shape) + self._base_event[:extra_axes]
        return Flow(self.base.expand(base_batch), self.transform, self.context, self._validate_args)

    def __repr__(self) -> str:
        return f"Flow({self.base!r}, {_transform_name(self.transform)})"


@contextmanager
def _seed_global_generator(generator: Any) -> Iterator[None]:
    """Context manager that seeds torch's global generator from a generator, and restores it at the end."""
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with GENERATOR_LOCK, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class _Image(constraints.Constraint):
    """Support that is known only through the inverse: the image of the support of a base."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.event_dim = len(flow.event_shape)

    def check(self, value: Tensor) -> Tensor:
        z, _, outside = self.flow._pull_back(value)
        return ~outside & ~any_rightmost(z.isnan(), len(self.flow._base_event))


def _transform_name(transform: Transform) -> str:
    """Returns the name of a transform and of the transforms in it."""
    name = type(transform).__name__
    if isinstance(transform, Compose):
        return f"{name}({', '.join(map(_transform_name, transform))})"
    return f"{name}({_transform_name(transform.transform)})" if isinstance(transform, Inverse) else name


class Divergence(NamedTuple):
    """KL divergence and entropy of one event (one noise vector), in nats.

    Args:
        kl: KL divergence to the prior.
        entropy: Entropy of the posterior.

    >>> q = DiagonalNormal(torch.zeros(1), torch.ones(1))
    >>> kl, entropy = divergence(q, q)
    >>> kl.item(), round(entropy.item(), 4)
    (0.0, 1.4189)
    """

    kl: Tensor
    entropy: Tensor


def _closed_form_error(quantity: str, estimate: str) -> NotImplementedError:
    """Returns the error of a quantity without a closed form.

    Args:
        quantity: Name of the quantity.
        estimate: Code that estimates it from draws.
    """
    return NotImplementedError(f"no closed form for {quantity}; use {estimate}")


def divergence(q: Any, prior: Any, samples: int = 16, generator: torch.Generator | None = None) -> Divergence:
    r"""Returns :math:`\mathrm{KL}(q \| p)` and the entropy :math:`H(q)` of a noise posterior.

    Equation 15 of Xiong's report: :math:`\mathrm{KL} = E_{q_0}[\log q_0(z_0) - \sum_i \log|\det J_{g_i}| - \log p(z_k)]`.
    For normals and affine transforms, full matrices included, the result is exact. Otherwise the whole bracket is averaged over new
    draws, because near the prior its terms cancel for each draw. An exact :math:`E[\log q_0]` with a sampled :math:`E[\log p]` would
    lose this. In the entropy nothing cancels, so there the contribution of the base is exact.

    Args:
        q: Posterior distribution.
        prior: Prior distribution on events of the same shape.
        samples: Number of draws.
        generator: Generator of the draws; torch's global one by default.

    >>> from flowbnn.transforms import Affine
    >>> prior = DiagonalNormal(torch.ones(3), torch.full((3,), 0.5))
    >>> divergence(Flow(prior, Affine(3)), prior).kl.item()
    0.0
    """
    for name, value in (("q", q), ("prior", prior)):
        if not hasattr(value, "event_shape"):
            check(name, value, Distribution, "divergence")
    if not isinstance(samples, int) or samples < 1:
        check("samples", samples, Count, "divergence")
    if not isinstance(generator, torch.Generator | None):
        check("generator", generator, torch.Generator | None, "divergence")
    if q.event_shape != prior.event_shape:
        text = f"prior.event_shape must be {tuple(q.event_shape)}, got {tuple(prior.event_shape)}"
        raise FlowBNNError(text, kind="shape", argument="prior")
    exact = _closed_form(q, prior)
    if exact is not None:
        return exact
    if not q.has_rsample:
        text = f"divergence needs draws with gradients, but a {type(q).__name__} has no rsample; use NormalMixture for a mixture"
        raise FlowBNNError(text, kind="unsupported", argument="q")
    if not isinstance(q, Flow):
        x = reparameterized_sample(q, (samples,), generator)
        log_q = q.log_prob(x)
        entropy = -log_q.mean(0)
    else:
        x, log_base, log_det = q._draw((samples,), generator)
        log_q = log_base - log_det
        base = as_diagonal_normal(q.base, len(q.event_shape))
        entropy = -log_q.mean(0) if base is None else base.entropy() + log_det.mean(0)
    return Divergence((log_q - _prior_log_prob(prior, x)).mean(0), entropy)


def _prior_log_prob(prior: Any, x: Tensor) -> Tensor:
    """Returns log-densities of a prior. Raises FlowBNNError if points lie outside of its support."""
    try:
        return prior.log_prob(x) if isinstance(prior, Flow) else base_log_prob(prior, x)
    except FlowBNNError:
        raise
    except ValueError as error:  # by the validation of torch
        if "support" not in str(error):
            raise
        text = f"the posterior has draws outside of the support of the prior ({type(prior).__name__}), so their divergence is infinite"
        hint = "use a prior with the support of the posterior"
        raise FlowBNNError(f"{text}; {hint}", kind="range", argument="prior") from error


def _closed_form(q: Any, p: Any) -> Divergence | None:
    """Returns the exact divergence of an affine image of a normal to a normal, or None for other distributions."""
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
    """Returns a distribution as diagonal normal, or None if it is not one."""
    if not isinstance(p, Flow):
        return as_diagonal_normal(p)
    base = as_diagonal_normal(p.base, len(p.event_shape))
    if base is None or p.transform.linearity != "diagonal":
        return None
    return DiagonalNormal(p.mean, p.stddev)


def _kl(q: Any, p: Any) -> Tensor:
    """Returns the exact KL divergence, for ``torch.distributions.kl_divergence``."""
    if q.event_shape == p.event_shape:
        flows = isinstance(q, Flow) and isinstance(p, Flow)
        if flows and q.transform is p.transform and q.context is p.context:
            return q._batch_base(kl_divergence(q.base, p.base))  # a bijection does not change the KL
        exact = _closed_form(q, p)
        if exact is not None:
            return exact.kl
    raise _closed_form_error(f"the KL of {q!r} to {p!r}", "divergence(q, p, samples=...)")


for _q in (DiagonalNormal, Independent, Flow):
    for _p in (DiagonalNormal, Independent, Flow):
        if (_q, _p) != (Independent, Independent):  # torch defines this pair
            register_kl(_q, _p)(_kl)
