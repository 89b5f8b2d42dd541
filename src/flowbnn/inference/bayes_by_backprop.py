r"""Bayes by Backprop (Blundell et al., 1505.05424): a factorized Gaussian over the weights of any network, fitted by the ELBO.

.. math:: \max_{\mu, \sigma} \; \frac1N \sum_i E_q \log p(y_i \mid x_i, w) - \frac{\beta}{N} \mathrm{KL}[q(w) \| p(w)],
          \qquad q(w) = \prod_j \mathcal N(w_j \mid \mu_j, \sigma_j^2)

What it can represent: of a Gaussian posterior with precision :math:`\Lambda` it finds the mean exactly and the variances
:math:`1 / \Lambda_{jj}`, no correlations.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.inference.bayesian_layers import base_scales, chosen_weights, ways_of
from flowbnn.inference.fitting import prepare, run_options
from flowbnn.inference.gaussian_weights import GaussianWeightPosterior
from flowbnn.inference.method import LikelihoodName, check_whole, register_method
from flowbnn.inference.variational import Variational, fit_elbo
from flowbnn.layers.gaussian_weights import DrawnWeights, GaussianWeights, check_mixture

__all__ = ["BayesByBackprop"]

ESTIMATORS = ("auto", "reparameterization", "local", "flipout")
PRIORS = ("gaussian", "scale-mixture")


@register_method
@dataclass(frozen=True, repr=False)
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
        base_scale: standard deviations at the start, as a share of the size (root mean square) of each weight tensor.
        lr, noise_lr: learning rates of the means, and of the log standard deviations (and of the likelihood's noise).
        beta, warmup: weight of the KL, and the first share of the run over which it grows from 0.
        samples: draws per step.
        kl_samples: fresh draws for each estimate of the KL to a mixture.

    >>> import torch
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = BayesByBackprop(epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.std["weight"].shape
    torch.Size([3, 2])
    """

    name: ClassVar[str] = "bayes-by-backprop"
    label: ClassVar[str] = "Bayes by Backprop"

    prior: Literal["gaussian", "scale-mixture"] = "gaussian"
    estimator: Literal["auto", "reparameterization", "local", "flipout"] = field(default="auto", kw_only=True)
    layers: str | type[nn.Module] | Callable[[str, nn.Module], bool] | None = field(
        default=None, kw_only=True
    )
    pi: float = field(default=0.5, kw_only=True)
    sigma1: float = field(default=1.0, kw_only=True)
    sigma2: float = field(default=0.0025, kw_only=True)
    kl_samples: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("kl_samples", self.kl_samples)
        if self.prior not in PRIORS:
            raise FlowBNNError(f"there is no prior '{self.prior}'{nearest(str(self.prior), PRIORS)}")
        if self.estimator not in ESTIMATORS:
            raise FlowBNNError(
                f"there is no estimator '{self.estimator}'{nearest(str(self.estimator), ESTIMATORS)}"
            )
        check_mixture(self.pi, self.sigma1, self.sigma2)

    def fit(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        *,
        likelihood: LikelihoodName = "auto",
        num_data: int | None = None,
        validation: Iterable[Any] | None = None,
        **options: Any,
    ) -> GaussianWeightPosterior:
        """As :meth:`Method.fit`; the means start at the network's weights, fresh or trained.

        The history has ELBO, log-likelihood and KL of every epoch.
        """
        model, number = self.copied(network), self.count(loader, num_data)
        names = chosen_weights(model, self.layers)
        settings = run_options(self.epochs, options, "fitting the weights")
        chosen, inputs, check = prepare(model, loader, likelihood, settings.seed)
        ways = ways_of(model, names, self.estimator, inputs)
        mean = {name: parameter.detach() for name, parameter in model.named_parameters() if name in names}
        std = base_scales(mean, self.base_scale, self.prior_scale)
        weights = GaussianWeights(mean, std, ways.parameters)
        around = DrawnWeights(model, weights, ways.layers)
        posterior = GaussianWeightPosterior(model, chosen, std)
        posterior.live = lambda: (
            weights.split(weights.mean.detach()),
            weights.split(weights.log_std.detach().exp()),
        )
        mixture = None if self.prior == "gaussian" else (self.pi, self.sigma1, self.sigma2)
        groups = [
            {"name": "means", "params": [weights.mean], "lr": self.lr},
            {"name": "deviations", "params": [weights.log_std], "lr": self.noise_lr},
        ]
        fit_elbo(
            posterior,
            around,
            lambda: weights.divergence(self.prior_scale, mixture, self.kl_samples),
            groups,
            self,
            loader,
            number,
            check,
            settings,
            validation,
        )
        around.release()
        posterior.follow()
        posterior.live = None
        return posterior
