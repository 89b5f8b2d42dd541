r"""Monte Carlo dropout (Gal and Ghahramani 2016, https://arxiv.org/abs/1506.02142): dropout that stays on at prediction.

Training with dropout of rate :math:`p` and an L2 penalty :math:`\lambda \|w\|^2` maximizes a variational bound under a Gaussian
prior, with

.. math:: \lambda = \frac{1 - p}{2 \sigma^2 N}

per example. Here :math:`\sigma` is the standard deviation of the prior, the inverse of the length scale in the paper. The weight decay
of torch is :math:`2\lambda`, because its penalty is half of the squared norm. The loss is the negative log-likelihood (NLL). In the
paper, :math:`\lambda` for regression belongs to the squared error and is divided by the precision :math:`\tau` of the noise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import field
from functools import partial
from typing import Any, Self

from torch import Tensor, nn

from flowbnn.batches import call, device_of, move
from flowbnn.convert import to_stochastic
from flowbnn.errors import quote_names, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.dropout_layers import (
    DropoutMasks,
    dropout_layers,
    example_axes,
    layers_with_inner_dropout,
)
from flowbnn.methods.fitting import prepare
from flowbnn.methods.network_layers import disable_nested_tensors
from flowbnn.methods.variational.noise_fit import NoiseFitOptions, fit_noise
from flowbnn.noise import Dropout
from flowbnn.noise.layout import wrappable_layers
from flowbnn.options import Probability, accepts_options_of, checked, options
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.prediction import new_seed
from flowbnn.regression import fit_noise_scale
from flowbnn.training import History


@register_method
@options(repr=False)
class MCDropout(Method):
    r"""Monte Carlo dropout: dropout that stays on at prediction.

    A network with dropout layers keeps them on. Other networks get dropout before their layers. In both cases all inputs share the
    masks of a sample, so that a sample is one network. Dropout inside torch's attention and recurrent layers, and of functions
    (``F.dropout``), is not sampled. A warning names such layers if they can be detected.

    The fixed rate determines the spread of the networks, which may be too wide for a precise regression. A warning is raised in this
    case. Use a smaller rate or :class:`~flowbnn.Temperature`.

    Args:
        rate: Dropout rate. If it is set, dropout is added even to a network with dropout layers. Networks without dropout layers get
            0.1 by default.
        layers: Glob of the layers before which dropout is added. By default, all layers except the first, which reads the data.
        prior_scale: Standard deviation :math:`\sigma` of the prior, which gives a weight decay of :math:`(1 - p) / \sigma^2 N`.

    >>> import torch
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 3))
    >>> MCDropout(epochs=2).fit(network, loader, progress=False)
    DropoutPosterior(Sequential, Categorical(), 2 epochs)
    """

    rate: Probability | None = None
    layers: str | None = field(default=None, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **kwargs: Any) -> Posterior:
        """Fits the posterior; see :meth:`Method.fit`. With ``epochs=0``, dropout of a trained network is switched on."""
        model, options = self.setup(network, loader, kwargs)
        rates = [layer.p for layer in dropout_layers(model)]
        if rates and self.rate is None and self.layers is None:
            weight_decay = self._weight_decay(sum(rates) / len(rates), loader, options)
            return self._fit_own_dropout(model, loader, options, weight_decay)
        if self.rate is None and self.layers is None:
            warn_unsampled(layers_with_inner_dropout(model))
        rate = 0.1 if self.rate is None else self.rate
        if not self.epochs:
            likelihood = self.fit_point(deepcopy(model), loader, options).likelihood
            posterior = NoisePosterior(self._add_dropout(model, rate).eval(), likelihood)
            fit_noise_scale(posterior, loader, options.seed)
            return posterior
        settings = {name: getattr(self, name) for name in ("epochs", "optimizer", "schedule")}
        settings["weight_decay"] = self._weight_decay(rate, loader, options)
        fit_options = NoiseFitOptions(weight_lr=self.lr, **settings, **kwargs)
        return fit_noise(self._add_dropout(model, rate), loader, fit_options)

    def _weight_decay(self, rate: float, loader: Iterable[Any], options: FitOptions) -> float:
        return (1.0 - rate) / (self.prior_scale**2 * options.num_examples(loader))

    def _add_dropout(self, model: nn.Module, rate: float) -> nn.Module:
        """Adds dropout before layers of a network, in place."""
        names = list(wrappable_layers(model))
        patterns = [self.layers] if self.layers is not None else names[1:] or names or ["*"]
        return to_stochastic(model, {name: Dropout(rate) for name in patterns}, inplace=True)

    def _fit_own_dropout(
        self, model: nn.Module, loader: Iterable[Any], options: FitOptions, weight_decay: float
    ) -> "DropoutPosterior":
        """Trains a network with dropout layers."""
        prepared = prepare(disable_nested_tensors(model), loader, options, self.epochs > 0)
        point = self.fit_point(model, loader, options, weight_decay, prepared)
        axes = example_axes(model, move(prepared.inputs, device_of(model)))
        uncalled = [name for name, calls in axes.items() if not calls]
        warn_unsampled([*layers_with_inner_dropout(model), *uncalled])
        posterior = DropoutPosterior(model, point.likelihood, point.history, axes)
        fit_noise_scale(posterior, loader, options.seed)
        return posterior


def warn_unsampled(layers: Iterable[str]) -> None:
    """Warns if the dropout of some layers is not sampled in predictions."""
    if names := list(layers):
        text = f"dropout of {quote_names(names, 3)} is not sampled in predictions; only dropout layers that the network calls are"
        warn(text, kind="dropout", layers=names)


class DropoutPosterior(Posterior):
    """Posterior of a network whose dropout layers stay on. All inputs share the masks of a sample.

    Args:
        model: Network with dropout layers.
        likelihood: Likelihood of the targets.
        history: Training history.
        axes: Axis of the examples at each call of each dropout layer, from :func:`example_axes`. By default, it is determined at the
            first prediction.
    """

    kind = "dropout"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        history: History | None = None,
        axes: Mapping[str, list[int | None]] | None = None,
    ) -> None:
        super().__init__(disable_nested_tensors(model), likelihood, history)
        self.axes = axes

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns the outputs of the network with the masks of each sample."""
        if self.axes is None:
            self.axes = example_axes(prediction.model, move(inputs, prediction.device, prediction.dtype))
        masks = prediction.state.get("masks", lambda: DropoutMasks(prediction.model, self.axes or {}))

        def networks() -> Iterator[Callable[[Any], Tensor]]:
            for index in samples:
                masks.select(prediction.seed, index, None if prediction.shared else prediction.batch_index)
                yield partial(call, prediction.model)

        with masks:
            return prediction.run(inputs, networks(), len(samples))

    @checked
    def sample(self, seed: int | None = None) -> nn.Module:
        """Returns a copy of the network with fixed masks: the first network of a prediction with this seed."""
        network = deepcopy(self.model).eval()
        masks = DropoutMasks(network, self.axes or {})
        masks.select(new_seed() if seed is None else seed, 0)
        masks.__enter__()
        for layer in dropout_layers(network):
            layer.p = 0.0  # the masks replace torch's dropout in training mode, too
        return network

    def settings(self) -> dict[str, Any]:
        return {"axes": self.axes}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        return cls(point.model, point.likelihood, point.history, settings["axes"])
