r"""Means, standard deviations, KL divergences and entropies of the Gaussians of many layers, by numpy on a CPU.

The formulas are those of :class:`flowbnn.noise.gaussians.Gaussians`. They are about thirty operations on vectors of a few hundred
numbers, which take longer to start than to compute. numpy starts them faster than torch, and autograd adds a node for each.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from flowbnn.kernels.reference import gradients

Array = NDArray[Any]

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)  # minus the log-density of a standard normal at 0


def moments_available(constants: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Returns True if numpy can compute the moments. Transforms and traces of torch need its own operations.

    Args:
        constants: Tensors without gradients.
        parameters: Shifts and raw log-scales.

    >>> moments_available([torch.zeros(2)], [torch.ones(2)]), moments_available([torch.zeros(2, requires_grad=True)], [])
    (True, False)
    """
    if is_compiling() or maybe_current_level() is not None or forward_ad._current_level >= 0:
        return False
    # also excludes the fake tensors of exporters
    if any(type(tensor) not in (Tensor, Parameter) or tensor.requires_grad for tensor in constants):
        return False
    dtype = parameters[0].dtype if parameters else torch.float32
    same = all(tensor.is_cpu and tensor.dtype == dtype for tensor in (*constants, *parameters))
    return (
        same
        and dtype in (torch.float32, torch.float64)
        and all(type(p) in (Tensor, Parameter) for p in parameters)
    )


class MomentsFunction(torch.autograd.Function):
    """Computes the moments of Gaussians: mean and standard deviation ``[numbers]``, KL and entropy ``[layers]``.

    Args:
        sizes: Length of the noise vector of each layer.
        num_closed_form: Number of leading numbers whose KL is in closed form. For the others, only the part that does not depend on
            draws is added.
        bound: Bound of the log-scales.
        centers: Center of each layer.
        constants: Means and standard deviations of the priors, and of the bases, of all layers.
        reference: The same function of ``parameters`` by torch's operations, for second derivatives. It must not hold the results.
        parameters: Shifts of all layers, and then their raw log-scales.
    """

    @staticmethod
    @np.errstate(all="ignore")  # a diverging fit is reported by the check of the loss
    def forward(
        ctx: Any,
        sizes: Sequence[int],
        num_closed_form: int,
        bound: float,
        centers: Sequence[float],
        constants: Sequence[Sequence[Tensor]],
        reference: Callable[..., tuple[Tensor, ...]],
        *parameters: Tensor,
    ) -> Any:
        prior_loc, prior_scale, loc, scale = (_concatenate(tensors) for tensors in constants)
        shift, raw = _concatenate(parameters[: len(sizes)]), _concatenate(parameters[len(sizes) :])
        center = np.repeat(np.asarray(centers, raw.dtype), sizes)
        tanh = np.tanh(raw * (1.0 / bound))
        factor = np.exp(bound * tanh)
        mean, deviation = shift + center + (loc - center) * factor, scale * factor
        log_deviation = bound * tanh + np.log(scale)
        relative, offset = deviation / prior_scale, (mean - prior_loc) / prior_scale
        relative[num_closed_form:] = offset[num_closed_form:] = 0.0
        kl = 0.5 * (relative * relative + offset * offset)
        kl[:num_closed_form] -= 0.5
        kl += np.log(prior_scale) - log_deviation
        starts = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype(np.intp)
        entropy = np.add.reduceat(log_deviation + (HALF_LOG_2PI + 0.5), starts)
        ctx.sizes, ctx.reference = sizes, reference
        ctx.arrays = tanh, factor, deviation, loc - center, relative / prior_scale, offset / prior_scale
        ctx.save_for_backward(*parameters)
        return tuple(map(torch.from_numpy, (mean, deviation, np.add.reduceat(kl, starts), entropy)))

    @staticmethod
    @np.errstate(all="ignore")
    def backward(ctx: Any, *grads: Any) -> Any:
        parameters = ctx.saved_tensors  # torch checks that no parameter has changed
        if torch.is_grad_enabled():
            return *[None] * 6, *gradients(ctx.reference, parameters, grads)
        tanh, factor, deviation, distance, relative, offset = ctx.arrays
        grad_mean, grad_deviation, grad_kl, grad_entropy = (grad.numpy() for grad in grads)
        grad_kl, grad_entropy = np.repeat(grad_kl, ctx.sizes), np.repeat(grad_entropy, ctx.sizes)
        grad_shift = grad_mean + grad_kl * offset
        grad_log = grad_shift * distance * factor + (grad_deviation + grad_kl * relative) * deviation
        grad_log += grad_entropy - grad_kl
        grad_raw = grad_log * (1.0 - tanh * tanh)
        columns = (torch.from_numpy(grad).split(ctx.sizes) for grad in (grad_shift, grad_raw))
        return *[None] * 6, *next(columns), *next(columns)


def _concatenate(tensors: Sequence[Tensor]) -> Array:
    """Returns tensors as one array."""
    return np.concatenate([tensor.detach().numpy() for tensor in tensors])
