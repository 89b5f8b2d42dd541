"""Figure 3 of document 000: four overlapping blobs, a two-layer MLP, and its stochastic version."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.convert import to_stochastic
from flowbnn.data import TensorLoader, best_possible, clusters, true_probability
from flowbnn.methods import PointPosterior, Posterior, fit, fit_point
from flowbnn.metrics import reliability
from flowbnn.models import MLP
from flowbnn.noise import NormalAffine, NormalPlanar
from flowbnn.predictive import CategoricalPredictive
from flowbnn_studies.runner.base import CLASSIFICATION, Findings, Parts, Study, Variant
from flowbnn_studies.runner.figures import density_panels, histogram, short
from flowbnn_studies.runner.job import Job, cosine
from flowbnn_studies.two_clusters_figures import PUBLISHED, answer, figures

__all__ = ["Settings", "TwoClusters", "points_of"]


@dataclass(frozen=True)
class Settings:
    """What the study depends on.

    Args:
        spread: of each blob; 1.95 lets the best classifier be right on 96.1 %.
        train, test: number of points; a large test, so that the ECE is not noise.
        hidden: width of the MLP between its two layers.
        batch: points in a step.
        short_epochs, short_lr: the plain network's training, stopped early as the document's was.
        epochs: more epochs, with noise, or without for the plain network that is trained as long.
        weight_lr, noise_lr: their learning rates.
        flow_length: planar flows at each layer.
        samples: networks averaged in a prediction.
        grid: points along a side of the field.
    """

    spread: float = 1.95
    train: int = 8000
    test: int = 20000
    hidden: int = 32
    batch: int = 800
    short_epochs: int = 12
    short_lr: float = 1e-3
    epochs: int = 20
    weight_lr: float = 1e-2
    noise_lr: float = 5e-2
    flow_length: int = 2
    samples: int = 128
    grid: int = 40


def points_of(settings: Any, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test points of one seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    train = clusters(settings.train, settings.spread, generator)
    return train, clusters(settings.test, settings.spread, generator)


def load_start(job: Job, network: nn.Module) -> nn.Module:
    """The trained network that a job starts from."""
    return PointPosterior.load(job.start, network).model


class TwoClusters(Study):
    """Does noise from a flow calibrate a network that a short training left unsure of itself?"""

    name = "two-clusters"
    title = "Two classes, four clusters: a plain MLP and its stochastic version"
    description = (
        "a two-layer MLP on four overlapping blobs, plain and with flow noise (document 000, figure 3)"
    )
    question = (
        "A two-layer MLP is trained for a short time on four overlapping blobs, one of them the second class. Does turning "
        "it into a stochastic network make its confidence match its accuracy?"
    )
    source = "document 000, figure 3"
    settings = Settings
    quick: ClassVar[dict[str, Any]] = {
        "train": 800,
        "test": 2000,
        "short_epochs": 2,
        "epochs": 3,
        "samples": 16,
        "grid": 15,
    }

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return (
            Variant("plain", "Plain MLP"),
            Variant("flow", "Flow noise", "plain", cost=4),
            Variant("gaussian", "Gaussian noise", "plain", cost=2),
            Variant("longer", "Plain MLP, trained as long", "plain"),
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        train, test = points_of(s, job.seed)
        loader = TensorLoader(
            *train, batch_size=s.batch, shuffle=True, generator=torch.Generator().manual_seed(job.seed)
        )
        network = MLP(2, (s.hidden,), 2)
        posterior: Posterior
        if job.variant == "plain":
            posterior = fit_point(network, loader, lr=s.short_lr, **job.options(s.short_epochs, len(loader)))
        else:
            start = load_start(job, network)
            options = {**job.options(s.epochs, len(loader)), "schedule": cosine}
            if job.variant == "longer":
                posterior = fit_point(start, loader, lr=s.weight_lr, **options)
            else:
                recipe = NormalPlanar(s.flow_length) if job.variant == "flow" else NormalAffine()
                stochastic = to_stochastic(start, {"*": recipe})
                posterior = fit(stochastic, loader, weight_lr=s.weight_lr, noise_lr=s.noise_lr, **options)
        posterior.save(job.posterior)
        return self.judge(job, posterior, test)

    def judge(self, job: Job, posterior: Posterior, test: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Everything the table and the figures need of one trained network."""
        s: Settings = job.settings
        samples = s.samples if job.variant in ("flow", "gaussian") else 1
        points, targets = test
        predictive = posterior.predict(points, samples, seed=0).cpu()
        history = {
            name: posterior.history[name]
            for name in ("elbo", "log_likelihood", "kl")
            if name in posterior.history
        }
        content: dict[str, Any] = {
            "values": predictive.evaluate(targets),
            "history": history,
            "bins": reliability(predictive.probabilities, targets),
            "confidence": histogram(predictive.confidence, 0.5, 1.0, 20),
        }
        if job.variant == "plain":
            one = true_probability(points, s.spread)
            exact = CategoricalPredictive.from_probabilities(torch.stack([1 - one, one], -1).unsqueeze(0))
            content["exact"] = exact.evaluate(targets)
        if job.variant in ("plain", "flow"):
            content["field"] = _field(posterior, s, samples, points[:1500], targets[:1500])
        if job.variant == "flow":
            content["densities"] = density_panels(posterior.model, ["fc1", "fc2"], 2)
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        variants = self.variants(settings)
        rows = [parts.row(variant, CLASSIFICATION, PUBLISHED.get(variant.key)) for variant in variants]
        exact = Parts(
            parts.seeds,
            {("exact", seed): {"values": parts.content["plain", seed]["exact"]} for seed in parts.seeds},
        )
        rows.append(
            exact.row(Variant("exact", "Bayes-optimal classifier (true probabilities)"), CLASSIFICATION)
        )
        best = best_possible(settings.spread)
        notes = [
            f"The blobs' standard deviation is {settings.spread:g}, so that the best possible accuracy is "
            f"{best.accuracy:.4f} and the best possible NLL {best.nll:.4f} (by quadrature over the true class probabilities). The last "
            "row scores those probabilities on the same test points: its ECE is what chance alone gives.",
            "The document does not state its blobs, widths, rates or epochs. Ours were chosen on points of other seeds than "
            "those of the table, after about ten tries, some of which had shown the table's seeds too: the plain MLP had 7 "
            "epochs until its accuracy on the table's seeds came out at 0.947. Its 12 epochs are the fewest whose accuracy, "
            "over 20 other seeds, clears the document's 0.953 with a margin; 8 match the document most closely there.",
            *parts.warnings(variants),
        ]
        return Findings(answer(parts, exact), CLASSIFICATION, rows, figures(variants, parts), notes)


def _field(
    posterior: Posterior, s: Settings, samples: int, points: Tensor, targets: Tensor
) -> dict[str, Any]:
    axis = torch.linspace(-8, 8, s.grid)
    grid = torch.cartesian_prod(axis, axis)
    predictive = posterior.predict(grid, samples, seed=0).cpu()
    return {
        "points": short(points, 2),
        "point_class": targets.tolist(),
        "grid": short(grid, 3),
        "grid_class": predictive.labels.tolist(),
        "grid_uncertainty": short(predictive.total_variance.sqrt()) if samples > 1 else None,
    }
