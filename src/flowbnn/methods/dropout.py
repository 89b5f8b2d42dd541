r"""Monte Carlo dropout (Gal and Ghahramani, 1506.02142): dropout that stays on at prediction.

Training with dropout of rate :math:`p` and an L2 penalty :math:`\lambda \|w\|^2` maximises a variational bound under a Gaussian
prior, with

.. math:: \lambda = \frac{1 - p}{2 \sigma^2 N}

per example, where :math:`\sigma` is the standard deviation of the prior, the inverse of the paper's length scale. torch's weight decay
is :math:`2\lambda`, its penalty being half of the squared norm times it. The loss is the negative log-likelihood; the paper's
:math:`\lambda` for regression goes with the squared error and is divided by the precision :math:`\tau` of the noise, by which the two
differ.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.convert import to_stochastic
from flowbnn.errors import FlowBNNError
from flowbnn.methods.base import LikelihoodName, Method, register_method
from flowbnn.methods.fitting import fit_point
from flowbnn.methods.node_noise import NoisePosterior, fit
from flowbnn.noise import Dropout, wrappable
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.weights import generator_of

__all__ = ["DropoutPosterior", "MCDropout"]

KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def own_dropout(model: nn.Module) -> list[nn.Module]:
    """The dropout that a network brings."""
    return [part for part in model.modules() if isinstance(part, KINDS) and part.p > 0]


@register_method
@dataclass(frozen=True, repr=False)
class MCDropout(Method):
    r"""Dropout kept on at prediction.

    A network with dropout of its own keeps that on. One without gets dropout before its layers, whose draws are then shared by all
    inputs, so that a sample is one network.

    Args:
        rate: the share that is dropped; given, dropout is put in whatever the network has. 0.1 where the network has none.
        layers: a glob of the layers before which to drop; all that can but the first, which reads the data, unless given.
        prior_scale: standard deviation :math:`\sigma` of the prior: a weight decay of :math:`(1 - p) / \sigma^2 N`.
    """

    name: ClassVar[str] = "mc-dropout"
    label: ClassVar[str] = "MC dropout"

    rate: float | None = None
    layers: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate is not None and not (isinstance(self.rate, float) and 0.0 < self.rate < 1.0):
            raise FlowBNNError(f"rate is the share that is dropped, above 0 and below 1, not {self.rate!r}")

    def fit(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        *,
        likelihood: LikelihoodName = "auto",
        num_data: int | None = None,
        validation: Iterable[Any] | None = None,
        **options: Any,
    ) -> Posterior:
        """As :meth:`Method.fit`. With ``epochs=0`` the dropout of a trained network is turned on and nothing is learned."""
        model, number = self.copied(network), self.count(loader, num_data)
        given: dict[str, Any] = {
            "epochs": self.epochs,
            "likelihood": likelihood,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "validation": validation,
            **options,
        }
        own = own_dropout(model)
        if own and self.rate is None and self.layers is None:
            rate = sum(part.p for part in own) / len(own)  # type: ignore[misc]
            decay = (1.0 - rate) / (self.prior_scale**2 * number)
            point = (
                fit_point(model, loader, lr=self.lr, weight_decay=decay, **given)
                if self.epochs
                else self.start(network, loader, likelihood, number, validation, options)
            )
            return DropoutPosterior(point.model, point.likelihood, point.history)
        rate = 0.1 if self.rate is None else self.rate
        inner = {id(part.out_proj) for part in model.modules() if isinstance(part, nn.MultiheadAttention)}
        names = [name for name, part in model.named_modules() if wrappable(part) and id(part) not in inner]
        if not names:
            raise FlowBNNError(
                "this network has no layer that dropout could stand before; give it nn.Dropout of its own"
            )
        rules: dict[Any, Any] = (
            {name: Dropout(rate) for name in names[1:] or names}
            if self.layers is None
            else {self.layers: Dropout(rate)}
        )
        noisy = to_stochastic(model, rules, inplace=True)
        if not self.epochs:
            chosen = self.start(network, loader, likelihood, number, validation, options).likelihood
            noisy.eval()
            return NoisePosterior(noisy, chosen)
        decay = (1.0 - rate) / (self.prior_scale**2 * number)
        return fit(noisy, loader, weight_lr=self.lr, weight_decay=decay, num_data=number, **given)


class DropoutPosterior(Posterior):
    """A network whose own dropout is on: every pass drops anew."""

    kind = "dropout"

    def sample(self, seed: int | None = None) -> nn.Module:
        raise FlowBNNError(
            "torch's dropout drops anew for every input, so there is no one network to hand out; MCDropout(rate=...) puts in dropout "
            "whose draws are shared"
        )

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
