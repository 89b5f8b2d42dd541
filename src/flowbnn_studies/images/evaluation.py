"""Evaluation of a trained variant on test, out-of-distribution and corrupted images, the same for all methods."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowbnn.compare.measurement import sample_count
from flowbnn.compare.results import CLASSIFICATION, Metric, SeedResults
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
MAX_BATCH = 16384  # rows of one pass on a GPU, whose memory several jobs share
MIRROR = (
    "Mean of the predictions for the image and its mirror image (test-time augmentation). Half as many networks are averaged, so that "
    "the cost is the same."
)
SIX_VIEWS = (
    "Mean of the predictions for six views: the image and its mirror image, unchanged and translated by one pixel along either "
    "diagonal. A sixth as many networks are averaged, so that the cost is no higher."
)


def _translate_and_mirror(step: int) -> View:
    return lambda images: mirror(Translate(step, step)(images))


# the five views in addition to the image itself
VIEWS: tuple[View, ...] = (
    mirror,
    *(view for step in (1, -1) for view in (Translate(step, step), _translate_and_mirror(step))),
)


def image_metrics(novel: dict[str, str]) -> tuple[Metric, ...]:
    """Returns the columns of the table.

    Args:
        novel: Names of the kinds of out-of-distribution images.
    """
    shift, cost = "Out-of-distribution and corrupted images", "Cost"
    entropy = "Probability that an out-of-distribution image ({}) has a higher predictive entropy than a test image; 0.5 is chance."
    mutual = "AUROC ({}) by the mutual information of label and network; a single network has none."
    energy = "AUROC ({}) by the energy, minus the logarithm of the sum of the exponentials of the logits."
    views = {
        "mirror": ("two views", MIRROR, "Image and mirror image"),
        "moved": ("six views", SIX_VIEWS, "Six views of an image"),
    }
    adaptive = (
        f"Fraction of the samples that adaptive sampling uses on the test images, with a tolerance of {ADAPTIVE.tolerance} in "
        f"probability or a decision certain to {100 * ADAPTIVE.certainty:g} %."
    )
    # fmt: off
    return (
        *CLASSIFICATION,
        *(Metric(f"auroc_{k}", f"AUROC {name}", "higher", ".3f", entropy.format(name), shift) for k, name in novel.items()),
        *(Metric(f"mi_{k}", f"AUROC {name}, by MI", "higher", ".3f", mutual.format(name), shift) for k, name in novel.items()),
        *(Metric(f"energy_{k}", f"AUROC {name}, by energy", "higher", ".3f", energy.format(name), shift) for k, name in novel.items()),
        Metric("shift_accuracy", "Accuracy, corrupted", "higher", ".3f",
               "Accuracy on corrupted images, mean over all kinds of corruption and five strengths.", shift),
        Metric("shift_nll", "NLL, corrupted", "lower", ".3f",
               "Negative log-likelihood (NLL) on corrupted images, mean over all kinds and strengths.", shift),
        Metric("shift_matched_nll", "NLL, corrupted, matched entropy", "lower", ".3f",
               "NLL on corrupted images, tempered for each kind and strength to the mean entropy of the deterministic network of "
               "that seed.",
               shift),
        Metric("shift_ece", "ECE, corrupted", "lower", ".3f", "ECE on corrupted images, mean over all kinds and strengths.", shift),
        *(Metric(f"{prefix}_{m.key}", f"{m.label}, {words}", m.better, ".4f", definition, group)
          for prefix, (words, definition, group) in views.items() for m in CLASSIFICATION[:3]),
        Metric("step", "Training step", "lower", ".2f", "Time of a training step relative to the deterministic network.", cost),
        Metric("memory", "Training memory", "lower", ".2f", "Peak memory in training relative to the deterministic network.", cost),
        Metric("prediction", "Prediction", "lower", ".2f",
               "Time of a prediction with all samples relative to the deterministic network on as many rows.", cost),
        Metric("minutes", "Minutes", "none", ".2f",
               "Time of one training with its curves, while other trainings ran on the same device.", cost),
        Metric("adaptive", "Adaptive samples", "lower", ".3f", adaptive, cost),
        Metric("agreement", "Same decisions", "higher", ".4f",
               "Fraction of test images with the same predicted class as with all samples.", cost),
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
    """Returns the predictive distribution on the device, with the same draws for all images and at every call."""
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
    """Evaluates several views of an image, as far as they occur in training.

    There are two views (image and mirror image) if training mirrors images. There are six if it also translates them and
    ``settings.six_views`` is set. Fewer networks are averaged, so that the number of forward passes is the same.
    """
    values: dict[str, float] = {}
    views_by_prefix = {"mirror": VIEWS[:1]} if training.flip else {}
    if training.flip and training.padding and settings.six_views:
        views_by_prefix["moved"] = VIEWS
    for prefix, views in views_by_prefix.items():
        networks = max(1, settings.samples // (1 + len(views)))
        scores = predict(posterior, pair[0], networks, precision, views=views).evaluate(pair[1])
        values |= {f"{prefix}_{name}": scores[name] for name in ("accuracy", "nll", "ece")}
    return values


def _curves(posterior: Posterior, number: int) -> dict[str, list[float]]:
    """Returns the history of a training: terms of the ELBO in nats per image, and accuracy and ECE if recorded."""
    history = posterior.history
    names = {"elbo": "elbo", "log_likelihood": "log_likelihood", "kl": "kl"}
    names |= {"accuracy": "validation_accuracy", "ece": "validation_ece"}
    return {
        name: [round((1.0 / number if name == "kl" else 1.0) * value, 6) for value in history[key]]
        for name, key in names.items()
        if key in history
    }


def evaluate(
    posterior: Posterior, data: ImageData, settings: ImageSettings, training: Training, precision: str
) -> dict[str, Any]:
    """Computes everything that the table and the figures need of one trained network."""
    images, labels = data.test
    number = sample_count(posterior, settings.samples)
    predictive = predict(posterior, images, settings.samples, precision)
    values = predictive.evaluate(labels)
    values["minutes"] = posterior.history.seconds / 60
    content: dict[str, Any] = {
        "values": values,
        "curves": _curves(posterior, data.num_data),
        "bins": reliability(predictive.probabilities, labels),
    }
    if number > ADAPTIVE.start:
        adaptive = predict(posterior, images, settings.samples, precision, ADAPTIVE)
        values["adaptive"] = float(adaptive.sample_counts.double().mean()) / settings.samples
        values["agreement"] = float((adaptive.labels == predictive.labels).double().mean())
        del adaptive
    del predictive
    values |= _evaluate_views(posterior, data.test, settings, training, precision)
    shift_values, shift_content = evaluate_shift(posterior, data, settings, precision)
    values |= shift_values
    return content | shift_content


def evaluate_shift(
    posterior: Posterior, data: ImageData, settings: ImageSettings, precision: str
) -> tuple[dict[str, float], dict[str, Any]]:
    """Computes metrics on out-of-distribution and corrupted images, and the data of their figures."""
    # the same number of samples as for the images that it is compared with
    reference = predict(posterior, data.test[0][: settings.shift_images], settings.shift_samples, precision)
    values: dict[str, float] = {}
    entropy = {"known": histogram(reference.entropy, 0.0, 2.4, 24)}
    for key, inputs in data.novel(settings.shift_images).items():
        novel = predict(posterior, inputs, settings.shift_samples, precision)
        values[f"auroc_{key}"] = novelty_auroc(reference.entropy, novel.entropy)
        if novel.num_samples > 1:
            values[f"mi_{key}"] = novelty_auroc(reference.mutual_information, novel.mutual_information)
        values[f"energy_{key}"] = novelty_auroc(reference.energy, novel.energy)
        entropy[key] = histogram(novel.entropy, 0.0, 2.4, 24)
    shift: dict[str, dict[str, list[float]]] = {
        kind: {"accuracy": [], "nll": [], "ece": []} for kind in settings.corruptions
    }
    tempering: dict[str, list[Curve]] = {kind: [] for kind in settings.corruptions}
    for kind, curves in shift.items():
        for strength in STRENGTHS:
            corrupted, truth = data.corrupted(kind, strength, settings.shift_images)
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
    """Computes mean entropy and NLL of log-probabilities ``[B, C]`` at each of the :data:`TEMPERATURES`.

    >>> curve = tempering_curve(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([0]))
    >>> round(curve["nll"][24], 4), round(curve["nll"][28], 4)  # at T = 1: -log 0.8; at T = 2: -log 2/3
    (0.2231, 0.4055)
    """
    temperatures = torch.tensor(TEMPERATURES, dtype=torch.float64)[:, None, None]
    log_p = torch.log_softmax(log_probabilities.cpu().double() / temperatures, -1)
    target_log_p = log_p[:, torch.arange(len(labels)), labels.cpu()]
    return {
        "entropy": torch.special.entr(log_p.exp()).sum(-1).mean(-1).tolist(),
        "nll": target_log_p.mean(-1).neg().tolist(),
    }


def nll_at_entropy(curve: Curve, entropy: float) -> float | None:
    """Returns the NLL at a mean entropy, by cubic splines over the log-temperature; None outside the range of temperatures."""
    from scipy.interpolate import CubicSpline  # imported here because it slows down every command
    from scipy.optimize import brentq

    entropies = CubicSpline(np.log(TEMPERATURES), curve["entropy"])
    low, high = np.log(TEMPERATURES[0]), np.log(TEMPERATURES[-1])
    if not entropies(low) <= entropy <= entropies(high):
        return None
    log_temperature = brentq(lambda x: float(entropies(x)) - entropy, low, high)
    return float(CubicSpline(np.log(TEMPERATURES), curve["nll"])(log_temperature))


def add_matched_nll(parts: SeedResults, variants: Sequence[Variant], plain: dict[str, str]) -> SeedResults:
    r"""Adds ``shift_matched_nll`` to the parts: the NLL under corruption at the certainty of the deterministic network.

    Corrupted images are harder than validation images, so any method that spreads the probabilities has a lower NLL there. To
    compare methods at the same certainty, the predictive distribution of each is tempered, :math:`p_T \propto \bar p^{1/T}`. For
    each kind and strength of corruption, one temperature matches the mean entropy over the images to that of the deterministic
    network of the same seed:

    .. math:: \mathrm{NLL}_\mathrm{matched} = -\frac1n \sum_i \log p_T(y_i \mid x_i), \qquad
              \frac1n \sum_i H[p_T(\cdot \mid x_i)] = \frac1n \sum_i H[p_\mathrm{plain}(\cdot \mid x_i)] .

    The metric is the mean over kinds and strengths. It requires the deterministic network of the seed. The temperature uses no label.
    Trinh et al. 2022 (https://arxiv.org/abs/2206.02435) relate the NLL to the entropy of the latent noise.
    The predictive entropy is also available for SWAG, ensembles and the deterministic network.

    Args:
        parts: Results by variant and seed.
        variants: Variants of the study.
        plain: Key of the deterministic network for each recipe, the first word of a variant's key.
    """
    content = dict(parts.content)
    unit_index = TEMPERATURES.index(1.0)
    for variant in variants:
        for seed in parts.seeds:
            part = parts.content.get((variant.key, seed), {})
            reference_part = parts.content.get((plain.get(variant.key.partition("-")[0], ""), seed), {})
            if "tempered" not in part or set(reference_part.get("tempered", ())) != set(part["tempered"]):
                continue
            values = [
                nll_at_entropy(curve, reference["entropy"][unit_index])
                for kind, curves in part["tempered"].items()
                for curve, reference in zip(curves, reference_part["tempered"][kind], strict=True)
            ]
            if None not in values:
                mean = float(np.mean(values))  # type: ignore[arg-type]
                content[variant.key, seed] = {**part, "values": {**part["values"], "shift_matched_nll": mean}}
    return SeedResults(parts.seeds, content)
