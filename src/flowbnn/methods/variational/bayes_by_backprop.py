r"""Bayes by Backprop (Blundell et al. 2015, https://arxiv.org/abs/1505.05424): a factorized Gaussian over weights, fitted by the ELBO.

.. math:: \max_{\mu, \sigma} \; \frac1N \sum_i E_q \log p(y_i \mid x_i, w) - \frac{\beta}{N} \mathrm{KL}[q(w) \| p(w)],
          \qquad q(w) = \prod_j \mathcal N(w_j \mid \mu_j, \sigma_j^2)

For a Gaussian posterior with precision :math:`\Lambda`, the optimum has the exact mean and the variances :math:`1 / \Lambda_{jj}`, but
no correlations.
"""

import math
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.gaussian.weights import GaussianNetwork, GaussianWeightPosterior, GaussianWeights
from flowbnn.methods.preparation import prepare
from flowbnn.methods.variational.base import Variational, fit_elbo
from flowbnn.methods.variational.weight_noise import (
    gaussian_kl,
)
from flowbnn.methods.variational.weight_selection import (
    LayerChoice,
    initial_scales,
    select_estimators,
    select_weights,
)
from flowbnn.options import Count, Positive, Probability, accepts_options_of, options


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
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> GaussianWeightPosterior:
        """Fits the posterior; see :meth:`Method.fit`. The means start at the weights of the network.

        The history has ELBO, log-likelihood and KL of every epoch.
        """
        model, loader, options = self.setup(network, loader, kwargs)
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
