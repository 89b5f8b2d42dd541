"""Layers whose Gaussian weights are multiplied by noise from a flow; see :mod:`flowbnn.methods.variational.mnf` for the formulas."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.methods.variational.weight_noise import SampledNetwork, draw_rows, gaussian_kl, local_noise
from flowbnn.methods.variational.weight_selection import (
    input_axes,
    tied_parameters,
)
from flowbnn.noise import Recipe
from flowbnn.noise.contexts import current_row_shard
from flowbnn.numerics import full_precision, sum_rightmost
from flowbnn.transforms import Transform


class LayerSpec(NamedTuple):
    """Layer with random weights.

    Args:
        layer: Name of the layer.
        weight: Name of its weight in the network.
        bias: Name of its bias in the network, or empty if there is none to learn.
        estimator: ``"local"``, or ``"reparameterization"`` if one draw must serve several positions or calls.
    """

    layer: str
    weight: str
    bias: str
    estimator: str


def make_layer(
    model: nn.Module, spec: LayerSpec, std: float, z_std: float, recipe: Recipe
) -> "MultiplicativeLayer":
    """Returns the random weights of a layer.

    Args:
        model: Network.
        spec: Layer with random weights.
        std: Initial standard deviation of the weights.
        z_std: Initial standard deviation of the multiplicative noise.
        recipe: Recipe of the flow.
    """
    parameters = dict(model.named_parameters())
    by_filter = not isinstance(model.get_submodule(spec.layer), nn.Linear)
    bias = parameters[spec.bias] if spec.bias else None
    return MultiplicativeLayer(parameters[spec.weight], bias, by_filter, std, z_std, recipe.transforms)


def layer_specs(model: nn.Module, layers: list[str], inputs: Any) -> list[LayerSpec]:
    """Returns the weights and estimators of layers. If layers share a weight, only the first is included."""
    calls, tied = input_axes(model, inputs), tied_parameters(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    specs: list[LayerSpec] = []
    assigned: set[str] = set()
    for layer in layers:
        module = model.get_submodule(layer)
        trainable = {key: p for key, p in module._parameters.items() if p is not None and p.requires_grad}
        if "weight" not in trainable or names[id(trainable["weight"])] in assigned:
            continue
        weight = names[id(trainable["weight"])]
        bias = names[id(trainable["bias"])] if "bias" in trainable else ""
        bias = "" if bias in assigned else bias
        num_axes = 2 if isinstance(module, nn.Linear) else trainable["weight"].ndim
        all_trainable = len(trainable) == sum(p is not None for p in module._parameters.values())
        local = all_trainable and not tied.intersection({weight, bias}) and calls.get(layer) == [num_axes]
        specs.append(LayerSpec(layer, weight, bias, "local" if local else "reparameterization"))
        assigned.update({weight, bias})
    return specs


class MultiplicativeLayer(nn.Module):
    """Distribution of the weights of one layer.

    Args:
        weight: Initial mean of the weight.
        bias: Initial mean of the bias, or None.
        by_filter: If True, ``z`` has an entry for every filter. If False, it has one for every input feature.
        std: Initial standard deviation of weight and bias.
        z_std: Initial standard deviation of ``z``.
        transforms: Function from the dimension of ``z`` to the transforms of a flow.
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
        self.auxiliary_flow = nn.ModuleList(transforms(dim)).to(**like)
        self.c = nn.Parameter(0.1 * torch.randn(dim, **like))
        self.b1 = nn.Parameter(0.01 * torch.randn(dim, **like))
        self.b2 = nn.Parameter(0.01 * torch.randn(dim, **like))

    def means(self) -> list[nn.Parameter]:
        """Returns the means of weight and bias."""
        return [self.mean] if self.bias_mean is None else [self.mean, self.bias_mean]

    def z(self, normal: Tensor) -> Tensor:
        """Returns ``z`` from standard normal vectors ``[..., dim]``."""
        with full_precision(normal):
            for transform in self.flow:
                normal = transform(normal)[0]
            return torch.addcmul(self.z_mean, self.z_log_std.exp(), normal)

    def scaled_mean(self, z: Tensor) -> Tensor:
        """Returns the mean of the weight given one ``z``."""
        ones = (1,) * (self.mean.ndim - 2)
        return self.mean * (z.view(-1, 1, *ones) if self.by_filter else z.view(1, -1, *ones))

    def draw(self, normal: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draws weight and bias from a vector of :attr:`size` standard normals: first for ``z``, then for the weights."""
        count = self.mean.numel()
        z_normal, weight_normal, bias_normal = normal.split([self.dim, count, self.size - self.dim - count])
        mean, std = self.scaled_mean(self.z(z_normal)), self.log_std.exp()
        weight = torch.addcmul(mean, std, weight_normal.view_as(self.mean))
        if self.bias_mean is None or self.bias_log_std is None:
            return weight, None
        bias_std = self.bias_log_std.exp()
        return weight, torch.addcmul(self.bias_mean, bias_std, bias_normal.view_as(self.bias_mean))

    @property
    def size(self) -> int:
        """Number of normal numbers of a draw."""
        return self.dim + self.mean.numel() + (0 if self.bias_mean is None else self.bias_mean.numel())

    def kl_bound(self, normal: Tensor, prior_scale: float, noise: Tensor) -> Tensor:
        """Returns the bound on the KL, averaged over K draws.

        Args:
            normal: Standard normals of ``z``, ``[K, dim]``.
            prior_scale: Standard deviation of the prior.
            noise: Standard normals of ``c^T W``, ``[K, columns]``.
        """
        z = self.z(normal)
        mean, variance = self._columns(self.mean), self._columns((2.0 * self.log_std).exp())
        squares = z.square() @ mean.square().sum(-1) + variance.sum()
        constant = mean.numel() * (math.log(prior_scale) - 0.5)
        conditional_kl = squares / (2.0 * prior_scale**2) - self.log_std.sum() + constant
        projected = (self.c * z) @ mean + (self.c.square() @ variance).clamp_min(1e-30).sqrt() * noise
        t = torch.tanh(projected).mean(-1, keepdim=True)
        # the inverse of the flow of z returns to the normal numbers, and the log-determinants cancel
        end, log_det = _apply_transforms(self.auxiliary_flow, normal)
        log_variance = self.b2 * t
        error = (end - self.b1 * t).square() * (-log_variance).exp()
        log_ratio = 0.5 * (error + log_variance - normal.square()).sum(-1) - log_det
        total = (conditional_kl + log_ratio).mean()
        if self.bias_mean is not None and self.bias_log_std is not None:
            total = total + gaussian_kl(self.bias_mean, self.bias_log_std, prior_scale)
        return total

    def _columns(self, value: Tensor) -> Tensor:
        """Reshapes a weight to ``[dim, columns]``, with a row for each entry of ``z``."""
        return value.flatten(1) if self.by_filter else value.transpose(0, 1).flatten(1)


class MultiplicativeNetwork(SampledNetwork):
    """Network whose linear layers and convolutions have multiplicative noise, drawn in every forward pass.

    Args:
        network: Network.
        specs: Layers with random weights.
        layers: Distributions of their weights.
    """

    def __init__(
        self, network: nn.Module, specs: Sequence[LayerSpec], layers: Sequence[MultiplicativeLayer]
    ) -> None:
        super().__init__(network, [name for spec in specs for name in (spec.weight, spec.bias) if name])
        self.layers, self.specs = nn.ModuleList(layers), list(specs)
        for spec, layer in zip(specs, layers, strict=True):
            if spec.estimator == "local":
                module = network.get_submodule(spec.layer)
                before, after = self._noise_hooks(spec.layer, layer)
                self.hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self.hooks.append(module.register_forward_hook(after, prepend=True))

    def _noise_hooks(self, name: str, layer: MultiplicativeLayer) -> tuple[Any, Any]:
        """Returns the hooks that multiply the input of a layer by its noise, and that add the noise of the weights to its output."""

        def draw_z(x: Tensor) -> Tensor:
            shape = torch.Size((x.shape[0], layer.dim))
            return layer.z(draw_rows(current_row_shard(), shape, True, layer.z_mean))

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.hook_tensors is None:
                return None
            x = self.hook_tensors[name] = args[0] if args else kwargs["input"]
            return ((x if layer.by_filter else x * draw_z(x),), {})

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if self.hook_tensors is None:
                return None
            x = self.hook_tensors.pop(name)
            bias_std = None if layer.bias_log_std is None else layer.bias_log_std.exp()
            noise = local_noise(module, x, layer.log_std.exp(), bias_std, current_row_shard())
            if not layer.by_filter:
                return output + noise
            ones = (1,) * (output.ndim - 2)
            output = output * draw_z(x).view(*output.shape[:2], *ones) + noise
            return output if layer.bias_mean is None else output + layer.bias_mean.view(-1, *ones)

        return before, after

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values: dict[str, Tensor | None] = {}
        for spec, layer in self.pairs():
            bias: Tensor | None
            if spec.estimator == "local":  # the bias of a convolution is added after the multiplication
                values[spec.weight], bias = layer.mean, None if layer.by_filter else layer.bias_mean
            else:
                normal = standard_normal(torch.Size((layer.size,)), layer.mean.dtype, layer.mean.device)
                values[spec.weight], bias = layer.draw(normal)
            if spec.bias:
                values[spec.bias] = bias
        return self.forward_with(values, {}, *args, **kwargs)

    def pairs(self) -> list[tuple[LayerSpec, MultiplicativeLayer]]:
        """Returns layers and the distributions of their weights."""
        return list(zip(self.specs, self.layers, strict=True))  # type: ignore[arg-type]

    def divergence(self, prior_scale: float, samples: int) -> Divergence:
        """Returns the bound on the KL from fresh draws. The entropy is unknown and set to 0.

        Args:
            prior_scale: Standard deviation of the prior.
            samples: Number of draws.
        """
        bounds = []
        for _, layer in self.pairs():
            like, columns = layer.mean, layer.mean.numel() // layer.dim
            shape = torch.Size((samples, layer.dim + columns))
            normal, noise = standard_normal(shape, like.dtype, like.device).split([layer.dim, columns], -1)
            with full_precision(like):
                bounds.append(layer.kl_bound(normal, prior_scale, noise))
        total = torch.stack(bounds).sum()
        return Divergence(total, torch.zeros_like(total).detach())

    def draw(self, normal: Tensor) -> dict[str, Tensor]:
        """Draws the weights of all layers from a vector of :attr:`size` standard normals."""
        values: dict[str, Tensor] = {}
        pairs = self.pairs()
        normals = normal.split([layer.size for _, layer in pairs])
        for (spec, layer), layer_normal in zip(pairs, normals, strict=True):
            values[spec.weight], bias = layer.draw(layer_normal)
            if bias is not None:
                values[spec.bias] = bias
        return values

    @property
    def size(self) -> int:
        """Number of normal numbers of a draw."""
        return sum(layer.size for _, layer in self.pairs())


def _apply_transforms(transforms: Any, z: Tensor) -> tuple[Tensor, Tensor]:
    """Applies transforms in order and returns the result and the sum of their log-determinants."""
    total = z.new_zeros(z.shape[:-1])
    for transform in transforms:
        z, log_det = transform(z)
        total = total + sum_rightmost(log_det, 1 - transform.event_dim)
    return z, total
