"""Surjective and stochastic transforms, which lose information in one direction and draw it in the other (Nielsen et al. 2020,
https://arxiv.org/abs/2007.02731).

Each class is named after its ``forward``, the direction to the sample. :class:`~flowbnn.transforms.Inverse` gives the other map of
its kind and turns a bound into an exact density. The distribution of a draw may be learned: ``noise`` is a module that reads the
known values, followed by the context on the last axis, and returns a ``torch`` distribution. Use a
:class:`~flowbnn.nets.ConditionalNormal` or a conditional flow, such as ``fb.flows.RealNVP(dim, context_dim=...)``.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError, describe_value
from flowbnn.nets.mlp import ConditionalNormal, ConditionerMLP, Length, with_context
from flowbnn.numerics import sum_rightmost
from flowbnn.options import Count, Dim, Ge, checked
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
    """Base class for transforms with modules that return the distribution of a draw.

    Such a module reads events, followed by the context on the last axis.
    """

    context_dim: int

    def _distribution(self, module: Any, inputs: Tensor, context: Tensor | None, axes: int, size: int) -> Any:
        """Returns the distribution of ``size`` numbers that a module computes from events with ``axes`` axes."""
        distribution = module(with_context(inputs, context, self.context_dim, axes))
        if isinstance(distribution, Distribution):
            shape: Any = tuple(distribution.batch_shape + distribution.event_shape)
        else:
            shape = describe_value(distribution)
        if shape[-1:] != (size,):  # another length might broadcast
            text = f"needs a Distribution of shape (..., {size}) from {type(module).__name__}, got {shape}"
            raise transform_error(self, text, "shape", argument="noise")
        return distribution

    def _log_prob(
        self, module: Any, value: Tensor, inputs: Tensor, context: Tensor | None, axes: int = 1
    ) -> Tensor:
        """Returns the log-density of a value for events with ``axes`` axes."""
        log_prob = self._distribution(module, inputs, context, axes, value.shape[-1]).log_prob(value)
        return sum_rightmost(log_prob, log_prob.ndim - inputs.ndim + axes)

    def _draw(
        self, module: Any, size: int, inputs: Tensor, context: Tensor | None, axes: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Returns a draw of ``size`` numbers, with a gradient if the distribution has one, and its log-density."""
        distribution = self._distribution(module, inputs, context, axes, size)
        if hasattr(distribution, "rsample_and_log_prob"):
            value, log_prob = distribution.rsample_and_log_prob()
        else:
            value = distribution.rsample() if distribution.has_rsample else distribution.sample()
            log_prob = distribution.log_prob(value)
        return value, sum_rightmost(log_prob, log_prob.ndim - inputs.ndim + axes)


class Augment(StochasticTransform):
    r"""Appends noise to a vector, :math:`x = (z, e)` with :math:`e \sim p(e \mid z)`. The inverse slices it off.

    :math:`\log p(x) = \log p(z) + \log p(e \mid z)` is exact. On the channels of an image it is the split of a multi-scale flow
    (Dinh, Sohl-Dickstein & Bengio 2017) with a learned prior for the half that is split off.

    Args:
        dim: Length of :math:`z`.
        extra_dim: Length of :math:`e`.
        noise: Module that returns the distribution of :math:`e` given :math:`z`. By default a normal whose mean and scale an MLP
            computes, which starts at the standard normal.
        hidden: Widths of the hidden layers of the default noise.
        context_dim: Length of the context vectors that the noise reads; 0 ignores the context.

    >>> x, log_det = Augment(2, 3)(torch.ones(5, 2))
    >>> x.shape, log_det.shape
    (torch.Size([5, 5]), torch.Size([5]))
    """

    draws = "forward"

    @checked
    def __init__(
        self,
        dim: Dim,
        extra_dim: Count,
        noise: nn.Module | None = None,
        hidden: Sequence[Dim] = (64, 64),
        context_dim: Length = 0,
    ) -> None:
        super().__init__()
        self.dim, self.extra_dim, self.context_dim = dim, extra_dim, context_dim
        self.lengths = dim, dim + extra_dim
        self.noise = noise or ConditionalNormal(ConditionerMLP(dim + context_dim, 2 * extra_dim, hidden))
        self.event_dim = int(getattr(noise, "event_dim", 1))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, self.dim, self, next(self.noise.parameters(), None))
        e, log_prob = self._draw(self.noise, self.extra_dim, z, context, self.event_dim)
        return torch.cat([z, e], dim=-1), -log_prob

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, self.dim + self.extra_dim, self, next(self.noise.parameters(), None))
        z, e = x.split((self.dim, self.extra_dim), -1)
        return z, self._log_prob(self.noise, e, z, context, self.event_dim)


class Slice(Inverse):
    r"""Keeps the first entries of a vector, :math:`x = z_A`. The inverse appends noise :math:`z_B \sim q(z_B \mid x)`.

    :math:`\log p(x) \ge E_q[\log p(z) - \log q(z_B \mid x)]`: the augmented flows of Huang, Dinh & Courville 2020, which mix the data
    with extra dimensions of noise.

    Args:
        dim: Length of :math:`x`.
        extra_dim: Length of :math:`z_B`.
        noise: Module that returns the distribution of :math:`z_B` given :math:`x`, as in :class:`Augment`.
        options: ``hidden`` and ``context_dim``, as in :class:`Augment`.

    >>> Slice(2, 3).inverse(torch.ones(5, 2))[0].shape, Slice(2, 3).lower_bound
    (torch.Size([5, 5]), True)
    """

    @checked
    def __init__(self, dim: Dim, extra_dim: Count, noise: nn.Module | None = None, **options: Any) -> None:
        super().__init__(Augment(dim, extra_dim, noise, **options))


class AbsoluteValue(BidirectionalTransform):
    r"""Absolute value :math:`x = |z|`. The inverse draws signs :math:`s \sim q(s \mid x)`, :math:`z = s x`.

    ``Inverse(AbsoluteValue())`` gives symmetric densities exactly: :math:`\log p(x) = \log p(|x|) + \log q(s \mid |x|)`.

    Args:
        net: Module that computes the log-odds of a positive sign for each entry from :math:`x` and the context. By default both signs
            are equally likely. No gradient passes through a drawn sign, so the net learns only in ``Inverse(AbsoluteValue(net))``.
        context_dim: Length of the context vectors that the net reads.

    >>> AbsoluteValue()(torch.tensor([-2.0, 3.0]))
    (tensor([2., 3.]), tensor([-0.6931, -0.6931]))
    """

    draws = "inverse"
    codomain = constraints.nonnegative

    @checked
    def __init__(self, net: nn.Module | None = None, context_dim: Length = 0) -> None:
        super().__init__()
        self.net, self.context_dim = net, context_dim
        self.event_dim = 0 if net is None else int(getattr(net, "event_dim", 1))

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_tensor(value, self)
        if inverse:
            check_range(value, 0.0, math.inf, "AbsoluteValue.inverse")
        x = value if inverse else value.abs()
        log_odds = torch.zeros_like(x)
        if self.net is not None:
            log_odds = self.net(with_context(x, context, self.context_dim, self.event_dim))
        negative = torch.rand_like(x) > torch.sigmoid(log_odds) if inverse else value < 0
        log_prob = sum_rightmost(F.logsigmoid(torch.where(negative, -log_odds, log_odds)), self.event_dim)
        return (torch.where(negative, -x, x), -log_prob) if inverse else (x, log_prob)


class MaxPool(Transform):
    r"""Maximum of each group of adjacent entries. The inverse draws the position of the maximum and the gaps to the other entries.

    The position is uniform and the gaps are exponential with learned rates :math:`r`,
    :math:`q(z \mid x) = \frac1k \prod_j r e^{-r (x - z_j)}` over the other entries. ``Inverse(MaxPool(...))`` is the max-pooling
    layer of a SurVAE flow, whose densities are exact. After a :class:`~flowbnn.transforms.Squeeze`, four adjacent entries are a
    square of pixels.

    Args:
        dim: Length of :math:`x`.
        size: Number of entries in a group; :math:`z` is ``size`` times as long as :math:`x`.

    >>> MaxPool(2, size=3)(torch.tensor([1.0, 5.0, 2.0, 0.0, -1.0, -3.0]))[0]
    tensor([5., 0.])
    """

    draws = "inverse"

    @checked
    def __init__(self, dim: Dim, size: AtLeastTwo = 4) -> None:
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
        position = torch.randint(self.size, (*x.shape, 1), device=x.device)
        others = position != torch.arange(self.size, device=x.device)
        gaps = torch.empty_like(others, dtype=x.dtype).exponential_() * others
        gaps = gaps / self.log_rate.exp().unsqueeze(-1)
        return (x.unsqueeze(-1) - gaps).flatten(-2), -self._log_density(gaps.sum(-1))

    def _log_density(self, gaps: Tensor) -> Tensor:
        """Returns the log-density of the position and of gaps with this sum in each group."""
        return ((self.size - 1) * self.log_rate - self.log_rate.exp() * gaps - math.log(self.size)).sum(-1)


class IntegerTransform(StochasticTransform):
    """Base class for maps from real numbers to integers, which compute in the dtype of the module."""

    discrete = True
    _zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_zero", torch.zeros(()), persistent=False)

    def _check_integers(self, x: Tensor, bits: int, low: float = -math.inf, high: float = math.inf) -> None:
        """Raises FlowBNNError unless a value holds integers within limits.

        Args:
            x: Value to check.
            bits: Number of bits of the precision that the integers must leave unused.
            low: Smallest integer that is allowed.
            high: Largest integer that is allowed.
        """
        check_dense(x, self)
        if x.is_floating_point():
            raise transform_error(self, f"needs integers, got {x.dtype}; cast with .long()", "dtype")
        precision = torch.finfo(self._zero.dtype)
        limit = int(2.0 / precision.eps) >> bits
        hint = f"; use flow.{'float' if precision.bits < 32 else 'double'}()" if high > limit else ""
        check_range(x.long(), max(low, -limit), min(high, limit), type(self).__name__, hint)


class Dequantization(IntegerTransform):
    r"""Rounding, :math:`x = \lfloor L z \rfloor`. The inverse dequantizes integers, :math:`z = (x + u) / L` with
    :math:`u \sim q(u \mid x)`.

    It ends a continuous flow of integer data, and :math:`\log P(x) \ge E_q[\log p(z) - \log q(u \mid x)] - D \log L` bounds their
    log-probability. The noise is uniform (Theis, van den Oord & Bethge 2016), or learned for a tighter bound (variational
    dequantization, Ho et al. 2019). The inverse transform is a flow of real data on top of a model of integers.

    Args:
        levels: Number :math:`L` of values :math:`0 \dots L - 1`, such as 256 for 8-bit images. Then :math:`z` is in :math:`[0, 1]`,
            for instance by a :class:`~flowbnn.transforms.Sigmoid` before, and other values are clipped. None allows all integers,
            :math:`L = 1`.
        noise: Module that returns a distribution of real numbers given the integers, which are scaled to :math:`[-1, 1]` if there are
            levels. A sigmoid maps these numbers to :math:`(0, 1)`. By default :math:`u` is uniform.
        context_dim: Length of the context vectors that the noise reads.

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
        if levels is not None:
            self.domain, self.codomain = (
                constraints.unit_interval,
                constraints.integer_interval(0, levels - 1),
            )

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        scaled = z * (self.levels or 1)
        x = scaled.detach().floor()
        x = x.clamp(0, self.levels - 1) if self.levels else x
        if self.noise is None:
            return x.long(), torch.full_like(z, math.log(self.levels or 1))
        tiny = torch.finfo(z.dtype).eps
        v = torch.logit((scaled - x).clamp(tiny, 1.0 - tiny))
        log_prob = self._log_prob(self.noise, v, self._noise_inputs(x), context, self.event_dim)
        return x.long(), log_prob + self._log_slope(v)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        limits = (0, self.levels - 1) if self.levels else ()
        self._check_integers(x, 7, *limits)  # 7 bits are left for the noise
        x = x.to(self._zero.dtype)
        if self.noise is None:
            u, log_density = torch.rand_like(x), torch.full_like(x, math.log(self.levels or 1))
        else:
            v, log_prob = self._draw(self.noise, x.shape[-1], self._noise_inputs(x), context, self.event_dim)
            u, log_density = torch.sigmoid(v), log_prob + self._log_slope(v)
        margin = 4.0 * torch.finfo(x.dtype).eps  # rounding must not move a value into the next bin
        value = torch.clamp(x + u, x + margin * x.abs(), x + 1.0 - margin * (x + 1.0).abs())
        return value / (self.levels or 1), -log_density

    def _noise_inputs(self, x: Tensor) -> Tensor:
        """Returns the integers as the noise module reads them."""
        return (2.0 * x + 1.0) / self.levels - 1.0 if self.levels else x

    def _log_slope(self, v: Tensor) -> Tensor:
        """Returns the change of the log-density of a drawn number by the sigmoid and the scale."""
        log_slope = math.log(self.levels or 1) - F.logsigmoid(v) - F.logsigmoid(-v)
        return sum_rightmost(log_slope, self.event_dim)


class VAELayer(StochasticTransform):
    r"""Variational autoencoder as a layer: :math:`x \sim p(x \mid z)` forward and :math:`z \sim q(z \mid x)` in the inverse.

    :math:`\log p(x) \ge E_q[\log p(z) + \log p(x \mid z) - \log q(z \mid x)]` (Kingma & Welling 2014), where the flow before the
    layer is the prior of :math:`z`. At its own draws the same sum is, on average, an upper bound.

    Args:
        dim: Length of :math:`x`, or its shape.
        latent_dim: Length of :math:`z`.
        decoder: Module that returns the distribution of :math:`x` given :math:`z`; by default a normal whose mean and scale an MLP
            computes.
        encoder: Module that returns the distribution of :math:`z` given :math:`x`; the default is like that of the decoder. A
            conditional flow is an encoder as well.
        hidden: Widths of the hidden layers of the default decoder and encoder.
        context_dim: Length of the context vectors that both read; 0 ignores the context.

    >>> layer = VAELayer(5, latent_dim=2)
    >>> z, contribution = layer.inverse(torch.ones(7, 5))
    >>> z.shape, contribution.shape, layer.lower_bound
    (torch.Size([7, 2]), torch.Size([7]), True)
    """

    draws: Literal["both"] = "both"

    @checked
    def __init__(
        self,
        dim: Dim | Sequence[Count],
        latent_dim: Count,
        decoder: nn.Module | None = None,
        encoder: nn.Module | None = None,
        hidden: Sequence[Dim] = (64, 64),
        context_dim: Length = 0,
    ) -> None:
        super().__init__()
        self.shape = (dim,) if isinstance(dim, int) else tuple(dim)
        self.sample_axes = len(self.shape)
        self.latent_dim, self.context_dim = latent_dim, context_dim
        if len(self.shape) != 1 and (decoder is None or encoder is None or not self.shape):
            raise FlowBNNError(f"VAELayer needs decoder and encoder for shape {self.shape}", argument="dim")
        size = self.shape[0]
        self.decoder = decoder or ConditionalNormal(
            ConditionerMLP(latent_dim + context_dim, 2 * size, hidden)
        )
        self.encoder = encoder or ConditionalNormal(
            ConditionerMLP(size + context_dim, 2 * latent_dim, hidden)
        )

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
