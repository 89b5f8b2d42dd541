"""Is an image of another kind less probable? Nalisnick et al. 2018 (https://arxiv.org/abs/1810.09136) found that it often is not."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.compare.results import Metric, Parts, figure
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
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, regroup_parts

SETS = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
OTHER = {"fashion-mnist": "mnist", "mnist": "fashion-mnist"}
METHODS = {
    "density": "Log-density of the image",
    "typicality": "Typicality of its log-density",
    "features": "Log-density of a classifier's features",
    "confidence": "Confidence of that classifier",
}
NUMBERS = {  # label of the column, which names the familiar or the novel set
    "auroc": ("AUROC, novel {novel}", "higher", "Area under the ROC curve of novel against familiar test images; 0.5 is chance."),
    "found": ("Found, novel {novel}", "higher", "Share of the novel images that are called novel, at the rate of false alarms set."),
    "alarms": ("False alarms, {familiar}", "none", "Share of the familiar test images that are called novel."),
    "accuracy": ("Accuracy, {familiar}", "none", "Of the classifier on the familiar test images."),
    "own": ("Bits, familiar {familiar}", "none", "Bits per dimension of the familiar test images under the Glow."),
    "novel": ("Bits, novel {novel}", "none", "Bits per dimension of the novel images; fewer than of the familiar ones is the failure."),
}  # fmt: skip


@options(kw_only=True)
class Settings(ImageSource):
    """What the study depends on.

    Args:
        length, width, levels: of the Glow: steps at each level, channels of its networks, and levels.
        epochs, batch, lr: of its training.
        classifier_epochs: of the LeNet.
        features_epochs, features_length, features_width: of the neural spline flow of its features.
        validation: training images put aside, on which thresholds are set.
        tested: test images of each set.
        rate: of false alarms that the detectors are set to.
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
    tested: Count = 10_000
    rate: Probability = 0.05


class NoveltyByDensity(Study):
    name = "novelty-by-density"
    title = "Novel images by their density"
    description = "a flow learns Fashion-MNIST and is shown MNIST, and the reverse: novelty by density, typicality and features"
    question = (
        "A flow learns one set of images and is shown another. Are images of the other set less probable, are they less typical, "
        "and is the density of a classifier's features the better judge?"
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
        tested, truth = (part[: s.tested] for part in read_bytes(job, job.variant, "test"))
        novel = read_bytes(job, OTHER[job.variant], "test")[0][: s.tested]
        learned, aside = images[: -s.validation], images[-s.validation :]
        torch.manual_seed(job.seed)
        shape, hidden = tuple(images.shape[1:]), (s.width, s.width)
        flow = Glow(shape, length=s.length, hidden=hidden, data_init=True, levels=s.levels)
        exact = job.short_options(precision="32-true")
        common = {"epochs": s.epochs, "batch_size": s.batch, "lr": s.lr, "validation": 0.0}
        density = fit_density(flow.to(job.device), learned, **common, **exact)
        values: dict[str, float] = {}
        for by in ("density", "typicality"):
            values |= evaluate_detector(density, by, aside, tested, novel, s.rate)
        bits = [density.bits_per_dimension(some) for some in (tested, novel)]
        values |= {"density_own": bits[0], "density_novel": bits[1]}

        prepare = read_images(job.variant, "train", s).normalizer()
        loader = shuffled_loader(
            (prepare(learned), labels[: -s.validation]), s.batch, job.seed, job.device, drop_last=True
        )
        method = MLE(epochs=s.classifier_epochs, lr=s.lr)
        network = method.fit(
            LeNet(1, 10).to(job.device), loader, **job.short_options(), num_data=len(learned)
        ).model.eval()
        features, logits = zip(
            *(read_features(network, prepare(some)) for some in (learned, aside, tested, novel)), strict=True
        )
        own = NSF(features[0].shape[1], length=s.features_length, hidden=(s.features_width, s.features_width))
        common |= {"epochs": s.features_epochs, "validation": 0.1}
        of_features = fit_density(own.to(job.device), features[0], **common, **exact)
        values |= evaluate_detector(
            of_features, "density", features[1], features[2], features[3], s.rate, name="features"
        )
        unsure = [1.0 - each.softmax(1).amax(1).cpu() for each in logits]
        limit = torch.quantile(unsure[1], 1.0 - s.rate)
        values["confidence_auroc"] = novelty_auroc(unsure[2], unsure[3])
        values["confidence_alarms"] = float((unsure[2] >= limit).double().mean())
        values["confidence_found"] = float((unsure[3] >= limit).double().mean())
        values["confidence_accuracy"] = float((logits[2].argmax(1) == truth).double().mean())
        shown = {}
        for key, model, sides in (
            ("density", density, (tested, novel)),
            ("features", of_features, features[2:]),
        ):
            scores = [model.score(side).double() for side in sides]
            size = sides[0][0].numel()
            per_number = [(one / size).clamp(min=-1e6) for one in scores]
            both = torch.cat(per_number)
            low, high = (float(torch.quantile(both, share)) for share in (0.01, 0.99))
            high = high if high > low else low + 1.0
            shown[key] = {
                name: histogram(one, low, high, 40)
                for name, one in zip(("known", "novel"), per_number, strict=True)
            }
        return {"values": values, "histograms": shown}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        # from density_auroc of a set to auroc_mnist of a method
        by_method = regroup_parts(
            parts, lambda variant, name: (name.partition("_")[0], f"{name.partition('_')[2]}_{variant}")
        )
        metrics = []
        for name, title in SETS.items():
            sets = {"familiar": title, "novel": SETS[OTHER[name]]}
            for key, (label, better, meaning) in NUMBERS.items():
                models = "" if key in ("auroc", "found", "alarms") else ": the Glow and the classifier"
                group = f"Trained on {title}, shown {sets['novel']}{models}"
                metrics.append(Metric(f"{key}_{name}", label.format(**sets), better, ".3f", meaning, group))
        rows = [by_method.row(key, label, metrics) for key, label in METHODS.items() if by_method.of(key)]
        figures = []
        for key, title in (("density", "Log-density of images"), ("features", "Log-density of features")):
            shown = {
                f"Trained on {label}": [
                    part["histograms"][key] for part in parts.of(name)[:1] if "histograms" in part
                ]
                for name, label in SETS.items()
            }
            panels = histogram_panels(
                {label: found for label, found in shown.items() if found},
                {"known": "familiar", "novel": "novel"},
            )
            unit = "nats per pixel" if key == "density" else "nats per feature"
            caption = (
                f"First seed: {title.lower()}, in {unit}, of familiar and novel test images. A detector works where the novel ones "
                "lie to the left; where they lie to the right, they are taken for more probable than the familiar ones."
            )
            figures.append(figure("histogram", title, caption, {"x_label": unit, "panels": panels}))
        notes = [
            f"Glow of {settings.levels} levels of {settings.length} steps on bytes, dequantized by uniform noise, {settings.epochs} "
            f"epochs; thresholds are set on {settings.validation:,} training images put aside, so that {settings.rate:.0%} of the "
            "familiar images are false alarms.",
            "Raw likelihood is known to fail: Nalisnick et al. 2018 found that a Glow of Fashion-MNIST gives MNIST higher densities "
            "than its own test images, and one of CIFAR-10 SVHN. Images with little contrast and texture are probable under many "
            "flows, whatever they show. By typicality both very high and very low densities are strange.",
            "Typicality is the distance of an image's log-density to the mean of those put aside (Nalisnick et al. 2019), for single "
            "images. Features are the 84 numbers before the last layer's ReLU of a LeNet that was trained on the labels of the "
            f"familiar set, with a neural spline flow for their density. {pluralize(len(parts.seeds)).capitalize()}.",
        ]
        return Findings(answer(by_method), metrics, rows, figures, notes)


def evaluate_detector(
    density: Density, by: Any, aside: Tensor, tested: Tensor, novel: Tensor, rate: float, name: str = ""
) -> dict[str, float]:
    """How well a detector tells novel from familiar ones."""
    detector = density.novelty(aside, rate, by)
    name = name or by
    return {
        f"{name}_auroc": novelty_auroc(detector.novelty_score(tested), detector.novelty_score(novel)),
        f"{name}_found": float(detector.is_novel(novel).double().mean()),
        f"{name}_alarms": float(detector.is_novel(tested).double().mean()),
    }


@torch.no_grad()
def read_features(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """What a LeNet's last hidden layer gives, before its ReLU, and the logits.

    >>> [part.shape for part in read_features(LeNet(1, 10), torch.zeros(3, 1, 28, 28))]
    [torch.Size([3, 84]), torch.Size([3, 10])]
    """
    found: list[Tensor] = []
    hook = network.fc2.register_forward_hook(lambda module, given, output: found.append(output))  # type: ignore[union-attr]
    logits = [network(batch) for (batch,) in TensorLoader(images, batch_size=4096)]
    hook.remove()
    return torch.cat(found), torch.cat(logits)


def answer(by_method: Parts) -> str:
    """The answer, put together from the numbers."""
    lines = []
    for name, label in SETS.items():
        known = {
            key: by_method.mean(key, f"auroc_{name}")
            for key in METHODS
            if by_method.values(key, f"auroc_{name}")
        }
        if not known:
            continue
        told = ", ".join(f"{METHODS[key].lower()} {value:.3f}" for key, value in known.items())
        bits = [by_method.mean("density", f"{which}_{name}") for which in ("own", "novel")]
        failed = (
            " The novel images are more probable than the familiar ones: raw likelihood fails."
            if known["density"] < 0.5
            else ""
        )
        lines.append(
            f"Trained on {label}, AUROC for {SETS[OTHER[name]]}: {told}. Bits per dimension: {bits[0]:.2f} familiar, {bits[1]:.2f} "
            f"novel.{failed}"
        )
    return "\n".join(lines) or "Nothing has numbers yet."
