"""Judging one trained variant: on the test images, on novel ones, and on corrupted ones. All of it for all methods alike."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from flowbnn.methods import PointPosterior, Posterior
from flowbnn.metrics import calibration_error, novelty_auroc, reliability
from flowbnn.posterior.adaptive import Adaptive
from flowbnn.posterior.views import View
from flowbnn.predictive import CategoricalPredictive
from flowbnn_studies.data import mirrored, moved
from flowbnn_studies.images.pictures import KINDS, STRENGTHS, Pictures
from flowbnn_studies.images.settings import ImageSettings, Training
from flowbnn_studies.runner.base import CLASSIFICATION, Metric
from flowbnn_studies.runner.figures import histogram

__all__ = ["RULE", "by_views", "curves_of", "image_metrics", "judge", "predict", "score"]

RULE = Adaptive()
ROWS = 16384
MIRROR = (
    "Of the mean of every network's predictions for the image and for its mirror image (test-time augmentation); where there "
    "are many networks with half of them, so that it costs the same."
)

MOVED = (
    "Of the mean of every network's predictions for six views: the image and its mirror image, as they are and moved by one pixel "
    "along either diagonal; where there are many networks with a sixth of them, so that it costs no more."
)
# five besides the image itself
VIEWS: tuple[View, ...] = (
    mirrored,
    *(
        view
        for step in (1, -1)
        for view in (moved(step, step), lambda x, step=step: mirrored(moved(step, step)(x)))
    ),
)


def image_metrics(novel: dict[str, str]) -> tuple[Metric, ...]:
    """The columns of the table; ``novel`` names the kinds of images the network has never seen."""
    entropy = (
        "Chance that a novel image ({}) has a higher predictive entropy than a test image; 0.5 is guessing."
    )
    mutual = "The same ({}) by the mutual information of label and network; a single network has none."
    shifted, costs, mirror = "Novel and corrupted images", "Cost", "An image and its mirror image together"
    six = "Six views of an image together"
    return (
        *CLASSIFICATION,
        *(
            Metric(f"auroc_{key}", f"AUROC {name}", "higher", ".3f", entropy.format(name), shifted)
            for key, name in novel.items()
        ),
        *(
            Metric(f"mi_{key}", f"AUROC {name}, by MI", "higher", ".3f", mutual.format(name), shifted)
            for key, name in novel.items()
        ),
        Metric(
            "shift_accuracy",
            "Accuracy, corrupted",
            "higher",
            ".3f",
            "Accuracy under noise, blur, brightness and contrast, mean over the four and five strengths.",
            shifted,
        ),
        Metric(
            "shift_ece",
            "ECE, corrupted",
            "lower",
            ".3f",
            "ECE on the same images, mean over the same.",
            shifted,
        ),
        Metric("mirror_accuracy", "Accuracy, two views", "higher", ".4f", MIRROR, mirror),
        Metric("mirror_nll", "NLL, two views", "lower", ".4f", MIRROR, mirror),
        Metric("mirror_ece", "ECE, two views", "lower", ".4f", MIRROR, mirror),
        Metric("moved_accuracy", "Accuracy, six views", "higher", ".4f", MOVED, six),
        Metric("moved_nll", "NLL, six views", "lower", ".4f", MOVED, six),
        Metric("moved_ece", "ECE, six views", "lower", ".4f", MOVED, six),
        Metric(
            "step",
            "Training step",
            "lower",
            ".2f",
            "Time of a training step over the plain network's.",
            costs,
        ),
        Metric(
            "memory",
            "Training memory",
            "lower",
            ".2f",
            "Peak memory in training over the plain network's.",
            costs,
        ),
        Metric(
            "prediction",
            "Prediction",
            "lower",
            ".2f",
            "Time of a prediction with all samples over the plain network's time for as many rows.",
            costs,
        ),
        Metric(
            "minutes",
            "Minutes",
            "none",
            ".2f",
            "Of one training, its curves included, while other trainings ran on the same device.",
            costs,
        ),
        Metric(
            "adaptive",
            "Adaptive samples",
            "lower",
            ".3f",
            f"Share of the samples that adaptive sampling spends on the test images, with a tolerance of {RULE.tolerance} in "
            f"probability or a decision certain to {100 * RULE.certainty:g} %.",
            costs,
        ),
        Metric(
            "agreement",
            "Same decisions",
            "higher",
            ".4f",
            "Share of test images decided as with all samples.",
            costs,
        ),
    )


def predict(
    posterior: Posterior,
    images: Tensor,
    samples: int,
    precision: str,
    adaptive: Adaptive | None = None,
    views: Sequence[View] = (),
) -> CategoricalPredictive:
    """The predictive on the device, with the same draws for all images and at every call, in the precision of the training."""
    half = images.device.type == "cuda" and precision.startswith("bf16")
    return posterior.predict(
        images,
        1 if isinstance(posterior, PointPosterior) else samples,
        seed=0,
        adaptive=adaptive,
        views=views,
        max_batch=ROWS if images.device.type == "cuda" else None,  # several jobs share one GPU's memory
        precision="bf16" if half else None,
        progress=False,
    )


def score(
    posterior: Posterior, pair: tuple[Tensor, Tensor], samples: int, precision: str
) -> dict[str, float]:
    """Accuracy, NLL, Brier score and ECE."""
    return predict(posterior, pair[0], samples, precision).evaluate(pair[1])


def by_views(
    posterior: Posterior,
    pair: tuple[Tensor, Tensor],
    settings: ImageSettings,
    training: Training,
    precision: str,
) -> dict[str, float]:
    """Accuracy, NLL and ECE of several views of an image together, as far as training has seen such views.

    The image and its mirror image where training mirrors; six views where it moves images as well and ``settings.moved`` asks for
    them. With as many fewer networks, so that as many images are seen.
    """
    found: dict[str, float] = {}
    several = {"mirror": VIEWS[:1]} if training.flip else {}
    if training.flip and training.padding and settings.moved:
        several["moved"] = VIEWS
    for prefix, views in several.items():
        networks = max(1, settings.samples // (1 + len(views)))
        seen = predict(posterior, pair[0], networks, precision, views=views).evaluate(pair[1])
        found |= {f"{prefix}_{name}": seen[name] for name in ("accuracy", "nll", "ece")}
    return found


def curves_of(posterior: Posterior, number: int) -> dict[str, list[float]]:
    """What is kept of a training's record: terms of the bound in nats per image, accuracy and ECE where they were watched."""
    names = {
        "elbo": ("elbo", 1.0),
        "log_likelihood": ("log_likelihood", 1.0),
        "kl": ("kl", 1.0 / number),
        "accuracy": ("validation_accuracy", 1.0),
        "ece": ("validation_ece", 1.0),
    }
    history = posterior.history
    return {
        name: [round(scale * value, 6) for value in history[stored]]
        for name, (stored, scale) in names.items()
        if stored in history
    }


def judge(
    posterior: Posterior, pictures: Pictures, settings: ImageSettings, training: Training, precision: str
) -> dict[str, Any]:
    """Everything the table and the figures need of one trained network."""
    images, labels = pictures.test
    noisy = not isinstance(posterior, PointPosterior)
    known = predict(posterior, images, settings.samples, precision)
    values = known.evaluate(labels)
    values["minutes"] = posterior.history.seconds / 60
    content: dict[str, Any] = {
        "values": values,
        "curves": curves_of(posterior, pictures.num_data),
        "bins": reliability(known.probabilities, labels),
    }
    if noisy and settings.samples > RULE.start:
        sparing = predict(posterior, images, settings.samples, precision, RULE)
        values["adaptive"] = float(sparing.samples_spent.double().mean()) / settings.samples
        values["agreement"] = float((sparing.labels == known.labels).double().mean())
        content["adaptive_rule"] = asdict(RULE)
        del sparing
    del known
    values |= by_views(posterior, pictures.test, settings, training, precision)
    # of the same number of samples as what it is compared with
    few = predict(posterior, images[: settings.shift_images], settings.shift_samples, precision)
    content["entropy"] = {"known": histogram(few.entropy, 0.0, 2.4, 24)}
    for key, strange in pictures.novel(settings.shift_images).items():
        novel = predict(posterior, strange, settings.shift_samples, precision)
        values[f"auroc_{key}"] = novelty_auroc(few.entropy, novel.entropy)
        if noisy:
            values[f"mi_{key}"] = novelty_auroc(few.mutual_information, novel.mutual_information)
        content["entropy"][key] = histogram(novel.entropy, 0.0, 2.4, 24)
    content["shift"] = shifted(posterior, pictures, settings, precision)
    for name in ("accuracy", "ece"):
        numbers = [value for kind in content["shift"].values() for value in kind[name]]
        values[f"shift_{name}"] = sum(numbers) / len(numbers)
    return content


def shifted(
    posterior: Posterior, pictures: Pictures, settings: ImageSettings, precision: str
) -> dict[str, dict[str, list[float]]]:
    """Accuracy and ECE for every kind of corruption at every strength."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        found[kind] = {"accuracy": [], "ece": []}
        for strength in STRENGTHS:
            images, labels = pictures.corrupted(kind, strength, settings.shift_images)
            predictive = predict(posterior, images, settings.shift_samples, precision)
            right = (predictive.labels == labels).double().mean()
            found[kind]["accuracy"].append(float(right))
            found[kind]["ece"].append(calibration_error(predictive.probabilities, labels))
    return found
