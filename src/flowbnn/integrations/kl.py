r"""KL divergence of noise in training loops of other libraries.

A training loop of another library minimizes the mean loss of the examples, :math:`-\frac1B \sum_i \log p(y_i \mid x_i, z)`. Without the
term :math:`\frac{\beta}{N} \mathrm{KL}` of the ELBO, the noise collapses to a point. :class:`KLTerm` adds its gradient once before
every step of the optimizer. This is exact for any accumulation of gradients and scaling of the loss.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, reported_size
from flowbnn.data.formats import as_loader
from flowbnn.errors import FlowBNNError
from flowbnn.methods.fit_options import FitOptions, LikelihoodName
from flowbnn.methods.preparation import prepare
from flowbnn.networks import copy_network
from flowbnn.noise.base import layers_with_noise
from flowbnn.noise.batched import divergences
from flowbnn.objectives import warm_up
from flowbnn.options import Count, NonNegative, UnitInterval, checked
from flowbnn.posterior.noise import NoisePosterior


class KLTerm:
    r"""Gradient of :math:`\frac{\beta}{N} \mathrm{KL}` for the noise of a network that another library trains.

    Args:
        num_data: Number :math:`N` of training examples. None to read it from the training data.
        beta: Weight :math:`\beta` of the KL divergence.
        warmup: Fraction of the run over which the weight of the KL divergence grows from 0 to ``beta``.

    Attributes:
        history: KL divergence of the whole network at every step, in nats.

    >>> import flowbnn as fb
    >>> network = fb.to_stochastic(nn.Linear(2, 3), {"*": fb.noise.NormalAffine(base_scale=0.1)})
    >>> term = KLTerm(num_data=10)
    >>> term.add_gradient(network)
    >>> len(term.history), any(parameter.grad is not None for parameter in fb.noise.noise_parameters(network))
    (1, True)
    """

    @checked
    def __init__(
        self, num_data: Count | None = None, beta: NonNegative = 1.0, warmup: UnitInterval = 0.0
    ) -> None:
        self.num_data, self.beta, self.warmup = num_data, beta, warmup
        self.history: list[float] = []

    def begin(self, model: nn.Module, loader: Any, max_data: int | None = None) -> None:
        """Checks the network and counts the examples at the beginning of a training.

        Args:
            model: Network with noise.
            loader: Training data.
            max_data: Largest number of examples that the training reads in an epoch.

        Raises:
            FlowBNNError: If the network has no noise, or if the loader does not report its number of examples.
        """
        layers_with_noise(model, "model")
        if self.num_data is not None:
            return
        number = count_examples(loader)
        if number is None:
            text = f"a {type(loader).__name__} has unknown length; set num_data"
            raise FlowBNNError(text, kind="num_data", argument="num_data")
        self.num_data = number if max_data is None else min(number, max_data)

    def add_gradient(
        self,
        model: nn.Module,
        parameters: Iterable[Tensor] | None = None,
        progress: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Adds the gradient to that of the loss, before a step of the optimizer.

        Args:
            model: Network with noise.
            parameters: Parameters of the optimizer. None for all.
            progress: Completed fraction of the training.
            seed: Seed of the draws that estimate the KL divergence of flows, equal in all processes.
        """
        layers = layers_with_noise(model, "model")
        selected = None if parameters is None else {id(value) for value in parameters}
        noise = {id(p): p for layer in layers.values() for p in layer.joint_noise.parameters()}
        trained = [p for key, p in noise.items() if p.requires_grad and (selected is None or key in selected)]
        if not trained:
            return
        device = device_of(model)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            torch.manual_seed(seed)
            total = divergences(layers).total
            if total is None:  # dropout has no density
                return
            weight = self.beta * warm_up(progress, self.warmup) / (self.num_data or 1)
            gradients = torch.autograd.grad(weight * total.kl, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.history.append(float(total.kl.detach()))


def count_examples(loader: Any) -> int | None:
    """Returns the number of examples in one pass over a loader, or None if it does not report it."""
    number = reported_size(loader)
    if number is None and hasattr(getattr(loader, "dataset", None), "__len__"):
        return len(loader.dataset)
    return number


def make_posterior(model: nn.Module, data: Any, likelihood: LikelihoodName = "auto") -> NoisePosterior:
    """Returns the posterior of a network whose noise another library has trained.

    Args:
        model: Network with trained noise. It is copied.
        data: Data with inputs and targets, of any format. They determine the likelihood and the noise scale of a regression.
        likelihood: Likelihood of the targets, or its name.
    """
    network = copy_network(model).eval()
    options = FitOptions(likelihood=copy(likelihood), progress=False)
    prepared = prepare(network, as_loader(data), options, trained=False)
    posterior = NoisePosterior(network, prepared.likelihood)
    posterior.set_rows_interact(prepared.rows_interact)
    for layer in layers_with_noise(network, "model").values():
        layer.fitted = True
    return posterior
