"""The posterior of a single network."""

from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.forward import Compile, PointPasses

__all__ = ["PointPosterior"]


class PointPosterior(Posterior):
    """One network, taken at its word: the plain network behind the same interface, so that it is judged by the same code."""

    kind = "point"
    default_samples = 1

    def drawing(
        self,
        samples: int,
        *,
        max_batch: int | None = None,
        precision: str | None = None,
        compile: Compile = "auto",
        **rest: Any,
    ) -> AbstractContextManager[Any]:
        """As :meth:`Posterior.drawing`; ``shared`` and ``seed`` say nothing of a single network."""
        return PointPasses(self.model, samples, max_batch, precision, compile)

    def sample(self, seed: int | None = None) -> nn.Module:
        """A copy of the one network."""
        return deepcopy(self.model).eval()

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """The weights of the one network, ``samples`` times."""
        if not isinstance(samples, int) or samples < 1:
            raise FlowBNNError(f"samples is a whole number of at least 1, not {samples}")
        own = self.model.named_parameters()
        return {name: value.detach().expand(samples, *value.shape).clone() for name, value in own}

    @classmethod
    def load(cls, path: str | Path, network: nn.Module) -> "Posterior":
        """Read a saved posterior into ``network``."""
        return cls.restore(network, *cls.read(path), path)
