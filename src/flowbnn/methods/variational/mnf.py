r"""Multiplicative normalizing flows (Louizos and Welling 2017, https://arxiv.org/abs/1703.01961).

Gaussian weights whose means are multiplied by noise from a flow.

What it can represent: more than a factorized Gaussian, which is the case of noise that never moves, up to what the flow can do; its
best ELBO is at least the factorized Gaussian's and at most the evidence. The formulas are in ``mnf_layers.py``.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.fitting import prepare
from flowbnn.methods.variational.base import FLOWS, Variational, fit_elbo
from flowbnn.methods.variational.layers import (
    LayerChoice,
    base_scales,
    chosen_weights,
    is_linear_map,
    owners,
    seen_by,
    tied,
    title,
)
from flowbnn.methods.variational.mnf_layers import MultiplicativeLayer, MultiplicativeWeights, Served
from flowbnn.noise import FlowNoise, Recipe, recipe_from_dict
from flowbnn.options import Count, Positive, options, takes
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import WeightPosterior, generator_of
from flowbnn.training import History
from flowbnn.transforms import Transform

__all__ = ["MNF", "MNFPosterior"]


@register_method
@options(repr=False)
class MNF(Variational):
    r"""Multiplicative normalizing flows on linear and convolution layers.

    In training, linear layers that see one vector per example and convolutions are drawn by local reparameterization with a ``z`` of
    its own for every example (for convolutions the positions of a feature map are taken as independent given ``z``, as in the paper);
    weights that are tied, or that meet several positions or several calls in one pass, are drawn once for each pass.

    Args:
        flow: of ``z`` and of the auxiliary: ``"coupling"`` (the paper's masked RealNVP), ``"planar"``, ``"radial"``,
            ``"sylvester"``, ``"invconv"``, ``"glow"``, ``"gaussian"`` (no flow); a recipe such as
            ``fb.noise.NormalPlanar(length=4)``, of which the transforms are taken; or a function from a length to a transform.
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

    flow: (
        Literal["coupling", "planar", "radial", "sylvester", "invconv", "glow", "gaussian"]
        | Recipe
        | Callable[[int], Transform]
    ) = "coupling"
    layers: LayerChoice = field(default=None, kw_only=True)
    z_scale: Positive = field(default=0.01, kw_only=True)
    kl_samples: Count = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.flow, Transform):
            raise FlowBNNError(
                "flow is a function of the dimension, such as lambda dim: Planar(dim), not a transform",
                argument="flow",
            )

    def recipe(self) -> Recipe:
        """The flow as a recipe, of which only the transforms matter."""
        if isinstance(self.flow, str):
            return FLOWS[self.flow]()
        return self.flow if isinstance(self.flow, Recipe) else FlowNoise(self.flow)

    @takes(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "MNFPosterior":
        """As :meth:`Method.fit`; the means start at the network's weights, fresh or trained.

        The history has ELBO, log-likelihood and the bound on the KL of every epoch.
        """
        model, run = self.setup(network, loader, given, "fitting the weights")
        candidates = self._candidates(model)
        likelihood, inputs, check = prepare(model, loader, run.likelihood, run.seed)
        served = served_layers(model, candidates, inputs)
        own = dict(model.named_parameters())
        scales = base_scales({one.weight: own[one.weight].detach() for one in served}, 1.0, 1.0)
        sizes, recipe = [float(scales[one.weight].flatten()[0]) for one in served], self.recipe()
        with torch.random.fork_rng([], enabled=run.seed is not None):
            if run.seed is not None:
                torch.default_generator.manual_seed(run.seed)
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
        fit_elbo(posterior, around, divergence, groups, self, loader, check, run)
        around.release()
        around.eval()
        posterior.settle()
        return posterior

    def _candidates(self, model: nn.Module) -> list[str]:
        """Names of layers to serve, or one line about a layer that was asked for and cannot be."""
        names, held = chosen_weights(model, self.layers), owners(model)
        layers = list(dict.fromkeys(layer for name in names for layer in held[name]))
        able = [layer for layer in layers if is_linear_map(model.get_submodule(layer))]
        weights = {name for name in names if any(layer in able for layer in held[name])}
        left = [held[name][0] for name in names if name not in weights]
        if left and (self.layers is not None or not able):
            raise FlowBNNError(
                f"MNF serves linear and convolution layers, which {title(model, left[0])} is not; BayesByBackprop serves it"
                + (", or leave it out with layers=" if able else "")
            )
        if left:
            warnings.warn(
                f"MNF leaves layer {title(model, left[0])} with plain weights: it is no linear or convolution layer; "
                "BayesByBackprop serves it",
                FlowBNNWarning,
                stacklevel=3,
            )
        return able


def _part(model: nn.Module, one: Served, std: float, z_std: float, recipe: Recipe) -> MultiplicativeLayer:
    own = dict(model.named_parameters())
    by_filter = not isinstance(model.get_submodule(one.layer), nn.Linear)
    bias = own[one.bias] if one.bias else None
    return MultiplicativeLayer(own[one.weight], bias, by_filter, std, z_std, recipe.transforms)


def served_layers(model: nn.Module, layers: list[str], inputs: Any) -> list[Served]:
    """How each layer is drawn; of layers that share a weight the first speaks for all."""
    calls, several = seen_by(model, inputs), tied(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[Served] = []
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
        found.append(Served(layer, weight, bias, "local" if local else "reparameterization"))
        taken.update({weight, bias})
    if not found:
        raise FlowBNNError(
            "MNF finds no linear or convolution layer with a weight to learn; BayesByBackprop takes any layer"
        )
    return found


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
        weights: MultiplicativeWeights,
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
            z, _ = part.z(standard_normal(shape, part.mean.dtype, part.mean.device, source))
            own[one.weight].copy_(part.scaled(z.mean(0)))
            if one.bias and part.bias_mean is not None:
                own[one.bias].copy_(part.bias_mean)

    def state(self) -> dict[str, Tensor]:
        return dict(self.distribution.parts.state_dict())

    def settings(self) -> dict[str, Any]:
        if isinstance(self.recipe, FlowNoise):
            raise FlowBNNError(
                "a flow that was given as a function is code and cannot be stored; give MNF a recipe, such as fb.noise.NormalPlanar()"
            )
        return {"flow": self.recipe.to_dict(), "layers": [list(one) for one in self.distribution.served]}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> "MNFPosterior":
        recipe = recipe_from_dict(settings["flow"])
        served = [Served(*map(str, one)) for one in settings["layers"]]
        with torch.random.fork_rng([]):  # where the parts start is of no account here
            parts = [_part(point.model, one, 1.0, 1.0, recipe) for one in served]
        weights = MultiplicativeWeights(point.model, served, parts)
        weights.release()
        weights.parts.load_state_dict(state)
        weights.parts.eval()
        return cls(point.model, point.likelihood, weights, recipe, point.history)
