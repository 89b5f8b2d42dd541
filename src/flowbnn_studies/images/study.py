"""What the three studies on images share: variants, one training, and the measurement of cost."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from flowbnn.methods import PointPosterior
from flowbnn_studies.data.images import usable_device
from flowbnn_studies.images.cost import measure_cost
from flowbnn_studies.images.figures import figures
from flowbnn_studies.images.findings import answer, comparisons, notes, rows
from flowbnn_studies.images.measures import by_views, image_metrics, judge, score
from flowbnn_studies.images.pictures import Pictures, load_pictures
from flowbnn_studies.images.published import Published
from flowbnn_studies.images.recipes import image_variants, make_network, rules_for
from flowbnn_studies.images.settings import ImageSettings
from flowbnn_studies.images.training import fit_variant, make_optimizer, make_schedule
from flowbnn_studies.runner.base import Findings, Parts, Study, Variant
from flowbnn_studies.runner.job import Job

__all__ = ["ImageStudy"]


class ImageStudy(Study):
    """Document 000's comparison on images. A subclass names its network, its data and its published numbers."""

    architecture: ClassVar[str]
    network_label: ClassVar[str]
    data: ClassVar[str]
    novel: ClassVar[dict[str, str]]
    published: ClassVar[Published]
    seed_counts: ClassVar[tuple[int, int]] = (3, 5)
    seeds: ClassVar[int] = 5
    accelerator: ClassVar[str] = "auto"
    partial: ClassVar[bool] = True
    keeps_networks: ClassVar[bool] = False
    # how its settings came about where validation images did not choose them
    remarks: ClassVar[tuple[str, ...]] = ()

    def variants(self, settings: ImageSettings) -> tuple[Variant, ...]:
        found = image_variants(self.network_label, self.seed_counts)
        return found if settings.rounds else found[:-1]

    def pictures(self, settings: ImageSettings, accelerator: str, validation: bool = False) -> Pictures:
        """The data on the device of an accelerator."""
        device = usable_device("cuda" if accelerator in ("cuda", "gpu") else accelerator)
        return load_pictures(settings, self.data, list(self.novel), device, validation)

    def check(self, settings: ImageSettings, jobs: Sequence[Job]) -> None:
        for variant in {job.variant for job in jobs} - {"cost"}:
            training = settings.training(variant)
            make_optimizer(training)
            make_schedule(training)
            rules_for(self.architecture, variant, training)
        if jobs:
            self.pictures(settings, "cpu")

    def train(self, job: Job) -> dict[str, Any]:
        settings: ImageSettings = job.settings
        pictures = self.pictures(settings, job.accelerator)
        if job.variant == "cost":
            options = {**job.options(1, 1), "checkpoint": None, "checkpoint_every": None, "resume": False}
            return measure_cost(self.architecture, settings, pictures, options, job.precision)
        training = settings.training(job.variant)
        network = make_network(self.architecture, pictures.channels, settings.width)
        if job.after is not None:
            network = PointPosterior.load(job.start, network).model
        watched = settings.curves or not job.variant.startswith("best-")
        steps = max(1, pictures.num_data // training.batch)
        posterior = fit_variant(
            job.variant,
            self.architecture,
            training,
            network,
            pictures,
            # few checkpoints: each is as large as the network three times over
            {**job.options(training.epochs, steps), "checkpoint_every": max(1, training.epochs // 3) * steps},
            job.seed,
            settings.curve_samples if watched else 0,
        )
        posterior.save(job.posterior)
        return judge(posterior, pictures, settings.judging(job.variant), training, job.precision)

    def findings(self, settings: ImageSettings, parts: Parts) -> Findings:
        variants = self.variants(settings)
        metrics = image_metrics(self.novel)
        table = rows(parts, variants, metrics, self.published)
        shown = [metric for metric in metrics if any(metric.key in row["values"] for row in table)]
        return Findings(
            answer(parts, variants, shown, self.published),
            shown,
            table,
            figures(parts, variants, self.published, self.novel, self.source),
            notes(parts, variants, settings, self.published, self.remarks),
            comparisons(parts, shown),
        )

    def trial(
        self,
        settings: ImageSettings,
        variant: str,
        seed: int,
        accelerator: str,
        precision: str,
        options: dict[str, Any] | None = None,
        curve_samples: int = 0,
    ) -> dict[str, Any]:
        """Train a variant on the training set less its validation images, and judge it on those; the test set stays closed.

        Args:
            settings: the study's; ``validation`` says how many images are put aside.
            variant: its key.
            seed: of weights, order and noise; choose settings with other seeds than those of the study.
            accelerator, precision: where and how to compute.
            options: of the run, as for :func:`flowbnn.fit`.
            curve_samples: above 0, the validation accuracy and ECE of every epoch are returned too.
        """
        torch.manual_seed(seed)
        pictures = self.pictures(settings, accelerator, validation=True)
        network = make_network(self.architecture, pictures.channels, settings.width)
        given = {
            "seed": 1 + seed,
            "accelerator": accelerator,
            "precision": precision,
            "progress": False,
            **(options or {}),
        }
        chain: Sequence[str] = [variant]
        if variant.startswith("document-") and variant != "document-plain":
            chain = ["document-plain", variant]
        for key in chain:
            posterior = fit_variant(
                key, self.architecture, settings.training(key), network, pictures, given, seed, curve_samples
            )
            network = posterior.model
        report: dict[str, Any] = score(posterior, pictures.test, settings.samples, precision)
        report |= by_views(
            posterior, pictures.test, settings.judging(variant), settings.training(variant), precision
        )
        report["seconds"] = posterior.history.seconds
        last = posterior.history.last
        report |= {name: last[name] for name in ("log_likelihood", "kl", "entropy") if name in last}
        if curve_samples:
            report["curves"] = {
                name: posterior.history[f"validation_{name}"] for name in ("accuracy", "nll", "ece")
            }
        return report
