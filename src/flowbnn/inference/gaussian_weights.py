r"""A factorized Gaussian over weights: Bayes by Backprop's posterior, and that of any method that has a mean and a variance of each.

.. math:: q(w) = \prod_i \mathcal N(w_i \mid \mu_i, \sigma_i^2)
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.distributions.draws import standard_normal, standard_normals
from flowbnn.errors import FlowBNNError
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.weights import WeightPosterior, generator_of
from flowbnn.likelihoods import Likelihood
from flowbnn.training import History

__all__ = ["GaussianWeightPosterior"]

BLOCK = 2**23  # bytes of the samples that are drawn together


class GaussianWeightPosterior(WeightPosterior):
    """Independent Gaussian weights around those of a network.

    The network itself holds the means, so that it is the mean network; :meth:`sample` gives a copy with weights drawn around them.

    Args:
        model: the network.
        likelihood: how outputs speak of targets.
        std: standard deviations, by the names of the parameters that have one; the others are points.
        mean: means, written to the network; its own weights unless given.
        history: the training record.

    >>> import flowbnn as fb
    >>> layer = nn.Linear(2, 1)
    >>> posterior = GaussianWeightPosterior(layer, fb.Gaussian(noise=0.1), {"weight": torch.full((1, 2), 0.5)})
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
        if not std:
            raise FlowBNNError("a Gaussian over weights needs the standard deviation of at least one of them")
        for name, value in [*std.items(), *(mean or {}).items()]:
            if name not in own:
                raise FlowBNNError(f"the network has no weight '{name}'")
            if value.shape != own[name].shape:
                raise FlowBNNError(
                    f"the weight '{name}' has shape {tuple(own[name].shape)}, but was given numbers of shape {tuple(value.shape)}"
                )
        for name, value in std.items():
            if not bool((value >= 0).all()):
                raise FlowBNNError(f"a standard deviation of '{name}' is below 0 or NaN")
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

    def drawing(self, samples: int, **options: Any) -> Any:
        self.follow()
        return super().drawing(samples, **options)

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        mean = self.flat_mean
        normal = standard_normal(mean.shape, mean.dtype, mean.device, generator_of(seed, index, mean.device))
        return self.split(torch.addcmul(mean, self.flat_std, normal))

    def stream(self, low: int, high: int, seed: int) -> Iterator[dict[str, Tensor]]:
        if type(self).weights is not GaussianWeightPosterior.weights:  # a subclass draws in a way of its own
            yield from super().stream(low, high, seed)
            return
        mean, std = self.flat_mean, self.flat_std
        count = max(1, BLOCK // max(1, mean.numel() * mean.element_size()))
        room = mean.new_empty(
            min(count, high - low), mean.numel()
        )  # made once: fresh memory is slow to touch
        for start in range(low, high, count):
            sources = [
                generator_of(seed, index, mean.device) for index in range(start, min(start + count, high))
            ]
            rows = room[: len(sources)]
            standard_normals(mean.numel(), mean.dtype, mean.device, sources, rows)
            torch.addcmul(mean, std, rows, out=rows)
            for row in rows:
                yield self.split(row)

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        missing = [name for name in self._names if name not in values]
        if missing:
            raise FlowBNNError(f"log_prob needs values of every weight; '{missing[0]}' is not among them")
        flat = torch.cat([values[name].flatten() for name in self._names]).to(self.flat_mean)
        error = (flat - self.flat_mean) / self.flat_std
        constant = 0.5 * len(flat) * math.log(2.0 * math.pi)
        return -0.5 * error.square().sum() - self.flat_std.log().sum() - constant

    def state(self) -> dict[str, Tensor]:
        return {f"std.{name}": value.contiguous() for name, value in self.std.items()}

    @classmethod
    def restored(
        cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "GaussianWeightPosterior":
        std = {name.removeprefix("std."): value for name, value in state.items() if name.startswith("std.")}
        return cls(point.model, point.likelihood, std, history=point.history)
