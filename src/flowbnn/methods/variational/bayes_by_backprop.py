r"""Bayes by Backprop (Blundell et al. 2015, https://arxiv.org/abs/1505.05424): a factorized Gaussian over weights, fitted by the ELBO.

.. math:: \max_{\mu, \sigma} \; \frac1N \sum_i E_q \log p(y_i \mid x_i, w) - \frac{\beta}{N} \mathrm{KL}[q(w) \| p(w)],
          \qquad q(w) = \prod_j \mathcal N(w_j \mid \mu_j, \sigma_j^2)

For a Gaussian posterior with precision :math:`\Lambda`, the optimum has the exact mean and the variances :math:`1 / \Lambda_{jj}`, but
no correlations.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.preparation import prepare
from flowbnn.methods.variational.base import Variational, fit_elbo
from flowbnn.methods.variational.weight_noise import (
    SampledNetwork,
    flipout_noise,
    gaussian_kl,
    local_noise,
)
from flowbnn.methods.variational.weight_selection import (
    Estimator,
    LayerChoice,
    initial_scales,
    select_estimators,
    select_weights,
)
from flowbnn.noise.contexts import current_row_shard
from flowbnn.options import Count, Positive, Probability, accepts_options_of, options
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.files import select_prefix
from flowbnn.posterior.weights import WeightPosterior, generator_of, named_parts
from flowbnn.training import History


@register_method
@options(repr=False)
class BayesByBackprop(Variational):
    r"""Independent Gaussians over the weights (mean-field) of any network.

    Standard deviations are learned as logarithms. Parameters of normalization layers stay deterministic unless ``layers`` selects them,
    and so do frozen parameters (``requires_grad=False``). Tied weights share one posterior, whose KL counts once.

    The noise of a regression is fitted to the residuals of the mean prediction. This takes a second forward pass per batch, without
    gradients. At the end of training the noise maximizes the predictive likelihood.

    Args:
        prior: Prior of the weights. ``"gaussian"`` is :math:`\mathcal N(0, \sigma^2)` with ``prior_scale``, whose KL has a closed form.
            ``"scale-mixture"`` is :math:`\pi \mathcal N(0, \sigma_1^2) + (1 - \pi) \mathcal N(0, \sigma_2^2)`, whose KL is estimated
            from fresh draws. ``"log-uniform"`` is :math:`p(w) \propto 1 / |w|`, the improper prior of variational dropout; see
            :func:`log_uniform_kl`.
        pi: Weight :math:`\pi` of the first component of the mixture.
        sigma1: Standard deviation :math:`\sigma_1` of the first component.
        sigma2: Standard deviation :math:`\sigma_2` of the second component.
        estimator: Gradient estimator of the training. ``"reparameterization"`` draws all weights once per batch; it supports every
            layer at almost no cost. ``"local"`` adds noise to the outputs of every example, and ``"flipout"`` flips the signs of one
            draw for every example. Both support linear layers and convolutions. They double the cost, and their gradients
            have a lower variance. ``"auto"`` uses ``"local"`` for linear layers with one vector per example, for which it is exact and
            cheap, and reparameterization for all other layers. Tied weights always use reparameterization.
        layers: Layers with random weights: a name or glob (``"fc*"``; a name includes the layers inside it), a class, or a predicate
            ``(name, module) -> bool``. None for all but normalization layers.
        kl_samples: Number of fresh draws per estimate of the KL to a mixture.

    >>> import torch
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = BayesByBackprop(epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.std["weight"].shape
    torch.Size([3, 2])
    """

    prior: Literal["gaussian", "scale-mixture", "log-uniform"] = "gaussian"
    estimator: Literal["auto", "reparameterization", "local", "flipout"] = field(default="auto", kw_only=True)
    layers: LayerChoice = field(default=None, kw_only=True)
    pi: Probability = field(default=0.5, kw_only=True)
    sigma1: Positive = field(default=1.0, kw_only=True)
    sigma2: Positive = field(default=0.0025, kw_only=True)
    kl_samples: Count = field(default=1, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> "GaussianWeightPosterior":
        """Fits the posterior; see :meth:`Method.fit`. The means start at the weights of the network.

        The history has ELBO, log-likelihood and KL of every epoch.
        """
        model, loader, options = self.setup(network, loader, kwargs, "fitting the weights")
        names = select_weights(model, self.layers)
        prepared = prepare(model, loader, options)
        likelihood, inputs = prepared.likelihood, prepared.inputs
        estimators = select_estimators(model, names, self.estimator, inputs)
        mean = {name: parameter.detach() for name, parameter in model.named_parameters() if name in names}
        std = initial_scales(mean, self.base_scale, self.prior_scale)
        weights = GaussianWeights(mean, std, estimators.parameters)
        module = GaussianNetwork(model, weights, estimators.layers)
        posterior = GaussianWeightPosterior(model, likelihood, std)
        posterior.training_weights = weights
        groups = [
            {"name": "means", "params": [weights.mean], "lr": self.lr},
            {"name": "deviations", "params": [weights.log_std], "lr": self.noise_lr},
        ]

        def divergence() -> Divergence:
            return Divergence(self._kl(weights.mean, weights.log_std), weights.entropy())

        fit_elbo(posterior, module, divergence, groups, self, loader, prepared, options)
        module.remove_hooks()
        posterior.update_from_training()
        posterior.training_weights = None
        with torch.no_grad():
            for name, value in posterior.mean.items():
                model.get_parameter(name).copy_(value)
        return posterior

    def _kl(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """Returns the KL divergence from the prior."""
        if self.prior == "gaussian":
            return gaussian_kl(mean, log_std, self.prior_scale)
        if self.prior == "log-uniform":
            return log_uniform_kl(mean, log_std)
        normal = standard_normal(torch.Size((self.kl_samples, mean.numel())), mean.dtype, mean.device)
        return mixture_kl(mean, log_std, normal, self.pi, self.sigma1, self.sigma2)


class GaussianWeightPosterior(WeightPosterior):
    """Independent Gaussians over the weights of a network.

    The network holds the means. :meth:`sample` returns a copy with sampled weights.

    Args:
        model: Network with the weights at their means.
        likelihood: Observation model of the targets.
        std: Standard deviations by parameter name; all other parameters are deterministic.
        history: Training record.

    >>> import flowbnn as fb
    >>> layer = nn.Linear(2, 1)
    >>> posterior = GaussianWeightPosterior(layer, fb.likelihoods.Gaussian(noise=0.1), {"weight": torch.full((1, 2), 0.5)})
    >>> posterior.draws(3, seed=0)["weight"].shape, posterior.names
    (torch.Size([3, 1, 2]), ['weight'])
    """

    kind: ClassVar[str] = "gaussian weights"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        std: Mapping[str, Tensor],
        history: History | None = None,
    ) -> None:
        super().__init__(model, likelihood, history)
        parameters = dict(model.named_parameters())
        if not std:
            raise FlowBNNError("std is empty", argument="std")
        for name, value in std.items():
            kind = problem = ""
            if name not in parameters:
                kind, problem = "name", f"is no parameter{nearest(name, parameters)}"
            elif value.shape != (shape := parameters[name].shape):
                kind, problem = "shape", f"must have shape {tuple(shape)}, got {tuple(value.shape)}"
            elif not bool((value >= 0).all()):
                kind, problem = "value", f"must be non-negative, got {float(value.min()):.3g}"
            if problem:
                raise FlowBNNError(f"std['{name}'] {problem}", kind=kind, argument="std")
        # the order of the network, because draws depend on the order and files do not store it
        self.shapes = {name: parameters[name].shape for name in parameters if name in std}
        self.flat_mean, self.flat_std = self.flatten(parameters), self.flatten(std)
        self.training_weights: GaussianWeights | None = None  # set during training

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    @property
    def mean(self) -> dict[str, Tensor]:
        """Means by parameter name."""
        return named_parts(self.flat_mean, self.shapes)

    @property
    def std(self) -> dict[str, Tensor]:
        """Standard deviations by parameter name."""
        return named_parts(self.flat_std, self.shapes)

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Concatenates parameters into one vector."""
        return torch.cat([values[name].detach().flatten() for name in self.shapes])

    def update_from_training(self) -> None:
        """Copies the current means and standard deviations during training."""
        weights = self.training_weights
        if weights is not None:
            self.flat_mean = self.flatten(named_parts(weights.mean, weights.shapes))
            self.flat_std = self.flatten(named_parts(weights.log_std.exp(), weights.shapes))

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        prediction.state.get("training weights", self.update_from_training)
        return super().outputs(inputs, samples, prediction)

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        mean = self.flat_mean
        normal = standard_normal(mean.shape, mean.dtype, mean.device, generator_of(seed, index, mean.device))
        return named_parts(torch.addcmul(mean, self.flat_std, normal), self.shapes)

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        flat = torch.cat([values[name].flatten() for name in self.shapes]).to(self.flat_mean)
        error = (flat - self.flat_mean) / self.flat_std
        constant = 0.5 * len(flat) * math.log(2.0 * math.pi)
        return -0.5 * error.square().sum() - self.flat_std.log().sum() - constant

    def state(self) -> dict[str, Tensor]:
        return {f"std.{name}": value.contiguous() for name, value in self.std.items()}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        return cls(point.model, point.likelihood, select_prefix(state, "std"), point.history)


class GaussianWeights(nn.Module):
    r"""Means and log standard deviations of all random weights, concatenated into two vectors.

    Drawing and the KL of all layers then take few operations on long vectors.

    Args:
        mean: Means by parameter name.
        std: Standard deviations by parameter name.
        estimators: Estimators by parameter name; plain reparameterization for all others.
    """

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        std: Mapping[str, Tensor],
        estimators: Mapping[str, Estimator] | None = None,
    ) -> None:
        super().__init__()
        estimators = {name: (estimators or {}).get(name, "reparameterization") for name in mean}
        order: list[str] = []
        for estimator in ("reparameterization", "flipout", "local"):
            order += [name for name in mean if estimators[name] == estimator]
        sizes = {name: value.numel() for name, value in mean.items()}
        self.shapes = {name: mean[name].shape for name in order}
        # the first weights are drawn; weights with flipout or local reparameterization stay at their means
        self.num_drawn = sum(sizes[name] for name in mean if estimators[name] == "reparameterization")
        self.num_normals = self.num_drawn + sum(sizes[name] for name in mean if estimators[name] == "flipout")
        self.mean = nn.Parameter(torch.cat([mean[name].detach().flatten() for name in order]))
        self.log_std = nn.Parameter(torch.cat([std[name].detach().flatten() for name in order]).log())

    def forward(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draws the weights of a forward pass.

        Returns:
            The weights of the network, which are draws, or means if noise is added to the outputs. Then the tensors for this noise,
            which are deviations from the mean for Flipout and standard deviations for local reparameterization.
        """
        scale, mean = self.log_std.exp(), self.mean
        if self.num_normals:
            normal = standard_normal(torch.Size((self.num_normals,)), mean.dtype, mean.device)
            if self.num_normals < len(mean):
                normal = torch.cat([normal, torch.ones_like(mean[self.num_normals :])])
            scale = scale * normal
        if self.num_drawn == len(mean):
            return named_parts(mean + scale, self.shapes), {}
        count = self.num_drawn
        values = torch.cat([mean[:count] + scale[:count], mean[count:]])
        return named_parts(values, self.shapes), named_parts(scale, self.shapes)

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """Returns the entropy of all weights."""
        return self.log_std.sum() + 0.5 * self.mean.numel() * (1.0 + math.log(2.0 * math.pi))


class GaussianNetwork(SampledNetwork):
    """Network with Gaussian weights, drawn in every forward pass.

    Args:
        network: Network.
        weights: Distribution of the weights.
        estimators: Estimators of the layers with noise on their outputs, ``"local"`` or ``"flipout"``.
    """

    def __init__(self, network: nn.Module, weights: GaussianWeights, estimators: Mapping[str, str]) -> None:
        super().__init__(network, weights.shapes)
        self.weights = weights
        names = {id(p): name for name, p in network.named_parameters()}
        for layer, estimator in estimators.items():
            module = network.get_submodule(layer)
            parameters = {key: names[id(p)] for key, p in module._parameters.items() if p is not None}
            noise = flipout_noise if estimator == "flipout" else local_noise
            hook = self._noise_hook(parameters["weight"], parameters.get("bias", ""), noise)
            self.hooks.append(module.register_forward_hook(hook, with_kwargs=True, prepend=True))

    def _noise_hook(self, weight: str, bias: str, noise: Any) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            tensors = self.hook_tensors
            if tensors is None:
                return None
            x = args[0] if args else kwargs["input"]
            added = noise(module, x, tensors[weight], tensors.get(bias), current_row_shard())
            return output + added.to(output.dtype)

        return hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values, hook_tensors = self.weights()
        return self.forward_with(values, hook_tensors, *args, **kwargs)


def log_uniform_kl(mean: Tensor, log_std: Tensor) -> Tensor:
    r"""Returns the KL divergence from :math:`p(w) \propto 1 / |w|`, up to the constant of this improper prior.

    It depends only on :math:`\alpha = \sigma^2 / \mu^2`, is :math:`-\tfrac12 \log\alpha + E \log|1 + \sqrt\alpha \epsilon| + c`, and is
    zero in the limit of pure noise. The approximation of Molchanov et al. 2017 (https://arxiv.org/abs/1701.05369) is accurate to 0.01
    nats.

    >>> log_uniform_kl(torch.tensor([0.0, 1e-4]), torch.zeros(2)).abs() < 1e-3
    tensor(True)
    """
    log_alpha = 2.0 * (log_std - mean.abs().clamp_min(1e-8).log())
    correction = 0.63576 * torch.sigmoid(-1.87320 - 1.48695 * log_alpha)
    return (correction + 0.5 * nn.functional.softplus(-log_alpha)).sum()


def mixture_kl(
    mean: Tensor, log_std: Tensor, normal: Tensor, pi: float, sigma1: float, sigma2: float
) -> Tensor:
    r"""Estimates the KL divergence from :math:`\pi \mathcal N(0, \sigma_1^2) + (1 - \pi) \mathcal N(0, \sigma_2^2)`.

    :math:`E_q \log q` has a closed form. :math:`E_q \log p` is estimated at the draws :math:`\mu + \sigma \epsilon`.

    Args:
        mean: Means :math:`\mu`, ``[n]``.
        log_std: Log standard deviations, ``[n]``.
        normal: Standard normal numbers :math:`\epsilon`, ``[K, n]``; the estimate averages over the first axis.
        pi: Weight :math:`\pi` of the first component.
        sigma1: Standard deviation :math:`\sigma_1` of the first component.
        sigma2: Standard deviation :math:`\sigma_2` of the second component.

    >>> kl = mixture_kl(torch.zeros(3), torch.zeros(3), torch.ones(1, 3), 0.5, 1.0, 1.0)  # equal Gaussians
    >>> round(kl.item(), 6)
    0.0
    """
    return _MixtureKL.apply(mean, log_std, normal, pi, sigma1, sigma2)


class _MixtureKL(torch.autograd.Function):
    """Implementation of :func:`mixture_kl` as one autograd node, which stores only the responsibility of the second component."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_std: Tensor, normal: Tensor, pi: float, sigma1: float, sigma2: float
    ) -> Tensor:
        std = log_std.exp()
        draws = torch.addcmul(mean, std, normal)
        square = draws * draws
        first = square.mul(-0.5 * sigma1**-2).add_(math.log(pi) - math.log(sigma1))
        second = square.mul_(-0.5 * sigma2**-2).add_(math.log1p(-pi) - math.log(sigma2))
        responsibility = torch.sigmoid(second - first)
        larger = torch.maximum(responsibility, 1.0 - responsibility)
        log_prior = torch.maximum(first, second).sum() - larger.log().sum()
        ctx.save_for_backward(std, draws, normal, responsibility)
        ctx.precisions = (sigma1**-2, sigma2**-2)
        return -0.5 * mean.numel() - log_prior / normal.shape[0] - log_std.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        std, draws, normal, responsibility = ctx.saved_tensors
        first, second = ctx.precisions
        draw_gradient = responsibility.mul(second - first).add_(first).mul_(draws).mul_(gradient / len(draws))
        log_std_gradient = (draw_gradient * normal).sum(0).mul_(std).sub_(gradient)
        return draw_gradient.sum(0), log_std_gradient, None, None, None, None
