"""Studies with a row for each method: one variant for each candidate of :mod:`flowbnn.compare.candidates`, all trained alike."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import nn

from flowbnn.compare.candidates import CANDIDATES, Candidate, find_candidates
from flowbnn.compare.measurement import sample_count
from flowbnn.compare.results import SeedResults
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.methods import Method, Posterior
from flowbnn.options import Count, Positive, options
from flowbnn_studies.runner.study import Job, Study, Variant

CHECKPOINT_OPTIONS = ("checkpoint", "checkpoint_every", "resume")


@options(kw_only=True)
class MethodSettings:
    """Settings that all studies of methods share.

    Args:
        batch: Number of examples in a step.
        epochs, lr: Epochs and learning rate of the training.
        prior: Standard deviation of the prior of the weights, for methods that have one.
        samples: Number of networks averaged in a prediction.
        methods: Keys of :data:`~flowbnn.compare.candidates.CANDIDATES`; empty for all.
    """

    batch: Count = 64
    epochs: Count = 30
    lr: Positive = 2e-3
    prior: Positive = 1.0
    samples: Count = 64
    methods: tuple[str, ...] = ()

    def relevant(self, variant: str) -> dict[str, Any]:
        """Returns the settings that the result of one method depends on: all but the list of methods."""
        return {name: value for name, value in asdict(self).items() if name != "methods"}


def shuffled_loader(
    data: Sequence[torch.Tensor], batch: int, seed: int, device: str = "cpu", **options: Any
) -> TensorLoader:
    """Returns shuffled batches in an order that the seed determines.

    Args:
        data: Tensors of the examples.
        batch: Number of examples in a batch.
        seed: Seed of the order.
        device: Device of the data, on which the order is drawn.
        options: Further options of :class:`TensorLoader`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return TensorLoader(*data, batch_size=batch, shuffle=True, generator=generator, **options)


def predict(posterior: Posterior, inputs: torch.Tensor, samples: int) -> Any:
    """Returns the predictive distribution on the CPU, with the same draws for all inputs and at every call."""
    return posterior.predict(inputs, sample_count(posterior, samples), seed=0).cpu()


class MethodStudy(Study):
    """Base class of studies with a row for each method. Subclasses define ``evaluate`` instead of ``train``, and ``findings``.

    The settings are :class:`MethodSettings`. ``common`` has the options of all methods, ``specific`` those of single methods.
    """

    seeds = 3
    common: ClassVar[Mapping[str, Any]] = {}
    specific: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def candidates(self, settings: Any) -> list[Candidate]:
        """Returns the methods of this run."""
        return find_candidates(settings.methods) if settings.methods else list(CANDIDATES)

    def variants(self, settings: Any) -> tuple[Variant, ...]:
        return tuple(
            Variant(candidate.key, candidate.label, candidate.method_name, cost=candidate.cost)
            for candidate in self.candidates(settings)
        )

    def train(self, job: Job) -> dict[str, Any]:
        candidate = next(entry for entry in self.candidates(job.settings) if entry.key == job.variant)
        try:
            return self.evaluate(job, candidate)
        except FlowBNNError as error:  # the other methods are still evaluated
            return {"values": {}, "refused": str(error)}

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        """Trains and evaluates one method with one seed. Returns plain values, with the metrics under ``values``."""
        raise NotImplementedError

    def fit(
        self, job: Job, candidate: Candidate, network: nn.Module, loader: Any, validation: Any, **options: Any
    ) -> Posterior:
        """Fits the method to a copy of the network. With ``resume`` an interrupted training continues."""
        method, fit_options = self.make_method(job, candidate, len(loader))
        # evaluating it would cost time at every epoch
        held_out = validation if candidate.needs_held_out else None
        return method.fit(network, loader, validation=held_out, **options, **fit_options)

    def make_method(self, job: Job, candidate: Candidate, steps: int) -> tuple[Method, dict[str, Any]]:
        """Returns the method and the options of its fit: seed, checkpoints, device."""
        s = job.settings
        common = {"epochs": s.epochs, "lr": s.lr, "prior_scale": s.prior, **self.common}
        method = candidate.make(self.specific.get(candidate.key), batches=steps, **common)
        options = job.options(s.epochs, steps)
        return method, job.short_options(**{name: options[name] for name in CHECKPOINT_OPTIONS})

    def evaluated_candidates(self, settings: Any, parts: SeedResults) -> list[Candidate]:
        """Returns the methods that have numbers.

        Raises:
            FlowBNNError: No method could be fitted. The message has the reason of the first.
        """
        candidates = [
            candidate
            for candidate in self.candidates(settings)
            if any(part["values"] for part in parts.of(candidate.key))
        ]
        reasons = [part["refused"] for part in parts.content.values() if part.get("refused")]
        if not candidates and reasons:
            raise FlowBNNError(f"no method could be fitted: {reasons[0]}", kind="methods")
        return candidates

    def warning_notes(self, settings: Any, parts: SeedResults) -> list[str]:
        """Returns the reasons why methods are missing, and the warnings of the others."""
        labels = self.row_labels(settings)
        reasons = {key: part["refused"] for (key, _), part in parts.content.items() if part.get("refused")}
        lines = [
            f"{labels[key]} could not be fitted: {reason.rstrip('.')}." for key, reason in reasons.items()
        ]
        return lines + super().warning_notes(settings, parts)
