r"""Bayes by Backprop (Blundell et al. 2015, https://arxiv.org/abs/1505.05424): a factorized Gaussian over weights, by the ELBO.

.. math:: \max_{\mu, \sigma} \; \frac1N \sum_i E_q \log p(y_i \mid x_i, w) - \frac{\beta}{N} \mathrm{KL}[q(w) \| p(w)],
          \qquad q(w) = \prod_j \mathcal N(w_j \mid \mu_j, \sigma_j^2)

What it can represent: of a Gaussian posterior with precision :math:`\Lambda` it finds the mean exactly and the variances
:math:`1 / \Lambda_{jj}`, no correlations.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from flowbnn.distributions.draws import standard_normal, standard_normals
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.fitting import prepare
from flowbnn.methods.variational.base import Variational, fit_elbo
from flowbnn.methods.variational.gaussian_weights import DrawnWeights, GaussianWeights
from flowbnn.methods.variational.layers import LayerChoice, base_scales, chosen_weights, ways_of
from flowbnn.options import Count, Positive, Probability, options, takes
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.weights import WeightPosterior, check_all_given, generator_of
from flowbnn.training import History

__all__ = ["BayesByBackprop", "GaussianWeightPosterior"]


@register_method
@options(repr=False)
class BayesByBackprop(Variational):
    r"""A Gaussian of its own for every weight (mean-field), on any network: nothing has to be rewritten.

    The standard deviations are learned as their logarithms. Parameters of normalisation layers (BatchNorm and its kin) stay points
    unless ``layers`` names them; so does whatever is frozen (``requires_grad=False``). Tied weights have one posterior, counted once.

    Args:
        prior: ``"gaussian"``, :math:`\mathcal N(0, \sigma^2)` with ``prior_scale``, whose KL has a closed form; or
            ``"scale-mixture"``, :math:`\pi \mathcal N(0, \sigma_1^2) + (1 - \pi) \mathcal N(0, \sigma_2^2)`, whose KL is estimated on
            fresh draws.
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

    prior: Literal["gaussian", "scale-mixture"] = "gaussian"
    estimator: Literal["auto", "reparameterization", "local", "flipout"] = field(default="auto", kw_only=True)
    layers: LayerChoice = field(default=None, kw_only=True)
    pi: Probability = field(default=0.5, kw_only=True)
    sigma1: Positive = field(default=1.0, kw_only=True)
    sigma2: Positive = field(default=0.0025, kw_only=True)
    kl_samples: Count = field(default=1, kw_only=True)

    @takes(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "GaussianWeightPosterior":
        """As :meth:`Method.fit`; the means start at the network's weights, fresh or trained.

        The history has ELBO, log-likelihood and KL of every epoch.
        """
        model, run = self.setup(network, loader, given, "fitting the weights")
        names = chosen_weights(model, self.layers)
        likelihood, inputs, check = prepare(model, loader, run.likelihood, run.seed)
        ways = ways_of(model, names, self.estimator, inputs)
        mean = {name: parameter.detach() for name, parameter in model.named_parameters() if name in names}
        std = base_scales(mean, self.base_scale, self.prior_scale)
        weights = GaussianWeights(mean, std, ways.parameters)
        around = DrawnWeights(model, weights, ways.layers)
        posterior = GaussianWeightPosterior(model, likelihood, std)
        posterior.live = lambda: (
            weights.split(weights.mean.detach()),
            weights.split(weights.log_std.detach().exp()),
        )
        mixture = None if self.prior == "gaussian" else (self.pi, self.sigma1, self.sigma2)
        groups = [
            {"name": "means", "params": [weights.mean], "lr": self.lr},
            {"name": "deviations", "params": [weights.log_std], "lr": self.noise_lr},
        ]
        divergence = partial(weights.divergence, self.prior_scale, mixture, self.kl_samples)
        fit_elbo(posterior, around, divergence, groups, self, loader, check, run)
        around.release()
        posterior.follow()
        posterior.live = None
        return posterior


BLOCK = 2**23  # bytes of the samples that are drawn together


class GaussianWeightPosterior(WeightPosterior):
    """Independent Gaussian weights around those of a network.

    The network itself holds the means, so that it is the mean network; :meth:`sample` gives a copy with weights drawn around them.

    Args:
        model, likelihood, history: as in :class:`~flowbnn.methods.Posterior`.
        std: standard deviations, by the names of the parameters that have one; the others are points.
        mean: means, written to the network; its own weights unless given.

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
        mean: Mapping[str, Tensor] | None = None,
        history: History | None = None,
    ) -> None:
        super().__init__(model, likelihood, history)
        own = dict(model.named_parameters())
        reason = None if std else "a Gaussian over weights needs standard deviations of at least 0"
        for name, value in [*(mean or {}).items(), *std.items()]:
            if name not in own or value.shape != own[name].shape:
                reason = f"the network has no weight '{name}' of shape {tuple(value.shape)}"
            elif name in std and not bool((std[name] >= 0).all()):
                reason = f"the standard deviations of '{name}' must be at least 0"
        if reason is not None:
            raise FlowBNNError(reason, argument="std")
        with torch.no_grad():
            for name, value in (mean or {}).items():
                own[name].copy_(value)
        # in the network's order: draws depend on it, and a file does not keep another
        self._names = [name for name in own if name in std]
        self.shapes = [own[name].shape for name in self._names]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.flat_mean, self.flat_std = self.join(own), self.join(std)
        # while training goes on: gives means and standard deviations as they are now
        self.live: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] | None = None

    @property
    def names(self) -> list[str]:
        return self._names

    @property
    def mean(self) -> dict[str, Tensor]:
        """The means, by the names of the parameters."""
        return self.split(self.flat_mean)

    @property
    def std(self) -> dict[str, Tensor]:
        """The standard deviations."""
        return self.split(self.flat_std)

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        """One vector of all parameters."""
        return torch.cat([values[name].detach().flatten() for name in self._names])

    def follow(self) -> None:
        """Take over means and standard deviations from the training that goes on."""
        if self.live is not None:
            self.flat_mean, self.flat_std = map(self.join, self.live())

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters of one vector of all of them."""
        parts = zip(self._names, flat.split(self.sizes), self.shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in parts}

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        prediction.keep("follow", self.follow)
        return super().outputs(inputs, samples, prediction)

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        mean = self.flat_mean
        normal = standard_normal(mean.shape, mean.dtype, mean.device, generator_of(seed, index, mean.device))
        return self.split(torch.addcmul(mean, self.flat_std, normal))

    def stream(self, samples: range, prediction: Prediction) -> Iterator[dict[str, Tensor]]:
        if type(self).weights is not GaussianWeightPosterior.weights:  # a subclass draws in a way of its own
            yield from super().stream(samples, prediction)
            return
        low, high, seed = samples.start, samples.stop, prediction.seed
        mean, std = self.flat_mean, self.flat_std
        count = max(1, BLOCK // max(1, mean.numel() * mean.element_size()))
        room = mean.new_empty(
            min(count, high - low), mean.numel()
        )  # made once: fresh memory is slow to touch
        for start in range(low, high, count):
            indices = range(start, min(start + count, high))
            sources = [generator_of(seed, index, mean.device) for index in indices]
            rows = room[: len(sources)]
            standard_normals(mean.numel(), mean.dtype, mean.device, sources, rows)
            torch.addcmul(mean, std, rows, out=rows)
            for row in rows:
                yield self.split(row)

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        check_all_given(self._names, values)
        flat = torch.cat([values[name].flatten() for name in self._names]).to(self.flat_mean)
        error = (flat - self.flat_mean) / self.flat_std
        constant = 0.5 * len(flat) * math.log(2.0 * math.pi)
        return -0.5 * error.square().sum() - self.flat_std.log().sum() - constant

    def state(self) -> dict[str, Tensor]:
        return {f"std.{name}": value.contiguous() for name, value in self.std.items()}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        std = {name.removeprefix("std."): value for name, value in state.items() if name.startswith("std.")}
        return cls(point.model, point.likelihood, std, history=point.history)
