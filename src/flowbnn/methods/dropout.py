r"""Monte Carlo dropout (Gal and Ghahramani 2016, https://arxiv.org/abs/1506.02142): dropout that stays on at prediction.

Training with dropout of rate :math:`p` and an L2 penalty :math:`\lambda \|w\|^2` maximises a variational bound under a Gaussian
prior, with

.. math:: \lambda = \frac{1 - p}{2 \sigma^2 N}

per example, where :math:`\sigma` is the standard deviation of the prior, the inverse of the paper's length scale. torch's weight decay
is :math:`2\lambda`, its penalty being half of the squared norm times it. The loss is the negative log-likelihood; the paper's
:math:`\lambda` for regression goes with the squared error and is divided by the precision :math:`\tau` of the noise, by which the two
differ.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.convert import to_stochastic
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.layers import own_dropout
from flowbnn.methods.variational.base import fit
from flowbnn.noise import Dropout, wrappable
from flowbnn.options import Probability, options, takes
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.weights import generator_of

__all__ = ["DropoutPosterior", "MCDropout"]


@register_method
@options(repr=False)
class MCDropout(Method):
    r"""Dropout kept on at prediction.

    A network with dropout of its own keeps that on. One without gets dropout before its layers, whose draws are then shared by all
    inputs, so that a sample is one network.

    Args:
        rate: the share that is dropped; where it is given, dropout is added whatever the network has. 0.1 for networks without dropout.
        layers: a glob of the layers before which to drop; all that can but the first, which reads the data, unless given.
        prior_scale: standard deviation :math:`\sigma` of the prior: a weight decay of :math:`(1 - p) / \sigma^2 N`.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 3))
    >>> MCDropout(epochs=2).fit(network, loader, progress=False)
    DropoutPosterior(Sequential, Categorical(), 2 epochs)
    """

    rate: Probability | None = None
    layers: str | None = field(default=None, kw_only=True)

    @takes(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> Posterior:
        """As :meth:`Method.fit`. With ``epochs=0`` the dropout of a trained network is turned on and nothing is learned."""
        model, run = self.setup(network, loader, given)
        rates = [part.p for part in own_dropout(model)]
        own = bool(rates) and self.rate is None and self.layers is None
        rate = sum(rates) / len(rates) if own else 0.1 if self.rate is None else self.rate
        decay = (1.0 - rate) / (self.prior_scale**2 * run.count(loader))
        if own:
            point = self.start(model, loader, run, decay)
            return DropoutPosterior(point.model, point.likelihood, point.history)
        if not self.epochs:
            likelihood = self.start(deepcopy(model), loader, run).likelihood
            return NoisePosterior(self._with_dropout(model, rate).eval(), likelihood)
        noisy = self._with_dropout(model, rate)
        settings = {name: getattr(self, name) for name in ("epochs", "optimizer", "schedule")}
        return fit(noisy, loader, weight_lr=self.lr, weight_decay=decay, **settings, **given)

    def _with_dropout(self, model: nn.Module, rate: float) -> nn.Module:
        inner = {id(part.out_proj) for part in model.modules() if isinstance(part, nn.MultiheadAttention)}
        names = [name for name, part in model.named_modules() if wrappable(part) and id(part) not in inner]
        chosen = [self.layers] if self.layers is not None else names[1:] or names or ["*"]
        return to_stochastic(model, {name: Dropout(rate) for name in chosen}, inplace=True)


class DropoutPosterior(Posterior):
    """A network whose own dropout is on: every pass drops anew for every input, so there is no single network to hand out."""

    kind = "dropout"

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Passes with dropout on, each sample from a seed of its own; torch's own generators are left as they were.

        torch's dropout draws for every example, whatever ``shared`` says.
        """
        devices = [prediction.device] if prediction.device.type == "cuda" else []
        parts = own_dropout(self.model)
        for part in parts:
            part.train()
        try:
            with torch.random.fork_rng(devices):
                return prediction.run(inputs, self._networks(samples, prediction), len(samples))
        finally:
            for part in parts:
                part.eval()

    def _networks(self, samples: range, prediction: Prediction) -> Iterator[Callable[[Any], Tensor]]:
        seed = prediction.seed if prediction.shared else prediction.seed + prediction.batch
        for index in samples:
            torch.manual_seed(generator_of(seed, index).initial_seed())
            yield prediction.network
