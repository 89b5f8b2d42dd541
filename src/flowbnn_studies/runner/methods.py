"""Studies with a row for each method: one variant for each candidate of :mod:`flowbnn.compare.candidates`, all trained alike."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import nn

from flowbnn.compare.candidates import CANDIDATES, Candidate, find_candidates, sample_count
from flowbnn.compare.results import Parts
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.methods import Method, Posterior
from flowbnn.options import Count, Positive, options
from flowbnn_studies.runner.study import Job, Study, Variant

KEPT = ("checkpoint", "checkpoint_every", "resume")


@options(kw_only=True)
class MethodSettings:
    """The settings that every study of methods has.

    Args:
        batch: examples in a step.
        epochs, lr: of the training.
        prior: standard deviation of the prior of the weights, where a method has one.
        samples: networks averaged in a prediction.
        methods: keys of :data:`~flowbnn.compare.candidates.CANDIDATES`; none for all.
    """

    batch: Count = 64
    epochs: Count = 30
    lr: Positive = 2e-3
    prior: Positive = 1.0
    samples: Count = 64
    methods: tuple[str, ...] = ()

    def relevant(self, variant: str) -> dict[str, Any]:
        """What one method's result depends on: all settings but the list of the methods."""
        return {name: value for name, value in asdict(self).items() if name != "methods"}


def shuffled(
    data: Sequence[torch.Tensor], batch: int, seed: int, device: str = "cpu", **options: Any
) -> TensorLoader:
    """Shuffled batches, in an order that the seed determines, drawn on the device where the data lie."""
    generator = torch.Generator(device).manual_seed(seed)
    return TensorLoader(*data, batch_size=batch, shuffle=True, generator=generator, **options)


def predict(posterior: Posterior, inputs: torch.Tensor, samples: int) -> Any:
    """The predictive on the CPU, with the same draws for all inputs and at every call."""
    return posterior.predict(inputs, sample_count(posterior, samples), seed=0).cpu()


class MethodStudy(Study):
    """A study with a row for each method. Subclasses define ``evaluate`` instead of ``train``, and ``findings``.

    Their settings are :class:`MethodSettings`. What all methods get beyond that stands in ``common``, what single ones need in
    ``specific``.
    """

    seeds = 3
    common: ClassVar[Mapping[str, Any]] = {}
    specific: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def candidates(self, settings: Any) -> list[Candidate]:
        """The methods of this run."""
        return find_candidates(settings.methods) if settings.methods else list(CANDIDATES)

    def variants(self, settings: Any) -> tuple[Variant, ...]:
        return tuple(
            Variant(one.key, one.label, one.method_name, cost=one.cost) for one in self.candidates(settings)
        )

    def train(self, job: Job) -> dict[str, Any]:
        candidate = next(one for one in self.candidates(job.settings) if one.key == job.variant)
        try:
            return self.evaluate(job, candidate)
        except FlowBNNError as error:  # one method that cannot serve a network does not spoil the others
            return {"values": {}, "refused": str(error)}

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        """Train and evaluate one method with one seed; plain values, the metrics under ``values``."""
        raise NotImplementedError

    def fit(
        self, job: Job, candidate: Candidate, network: nn.Module, loader: Any, validation: Any, **options: Any
    ) -> Posterior:
        """The method's posterior of a copy of the network; with ``resume`` an interrupted training goes on."""
        method, more = self.prepared(job, candidate, len(loader))
        held_out = validation if candidate.held_out else None  # it would cost time at every epoch
        return method.fit(network, loader, validation=held_out, **options, **more)

    def prepared(self, job: Job, candidate: Candidate, steps: int) -> tuple[Method, dict[str, Any]]:
        """The method, and the options of its run: seed, checkpoints, device."""
        s = job.settings
        common = {"epochs": s.epochs, "lr": s.lr, "prior_scale": s.prior, **self.common}
        method = candidate.make(self.specific.get(candidate.key), batches=steps, **common)
        options = job.options(s.epochs, steps)
        return method, job.brief(**{name: options[name] for name in KEPT})

    def measured(self, settings: Any, parts: Parts) -> list[Candidate]:
        """The methods that have numbers; where none has, the reason is raised."""
        known = [
            one for one in self.candidates(settings) if any(part["values"] for part in parts.of(one.key))
        ]
        reasons = [part["refused"] for part in parts.content.values() if part.get("refused")]
        if not known and reasons:
            raise FlowBNNError(f"no method could be tried: {reasons[0]}")
        return known

    def shortfalls(self, settings: Any, parts: Parts) -> list[str]:
        """Why methods are not in the table, and what the others warned about."""
        labels = self.shown(settings)
        reasons = {key: part["refused"] for (key, _), part in parts.content.items() if part.get("refused")}
        lines = [f"{labels[key]} is not in the table: {why.rstrip('.')}." for key, why in reasons.items()]
        return lines + super().shortfalls(settings, parts)
