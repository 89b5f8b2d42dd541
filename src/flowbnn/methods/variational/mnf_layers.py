r"""Weights multiplied by noise from a flow (Louizos and Welling 2017, https://arxiv.org/abs/1703.01961).

.. math:: q(W) = \int q(W \mid z)\, q(z)\, dz, \qquad q(W \mid z) = \prod_{ij} \mathcal N(z_i \mu_{ij}, \sigma_{ij}^2),
          \qquad z \sim \text{flow}

As in the paper, :math:`z` has an entry for every input feature of a linear layer and for every filter (output channel) of a
convolution; biases are Gaussian and are not multiplied. The flow begins at standard normal numbers :math:`\epsilon` and ends with an
affine map to the neighbourhood of one. The KL to the prior is bounded with an auxiliary :math:`r(z \mid W)`:

.. math:: \mathrm{KL}[q(W) \| p(W)] \le E\left[\mathrm{KL}[q(W \mid z) \| p(W)] + \log q(z) - \log r(z \mid W)\right]

:math:`r` goes back from :math:`z` to :math:`\epsilon` by the inverse of ``z``'s own flow, then through a flow ``g`` of its own to a
Gaussian that looks at the weights, :math:`g(\epsilon) \sim \mathcal N(b_1 t, e^{b_2 t})`, :math:`t = \mathrm{mean} \tanh(c^\top W)`. So
nothing has to be inverted, and noise that never moves gives the bound of a factorized Gaussian.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.methods.variational.gaussian_weights import Places, gaussian_kl
from flowbnn.methods.variational.layers import local_noise, rows_of
from flowbnn.noise import current_share
from flowbnn.numerics import sum_rightmost
from flowbnn.transforms import Transform

__all__ = ["MultiplicativeLayer", "MultiplicativeWeights", "Served"]

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Served(NamedTuple):
    """A layer, the names of its parameters, and how it is drawn in training.

    Args:
        layer: its name.
        weight, bias: names of the parameters; no bias where there is none to learn.
        way: ``"local"``, or ``"reparameterization"`` where one draw must serve all positions or places.
    """

    layer: str
    weight: str
    bias: str
    way: str


class MultiplicativeLayer(nn.Module):
    """The weights of one layer.

    Args:
        weight, bias: where the means start.
        by_filter: ``z`` has an entry for every filter (axis 0 of the weight), else for every input feature (axis 1).
        std: standard deviation of the weights at the start.
        z_std: of ``z`` around one.
        transforms: from a length to the parts of a flow on vectors of that length; called for ``z`` and for the auxiliary.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        by_filter: bool,
        std: float,
        z_std: float,
        transforms: Callable[[int], Sequence[Transform]],
    ) -> None:
        super().__init__()
        dim = weight.shape[0 if by_filter else 1]
        self.by_filter, self.dim = by_filter, dim
        self.mean = nn.Parameter(weight.detach().clone())
        self.log_std = nn.Parameter(torch.full_like(weight, math.log(std)))
        self.bias_mean = None if bias is None else nn.Parameter(bias.detach().clone())
        self.bias_log_std = None if bias is None else nn.Parameter(torch.full_like(bias, math.log(std)))
        like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.z_mean = nn.Parameter(torch.ones(dim, **like))
        self.z_log_std = nn.Parameter(torch.full((dim,), math.log(z_std), **like))
        self.flow = nn.ModuleList(transforms(dim)).to(**like)
        self.back = nn.ModuleList(transforms(dim)).to(**like)
        self.c = nn.Parameter(0.1 * torch.randn(dim, **like))
        self.b1 = nn.Parameter(0.01 * torch.randn(dim, **like))
        self.b2 = nn.Parameter(0.01 * torch.randn(dim, **like))

    def means(self) -> list[nn.Parameter]:
        """The parameters that are weights; all others are noise."""
        return [self.mean] if self.bias_mean is None else [self.mean, self.bias_mean]

    def z(self, normal: Tensor) -> tuple[Tensor, Tensor]:
        """``z`` from standard normal vectors ``[..., dim]``, and its log-density."""
        with _in_full_precision(normal.device.type):
            end, log_det = _through(self.flow, normal)
            log_base = -0.5 * normal.square().sum(-1) - self.dim * _HALF_LOG_TWO_PI
            z = torch.addcmul(self.z_mean, self.z_log_std.exp(), end)
            return z, log_base - log_det - self.z_log_std.sum()

    def scaled(self, z: Tensor) -> Tensor:
        """The mean of the weights given one ``z``."""
        return self.mean * (z.view(-1, *(1,) * (self.mean.ndim - 1)) if self.by_filter else self._across(z))

    def _across(self, z: Tensor) -> Tensor:
        return z.view(1, -1, *(1,) * (self.mean.ndim - 2))

    def draw(self, normal: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias from one vector of :attr:`size` standard normals: ``z`` first, then the weights given it."""
        first, second, third = normal.split(
            [self.dim, self.mean.numel(), self.size - self.dim - self.mean.numel()]
        )
        weight = torch.addcmul(self.scaled(self.z(first)[0]), self.log_std.exp(), second.view_as(self.mean))
        if self.bias_mean is None or self.bias_log_std is None:
            return weight, None
        return weight, torch.addcmul(self.bias_mean, self.bias_log_std.exp(), third.view_as(self.bias_mean))

    @property
    def size(self) -> int:
        """How many normal numbers a draw takes."""
        return self.dim + self.mean.numel() + (0 if self.bias_mean is None else self.bias_mean.numel())

    def kl_bound(self, normal: Tensor, prior_scale: float, noise: Tensor) -> Tensor:
        """The bound on the KL, averaged over draws of ``z`` made of ``normal``, ``[K, dim]``.

        Args:
            noise: standard normals for :math:`c^T W`, ``[K, columns]``, columns being the weights that share an entry of ``z``.
        """
        z, _ = self.z(normal)
        mean, variance = self._columns(self.mean), self._columns((2.0 * self.log_std).exp())
        squares = z.square() @ mean.square().sum(-1) + variance.sum()
        count = mean.numel() * (math.log(prior_scale) - 0.5)
        given_z = squares / (2.0 * prior_scale**2) - self.log_std.sum() + count
        projected = (self.c * z) @ mean + (self.c.square() @ variance).clamp_min(1e-30).sqrt() * noise
        t = torch.tanh(projected).mean(-1, keepdim=True)
        # the way back from z by q's own flow ends at the normal numbers z was made of, and their log-dets cancel
        end, log_det = _through(self.back, normal)
        log_variance = self.b2 * t
        error = (end - self.b1 * t).square() * (-log_variance).exp()
        log_ratio = 0.5 * (error + log_variance - normal.square()).sum(-1) - log_det
        total = (given_z + log_ratio).mean()
        if self.bias_mean is not None and self.bias_log_std is not None:
            total = total + gaussian_kl(self.bias_mean, self.bias_log_std, prior_scale)
        return total

    def _columns(self, value: Tensor) -> Tensor:
        """``[dim, columns]``: a row for each entry of ``z``."""
        return value.flatten(1) if self.by_filter else value.transpose(0, 1).flatten(1)


class MultiplicativeWeights(nn.Module):
    """A network whose linear and convolution layers have multiplied weights, drawn anew in every pass.

    Args:
        network: of any class; it is left as it is but for hooks, which :meth:`release` takes off.
        served: its layers.
        parts: their weights, in the same order.
    """

    def __init__(
        self, network: nn.Module, served: Sequence[Served], parts: Sequence[MultiplicativeLayer]
    ) -> None:
        super().__init__()
        self.network, self.parts, self.served = network, nn.ModuleList(parts), list(served)
        names = [name for one in served for name in (one.weight, one.bias) if name]
        self.places = Places(network, names)
        self.inside = False
        self.hooks: list[Any] = []
        self.seen: dict[str, Tensor] = {}
        for one, part in zip(served, parts, strict=True):
            if one.way == "local":
                module = network.get_submodule(one.layer)
                before, after = self._hooks(one.layer, part)
                self.hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self.hooks.append(module.register_forward_hook(after))

    def _hooks(self, name: str, part: MultiplicativeLayer) -> tuple[Any, Any]:
        def draw_z(x: Tensor) -> Tensor:
            shape = torch.Size((x.shape[0], part.dim))
            return part.z(rows_of(current_share(), shape, True, part.z_mean))[0]

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.inside:
                return None
            x = args[0] if args else kwargs["input"]
            self.seen[name] = x
            return ((x if part.by_filter else x * draw_z(x),), {})

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if not self.inside:
                return None
            x = self.seen.pop(name)
            bias_std = None if part.bias_log_std is None else part.bias_log_std.exp()
            noise = local_noise(module, x, part.log_std.exp(), bias_std, current_share())
            if not part.by_filter:
                return output + noise
            ones = (1,) * (output.ndim - 2)
            scaled = output * draw_z(x).view(*output.shape[:2], *ones)
            return (
                scaled + noise if part.bias_mean is None else scaled + noise + part.bias_mean.view(-1, *ones)
            )

        return before, after

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values: dict[str, Tensor | None] = {}
        for one, part in self.pairs():
            bias: Tensor | None
            if one.way == "local":  # the bias of a convolution comes after the multiplication
                values[one.weight], bias = part.mean, None if part.by_filter else part.bias_mean
            else:
                normal = standard_normal(torch.Size((part.size,)), part.mean.dtype, part.mean.device)
                values[one.weight], bias = part.draw(normal)
            if one.bias:
                values[one.bias] = bias
        self.inside = True
        try:
            with self.places.filled(values):
                return self.network(*args, **kwargs)
        finally:
            self.inside = False
            self.seen.clear()

    def pairs(self) -> list[tuple[Served, MultiplicativeLayer]]:
        """Layers and their weights."""
        return list(zip(self.served, self.parts, strict=True))  # type: ignore[arg-type]

    def divergence(self, prior_scale: float, samples: int) -> Divergence:
        """The bound on the KL, on fresh draws; the entropy of such weights is not known, so it is left at 0."""
        bounds = []
        for _, part in self.pairs():
            columns = part.mean.numel() // part.dim
            like = part.mean
            shape = torch.Size((samples, part.dim + columns))
            normal, noise = standard_normal(shape, like.dtype, like.device).split([part.dim, columns], -1)
            with _in_full_precision(like.device.type):
                bounds.append(part.kl_bound(normal, prior_scale, noise))
        total = torch.stack(bounds).sum()
        return Divergence(total, torch.zeros_like(total).detach())

    def draw(self, normal: Tensor) -> dict[str, Tensor]:
        """Weights of the whole network from one vector of :attr:`size` standard normals."""
        values: dict[str, Tensor] = {}
        pairs = self.pairs()
        for (one, part), piece in zip(pairs, normal.split([part.size for _, part in pairs]), strict=True):
            values[one.weight], bias = part.draw(piece)
            if bias is not None:
                values[one.bias] = bias
        return values

    @property
    def size(self) -> int:
        return sum(part.size for _, part in self.pairs())

    def release(self) -> None:
        """Take the hooks off."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def _through(parts: Any, z: Tensor) -> tuple[Tensor, Tensor]:
    total = z.new_zeros(z.shape[:-1])
    for part in parts:
        z, log_det = part(z)
        total = total + sum_rightmost(log_det, 1 - part.event_dim)
    return z, total


def _in_full_precision(device: str) -> AbstractContextManager[Any]:
    """Flows are not accurate in bfloat16."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
