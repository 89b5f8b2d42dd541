r"""Multiplicative normalizing flows (Louizos and Welling 2017, https://arxiv.org/abs/1703.01961).

The means of Gaussian weights are multiplied by noise from a flow:

.. math:: q(W) = \int q(W \mid z)\, q(z)\, dz, \qquad q(W \mid z) = \prod_{ij} \mathcal N(z_i \mu_{ij}, \sigma_{ij}^2),
          \qquad z \sim \text{flow}

As in the paper, :math:`z` has an entry for every input feature of a linear layer and for every filter (output channel) of a
convolution. Biases are Gaussian and are not multiplied. The flow maps standard normal numbers :math:`\epsilon` to numbers near one. The
KL to the prior is bounded with an auxiliary distribution :math:`r(z \mid W)`:

.. math:: \mathrm{KL}[q(W) \| p(W)] \le E\left[\mathrm{KL}[q(W \mid z) \| p(W)] + \log q(z) - \log r(z \mid W)\right]

:math:`r` maps :math:`z` to :math:`\epsilon` by the inverse of the flow of :math:`z`, then by an auxiliary flow ``g`` to a Gaussian that
depends on the weights, :math:`g(\epsilon) \sim \mathcal N(b_1 t, e^{b_2 t})`, :math:`t = \mathrm{mean} \tanh(c^\top W)`. No flow has to
be inverted, because the draws start at :math:`\epsilon`.

With constant noise this is a factorized Gaussian with its exact KL. The best ELBO is therefore at least the ELBO of a factorized
Gaussian, and at most the evidence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import dtype_of
from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.network_layers import unsupported_layer
from flowbnn.methods.preparation import prepare
from flowbnn.methods.variational.base import FLOWS, FlowName, Variational, fit_elbo
from flowbnn.methods.variational.weight_noise import SampledNetwork, draw_rows, gaussian_kl, local_noise
from flowbnn.methods.variational.weight_selection import (
    LayerChoice,
    describe_layer,
    initial_scales,
    input_axes,
    is_linear_map,
    parameter_layers,
    select_weights,
    tied_parameters,
)
from flowbnn.noise import FlowNoise, Recipe
from flowbnn.noise.contexts import current_row_shard
from flowbnn.noise.recipes import recipe_from_dict
from flowbnn.numerics import full_precision, sum_rightmost
from flowbnn.options import Count, Positive, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import WeightPosterior, generator_of
from flowbnn.training import History
from flowbnn.training.randomness import temporary_seed
from flowbnn.transforms import Transform


@register_method
@options(repr=False)
class MNF(Variational):
    r"""Multiplicative normalizing flows on linear and convolution layers.

    In training, convolutions and linear layers with one vector per example use local reparameterization with a separate ``z`` for every
    example. For convolutions the positions of a feature map are treated as independent given ``z``, as in the paper. Weights that are
    tied, or that are used at several positions or in several calls, are drawn once per forward pass.

    The noise of a regression is learned as in :class:`~flowbnn.BayesByBackprop`.

    Args:
        flow: Flow of ``z`` and of the auxiliary distribution. Names are ``"coupling"`` (the masked RealNVP of the paper),
            ``"planar"``, ``"radial"``, ``"sylvester"``, ``"invconv"``, ``"glow"``, ``"gaussian"`` (no flow), and the other flows of
            :class:`~flowbnn.NodeNoise`. A recipe such as ``fb.noise.NormalPlanar(length=4)`` or
            ``fb.noise.FlowNoise(lambda dim: ...)`` provides its transforms.
        layers: Layers with random weights: a name or glob, a class, or a predicate ``(name, module) -> bool``, which must select only
            linear layers and convolutions. None selects all of these. All other layers then have deterministic weights, and a warning
            is raised unless they are normalization layers.
        z_scale: Initial standard deviation of ``z``, whose initial mean is one; a small value starts near a factorized Gaussian.
        kl_samples: Number of fresh draws of ``z`` per estimate of the KL.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = MNF("planar", epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.draws(4, seed=0)["weight"].shape
    torch.Size([4, 3, 2])
    """

    flow: FlowName | Recipe = "coupling"
    layers: LayerChoice = field(default=None, kw_only=True)
    z_scale: Positive = field(default=0.01, kw_only=True)
    kl_samples: Count = field(default=4, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> "MNFPosterior":
        """Fits the posterior; see :meth:`Method.fit`. The means start at the weights of the network.

        The history has ELBO, log-likelihood and the bound on the KL of every epoch.
        """
        model, loader, options = self.setup(network, loader, kwargs, "fitting the weights")
        half_precision = dtype_of(model) in (torch.bfloat16, torch.float16)
        if half_precision or options.precision in ("bf16-true", "16-true"):
            text = "MNF needs float32 or float64; use network.float() and precision='bf16-mixed'"
            raise FlowBNNError(text, kind="unsupported", argument="precision")
        prepared = prepare(model, loader, options)
        likelihood, inputs = prepared.likelihood, prepared.inputs
        specs = self._select_layers(model, inputs)
        parameters = dict(model.named_parameters())
        scales = initial_scales({spec.weight: parameters[spec.weight].detach() for spec in specs}, 1.0, 1.0)
        recipe = FLOWS[self.flow]() if isinstance(self.flow, str) else self.flow
        with temporary_seed(options.seed):
            layers = [
                _make_layer(
                    model,
                    spec,
                    self.base_scale * float(scales[spec.weight].flatten()[0]),
                    self.z_scale,
                    recipe,
                )
                for spec in specs
            ]
        module = MultiplicativeNetwork(model, specs, layers)
        posterior = MNFPosterior(model, likelihood, module, recipe)
        means = [parameter for layer in layers for parameter in layer.means()]
        mean_ids = {id(parameter) for parameter in means}
        other_parameters = [p for p in module.layers.parameters() if id(p) not in mean_ids]
        groups = [
            {"name": "means", "params": means, "lr": self.lr},
            {"name": "noise", "params": other_parameters, "lr": self.noise_lr},
        ]
        divergence = partial(module.divergence, self.prior_scale, self.kl_samples)
        fit_elbo(posterior, module, divergence, groups, self, loader, prepared, options)
        module.remove_hooks()
        module.eval()
        posterior.set_mean_weights()
        return posterior

    def _select_layers(self, model: nn.Module, inputs: Any) -> list["LayerSpec"]:
        """Returns the layers with random weights; raises or warns about unsupported layers."""
        names, layers_of = select_weights(model, self.layers), parameter_layers(model)
        selected = dict.fromkeys(layer for name in names for layer in layers_of[name])
        supported = [layer for layer in selected if is_linear_map(model.get_submodule(layer))]
        unsupported = [
            layers_of[name][0] for name in names if not set(supported).intersection(layers_of[name])
        ]
        specs = layer_specs(model, supported, inputs)
        if not specs or (unsupported and self.layers is not None):
            reason = "not linear" if unsupported else "frozen weight"
            raise unsupported_layer(model, (unsupported or supported)[0], "MNF", "BayesByBackprop", reason)
        if unsupported:
            layer = describe_layer(model, unsupported[0])
            text = f"MNF keeps layer {layer} deterministic, because it is not linear; BayesByBackprop supports it"
            warn(text, kind="plain", layers=unsupported)
        return specs


class LayerSpec(NamedTuple):
    """Layer with random weights."""

    layer: str  # name of the layer
    weight: str  # name of its weight in the network
    bias: str  # name of its bias, empty if there is none to learn
    estimator: str  # "local", or "reparameterization" if one draw must serve several positions or calls


def _make_layer(
    model: nn.Module, spec: LayerSpec, std: float, z_std: float, recipe: Recipe
) -> "MultiplicativeLayer":
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


class MNFPosterior(WeightPosterior):
    """Posterior of weights multiplied by noise from a flow. It has no closed-form density.

    The network holds the weights at the mean of ``z``, estimated from 4,096 draws.

    Args:
        model: Network.
        likelihood: Observation model of the targets.
        weights: Network with the distribution of the weights.
        recipe: Recipe of the flow, for saving.
        history: Training record.

    >>> import flowbnn as fb
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = fb.MNF("planar", epochs=1).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.names, posterior.predict(torch.zeros(1, 2), 4, seed=0).probabilities.shape
    (['weight', 'bias'], torch.Size([1, 3]))
    """

    kind: ClassVar[str] = "multiplicative flows"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        weights: "MultiplicativeNetwork",
        recipe: Recipe,
        history: History | None = None,
    ) -> None:
        super().__init__(model, likelihood, history)
        self.distribution, self.recipe = weights, recipe

    @property
    def names(self) -> list[str]:
        return [name for spec in self.distribution.specs for name in (spec.weight, spec.bias) if name]

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        like = next(self.distribution.layers.parameters())
        generator = generator_of(seed, index, like.device)
        normal = standard_normal(torch.Size((self.distribution.size,)), like.dtype, like.device, generator)
        with torch.no_grad():
            return self.distribution.draw(normal)

    @torch.no_grad()
    def set_mean_weights(self) -> None:
        """Copies the weights at the mean of ``z`` into the network."""
        parameters = dict(self.model.named_parameters())
        for spec, layer in self.distribution.pairs():
            generator = torch.Generator(layer.mean.device).manual_seed(0)
            shape = torch.Size((4096, layer.dim))
            z = layer.z(standard_normal(shape, layer.mean.dtype, layer.mean.device, generator))
            parameters[spec.weight].copy_(layer.scaled_mean(z.mean(0)))
            if spec.bias and layer.bias_mean is not None:
                parameters[spec.bias].copy_(layer.bias_mean)

    def state(self) -> dict[str, Tensor]:
        return dict(self.distribution.layers.state_dict())

    def settings(self) -> dict[str, Any]:
        if isinstance(self.recipe, FlowNoise):
            raise FlowBNNError(
                f"{type(self.recipe).__name__} cannot be saved; use a recipe, such as fb.noise.NormalPlanar()",
                kind="unsupported",
            )
        return {"flow": self.recipe.to_dict(), "layers": [list(spec) for spec in self.distribution.specs]}

    @classmethod
    def from_state(
        cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "MNFPosterior":
        recipe = recipe_from_dict(settings["flow"])
        specs = [LayerSpec(*map(str, values)) for values in settings["layers"]]
        with temporary_seed(0):  # the initial values are replaced
            layers = [_make_layer(point.model, spec, 1.0, 1.0, recipe) for spec in specs]
        weights = MultiplicativeNetwork(point.model, specs, layers)
        weights.remove_hooks()
        weights.layers.load_state_dict(state)
        weights.layers.eval()
        return cls(point.model, point.likelihood, weights, recipe, point.history)


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
