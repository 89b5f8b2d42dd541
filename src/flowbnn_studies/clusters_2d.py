"""Two classes on a plane and a ring of far-away inputs: which methods know that they do not know?"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import CLASSIFICATION, Metric, Parts, figure, reliability_figure
from flowbnn.data import TensorLoader, clusters, ring
from flowbnn.methods import Posterior
from flowbnn.metrics import novelty_auroc, reliability
from flowbnn.models import MLP
from flowbnn.options import Count, Positive, options
from flowbnn_studies.runner.findings import pluralize, ranking, round_values
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, predict, shuffled_loader
from flowbnn_studies.runner.study import Findings, Job

# fmt: off
METRICS = (
    *CLASSIFICATION[:3],
    Metric("auroc", "Novelty AUROC", "higher", ".3f",
           "Probability that a point of the ring has a higher predictive entropy than a test point; 0.5 is guessing, below it the "
           "method is more certain of the ring than of what it knows."),
    Metric("auroc_mi", "AUROC by MI", "higher", ".3f",
           "As novelty AUROC, by the mutual information of label and network; a single network has none."),
    Metric("ring_entropy", "Entropy on the ring", "higher", ".3f",
           f"Mean predictive entropy on the ring, in nats; to know nothing is log 2 = {math.log(2):.3f}."),
    Metric("ring_confidence", "Confidence on the ring", "lower", ".3f",
           "Mean probability of the likelier class on the ring; to know nothing is 0.5."),
)
# fmt: on


@options
class Settings(MethodSettings):
    """What the study depends on, besides :class:`MethodSettings`.

    Args:
        spread: of each blob.
        train, test: number of points.
        radius: of the ring; the blobs lie within 6 of the origin.
        ring: points on it.
        hidden: widths of the network's hidden layers.
        grid: points along a side of the maps, which reach a third beyond the ring.
    """

    spread: Positive = 1.2
    train: Count = 400
    test: Count = 4000
    radius: Positive = 18.0
    ring: Count = 1000
    hidden: tuple[int, ...] = (32, 32)
    batch: Count = 100
    epochs: Count = 150
    lr: Positive = 1e-2
    samples: Count = 128
    grid: Count = 65


class Clusters2d(MethodStudy):
    name = "clusters-2d"
    title = "Two classes and a ring of inputs from nowhere"
    description = (
        "two classes on a plane and a ring of far-away inputs: which methods know that they do not know"
    )
    question = (
        "A network learns two classes from four blobs. Asked about points on a wide ring around them, where there is no data, "
        "which methods say that they do not know?"
    )
    source = "the blobs of Xiong's report, figure 3; novelty as in Ravenda's report, section 1.6"
    settings = Settings
    specific: ClassVar[dict[str, dict[str, Any]]] = {
        "hmc": {"samples": 60, "warmup": 60, "chains": 2, "steps": 32},
        "nuts": {"samples": 40, "warmup": 40, "chains": 2, "max_depth": 5},
    }
    quick: ClassVar[dict[str, Any]] = {"epochs": 5, "test": 200, "ring": 100, "hidden": (8,), "samples": 8, "grid": 13}  # fmt: skip

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        s: Settings = job.settings
        network = MLP(2, s.hidden, 2)
        generator = torch.Generator().manual_seed(1000 + job.seed)
        train = clusters(s.train, s.spread, generator)
        test = clusters(s.test, s.spread, generator)
        held_out = clusters(max(50, s.train // 4), s.spread, generator)
        far = ring(s.ring, s.radius, generator)
        validation = TensorLoader(*held_out, batch_size=s.train)
        posterior = self.fit(job, candidate, network, shuffled_loader(train, s.batch, job.seed), validation)
        known, novel = predict(posterior, test[0], s.samples), predict(posterior, far, s.samples)
        values = known.evaluate(test[1]) | {
            "auroc": novelty_auroc(known.entropy, novel.entropy),
            "ring_entropy": float(novel.entropy.mean()),
            "ring_confidence": float(novel.confidence.mean()),
        }
        if posterior.default_samples > 1:
            values["auroc_mi"] = novelty_auroc(known.mutual_information, novel.mutual_information)
        content: dict[str, Any] = {"values": values, "bins": reliability(known.probabilities, test[1])}
        if job.seed == 0:
            content["map"] = _map(posterior, s)
            content["points"] = round_values(train[0], 2)
            content["point_class"] = train[1].tolist()
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        chosen = self.evaluated_candidates(settings, parts)
        notes = [
            f"Four blobs of standard deviation {settings.spread:g}, {settings.train} points to learn from; the ring has a radius of "
            f"{settings.radius:g}. All methods have the same network of hidden layers {settings.hidden}, the same points of their seed "
            f"and {settings.epochs} epochs or what their own settings say; nothing was chosen on the ring.",
        ]
        rows = self.rows(settings, parts, METRICS)
        drawn = figures(settings, parts, chosen, self.first_seed_parts(settings, parts, "map"))
        return Findings(answer(parts, chosen), METRICS, rows, drawn, notes)


def axis_of(s: Settings) -> Tensor:
    return torch.linspace(-s.radius * 4 / 3, s.radius * 4 / 3, s.grid)


def _map(posterior: Posterior, s: Settings) -> dict[str, Any]:
    axis = axis_of(s)
    predictive = predict(posterior, torch.cartesian_prod(axis, axis), s.samples)

    def table(values: Tensor) -> list[Any]:
        return round_values(values.reshape(s.grid, s.grid).T, 3)  # a row for each y

    epistemic = table(predictive.mutual_information) if posterior.default_samples > 1 else None
    return {"entropy": table(predictive.entropy), "epistemic": epistemic}


def figures(
    s: Settings, parts: Parts, chosen: Sequence[Candidate], drawn: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The maps of the first seed, and calibration on known points."""
    kinds = {
        "entropy": (
            "Where each method is unsure",
            "predictive entropy in nats",
            "auroc",
            "Seed 0: predictive entropy over the plane; the deepest colour is log 2, to know nothing. A method that knows what it does "
            "not know is pale where the points are and deep on the ring.",
        ),
        "epistemic": (
            "Where its sampled networks disagree",
            "mutual information in nats",
            "auroc_mi",
            "Seed 0: the mutual information of label and network, the part of the entropy that more data would remove, in the same "
            "scale. Single networks have none and are left out.",
        ),
    }
    made = []
    for name, (title, label, metric, caption) in kinds.items():
        panels = []
        for method, part in drawn.items():
            score = part["values"].get(metric)
            note = "" if score is None else f"AUROC {score:.2f}"
            if part["map"][name] is not None:
                panels.append({"title": method, "note": note, "values": part["map"][name]})
        if panels:
            first, axis = next(iter(drawn.values())), round_values(axis_of(s), 3)
            points = {"points": first["points"], "point_class": first["point_class"], "ring": s.radius}
            data = {"label": label, "x": axis, "y": axis, "top": math.log(2), **points, "panels": panels}
            made.append(figure("map", title, caption, data))
    labels = {one.key: one.label for one in chosen}
    return [*made, reliability_figure("Test points from the blobs.", labels, parts)]


def answer(parts: Parts, chosen: Sequence[Candidate]) -> str:
    """The answer, put together from the numbers."""
    rank = partial(ranking, parts, chosen)
    blind = sum(parts.mean(one.key, "auroc") <= 0.5 for one in chosen)
    return (
        f"The ring is distinguished from the test points, {pluralize(len(parts.seeds))}, best by {rank('auroc', higher=True)} (AUROC "
        f"by entropy); {blind} of {len(chosen)} methods are no better than guessing.\n"
        f"The entropy on the ring is at most {math.log(2):.3f}: {rank('ring_entropy', higher=True)}.\n"
        f"The calibration error on known points, which is another matter: {rank('ece')}."
    )
