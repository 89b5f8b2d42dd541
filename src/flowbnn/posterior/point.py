"""Posterior of a single network."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from flowbnn.networks import deepcopy_network
from flowbnn.options import SampleCount, checked
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.compiled import compiled_forward


class PointPosterior(Posterior):
    """Single network with the interface of a posterior.

    >>> import torch
    >>> from flowbnn.likelihoods import Categorical
    >>> posterior = PointPosterior(nn.Linear(2, 3), Categorical())
    >>> posterior.predict(torch.zeros(5, 2)).num_samples
    1
    """

    kind = "point"
    default_samples = 1
    supports_compile = True

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns the outputs of the network, once per sample."""
        forward = partial(compiled_forward, prediction, {})
        outputs = prediction.run(inputs, [forward] if prediction.options.compile is True else None)
        return outputs.expand(len(samples), *(-1,) * (outputs.ndim - 1))

    @checked
    def networks(self, samples: SampleCount, seed: int | None = None) -> list[nn.Module]:
        """Returns copies of the network."""
        return [deepcopy_network(self.model).eval() for _ in range(samples)]

    @checked
    def draws(self, samples: SampleCount, seed: int | None = None) -> dict[str, Tensor]:
        """Returns the weights of the network, ``samples`` times."""
        parameters = self.model.named_parameters()
        return {name: value.detach().expand(samples, *value.shape).clone() for name, value in parameters}
