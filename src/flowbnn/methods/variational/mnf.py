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

from dataclasses import field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.batches import dtype_of
from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.network_layers import unsupported_layer
from flowbnn.methods.preparation import prepare
from flowbnn.methods.variational.base import FLOWS, FlowName, Variational, fit_elbo
from flowbnn.methods.variational.multiplicative_layers import (
    LayerSpec,
    MultiplicativeNetwork,
    layer_specs,
    make_layer,
)
from flowbnn.methods.variational.weight_selection import (
    LayerChoice,
    describe_layer,
    initial_scales,
    is_linear_map,
    parameter_layers,
    select_weights,
)
from flowbnn.noise import FlowNoise, Recipe
from flowbnn.noise.recipes import recipe_from_dict
from flowbnn.options import Count, Positive, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import WeightPosterior, generator_of
from flowbnn.training import History
from flowbnn.training.randomness import temporary_seed


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
        model, loader, options = self.setup(network, loader, kwargs)
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
                make_layer(
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
            text = f"MNF keeps layer {layer} deterministic (not linear); BayesByBackprop supports it"
            warn(text, kind="plain", layers=unsupported)
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
            layers = [make_layer(point.model, spec, 1.0, 1.0, recipe) for spec in specs]
        weights = MultiplicativeNetwork(point.model, specs, layers)
        weights.remove_hooks()
        weights.layers.load_state_dict(state)
        weights.layers.eval()
        return cls(point.model, point.likelihood, weights, recipe, point.history)
