"""Any posterior with its predictions made softer or sharper by one number."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import call
from flowbnn.inference.loading import load_posterior
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.stored import Stored
from flowbnn.likelihoods import Gaussian
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive

__all__ = ["TemperedPosterior"]


class TemperedPosterior(Posterior):
    r"""A posterior whose predictions are tempered by :math:`T`.

    Classes: the logits of every sample are divided by :math:`T`. Regression: the predictive is scaled about its mean, so that its
    standard deviation is :math:`T` times what it was. Above 1 the posterior was too sure.

    Args:
        posterior: the one within, of any method.
        temperature: :math:`T`.
    """

    kind: ClassVar[str] = "tempered"
    parts = ("likelihood", "history", "within")

    def __init__(self, posterior: Posterior, temperature: float) -> None:
        if not isinstance(posterior, Posterior):
            raise FlowBNNError(f"temperature scaling takes a posterior, not a {type(posterior).__name__}")
        if not 0.0 < temperature < float("inf"):
            raise FlowBNNError(f"a temperature is a number above 0, not {temperature}")
        super().__init__(posterior.model, posterior.likelihood, posterior.history)
        self.posterior, self.temperature = posterior, float(temperature)
        self.default_samples = posterior.default_samples

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.posterior!r}, temperature={self.temperature:.4g})"

    def outputs(
        self, inputs: Any, samples: int, *, shared: bool, seed: int | None, max_batch: int | None
    ) -> Tensor:
        """Raw outputs as those of the posterior within."""
        return self.posterior.outputs(inputs, samples, shared=shared, seed=seed, max_batch=max_batch)

    def drawing(self, samples: int, **options: Any) -> AbstractContextManager[Any]:
        return self.posterior.drawing(samples, **options)

    def _predictive(self, outputs: Tensor, spent: Tensor | None = None) -> Any:
        return tempered(self.posterior._predictive(outputs, spent), self.temperature, spent)

    def sample(self, seed: int | None = None) -> nn.Module:
        """One network of the posterior within; of classes, its logits are divided by the temperature."""
        network = self.posterior.sample(seed)
        return network if isinstance(self.likelihood, Gaussian) else Divided(network, self.temperature).eval()

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """Of the posterior within."""
        return self.posterior.draws(samples, seed)

    def log_prob(self, values: Any) -> Tensor:
        """Of the posterior within: the temperature changes predictions, not weights."""
        return self.posterior.log_prob(values)

    def document(self) -> dict[str, Any]:
        return {**super().document(), "temperature": self.temperature, "within": self.posterior.document()}

    def tensors(self) -> dict[str, Tensor]:
        return self.posterior.tensors()

    @classmethod
    def load(cls, path: str | Path | Stored, network: nn.Module) -> "Posterior":
        """Read a saved posterior into ``network``, which stays untouched if it does not fit."""
        tensors, document = cls.read(path)
        temperature = document.get("temperature")
        if not isinstance(temperature, int | float) or not 0.0 < temperature < float("inf"):
            raise FlowBNNError(f"'{path}' is damaged: its temperature is {temperature!r:.40}")
        return cls(load_posterior(Stored(path, tensors, document["within"]), network), temperature)


class Divided(nn.Module):
    """A network whose outputs are divided by a temperature."""

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return call(self.network, named or inputs) / self.temperature


def tempered(plain: Any, temperature: Any, spent: Tensor | None = None) -> Any:
    """A predictive at a temperature, a number or a tensor of one."""
    spent = None if spent is None else plain.samples_spent
    if isinstance(plain, CategoricalPredictive):  # log-probabilities are logits
        return CategoricalPredictive(plain.log_samples / temperature, spent)
    if not isinstance(plain, GaussianPredictive):
        raise FlowBNNError(
            f"temperature scaling is for classes and numbers, not for a {type(plain).__name__}"
        )
    means = plain.mean + temperature * (plain.samples - plain.mean)
    return GaussianPredictive(means, temperature**2 * plain.sample_variances, spent)
