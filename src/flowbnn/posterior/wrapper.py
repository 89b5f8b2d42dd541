"""Base class for posteriors that change the predictions of an inner posterior."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowbnn.batches import device_of
from flowbnn.options import checked
from flowbnn.posterior.base import Posterior, Prediction, load_posterior
from flowbnn.posterior.files import (
    check_finite_tensors,
    open_posterior_file,
    rewrap_load_errors,
    select_prefix,
)
from flowbnn.training.storage import NestedTensorFile, TensorFile


class WrappedPosterior(Posterior):
    """Base class for posteriors that change the predictions of an inner posterior, of any method.

    Outputs, draws and densities are those of the inner posterior. Subclasses change the predictive distribution. For saving they
    define ``settings``, ``state`` and :meth:`from_inner`.

    Args:
        posterior: Inner posterior.
    """

    def __init__(self, posterior: Posterior) -> None:
        super().__init__(posterior.model, posterior.likelihood, posterior.history)
        self.posterior, self.cache = posterior, posterior.cache
        self.default_samples = posterior.default_samples
        self.supports_compile, self.requires_shared = posterior.supports_compile, posterior.requires_shared

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns outputs of the inner posterior."""
        return self.posterior.outputs(inputs, samples, prediction)

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """Returns draws of the inner posterior."""
        return self.posterior.draws(samples, seed)

    def log_prob(self, values: Any) -> Tensor:
        """Returns log-densities of the inner posterior, because a wrapper changes predictions, not weights."""
        return self.posterior.log_prob(values)

    def document(self) -> dict[str, Any]:
        return {**super().document(), "inner": self.posterior.document()}

    def tensors(self) -> dict[str, Tensor]:
        inner = {f"inner.{name}": value for name, value in self.posterior.tensors().items()}
        return inner | {f"posterior.{name}": value for name, value in self.state().items()}

    @classmethod
    def from_inner(
        cls, posterior: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "WrappedPosterior":
        """Returns the posterior that was saved in a file. It may raise any exception if the file is invalid.

        Args:
            posterior: Inner posterior.
            state: Tensors that ``state`` returned.
            settings: Values that ``settings`` returned.
        """
        return cls(posterior, **settings, **state)

    @classmethod
    @checked
    def load(cls, path: str | Path | TensorFile, network: nn.Module) -> Posterior:
        """Loads a saved posterior into a copy of ``network``."""
        file = open_posterior_file(path, network, [cls.kind])
        with rewrap_load_errors(file):
            settings, inner_document = dict(file.document["settings"]), dict(file.document["inner"])
        inner = load_posterior(NestedTensorFile(file, "inner.", inner_document), network)
        device = device_of(inner.model)
        check_finite_tensors(file)
        with rewrap_load_errors(file):
            tensors = select_prefix(file.tensors, "posterior")
            state = {name: value.to(device) for name, value in tensors.items()}
            posterior = cls.from_inner(inner, state, settings)
        file.check_tensors(posterior.tensors())
        posterior.read_calibration(file)
        return posterior
