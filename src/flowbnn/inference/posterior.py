r"""The contract of a posterior: what every method's ``fit`` returns, and all that evaluation needs.

A posterior gives samples of outputs, ``[S, B, ...]``; everything else (the predictive, the uncertainties, the metrics) is made
of those samples by the same code for every method. To write one, subclass :class:`Posterior` and define ``outputs``.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import call, move, rows, split_batch, take
from flowbnn.inference.sampling import device_of, dtype_of, evaluating, max_rows
from flowbnn.layers import noise_layers
from flowbnn.likelihoods import Likelihood, make_likelihood
from flowbnn.training import History, check_architecture, load_tensors, save_tensors, track

__all__ = ["PointPosterior", "Posterior"]


class Posterior:
    """Networks that agree with the data, and how their outputs speak of targets.

    Args:
        model: the network.
        likelihood: categorical, Bernoulli or Gaussian.
        history: the training record.
    """

    kind: ClassVar[str] = "posterior"
    default_samples: ClassVar[int] = 128
    parts: ClassVar[tuple[str, ...]] = ("likelihood", "history")

    def __init__(self, model: nn.Module, likelihood: Likelihood, history: History | None = None) -> None:
        self.model, self.likelihood, self.history = model, likelihood, history or History()

    def __repr__(self) -> str:
        noisy = len(noise_layers(self.model))
        layers = f", {noisy} layers with noise" if noisy else ""
        return f"{type(self).__name__}({type(self.model).__name__}{layers}, {self.likelihood!r}, {self.history.epochs} epochs)"

    def outputs(
        self, inputs: Any, samples: int, *, shared: bool, seed: int | None, max_batch: int | None
    ) -> Tensor:
        """Raw outputs ``[samples, batch, ...]`` for one batch of inputs."""
        raise NotImplementedError(f"{type(self).__name__} must define outputs(inputs, samples, ...)")

    def predict(
        self,
        inputs: Any,
        samples: int | None = None,
        *,
        shared: bool = True,
        seed: int | None = None,
        max_batch: int | None = None,
        progress: bool = True,
    ) -> Any:
        """The predictive distribution for a tensor of inputs, or for everything a loader gives.

        Args:
            inputs: a tensor (or tuple or mapping of tensors) with the examples first, or a loader of ``(inputs, targets)``
                or of bare inputs.
            samples: networks to average.
            shared: the same draws for all inputs, which are then functions: cheaper, and a prediction does not depend on what
                else is in its batch. False draws anew for every example, as document 000 does.
            seed: of the draws; the same seed gives the same numbers.
            max_batch: rows in one pass; None measures what the device holds.
            progress: show a bar over a loader, on a terminal.

        Returns:
            A :class:`~flowbnn.predictive.CategoricalPredictive` or :class:`~flowbnn.predictive.GaussianPredictive`.
        """
        return self.predict_with_targets(
            inputs, samples, shared=shared, seed=seed, max_batch=max_batch, progress=progress
        )[0]

    def predict_with_targets(
        self,
        inputs: Any,
        samples: int | None = None,
        *,
        shared: bool = True,
        seed: int | None = None,
        max_batch: int | None = None,
        progress: bool = True,
    ) -> tuple[Any, Tensor | None]:
        """As :meth:`predict`, with the targets the loader gave, in the same order."""
        samples = self.default_samples if samples is None else samples
        if not isinstance(samples, int) or samples < 1:
            raise FlowBNNError(f"samples is a whole number of at least 1, not {samples}")
        seed = int(torch.randint(2**31 - 1, ())) if seed is None else seed
        options = {"shared": shared, "seed": seed, "max_batch": max_batch}
        if _is_batch(inputs):
            _check_finite(inputs)
            with evaluating(self.likelihood):
                return self.likelihood.predictive(self.outputs(inputs, samples, **options)), None  # type: ignore[arg-type]
        if not hasattr(inputs, "__iter__"):
            raise FlowBNNError(f"predict takes a tensor of inputs or a loader, not a {type(inputs).__name__}")
        outputs, targets = [], []
        for index, batch in enumerate(track(inputs, "predicting", progress)):
            some, truth = split_batch(batch)
            _check_finite(some)
            if not shared:
                options["seed"] = seed + index  # every batch its own draws
            outputs.append(self.outputs(some, samples, **options).cpu())  # type: ignore[arg-type]
            if truth is not None:
                targets.append(truth.cpu())
        if not outputs:
            raise FlowBNNError("the loader is empty: there is nothing to predict")
        with evaluating(self.likelihood):
            home = next(iter(self.likelihood.parameters()), torch.empty(0)).device
            predictive = self.likelihood.predictive(torch.cat(outputs, 1).to(home))
        return predictive, self.likelihood.canonical(torch.cat(targets)) if targets else None

    def document(self) -> dict[str, Any]:
        """What is saved beside the tensors."""
        return {
            "kind": self.kind,
            "likelihood": self.likelihood.to_dict(),
            "history": self.history.to_dict(),
        }

    def save(self, path: str | Path) -> Path:
        """Write the posterior to one safetensors file, atomically; plain tensors and JSON, nothing that can run code."""
        tensors = {f"network.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"likelihood.{name}": value for name, value in self.likelihood.state_dict().items()}
        return save_tensors(path, tensors, self.document())

    @classmethod
    def read(cls, path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and document of a saved posterior of this kind."""
        tensors, document = load_tensors(path)
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind != cls.kind:
            raise FlowBNNError(f"'{path}' holds a {kind or 'file of another kind'}, not a {cls.kind}")
        for name in cls.parts:
            if not isinstance(document.get(name), dict):
                raise FlowBNNError(f"'{path}' is damaged: it has no {name}")
        for name, value in tensors.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise FlowBNNError(f"'{path}' is damaged: '{name}' holds NaN or infinity")
        return tensors, document

    @classmethod
    def restore(
        cls, model: nn.Module, tensors: dict[str, Tensor], document: dict[str, Any], path: Any
    ) -> "Posterior":
        """Fill ``model`` with stored tensors; it stays untouched if they do not fit."""
        try:
            likelihood = make_likelihood(document["likelihood"])
            history = History.from_dict(document["history"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FlowBNNError(f"'{path}' is damaged: {error}") from None
        for prefix, target in (("network.", model), ("likelihood.", likelihood)):
            given = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            check_architecture(target, given, path)
        for prefix, target in (("network.", model), ("likelihood.", likelihood)):
            target.load_state_dict(
                {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            )
        return cls(model, likelihood, history)


class PointPosterior(Posterior):
    """One network, taken at its word: the plain network behind the same interface, so that it is judged by the same code."""

    kind = "point"
    default_samples = 1

    def outputs(
        self, inputs: Any, samples: int, *, shared: bool, seed: int | None, max_batch: int | None
    ) -> Tensor:
        inputs = move(inputs, device_of(self.model), dtype_of(self.model))
        total = rows(inputs)
        if total == 0:
            raise FlowBNNError("there is nothing to predict: the batch holds no rows")
        limit = max_batch or max_rows(self.model, inputs)
        with evaluating(self.model):
            parts = [call(self.model, take(inputs, i, i + limit)) for i in range(0, total, limit)]
        return torch.cat(parts).unsqueeze(0).expand(samples, *(-1,) * parts[0].ndim)

    @classmethod
    def load(cls, path: str | Path, network: nn.Module) -> "Posterior":
        """Read a saved posterior into ``network``."""
        return cls.restore(network, *cls.read(path), path)


def _is_batch(inputs: Any) -> bool:
    if isinstance(inputs, Tensor) or hasattr(inputs, "keys"):
        return True
    return isinstance(inputs, tuple) and bool(inputs) and all(isinstance(part, Tensor) for part in inputs)


def _check_finite(inputs: Any) -> None:
    tensors = (
        [inputs]
        if isinstance(inputs, Tensor)
        else list(inputs.values() if hasattr(inputs, "keys") else inputs)
    )
    for tensor in tensors:
        if (
            isinstance(tensor, Tensor)
            and tensor.is_floating_point()
            and not bool(torch.isfinite(tensor).all())
        ):
            bad = (~torch.isfinite(tensor)).flatten(1).any(1) if tensor.ndim > 1 else ~torch.isfinite(tensor)
            raise FlowBNNError(
                f"the inputs hold NaN or infinity in {int(bad.sum())} of {len(bad)} rows; clean them before predicting"
            )
