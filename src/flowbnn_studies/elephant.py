"""Unseen class in Ravenda's report ("the elephant in the office"): detection and rejection of a class that training never saw."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from torch import Tensor

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import CLASSIFICATION, Metric, SeedResults, best_first, figure
from flowbnn.data import Digits, TensorLoader, load_digits
from flowbnn.methods import Posterior
from flowbnn.metrics import novelty_auroc
from flowbnn.models import LeNet, SmallConv
from flowbnn.options import Bounds, Count, Positive, checked, options
from flowbnn.posterior import novelty_scores
from flowbnn.predictive import CategoricalPredictive
from flowbnn_studies.data.images import DATASETS
from flowbnn_studies.images.data import ImageMethodSettings, ImageMethodStudy
from flowbnn_studies.runner.findings import histogram, histogram_panels, pluralize, ranking, round_values
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, predict, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job

UNCERTAINTIES = {"nll": "NLL*", "entropy": "entropy*", "variance": "total variance"}
MEANINGS = {
    "nll": "NLL* is the negative logarithm of the probability of the most likely class, after averaging over the sampled networks: "
    "0 if the network is certain, log K if all K classes are equally likely. It needs no true label.",
    "entropy": "entropy* is the entropy of the averaged probabilities, -Σ p log p in nats: 0 if one class has all the "
    "probability, log K if all K classes are equally likely.",
    "variance": "The total variance is the variance of the probability of each class over the sampled networks, summed over "
    "classes: 0 if all networks agree; a single network has none.",
}
SCORES: dict[str, Callable[[CategoricalPredictive], Tensor]] = {
    "nll": CategoricalPredictive.nll,
    "entropy": lambda predictive: predictive.entropy,
    "variance": lambda predictive: predictive.total_variance,
}
KNOWN, NOVEL, REJECTING = "Known classes", "Detection of the new class", "Rejection as a new class"
Fraction = Annotated[float, Bounds(gt=0, le=1)]

# fmt: off
METRICS = (
    *(replace(m, group=KNOWN) for m in CLASSIFICATION[:3]),
    *(Metric(f"auroc_{key}", f"AUROC, {label}", "higher", ".3f",
             f"Probability that an image of the new class has a higher {label} than one of a known class; 0.5 is chance. "
             f"{MEANINGS[key]}", NOVEL)
      for key, label in UNCERTAINTIES.items()),
    Metric("auroc_mutual_information", "AUROC, mutual information", "higher", ".3f",
           "The same by the mutual information of label and network; a single network has none.", NOVEL),
    Metric("auroc_energy", "AUROC, energy", "higher", ".3f",
           "The same by the energy, minus the logarithm of the sum of the exponentials of the logits.", NOVEL),
    *(Metric(f"{part}_{key}", f"{label}, {where}", "none", ".3f", f"Mean {label} of the {where} images.", NOVEL)
      for key, label in UNCERTAINTIES.items()
      for part, where in (("known", "known"), ("novel", "new"))),
    *(Metric(f"with_new_{key}", f"Accuracy by {label}", "higher", ".3f",
             f'Fraction of correct predictions if "new" is a class, predicted above a threshold of {label}.',
             REJECTING)
      for key, label in UNCERTAINTIES.items()),
    Metric("never", "Without rejection", "higher", ".3f", "The same fraction if nothing is rejected.", REJECTING),
    Metric("found", "New rejected", "higher", ".3f", "Fraction of the new images that are rejected, by entropy*.", REJECTING),
    Metric("lost", "Known rejected", "lower", ".3f", "Fraction of the known images that are rejected, by entropy*.", REJECTING),
)
# fmt: on


@options
class Settings(MethodSettings):
    """Settings of the study, in addition to :class:`MethodSettings`.

    Args:
        novel: Class that is excluded from training.
        example_class: Known class of the figure.
        width, hidden: Number of channels and of hidden units of the network.
        plotted_samples: Number of sampled networks (T in the report) in the figure.
        keep_fraction: Fraction of known validation images that the threshold of rejection keeps.
    """

    novel: Annotated[int, Bounds(ge=0, le=9)] = 8
    example_class: Annotated[int, Bounds(ge=0, le=9)] = 3
    width: Count = 12
    hidden: Count = 64
    batch: Count = 128
    epochs: Count = 40
    lr: Positive = 3e-3
    samples: Count = 100
    plotted_samples: Count = 40
    keep_fraction: Fraction = 0.95


class Elephant(MethodStudy):
    name = "elephant"
    title = "Rejection of an unseen digit"
    description = "digits with one class excluded from training (Ravenda's report): sampled predictions, and rejection as new"
    question = (
        "A network is trained on nine digits and evaluated on the tenth. Do its sampled predictions disagree about it, and can it "
        "be rejected as new without rejecting known digits?"
    )
    source = "Ravenda's report, section 1.6 and figure 6, with digits instead of Fashion-MNIST"
    settings: ClassVar[type[Any]] = Settings
    headline = ("with_new_entropy", "never", "found", "lost", "auroc_entropy", "accuracy")
    specific: ClassVar[dict[str, dict[str, Any]]] = {  # short chains, for a study of minutes
        "hmc": {"samples": 40, "warmup": 40, "chains": 1, "steps": 8},
        "nuts": {"samples": 30, "warmup": 30, "chains": 1, "max_depth": 3},
    }
    quick: ClassVar[dict[str, Any]] = {
        "epochs": 2,
        "samples": 8,
        "plotted_samples": 8,
        "width": 4,
        "hidden": 16,
    }
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    split: ClassVar[str] = (
        "Each seed has a split of its own: 60 % of the known digits for training, 15 % for validation, 25 % for tests. The new "
        "images are all images of the new digit."
    )

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        s: Settings = job.settings
        digits = load_digits(s.novel, job.seed)
        network = SmallConv(classes=len(digits.known), width=s.width, hidden=s.hidden)
        loader = shuffled_loader(digits.train, s.batch, job.seed)
        validation = TensorLoader(*digits.validation, batch_size=s.batch)
        posterior = self.fit(job, candidate, network, loader, validation)
        return evaluate_rejection(posterior, digits, s, self.classes, with_images=job.seed == 0)

    def story(self, numbers: Numbers) -> Story:
        novel = (
            "sneakers, which it has never seen"
            if self.name == "elephant-fashion"
            else "a digit that it has never seen"
        )
        best, second = numbers.ranked("with_new_entropy")[:2]
        rejecting, never = (100 * numbers.mean(best, key) for key in ("with_new_entropy", "never"))
        found, lost = (f"{100 * numbers.mean(best, key):.0f} %" for key in ("found", "lost"))
        if rejecting <= never:
            answer = (
                f"No: with {numbers.name(best)}, the best of {len(numbers.ranked('accuracy'))} methods, rejecting uncertain "
                "images finds "
                f"{found} of the new class and loses {lost} of the known ones, so {rejecting:.0f} % of all answers are right, and "
                f"{never:.0f} % without rejecting."
            )
        else:
            answer = (
                f"Yes, if it may say “new”: with {numbers.name(best)} it finds {found} of the new class and loses {lost} of the known "
                f"ones, but its calibration error on known classes is {numbers.text(best, 'ece', '.2f')}, and it is "
                f"{numbers.verdict(best, second, 'with_new_entropy')} than {numbers.name(second)}."
            )
        return Story(
            f"Can a classifier notice {novel}?",
            answer,
            found,
            f"of the images of the new class are found by {numbers.name(best)}",
            ("with_new_entropy", "never", "found", "lost"),
            rows=numbers.main_rows(best, second),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        candidates = self.evaluated_candidates(settings, parts)
        notes = [
            f"{self.split} The threshold of each uncertainty keeps {settings.keep_fraction:.0%} of the known validation images. It "
            "is chosen without images of the new class.",
            "A single network has no total variance and is not evaluated by it.",
            "Ravenda's report has no numbers. It states that the sampled predictions vary much for the new image and little for "
            "the known one, and more so with variational inference than with MC dropout.",
        ]
        rows = self.rows(settings, parts, METRICS)
        all_figures = figures(
            settings, parts, candidates, self.first_seed_parts(settings, parts, "sides"), self.classes
        )
        return Findings(answer(parts, candidates), METRICS, rows, all_figures, notes)


@options(kw_only=True)
class FashionSettings(ImageMethodSettings, Settings):
    """Settings on Fashion-MNIST: sneakers are excluded, the figure shows an ankle boot, and the network is a LeNet."""

    novel: Annotated[int, Bounds(ge=0, le=9)] = 7
    example_class: Annotated[int, Bounds(ge=0, le=9)] = 9
    batch: Count = 256
    epochs: Count = 15
    lr: Positive = 1e-3
    samples: Count = 64


class ElephantFashion(Elephant, ImageMethodStudy):
    name = "elephant-fashion"
    title = "Rejection of an unseen kind of clothing"
    description = "Fashion-MNIST with sneakers excluded from training (Ravenda's report): sampled predictions, and rejection as new"
    question = (
        "A LeNet is trained on nine kinds of clothing and evaluated on sneakers. Do its sampled predictions disagree about them, "
        "and can they be rejected as new without rejecting known clothing?"
    )
    source = "Ravenda's report, section 1.6 and figure 6"
    settings = FashionSettings
    specific: ClassVar[dict[str, dict[str, Any]]] = {}
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "validation": 60, "epochs": 1, "batch": 60, "samples": 4, "plotted_samples": 4,
        "methods": ("mle", "mc-dropout", "bayes-by-backprop"),
    }  # fmt: skip
    data = "fashion-mnist"
    classes = DATASETS["fashion-mnist"].classes
    split = (
        "The training images without sneakers have the same split for all seeds: 5,000 are held out for validation. The test "
        "images are all known test images and all sneakers. The network is a LeNet; the report does not state its network. HMC, "
        "NUTS and mode ensembles are not run because they use all images in every step."
    )

    def novel(self, settings: FashionSettings) -> tuple[int, ...]:
        return (settings.novel,)

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        data = self.load_data(job)
        network = LeNet(1, len(data.known))
        posterior = self.fit_candidate(job, candidate, network, data)
        return evaluate_rejection(posterior, data, job.settings, self.classes, with_images=job.seed == 0)


@checked
def threshold_for(scores: Tensor, keep: Fraction = 0.95) -> float:
    """Returns the smallest score that at least the fraction ``keep`` of the scores does not exceed.

    >>> import torch
    >>> threshold_for(torch.tensor([0.4, 0.1, 0.3, 0.2]), keep=0.75)
    0.3...
    """
    ordered = scores.flatten().double().sort().values
    index = min(len(ordered), max(1, -int(-(keep * len(ordered) - 1e-9) // 1))) - 1
    return float(ordered[index])


def accuracy_with_new(
    labels: Tensor, targets: Tensor, known: Tensor, novel: Tensor, threshold: float
) -> dict[str, float]:
    """Computes the accuracy if "new" is a class. An input with an uncertainty above the threshold is rejected as new.

    Args:
        labels, targets: Predicted and true classes of the known inputs.
        known, novel: Uncertainties of the known and of the novel inputs.
        threshold: Threshold of rejection.

    Returns:
        ``accuracy``: fraction of correct predictions over all inputs. ``found``: fraction of novel inputs that are rejected.
        ``lost``: fraction of known inputs that are rejected.

    >>> import torch
    >>> known, novel = torch.tensor([0.1, 0.2, 0.9, 0.3]), torch.tensor([0.8, 0.2])
    >>> accuracy_with_new(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 1]), known, novel, 0.5)  # (2 + 1) / 6
    {'accuracy': 0.5, 'found': 0.5, 'lost': 0.25}
    """
    rejected, detected = known.double() > threshold, novel.double() > threshold
    num_correct = int(((labels == targets) & ~rejected).sum()) + int(detected.sum())
    return {
        "accuracy": num_correct / (len(targets) + len(novel)),
        "found": float(detected.double().mean()),
        "lost": float(rejected.double().mean()),
    }


def evaluate_rejection(
    posterior: Posterior, digits: Digits, s: Settings, classes: Sequence[str], with_images: bool
) -> dict[str, Any]:
    """Computes everything that the table and the figures need of one trained method."""
    images = (digits.test[0], digits.novel[0], digits.validation[0])
    known, novel, held_out = (predict(posterior, predictive, s.samples) for predictive in images)
    targets = digits.test[1].cpu()
    values: dict[str, float | None] = dict(known.evaluate(targets))
    novel_scores_by_name = novelty_scores(novel)
    for name, familiar_scores in novelty_scores(known).items():
        values[f"auroc_{name}"] = novelty_auroc(familiar_scores, novel_scores_by_name[name])
    for key, score in SCORES.items():
        if key == "variance" and posterior.default_samples == 1:
            values["known_variance"] = values["novel_variance"] = None
            continue
        known_scores, novel_scores = score(known), score(novel)
        values[f"known_{key}"], values[f"novel_{key}"] = (
            float(known_scores.mean()),
            float(novel_scores.mean()),
        )
        values[f"auroc_{key}"] = novelty_auroc(known_scores, novel_scores)
        threshold = threshold_for(score(held_out), s.keep_fraction)
        rejection = accuracy_with_new(known.labels, targets, known_scores, novel_scores, threshold)
        values[f"with_new_{key}"] = rejection["accuracy"]
        if key == "entropy":
            values |= {"found": rejection["found"], "lost": rejection["lost"]}
    values["never"] = float(known.labels.eq(targets).sum()) / (len(targets) + len(novel))
    predictives = {"known": known, "novel": novel}
    content: dict[str, Any] = {
        "values": values,
        "entropy": {
            name: histogram(predictive.entropy, 0.0, 2.2, 22) for name, predictive in predictives.items()
        },
    }
    if with_images:
        content["classes"] = [classes[label] for label in digits.known]
        index = int((targets == digits.known.index(s.example_class)).nonzero()[0, 0])
        content["sides"] = [
            _side(
                known[index], digits.test[0][index], f"{classes[s.example_class]} (known)", s.plotted_samples
            ),
            _side(novel[0], digits.novel[0][0], f"{classes[s.novel]} (new)", s.plotted_samples),
        ]
    return content


def _side(predictive: CategoricalPredictive, image: Tensor, title: str, number: int) -> dict[str, Any]:
    """Returns one image with its sampled predictions."""
    sampled = {
        "pixels": round_values(image[0], 3),
        "samples": round_values(predictive.samples[:number, 0], 3),
    }
    return {"title": title, **sampled} | {
        key: round(float(score(predictive)), 4) for key, score in SCORES.items()
    }


def figures(
    settings: Settings,
    parts: SeedResults,
    candidates: Sequence[Candidate],
    contents_by_label: Mapping[str, dict[str, Any]],
    classes: Sequence[str],
) -> list[dict[str, Any]]:
    """Returns the sampled distributions of two images, and the entropies of all images."""
    result = []
    if contents_by_label:
        first = next(iter(contents_by_label.values()))

        def side(entry: dict[str, Any]) -> dict[str, Any]:
            note = f"entropy* {entry['entropy']:.2f}, total variance {entry['variance']:.2f}"
            return {"note": note, "samples": entry["samples"]}

        panels = [
            {"title": label, "sides": [side(entry) for entry in part["sides"]]}
            for label, part in contents_by_label.items()
        ]
        images = [{"title": entry["title"], "pixels": entry["pixels"]} for entry in first["sides"]]
        result.append(
            figure(
                "draws",
                "Sampled predictions of a known and a new class",
                "Seed 0, as in figure 6 of Ravenda's report: probabilities of the nine known classes for the same two images, in "
                f"up to {settings.plotted_samples} sampled networks. The images are the first of their class "
                f"({classes[settings.example_class]} and {classes[settings.novel]}). All predictions for the new class are wrong; a "
                "good method has predictions that disagree.",
                {"classes": first["classes"], "images": images, "panels": panels},
            )
        )
    contents = {entry.label: [part["entropy"] for part in parts.of(entry.key)] for entry in candidates}
    groups = {"known": "known classes", "novel": f"new class: {classes[settings.novel]}"}
    entropies = figure(
        "histogram",
        "Entropy* of known and new images",
        "Entropy of the averaged probabilities in nats, all seeds together. The better the two are separated, the fewer known "
        "images are rejected.",
        {"x_label": "entropy* (nats)", "panels": histogram_panels(contents, groups)},
    )
    return [*result, entropies]


def answer(parts: SeedResults, candidates: Sequence[Candidate]) -> str:
    """Returns the answer, computed from the numbers."""
    rank = partial(ranking, parts, candidates)
    sampled = best_first(parts, candidates, "auroc_variance")
    better = sum(
        parts.mean(candidate.key, "auroc_variance") > parts.mean(candidate.key, "auroc_entropy")
        for candidate in sampled
    )
    return (
        f"Accuracy with “new” as a class, rejecting by entropy* ({pluralize(len(parts.seeds), 'split')}): "
        f"{rank('with_new_entropy', higher=True)}.\n"
        f"New images rejected: {rank('found', higher=True, form='.0%')}. Known images rejected: {rank('lost', form='.0%')}.\n"
        f"Disagreement of the sampled networks on the new class (total variance): {rank('novel_variance', higher=True)}. {better} of "
        f"{len(sampled)} methods detect the new class better by total variance than by entropy*."
    )
