r"""Noise of random weights in training, and the network that computes with sampled weights.

A linear map :math:`y = W x` with Gaussian weights has Gaussian outputs, so noise can be added to its outputs instead of its weights.
The two estimators below support linear layers and convolutions (with groups, strides and any padding). They lower the variance of
gradients, because the examples of a batch do not share one draw:

* *Local reparameterization* (Kingma, Salimans and Welling 2015, https://arxiv.org/abs/1506.02557): one normal number per output, scaled
  by :math:`\sqrt{\sigma^2 * x^2}`. It is exact for a linear layer with one vector per example. Where an example has several positions
  (convolutions, sequences), the distribution at each position is exact, but correlations between positions are lost.
* *Flipout* (Wen et al. 2018, https://arxiv.org/abs/1803.04386): one draw :math:`\Delta W` per batch, whose signs are flipped at random
  for every example, :math:`y = \bar W x + r \circ \Delta W (s \circ x)`. It is exact for all positions of an example. Examples are on
  the first axis.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.distributions.draws import standard_normal
from flowbnn.noise.contexts import RowShard
from flowbnn.numerics import full_precision
from flowbnn.posterior.weights import SwappedTensors


def apply_weights(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the output of a linear layer or convolution with other weights."""
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, bias)
    layer: Any = module
    return layer._conv_forward(x, weight, bias)


def draw_rows(
    shard: RowShard | None, shape: torch.Size, batched: bool, like: Tensor, signs: bool = False
) -> Tensor:
    """Draws normal numbers or signs. If a batch is split over processes, only the rows of this process are drawn.

    Args:
        shard: Rows of this process, or None.
        shape: Shape of the draws.
        batched: If True, the first axis is the batch.
        like: Tensor with the dtype and device of the draws.
        signs: If True, draws signs.
    """

    def draw(num_rows: int | None) -> Tensor:
        full_shape = shape if num_rows is None else torch.Size((num_rows, *shape[1:]))
        if signs:
            empty = torch.empty(full_shape, dtype=like.dtype, device=like.device)
            return empty.bernoulli_(0.5).mul_(2.0).sub_(1.0)
        return standard_normal(full_shape, torch.promote_types(like.dtype, torch.float32), like.device)

    if shard is None or not batched or shape[0] % (shard.stop - shard.start):
        return draw(None)
    return shard.draw_local(shape[0], draw)


def local_noise(
    module: nn.Module, x: Tensor, std: Tensor, bias_std: Tensor | None, shard: RowShard | None = None
) -> Tensor:
    r"""Returns the noise of the output under local reparameterization, :math:`\sqrt{\sigma_W^2 * x^2 + \sigma_b^2} \circ \epsilon`.

    Args:
        module: Linear layer or convolution.
        x: Input of the layer.
        std: Standard deviations of the weight.
        bias_std: Standard deviations of the bias, or None.
        shard: Rows of this process, or None.

    >>> layer = nn.Linear(3, 2)
    >>> local_noise(layer, torch.ones(5, 3), torch.full((2, 3), 0.1), None).shape
    torch.Size([5, 2])
    """
    # variances underflow in float16
    is_half = torch.get_autocast_dtype(x.device.type) == torch.float16
    with full_precision(x) if is_half else nullcontext():
        bias = None if bias_std is None else bias_std.square()
        variance = apply_weights(module, x.square(), std.square(), bias)
        normal = draw_rows(shard, variance.shape, _is_batched(module, x), variance)
        # the gradient of the root is infinite at zero
        smallest = 1e-60 if variance.dtype == torch.float64 else 1e-30
        return variance.clamp_min(smallest).sqrt() * normal


def flipout_noise(
    module: nn.Module, x: Tensor, delta: Tensor, bias_delta: Tensor | None, shard: RowShard | None = None
) -> Tensor:
    r"""Returns the noise of the output under Flipout: one draw of the weights, with signs flipped for every example.

    Args:
        module: Linear layer or convolution.
        x: Input of the layer.
        delta: Deviation of the weight from its mean.
        bias_delta: Deviation of the bias, or None.
        shard: Rows of this process, or None.

    >>> layer = nn.Conv2d(4, 6, 3, groups=2)
    >>> flipout_noise(layer, torch.ones(5, 4, 8, 8), torch.zeros_like(layer.weight), None).shape
    torch.Size([5, 6, 6, 6])
    """
    axis, batched = -1 - _num_spatial_axes(module), _is_batched(module, x)

    def signs(width: int, ndim: int) -> Tensor:
        shape = [1] * ndim
        shape[axis] = width
        if batched:
            shape[0] = x.shape[0]
        return draw_rows(shard, torch.Size(shape), batched, x, signs=True)

    noise = apply_weights(module, x * signs(x.shape[axis], x.ndim), delta, bias_delta)
    return noise * signs(noise.shape[axis], noise.ndim)


def _num_spatial_axes(module: nn.Module) -> int:
    return 0 if isinstance(module, nn.Linear) else len(module.kernel_size)  # type: ignore[arg-type]


def _is_batched(module: nn.Module, x: Tensor) -> bool:
    return x.ndim > _num_spatial_axes(module) + 1


def gaussian_kl(mean: Tensor, log_std: Tensor, prior_scale: float) -> Tensor:
    r"""Returns the KL divergence of a factorized Gaussian from the prior :math:`\mathcal N(0, \sigma_0^2)`.

    .. math:: \sum_i \log\frac{\sigma_0}{\sigma_i} + \frac{\sigma_i^2 + \mu_i^2}{2\sigma_0^2} - \frac12

    >>> gaussian_kl(torch.zeros(3), torch.zeros(3), 1.0)
    tensor(0.)
    """
    squares = (2.0 * log_std).exp().sum() + mean.square().sum()
    constant = mean.numel() * (math.log(prior_scale) - 0.5)
    return squares / (2.0 * prior_scale**2) - log_std.sum() + constant


class SampledNetwork(nn.Module):
    """Base class for networks that run with sampled tensors in place of some parameters, including all ties.

    The network itself is not changed, except for hooks that :meth:`remove_hooks` removes.

    Args:
        network: Network.
        names: Names of the parameters that are replaced.
    """

    def __init__(self, network: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.network, self.hooks = network, []  # type: tuple[nn.Module, list[Any]]
        self.hook_tensors: dict[str, Tensor] | None = None  # set during a forward pass
        parameters = dict(network.named_parameters())
        name_of = {id(parameters[name]): name for name in names}
        self.locations = [
            (module._parameters, key, name_of[id(parameter)])
            for module in network.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in name_of
        ]

    def forward_with(
        self, values: Mapping[str, Tensor | None], hook_tensors: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs the network with other tensors, through which gradients flow.

        Args:
            values: Tensors that replace the parameters, by name.
            hook_tensors: Tensors for the hooks of this pass.
            args: Inputs of the network.
            kwargs: Named inputs of the network.
        """
        self.hook_tensors = hook_tensors
        try:
            with SwappedTensors((parameters, key, values[name]) for parameters, key, name in self.locations):
                return self.network(*args, **kwargs)
        finally:
            self.hook_tensors = None

    def remove_hooks(self) -> None:
        """Removes the hooks from the network."""
        while self.hooks:
            self.hooks.pop().remove()
