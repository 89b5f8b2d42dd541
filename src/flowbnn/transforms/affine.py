"""Elementwise affine maps: learned, or by the statistics of a batch."""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from flowbnn.numerics import soft_clamp
from flowbnn.options import Count, Interval, Positive, checked
from flowbnn.transforms.base import Transform, check_vectors


class Affine(Transform):
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

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, len(self.shift), self)
        log_scale = self.log_scale
        scale = log_scale.exp()
        return torch.addcmul(self._offset(scale), z, scale), log_scale.sum().expand(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, len(self.shift), self)
        log_scale = self.log_scale
        return (x - self._offset(log_scale.exp())) * (-log_scale).exp(), -log_scale.sum().expand(x.shape[:-1])

    @torch.no_grad()
    def start(self, loc: float, scale: float) -> None:
        """Become the map of standard normal numbers to normal ones of this mean and deviation, as far as the bound allows."""
        log_scale = max(-0.99, min(0.99, math.log(scale) / self.bound))
        self.raw_log_scale.fill_(self.bound * math.atanh(log_scale))
        self.shift.fill_(loc).sub_((1.0 - scale) * self.center)

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
        data_start: start from the first batch; if not, at the identity, and this is :class:`Affine`.

    >>> norm = ActNorm(2)
    >>> x, log_det = norm(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    >>> x.detach()
    tensor([[-1.,  0.],
            [ 1.,  0.]])
    """

    initialized: Tensor

    @checked
    def __init__(self, dim: Count, bound: Positive = 8.0, data_start: bool = True) -> None:
        super().__init__(dim, bound)
        self.dim = dim
        self.register_buffer("initialized", torch.tensor(not data_start))
        # the same fact for Python, because a compiled graph must not branch on a tensor
        self.started = not data_start
        self.register_load_state_dict_post_hook(_read_started)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._start(z, backwards=False)
        return super().forward(z, context)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._start(x, backwards=True)
        return super().inverse(x, context)

    @torch.no_grad()
    def _start(self, value: Tensor, backwards: bool) -> None:
        check_vectors(value, self.dim, self)
        if self.started or not self.training or value.shape[:-1].numel() < 2:
            return
        rows = value.detach().reshape(-1, self.dim)
        mean = rows.mean(0)
        deviation = (rows - mean).square().mean(0).sqrt()
        # a constant column has a deviation of rounding errors only
        varies = deviation > 8.0 * torch.finfo(rows.dtype).eps * mean.abs()
        mean = torch.where(torch.isfinite(mean), mean, torch.zeros_like(mean))
        deviation = torch.where(varies & torch.isfinite(deviation), deviation, torch.ones_like(deviation))
        log_scale = (deviation.log() / self.bound).clamp(-0.95, 0.95) * self.bound
        log_scale = log_scale if backwards else -log_scale
        self.raw_log_scale.copy_(self.bound * torch.atanh(log_scale / self.bound))
        self.shift.copy_(mean if backwards else -mean * log_scale.exp())
        self.initialized.fill_(True)
        self.started = True


def _read_started(module: nn.Module, incompatible: Any) -> None:
    module.started = bool(module.initialized)  # type: ignore[assignment]


class BatchNorm(Transform):
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
        momentum: Annotated[float, Interval(gt=0, le=1)] = 0.1,
        eps: Positive = 1e-5,
        bound: Positive = 8.0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.momentum = momentum
        self.eps = eps
        self.bound = bound
        self.shift = nn.Parameter(torch.zeros(dim))
        self.raw_log_scale = nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_variance", torch.ones(dim))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, self.dim, self)
        own = self.training and z.shape[:-1].numel() >= 2
        mean, variance = self._follow(z) if own else self._running()
        log_scale = self._log_scale(variance)
        return (z - mean) * log_scale.exp() + self.shift, log_scale.sum().expand(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, self.dim, self)
        mean, variance = self._running()
        log_scale = self._log_scale(variance)
        return (x - self.shift) * (-log_scale).exp() + mean, -log_scale.sum().expand(x.shape[:-1])

    def _log_scale(self, variance: Tensor) -> Tensor:
        return soft_clamp(self.raw_log_scale, self.bound) - 0.5 * torch.log(variance + self.eps)

    def _running(self) -> tuple[Tensor, Tensor]:
        # copies, so that the next batch's update does not overwrite what a pending backward pass remembers
        return self.running_mean.clone(), self.running_variance.clone()

    def _follow(self, z: Tensor) -> tuple[Tensor, Tensor]:
        rows = z.reshape(-1, self.dim)
        mean = rows.mean(0)
        variance = (rows - mean).square().mean(0)
        with torch.no_grad():
            self.running_mean.copy_(torch.lerp(self.running_mean, mean, self.momentum))
            self.running_variance.copy_(torch.lerp(self.running_variance, variance, self.momentum))
        return mean, variance
