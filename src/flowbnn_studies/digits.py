"""The 8x8 digits with one class unseen: plain, dropout, Gaussian noise and flow noise side by side."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.convert import to_stochastic
from flowbnn.data import Digits, TensorLoader, load_digits
from flowbnn.methods import Posterior, fit, fit_point
from flowbnn.metrics import novelty_aupr, novelty_auroc, reliability
from flowbnn.models import SmallConv
from flowbnn.noise import Dropout, NormalAffine, NormalInvConv, NormalPlanar, Recipe
from flowbnn.predictive import CategoricalPredictive
from flowbnn_studies.digits_figures import answer, figures
from flowbnn_studies.runner.base import CLASSIFICATION, Findings, Metric, Parts, Study, Variant
from flowbnn_studies.runner.figures import density_pair, density_panels, histogram, short
from flowbnn_studies.runner.job import Job, cosine
from flowbnn_studies.two_clusters import load_start

__all__ = ["DigitsStudy", "Settings"]

METRICS = (
    *CLASSIFICATION[:3],
    Metric(
        "auroc",
        "Novelty AUROC",
        "higher",
        ".4f",
        "Chance that an image of the unseen digit has a higher predictive entropy than one of a known digit; 0.5 is guessing.",
    ),
    CLASSIFICATION[3],
    Metric(
        "aupr",
        "Novelty AUPR",
        "higher",
        ".4f",
        "Average precision of finding the unseen digit by predictive entropy.",
    ),
    Metric(
        "auroc_mi",
        "AUROC by MI",
        "higher",
        ".4f",
        "As novelty AUROC, by the mutual information of label and network; a single network has none.",
    ),
    Metric("aupr_mi", "AUPR by MI", "higher", ".4f", "As novelty AUPR, by the mutual information."),
)


@dataclass(frozen=True)
class Settings:
    """What the study depends on.

    Args:
        novel: the digit that training never sees.
        width, hidden: of the network.
        batch: images in a step.
        start_epochs: epochs of the plain network that every variant starts from.
        epochs: more epochs of each variant, the plain one included, so that all have seen the same.
        weight_lr, noise_lr: learning rates of the weights and of the noise.
        dropout: rate, at the same layers as the noise.
        flow_length: planar flows at ``fc1``.
        samples: networks averaged in a prediction.
    """

    novel: int = 8
    width: int = 12
    hidden: int = 64
    batch: int = 128
    start_epochs: int = 10
    epochs: int = 20
    weight_lr: float = 1e-2
    noise_lr: float = 5e-2
    dropout: float = 0.05
    flow_length: int = 2
    samples: int = 128


def rules_of(settings: Settings, variant: str) -> dict[Any, Recipe | None]:
    """The noise of a variant; the flows sit where document 000 puts them in its LeNet."""
    if variant == "dropout":
        # whole channels before the convolutions, single features before the linear layers, as is usual
        return {"*": Dropout(rate=settings.dropout, site="channel"), "conv1": None}
    if variant == "gaussian":
        return {"*": NormalAffine()}
    return {"conv2": NormalInvConv(), "fc1": NormalPlanar(settings.flow_length), "*": NormalAffine()}


class DigitsStudy(Study):
    """Is noise from a flow better than Gaussian noise, dropout, or none, on small images?"""

    name = "digits"
    title = "Digits, with one class never seen"
    description = (
        "a small conv net on 8x8 digits: plain, dropout, Gaussian noise, flow noise; one digit is novel"
    )
    question = (
        "A small convolutional network learns nine of the ten digits. Which kind of noise gives the best probabilities, and "
        "which tells the digit it has never seen from those it knows?"
    )
    source = "the layers that carry flows as in document 000, section 4"
    seeds = 3
    settings = Settings
    quick: ClassVar[dict[str, Any]] = {"start_epochs": 1, "epochs": 2, "samples": 8}

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return (
            Variant("start", "Common start", shown=False),
            Variant("plain", "Plain", "start"),
            Variant("dropout", "Dropout", "start", cost=1.5),
            Variant("gaussian", "Gaussian noise", "start", cost=2),
            Variant("flow", "Flow noise", "start", cost=4),
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        digits = load_digits(s.novel, job.seed)
        loader = TensorLoader(
            *digits.train, batch_size=s.batch, shuffle=True, generator=torch.Generator().manual_seed(job.seed)
        )
        network = SmallConv(classes=len(digits.known), width=s.width, hidden=s.hidden)
        posterior: Posterior
        if job.after is None:
            posterior = fit_point(network, loader, lr=s.weight_lr, **job.options(s.start_epochs, len(loader)))
            posterior.save(job.posterior)
            return {"values": posterior.predict(digits.validation[0]).cpu().evaluate(digits.validation[1])}
        start = load_start(job, network)
        options = {**job.options(s.epochs, len(loader)), "schedule": cosine}
        if job.variant == "plain":
            posterior = fit_point(start, loader, lr=s.weight_lr, **options)
        else:
            stochastic = to_stochastic(start, rules_of(s, job.variant))
            posterior = fit(stochastic, loader, weight_lr=s.weight_lr, noise_lr=s.noise_lr, **options)
        posterior.save(job.posterior)
        return self.judge(job, posterior, digits)

    def judge(self, job: Job, posterior: Posterior, digits: Digits) -> dict[str, Any]:
        """Everything the table and the figures need of one trained network."""
        s: Settings = job.settings
        samples = 1 if job.variant == "plain" else s.samples
        known: CategoricalPredictive = posterior.predict(digits.test[0], samples, seed=0).cpu()
        novel: CategoricalPredictive = posterior.predict(digits.novel[0], samples, seed=0).cpu()
        values = known.evaluate(digits.test[1])
        values |= {
            "auroc": novelty_auroc(known.entropy, novel.entropy),
            "aupr": novelty_aupr(known.entropy, novel.entropy),
        }
        if samples > 1:
            values |= {
                "auroc_mi": novelty_auroc(known.mutual_information, novel.mutual_information),
                "aupr_mi": novelty_aupr(known.mutual_information, novel.mutual_information),
            }
        held_out = posterior.predict(digits.validation[0], samples, seed=0).cpu()
        content: dict[str, Any] = {
            "values": values,
            "validation": held_out.evaluate(digits.validation[1]),
            "history": {
                name: posterior.history[name]
                for name in ("elbo", "log_likelihood", "kl")
                if name in posterior.history
            },
            "bins": reliability(known.probabilities, digits.test[1]),
            "confidence": {
                "known": histogram(known.confidence, 0.0, 1.0, 20),
                "novel": histogram(novel.confidence, 0.0, 1.0, 20),
            },
            "entropy": {
                "known": histogram(known.entropy, 0.0, 2.2, 22),
                "novel": histogram(novel.entropy, 0.0, 2.2, 22),
            },
        }
        if job.variant == "flow":
            content["images"] = [
                *_images(digits.test[0], known, digits, [digits.known[i] for i in digits.test[1].tolist()]),
                *_images(digits.novel[0], novel, digits, None),
            ]
            content["densities"] = density_panels(posterior.model, ["conv2", "fc1"], 2)
            content["pair"] = density_pair(posterior.model, "conv2")
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        variants = [variant for variant in self.variants(settings) if variant.shown]
        notes = [
            f"Every variant starts from the same network of its seed, trained for {settings.start_epochs} epochs, and is trained for "
            f"{settings.epochs} more. Each seed has a split of its own: 60 % of the known digits to learn from, 15 % to choose "
            f"settings on, 25 % for the table; the novel images are all those of the digit {settings.novel}.",
            "Learning rates, epochs and the dropout rate were chosen by the likelihood on the validation parts of two other splits; "
            "their images are partly those of the tests here.",
            *parts.warnings(variants),
        ]
        rows = [parts.row(variant, METRICS) for variant in variants]
        return Findings(
            answer(parts, variants), METRICS, rows, figures(parts, variants, settings.novel), notes
        )


def _images(
    images: Tensor, predictive: CategoricalPredictive, digits: Digits, truth: list[int] | None
) -> list[dict[str, Any]]:
    """The surest, the middling and the least sure image, with the probabilities of the likeliest digits."""
    order = predictive.entropy.argsort()
    chosen = (
        [int(order[place]) for place in (len(order) // 2, -1)]
        if truth
        else [int(order[place]) for place in (0, len(order) // 2, -1)]
    )
    panels = []
    for index in chosen:
        probabilities, labels = predictive.probabilities[index].topk(4)
        name = f"a {truth[index]}" if truth else "novel"
        panels.append(
            {
                "title": f"{name}, entropy {float(predictive.entropy[index]):.2f}",
                "pixels": short(images[index, 0], 3),
                "bars": [
                    {"label": str(digits.known[label]), "value": round(value, 4)}
                    for value, label in zip(probabilities.tolist(), labels.tolist(), strict=True)
                ],
            }
        )
    return panels
