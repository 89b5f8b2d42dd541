"""The posterior of a single network."""

from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn

from flowbnn.options import Count, checked
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.compiled import compiled_forward


class PointPosterior(Posterior):
    """One network, behind the same interface as all other posteriors, so that it is evaluated by the same code."""

    kind = "point"
    default_samples = 1
    compiles = True

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """The outputs of the one network, as so many equal samples."""
        forward = partial(compiled_forward, prediction, {})
        one = prediction.run(inputs, [forward] if prediction.options.compile is True else None)
        return one.expand(len(samples), *(-1,) * (one.ndim - 1))

    @checked
    def sample(self, seed: int | None = None) -> nn.Module:
        """A copy of the one network."""
        return deepcopy(self.model).eval()

    @checked
    def draws(self, samples: Count, seed: int | None = None) -> dict[str, Tensor]:
        """The weights of the one network, ``samples`` times."""
        own = self.model.named_parameters()
        return {name: value.detach().expand(samples, *value.shape).clone() for name, value in own}
