"""The posterior of SWAG: a Gaussian of low rank plus diagonal around the mean of the trajectory."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal

from flowbnn.errors import FlowBNNError
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.weights import WeightPosterior, generator_of
from flowbnn.likelihoods import Likelihood
from flowbnn.training import History

__all__ = ["SWAGPosterior", "trained_parameters"]

WITNESSES = 4  # numbers of every fixed draw that are kept, to know it again


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that are learned, each tied one once."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


class SWAGPosterior(WeightPosterior):
    r"""Weights :math:`w \sim \mathcal N(\bar w, s (\mathrm{diag}(v) + \tfrac{1}{K-1} D D^\top))`.

    Where the network has BatchNorm, whose statistics belong to the weights, the draws are a fixed list, each with the statistics of the
    training data under it; ``seed`` then changes nothing, and more samples than the list has begin anew.

    Args:
        model: the network, whose learned weights are at the mean.
        likelihood: how outputs speak of targets.
        mean, variance: of the weights, flat.
        deviations: the last K deviations from the running mean ``[K, P]``; K may be 0.
        scale: :math:`s`; 0.5 is the paper's.
        statistics: buffers of the fixed draws ``{name: [S, ...]}``.
        fixed_seed: of the fixed draws.
    """

    kind: ClassVar[str] = "swag"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        mean: Tensor,
        variance: Tensor,
        deviations: Tensor,
        scale: float,
        history: History | None = None,
        statistics: Mapping[str, Tensor] | None = None,
        fixed_seed: int = 0,
    ) -> None:
        super().__init__(model, likelihood, history)
        self.mean, self.variance, self.deviations, self.scale = mean, variance, deviations, scale
        self.statistics, self.fixed_seed = dict(statistics or {}), fixed_seed
        self.parameters = trained_parameters(model)
        self.size = len(next(iter(self.statistics.values()))) if self.statistics else 0
        if self.size:
            self.default_samples = self.size
        self._gaussian: LowRankMultivariateNormal | None = None

    @property
    def rank(self) -> int:
        return len(self.deviations)

    @property
    def names(self) -> list[str]:
        return [*self.parameters, *self.statistics]

    def flat_draw(self, index: int, seed: int) -> Tensor:
        """One draw of all learned weights, flat."""
        generator = generator_of(seed, index)

        def normal(count: int) -> Tensor:
            return torch.randn(count, generator=generator).to(self.mean)

        spread = self.variance.sqrt() * normal(len(self.mean))
        if self.rank:
            spread += normal(self.rank) / math.sqrt(self.rank - 1) @ self.deviations
        return self.mean + math.sqrt(self.scale) * spread

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Flat weights by their names."""
        sizes = [value.numel() for value in self.parameters.values()]
        parts = flat.split(sizes)
        return {k: part.view(v.shape) for (k, v), part in zip(self.parameters.items(), parts, strict=True)}

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        if not self.size:
            return self.cut(self.flat_draw(index, seed))
        index %= self.size
        found = self.cut(self.flat_draw(index, self.fixed_seed))
        return found | {name: value[index] for name, value in self.statistics.items()}

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        missing = [name for name in self.parameters if name not in values]
        if missing:
            raise FlowBNNError(f"the density is of all weights together, and '{missing[0]}' is not given")
        if self._gaussian is None:
            rows = self.deviations.double() if self.rank else self.mean.double().new_zeros(1, len(self.mean))
            factor = rows.T * math.sqrt(self.scale / max(1, self.rank - 1))
            self._gaussian = LowRankMultivariateNormal(
                self.mean.double(), factor, self.scale * self.variance.double(), validate_args=False
            )
        flat = torch.cat([values[name].reshape(-1) for name in self.parameters])
        return self._gaussian.log_prob(flat.to(self.mean.device, torch.float64))

    def state(self) -> dict[str, Tensor]:
        found = {"mean": self.mean, "variance": self.variance, "deviations": self.deviations}
        if self.size:
            draws = [self.flat_draw(index, self.fixed_seed)[:WITNESSES] for index in range(self.size)]
            found["witnesses"] = torch.stack(draws)
        return found | {f"statistics.{name}": value for name, value in self.statistics.items()}

    def settings(self) -> dict[str, Any]:
        return {"scale": self.scale, "fixed_seed": self.fixed_seed}

    @classmethod
    def restored(
        cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "SWAGPosterior":
        statistics = {
            k.removeprefix("statistics."): v for k, v in state.items() if k.startswith("statistics.")
        }
        number = sum(value.numel() for value in trained_parameters(point.model).values())
        mean, variance, deviations = (state[name] for name in ("mean", "variance", "deviations"))
        if mean.shape != (number,) or variance.shape != (number,) or deviations.shape[1:] != (number,):
            raise ValueError(f"its moments are not those of the {number} weights that this network learns")
        own = dict(point.model.named_buffers())
        if any(name not in own or value.shape[1:] != own[name].shape for name, value in statistics.items()):
            raise ValueError("its statistics do not fit the network")
        made = cls(
            point.model,
            point.likelihood,
            mean,
            variance,
            deviations,
            float(settings["scale"]),
            point.history,
            statistics,
            int(settings["fixed_seed"]),
        )
        if made.size and not torch.allclose(made.state()["witnesses"], state["witnesses"]):
            raise ValueError(
                "this version of torch draws other random numbers than the one that wrote it, so its BatchNorm statistics do not "
                "belong to these draws; fit it anew"
            )
        return made
