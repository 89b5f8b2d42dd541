r"""Random weights felt as noise on a layer's output, drawn for every example.

A linear map :math:`y = W x` whose weights are Gaussian around their mean has outputs that are Gaussian around theirs, so that the
noise can be added behind the layer instead of inside it. Both ways below serve linear layers and convolutions (with groups, strides
and any padding) and lower the variance of gradients, since the examples of a batch no longer share one draw:

* *local reparameterization* (Kingma, Salimans and Welling 2015, https://arxiv.org/abs/1506.02557):
  one normal number for every output, scaled by
  :math:`\sqrt{\sigma^2 * x^2}`. For a linear layer that sees one vector per example this is exact. Where an example has several
  positions (convolutions, sequences) every position is drawn by itself: each one's distribution is exact, what they share is lost, as
  in the papers that use it for convolutions.
* *Flipout* (Wen et al. 2018, https://arxiv.org/abs/1803.04386):
  one draw :math:`\Delta W` for the batch, whose signs are flipped at random for every example,
  :math:`y = \bar W x + r \circ \Delta W (s \circ x)`. It is exact for all positions of an example; the examples are on the first axis.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.distributions.draws import standard_normal
from flowbnn.noise import Share
from flowbnn.noise.layout import FORWARD, absorbs

__all__ = ["apply_weights", "flipout_noise", "is_linear_map", "local_noise", "rows_of"]

_LEAST = {torch.float64: 1e-60}  # variance: below it, the root has no slope to speak of
_CHANNELS = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def is_linear_map(module: nn.Module) -> bool:
    """Whether the layer is a linear map of torch's own, with a weight of its own: a linear layer or a convolution.

    >>> is_linear_map(nn.Conv2d(4, 8, 3, groups=2)), is_linear_map(nn.ConvTranspose2d(4, 8, 3)), is_linear_map(nn.GRU(4, 8))
    (True, False, False)
    """
    return isinstance(module, FORWARD) and absorbs(module)


def apply_weights(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the layer computes with other weights."""
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, bias)
    layer: Any = module
    return layer._conv_forward(x, weight, bias)


def rows_of(
    share: Share | None, shape: torch.Size, batched: bool, like: Tensor, signs: bool = False
) -> Tensor:
    """Normal numbers (or signs) of this shape; where a batch is spread over processes, the rows that are here of the whole's."""

    def draw(rows: int | None) -> Tensor:
        whole = shape if rows is None else torch.Size((rows, *shape[1:]))
        dtype = torch.promote_types(like.dtype, torch.float32)
        if signs:
            return torch.empty(whole, dtype=dtype, device=like.device).bernoulli_(0.5).mul_(2.0).sub_(1.0)
        return standard_normal(whole, dtype, like.device)

    if share is None or not batched or shape[0] % (share.stop - share.start):
        return draw(None)
    return share.of(shape[0], draw)


def local_noise(
    module: nn.Module, x: Tensor, std: Tensor, bias_std: Tensor | None, share: Share | None = None
) -> Tensor:
    r"""What random weights add to a layer's output: :math:`\sqrt{\sigma_W^2 * x^2 + \sigma_b^2} \circ \epsilon`.

    >>> layer = nn.Linear(3, 2)
    >>> local_noise(layer, torch.ones(5, 3), torch.full((2, 3), 0.1), None).shape
    torch.Size([5, 2])
    """
    if isinstance(module, nn.Linear) and x.ndim == 2 and x.dtype == std.dtype and not _casts(x.device.type):
        shape = torch.Size((x.shape[0], std.shape[0]))
        return _LocalLinear.apply(x, std, bias_std, rows_of(share, shape, True, x))
    with _wide_enough(x.device.type):
        bias = None if bias_std is None else bias_std.square()
        variance = apply_weights(module, x.square(), std.square(), bias)
        normal = rows_of(share, variance.shape, _batched(module, x), variance)
        return variance.clamp_min(_LEAST.get(variance.dtype, 1e-30)).sqrt() * normal


class _LocalLinear(torch.autograd.Function):
    """:func:`local_noise` of a linear layer on vectors as one node: torch's many would cost twice as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, std: Tensor, bias_std: Tensor | None, normal: Tensor) -> Tensor:
        square = x * x
        # products with a transposed right side are slow on some CPUs
        scale = square.mm((std * std).t().contiguous())
        if bias_std is not None:
            scale += bias_std * bias_std
        scale = scale.clamp_min_(_LEAST.get(x.dtype, 1e-30)).sqrt_()
        ctx.save_for_backward(x, square, std, bias_std, normal / scale)
        return scale * normal

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, square, std, bias_std, share = ctx.saved_tensors
        share = gradient * share  # twice the gradient of the variance
        to_x = share.mm(std * std).mul_(x) if ctx.needs_input_grad[0] else None
        to_bias = None if bias_std is None else share.sum(0).mul_(bias_std)
        return to_x, share.t().mm(square).mul_(std), to_bias, None


def flipout_noise(
    module: nn.Module, x: Tensor, delta: Tensor, bias_delta: Tensor | None, share: Share | None = None
) -> Tensor:
    r"""What one draw of the weights' noise adds to a layer's output, its signs flipped for every example.

    >>> layer = nn.Conv2d(4, 6, 3, groups=2)
    >>> flipout_noise(layer, torch.ones(5, 4, 8, 8), torch.zeros_like(layer.weight), None).shape
    torch.Size([5, 6, 6, 6])
    """
    spatial, batched = _spatial(module), _batched(module, x)
    axis = -1 - spatial

    def signs(width: int, ndim: int) -> Tensor:
        shape = [1] * ndim
        shape[axis] = width
        if batched:
            shape[0] = x.shape[0]
        return rows_of(share, torch.Size(shape), batched, x, signs=True)

    moved = apply_weights(module, x * signs(x.shape[axis], x.ndim), delta, bias_delta)
    return moved * signs(moved.shape[axis], moved.ndim)


def _spatial(module: nn.Module) -> int:
    return next(count for kind, count in _CHANNELS.items() if isinstance(module, kind))


def _batched(module: nn.Module, x: Tensor) -> bool:
    return x.ndim > _spatial(module) + 1


def _casts(device: str) -> bool:
    return torch.is_autocast_enabled(device)


def _wide_enough(device: str) -> AbstractContextManager[Any]:
    """Variances are too small for float16; bfloat16 has the range."""
    if _casts(device) and torch.get_autocast_dtype(device) == torch.float16:
        return torch.autocast(device, enabled=False)
    return nullcontext()
