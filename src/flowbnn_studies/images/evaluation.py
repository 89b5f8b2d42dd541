"""Evaluating one trained variant on the test images, on novel ones and on corrupted ones; the same for all methods."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowbnn.compare.candidates import sample_count
from flowbnn.compare.results import CLASSIFICATION, Metric, Parts
from flowbnn.methods import Posterior
from flowbnn.metrics import calibration_error, novelty_auroc, reliability
from flowbnn.posterior.adaptive import Adaptive
from flowbnn.posterior.prediction import View
from flowbnn.predictive import CategoricalPredictive
from flowbnn_studies.data import Translate, mirror
from flowbnn_studies.images.data import STRENGTHS, ImageData
from flowbnn_studies.images.settings import ImageSettings, Training
from flowbnn_studies.runner.findings import histogram
from flowbnn_studies.runner.study import Variant

ADAPTIVE = Adaptive()
TEMPERATURES = tuple(2.0 ** (step / 4) for step in range(-24, 25))  # from 1/64 to 64; 1 is among them
Curve = dict[str, list[float]]
MAX_BATCH = 16384  # in one pass on a GPU, whose memory several jobs share
MIRROR = (
    "Of the mean of every network's predictions for the image and for its mirror image (test-time augmentation); where there "
    "are many networks with half of them, so that it costs the same."
)
MOVED = (
    "Of the mean of every network's predictions for six views: the image and its mirror image, as they are and moved by one pixel "
    "along either diagonal; where there are many networks with a sixth of them, so that it costs no more."
)


def _translate_and_mirror(step: int) -> View:
    return lambda images: mirror(Translate(step, step)(images))


# five besides the image itself
VIEWS: tuple[View, ...] = (
    mirror,
    *(view for step in (1, -1) for view in (Translate(step, step), _translate_and_mirror(step))),
)


def image_metrics(novel: dict[str, str]) -> tuple[Metric, ...]:
    """The columns of the table; ``novel`` names the kinds of images the network has never seen."""
    shift, cost = "Novel and corrupted images", "Cost"
    entropy = "Probability that a novel image ({}) has a higher predictive entropy than a test image; 0.5 is guessing."
    mutual = "The same ({}) by the mutual information of label and network; a single network has none."
    views = {
        "mirror": ("two views", MIRROR, "An image and its mirror image together"),
        "moved": ("six views", MOVED, "Six views of an image together"),
    }
    adaptive = (
        f"Share of the samples that adaptive sampling spends on the test images, with a tolerance of {ADAPTIVE.tolerance} in "
        f"probability or a decision certain to {100 * ADAPTIVE.certainty:g} %."
    )
    # fmt: off
    return (
        *CLASSIFICATION,
        *(Metric(f"auroc_{k}", f"AUROC {name}", "higher", ".3f", entropy.format(name), shift) for k, name in novel.items()),
        *(Metric(f"mi_{k}", f"AUROC {name}, by MI", "higher", ".3f", mutual.format(name), shift) for k, name in novel.items()),
        Metric("shift_accuracy", "Accuracy, corrupted", "higher", ".3f",
               "Accuracy on corrupted images, mean over kinds of corruption and five strengths.", shift),
        Metric("shift_nll", "NLL, corrupted", "lower", ".3f", "NLL on the same images, mean over the same.", shift),
        Metric("shift_matched_nll", "NLL, corrupted, matched entropy", "lower", ".3f",
               "The same, tempered for each kind and strength to the mean predictive entropy of the plain network of that seed.",
               shift),
        Metric("shift_ece", "ECE, corrupted", "lower", ".3f", "ECE on the same images, mean over the same.", shift),
        *(Metric(f"{prefix}_{m.key}", f"{m.label}, {words}", m.better, ".4f", definition, group)
          for prefix, (words, definition, group) in views.items() for m in CLASSIFICATION[:3]),
        Metric("step", "Training step", "lower", ".2f", "Time of a training step over the plain network's.", cost),
        Metric("memory", "Training memory", "lower", ".2f", "Peak memory in training over the plain network's.", cost),
        Metric("prediction", "Prediction", "lower", ".2f",
               "Time of a prediction with all samples over the plain network's time for as many rows.", cost),
        Metric("minutes", "Minutes", "none", ".2f",
               "Of one training, its curves included, while other trainings ran on the same device.", cost),
        Metric("adaptive", "Adaptive samples", "lower", ".3f", adaptive, cost),
        Metric("agreement", "Same decisions", "higher", ".4f", "Share of test images decided as with all samples.", cost),
    )
    # fmt: on


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
        sample_count(posterior, samples),
        seed=0,
        adaptive=adaptive,
        views=views,
        max_batch=MAX_BATCH if images.device.type == "cuda" else None,
        precision="bf16-mixed" if half else "32-true",
        progress=False,
    )


def _evaluate_views(
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
    values: dict[str, float] = {}
    several = {"mirror": VIEWS[:1]} if training.flip else {}
    if training.flip and training.padding and settings.moved:
        several["moved"] = VIEWS
    for prefix, views in several.items():
        networks = max(1, settings.samples // (1 + len(views)))
        seen = predict(posterior, pair[0], networks, precision, views=views).evaluate(pair[1])
        values |= {f"{prefix}_{name}": seen[name] for name in ("accuracy", "nll", "ece")}
    return values


def _curves(posterior: Posterior, number: int) -> dict[str, list[float]]:
    """What is kept of a training's history: terms of the bound in nats per image, accuracy and ECE where they were recorded."""
    history = posterior.history
    names = {"elbo": "elbo", "log_likelihood": "log_likelihood", "kl": "kl"}
    names |= {"accuracy": "validation_accuracy", "ece": "validation_ece"}
    return {
        name: [round((1.0 / number if name == "kl" else 1.0) * value, 6) for value in history[stored]]
        for name, stored in names.items()
        if stored in history
    }


def evaluate(
    posterior: Posterior, pictures: ImageData, settings: ImageSettings, training: Training, precision: str
) -> dict[str, Any]:
    """Everything the table and the figures need of one trained network."""
    images, labels = pictures.test
    number = sample_count(posterior, settings.samples)
    known = predict(posterior, images, settings.samples, precision)
    values = known.evaluate(labels)
    values["minutes"] = posterior.history.seconds / 60
    content: dict[str, Any] = {
        "values": values,
        "curves": _curves(posterior, pictures.num_data),
        "bins": reliability(known.probabilities, labels),
    }
    if number > ADAPTIVE.start:
        sparing = predict(posterior, images, settings.samples, precision, ADAPTIVE)
        values["adaptive"] = float(sparing.sample_counts.double().mean()) / settings.samples
        values["agreement"] = float((sparing.labels == known.labels).double().mean())
        del sparing
    del known
    values |= _evaluate_views(posterior, pictures.test, settings, training, precision)
    more, beyond = evaluate_shift(posterior, pictures, settings, precision)
    values |= more
    return content | beyond


def evaluate_shift(
    posterior: Posterior, pictures: ImageData, settings: ImageSettings, precision: str
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics on novel and on corrupted images, and what the figures need of them."""
    # of the same number of samples as what it is compared with
    few = predict(posterior, pictures.test[0][: settings.shift_images], settings.shift_samples, precision)
    values: dict[str, float] = {}
    entropy = {"known": histogram(few.entropy, 0.0, 2.4, 24)}
    for key, strange in pictures.novel(settings.shift_images).items():
        novel = predict(posterior, strange, settings.shift_samples, precision)
        values[f"auroc_{key}"] = novelty_auroc(few.entropy, novel.entropy)
        if novel.num_samples > 1:
            values[f"mi_{key}"] = novelty_auroc(few.mutual_information, novel.mutual_information)
        entropy[key] = histogram(novel.entropy, 0.0, 2.4, 24)
    shift: dict[str, dict[str, list[float]]] = {
        kind: {"accuracy": [], "nll": [], "ece": []} for kind in settings.corruptions
    }
    tempering: dict[str, list[Curve]] = {kind: [] for kind in settings.corruptions}
    for kind, curves in shift.items():
        for strength in STRENGTHS:
            corrupted, truth = pictures.corrupted(kind, strength, settings.shift_images)
            predictive = predict(posterior, corrupted, settings.shift_samples, precision)
            curves["accuracy"].append(float((predictive.labels == truth).double().mean()))
            curves["nll"].append(float(predictive.nll(truth).mean()))
            curves["ece"].append(calibration_error(predictive.probabilities, truth))
            tempering[kind].append(tempering_curve(predictive.log_probabilities, truth))
    for name in ("accuracy", "nll", "ece"):
        numbers = [value for curves in shift.values() for value in curves[name]]
        values[f"shift_{name}"] = sum(numbers) / len(numbers)
    return values, {"entropy": entropy, "shift": shift, "tempered": tempering}


def tempering_curve(log_probabilities: Tensor, labels: Tensor) -> Curve:
    """Mean entropy and NLL of log-probabilities ``[B, C]`` at each of the :data:`TEMPERATURES`.

    >>> curve = tempering_curve(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([0]))
    >>> round(curve["nll"][24], 4), round(curve["nll"][28], 4)  # as it is: -log 0.8; at 2: -log 2/3
    (0.2231, 0.4055)
    """
    temperatures = torch.tensor(TEMPERATURES, dtype=torch.float64)[:, None, None]
    log_p = torch.log_softmax(log_probabilities.cpu().double() / temperatures, -1)
    chosen = log_p[:, torch.arange(len(labels)), labels.cpu()]
    return {
        "entropy": torch.special.entr(log_p.exp()).sum(-1).mean(-1).tolist(),
        "nll": chosen.mean(-1).neg().tolist(),
    }


def nll_at_entropy(curve: Curve, entropy: float) -> float | None:
    """The NLL at a mean entropy, by cubic splines over the logarithm of the temperature; None where the grid does not come to it."""
    from scipy.interpolate import CubicSpline  # not above: every command would wait for it
    from scipy.optimize import brentq

    entropies = CubicSpline(np.log(TEMPERATURES), curve["entropy"])
    low, high = np.log(TEMPERATURES[0]), np.log(TEMPERATURES[-1])
    if not entropies(low) <= entropy <= entropies(high):
        return None
    place = brentq(lambda x: float(entropies(x)) - entropy, low, high)
    return float(CubicSpline(np.log(TEMPERATURES), curve["nll"])(place))


def add_matched_nll(parts: Parts, variants: Sequence[Variant], plain: dict[str, str]) -> Parts:
    r"""The parts with ``shift_matched_nll``: what is left of the NLL under corruption once a method may not gain by being less certain.

    Corrupted images are harder than any validation image, so whatever spreads the probabilities lowers the NLL there. To compare
    methods at the same certainty, the predictive of each is tempered, :math:`p_T \propto \bar p^{1/T}`, for each kind and strength
    of corruption, with the one temperature at which its mean entropy over the images is that of the plain network of the same seed:

    .. math:: \mathrm{NLL}_\mathrm{matched} = -\frac1n \sum_i \log p_T(y_i \mid x_i), \qquad
              \frac1n \sum_i H[p_T(\cdot \mid x_i)] = \frac1n \sum_i H[p_\mathrm{plain}(\cdot \mid x_i)] .

    The metric is the mean over kinds and strengths, where the plain network of that seed is there. The temperature sees no label.
    Trinh et al. 2022 (https://arxiv.org/abs/2206.02435) relate the NLL to the entropy of the latent noise; only noise has that one,
    while SWAG, an ensemble and the plain network have a predictive entropy as well.

    Args:
        plain: key of the plain network for each recipe, the first word of a variant's key.
    """
    content = dict(parts.content)
    own = TEMPERATURES.index(1.0)
    for variant in variants:
        for seed in parts.seeds:
            part = parts.content.get((variant.key, seed), {})
            other = parts.content.get((plain.get(variant.key.partition("-")[0], ""), seed), {})
            if "tempered" not in part or set(other.get("tempered", ())) != set(part["tempered"]):
                continue
            values = [
                nll_at_entropy(curve, reference["entropy"][own])
                for kind, curves in part["tempered"].items()
                for curve, reference in zip(curves, other["tempered"][kind], strict=True)
            ]
            if None not in values:
                mean = float(np.mean(values))  # type: ignore[arg-type]
                content[variant.key, seed] = {**part, "values": {**part["values"], "shift_matched_nll": mean}}
    return Parts(parts.seeds, content)
