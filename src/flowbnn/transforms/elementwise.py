"""Elementwise transforms: affine maps, learned or by the statistics of a batch, and monotone maps of single numbers.

The monotone maps have no parameters and ``event_dim = 0``, so that the log-determinant has the shape of the value. Values that a
float cannot hold are saturated and never become infinite. Inverses move values on the border of the codomain to the nearest number
inside. A sample that was rounded onto the border (``tanh(10)`` is exactly 1 in float32) therefore has a finite inverse and
log-determinant. Values beyond the border raise an error. A compiled graph cannot check them and treats them as values on the border.
"""

import math
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn import functional as F

from flowbnn.nets.mlp import register_data_init
from flowbnn.numerics import inverse_soft_clamp, inverse_softplus, soft_clamp
from flowbnn.options import Bounds, Dim, Positive, checked
from flowbnn.transforms.base import (
    BidirectionalTransform,
    Transform,
    check_range,
    check_tensor,
    check_vectors,
)
from flowbnn.transforms.compose import Inverse


def _below_one(value: Tensor) -> float:
    """Returns the largest number below one in the dtype of a value."""
    return 1.0 - 0.5 * torch.finfo(value.dtype).eps


def _clamp_positive(value: Tensor) -> Tensor:
    """Clamps a value to the positive numbers that its dtype can hold."""
    limits = torch.finfo(value.dtype)
    return value.clamp(limits.tiny, limits.max)


class _MonotoneTransform(Transform):
    """Base class for increasing maps of the real line onto an interval, the ``codomain``."""

    event_dim = 0

    def _check_codomain(self, x: Tensor) -> Tensor:
        """Returns an argument of ``inverse``. Raises FlowBNNError if a number lies outside the codomain."""
        check_tensor(x, self)
        low, high = self.codomain.lower_bound, getattr(self.codomain, "upper_bound", math.inf)
        check_range(x, low, high, f"{type(self).__name__}.inverse")
        return x


class Tanh(_MonotoneTransform):
    r"""Hyperbolic tangent :math:`x = \tanh z`, with :math:`\log|dx/dz| = 2(\log 2 - z + \log\mathrm{sigmoid}(2z))`, onto
    :math:`(-1, 1)`.

    >>> Tanh()(torch.tensor([0.0, 50.0]))
    (tensor([0., 1.]), tensor([  0.0000, -98.6137]))
    """

    codomain = constraints.interval(-1.0, 1.0)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        return torch.tanh(z), self._log_slope(z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        limit = _below_one(self._check_codomain(x))
        z = torch.atanh(x.clamp(-limit, limit))
        return z, -self._log_slope(z)

    @staticmethod
    def _log_slope(z: Tensor) -> Tensor:
        """Returns the logarithm of the slope of tanh."""
        return 2.0 * (math.log(2.0) - z + F.logsigmoid(2.0 * z))


class Sigmoid(_MonotoneTransform):
    r"""Sigmoid :math:`x = (p - m) / (1 - 2m)` with :math:`p = 1 / (1 + e^{-z})`, and
    :math:`\log|dx/dz| = \log p (1 - p) - \log(1 - 2m)`.

    Args:
        margin: Margin :math:`m`. With 0 the codomain is :math:`(0, 1)`. With a positive margin it is wider, so that 0 and 1 come from
            numbers of moderate size. Flows of pixels use 0.05 (Dinh et al. 2017, https://arxiv.org/abs/1605.08803).

    >>> Sigmoid()(torch.tensor([0.0, -50.0]))
    (tensor([5.0000e-01, 1.9287e-22]), tensor([ -1.3863, -50.0000]))
    """

    margin: Tensor | None

    @checked
    def __init__(self, margin: Annotated[float, Bounds(ge=0, lt=0.5)] = 0.0) -> None:
        super().__init__()
        excess = margin / (1.0 - 2.0 * margin)
        self.codomain = constraints.interval(-excess, 1.0 + excess) if margin else constraints.unit_interval
        # A buffer, so that weights of a flow without this margin are not loaded by mistake.
        self.register_buffer("margin", torch.tensor(margin) if margin else None)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        p, log_slope = torch.sigmoid(z).clamp(max=_below_one(z)), F.logsigmoid(z) + F.logsigmoid(-z)
        if self.margin is None:
            return p, log_slope
        width = 1.0 - 2.0 * self.margin
        return (p - self.margin) / width, log_slope - width.log()

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        p, log_width = self._check_codomain(x), torch.zeros_like(x)
        if self.margin is not None:
            width = 1.0 - 2.0 * self.margin
            p, log_width = self.margin + width * p, width.log()
        p = p.clamp(torch.finfo(x.dtype).tiny, _below_one(x))
        log_p, log_complement = torch.log(p), torch.log1p(-p)
        return log_p - log_complement, log_width - (log_p + log_complement)


class Logit(Inverse):
    r"""Logit :math:`x = \log z - \log(1 - z)` from :math:`(0, 1)` onto the real line: the inverse of :class:`Sigmoid`.

    >>> Logit()(torch.tensor([0.5]))
    (tensor([0.]), tensor([1.3863]))
    """

    @checked
    def __init__(self) -> None:
        super().__init__(Sigmoid())


class Softplus(_MonotoneTransform):
    r"""Softplus :math:`x = \log(1 + e^z)`, with :math:`\log|dx/dz| = \log\mathrm{sigmoid}(z)`, onto :math:`(0, \infty)`.

    >>> Softplus()(torch.tensor([0.0, 90.0]))
    (tensor([ 0.6931, 90.0000]), tensor([-6.9315e-01, -8.1940e-40]))
    """

    codomain = constraints.positive

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        # torch's softplus is the identity above 20, an error of 2e-9 that is visible in float64.
        return -F.logsigmoid(-z), F.logsigmoid(z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = _clamp_positive(self._check_codomain(x))
        return inverse_softplus(x), -torch.log(-torch.expm1(-x))


class Exp(_MonotoneTransform):
    r"""Exponential :math:`x = e^z`, with :math:`\log|dx/dz| = z`, onto :math:`(0, \infty)`.

    It saturates where the dtype would overflow or lose its last digits: at :math:`z = 88.7` and :math:`-87.3` in float32.

    >>> Exp()(torch.tensor([0.0, 1.0]))
    (tensor([1.0000, 2.7183]), tensor([0., 1.]))
    """

    codomain = constraints.positive

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        limits = torch.finfo(z.dtype)
        # Slightly below the logarithm of the largest number, so that exp does not round up to infinity.
        z = z.clamp(math.log(limits.tiny), math.log(limits.max) * (1.0 - 4.0 * limits.eps))
        return z.exp(), z

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = _clamp_positive(self._check_codomain(x)).log()
        return z, -z


class Affine(BidirectionalTransform):
    r"""Elementwise affine map :math:`x = c + t + e^{s} \odot (z - c)` with :math:`\log|\det| = \sum_i s_i`.

    It starts at the identity. The log-scale is bounded softly, :math:`s = b \tanh(a / b)`, so that neither direction overflows.
    Applied to a normal base it is the learnable Gaussian of an implicit Bayesian network.

    Args:
        dim: Length of the vectors.
        bound: Largest absolute value :math:`b` of the log-scale.
        center: Fixed point :math:`c` of the scaling. At the mean of the base, the shift changes only the mean of the result and the
            scale only its spread, which helps optimizers.

    >>> x, log_det = Affine(3)(torch.ones(2, 3))
    >>> x.shape, log_det
    (torch.Size([2, 3]), tensor([0., 0.], grad_fn=<ExpandBackward0>))
    """

    linearity = "diagonal"

    @checked
    def __init__(self, dim: Dim, bound: Positive = 8.0, center: float = 0.0) -> None:
        super().__init__()
        self.bound, self.center = bound, center
        self.shift = nn.Parameter(torch.zeros(dim))
        self.raw_log_scale = nn.Parameter(torch.zeros(dim))

    @property
    def log_scale(self) -> Tensor:
        """Log-scales within the bound."""
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
        """Sets the parameters so that standard normal numbers become normal numbers of a given mean and standard deviation.

        Args:
            loc: Mean of the result.
            scale: Standard deviation of the result, as far as the bound allows.
        """
        self.raw_log_scale.copy_(inverse_soft_clamp(torch.as_tensor(scale).log(), self.bound))
        self.shift.copy_(torch.as_tensor(loc - (1.0 - scale) * self.center))

    def push_normal(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the mean, the standard deviation and the log-scale of the image of a diagonal normal distribution.

        Args:
            loc: Mean of the distribution.
            scale: Standard deviation of the distribution.
        """
        log_scale = self.log_scale
        factor = log_scale.exp()
        return torch.addcmul(self._offset(factor), loc, factor), scale * factor, log_scale

    def _offset(self, scale: Tensor) -> Tensor:
        """Returns the image of zero."""
        return self.shift - self.center * (scale - 1.0) if self.center else self.shift


class ActNorm(Affine):
    r"""Activation normalization: elementwise affine map :math:`x = e^{s} \odot z + t` that starts by normalizing its data.

    In training mode the first batch of two rows or more sets :math:`s` and :math:`t`. The output then has mean zero and variance one,
    in the direction of the call (Kingma & Dhariwal 2018, section 3.1). After that they are ordinary parameters. A constant
    column is only centred. The flag ``initialized`` is in the ``state_dict``, so that a loaded map is not initialized again. With
    several processes, make the first call before the parameters are distributed; otherwise each process starts from its own batch.

    Args:
        dim: Length of the vectors.
        bound: Largest absolute value of the log-scale; the first one stays within 0.95 of it, where gradients still pass.
        data_init: If True, the first batch sets the parameters. If False, this is :class:`Affine`, which starts at the identity.

    >>> norm = ActNorm(2)
    >>> x, log_det = norm(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    >>> x.detach()
    tensor([[-1.,  0.],
            [ 1.,  0.]])
    """

    initialized: Tensor

    @checked
    def __init__(self, dim: Dim, bound: Positive = 8.0, data_init: bool = True) -> None:
        super().__init__(dim, bound)
        register_data_init(self, data_init)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, len(self.shift), self)
        if self.training and not self.is_initialized and value.shape[:-1].numel() >= 2:
            self._initialize(value.detach().flatten(0, -2), inverse)
        return super().compute(value, context, inverse)

    @torch.no_grad()
    def _initialize(self, rows: Tensor, inverse: bool) -> None:
        """Sets the parameters so that these rows are normalized in the given direction."""
        mean = rows.mean(0)
        deviation = (rows - mean).square().mean(0).sqrt()
        # The deviation of a constant column consists of rounding errors.
        varies = deviation > 8.0 * torch.finfo(rows.dtype).eps * mean.abs()
        mean = torch.where(torch.isfinite(mean), mean, torch.zeros_like(mean))
        deviation = torch.where(varies & torch.isfinite(deviation), deviation, torch.ones_like(deviation))
        raw = inverse_soft_clamp(deviation.log() if inverse else -deviation.log(), self.bound, 0.95)
        self.raw_log_scale.copy_(raw)
        self.shift.copy_(mean if inverse else -mean * self.log_scale.exp())
        self.initialized.fill_(True)
        self.is_initialized = True


class BatchNorm(BidirectionalTransform):
    r"""Batch normalization :math:`x = \alpha \odot (z - \hat\mu) / \sqrt{\hat\sigma^2 + \epsilon} + \beta` as a flow.

    The log-determinant is :math:`\sum_i \log\alpha_i - \tfrac12\log(\hat\sigma_i^2 + \epsilon)`, with the statistics held constant
    (Dinh, Sohl-Dickstein & Bengio 2017, appendix E). **Forward normalizes.** To normalize data on their way to the base, as RealNVP
    does, use ``Inverse(BatchNorm(dim))``.

    In training mode it uses the statistics of the batch over all axes but the last and updates the running statistics. In evaluation
    mode, for fewer than two rows, and in the inverse direction it uses the running statistics. :math:`\alpha = e^{a}` with a soft
    bound on :math:`a`. It starts at the identity except for :math:`\epsilon`. Use evaluation mode under ``vmap``, which cannot write
    buffers.

    Args:
        dim: Length of the vectors.
        momentum: Weight of a new batch in the running statistics.
        eps: Constant :math:`\epsilon > 0` that is added to the variance.
        bound: Largest absolute value of :math:`\log\alpha`.

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
        dim: Dim,
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
        use_batch = self.training and not inverse and value.shape[:-1].numel() >= 2
        mean, log_scale = self._statistics(value if use_batch else None)
        log_det = log_scale.sum().expand(value.shape[:-1])
        if inverse:
            return (value - self.shift) * (-log_scale).exp() + mean, -log_det
        return (value - mean) * log_scale.exp() + self.shift, log_det

    def _statistics(self, batch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns mean and log-scale: of a batch, which updates the running statistics, or of these if there is no batch."""
        # Copies, so that the update by the next batch does not overwrite tensors of a pending backward pass.
        mean, variance = self.running_mean.clone(), self.running_variance.clone()
        if batch is not None:
            rows = batch.reshape(-1, self.dim)
            mean = rows.mean(0)
            variance = (rows - mean).square().mean(0)
            with torch.no_grad():
                self.running_mean.copy_(torch.lerp(self.running_mean, mean, self.momentum))
                self.running_variance.copy_(torch.lerp(self.running_variance, variance, self.momentum))
        return mean, soft_clamp(self.raw_log_scale, self.bound) - 0.5 * torch.log(variance + self.eps)
