"""Rotated digits, as in Louizos and Welling 2017 (https://arxiv.org/abs/1703.01961): uncertainty of all methods."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import CLASSIFICATION, Metric, SeedResults, figure
from flowbnn.metrics import calibration_error
from flowbnn.models import LeNet
from flowbnn.options import Count, Positive, options
from flowbnn.posterior import Posterior
from flowbnn_studies.images.data import ImageMethodSettings, ImageMethodStudy
from flowbnn_studies.runner.findings import line, panel, pluralize, ranking, round_values
from flowbnn_studies.runner.methods import predict
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job

UPRIGHT, ROTATED = "Upright digits", "Rotated digits"
CONFIDENT = 0.9  # probability above which a prediction counts as confident
# fmt: off
METRICS = (
    *(replace(m, group=UPRIGHT) for m in CLASSIFICATION[:3]),
    Metric("turned_nll", "NLL, rotated", "lower", ".3f", "NLL of rotated digits, mean over all angles.", ROTATED),
    Metric("turned_ece", "ECE, rotated", "lower", ".3f", "Expected calibration error over the images of all angles.", ROTATED),
    Metric("turned_accuracy", "Accuracy, rotated", "higher", ".3f", "Accuracy over the images of all angles.", ROTATED),
    Metric("sure_wrong", "Confident and wrong", "lower", ".3f",
           f"Fraction of the images of all angles with a wrong class of probability above {CONFIDENT:g}.", ROTATED),
    Metric("entropy_0", "Entropy, upright", "none", ".3f", "Mean predictive entropy of upright digits, in nats.", ROTATED),
    Metric("entropy_90", "Entropy at 90°", "none", ".3f", "Mean predictive entropy of digits rotated by the angle nearest to 90 "
                                                          "degrees.", ROTATED),
)
# fmt: on


@options(kw_only=True)
class Settings(ImageMethodSettings):
    """Settings of the study, in addition to :class:`~flowbnn_studies.images.data.ImageMethodSettings`.

    Args:
        angles: Number of angles from 0 to 180 degrees.
        num_rotated: Number of test images that are rotated.
        example_digit: Digit of the figure, the first of its class in the test set.
    """

    angles: Count = 16
    num_rotated: Count = 1_000
    example_digit: int = 1
    batch: Count = 256
    epochs: Count = 15
    lr: Positive = 1e-3
    samples: Count = 64

    def degrees(self) -> list[float]:
        """Returns the angles."""
        return [180.0 * index / max(1, self.angles - 1) for index in range(self.angles)]


class RotatedMnist(ImageMethodStudy):
    name = "rotated-mnist"
    title = "Digits rotated from 0 to 180 degrees"
    description = "LeNet on MNIST, all methods: predictions for digits rotated from 0 to 180 degrees"
    question = (
        "A LeNet is trained on upright digits and evaluated on rotated ones. Which methods become uncertain where the image shows "
        "none of the ten digits, and which stay confident and wrong?"
    )
    source = "Ahn and Lee's lecture, after Louizos and Welling 2017"
    settings = Settings
    data = "mnist"
    headline = ("accuracy", "turned_nll", "turned_ece", "sure_wrong", "entropy_0", "entropy_90")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "validation": 60, "epochs": 1, "batch": 60, "samples": 4, "angles": 4, "num_rotated": 20,
        "methods": ("mle", "mc-dropout", "mnf"),
    }  # fmt: skip

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        s: Settings = job.settings
        data = self.load_data(job)
        posterior = self.fit_candidate(job, candidate, LeNet(1, len(data.known)), data)
        images, labels = data.test
        values = predict(posterior, images, s.samples).evaluate(labels.cpu())
        rotated_values, curves = over_angles(posterior, images[: s.num_rotated], labels[: s.num_rotated], s)
        content: dict[str, Any] = {"values": {**values, **rotated_values}, "curves": curves}
        if job.seed == 0:
            index = int((labels == s.example_digit).nonzero()[0, 0])
            rotated = torch.cat([rotate(images[index : index + 1], angle) for angle in s.degrees()])
            predictive = predict(posterior, rotated, s.samples)
            content["shares"] = round_values(predictive.probabilities, 3)
            content["pixels"] = [round_values(image[0], 2) for image in rotated]
        return content

    def story(self, numbers: Numbers) -> Story:
        best, *_, worst = numbers.ranked("sure_wrong")
        share = {
            key: f"{100 * numbers.mean(key, 'sure_wrong'):.0f} %"
            for key in (best, worst, "node-noise-planar")
        }
        return Story(
            "Which methods become uncertain when a digit is turned?",
            f"{numbers.name(best)} most: {share[best]} of its answers to turned digits are wrong with a confidence above 0.9, versus "
            f"{share[worst]} with {numbers.name(worst)}, but its calibration error on upright digits is "
            f"{numbers.text(best, 'ece', '.3f')} instead of {numbers.text(worst, 'ece', '.3f')}, and flow noise has "
            f"{share['node-noise-planar']}.",
            f"{share[best]} vs {share[worst]}",
            f"of the answers are confident and wrong: {numbers.name(best)} and {numbers.name(worst)}",
            ("sure_wrong", "turned_nll", "ece", "accuracy"),
            rows=numbers.main_rows(best, worst),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        candidates = self.evaluated_candidates(settings, parts)
        notes = [
            f"A LeNet, trained for {settings.epochs} epochs on {60_000 - settings.validation:,} upright digits without "
            f"augmentation. The first {settings.num_rotated:,} test digits are rotated by {settings.angles} angles with bilinear "
            "interpolation; the corners are filled with the background. Upside down, 0, 1 and 8 look nearly the same and 6 becomes "
            "9, so even a perfect observer makes errors.",
            "The lecture has no numbers. It shows one digit 1, confidently misclassified at most angles with weight decay, and "
            "uncertain with multiplicative normalizing flows. HMC, NUTS and mode ensembles are not run because they use all images "
            "in every step.",
        ]
        all_figures = figures(settings, parts, candidates, self.first_seed_parts(settings, parts, "shares"))
        rows = self.rows(settings, parts, METRICS)
        return Findings(answer(parts, candidates), METRICS, rows, all_figures, notes)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotates images ``[B, C, H, W]`` counterclockwise around their center. The corners have the smallest value of the images.

    >>> rotate(torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]), 90.0).round().tolist()
    [[[[0.0, 0.0], [1.0, 0.0]]]]
    """
    angle, background = math.radians(degrees), images.min()
    rotation = [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    matrix = torch.tensor(rotation, dtype=images.dtype, device=images.device).expand(len(images), 2, 3)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images - background, grid, align_corners=False) + background


def over_angles(
    posterior: Posterior, images: Tensor, labels: Tensor, s: Settings
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Computes the metrics of rotated digits, and their curves over the angles."""
    targets = labels.cpu()
    curves: dict[str, list[float]] = {name: [] for name in ("accuracy", "confidence", "entropy", "nll")}
    probabilities = []
    for angle in s.degrees():
        predictive = predict(posterior, rotate(images, angle), s.samples)
        scores = predictive.evaluate(targets)
        probabilities.append(predictive.probabilities)
        scores |= {
            "confidence": float(predictive.confidence.mean()),
            "entropy": float(predictive.entropy.mean()),
        }
        for name, values in curves.items():
            values.append(scores[name])
    all_probabilities, all_targets = torch.cat(probabilities), targets.repeat(s.angles)
    confidence, label = all_probabilities.max(1)
    metrics = {
        "turned_nll": sum(curves["nll"]) / s.angles,
        "turned_accuracy": float((label == all_targets).double().mean()),
        "turned_ece": calibration_error(all_probabilities, all_targets),
        "sure_wrong": float(((label != all_targets) & (confidence > CONFIDENT)).double().mean()),
        "entropy_0": curves["entropy"][0],
        "entropy_90": curves["entropy"][
            min(range(s.angles), key=lambda index: abs(s.degrees()[index] - 90.0))
        ],
    }
    return metrics, curves


def figures(
    s: Settings, parts: SeedResults, candidates: Sequence[Candidate], contents: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the probabilities of one digit over the angles, by method, and the means over many digits."""
    result = []
    degrees = s.degrees()
    if contents:
        first = next(iter(contents.values()))
        images = [
            {"title": f"{angle:.0f}°", "pixels": pixels}
            for angle, pixels in zip(degrees, first["pixels"], strict=True)
        ]
        panels = []
        for label, part in contents.items():
            confidences = [max(row) for row in part["shares"]]
            note = f"mean confidence {sum(confidences) / len(confidences):.2f}"
            panels.append({"title": label, "note": note, "x": degrees, "shares": part["shares"]})
        caption = (
            f"Seed 0, the first {s.example_digit} of the test set. Each bar is the image at one angle, and each colour a class; its "
            "height is the predicted probability. A bar of one colour is a confident prediction."
        )
        data = {"x_label": "degrees", "classes": list("0123456789"), "images": images, "panels": panels}
        result.append(figure("shares", f"Predictions for a rotated {s.example_digit}", caption, data))
    panels = []
    for name, title, unit in (
        ("entropy", "Entropy", "nats"),
        ("confidence", "Confidence", "mean largest probability"),
        ("accuracy", "Accuracy", "fraction of correct predictions"),
    ):
        lines = []
        for candidate in candidates:
            runs = [part["curves"][name] for part in parts.of(candidate.key) if "curves" in part]
            lines.append(line(candidate.label, degrees, zip(*runs, strict=True), std=None))
        panels.append(panel(title, unit, lines))
    caption = (
        f"Means over the first {s.num_rotated:,} test digits and over seeds. Confidence should fall as much as accuracy, "
        "and entropy should rise."
    )
    data = {"x_label": "degrees", "panels": panels}
    return [*result, figure("curves", "Entropy, confidence and accuracy by angle", caption, data)]


def answer(parts: SeedResults, candidates: Sequence[Candidate]) -> str:
    """Returns the answer, computed from the numbers."""
    return (
        f"Fraction of rotated digits with a wrong class of probability above {CONFIDENT:g} ({pluralize(len(parts.seeds))}): "
        f"{ranking(parts, candidates, 'sure_wrong')}.\n"
        f"NLL of rotated digits: {ranking(parts, candidates, 'turned_nll')}."
    )
