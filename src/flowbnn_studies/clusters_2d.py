"""Two classes on a plane and a ring of out-of-distribution inputs: uncertainty of all methods far from the data."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import CLASSIFICATION, Metric, SeedResults, figure, reliability_figure
from flowbnn.data import TensorLoader, clusters, ring
from flowbnn.data.toy import CENTRES
from flowbnn.methods import Posterior
from flowbnn.metrics import novelty_auroc, reliability
from flowbnn.models import MLP
from flowbnn.options import Count, Positive, options
from flowbnn_studies.runner.findings import paired_difference, pluralize, ranking, round_values
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, predict, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job

# fmt: off
METRICS = (
    *CLASSIFICATION[:3],
    Metric("auroc", "Novelty AUROC", "higher", ".3f",
           "Probability that a point of the ring has a higher predictive entropy than a test point. 0.5 is chance; below 0.5 the "
           "method is more certain on the ring than on test points."),
    Metric("auroc_mi", "AUROC by MI", "higher", ".3f",
           "Novelty AUROC by the mutual information of label and network; a single network has none."),
    Metric("auroc_energy", "AUROC by energy", "higher", ".3f",
           "Novelty AUROC by the energy, minus the logarithm of the sum of the exponentials of the logits."),
    Metric("auroc_hole", "AUROC in the hole", "higher", ".3f",
           "Probability that a point of the hole between the blobs has a higher predictive entropy than a test point."),
    Metric("auroc_hole_mi", "AUROC in the hole by MI", "higher", ".3f",
           "The same by the mutual information of label and network; a single network has none."),
    Metric("ring_entropy", "Entropy on the ring", "higher", ".3f",
           f"Mean predictive entropy on the ring, in nats; at most log 2 = {math.log(2):.3f}."),
    Metric("ring_confidence", "Confidence on the ring", "lower", ".3f",
           "Mean probability of the more likely class on the ring; at least 0.5."),
)
# fmt: on


@options
class Settings(MethodSettings):
    """Settings of the study, in addition to :class:`MethodSettings`.

    Args:
        spread: Standard deviation of each blob.
        train, test: Number of training and test points.
        radius: Radius of the ring. The blobs lie within 6 of the origin.
        gap: Distance of the hole from the centre of every blob, in standard deviations. The hole lies between the blobs.
        ring: Number of points on the ring.
        hidden: Widths of the hidden layers.
        grid: Number of grid points along each axis of the maps, which extend a third beyond the ring.
    """

    spread: Positive = 1.2
    train: Count = 400
    test: Count = 4000
    radius: Positive = 18.0
    gap: Positive = 3.0
    ring: Count = 1000
    hidden: tuple[int, ...] = (32, 32)
    batch: Count = 100
    epochs: Count = 150
    lr: Positive = 1e-2
    samples: Count = 128
    grid: Count = 65


class Clusters2d(MethodStudy):
    name = "clusters-2d"
    title = "Two classes, with a ring around them and a hole between them"
    description = (
        "two classes on a plane, a ring far from the data and a hole between them: detection of novel inputs"
    )
    question = (
        "A network is trained on two classes of four blobs. Which methods are uncertain where there are no data: on a wide ring around "
        "the blobs, and in the hole between them?"
    )
    source = "the blobs of Xiong's report, figure 3; novelty as in Ravenda's report, section 1.6"
    settings = Settings
    specific: ClassVar[dict[str, dict[str, Any]]] = {
        "hmc": {"samples": 60, "warmup": 60, "chains": 2, "steps": 32},
        "nuts": {"samples": 40, "warmup": 40, "chains": 2, "max_depth": 5},
    }
    seeds = 10
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
        known, novel, hole = (
            predict(posterior, points, s.samples) for points in (test[0], far, hole_points(s, generator))
        )
        values = known.evaluate(test[1]) | {
            "auroc": novelty_auroc(known.entropy, novel.entropy),
            "auroc_energy": novelty_auroc(known.energy, novel.energy),
            "auroc_hole": novelty_auroc(known.entropy, hole.entropy),
            "ring_entropy": float(novel.entropy.mean()),
            "ring_confidence": float(novel.confidence.mean()),
        }
        if posterior.default_samples > 1:
            values["auroc_mi"] = novelty_auroc(known.mutual_information, novel.mutual_information)
            values["auroc_hole_mi"] = novelty_auroc(known.mutual_information, hole.mutual_information)
        content: dict[str, Any] = {"values": values, "bins": reliability(known.probabilities, test[1])}
        if job.seed == 0:
            content["map"] = _map(posterior, s)
            content["points"] = round_values(train[0], 2)
            content["point_class"] = train[1].tolist()
        return content

    def story(self, numbers: Numbers) -> Story:
        ranked = numbers.ranked("auroc")
        certain = [key for key in ranked if numbers.mean(key, "auroc") <= 0.5]
        above = [key for key in ranked if exceeds_chance(numbers.per_seed(key, "auroc"))]
        names = " and ".join(f"{numbers.name(key)} (AUROC {numbers.spread(key, 'auroc')})" for key in above)
        number = f"{len(certain)} of {len(ranked)}"
        keys = ("mle", "deep-ensemble", "node-noise-planar", ranked[0])
        return Story(
            "Which methods are uncertain far from the data?",
            f"{f'Only {names}' if names else 'No method'} has an AUROC above 0.5 by more than its 95 % interval, and on average "
            f"{number} methods are more certain on a ring far from the data than near it.",
            number,
            "methods are more certain far from the data than near it",
            ("auroc", "ring_entropy", "ece", "nll"),
            rows=numbers.main_rows(*keys),
            figure="map",
            panels=tuple(numbers.label(key) for key in keys),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        candidates = self.evaluated_candidates(settings, parts)
        notes = [
            f"Four blobs of standard deviation {settings.spread:g}, {settings.train} training points, a ring of radius "
            f"{settings.radius:g}. All methods have the same network with hidden layers {settings.hidden}, the same points of their "
            f"seed and {settings.epochs} epochs unless their own settings differ. Nothing was chosen on the ring.",
        ]
        rows = self.rows(settings, parts, METRICS)
        all_figures = figures(settings, parts, candidates, self.first_seed_parts(settings, parts, "map"))
        return Findings(answer(parts, candidates), METRICS, rows, all_figures, notes)


def hole_points(s: Settings, generator: torch.Generator) -> Tensor:
    """Returns points between the blobs, ``[ring, 2]``, that are at least ``gap`` standard deviations from all centres."""
    centres = torch.tensor(CENTRES)
    low, high = centres.amin(0), centres.amax(0)
    points = torch.empty(0, 2)
    while len(points) < s.ring:
        candidates = low + (high - low) * torch.rand(8192, 2, generator=generator)
        inside = torch.cdist(candidates, centres).amin(1) >= s.gap * s.spread
        points = torch.cat([points, candidates[inside]])
    return points[: s.ring]


def map_axis(s: Settings) -> Tensor:
    """Returns the coordinates of the maps along an axis."""
    return torch.linspace(-s.radius * 4 / 3, s.radius * 4 / 3, s.grid)


def _map(posterior: Posterior, s: Settings) -> dict[str, Any]:
    """Computes predictive entropy and mutual information over the plane."""
    axis = map_axis(s)
    predictive = predict(posterior, torch.cartesian_prod(axis, axis), s.samples)

    def table(values: Tensor) -> list[Any]:
        return round_values(values.reshape(s.grid, s.grid).T, 3)  # a row for each y

    epistemic = table(predictive.mutual_information) if posterior.default_samples > 1 else None
    return {"entropy": table(predictive.entropy), "epistemic": epistemic}


def figures(
    s: Settings, parts: SeedResults, candidates: Sequence[Candidate], contents: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the maps of the first seed, and the calibration on test points."""
    kinds = {
        "entropy": (
            "Predictive entropy over the plane",
            "predictive entropy in nats",
            "auroc",
            "Seed 0. The darkest colour is log 2, the largest entropy. A method that detects out-of-distribution inputs is pale at "
            "the points and dark on the ring.",
        ),
        "epistemic": (
            "Mutual information over the plane",
            "mutual information in nats",
            "auroc_mi",
            "Seed 0: mutual information of label and network, the part of the entropy that more data would remove, on the same "
            "scale. Single networks have none and are omitted.",
        ),
    }
    result = []
    for name, (title, label, metric, caption) in kinds.items():
        panels = []
        for method, part in contents.items():
            score = part["values"].get(metric)
            note = "" if score is None else f"AUROC {score:.2f}"
            if part["map"][name] is not None:
                panels.append({"title": method, "note": note, "values": part["map"][name]})
        if panels:
            first, axis = next(iter(contents.values())), round_values(map_axis(s), 3)
            points = {"points": first["points"], "point_class": first["point_class"], "ring": s.radius}
            data = {"label": label, "x": axis, "y": axis, "top": math.log(2), **points, "panels": panels}
            result.append(figure("map", title, caption, data))
    labels = {candidate.key: candidate.label for candidate in candidates}
    return [*result, reliability_figure("Test points of the blobs.", labels, parts)]


def is_above_chance(parts: SeedResults, key: str) -> bool:
    """Returns True if the AUROC on the ring is above 0.5 by more than its 95 % interval over seeds."""
    return exceeds_chance(parts.values(key, "auroc"))


def exceeds_chance(values: Sequence[float]) -> bool:
    """Returns True if the mean of AUROCs over seeds is above 0.5 by more than its 95 % interval."""
    return len(values) > 1 and paired_difference(values, [0.5] * len(values)).low > 0.0


def answer(parts: SeedResults, candidates: Sequence[Candidate]) -> str:
    """Returns the answer, computed from the numbers."""
    rank = partial(ranking, parts, candidates)
    above = [candidate.label for candidate in candidates if is_above_chance(parts, candidate.key)]
    names = ", ".join(above) or "no method"
    return (
        f"On the ring, {names} detected novel points better than chance (AUROC by entropy above 0.5 by more than its 95 % interval, "
        f"{pluralize(len(parts.seeds))}): {rank('auroc', higher=True)}.\n"
        f"In the hole between the blobs, AUROC by entropy: {rank('auroc_hole', higher=True)}.\n"
        f"Entropy on the ring, at most {math.log(2):.3f}: {rank('ring_entropy', higher=True)}.\n"
        f"Calibration error on test points, for comparison: {rank('ece')}."
    )
