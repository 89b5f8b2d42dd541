"""8x8 digits with one class unseen in training: deterministic network, dropout, Gaussian noise and flow noise."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from flowbnn.compare.results import CLASSIFICATION, Metric, SeedResults, figure, reliability_figure
from flowbnn.data import Digits, load_digits
from flowbnn.methods import Posterior
from flowbnn.metrics import novelty_aupr, novelty_auroc, reliability
from flowbnn.models import SmallConv
from flowbnn.noise import Dropout, NormalAffine, NormalInvConv, NormalPlanar, Recipe
from flowbnn.options import Bounds, Count, NonNegative, UnitInterval, options
from flowbnn.predictive import CategoricalPredictive
from flowbnn_studies.runner.findings import (
    density_figure,
    density_pair,
    density_panels,
    histogram,
    histogram_panels,
    paired_difference,
    pluralize,
    round_values,
    training_figure,
)
from flowbnn_studies.runner.methods import predict, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

# fmt: off
METRICS = (
    *CLASSIFICATION[:3],
    Metric("auroc", "Novelty AUROC", "higher", ".4f",
           "Probability that an image of the unseen digit has a higher predictive entropy than one of a known digit; 0.5 is chance."),
    CLASSIFICATION[3],
    Metric("aupr", "Novelty AUPR", "higher", ".4f", "Average precision of the detection of the unseen digit by predictive entropy."),
    Metric("auroc_mi", "AUROC by MI", "higher", ".4f",
           "Novelty AUROC by the mutual information of label and network; a single network has none."),
    Metric("auroc_energy", "AUROC by energy", "higher", ".4f",
           "Novelty AUROC by the energy, minus the logarithm of the sum of the exponentials of the logits."),
    Metric("aupr_mi", "AUPR by MI", "higher", ".4f", "Novelty AUPR by the mutual information."),
)
# fmt: on


@options
class Settings:
    """Settings of the study.

    Args:
        novel: Digit that is excluded from training.
        width, hidden: Number of channels and of hidden units of the network.
        batch: Number of images in a step.
        start_epochs: Epochs of the deterministic network that every variant starts from.
        epochs: Further epochs of each variant, including the deterministic one.
        weight_lr, noise_lr: Learning rates of the weights and of the noise.
        dropout: Dropout rate, at the same layers as the noise.
        flow_length: Number of planar flows at ``fc1``.
        samples: Number of networks averaged in a prediction.
    """

    novel: Annotated[int, Bounds(ge=0, le=9)] = 8
    width: Count = 12
    hidden: Count = 64
    batch: Count = 128
    start_epochs: Count = 10
    epochs: Count = 20
    weight_lr: NonNegative = 1e-2
    noise_lr: NonNegative = 5e-2
    dropout: UnitInterval = 0.05
    flow_length: Count = 2
    samples: Count = 128


def noise_rules(settings: Settings, variant: str) -> dict[Any, Recipe | None]:
    """Returns the noise of a variant by layer. The flows are at the layers of Xiong's LeNet."""
    if variant == "plain":
        return {}
    if variant == "dropout":
        # as usual: channels before convolutions, single features before linear layers
        return {"*": Dropout(rate=settings.dropout, site="channel"), "conv1": None}
    if variant == "gaussian":
        return {"*": NormalAffine(base_scale=0.5)}
    return {
        "conv2": NormalInvConv(base_scale=0.5),
        "fc1": NormalPlanar(settings.flow_length, base_scale=0.5),
        "*": NormalAffine(base_scale=0.5),
    }


class DigitsStudy(Study):
    name = "digits"
    title = "Digits with one unseen class"
    description = "small convolutional network on 8x8 digits, one unseen: deterministic, dropout, Gaussian noise, flow noise"
    question = (
        "A small convolutional network is trained on nine of the ten digits. Which kind of noise gives the best probabilities, and "
        "which detects the unseen digit?"
    )
    source = "flows at the layers of Xiong's report, section 4"
    seeds = 3
    settings = Settings
    partial = False
    keep_networks = True
    quick: ClassVar[dict[str, Any]] = {"start_epochs": 1, "epochs": 2, "samples": 8}

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return (
            Variant("start", "Common start", in_table=False),
            Variant("plain", "Deterministic", "mle", "start"),
            Variant("dropout", "Dropout", "mc-dropout", "start", cost=1.5),
            Variant("gaussian", "Gaussian noise", "node-noise-gaussian", "start", cost=2),
            Variant("flow", "Flow noise", "node-noise-planar", "start", cost=4),
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        digits = load_digits(s.novel, job.seed)
        loader = shuffled_loader(digits.train, s.batch, job.seed)
        network = SmallConv(classes=len(digits.known), width=s.width, hidden=s.hidden)
        if job.start_from is None:
            job.fit(network, loader, epochs=s.start_epochs)
            return {"values": {}}
        rules = noise_rules(s, job.variant)
        posterior = job.fit(job.load_start_network(network), loader, rules, CosineAnnealingLR)
        return self.evaluate(job, posterior, digits)

    def evaluate(self, job: Job, posterior: Posterior, digits: Digits) -> dict[str, Any]:
        """Computes everything that the table and the figures need of one trained network."""
        s: Settings = job.settings
        known, novel = (predict(posterior, images, s.samples) for images, _ in (digits.test, digits.novel))
        values = known.evaluate(digits.test[1])
        values["auroc"] = novelty_auroc(known.entropy, novel.entropy)
        values["aupr"] = novelty_aupr(known.entropy, novel.entropy)
        values["auroc_energy"] = novelty_auroc(known.energy, novel.energy)
        if posterior.default_samples > 1:
            values["auroc_mi"] = novelty_auroc(known.mutual_information, novel.mutual_information)
            values["aupr_mi"] = novelty_aupr(known.mutual_information, novel.mutual_information)
        history, names = posterior.history, ("elbo", "log_likelihood", "kl")
        content: dict[str, Any] = {
            "values": values,
            "history": {name: history[name] for name in names if name in history},
            "bins": reliability(known.probabilities, digits.test[1]),
            "entropy": {
                name: histogram(predictive.entropy, 0.0, 2.2, 22)
                for name, predictive in (("known", known), ("novel", novel))
            },
        }
        if job.variant == "flow":
            truth = [digits.known[label] for label in digits.test[1].tolist()]
            content["images"] = _images(digits.test[0], known, digits, truth)
            content["images"] += _images(digits.novel[0], novel, digits, None)
            content["densities"] = density_panels(posterior.model, ["conv2", "fc1"], 2, s.samples)
            content["pair"] = density_pair(posterior.model, "conv2")
        return content

    def story(self, numbers: Numbers) -> Story:
        best, novel = numbers.ranked("nll")[0], numbers.ranked("auroc")[0]
        plain = numbers.text("plain", "nll", ".3f")
        verdict = "is" if numbers.better(best, "plain", "nll") > 0 else "is not significantly"
        return Story(
            "Which noise gives a digit classifier the best probabilities?",
            f"{numbers.name(best)} has the lowest negative log-likelihood (NLL), {numbers.text(best, 'nll', '.3f')}, but {verdict} "
            f"better than the network without noise ({plain}), and for a digit that was never shown {numbers.name(novel)} "
            f"is {numbers.verdict(novel, 'plain', 'auroc')} than no noise (AUROC {numbers.text(novel, 'auroc')} versus "
            f"{numbers.text('plain', 'auroc')}).",
            f"{numbers.text(best, 'nll', '.3f')} vs {plain}",
            f"NLL with {numbers.name(best)} and without noise, {numbers.seeds} splits",
            ("nll", "ece", "accuracy", "auroc"),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        labels = self.row_labels(settings)
        notes = [
            f"Every variant starts from the same network of its seed, trained for {settings.start_epochs} epochs, and is trained "
            f"for {settings.epochs} more. Each seed has a split of its own: 60 % of the known digits for training, 15 % for the "
            f"choice of settings, 25 % for the table. The novel images are all images of the digit {settings.novel}.",
            "Learning rates, epochs and the dropout rate were chosen by the likelihood on the validation parts of two other "
            "splits, whose images overlap with the test images here.",
        ]
        rows = self.rows(settings, parts, METRICS)
        return Findings(answer(parts, labels), METRICS, rows, figures(parts, labels, settings.novel), notes)


def _images(
    images: Tensor, predictive: CategoricalPredictive, digits: Digits, truth: list[int] | None
) -> list[dict[str, Any]]:
    """Returns the images of median and highest entropy (for novel ones also of the lowest), with the four most likely digits."""
    order = predictive.entropy.argsort().tolist()
    panels = []
    for index in [order[place] for place in ((len(order) // 2, -1) if truth else (0, len(order) // 2, -1))]:
        probabilities, labels = (values.tolist() for values in predictive.probabilities[index].topk(4))
        name = f"a {truth[index]}" if truth else "novel"
        bars = [
            {"label": str(digits.known[label]), "value": round(value, 4)}
            for value, label in zip(probabilities, labels, strict=True)
        ]
        title = f"{name}, entropy {float(predictive.entropy[index]):.2f}"
        panels.append({"title": title, "pixels": round_values(images[index, 0], 3), "bars": bars})
    return panels


def answer(parts: SeedResults, labels: Mapping[str, str]) -> str:
    """Returns the answer, computed from the numbers."""

    def ranking(metric: str, higher: bool) -> str:
        order = sorted(labels, key=lambda key: parts.mean(key, metric), reverse=higher)
        best = order[0]
        means = ", ".join(f"{labels[key].lower()} {parts.mean(key, metric):.3f}" for key in order)
        values = parts.values(best, metric)
        close = [
            key for key in order[1:] if not paired_difference(values, parts.values(key, metric)).significant
        ]
        if len(parts.seeds) == 1:
            lead = "undecided with one split"
        elif not close:
            lead = "significantly better than all others"
        elif len(close) == len(order) - 1:
            lead = "not significantly better than any other"
        else:
            lead = f"not significantly better than {' and '.join(labels[key].lower() for key in close)}"
        return f"{labels[best].lower()} has the best mean, {lead} ({means})."

    flow = paired_difference(parts.values("flow", "auroc"), parts.values("gaussian", "auroc"))
    verdict = f"the difference of flow and Gaussian noise is {flow.inconclusive}"
    if flow.significant:
        verdict = f"flow noise is {'better' if flow.mean > 0 else 'worse'} than Gaussian noise"
    accuracies = [parts.mean(key, "accuracy") for key in labels]
    return (
        f"Negative log-likelihood (NLL, {pluralize(len(parts.seeds), 'split')}): {ranking('nll', False)}\nDetection of the unseen "
        f"digit (AUROC by entropy): {ranking('auroc', True)}\nThe accuracy is between {min(accuracies):.3f} and "
        f"{max(accuracies):.3f}.\nFor the detection, {verdict}: {flow.describe(3)}."
    ).replace("gaussian", "Gaussian")


def figures(parts: SeedResults, labels: Mapping[str, str], novel: int) -> list[dict[str, Any]]:
    """Returns the figures in the order of the page."""
    first = parts.seeds[0]
    flow = parts.content["flow", first]
    noisy = [key for key in labels if key in ("gaussian", "flow")]
    groups = {"known": "known digits", "novel": f"the unseen {novel}"}
    training = "Mean over seeds at each epoch after the common start, with a band of one standard deviation."
    densities = "densities of the noise dimensions that differ most from their prior, and one pair of them."
    entropies = {label: [part["entropy"] for part in parts.of(key)] for key, label in labels.items()}
    return [
        figure(
            "images",
            "Known and novel digits",
            f"Seed {first}, flow noise: known digits of median and of the highest predictive entropy, then images of the unseen "
            f"{novel} with the lowest, the median and the highest entropy. Bars: the four most likely digits.",
            {"panels": flow["images"]},
        ),
        figure(
            "histogram",
            "Entropy of known and unseen digits",
            "Predictive entropy in nats, all seeds together. A good method has higher entropies for the unseen digit.",
            {"x_label": "predictive entropy (nats)", "panels": histogram_panels(entropies, groups)},
        ),
        reliability_figure("Known digits.", labels, parts),
        training_figure(parts, labels, noisy, list(labels), training),
        density_figure(parts, densities, pairs=[flow["pair"]]),
    ]
