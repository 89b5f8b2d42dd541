r"""Gaussian weights of a whole network, end to end in two vectors: means :math:`\mu` and logs of standard deviations :math:`s`.

.. math:: q(w) = \prod_i \mathcal N(w_i \mid \mu_i, e^{2 s_i})

So the draw and the KL of all layers take the few operations on long vectors that one layer's would.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.methods.variational.layers import Way, flipout_noise, local_noise
from flowbnn.noise import current_share

__all__ = ["DrawnWeights", "GaussianWeights", "Places", "gaussian_kl", "mixture_kl"]

_WAYS: tuple[Way, ...] = ("reparameterization", "flipout", "local")


def gaussian_kl(mean: Tensor, log_std: Tensor, prior_scale: float) -> Tensor:
    r""":math:`\sum_i \log\frac{\sigma_0}{\sigma_i} + \frac{\sigma_i^2 + \mu_i^2}{2\sigma_0^2} - \frac12`, to a prior around zero.

    >>> gaussian_kl(torch.zeros(3), torch.zeros(3), 1.0)
    tensor(0.)
    """
    squares = (2.0 * log_std).exp().sum() + mean.square().sum()
    constant = mean.numel() * (math.log(prior_scale) - 0.5)
    return squares / (2.0 * prior_scale**2) - log_std.sum() + constant


def mixture_kl(
    mean: Tensor, log_std: Tensor, normal: Tensor, pi: float, sigma1: float, sigma2: float
) -> Tensor:
    r"""The KL to :math:`\pi \mathcal N(0, \sigma_1^2) + (1 - \pi) \mathcal N(0, \sigma_2^2)`, which has no closed form.

    :math:`E_q \log q` has one; :math:`E_q \log p` is estimated at the draws :math:`\mu + \sigma \epsilon`, averaged over the first
    axis of ``normal``, ``[K, n]``.

    >>> same = mixture_kl(torch.zeros(3), torch.zeros(3), torch.ones(1, 3), 0.5, 1.0, 1.0)  # one Gaussian: the closed form at e = 1
    >>> round(same.item(), 6)
    0.0
    """
    return _MixtureKL.apply(mean, log_std, normal, pi, sigma1, sigma2)


class _MixtureKL(torch.autograd.Function):
    """:func:`mixture_kl` as one node: its derivatives need no more than the second component's responsibility."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_std: Tensor, normal: Tensor, pi: float, sigma1: float, sigma2: float
    ) -> Tensor:
        std = log_std.exp()
        draws = torch.addcmul(mean, std, normal)
        square = draws * draws
        first = square.mul(-0.5 * sigma1**-2).add_(math.log(pi) - math.log(sigma1))
        second = square.mul_(-0.5 * sigma2**-2).add_(math.log1p(-pi) - math.log(sigma2))
        share = torch.sigmoid(second - first)
        larger = torch.maximum(first, second).sum() - torch.maximum(share, 1.0 - share).log().sum()
        ctx.save_for_backward(std, draws, normal, share)
        ctx.precisions = (sigma1**-2, sigma2**-2)
        return -0.5 * mean.numel() - larger / normal.shape[0] - log_std.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        std, draws, normal, share = ctx.saved_tensors
        first, second = ctx.precisions
        to_draws = share.mul(second - first).add_(first).mul_(draws).mul_(gradient / len(draws))
        to_log_std = (to_draws * normal).sum(0).mul_(std).sub_(gradient)
        return to_draws.sum(0), to_log_std, None, None, None, None


class Places:
    """Where parameters stand in a network, tied ones in all their places, so that tensors can stand there for a while.

    Args:
        network: the network.
        names: of parameters, as ``named_parameters()`` has them.
    """

    def __init__(self, network: nn.Module, names: list[str]) -> None:
        own = dict(network.named_parameters())
        wanted = {id(own[name]): name for name in names}
        self.places = [
            (module._parameters, key, parameter, wanted[id(parameter)])
            for module in network.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in wanted
        ]

    @contextmanager
    def filled(self, values: Mapping[str, Tensor | None]) -> Iterator[None]:
        """Inside the ``with`` block the network computes with these tensors; gradients reach them."""
        try:
            for held, key, _, name in self.places:
                held[key] = values[name]  # type: ignore[assignment]
            yield
        finally:
            for held, key, own, _ in self.places:
                held[key] = own


class GaussianWeights(nn.Module):
    """Means and log standard deviations of the weights of a network.

    Args:
        mean: starting values, by the names of the parameters.
        std: standard deviations to start from, alike.
        ways: how each parameter is drawn in training; plain reparameterization for those that are not named.
    """

    def __init__(
        self, mean: Mapping[str, Tensor], std: Mapping[str, Tensor], ways: Mapping[str, Way] | None = None
    ) -> None:
        super().__init__()
        ways = ways or {}
        chosen: dict[str, Way] = {name: ways.get(name, "reparameterization") for name in mean}
        self.names = sorted(mean, key=lambda name: _WAYS.index(chosen[name]))
        self.shapes = [mean[name].shape for name in self.names]
        sizes = [shape.numel() for shape in self.shapes]
        self.sizes = sizes
        counts = {
            way: sum(s for n, s in zip(self.names, sizes, strict=True) if chosen[n] == way) for way in _WAYS
        }
        self.moved = counts["reparameterization"]  # these weights are drawn; the others stay at their means
        self.drawn = self.moved + counts["flipout"]
        self.mean = nn.Parameter(torch.cat([mean[name].detach().flatten() for name in self.names]))
        self.log_std = nn.Parameter(torch.cat([std[name].detach().flatten() for name in self.names]).log())

    def forward(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the network is to hold in a pass, and what the noise behind its layers is made of.

        The first are drawn weights, or means where the noise comes behind; the second the draw's distance from the mean (Flipout) or
        the standard deviations (local).
        """
        scale, like = self.log_std.exp(), self.mean
        if self.drawn:
            normal = standard_normal(torch.Size((self.drawn,)), like.dtype, like.device)
            if self.drawn < len(like):
                normal = torch.cat([normal, torch.ones_like(like[self.drawn :])])
            scale = scale * normal
        if self.moved == len(like):
            return self.split(like + scale), {}
        center = torch.cat([like[: self.moved] + scale[: self.moved], like[self.moved :]])
        behind = self.split(scale)
        at = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if at < self.moved:
                del behind[name]
            at += size
        return self.split(center), behind

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters of a vector ``[..., n]`` by their names."""
        parts, leading = flat.split(self.sizes, -1), flat.shape[:-1]
        return {
            name: part.view(*leading, *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def divergence(
        self, prior_scale: float = 1.0, mixture: tuple[float, float, float] | None = None, samples: int = 1
    ) -> Divergence:
        r"""KL to the prior :math:`\mathcal N(0, \sigma_0^2)`, or to a mixture ``(pi, sigma1, sigma2)`` on fresh draws; entropy."""
        mean, log_std = self.mean, self.log_std
        with torch.no_grad():
            entropy = log_std.sum() + 0.5 * mean.numel() * (1.0 + math.log(2.0 * math.pi))
        if mixture is None:
            return Divergence(gaussian_kl(mean, log_std, prior_scale), entropy)
        normal = standard_normal(torch.Size((samples, mean.numel())), mean.dtype, mean.device)
        return Divergence(mixture_kl(mean, log_std, normal, *mixture), entropy)


class DrawnWeights(nn.Module):
    """A network whose weights are drawn anew in every pass, around the network as it is.

    Args:
        network: of any class. It is left as it is but for hooks on some layers, which :meth:`release` takes off.
        weights: gives, when called, what the network is to hold, and for layers that get noise behind them what that is made of.
        ways: ``"local"`` or ``"flipout"`` by the names of such layers.
    """

    def __init__(
        self, network: nn.Module, weights: GaussianWeights, ways: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self.network, self.weights = network, weights
        self.places = Places(network, weights.names)
        self.behind: dict[str, Tensor] | None = None
        names = {id(p): name for name, p in network.named_parameters()}
        self.hooks = []
        for layer, way in (ways or {}).items():
            module = network.get_submodule(layer)
            own = {key: names[id(p)] for key, p in module._parameters.items() if p is not None}
            hook = self._hook(
                own["weight"], own.get("bias", ""), flipout_noise if way == "flipout" else local_noise
            )
            self.hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def _hook(self, weight: str, bias: str, noise: Any) -> Any:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> Tensor | None:
            if self.behind is None:
                return None
            x = args[0] if args else kwargs["input"]
            return output + noise(module, x, self.behind[weight], self.behind.get(bias), current_share())

        return hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        center, behind = self.weights()
        self.behind = behind
        try:
            with self.places.filled(center):
                return self.network(*args, **kwargs)
        finally:
            self.behind = None

    def release(self) -> None:
        """Take the hooks off and leave the means in the network."""
        for hook in self.hooks:
            hook.remove()
        own = dict(self.network.named_parameters())
        with torch.no_grad():
            for name, value in self.weights.split(self.weights.mean).items():
                own[name].copy_(value)
