"""What studies that set all methods against each other share: one variant for each method, all trained alike."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.methods import MemberPosterior, Method, Posterior
from flowbnn.methods.base import LikelihoodName
from flowbnn_studies.runner.base import Metric, Parts, Study, Variant
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.lineup import Rival, find_rivals, rivals

__all__ = ["RivalSettings", "RivalStudy", "best_by", "samples_of", "words"]

OPTIONS = ("seed", "accelerator", "precision", "progress", "checkpoint", "checkpoint_every", "resume")


@dataclass(frozen=True, kw_only=True)
class RivalSettings:
    """What every study of methods can be told.

    Args:
        methods: keys of :mod:`~flowbnn_studies.runner.lineup`; none for all.
    """

    methods: tuple[str, ...] = ()

    def relevant(self, variant: str) -> dict[str, Any]:
        """What one method's result depends on: all settings but the list of the methods."""
        return {name: value for name, value in asdict(self).items() if name != "methods"}


def samples_of(posterior: Posterior, wanted: int) -> int:
    """Networks to average: one where there is but one, each once where there are few, else what is wanted."""
    if posterior.default_samples == 1 or isinstance(posterior, MemberPosterior):
        return min(wanted, posterior.default_samples)
    return wanted


class RivalStudy(Study):
    """A study with a row for each method. Subclasses define ``judged`` instead of ``train``, and ``findings``.

    Their settings are :class:`RivalSettings` with ``epochs`` and ``lr``. What single methods need beyond that stands in ``specific``.
    """

    partial = True
    keeps_networks = False
    seeds = 3
    without: ClassVar[tuple[str, ...]] = ()
    specific: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def rivals(self, settings: Any) -> list[Rival]:
        """The methods of this run."""
        return find_rivals(settings.methods) if settings.methods else rivals(self.without)

    def variants(self, settings: Any) -> tuple[Variant, ...]:
        return tuple(Variant(rival.key, rival.label, cost=rival.cost) for rival in self.rivals(settings))

    def train(self, job: Job) -> dict[str, Any]:
        rival = next(rival for rival in self.rivals(job.settings) if rival.key == job.variant)
        try:
            return self.judged(job, rival)
        except FlowBNNError as error:
            # one method that cannot serve a network does not spoil the comparison of the others
            return {"values": {}, "refused": str(error)}

    def judged(self, job: Job, rival: Rival) -> dict[str, Any]:
        """Train and judge one method with one seed; plain values, the metrics under ``values``."""
        raise NotImplementedError(f"{type(self).__name__} must define judged(job, rival)")

    def fit(
        self,
        job: Job,
        rival: Rival,
        network: nn.Module,
        loader: Any,
        *,
        likelihood: LikelihoodName = "auto",
        validation: Any = None,
        **settings: Any,
    ) -> Posterior:
        """The method's posterior of a copy of the network; with ``resume`` a training that was cut goes on."""
        method, options = self.prepared(job, rival, len(loader), **settings)
        held_out = validation if rival.held_out else None  # measured at every epoch, which costs time
        return method.fit(network, loader, likelihood=likelihood, validation=held_out, **options)

    def prepared(self, job: Job, rival: Rival, steps: int, **settings: Any) -> tuple[Method, dict[str, Any]]:
        """The method, and the options of its run: seed, checkpoints, device."""
        s = job.settings
        common = {
            "epochs": s.epochs,
            "lr": s.lr,
            "optimizer": partial(torch.optim.Adam, fused=True) if job.accelerator == "cpu" else None,
            **settings,
        }
        method = rival.make(self.specific.get(rival.key), batches=steps, **common)
        options = job.options(s.epochs, steps)
        return method, {name: value for name, value in options.items() if name in OPTIONS}

    def shown(self, settings: Any, parts: Parts) -> list[Rival]:
        """The methods that have numbers; where none has, the reason is told."""
        found = [r for r in self.rivals(settings) if any(part["values"] for part in parts.of(r.key))]
        reasons = [part["refused"] for part in parts.content.values() if part.get("refused")]
        if not found and reasons:
            raise FlowBNNError(f"no method could be tried: {reasons[0]}")
        return found

    def rows(self, settings: Any, parts: Parts, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
        """A row for each method that has numbers, in the colour of its family."""
        return [
            {**parts.row(Variant(rival.key, rival.label), metrics), "colour": rival.colour}
            for rival in self.shown(settings, parts)
        ]

    def refusals(self, settings: Any, parts: Parts) -> list[str]:
        """Why methods are not in the table, and what the others warned of."""
        found = []
        for rival in self.rivals(settings):
            reasons = dict.fromkeys(part["refused"] for part in parts.of(rival.key) if part.get("refused"))
            found += [f"{rival.label} is not in the table: {reason}." for reason in reasons]
        return [*found, *parts.warnings([v for v in self.variants(settings) if parts.of(v.key)])]


def best_by(parts: Parts, chosen: Sequence[Rival], metric: str, higher: bool = False) -> list[Rival]:
    """The methods that have a metric, the best first."""
    having = [rival for rival in chosen if parts.mean(rival.key, metric) == parts.mean(rival.key, metric)]
    return sorted(having, key=lambda rival: parts.mean(rival.key, metric), reverse=higher)


def words(parts: Parts, chosen: Sequence[Rival], metric: str, form: str = ".3f") -> str:
    """Methods with their means, for a sentence."""
    return ", ".join(f"{rival.label} {parts.mean(rival.key, metric):{form}}" for rival in chosen)
