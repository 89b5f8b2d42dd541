r"""Bayes by Backprop (Blundell et al. 2015, https://arxiv.org/abs/1505.05424): a factorized Gaussian over weights, by the ELBO.

.. math:: \max_{\mu, \sigma} \; \frac1N \sum_i E_q \log p(y_i \mid x_i, w) - \frac{\beta}{N} \mathrm{KL}[q(w) \| p(w)],
          \qquad q(w) = \prod_j \mathcal N(w_j \mid \mu_j, \sigma_j^2)

What it can represent: of a Gaussian posterior with precision :math:`\Lambda` it finds the mean exactly and the variances
:math:`1 / \Lambda_{jj}`, no correlations.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.fitting import prepare
from flowbnn.methods.variational.base import Variational, fit_elbo
from flowbnn.methods.variational.random_weights import (
    DrawnNetwork,
    LayerChoice,
    Way,
    base_scales,
    chosen_weights,
    flipout_noise,
    gaussian_kl,
    local_noise,
    ways_of,
)
from flowbnn.noise.passes import current_share
from flowbnn.options import Count, Positive, Probability, accepts_options_of, options
from flowbnn.posterior.base import Posterior, Prediction, part_of
from flowbnn.posterior.weights import WeightPosterior, generator_of, named_parts
from flowbnn.training import History


@register_method
@options(repr=False)
class BayesByBackprop(Variational):
    r"""A Gaussian of its own for every weight (mean-field), on any network: nothing has to be rewritten.

    The standard deviations are learned as their logarithms. Parameters of normalisation layers (BatchNorm and its kin) stay points
    unless ``layers`` names them; so does whatever is frozen (``requires_grad=False``). Tied weights have one posterior, counted once.

    The learned noise of a regression follows the residuals of the mean prediction, which costs a second draw of each batch without
    gradients, and is at the end the one of the largest predictive likelihood: the spread of the draws is not counted twice.

    Args:
        prior: ``"gaussian"``, :math:`\mathcal N(0, \sigma^2)` with ``prior_scale``, whose KL has a closed form; or
            ``"scale-mixture"``, :math:`\pi \mathcal N(0, \sigma_1^2) + (1 - \pi) \mathcal N(0, \sigma_2^2)`, whose KL is estimated on
            fresh draws; or ``"log-uniform"``, :math:`p(w) \propto 1 / |w|`, the improper prior of variational dropout, whose KL is
            that of :func:`log_uniform_kl`.
        pi, sigma1, sigma2: of the mixture.
        estimator: how weights are drawn in training. ``"reparameterization"``: one draw of all weights for each batch, which serves
            every layer and costs next to nothing. ``"local"``: noise on the outputs of every example instead, and ``"flipout"``: one
            draw whose signs are flipped for every example; both serve linear layers and convolutions, double their work, and give
            gradients of lower variance. ``"auto"`` takes ``"local"`` for linear layers that see one vector per example, where it is
            exact and cheap, and plain reparameterization for all others: for convolutions ``"local"`` takes the positions of a
            feature map as independent, and both others cost a second convolution. Tied weights are always drawn plainly.
        layers: which layers are Bayesian: a name or glob (``"fc*"``; a name covers what is inside), a class, or a predicate
            ``(name, module) -> bool``. All but normalisation layers unless given.
        kl_samples: fresh draws for each estimate of the KL to a mixture.

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
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "GaussianWeightPosterior":
        """As :meth:`Method.fit`; the means start at the network's weights, fresh or trained.

        The history has ELBO, log-likelihood and KL of every epoch.
        """
        model, run = self.setup(network, loader, given, "fitting the weights")
        names = chosen_weights(model, self.layers)
        prepared = prepare(model, loader, run)
        likelihood, inputs = prepared.likelihood, prepared.inputs
        ways = ways_of(model, names, self.estimator, inputs)
        mean = {name: parameter.detach() for name, parameter in model.named_parameters() if name in names}
        std = base_scales(mean, self.base_scale, self.prior_scale)
        weights = GaussianWeights(mean, std, ways.parameters)
        around = DrawnWeights(model, weights, ways.layers)
        posterior = GaussianWeightPosterior(model, likelihood, std)
        posterior.live = weights
        groups = [
            {"name": "means", "params": [weights.mean], "lr": self.lr},
            {"name": "deviations", "params": [weights.log_std], "lr": self.noise_lr},
        ]

        def divergence() -> Divergence:
            return Divergence(self._kl(weights.mean, weights.log_std), weights.entropy())

        fit_elbo(posterior, around, divergence, groups, self, loader, prepared, run)
        around.release()
        posterior.follow()
        posterior.live = None
        with torch.no_grad():
            for name, value in posterior.mean.items():
                model.get_parameter(name).copy_(value)
        return posterior

    def _kl(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """To the prior."""
        if self.prior == "gaussian":
            return gaussian_kl(mean, log_std, self.prior_scale)
        if self.prior == "log-uniform":
            return log_uniform_kl(mean, log_std)
        normal = standard_normal(torch.Size((self.kl_samples, mean.numel())), mean.dtype, mean.device)
        return mixture_kl(mean, log_std, normal, self.pi, self.sigma1, self.sigma2)


class GaussianWeightPosterior(WeightPosterior):
    """Independent Gaussian weights around those of a network.

    The network itself holds the means, so that it is the mean network; :meth:`sample` gives a copy with weights drawn around them.

    Args:
        model, likelihood, history: as in :class:`~flowbnn.methods.Posterior`.
        std: standard deviations, by the names of the parameters that have one; the others are points.

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
        own = dict(model.named_parameters())
        reason = None if std else "a Gaussian over weights needs standard deviations of at least 0"
        for name, value in std.items():
            if name not in own or value.shape != own[name].shape:
                reason = f"the network has no weight '{name}' of shape {tuple(value.shape)}"
            elif not bool((value >= 0).all()):
                reason = f"the standard deviations of '{name}' must be at least 0"
        if reason is not None:
            raise FlowBNNError(reason, argument="std")
        # in the network's order: draws depend on it, and a file does not keep another
        self.shapes = {name: own[name].shape for name in own if name in std}
        self.flat_mean, self.flat_std = self.join(own), self.join(std)
        self.live: GaussianWeights | None = None  # means and standard deviations while training goes on

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    @property
    def mean(self) -> dict[str, Tensor]:
        """The means, by the names of the parameters."""
        return named_parts(self.flat_mean, self.shapes)

    @property
    def std(self) -> dict[str, Tensor]:
        """The standard deviations."""
        return named_parts(self.flat_std, self.shapes)

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        """One vector of all parameters."""
        return torch.cat([values[name].detach().flatten() for name in self.shapes])

    def follow(self) -> None:
        """Take over means and standard deviations from the training that goes on."""
        if self.live is not None:
            self.flat_mean = self.join(named_parts(self.live.mean, self.live.shapes))
            self.flat_std = self.join(named_parts(self.live.log_std.exp(), self.live.shapes))

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        prediction.state.get("follow", self.follow)
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
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        return cls(point.model, point.likelihood, part_of(state, "std"), point.history)


_WAYS: tuple[Way, ...] = ("reparameterization", "flipout", "local")


class GaussianWeights(nn.Module):
    r"""Means and log standard deviations of the weights of a network, end to end in two vectors.

    So the draw and the KL of all layers take the few operations on long vectors that one layer's would.

    ``ways`` says how each parameter is drawn in training; those that are not named are drawn by plain reparameterization.
    """

    def __init__(
        self, mean: Mapping[str, Tensor], std: Mapping[str, Tensor], ways: Mapping[str, Way] | None = None
    ) -> None:
        super().__init__()
        ways = ways or {}
        chosen: dict[str, Way] = {name: ways.get(name, "reparameterization") for name in mean}
        order = sorted(mean, key=lambda name: _WAYS.index(chosen[name]))
        self.shapes = {name: mean[name].shape for name in order}
        moved = [mean[name].numel() for name in mean if chosen[name] == "reparameterization"]
        flipped = [mean[name].numel() for name in mean if chosen[name] == "flipout"]
        self.moved = sum(moved)  # these weights are drawn; the others stay at their means
        self.drawn = self.moved + sum(flipped)
        self.mean = nn.Parameter(torch.cat([mean[name].detach().flatten() for name in order]))
        self.log_std = nn.Parameter(torch.cat([std[name].detach().flatten() for name in order]).log())

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
            return named_parts(like + scale, self.shapes), {}
        center = torch.cat([like[: self.moved] + scale[: self.moved], like[self.moved :]])
        return named_parts(center, self.shapes), named_parts(scale, self.shapes)

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """Of all weights."""
        return self.log_std.sum() + 0.5 * self.mean.numel() * (1.0 + math.log(2.0 * math.pi))


class DrawnWeights(DrawnNetwork):
    """A network whose weights are Gaussian, drawn anew in every pass; ``ways`` names the layers that get their noise behind them."""

    def __init__(self, network: nn.Module, weights: GaussianWeights, ways: Mapping[str, str]) -> None:
        super().__init__(network, weights.shapes)
        self.weights = weights
        names = {id(p): name for name, p in network.named_parameters()}
        for layer, way in ways.items():
            module = network.get_submodule(layer)
            own = {key: names[id(p)] for key, p in module._parameters.items() if p is not None}
            noise = flipout_noise if way == "flipout" else local_noise
            hook = self._hook(own["weight"], own.get("bias", ""), noise)
            self.hooks.append(module.register_forward_hook(hook, with_kwargs=True, prepend=True))

    def _hook(self, weight: str, bias: str, noise: Any) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            if self.shared is None:
                return None
            x = args[0] if args else kwargs["input"]
            drawn = noise(module, x, self.shared[weight], self.shared.get(bias), current_share())
            return output + drawn.to(output.dtype)

        return hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        center, behind = self.weights()
        return self.run(center, behind, *args, **kwargs)


def log_uniform_kl(mean: Tensor, log_std: Tensor) -> Tensor:
    r"""The KL to :math:`p(w) \propto 1 / |w|`, less the constant that this prior lacks: 0 for weights that are nothing but noise.

    It depends on :math:`\alpha = \sigma^2 / \mu^2` alone, :math:`-\tfrac12 \log\alpha + E \log|1 + \sqrt\alpha \epsilon| + c`, and
    given by the approximation of Molchanov et al. 2017 (https://arxiv.org/abs/1701.05369), within 0.01 nats of it.

    >>> log_uniform_kl(torch.tensor([0.0, 1e-4]), torch.zeros(2)).abs() < 1e-3
    tensor(True)
    """
    log_alpha = 2.0 * (log_std - mean.abs().clamp_min(1e-8).log())
    scale = 0.63576
    away = scale * torch.sigmoid(-1.87320 - 1.48695 * log_alpha)
    return (away + 0.5 * nn.functional.softplus(-log_alpha)).sum()


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
