"""Detection of novel images by their density. Nalisnick et al. 2018 (https://arxiv.org/abs/1810.09136) found that it often fails."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.compare.results import Metric, SeedResults, figure
from flowbnn.data import TensorLoader
from flowbnn.density import Density, fit_density
from flowbnn.flows import NSF, Glow
from flowbnn.methods import MLE
from flowbnn.metrics import novelty_auroc
from flowbnn.models import LeNet
from flowbnn.options import Count, Positive, Probability, options
from flowbnn_studies.images.data import read_bytes, read_images
from flowbnn_studies.images.settings import ImageSource
from flowbnn_studies.runner.findings import histogram, histogram_panels, pluralize
from flowbnn_studies.runner.methods import shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, regroup_parts

SETS = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
OTHER = {"fashion-mnist": "mnist", "mnist": "fashion-mnist"}
METHODS = {
    "density": "Log-density of the image",
    "typicality": "Typicality of the log-density",
    "features": "Log-density of the features of a classifier",
    "confidence": "Confidence of the classifier",
}
NUMBERS = {  # label with the name of the familiar or the novel set, better direction, definition
    "auroc": ("AUROC, novel {novel}", "higher", "Area under the ROC curve of novel against familiar test images; 0.5 is chance."),
    "found": ("Detected, novel {novel}", "higher", "Fraction of novel images that are detected, at the given rate of false alarms."),
    "alarms": ("False alarms, {familiar}", "none", "Fraction of familiar test images that are classified as novel."),
    "accuracy": ("Accuracy, {familiar}", "none", "Accuracy of the classifier on familiar test images."),
    "own": ("Bits, familiar {familiar}", "none", "Bits per dimension of familiar test images under Glow."),
    "novel": ("Bits, novel {novel}", "none", "Bits per dimension of novel images under Glow. Detection fails if there are fewer "
                                             "than for familiar images."),
}  # fmt: skip


@options(kw_only=True)
class Settings(ImageSource):
    """Settings of the study.

    Args:
        length, width, levels: Steps at each level, channels of the networks, and levels of Glow.
        epochs, batch, lr: Epochs, batch size and learning rate of Glow.
        classifier_epochs: Epochs of the LeNet.
        features_epochs, features_length, features_width: Epochs, length and width of the neural spline flow of the features.
        validation: Number of validation images, on which thresholds are set.
        num_tested: Number of test images of each set.
        rate: Rate of false alarms of the detectors.
    """

    generated: Count = 200
    length: Count = 8
    width: Count = 64
    levels: Count = 2
    epochs: Count = 30
    batch: Count = 256
    lr: Positive = 1e-3
    classifier_epochs: Count = 10
    features_epochs: Count = 30
    features_length: Count = 4
    features_width: Count = 128
    validation: Count = 10_000
    num_tested: Count = 10_000
    rate: Probability = 0.05


class NoveltyByDensity(Study):
    name = "novelty-by-density"
    title = "Detection of novel images by density"
    description = "flows trained on Fashion-MNIST and tested on MNIST, and vice versa: novelty by density, typicality and features"
    question = (
        "A flow is trained on one set of images and tested on another. Are the other images less probable or less typical, and "
        "does the density of the features of a classifier detect them better?"
    )
    source = "Nalisnick et al. 2018 (density) and 2019 (typicality), both with Glow"
    settings = Settings
    seeds = 3
    accelerator = "auto"
    headline = ("auroc_fashion-mnist", "auroc_mnist", "found_fashion-mnist", "found_mnist")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "length": 1, "width": 4, "levels": 1, "epochs": 1, "batch": 50, "classifier_epochs": 1,
        "features_epochs": 1, "features_length": 1, "features_width": 8, "validation": 50,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return tuple(Variant(key, f"Trained on {label}") for key, label in SETS.items())

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        images, labels = read_bytes(job, job.variant, "train")
        test, test_labels = (tensor[: s.num_tested] for tensor in read_bytes(job, job.variant, "test"))
        novel = read_bytes(job, OTHER[job.variant], "test")[0][: s.num_tested]
        train, validation = images[: -s.validation], images[-s.validation :]
        torch.manual_seed(job.seed)
        shape, hidden = tuple(images.shape[1:]), (s.width, s.width)
        flow = Glow(shape, length=s.length, hidden=hidden, data_init=True, levels=s.levels)
        exact = job.short_options(precision="32-true")
        common = {"epochs": s.epochs, "batch_size": s.batch, "lr": s.lr, "validation": 0.0}
        density = fit_density(flow.to(job.device), train, **common, **exact)
        values: dict[str, float] = {}
        for by in ("density", "typicality"):
            values |= evaluate_detector(density, by, validation, test, novel, s.rate)
        bits = [density.bits_per_dimension(inputs) for inputs in (test, novel)]
        values |= {"density_own": bits[0], "density_novel": bits[1]}

        prepare = read_images(job.variant, "train", s).normalizer()
        network = _train_classifier(job, prepare(train), labels[: -s.validation])
        features, logits = zip(
            *(read_features(network, prepare(inputs)) for inputs in (train, validation, test, novel)),
            strict=True,
        )
        spline = NSF(
            features[0].shape[1], length=s.features_length, hidden=(s.features_width, s.features_width)
        )
        common |= {"epochs": s.features_epochs, "validation": 0.1}
        feature_density = fit_density(spline.to(job.device), features[0], **common, **exact)
        _, validation_features, test_features, novel_features = features
        values |= evaluate_detector(
            feature_density,
            "density",
            validation_features,
            test_features,
            novel_features,
            s.rate,
            name="features",
        )
        values |= _evaluate_confidence(logits[1], logits[2], logits[3], s.rate)
        values["confidence_accuracy"] = float((logits[2].argmax(1) == test_labels).double().mean())
        histograms = {
            "density": _score_histograms(density, test, novel),
            "features": _score_histograms(feature_density, test_features, novel_features),
        }
        return {"values": values, "histograms": histograms}

    def story(self, numbers: Numbers) -> Story:
        forward, back = "auroc_fashion-mnist", "auroc_mnist"
        raw, features = (numbers.text(key, forward) for key in ("density", "features"))
        return Story(
            "Does a flow give unfamiliar images a low density?",
            f"Not in general: a flow of Fashion-MNIST finds MNIST more probable (AUROC {raw}), the density of a classifier's features "
            f"detects it ({features}), but in the other direction the raw density is enough ({numbers.text('density', back)}).",
            f"{raw} vs {features}",
            "AUROC for MNIST after Fashion-MNIST: density of the image, density of features",
            (forward, back, "found_fashion-mnist"),
            figure="histogram",
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        # value density_auroc of variant mnist becomes auroc_mnist of row density
        by_method = regroup_parts(
            parts, lambda variant, name: (name.partition("_")[0], f"{name.partition('_')[2]}_{variant}")
        )
        metrics = []
        for name, title in SETS.items():
            sets = {"familiar": title, "novel": SETS[OTHER[name]]}
            for key, (label, better, definition) in NUMBERS.items():
                models = "" if key in ("auroc", "found", "alarms") else ": Glow and classifier"
                group = f"Trained on {title}, tested on {sets['novel']}{models}"
                metrics.append(
                    Metric(f"{key}_{name}", label.format(**sets), better, ".3f", definition, group)
                )
        rows = [by_method.row(key, label, metrics) for key, label in METHODS.items() if by_method.of(key)]
        figures = []
        for key, title in (("density", "Log-density of images"), ("features", "Log-density of features")):
            contents = {
                f"Trained on {label}": [
                    part["histograms"][key] for part in parts.of(name)[:1] if "histograms" in part
                ]
                for name, label in SETS.items()
            }
            panels = histogram_panels(
                {label: histograms for label, histograms in contents.items() if histograms},
                {"known": "familiar", "novel": "novel"},
            )
            unit = "nats per pixel" if key == "density" else "nats per feature"
            caption = (
                f"First seed: {title.lower()}, in {unit}, of familiar and novel test images. Detection works if the densities of "
                "novel images are lower. It fails if they are higher."
            )
            figures.append(figure("histogram", title, caption, {"x_label": unit, "panels": panels}))
        notes = [
            f"Glow has {settings.levels} levels of {settings.length} steps on bytes, dequantized by uniform noise, and "
            f"{settings.epochs} epochs. Thresholds are set on {settings.validation:,} validation images, so that "
            f"{settings.rate:.0%} of the familiar images are false alarms.",
            "The likelihood is known to fail: Nalisnick et al. 2018 found that Glow trained on Fashion-MNIST has higher densities "
            "on MNIST than on its own test images, and Glow trained on CIFAR-10 on SVHN. Images with little contrast and texture "
            "are probable under many flows. By typicality, both very high and very low densities are novel.",
            "Typicality is the distance of the log-density of an image to the mean over validation images (Nalisnick et al. 2019), "
            "for single images. Features are the 84 outputs of the last hidden layer, before its ReLU, of a LeNet trained on the "
            f"labels of the familiar set. Their density is a neural spline flow. {pluralize(len(parts.seeds)).capitalize()}.",
        ]
        return Findings(answer(by_method), metrics, rows, figures, notes)


def _train_classifier(job: Job, images: Tensor, labels: Tensor) -> nn.Module:
    """Trains a LeNet on the labels of the familiar set."""
    s: Settings = job.settings
    loader = shuffled_loader((images, labels), s.batch, job.seed, job.device, drop_last=True)
    method = MLE(epochs=s.classifier_epochs, lr=s.lr)
    network = LeNet(1, 10).to(job.device)
    return method.fit(network, loader, **job.short_options(), num_data=len(images)).model.eval()


def _evaluate_confidence(validation: Tensor, test: Tensor, novel: Tensor, rate: float) -> dict[str, float]:
    """Evaluates the detection by the confidence of the classifier, from logits."""
    validation_scores, familiar_scores, novel_scores = (
        1.0 - logits.softmax(1).amax(1).cpu() for logits in (validation, test, novel)
    )
    threshold = torch.quantile(validation_scores, 1.0 - rate)
    return {
        "confidence_auroc": novelty_auroc(familiar_scores, novel_scores),
        "confidence_alarms": float((familiar_scores >= threshold).double().mean()),
        "confidence_found": float((novel_scores >= threshold).double().mean()),
    }


def _score_histograms(density: Density, test: Tensor, novel: Tensor) -> dict[str, Any]:
    """Returns histograms of the log-density per dimension, between the 1 % and 99 % quantiles."""
    size = test[0].numel()
    scores = [(density.score(inputs).double() / size).clamp(min=-1e6) for inputs in (test, novel)]
    both = torch.cat(scores)
    low, high = (float(torch.quantile(both, level)) for level in (0.01, 0.99))
    high = high if high > low else low + 1.0
    return {
        name: histogram(values, low, high, 40)
        for name, values in zip(("known", "novel"), scores, strict=True)
    }


def evaluate_detector(
    density: Density, by: Any, validation: Tensor, test: Tensor, novel: Tensor, rate: float, name: str = ""
) -> dict[str, float]:
    """Evaluates a detector of novel inputs.

    Args:
        density: Density of familiar inputs.
        by: Score of the detector: density or typicality.
        validation: Familiar inputs that set the threshold.
        test: Familiar test inputs.
        novel: Novel inputs.
        rate: Rate of false alarms.
        name: Name of the row; ``by`` by default.
    """
    detector = density.novelty(validation, rate, by)
    name = name or by
    return {
        f"{name}_auroc": novelty_auroc(detector.novelty_score(test), detector.novelty_score(novel)),
        f"{name}_found": float(detector.is_novel(novel).double().mean()),
        f"{name}_alarms": float(detector.is_novel(test).double().mean()),
    }


@torch.no_grad()
def read_features(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the outputs of the last hidden layer of a LeNet, before its ReLU, and the logits.

    >>> [tensor.shape for tensor in read_features(LeNet(1, 10), torch.zeros(3, 1, 28, 28))]
    [torch.Size([3, 84]), torch.Size([3, 10])]
    """
    features: list[Tensor] = []
    hook = network.fc2.register_forward_hook(lambda module, inputs, output: features.append(output))  # type: ignore[union-attr]
    logits = [network(batch) for (batch,) in TensorLoader(images, batch_size=4096)]
    hook.remove()
    return torch.cat(features), torch.cat(logits)


def answer(by_method: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""
    lines = []
    for name, label in SETS.items():
        aurocs = {
            key: by_method.mean(key, f"auroc_{name}")
            for key in METHODS
            if by_method.values(key, f"auroc_{name}")
        }
        if not aurocs:
            continue
        values = ", ".join(f"{METHODS[key].lower()} {value:.3f}" for key, value in aurocs.items())
        bits = [by_method.mean("density", f"{kind}_{name}") for kind in ("own", "novel")]
        failure = (
            " The novel images are more probable than the familiar ones, so the likelihood fails."
            if aurocs["density"] < 0.5
            else ""
        )
        lines.append(
            f"Trained on {label}, AUROC for {SETS[OTHER[name]]}: {values}. Bits per dimension: {bits[0]:.2f} familiar, {bits[1]:.2f} "
            f"novel.{failure}"
        )
    return "\n".join(lines) or "There are no results yet."
