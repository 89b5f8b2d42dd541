"""The comparison of all methods on a registered network and data set, resumable method by method."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.data import TensorLoader
from flowbnn_studies.comparing.findings import conclude
from flowbnn_studies.comparing.measuring import measure, warm_up
from flowbnn_studies.comparing.registry import Bundle, count_weights, make_network, prepare_data
from flowbnn_studies.runner.base import Findings, Parts
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.lineup import PLAIN, Rival, find_rivals
from flowbnn_studies.runner.rivalry import RivalSettings, RivalStudy

__all__ = ["CompareStudy", "Settings"]


@dataclass(frozen=True)
class Settings(RivalSettings):
    """What the comparison depends on.

    Args:
        network: ``mlp``, ``small-conv``, ``lenet`` or ``vgg16``.
        data: ``digits``, ``clusters``, ``mnist``, ``fashion-mnist`` or ``cifar10``.
        batch: examples in a step.
        epochs, lr: of the training.
        prior: standard deviation of the prior of the weights, where a method has one.
        samples: networks averaged in a prediction.
        train, test: at most that many examples; 0 for all.
        methods: keys of the methods; none for all. The plain network is always there.
    """

    network: str = "lenet"
    data: str = "digits"
    batch: int = 64
    epochs: int = 30
    lr: float = 2e-3
    prior: float = 1.0
    samples: int = 64
    train: int = 0
    test: int = 0


class CompareStudy(RivalStudy):
    """On this network and this data, which method should I use, and what does it cost?"""

    name = "compare"
    title = "Which method should I use?"
    description = (
        "all methods on a network and data of your choice, with what they cost; LeNet on digits unless told"
    )
    question = "On this network and this data, which method should one use, and what does it cost?"
    source = "no published counterpart: the rivals are those of documents 001 and 002"
    seeds = 1
    settings = Settings
    specific: ClassVar[dict[str, dict[str, Any]]] = {  # chains as long as a comparison of minutes allows
        "hmc": {"samples": 30, "warmup": 30, "chains": 1, "steps": 6},
        "nuts": {"samples": 25, "warmup": 25, "chains": 1, "max_depth": 3},
    }
    quick: ClassVar[dict[str, Any]] = {"epochs": 2, "samples": 4, "train": 128, "test": 64}

    def folder(self, settings: Settings) -> str:
        return f"{self.name}-{settings.network}-{settings.data}"

    def heading(self, settings: Settings) -> str:
        return f"Which method for {settings.network} on {settings.data}?"

    def rivals(self, settings: Settings) -> list[Rival]:
        if not settings.methods:
            return super().rivals(settings)
        return find_rivals([PLAIN, *settings.methods])

    def judged(self, job: Job, rival: Rival) -> dict[str, Any]:
        s: Settings = job.settings
        bundle = prepare_data(s.network, s.data, job.seed, s.train, s.test)
        torch.manual_seed(job.seed)
        network = make_network(s.network, bundle)
        weights = count_weights(network)
        if rival.most_weights is not None and weights > rival.most_weights:
            return {"values": {}, "refused": f"with {weights:,} weights it would take hours"}
        loader = TensorLoader(
            *bundle.train,
            batch_size=s.batch,
            shuffle=True,
            generator=torch.Generator().manual_seed(job.seed),
        )
        warm_up(network, loader)
        method, options = self.prepared(job, rival, len(loader), prior_scale=s.prior)
        held_out = TensorLoader(*bundle.validation, batch_size=s.batch) if rival.held_out else None
        content = measure(
            method,
            network,
            loader,
            _batches(*bundle.test),
            novel=_batches(bundle.novel),
            validation=held_out,
            samples=s.samples,
            **options,
        )
        return {**content, "method": repr(method), "weights": weights, "sizes": _sizes(bundle)}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        chosen = self.shown(settings, parts)
        known = [part for rival in chosen for part in parts.of(rival.key)]
        notes = []
        if known:
            sizes = known[0]["sizes"]
            notes.append(
                f"{settings.network} has {known[0]['weights']:,} weights; {sizes['train']} examples to learn from, "
                f"{sizes['test']} to test on, and as novel inputs {sizes['novel']} of {sizes['strange']}. "
                f"{settings.epochs} epochs, batches of {settings.batch}, a learning rate of {settings.lr:g}; up to "
                f"{settings.samples} networks in a prediction. No setting was tuned for a method: a row shows what it gives as it "
                "comes, and the Markov chains are as short as a comparison of minutes allows."
            )
            notes.append(
                "Times are processor seconds of one thread, so that what else runs on the machine counts little; the time of "
                "a prediction is the least of up to three."
            )
        notes += self.refusals(settings, parts)
        return conclude(parts, chosen, notes)


def _batches(*tensors: Tensor) -> TensorLoader:
    return TensorLoader(*tensors, batch_size=512)


def _sizes(bundle: Bundle) -> dict[str, Any]:
    return {
        "train": len(bundle.train[0]),
        "test": len(bundle.test[0]),
        "novel": len(bundle.novel),
        "strange": bundle.strange,
    }
