"""Document 002's elephant in the office, on embedded data: a digit that training never saw, and calling it new."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flowbnn.data import Digits, TensorLoader, load_digits
from flowbnn.methods import Posterior
from flowbnn.metrics import novelty_auroc
from flowbnn.models import SmallConv
from flowbnn.predictive import CategoricalPredictive
from flowbnn_studies.elephant_figures import answer, figures
from flowbnn_studies.runner.base import CLASSIFICATION, Findings, Metric, Parts
from flowbnn_studies.runner.figures import histogram, short
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.lineup import Rival
from flowbnn_studies.runner.rejecting import UNCERTAINTIES, accuracy_with_new, threshold_for, uncertainty
from flowbnn_studies.runner.rivalry import RivalSettings, RivalStudy, samples_of

__all__ = ["Elephant", "Settings", "judge"]

KNOWN = "The digits it knows"
TELLING = "Telling the new digit"
REJECTING = "Rejecting as a new class"

METRICS = (
    *(Metric(m.key, m.label, m.better, m.format, m.definition, KNOWN) for m in CLASSIFICATION[:3]),
    *(
        Metric(
            f"auroc_{key}",
            f"AUROC, {label}",
            "higher",
            ".3f",
            f"Of an image of the new digit and one of a known digit, drawn at random, how often the new one has the higher {label}: "
            "1 is always, 0.5 is guessing.",
            TELLING,
        )
        for key, label in UNCERTAINTIES.items()
    ),
    *(
        Metric(
            f"{part}_{key}",
            f"{label}, {where}",
            "none",
            ".3f",
            f"Mean {label} of the {where} images.",
            TELLING,
        )
        for key, label in UNCERTAINTIES.items()
        for part, where in (("known", "known"), ("novel", "new"))
    ),
    *(
        Metric(
            f"with_new_{key}",
            f"Accuracy by {label}",
            "higher",
            ".3f",
            f'Share of known and new images that is right when "new" counts as a class and is said above a threshold of {label}.',
            REJECTING,
        )
        for key, label in UNCERTAINTIES.items()
    ),
    Metric(
        "never", "Never rejecting", "higher", ".3f", "The same share when nothing is called new.", REJECTING
    ),
    Metric(
        "found", "New found", "higher", ".3f", "Share of the new images called new, by entropy*.", REJECTING
    ),
    Metric(
        "lost", "Known lost", "lower", ".3f", "Share of the known images called new, by entropy*.", REJECTING
    ),
)


@dataclass(frozen=True)
class Settings(RivalSettings):
    """What the study depends on.

    Args:
        novel: the digit that training never sees.
        shown: the known digit of the picture.
        width, hidden: of the network.
        batch: images in a step.
        epochs, lr: of the training.
        prior: standard deviation of the prior of the weights, where a method has one.
        samples: networks averaged in a prediction, the document's T.
        drawn: of them, how many the picture shows.
        kept: share of held-out known images that the threshold of rejection keeps.
        methods: keys of the methods; none for all.
    """

    novel: int = 8
    shown: int = 3
    width: int = 12
    hidden: int = 64
    batch: int = 128
    epochs: int = 40
    lr: float = 3e-3
    prior: float = 1.0
    samples: int = 100
    drawn: int = 40
    kept: float = 0.95


class Elephant(RivalStudy):
    """Can a network say "this is something new"?"""

    name = "elephant"
    title = "The elephant in the office: a digit nobody has shown it"
    description = "digits without one class, then that class at test (document 002): T predictions, and rejecting as new"
    question = (
        "A network learns nine digits and is then shown the tenth. Do its sampled predictions disagree about it, and can it be "
        "called new without losing the digits that are known?"
    )
    source = "document 002, section 1.6 and figure 6, on digits in place of Fashion-MNIST"
    settings = Settings
    headline = ("with_new_entropy", "never", "found", "lost", "auroc_entropy", "accuracy")
    specific: ClassVar[dict[str, dict[str, Any]]] = {  # chains as long as a study of minutes allows
        "hmc": {"samples": 40, "warmup": 40, "chains": 1, "steps": 8},
        "nuts": {"samples": 30, "warmup": 30, "chains": 1, "max_depth": 3},
    }
    quick: ClassVar[dict[str, Any]] = {"epochs": 2, "samples": 8, "drawn": 8, "width": 4, "hidden": 16}

    def judged(self, job: Job, rival: Rival) -> dict[str, Any]:
        s: Settings = job.settings
        digits = load_digits(s.novel, job.seed)
        network = SmallConv(classes=len(digits.known), width=s.width, hidden=s.hidden)
        loader = TensorLoader(
            *digits.train, batch_size=s.batch, shuffle=True, generator=torch.Generator().manual_seed(job.seed)
        )
        posterior = self.fit(
            job,
            rival,
            network,
            loader,
            validation=TensorLoader(*digits.validation, batch_size=s.batch),
            prior_scale=s.prior,
        )
        return judge(posterior, digits, s, pictures=job.seed == 0)

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        chosen = self.shown(settings, parts)
        notes = [
            "Each seed has a split of its own: 60 % of the known digits to learn from, 15 % held out, 25 % to test; the new images "
            f"are all those of the digit {settings.novel}. The threshold of each uncertainty is the one that {settings.kept:.0%} of "
            "the held-out known images do not exceed; no image of the new digit has a part in choosing it.",
            "A single network has no total variance, so it is not judged by it.",
            "The document prints no numbers for this; it states that the sampled predictions of the new image vary much and "
            "those of the known one do not, and with variational inference more so than with MC dropout.",
            *self.refusals(settings, parts),
        ]
        return Findings(
            answer(parts, chosen),
            METRICS,
            self.rows(settings, parts, METRICS),
            figures(settings, parts, chosen),
            notes,
        )


def _predict(posterior: Posterior, images: torch.Tensor, s: Settings) -> CategoricalPredictive:
    return posterior.predict(images, samples_of(posterior, s.samples), seed=0).cpu()


def judge(posterior: Posterior, digits: Digits, s: Settings, pictures: bool) -> dict[str, Any]:
    """Everything the table and the figures need of one trained method."""
    known, novel = _predict(posterior, digits.test[0], s), _predict(posterior, digits.novel[0], s)
    held_out = _predict(posterior, digits.validation[0], s)
    targets = digits.test[1]
    values: dict[str, float | None] = dict(known.evaluate(targets))
    spread = posterior.default_samples > 1
    for key in UNCERTAINTIES:
        scores = [uncertainty(predictive, key) for predictive in (held_out, known, novel)]
        values[f"known_{key}"], values[f"novel_{key}"] = float(scores[1].mean()), float(scores[2].mean())
        if key == "variance" and not spread:
            values["known_variance"] = values["novel_variance"] = None
            continue
        values[f"auroc_{key}"] = novelty_auroc(scores[1], scores[2])
        judged = accuracy_with_new(
            known.labels, targets, scores[1], scores[2], threshold_for(scores[0], s.kept)
        )
        values[f"with_new_{key}"] = judged["accuracy"]
        if key == "entropy":
            values |= {"found": judged["found"], "lost": judged["lost"]}
    values["never"] = float(known.labels.eq(targets).sum()) / (len(targets) + len(novel))
    content: dict[str, Any] = {
        "values": values,
        "entropy": {
            "known": histogram(known.entropy, 0.0, 2.2, 22),
            "novel": histogram(novel.entropy, 0.0, 2.2, 22),
        },
    }
    if pictures:
        content["classes"] = [str(digit) for digit in digits.known]
        place = int((targets == digits.known.index(s.shown)).nonzero()[0, 0])
        content["sides"] = [
            _side(known, place, digits.test[0][place], f"a {s.shown}, which it knows", s.drawn),
            _side(novel, 0, digits.novel[0][0], f"an unseen {s.novel}", s.drawn),
        ]
    return content


def _side(
    predictive: CategoricalPredictive, place: int, image: torch.Tensor, title: str, drawn: int
) -> dict[str, Any]:
    one = predictive[place]
    return {
        "title": title,
        "pixels": short(image[0], 3),
        "samples": short(one.samples[:drawn, 0], 3),
        **{key: round(float(uncertainty(one, key)), 4) for key in UNCERTAINTIES},
    }
