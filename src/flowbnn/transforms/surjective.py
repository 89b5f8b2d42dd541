r"""Maps that lose information one way and draw it the other way (Nielsen et al. 2020, https://arxiv.org/abs/2007.02731).

Each is named for what ``forward`` does on the way to the sample; run backwards by :class:`~flowbnn.transforms.Inverse` it is the
other map of its kind, and a bound becomes exact. What is drawn has a distribution that may be learned: ``noise`` is a module that is
called with what is known, the context behind it on the last axis, and returns a ``torch`` distribution: a
:class:`~flowbnn.nets.ConditionalNormal` or any conditional flow, such as ``fb.flows.RealNVP(dim, context_dim=...)``.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError, describe_value
from flowbnn.nets.mlp import MLP, ConditionalNormal, Length, with_context
from flowbnn.numerics import sum_rightmost
from flowbnn.options import Count, Ge, checked
from flowbnn.transforms.base import (
    BidirectionalTransform,
    Transform,
    check_dense,
    check_events,
    check_range,
    check_tensor,
    check_vectors,
    transform_error,
)
from flowbnn.transforms.compose import Inverse

AtLeastTwo = Annotated[int, Ge(2)]


class StochasticTransform(Transform):
    """A map with modules that give the distribution of a draw for known events, the context behind them on the last axis."""

    context_dim: int

    def _given(self, module: Any, known: Tensor, context: Tensor | None, axes: int, size: int) -> Any:
        made = module(with_context(known, context, self.context_dim, axes))
        shape = (
            tuple(made.batch_shape + made.event_shape)
            if isinstance(made, Distribution)
            else describe_value(made)
        )
        if shape[-1:] != (size,):  # which might broadcast
            text = f"needs a distribution of {size} numbers of its {type(module).__name__}, not {shape}"
            raise transform_error(self, text, "shape")
        return made

    def _log_prob(
        self, module: Any, value: Tensor, known: Tensor, context: Tensor | None, axes: int = 1
    ) -> Tensor:
        """Log-density of a value for known events of so many axes."""
        log_prob = self._given(module, known, context, axes, value.shape[-1]).log_prob(value)
        return sum_rightmost(log_prob, log_prob.ndim - known.ndim + axes)

    def _draw(
        self, module: Any, size: int, known: Tensor, context: Tensor | None, axes: int = 1
    ) -> tuple[Tensor, Tensor]:
        """A draw of so many numbers, with its gradient where there is one, and its log-density."""
        distribution = self._given(module, known, context, axes, size)
        if hasattr(distribution, "rsample_and_log_prob"):
            value, log_prob = distribution.rsample_and_log_prob()
        else:
            value = distribution.rsample() if distribution.has_rsample else distribution.sample()
            log_prob = distribution.log_prob(value)
        return value, sum_rightmost(log_prob, log_prob.ndim - known.ndim + axes)


class Augment(StochasticTransform):
    r"""Noise is put behind the vector, :math:`x = (z, e)` with :math:`e \sim p(e \mid z)`; backwards it is sliced off.

    :math:`\log p(x) = \log p(z) + \log p(e \mid z)` is exact. On the channels of an image it is the split of a multi-scale flow (Dinh,
    Sohl-Dickstein & Bengio 2017) with a learned prior for the half that leaves early.

    Args:
        kept, added: lengths of :math:`z` and :math:`e`.
        noise: gives the distribution of :math:`e` for :math:`z`; by default a normal whose mean and scale an MLP with the widths
            ``hidden`` computes, which starts at the standard normal.
        context_dim: length of the context that the noise reads; 0 ignores any context.

    >>> x, log_det = Augment(2, 3)(torch.ones(5, 2))
    >>> x.shape, log_det.shape
    (torch.Size([5, 5]), torch.Size([5]))
    """

    draws = "forward"

    @checked
    def __init__(
        self,
        kept: Count,
        added: Count,
        noise: nn.Module | None = None,
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
    ) -> None:
        super().__init__()
        self.kept, self.added, self.context_dim = kept, added, context_dim
        self.lengths = kept, kept + added
        self.noise = noise or ConditionalNormal(MLP(kept + context_dim, 2 * added, hidden))
        self.event_dim = int(getattr(noise, "event_dim", 1))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, self.kept, self, next(self.noise.parameters(), None))
        e, log_prob = self._draw(self.noise, self.added, z, context, self.event_dim)
        return torch.cat([z, e], dim=-1), -log_prob

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, self.kept + self.added, self, next(self.noise.parameters(), None))
        z, e = x.split((self.kept, self.added), -1)
        return z, self._log_prob(self.noise, e, z, context, self.event_dim)


class Slice(Inverse):
    r"""The first entries of a longer vector, :math:`x = z_A`; backwards, noise :math:`z_B \sim q(z_B \mid x)` is put behind it.

    :math:`\log p(x) \ge E_q[\log p(z) - \log q(z_B \mid x)]`: the augmented flows of Huang, Dinh & Courville 2020, which may mix the
    data with dimensions of noise.

    Args:
        kept, dropped: lengths of :math:`x` and :math:`z_B`.
        noise, hidden, context_dim: as in :class:`Augment`.

    >>> Slice(2, 3).inverse(torch.ones(5, 2))[0].shape, Slice(2, 3).lower_bound
    (torch.Size([5, 5]), True)
    """

    @checked
    def __init__(self, kept: Count, dropped: Count, noise: nn.Module | None = None, **settings: Any) -> None:
        super().__init__(Augment(kept, dropped, noise, **settings))


class AbsoluteValue(BidirectionalTransform):
    r"""The absolute value :math:`x = |z|`; backwards, signs :math:`s \sim q(s \mid x)` are drawn, :math:`z = s x`.

    ``Inverse(AbsoluteValue())`` gives symmetric densities exactly: :math:`\log p(x) = \log p(|x|) + \log q(s \mid |x|)`.

    Args:
        net: log-odds of a positive sign for each entry, from :math:`x` and the context; by default signs are even. No gradient passes a
            drawn sign, so the net learns where signs are observed, that is in ``Inverse(AbsoluteValue(net))``.
        context_dim: length of the context that the net reads.

    >>> AbsoluteValue()(torch.tensor([-2.0, 3.0]))
    (tensor([2., 3.]), tensor([-0.6931, -0.6931]))
    """

    draws = "inverse"

    @checked
    def __init__(self, net: nn.Module | None = None, context_dim: Length = 0) -> None:
        super().__init__()
        self.net, self.context_dim = net, context_dim
        self.event_dim = 0 if net is None else int(getattr(net, "event_dim", 1))

    def ends(self) -> tuple[Any, Any]:
        return constraints.real, constraints.nonnegative

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_tensor(value, self)
        if inverse:
            check_range(value, 0.0, math.inf, "the inverse of AbsoluteValue")
        x = value if inverse else value.abs()
        log_odds = torch.zeros_like(x)
        if self.net is not None:
            log_odds = self.net(with_context(x, context, self.context_dim, self.event_dim))
        negative = torch.rand_like(x) > torch.sigmoid(log_odds) if inverse else value < 0
        log_prob = sum_rightmost(F.logsigmoid(torch.where(negative, -log_odds, log_odds)), self.event_dim)
        return (torch.where(negative, -x, x), -log_prob) if inverse else (x, log_prob)


class MaxPool(Transform):
    r"""The largest of each ``size`` entries that stand side by side; backwards, its place and the gaps to the others are drawn.

    The place is uniform and the gaps are exponential with learned rates :math:`r`,
    :math:`q(z \mid x) = \frac1k \prod_j r e^{-r (x - z_j)}` over the others.
    ``Inverse(MaxPool(...))`` is the max-pooling layer of a SurVAE flow, whose densities are exact. After a
    :class:`~flowbnn.transforms.Squeeze` four entries side by side are a square of an image's pixels.

    Args:
        dim: length of :math:`x`.
        size: entries in a group; :math:`z` is ``size`` times as long as :math:`x`.

    >>> MaxPool(2, size=3)(torch.tensor([1.0, 5.0, 2.0, 0.0, -1.0, -3.0]))[0]
    tensor([5., 0.])
    """

    draws = "inverse"

    @checked
    def __init__(self, dim: Count, size: AtLeastTwo = 4) -> None:
        super().__init__()
        self.dim, self.size, self.lengths = dim, size, (dim * size, dim)
        self.log_rate = nn.Parameter(torch.zeros(dim))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, self.dim * self.size, self)
        groups = z.unflatten(-1, (self.dim, self.size))
        x = groups.amax(-1)
        return x, self._log_density((x.unsqueeze(-1) - groups).sum(-1))

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, self.dim, self)
        place = torch.randint(self.size, (*x.shape, 1), device=x.device)
        others = place != torch.arange(self.size, device=x.device)
        gaps = torch.empty_like(others, dtype=x.dtype).exponential_() * others
        gaps = gaps / self.log_rate.exp().unsqueeze(-1)
        return (x.unsqueeze(-1) - gaps).flatten(-2), -self._log_density(gaps.sum(-1))

    def _log_density(self, gaps: Tensor) -> Tensor:
        return ((self.size - 1) * self.log_rate - self.log_rate.exp() * gaps - math.log(self.size)).sum(-1)


class IntegerTransform(StochasticTransform):
    """A map from real numbers to integers, which computes in the precision that the module was brought to."""

    discrete = True
    _zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_zero", torch.zeros(()), persistent=False)

    def _check_integers(self, x: Tensor, bits: int, low: float = -math.inf, high: float = math.inf) -> None:
        """Refuse what is no tensor of integers between these that leave so many bits of the precision unused."""
        check_dense(x, self)
        if x.is_floating_point():
            hint = "floats that hold integers are cast with .long()"
            raise transform_error(self, f"takes a tensor of integers, not of {x.dtype}; {hint}", "dtype")
        precision = torch.finfo(self._zero.dtype)
        far = int(2.0 / precision.eps) >> bits
        more = f"; bring the flow to .{'float' if precision.bits < 32 else 'double'}()" if high > far else ""
        check_range(x.long(), max(low, -far), min(high, far), type(self).__name__, more)


class Dequantization(IntegerTransform):
    r"""Rounding, :math:`x = \lfloor L z \rfloor`; backwards integers are dequantized, :math:`z = (x + u) / L`.

    The noise is :math:`u \sim q(u \mid x)`. It ends a continuous flow whose data are integers, and
    :math:`\log P(x) \ge E_q[\log p(z) - \log q(u \mid x)] - D \log L` bounds their log-probability: with uniform noise (Theis, van den
    Oord & Bethge 2016) or with learned noise, which is tighter (variational dequantization, Ho et al. 2019). Run backwards it is a flow
    for real data on top of a model of integers.

    Args:
        levels: values are :math:`0 \dots L - 1`, such as 256 for 8-bit images, and :math:`z` is in :math:`[0, 1]`, for instance by a
            :class:`~flowbnn.transforms.Sigmoid` before; what is outside is clipped. None: all integers, :math:`L = 1`.
        noise: gives a distribution of real numbers for the integers (scaled to :math:`[-1, 1]` if there are levels), which a sigmoid
            carries to :math:`(0, 1)`; by default :math:`u` is uniform.
        context_dim: length of the context that the noise reads.

    >>> dequantization = Dequantization(levels=4)
    >>> z, contribution = dequantization.inverse(torch.tensor([0, 3]))
    >>> (4 * z).floor(), contribution
    (tensor([0., 3.]), tensor([-1.3863, -1.3863]))
    """

    draws = "inverse"

    @checked
    def __init__(
        self, levels: AtLeastTwo | None = None, noise: nn.Module | None = None, context_dim: Length = 0
    ) -> None:
        super().__init__()
        self.levels, self.noise, self.context_dim = levels, noise, context_dim
        self.event_dim = 0 if noise is None else int(getattr(noise, "event_dim", 1))

    def ends(self) -> tuple[Any, Any]:
        if self.levels is None:
            return super().ends()
        return constraints.unit_interval, constraints.integer_interval(0, self.levels - 1)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        scaled = z * (self.levels or 1)
        x = scaled.detach().floor()
        x = x.clamp(0, self.levels - 1) if self.levels else x
        if self.noise is None:
            return x.long(), torch.full_like(z, math.log(self.levels or 1))
        tiny = torch.finfo(z.dtype).eps
        v = torch.logit((scaled - x).clamp(tiny, 1.0 - tiny))
        log_prob = self._log_prob(self.noise, v, self._known(x), context, self.event_dim)
        return x.long(), log_prob + self._log_slope(v)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ends = (0, self.levels - 1) if self.levels else ()
        self._check_integers(x, 7, *ends)  # which leaves room for the noise
        x = x.to(self._zero.dtype)
        if self.noise is None:
            u, log_density = torch.rand_like(x), torch.full_like(x, math.log(self.levels or 1))
        else:
            v, log_prob = self._draw(self.noise, x.shape[-1], self._known(x), context, self.event_dim)
            u, log_density = torch.sigmoid(v), log_prob + self._log_slope(v)
        margin = 4.0 * torch.finfo(x.dtype).eps  # rounding must not carry a value into the next bin
        value = torch.clamp(x + u, x + margin * x.abs(), x + 1.0 - margin * (x + 1.0).abs())
        return value / (self.levels or 1), -log_density

    def _known(self, x: Tensor) -> Tensor:
        return (2.0 * x + 1.0) / self.levels - 1.0 if self.levels else x

    def _log_slope(self, v: Tensor) -> Tensor:
        """What a sigmoid and the scale make of the density of a drawn number."""
        each = math.log(self.levels or 1) - F.logsigmoid(v) - F.logsigmoid(-v)
        return sum_rightmost(each, self.event_dim)


class VAELayer(StochasticTransform):
    r"""A variational autoencoder as a layer: :math:`x \sim p(x \mid z)` forward and :math:`z \sim q(z \mid x)` backwards.

    :math:`\log p(x) \ge E_q[\log p(z) + \log p(x \mid z) - \log q(z \mid x)]` (Kingma & Welling 2014), with whatever flow stands before
    it as the prior of :math:`z`. At its own draws the same sum is, on average, a bound from above.

    Args:
        dim: length of :math:`x`, or the shape of one.
        latent_dim: length of :math:`z`.
        decoder, encoder: give the distributions of :math:`x` for :math:`z` and of :math:`z` for :math:`x`; by default normals whose
            mean and scale MLPs with layers of the widths ``hidden`` compute. A conditional flow is an encoder as well.
        context_dim: length of the context that both read; 0 ignores any context.

    >>> layer = VAELayer(5, latent_dim=2)
    >>> z, contribution = layer.inverse(torch.ones(7, 5))
    >>> z.shape, contribution.shape, layer.lower_bound
    (torch.Size([7, 2]), torch.Size([7]), True)
    """

    draws: Literal["both"] = "both"

    @checked
    def __init__(
        self,
        dim: Count | Sequence[Count],
        latent_dim: Count,
        decoder: nn.Module | None = None,
        encoder: nn.Module | None = None,
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
    ) -> None:
        super().__init__()
        self.shape = (dim,) if isinstance(dim, int) else tuple(dim)
        self.sample_axes = len(self.shape)
        self.latent_dim, self.context_dim = latent_dim, context_dim
        if len(self.shape) != 1 and (decoder is None or encoder is None or not self.shape):
            text = "give a shape, and a decoder and an encoder for events of more than one axis"
            raise FlowBNNError(text, argument="dim")
        size = self.shape[0]
        self.decoder = decoder or ConditionalNormal(MLP(latent_dim + context_dim, 2 * size, hidden))
        self.encoder = encoder or ConditionalNormal(MLP(size + context_dim, 2 * latent_dim, hidden))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, self.latent_dim, self, next(self.decoder.parameters(), None))
        x, log_decoder = self._draw(self.decoder, self.shape[-1], z, context)
        return x, self._log_prob(self.encoder, z, x, context, self.sample_dim) - log_decoder

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, self.shape[-1], self, next(self.encoder.parameters(), None))
        check_events(x, self.shape, self)
        z, log_encoder = self._draw(self.encoder, self.latent_dim, x, context, self.sample_dim)
        return z, self._log_prob(self.decoder, x, z, context) - log_encoder

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        return torch.Size((*shape[:-1], *self.shape))

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        return torch.Size((*shape[: len(shape) - self.sample_dim], self.latent_dim))
