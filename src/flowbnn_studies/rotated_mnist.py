"""A digit that is turned, as in Louizos and Welling 2017 (https://arxiv.org/abs/1703.01961): who notices that it is no digit?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import CLASSIFICATION, Metric, Parts, figure
from flowbnn.metrics import calibration_error
from flowbnn.models import LeNet
from flowbnn.options import Count, Positive, options
from flowbnn.posterior import Posterior
from flowbnn_studies.images.data import ImageMethodSettings, ImageMethodStudy
from flowbnn_studies.runner.findings import line, panel, pluralize, ranking, round_values
from flowbnn_studies.runner.methods import predict
from flowbnn_studies.runner.study import Findings, Job

UPRIGHT, TURNED = "Upright digits", "Turned digits"
SURE = 0.9
# fmt: off
METRICS = (
    *(replace(m, group=UPRIGHT) for m in CLASSIFICATION[:3]),
    Metric("turned_nll", "NLL, turned", "lower", ".3f", "As NLL, mean over all angles, of the digit that was turned.", TURNED),
    Metric("turned_ece", "ECE, turned", "lower", ".3f", "Expected calibration error over the images of all angles together.", TURNED),
    Metric("turned_accuracy", "Accuracy, turned", "higher", ".3f", "Share of the images of all angles that is right.", TURNED),
    Metric("sure_wrong", "Sure and wrong", "lower", ".3f",
           f"Share of the images of all angles with a wrong class that has a probability above {SURE:g}.", TURNED),
    Metric("entropy_0", "Entropy, upright", "none", ".3f", "Mean entropy of the predictive distribution, in nats.", TURNED),
    Metric("entropy_90", "Entropy at 90°", "none", ".3f", "The same of digits turned by the angle nearest to 90 degrees.", TURNED),
)
# fmt: on


@options(kw_only=True)
class Settings(ImageMethodSettings):
    """What the study depends on, besides :class:`~flowbnn_studies.images.data.PictureSettings`.

    Args:
        angles: how many between 0 and 180 degrees, both included.
        turned: test images that are turned.
        shown: the digit of the picture, the first of its kind in the test set.
    """

    angles: Count = 16
    turned: Count = 1_000
    shown: int = 1
    batch: Count = 256
    epochs: Count = 15
    lr: Positive = 1e-3
    samples: Count = 64

    def degrees(self) -> list[float]:
        """The angles."""
        return [180.0 * place / max(1, self.angles - 1) for place in range(self.angles)]


class RotatedMnist(ImageMethodStudy):
    name = "rotated-mnist"
    title = "A digit turned from 0 to 180 degrees"
    description = "LeNet on MNIST, all methods: what they say of a digit that is turned from 0 to 180 degrees"
    question = (
        "A LeNet learns upright digits and is then shown one that is turned, step by step, until it stands on its head. Which methods "
        "become uncertain where the picture is none of the ten digits, and which stay sure and wrong?"
    )
    source = "Ahn and Lee's lecture, after Louizos and Welling 2017"
    settings = Settings
    data = "mnist"
    headline = ("accuracy", "turned_nll", "turned_ece", "sure_wrong", "entropy_0", "entropy_90")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "validation": 60, "epochs": 1, "batch": 60, "samples": 4, "angles": 4, "turned": 20,
        "methods": ("mle", "mc-dropout", "mnf"),
    }  # fmt: skip

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        s: Settings = job.settings
        data = self.load_data(job)
        posterior = self.fit_candidate(job, candidate, LeNet(1, len(data.known)), data)
        images, labels = data.test
        values = predict(posterior, images, s.samples).evaluate(labels.cpu())
        found, curves = over_angles(posterior, images[: s.turned], labels[: s.turned], s)
        content: dict[str, Any] = {"values": {**values, **found}, "curves": curves}
        if job.seed == 0:
            place = int((labels == s.shown).nonzero()[0, 0])
            several = torch.cat([rotate(images[place : place + 1], angle) for angle in s.degrees()])
            one = predict(posterior, several, s.samples)
            content["shares"] = round_values(one.probabilities, 3)
            content["pixels"] = [round_values(image[0], 2) for image in several]
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        chosen = self.evaluated_candidates(settings, parts)
        notes = [
            f"A LeNet, trained for {settings.epochs} epochs on {60_000 - settings.validation:,} upright digits that are not moved; the "
            f"first {settings.turned:,} test digits are turned by {settings.angles} angles, bilinear, the corners filled with the "
            "ground. A 0, a 1 and an 8 look nearly the same upside down, a 6 becomes a 9: with those even a perfect observer errs.",
            "The lecture prints no numbers for this: it shows one 1 with weight decay, sure of a wrong class at most angles, and with "
            "multiplicative normalizing flows, uncertain there. HMC, NUTS and modes of the noise, which take all images in every step, "
            "are left out.",
        ]
        drawn = figures(settings, parts, chosen, self.first_seed_parts(settings, parts, "shares"))
        rows = self.rows(settings, parts, METRICS)
        return Findings(answer(parts, chosen), METRICS, rows, drawn, notes)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images ``[B, C, H, W]`` turned counterclockwise around their middle; the corners get the darkest value that there is.

    >>> rotate(torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]), 90.0).round().tolist()
    [[[[0.0, 0.0], [1.0, 0.0]]]]
    """
    angle, ground = math.radians(degrees), images.min()
    turn = [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    matrix = torch.tensor(turn, dtype=images.dtype, device=images.device).expand(len(images), 2, 3)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images - ground, grid, align_corners=False) + ground


def over_angles(
    posterior: Posterior, images: Tensor, labels: Tensor, s: Settings
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The metrics of turned digits, and their course over the angles."""
    targets = labels.cpu()
    curves: dict[str, list[float]] = {name: [] for name in ("accuracy", "confidence", "entropy", "nll")}
    probabilities = []
    for angle in s.degrees():
        one = predict(posterior, rotate(images, angle), s.samples)
        found = one.evaluate(targets)
        probabilities.append(one.probabilities)
        found |= {"confidence": float(one.confidence.mean()), "entropy": float(one.entropy.mean())}
        for name, values in curves.items():
            values.append(found[name])
    every, true = torch.cat(probabilities), targets.repeat(s.angles)
    confidence, label = every.max(1)
    metrics = {
        "turned_nll": sum(curves["nll"]) / s.angles,
        "turned_accuracy": float((label == true).double().mean()),
        "turned_ece": calibration_error(every, true),
        "sure_wrong": float(((label != true) & (confidence > SURE)).double().mean()),
        "entropy_0": curves["entropy"][0],
        "entropy_90": curves["entropy"][
            min(range(s.angles), key=lambda place: abs(s.degrees()[place] - 90.0))
        ],
    }
    return metrics, curves


def figures(
    s: Settings, parts: Parts, chosen: Sequence[Candidate], drawn: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """One digit's probabilities over the angles, by method, and the means of many digits."""
    made = []
    degrees = s.degrees()
    if drawn:
        first = next(iter(drawn.values()))
        images = [
            {"title": f"{angle:.0f}°", "pixels": pixels}
            for angle, pixels in zip(degrees, first["pixels"], strict=True)
        ]
        panels = []
        for label, part in drawn.items():
            likely = [max(row) for row in part["shares"]]
            note = f"mean confidence {sum(likely) / len(likely):.2f}"
            panels.append({"title": label, "note": note, "x": degrees, "shares": part["shares"]})
        caption = (
            f"Seed 0, the first {s.shown} of the test set. Each bar is the image at one angle, and each colour a class: its height "
            "is the probability that the method gives it. A bar of one colour is a method that is sure."
        )
        data = {"x_label": "degrees", "classes": list("0123456789"), "images": images, "panels": panels}
        made.append(figure("shares", f"A {s.shown} that is turned", caption, data))
    panels = []
    for name, title, unit in (
        ("entropy", "Entropy", "nats"),
        ("confidence", "Confidence", "mean highest probability"),
        ("accuracy", "Accuracy", "share that is right"),
    ):
        lines = []
        for one in chosen:
            runs = [part["curves"][name] for part in parts.of(one.key) if "curves" in part]
            lines.append(line(one.label, degrees, zip(*runs, strict=True), std=None))
        panels.append(panel(title, unit, lines))
    caption = (
        f"Means over the first {s.turned:,} test digits and over seeds. Where accuracy falls, confidence should fall as far, and the "
        "entropy rise."
    )
    data = {"x_label": "degrees", "panels": panels}
    return [*made, figure("curves", "All digits, by angle", caption, data)]


def answer(parts: Parts, chosen: Sequence[Candidate]) -> str:
    """The answer, put together from the numbers."""
    return (
        f"Turned digits are least often given a wrong class with a probability above {SURE:g}, {pluralize(len(parts.seeds))}, by "
        f"{ranking(parts, chosen, 'sure_wrong')} (share of all).\n"
        f"The best probabilities of turned digits are those of {ranking(parts, chosen, 'turned_nll')} (NLL)."
    )
