r"""Maps of single numbers: affine ones of a vector's entries, learned or by the statistics of a batch, and monotone ones.

The monotone maps have no parameters and ``event_dim = 0``: the log-det has the shape of the value. What a float cannot hold is
saturated, not passed on as infinity: inverses move values on the border of the image to the nearest number inside it, so that a
sample that was rounded onto the border (``tanh(10)`` is exactly 1 in float32) still has a finite inverse and log-det.
Values beyond the border are refused where they can be looked at; a compiled graph takes them for the border.
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn import functional as F

from flowbnn.nets.mlp import register_data_init
from flowbnn.numerics import inverse_soft_clamp, inverse_softplus, soft_clamp
from flowbnn.options import Bounds, Count, Positive, checked
from flowbnn.transforms.base import (
    BidirectionalTransform,
    Transform,
    check_range,
    check_tensor,
    check_vectors,
)
from flowbnn.transforms.compose import Inverse


def _below_one(value: Tensor) -> float:
    """The largest number of the value's type that is less than one."""
    return 1.0 - 0.5 * torch.finfo(value.dtype).eps


def _positive(value: Tensor) -> Tensor:
    limits = torch.finfo(value.dtype)
    return value.clamp(limits.tiny, limits.max)


class _Monotone(Transform):
    """A map of the line onto an interval; a subclass gives both directions."""

    event_dim = 0
    onto: Any
    inverse_name = ""

    def ends(self) -> tuple[Any, Any]:
        return constraints.real, self.onto

    def _checked(self, x: Tensor) -> Tensor:
        """An argument of ``inverse``, if it is of the interval."""
        check_tensor(x, self)
        low, high = self.onto.lower_bound, getattr(self.onto, "upper_bound", math.inf)
        check_range(x, low, high, self.inverse_name or f"the inverse of {type(self).__name__}")
        return x


class Tanh(_Monotone):
    r""":math:`x = \tanh z`, with :math:`\log|dx/dz| = 2(\log 2 - z + \log\mathrm{sigmoid}(2z))`, onto :math:`(-1, 1)`.

    >>> Tanh()(torch.tensor([0.0, 50.0]))
    (tensor([0., 1.]), tensor([  0.0000, -98.6137]))
    """

    onto = constraints.interval(-1.0, 1.0)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        return torch.tanh(z), self._log_slope(z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        limit = _below_one(self._checked(x))
        z = torch.atanh(x.clamp(-limit, limit))
        return z, -self._log_slope(z)

    @staticmethod
    def _log_slope(z: Tensor) -> Tensor:
        return 2.0 * (math.log(2.0) - z + F.logsigmoid(2.0 * z))


class Sigmoid(_Monotone):
    r""":math:`x = (p - m) / (1 - 2m)` with :math:`p = 1 / (1 + e^{-z})`, and :math:`\log|dx/dz| = \log p (1 - p) - \log(1 - 2m)`.

    Args:
        margin: :math:`m`. Without one the image is :math:`(0, 1)`. With one it is a little wider, so that 0 and 1 come from numbers of
            a moderate size: pixels have 0.05 (Dinh et al. 2017, https://arxiv.org/abs/1605.08803).

    >>> Sigmoid()(torch.tensor([0.0, -50.0]))
    (tensor([5.0000e-01, 1.9287e-22]), tensor([ -1.3863, -50.0000]))
    """

    margin: Tensor | None
    inverse_name = "Logit (the inverse of Sigmoid)"

    @checked
    def __init__(self, margin: Annotated[float, Bounds(ge=0, lt=0.5)] = 0.0) -> None:
        super().__init__()
        beyond = margin / (1.0 - 2.0 * margin)
        self.onto = constraints.interval(-beyond, 1.0 + beyond) if margin else constraints.unit_interval
        # in the state, so that weights trained with another margin are refused
        self.register_buffer("margin", torch.tensor(margin) if margin else None)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        p, log_slope = torch.sigmoid(z).clamp(max=_below_one(z)), F.logsigmoid(z) + F.logsigmoid(-z)
        if self.margin is None:
            return p, log_slope
        inside = 1.0 - 2.0 * self.margin
        return (p - self.margin) / inside, log_slope - inside.log()

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        p, log_inside = self._checked(x), torch.zeros_like(x)
        if self.margin is not None:
            inside = 1.0 - 2.0 * self.margin
            p, log_inside = self.margin + inside * p, inside.log()
        p = p.clamp(torch.finfo(x.dtype).tiny, _below_one(x))
        log_p, log_rest = torch.log(p), torch.log1p(-p)
        return log_p - log_rest, log_inside - (log_p + log_rest)


class Logit(Inverse):
    r""":math:`x = \log z - \log(1 - z)` from :math:`(0, 1)` onto the line: :class:`Sigmoid` run backwards.

    >>> Logit()(torch.tensor([0.5]))
    (tensor([0.]), tensor([1.3863]))
    """

    @checked
    def __init__(self) -> None:
        super().__init__(Sigmoid())


class Softplus(_Monotone):
    r""":math:`x = \log(1 + e^z)`, with :math:`\log|dx/dz| = \log\mathrm{sigmoid}(z)`, onto :math:`(0, \infty)`.

    >>> Softplus()(torch.tensor([0.0, 90.0]))
    (tensor([ 0.6931, 90.0000]), tensor([-6.9315e-01, -8.1940e-40]))
    """

    onto = constraints.positive

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        # torch's softplus turns into the identity at 20, an error of 2e-9 that float64 would show
        return -F.logsigmoid(-z), F.logsigmoid(z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = _positive(self._checked(x))
        return inverse_softplus(x), -torch.log(-torch.expm1(-x))


class Exp(_Monotone):
    r""":math:`x = e^z`, with :math:`\log|dx/dz| = z`, onto :math:`(0, \infty)`.

    Saturates where the type would overflow or lose its last digits: at :math:`z = 88.7` and :math:`-87.3` in float32.

    >>> Exp()(torch.tensor([0.0, 1.0]))
    (tensor([1.0000, 2.7183]), tensor([0., 1.]))
    """

    onto = constraints.positive

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        limits = torch.finfo(z.dtype)
        # a few roundings inside the logarithm of the largest number, so that exp cannot round up to infinity
        z = z.clamp(math.log(limits.tiny), math.log(limits.max) * (1.0 - 4.0 * limits.eps))
        return z.exp(), z

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = _positive(self._checked(x)).log()
        return z, -z


class Affine(BidirectionalTransform):
    r"""Elementwise affine map :math:`x = c + t + e^{s} \odot (z - c)` with :math:`\log|\det| = \sum_i s_i`.

    Starts at the identity. The log-scale is bounded softly, :math:`s = b \tanh(a / b)`, so that neither direction can overflow.
    Applied to a normal base it is the learnable Gaussian of an implicit Bayesian network.

    Args:
        dim: length of the vectors.
        bound: largest size :math:`b` of the log-scale.
        center: the fixed point :math:`c` of the scaling. At the mean of the base, shift and scale move the mean and the
            spread of the result apart from each other, which optimizers reward.

    >>> x, log_det = Affine(3)(torch.ones(2, 3))
    >>> x.shape, log_det
    (torch.Size([2, 3]), tensor([0., 0.], grad_fn=<ExpandBackward0>))
    """

    linearity = "diagonal"

    @checked
    def __init__(self, dim: Count, bound: Positive = 8.0, center: float = 0.0) -> None:
        super().__init__()
        self.bound, self.center = bound, center
        self.shift = nn.Parameter(torch.zeros(dim))
        self.raw_log_scale = nn.Parameter(torch.zeros(dim))

    @property
    def log_scale(self) -> Tensor:
        return soft_clamp(self.raw_log_scale, self.bound)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, len(self.shift), self)
        log_scale = self.log_scale
        scale, log_det = log_scale.exp(), log_scale.sum().expand(value.shape[:-1])
        if inverse:
            return (value - self._offset(scale)) * (-log_scale).exp(), -log_det
        return torch.addcmul(self._offset(scale), value, scale), log_det

    @torch.no_grad()
    def set_loc_and_scale(self, loc: float | Tensor, scale: float | Tensor) -> None:
        """Become the map of standard normal numbers to normal ones of this mean and deviation, as far as the bound allows."""
        self.raw_log_scale.copy_(inverse_soft_clamp(torch.as_tensor(scale).log(), self.bound))
        self.shift.copy_(torch.as_tensor(loc - (1.0 - scale) * self.center))

    def push_normal(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, deviation and log-scale of the image of a diagonal normal: fewer steps than two forward passes."""
        log_scale = self.log_scale
        factor = log_scale.exp()
        return torch.addcmul(self._offset(factor), loc, factor), scale * factor, log_scale

    def _offset(self, scale: Tensor) -> Tensor:
        return self.shift - self.center * (scale - 1.0) if self.center else self.shift


class ActNorm(Affine):
    r"""Elementwise affine map, :math:`x = e^{s} \odot z + t`, that starts by normalising its data.

    In training mode the first batch of two rows or more sets :math:`s, t` so that what comes out has mean zero and variance one, in the
    direction it was called (Kingma & Dhariwal 2018, section 3.1). From then on they are ordinary parameters. A column that does not
    vary is only centred. ``initialized`` is in the ``state_dict``, so that a loaded map does not start again. With several processes,
    make the first call before the parameters are shared out, else each starts from its own batch.

    Args:
        dim: length of the vectors.
        bound: largest size of the log-scale; the start stays within 0.95 of it, where gradients still pass.
        data_init: start from the first batch; if not, at the identity, and this is :class:`Affine`.

    >>> norm = ActNorm(2)
    >>> x, log_det = norm(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    >>> x.detach()
    tensor([[-1.,  0.],
            [ 1.,  0.]])
    """

    initialized: Tensor

    @checked
    def __init__(self, dim: Count, bound: Positive = 8.0, data_init: bool = True) -> None:
        super().__init__(dim, bound)
        register_data_init(self, data_init)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, len(self.shift), self)
        if self.training and not self.is_initialized and value.shape[:-1].numel() >= 2:
            self._start(value.detach().flatten(0, -2), inverse)
        return super().compute(value, context, inverse)

    @torch.no_grad()
    def _start(self, rows: Tensor, inverse: bool) -> None:
        mean = rows.mean(0)
        deviation = (rows - mean).square().mean(0).sqrt()
        # a constant column has a deviation of rounding errors only
        varies = deviation > 8.0 * torch.finfo(rows.dtype).eps * mean.abs()
        mean = torch.where(torch.isfinite(mean), mean, torch.zeros_like(mean))
        deviation = torch.where(varies & torch.isfinite(deviation), deviation, torch.ones_like(deviation))
        raw = inverse_soft_clamp(deviation.log() if inverse else -deviation.log(), self.bound, 0.95)
        self.raw_log_scale.copy_(raw)
        self.shift.copy_(mean if inverse else -mean * self.log_scale.exp())
        self.initialized.fill_(True)
        self.is_initialized = True


class BatchNorm(BidirectionalTransform):
    r"""Batch norm, :math:`x = \alpha \odot (z - \hat\mu) / \sqrt{\hat\sigma^2 + \epsilon} + \beta`, as a flow.

    Its log-det is :math:`\sum_i \log\alpha_i - \tfrac12\log(\hat\sigma_i^2 + \epsilon)`, the statistics taken as given
    (Dinh, Sohl-Dickstein & Bengio 2017, appendix E). **Forward normalises**: to normalise data on their way to the base,
    as RealNVP does, write ``Inverse(BatchNorm(dim))``.

    In training it takes the batch's own statistics (over all axes but the last), which the running ones follow; in evaluation, for
    fewer than two rows, and backwards always the running ones. :math:`\alpha = e^{a}`, with :math:`a` bounded softly. It starts at the
    identity but for :math:`\epsilon`. Use evaluation mode under ``vmap``, which cannot write buffers.

    Args:
        dim: length of the vectors.
        momentum: weight of a new batch in the running statistics.
        eps: :math:`\epsilon > 0`, added to the variance.
        bound: largest size of :math:`\log\alpha`.

    >>> norm = BatchNorm(1, eps=1e-12)
    >>> x, log_det = norm(torch.tensor([[1.0], [5.0]]))
    >>> x.detach().flatten(), norm.running_mean
    (tensor([-1.,  1.]), tensor([0.3000]))
    """

    running_mean: Tensor
    running_variance: Tensor

    @checked
    def __init__(
        self,
        dim: Count,
        momentum: Annotated[float, Bounds(gt=0, le=1)] = 0.1,
        eps: Positive = 1e-5,
        bound: Positive = 8.0,
    ) -> None:
        super().__init__()
        self.dim, self.momentum, self.eps, self.bound = dim, momentum, eps, bound
        self.shift = nn.Parameter(torch.zeros(dim))
        self.raw_log_scale = nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_variance", torch.ones(dim))

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self)
        own = self.training and not inverse and value.shape[:-1].numel() >= 2
        mean, log_scale = self._statistics(value if own else None)
        log_det = log_scale.sum().expand(value.shape[:-1])
        if inverse:
            return (value - self.shift) * (-log_scale).exp() + mean, -log_det
        return (value - mean) * log_scale.exp() + self.shift, log_det

    def _statistics(self, batch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and log-scale: of a batch, which the running ones then follow, or the running ones."""
        # copies, so that the next batch's update does not overwrite what a pending backward pass remembers
        mean, variance = self.running_mean.clone(), self.running_variance.clone()
        if batch is not None:
            rows = batch.reshape(-1, self.dim)
            mean = rows.mean(0)
            variance = (rows - mean).square().mean(0)
            with torch.no_grad():
                self.running_mean.copy_(torch.lerp(self.running_mean, mean, self.momentum))
                self.running_variance.copy_(torch.lerp(self.running_variance, variance, self.momentum))
        return mean, soft_clamp(self.raw_log_scale, self.bound) - 0.5 * torch.log(variance + self.eps)
