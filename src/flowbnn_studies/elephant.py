"""The elephant in the office of Ravenda's report: a class that training never saw, and rejecting it as new."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from torch import Tensor

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import CLASSIFICATION, Metric, Parts, best_first, figure
from flowbnn.data import Digits, TensorLoader, load_digits
from flowbnn.methods import Posterior
from flowbnn.metrics import novelty_auroc
from flowbnn.models import LeNet, SmallConv
from flowbnn.options import Bounds, Count, Positive, checked, options
from flowbnn.predictive import CategoricalPredictive
from flowbnn_studies.data.images import DATASETS
from flowbnn_studies.images.data import ImageMethodSettings, ImageMethodStudy
from flowbnn_studies.runner.findings import histogram, histogram_panels, pluralize, ranking, round_values
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, predict, shuffled_loader
from flowbnn_studies.runner.study import Findings, Job

UNCERTAINTIES = {"nll": "NLL*", "entropy": "entropy*", "variance": "total variance"}
MEANINGS = {
    "nll": "NLL* is minus the logarithm of the probability of the likeliest class, after the probabilities of all sampled networks are "
    "averaged: 0 when the network is certain, log K when all K classes are equally likely. It needs no true label.",
    "entropy": "entropy* is that of the average, -Σ p log p of the averaged probabilities in nats: 0 when one class has all the "
    "probability, log K when all K classes are equally likely.",
    "variance": "The total variance is that of each class's probability over the sampled networks, summed over the classes: 0 when all "
    "of them say the same; a single network has none.",
}
READ: dict[str, Callable[[CategoricalPredictive], Tensor]] = {
    "nll": CategoricalPredictive.nll,
    "entropy": lambda predictive: predictive.entropy,
    "variance": lambda predictive: predictive.total_variance,
}
KNOWN, NOVEL, REJECTING = "The classes it knows", "Detecting the new class", "Rejecting as a new class"
Kept = Annotated[float, Bounds(gt=0, le=1)]

# fmt: off
METRICS = (
    *(replace(m, group=KNOWN) for m in CLASSIFICATION[:3]),
    *(Metric(f"auroc_{key}", f"AUROC, {label}", "higher", ".3f",
             f"Of an image of the new class and one of a known class, drawn at random, how often the new one has the higher {label}: "
             f"1 is always, 0.5 is guessing. {MEANINGS[key]}", NOVEL)
      for key, label in UNCERTAINTIES.items()),
    *(Metric(f"{part}_{key}", f"{label}, {where}", "none", ".3f", f"Mean {label} of the {where} images.", NOVEL)
      for key, label in UNCERTAINTIES.items()
      for part, where in (("known", "known"), ("novel", "new"))),
    *(Metric(f"with_new_{key}", f"Accuracy by {label}", "higher", ".3f",
             f'Share of known and new images that is right when "new" counts as a class and is predicted above a threshold of {label}.',
             REJECTING)
      for key, label in UNCERTAINTIES.items()),
    Metric("never", "Never rejecting", "higher", ".3f", "The same share when nothing is called new.", REJECTING),
    Metric("found", "New found", "higher", ".3f", "Share of the new images called new, by entropy*.", REJECTING),
    Metric("lost", "Known lost", "lower", ".3f", "Share of the known images called new, by entropy*.", REJECTING),
)
# fmt: on


@options
class Settings(MethodSettings):
    """What the study depends on, besides :class:`MethodSettings`.

    Args:
        novel: the class that training never sees.
        shown: the known class of the picture.
        width, hidden: of the network.
        drawn: how many of the sampled networks, T in the report, the picture shows.
        kept: share of held-out known images that the threshold of rejection keeps.
    """

    novel: Annotated[int, Bounds(ge=0, le=9)] = 8
    shown: Annotated[int, Bounds(ge=0, le=9)] = 3
    width: Count = 12
    hidden: Count = 64
    batch: Count = 128
    epochs: Count = 40
    lr: Positive = 3e-3
    samples: Count = 100
    drawn: Count = 40
    kept: Kept = 0.95


class Elephant(MethodStudy):
    name = "elephant"
    title = "The elephant in the office: a digit nobody has shown it"
    description = "digits without one class, then that class at test (Ravenda's report): T predictions, and rejecting as new"
    question = (
        "A network learns nine digits and is then shown the tenth. Do its sampled predictions disagree about it, and can it be "
        "called new without losing the digits that are known?"
    )
    source = "Ravenda's report, section 1.6 and figure 6, on digits in place of Fashion-MNIST"
    settings: ClassVar[type[Any]] = Settings
    headline = ("with_new_entropy", "never", "found", "lost", "auroc_entropy", "accuracy")
    specific: ClassVar[dict[str, dict[str, Any]]] = {  # chains as long as a study of minutes allows
        "hmc": {"samples": 40, "warmup": 40, "chains": 1, "steps": 8},
        "nuts": {"samples": 30, "warmup": 30, "chains": 1, "max_depth": 3},
    }
    quick: ClassVar[dict[str, Any]] = {"epochs": 2, "samples": 8, "drawn": 8, "width": 4, "hidden": 16}
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    split: ClassVar[str] = (
        "Each seed has a split of its own: 60 % of the known digits to learn from, 15 % held out, 25 % to test; the new images are all "
        "those of the new digit."
    )

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        s: Settings = job.settings
        digits = load_digits(s.novel, job.seed)
        network = SmallConv(classes=len(digits.known), width=s.width, hidden=s.hidden)
        loader = shuffled_loader(digits.train, s.batch, job.seed)
        validation = TensorLoader(*digits.validation, batch_size=s.batch)
        posterior = self.fit(job, candidate, network, loader, validation)
        return scores(posterior, digits, s, self.classes, pictures=job.seed == 0)

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        chosen = self.evaluated_candidates(settings, parts)
        notes = [
            f"{self.split} The threshold of each uncertainty is the one that {settings.kept:.0%} of the held-out known images do not "
            "exceed; no image of the new class has a part in choosing it.",
            "A single network has no total variance, so it is not evaluated by it.",
            "Ravenda's report prints no numbers for this; it states that the sampled predictions of the new image vary much and "
            "those of the known one do not, and with variational inference more so than with MC dropout.",
        ]
        rows = self.rows(settings, parts, METRICS)
        drawn = figures(
            settings, parts, chosen, self.first_seed_parts(settings, parts, "sides"), self.classes
        )
        return Findings(answer(parts, chosen), METRICS, rows, drawn, notes)


@options(kw_only=True)
class FashionSettings(ImageMethodSettings, Settings):
    """As :class:`Settings`, on Fashion-MNIST: the sneaker is left out, the ankle boot is shown; a LeNet, whose widths are fixed."""

    novel: Annotated[int, Bounds(ge=0, le=9)] = 7
    shown: Annotated[int, Bounds(ge=0, le=9)] = 9
    batch: Count = 256
    epochs: Count = 15
    lr: Positive = 1e-3
    samples: Count = 64


class ElephantFashion(Elephant, ImageMethodStudy):
    name = "elephant-fashion"
    title = "The elephant in the office: a sneaker nobody has shown it"
    description = "Fashion-MNIST without the sneaker, then sneakers at test (Ravenda's report): T predictions, and rejecting as new"
    question = (
        "A LeNet learns nine kinds of clothes and is then shown sneakers. Do its sampled predictions disagree about them, and can they "
        "be called new without losing the clothes that are known?"
    )
    source = "Ravenda's report, section 1.6 and figure 6"
    settings = FashionSettings
    specific: ClassVar[dict[str, dict[str, Any]]] = {}
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "validation": 60, "epochs": 1, "batch": 60, "samples": 4, "drawn": 4,
        "methods": ("mle", "mc-dropout", "bayes-by-backprop"),
    }  # fmt: skip
    data = "fashion-mnist"
    classes = DATASETS["fashion-mnist"].classes
    split = (
        "The training images without the sneakers are split alike for all seeds: 5,000 are held out; known test images and test images "
        "of sneakers are all there are. A LeNet; the report's network is not told. HMC, NUTS and modes of the noise, which take all "
        "images in every step, are left out."
    )

    def novel(self, settings: FashionSettings) -> tuple[int, ...]:
        return (settings.novel,)

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        data = self.load_data(job)
        network = LeNet(1, len(data.known))
        posterior = self.fit_candidate(job, candidate, network, data)
        return scores(posterior, data, job.settings, self.classes, pictures=job.seed == 0)


@checked
def threshold_for(scores: Tensor, kept: Kept = 0.95) -> float:
    """The smallest of the scores that at least the share ``kept`` of them does not exceed; no novel input is needed to choose it.

    >>> import torch
    >>> threshold_for(torch.tensor([0.4, 0.1, 0.3, 0.2]), kept=0.75)
    0.3...
    """
    ordered = scores.flatten().double().sort().values
    place = min(len(ordered), max(1, -int(-(kept * len(ordered) - 1e-9) // 1))) - 1
    return float(ordered[place])


def accuracy_with_new(
    labels: Tensor, targets: Tensor, known: Tensor, novel: Tensor, threshold: float
) -> dict[str, float]:
    """Accuracy when "new" counts as a class: an input whose uncertainty is above the threshold is called new.

    Args:
        labels, targets: predicted and true classes of the known inputs.
        known, novel: uncertainties of the known and of the novel inputs.
        threshold: above it an input is called new.

    Returns:
        ``accuracy``: the share of all inputs that is right: a known one with its class, a novel one with "new".
        ``found``: the share of novel inputs that is called new. ``lost``: the share of known ones that is.

    >>> import torch
    >>> known, novel = torch.tensor([0.1, 0.2, 0.9, 0.3]), torch.tensor([0.8, 0.2])
    >>> accuracy_with_new(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 1]), known, novel, 0.5)  # (2 + 1) / 6
    {'accuracy': 0.5, 'found': 0.5, 'lost': 0.25}
    """
    rejected, detected = known.double() > threshold, novel.double() > threshold
    right = int(((labels == targets) & ~rejected).sum()) + int(detected.sum())
    return {
        "accuracy": right / (len(targets) + len(novel)),
        "found": float(detected.double().mean()),
        "lost": float(rejected.double().mean()),
    }


def scores(
    posterior: Posterior, digits: Digits, s: Settings, classes: Sequence[str], pictures: bool
) -> dict[str, Any]:
    """Everything the table and the figures need of one trained method."""
    images = (digits.test[0], digits.novel[0], digits.validation[0])
    known, novel, held_out = (predict(posterior, one, s.samples) for one in images)
    targets = digits.test[1].cpu()
    values: dict[str, float | None] = dict(known.evaluate(targets))
    for key, read in READ.items():
        if key == "variance" and posterior.default_samples == 1:
            values["known_variance"] = values["novel_variance"] = None
            continue
        own, new = read(known), read(novel)
        values[f"known_{key}"], values[f"novel_{key}"] = float(own.mean()), float(new.mean())
        values[f"auroc_{key}"] = novelty_auroc(own, new)
        threshold = threshold_for(read(held_out), s.kept)
        rejecting = accuracy_with_new(known.labels, targets, own, new, threshold)
        values[f"with_new_{key}"] = rejecting["accuracy"]
        if key == "entropy":
            values |= {"found": rejecting["found"], "lost": rejecting["lost"]}
    values["never"] = float(known.labels.eq(targets).sum()) / (len(targets) + len(novel))
    both = {"known": known, "novel": novel}
    content: dict[str, Any] = {
        "values": values,
        "entropy": {name: histogram(one.entropy, 0.0, 2.2, 22) for name, one in both.items()},
    }
    if pictures:
        content["classes"] = [classes[label] for label in digits.known]
        place = int((targets == digits.known.index(s.shown)).nonzero()[0, 0])
        content["sides"] = [
            _side(known[place], digits.test[0][place], f"{classes[s.shown]}, which it knows", s.drawn),
            _side(novel[0], digits.novel[0][0], f"{classes[s.novel]}, never seen", s.drawn),
        ]
    return content


def _side(one: CategoricalPredictive, image: Tensor, title: str, drawn: int) -> dict[str, Any]:
    """One image with the sampled predictions for it."""
    sampled = {"pixels": round_values(image[0], 3), "samples": round_values(one.samples[:drawn, 0], 3)}
    return {"title": title, **sampled} | {key: round(float(read(one)), 4) for key, read in READ.items()}


def figures(
    settings: Settings,
    parts: Parts,
    chosen: Sequence[Candidate],
    drawn: Mapping[str, dict[str, Any]],
    classes: Sequence[str],
) -> list[dict[str, Any]]:
    """The T distributions of two images, and the entropies of all."""
    made = []
    if drawn:
        first = next(iter(drawn.values()))

        def side(one: dict[str, Any]) -> dict[str, Any]:
            note = f"entropy* {one['entropy']:.2f}, total variance {one['variance']:.2f}"
            return {"note": note, "samples": one["samples"]}

        panels = [
            {"title": label, "sides": [side(one) for one in part["sides"]]} for label, part in drawn.items()
        ]
        images = [{"title": one["title"], "pixels": one["pixels"]} for one in first["sides"]]
        made.append(
            figure(
                "draws",
                "A known class and a new one, seen by sampled networks",
                f"Seed 0, as in figure 6 of Ravenda's report: for the same two images, the probabilities of the nine known classes in "
                f"up to {settings.drawn} sampled networks. The images are the first of their class ({classes[settings.shown]} and "
                f"{classes[settings.novel]}). All answers to the new one are wrong; what counts is whether the dots disagree.",
                {"classes": first["classes"], "images": images, "panels": panels},
            )
        )
    contents = {one.label: [part["entropy"] for part in parts.of(one.key)] for one in chosen}
    groups = {"known": "known classes", "novel": f"the new one: {classes[settings.novel]}"}
    entropies = figure(
        "histogram",
        "Entropy* of known and of new images",
        "Entropy of the mean probabilities in nats; all seeds together. The further apart the two are, the fewer known images "
        "are lost when the new one is rejected.",
        {"x_label": "entropy* (nats)", "panels": histogram_panels(contents, groups)},
    )
    return [*made, entropies]


def answer(parts: Parts, chosen: Sequence[Candidate]) -> str:
    """The answer, put together from the numbers."""
    rank = partial(ranking, parts, chosen)
    known = best_first(parts, chosen, "auroc_variance")
    by_both = [(parts.mean(one.key, f"auroc_{name}") for name in ("variance", "entropy")) for one in known]
    ahead = sum(variance > entropy for variance, entropy in by_both)
    return (
        f"Calling new what has a high entropy* is right most often, {pluralize(len(parts.seeds), 'split')}, with "
        f"{rank('with_new_entropy', higher=True)} (accuracy with “new” as a class).\n"
        f"New images found: {rank('found', higher=True, form='.0%')}; known ones lost: {rank('lost', form='.0%')}.\n"
        f"The sampled networks disagree most about the new class with {rank('novel_variance', higher=True)} (total variance), by which "
        f"{ahead} of {len(known)} methods detect it better than by entropy*."
    )
