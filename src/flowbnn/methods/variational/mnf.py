r"""Multiplicative normalizing flows (Louizos and Welling 2017, https://arxiv.org/abs/1703.01961).

Gaussian weights whose means are multiplied by noise from a flow:

.. math:: q(W) = \int q(W \mid z)\, q(z)\, dz, \qquad q(W \mid z) = \prod_{ij} \mathcal N(z_i \mu_{ij}, \sigma_{ij}^2),
          \qquad z \sim \text{flow}

As in the paper, :math:`z` has an entry for every input feature of a linear layer and for every filter (output channel) of a
convolution; biases are Gaussian and are not multiplied. The flow begins at standard normal numbers :math:`\epsilon` and ends with an
affine map to the neighbourhood of one. The KL to the prior is bounded with an auxiliary :math:`r(z \mid W)`:

.. math:: \mathrm{KL}[q(W) \| p(W)] \le E\left[\mathrm{KL}[q(W \mid z) \| p(W)] + \log q(z) - \log r(z \mid W)\right]

:math:`r` goes back from :math:`z` to :math:`\epsilon` by the inverse of ``z``'s own flow, then through a flow ``g`` of its own to a
Gaussian that looks at the weights, :math:`g(\epsilon) \sim \mathcal N(b_1 t, e^{b_2 t})`, :math:`t = \mathrm{mean} \tanh(c^\top W)`. So
nothing has to be inverted, and noise that never moves gives the bound of a factorized Gaussian.

What it can represent: more than a factorized Gaussian, which is the case of noise that never moves, up to what the flow can do; its
best ELBO is at least the factorized Gaussian's and at most the evidence.
"""

import math
from collections.abc import Callable, Iterable, Sequence
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
from flowbnn.methods.fitting import prepare
from flowbnn.methods.variational.base import FLOWS, FlowName, Variational, fit_elbo
from flowbnn.methods.variational.random_weights import (
    DrawnNetwork,
    LayerChoice,
    base_scales,
    chosen_weights,
    gaussian_kl,
    is_linear_map,
    local_noise,
    owners,
    rows_of,
    seen_by,
    tied,
    title,
)
from flowbnn.noise import FlowNoise, Recipe
from flowbnn.noise.passes import current_share
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

    In training, linear layers that see one vector per example and convolutions are drawn by local reparameterization with a ``z`` of
    its own for every example (for convolutions the positions of a feature map are taken as independent given ``z``, as in the paper);
    weights that are tied, or that meet several positions or several calls in one pass, are drawn once for each pass.

    The learned noise of a regression is as in :class:`~flowbnn.BayesByBackprop`.

    Args:
        flow: of ``z`` and of the auxiliary: ``"coupling"`` (the paper's masked RealNVP), ``"planar"``, ``"radial"``,
            ``"sylvester"``, ``"invconv"``, ``"glow"``, ``"gaussian"`` (no flow), or another that :class:`~flowbnn.NodeNoise` takes; or
            a recipe such as ``fb.noise.NormalPlanar(length=4)`` or ``fb.noise.FlowNoise(lambda dim: ...)``, of which the
            transforms are taken.
        layers: which layers: a name or glob, a class, or a predicate ``(name, module) -> bool``. A layer that is neither linear
            nor a convolution is then refused. Unless given, all linear and convolution layers; others keep plain weights, with
            a warning that names one, and normalisation layers do without.
        z_scale: standard deviation of ``z`` at the start, around one: nearly a factorized Gaussian, from which the flow departs.
        kl_samples: fresh draws of ``z`` for each estimate of the KL.

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
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "MNFPosterior":
        """As :meth:`Method.fit`; the means start at the network's weights, fresh or trained.

        The history has ELBO, log-likelihood and the bound on the KL of every epoch.
        """
        model, run = self.setup(network, loader, given, "fitting the weights")
        if run.precision in ("bf16-true", "16-true") or dtype_of(model) in (torch.bfloat16, torch.float16):
            raise FlowBNNError(
                "half precision is too coarse for flows; give network.float() and precision='bf16-mixed', which keeps them in float32",
                kind="unsupported",
                argument="precision",
            )
        prepared = prepare(model, loader, run)
        likelihood, inputs = prepared.likelihood, prepared.inputs
        served = self._served(model, inputs)
        own = dict(model.named_parameters())
        scales = base_scales({one.weight: own[one.weight].detach() for one in served}, 1.0, 1.0)
        sizes = [float(scales[one.weight].flatten()[0]) for one in served]
        recipe = FLOWS[self.flow]() if isinstance(self.flow, str) else self.flow
        with temporary_seed(run.seed):
            parts = [
                _part(model, one, self.base_scale * size, self.z_scale, recipe)
                for one, size in zip(served, sizes, strict=True)
            ]
        around = MultiplicativeWeights(model, served, parts)
        posterior = MNFPosterior(model, likelihood, around, recipe)
        means = [parameter for part in parts for parameter in part.means()]
        known = {id(parameter) for parameter in means}
        others = [p for p in around.parts.parameters() if id(p) not in known]
        groups = [
            {"name": "means", "params": means, "lr": self.lr},
            {"name": "noise", "params": others, "lr": self.noise_lr},
        ]
        divergence = partial(around.divergence, self.prior_scale, self.kl_samples)
        fit_elbo(posterior, around, divergence, groups, self, loader, prepared, run)
        around.release()
        around.eval()
        posterior.settle()
        return posterior

    def _served(self, model: nn.Module, inputs: Any) -> list["Served"]:
        """The layers to serve, or one line about a layer that was asked for and cannot be."""
        names, held = chosen_weights(model, self.layers), owners(model)
        layers = dict.fromkeys(layer for name in names for layer in held[name])
        able = [layer for layer in layers if is_linear_map(model.get_submodule(layer))]
        left = [held[name][0] for name in names if not any(layer in able for layer in held[name])]
        served = served_layers(model, able, inputs)
        if not served or (left and self.layers is not None):
            reason = "MNF finds no linear or convolution layer with a weight to learn; BayesByBackprop takes any layer"
            if left:
                other = ", or leave it out with layers=" if able else ""
                reason = f"MNF serves linear and convolution layers, which {title(model, left[0])} is not; "
                reason += f"BayesByBackprop serves it{other}"
            raise FlowBNNError(reason, kind="layer", argument="layers", layer=left[0] if left else None)
        if left:
            warn(
                f"MNF leaves layer {title(model, left[0])} with plain weights: it is no linear or convolution layer; "
                "BayesByBackprop serves it",
                kind="plain",
                layers=left,
            )
        return served


class Served(NamedTuple):
    """A layer, the names of its parameters (no bias where there is none to learn), and how it is drawn in training."""

    layer: str
    weight: str
    bias: str
    way: str  # "local", or "reparameterization" where one draw must serve all positions or places


def _part(model: nn.Module, one: Served, std: float, z_std: float, recipe: Recipe) -> "MultiplicativeLayer":
    own = dict(model.named_parameters())
    by_filter = not isinstance(model.get_submodule(one.layer), nn.Linear)
    bias = own[one.bias] if one.bias else None
    return MultiplicativeLayer(own[one.weight], bias, by_filter, std, z_std, recipe.transforms)


def served_layers(model: nn.Module, layers: list[str], inputs: Any) -> list[Served]:
    """How each layer is drawn; of layers that share a weight the first speaks for all."""
    calls, several = seen_by(model, inputs), tied(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    served: list[Served] = []
    taken: set[str] = set()
    for layer in layers:
        module = model.get_submodule(layer)
        own = {key: p for key, p in module._parameters.items() if p is not None and p.requires_grad}
        if "weight" not in own or names[id(own["weight"])] in taken:
            continue
        weight = names[id(own["weight"])]
        bias = names[id(own["bias"])] if "bias" in own else ""
        bias = "" if bias in taken else bias
        axes = 2 if isinstance(module, nn.Linear) else own["weight"].ndim
        whole = len(own) == sum(p is not None for p in module._parameters.values())
        alone = not several.intersection({weight, bias})
        local = whole and alone and calls.get(layer) == [axes]
        served.append(Served(layer, weight, bias, "local" if local else "reparameterization"))
        taken.update({weight, bias})
    return served


class MNFPosterior(WeightPosterior):
    """Weights multiplied by noise from a flow. They can be drawn; their density has no formula.

    The network itself holds the weights at the mean of ``z`` (over 4,096 draws).

    Args:
        model, likelihood, history: as in :class:`~flowbnn.methods.Posterior`.
        weights: the distribution.
        recipe: of the flow, for saving.
    """

    kind: ClassVar[str] = "multiplicative flows"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        weights: "MultiplicativeWeights",
        recipe: Recipe,
        history: History | None = None,
    ) -> None:
        super().__init__(model, likelihood, history)
        self.distribution, self.recipe = weights, recipe

    @property
    def names(self) -> list[str]:
        return [name for one in self.distribution.served for name in (one.weight, one.bias) if name]

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        like = next(self.distribution.parts.parameters())
        source = generator_of(seed, index, like.device)
        normal = standard_normal(torch.Size((self.distribution.size,)), like.dtype, like.device, source)
        with torch.no_grad():
            return self.distribution.draw(normal)

    @torch.no_grad()
    def settle(self) -> None:
        """Put the weights at the mean of ``z`` into the network."""
        own = dict(self.model.named_parameters())
        for one, part in self.distribution.pairs():
            source = torch.Generator(part.mean.device).manual_seed(0)
            shape = torch.Size((4096, part.dim))
            z = part.z(standard_normal(shape, part.mean.dtype, part.mean.device, source))
            own[one.weight].copy_(part.scaled(z.mean(0)))
            if one.bias and part.bias_mean is not None:
                own[one.bias].copy_(part.bias_mean)

    def state(self) -> dict[str, Tensor]:
        return dict(self.distribution.parts.state_dict())

    def settings(self) -> dict[str, Any]:
        if isinstance(self.recipe, FlowNoise):
            raise FlowBNNError(
                "a flow that was given as a function is code and cannot be stored; give MNF a recipe, such as fb.noise.NormalPlanar()",
                kind="unsupported",
            )
        return {"flow": self.recipe.to_dict(), "layers": [list(one) for one in self.distribution.served]}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> "MNFPosterior":
        recipe = recipe_from_dict(settings["flow"])
        served = [Served(*map(str, one)) for one in settings["layers"]]
        with temporary_seed(0):  # where the parts start is of no account here
            parts = [_part(point.model, one, 1.0, 1.0, recipe) for one in served]
        weights = MultiplicativeWeights(point.model, served, parts)
        weights.release()
        weights.parts.load_state_dict(state)
        weights.parts.eval()
        return cls(point.model, point.likelihood, weights, recipe, point.history)


class MultiplicativeLayer(nn.Module):
    """The weights of one layer; ``by_filter``, ``z`` has an entry for every filter, else for every input feature."""

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

    def z(self, normal: Tensor) -> Tensor:
        """``z`` from standard normal vectors ``[..., dim]``."""
        with full_precision(normal):
            for part in self.flow:
                normal = part(normal)[0]
            return torch.addcmul(self.z_mean, self.z_log_std.exp(), normal)

    def scaled(self, z: Tensor) -> Tensor:
        """The mean of the weights given one ``z``."""
        ones = (1,) * (self.mean.ndim - 2)
        return self.mean * (z.view(-1, 1, *ones) if self.by_filter else z.view(1, -1, *ones))

    def draw(self, normal: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias from one vector of :attr:`size` standard normals: ``z`` first, then the weights given it."""
        count = self.mean.numel()
        first, second, third = normal.split([self.dim, count, self.size - self.dim - count])
        weight = torch.addcmul(self.scaled(self.z(first)), self.log_std.exp(), second.view_as(self.mean))
        if self.bias_mean is None or self.bias_log_std is None:
            return weight, None
        return weight, torch.addcmul(self.bias_mean, self.bias_log_std.exp(), third.view_as(self.bias_mean))

    @property
    def size(self) -> int:
        """How many normal numbers a draw takes."""
        return self.dim + self.mean.numel() + (0 if self.bias_mean is None else self.bias_mean.numel())

    def kl_bound(self, normal: Tensor, prior_scale: float, noise: Tensor) -> Tensor:
        """The bound on the KL, averaged over K draws: ``normal`` for ``z``, ``noise`` for ``c^T W``."""
        z = self.z(normal)
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


class MultiplicativeWeights(DrawnNetwork):
    """A network whose linear and convolution layers have multiplied weights, drawn anew in every pass."""

    def __init__(
        self, network: nn.Module, served: Sequence[Served], parts: Sequence[MultiplicativeLayer]
    ) -> None:
        super().__init__(network, [name for one in served for name in (one.weight, one.bias) if name])
        self.parts, self.served = nn.ModuleList(parts), list(served)
        for one, part in zip(served, parts, strict=True):
            if one.way == "local":
                module = network.get_submodule(one.layer)
                before, after = self._hooks(one.layer, part)
                self.hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self.hooks.append(module.register_forward_hook(after, prepend=True))

    def _hooks(self, name: str, part: MultiplicativeLayer) -> tuple[Any, Any]:
        def draw_z(x: Tensor) -> Tensor:
            shape = torch.Size((x.shape[0], part.dim))
            return part.z(rows_of(current_share(), shape, True, part.z_mean))

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.shared is None:
                return None
            x = self.shared[name] = args[0] if args else kwargs["input"]
            return ((x if part.by_filter else x * draw_z(x),), {})

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if self.shared is None:
                return None
            x = self.shared.pop(name)
            bias_std = None if part.bias_log_std is None else part.bias_log_std.exp()
            noise = local_noise(module, x, part.log_std.exp(), bias_std, current_share())
            if not part.by_filter:
                return output + noise
            ones = (1,) * (output.ndim - 2)
            moved = output * draw_z(x).view(*output.shape[:2], *ones) + noise
            return moved if part.bias_mean is None else moved + part.bias_mean.view(-1, *ones)

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
        return self.run(values, {}, *args, **kwargs)

    def pairs(self) -> list[tuple[Served, MultiplicativeLayer]]:
        """Layers and their weights."""
        return list(zip(self.served, self.parts, strict=True))  # type: ignore[arg-type]

    def divergence(self, prior_scale: float, samples: int) -> Divergence:
        """The bound on the KL, on fresh draws; the entropy of such weights is not known, so it is left at 0."""
        bounds = []
        for _, part in self.pairs():
            like, columns = part.mean, part.mean.numel() // part.dim
            shape = torch.Size((samples, part.dim + columns))
            normal, noise = standard_normal(shape, like.dtype, like.device).split([part.dim, columns], -1)
            with full_precision(like):
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


def _through(parts: Any, z: Tensor) -> tuple[Tensor, Tensor]:
    total = z.new_zeros(z.shape[:-1])
    for part in parts:
        z, log_det = part(z)
        total = total + sum_rightmost(log_det, 1 - part.event_dim)
    return z, total
