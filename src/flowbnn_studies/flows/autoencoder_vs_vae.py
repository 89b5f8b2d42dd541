"""Two-dimensional codes of MNIST trained with the reconstruction loss alone, the KL alone, and both."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.compare.results import Metric, SeedResults
from flowbnn.options import Count, Positive, options
from flowbnn.vae import VAE, Autoencoder, fit_autoencoder
from flowbnn_studies.images.data import read_bytes
from flowbnn_studies.images.settings import ImageSource
from flowbnn_studies.runner.findings import grid_figures, image_grid, pluralize, round_values
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

SHAPE = (1, 28, 28)
COLUMNS, PLANE = 8, 64  # images in a row; pixels along each side of the figure of codes
# fmt: off
METRICS = (
    Metric("error", "Reconstruction error", "lower", ".4f", "Mean squared error of a test pixel, from 0 to 1."),
    Metric("kl", "KL", "none", ".2f", "Mean KL of the posterior of a code to the standard normal prior, in nats."),
    Metric("neighbours", "Neighbour of same class", "higher", ".3f",
           "Fraction of test images whose nearest other code is of the same class."),
    Metric("outside", "Codes outside the prior", "lower", ".3f", "Fraction of codes farther from 0 than 99 % of the draws of "
        "the prior."),
    Metric("novelty", "Distance of samples", "lower", ".4f",
           "Mean squared distance of a pixel between an image decoded from the prior and the nearest test image."),
)
# fmt: on
PRIOR_RADIUS = 3.0349  # radius that holds 99 % of a standard normal in two dimensions: sqrt(-2 log 0.01)


@options(kw_only=True)
class Settings(ImageSource):
    """Settings of the study.

    Args:
        hidden: Number of units of each of the two hidden layers of encoder and decoder.
        epochs, batch, lr: Epochs, batch size and learning rate of all trainings.
        num_codes: Number of test images whose codes are evaluated.
        num_samples: Number of images decoded from the prior for the last column.
    """

    generated: Count = 200
    hidden: Count = 500
    epochs: Count = 60
    batch: Count = 500
    lr: Positive = 1e-3
    num_codes: Count = 2_000
    num_samples: Count = 500


class AutoencoderVsVae(Study):
    name = "autoencoder-vs-vae"
    title = "Two-dimensional codes of MNIST"
    description = "two-dimensional codes of MNIST by reconstruction alone, KL alone, and both: codes, samples, interpolation"
    question = (
        "An autoencoder maps each digit to a code of two numbers. How do the codes differ if it is trained with the reconstruction "
        "loss alone, the KL to a standard normal alone, or both, and what does the decoder make of codes drawn from that normal?"
    )
    source = "figures in lectures on variational autoencoders, after Kingma and Welling 2014"
    settings = Settings
    seeds = 3
    accelerator = "auto"
    headline = tuple(metric.key for metric in METRICS)
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "hidden": 16, "epochs": 2, "batch": 50, "num_codes": 30, "num_samples": 20,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return (
            Variant("reconstruction", "Reconstruction only"),
            Variant("kl", "KL only"),
            Variant("both", "Both (VAE)"),
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        train, (test, labels) = (
            to_unit(read_bytes(job, "mnist", "train")[0]),
            read_bytes(job, "mnist", "test"),
        )
        test, labels = to_unit(test)[: s.num_codes], labels[: s.num_codes]
        torch.manual_seed(job.seed)
        options = job.short_options(validation=0.0, epochs=s.epochs, lr=s.lr, batch_size=s.batch)
        model = fit_autoencoder(make_model(job.variant, s).to(job.device), train, **options)
        with torch.no_grad():
            codes = model.encode(test)
            generator = torch.Generator().manual_seed(job.seed)
            prior_codes = torch.randn(s.num_samples, 2, generator=generator).to(codes)
            decoded = model.decoder.mean(model.decode(prior_codes))
            kl = float(model.terms(test)[1].double().mean()) if isinstance(model, VAE) else None
        nearest = torch.cdist(codes, codes).fill_diagonal_(torch.inf).argmin(1)
        values = {
            "error": float((model.reconstruct(test) - test).square().double().mean()),
            "kl": kl,
            "neighbours": float((labels[nearest] == labels).double().mean()),
            "outside": float((codes.norm(dim=1) > PRIOR_RADIUS).double().mean()),
            "novelty": float(torch.cdist(decoded.flatten(1), test.flatten(1)).min(1).values.square().mean())
            / 784,
        }
        content: dict[str, Any] = {"values": values}
        if job.seed == 0:
            examples = test[:COLUMNS]
            path = model.interpolate(examples[:4], examples[4:8], COLUMNS).transpose(0, 1).flatten(0, 1)
            content |= {
                "codes": code_image(codes, labels),
                "samples": image_grid(decoded[:40], COLUMNS),
                "reconstruction": image_grid(torch.cat([examples, model.reconstruct(examples)]), COLUMNS),
                "interpolation": image_grid(path, COLUMNS),
                "reach": float(codes.abs().max()),
            }
        return content

    def story(self, numbers: Numbers) -> Story:
        outside = {key: f"{100 * numbers.mean(key, 'outside'):.0f} %" for key in ("reconstruction", "both")}
        return Story(
            "Why does a variational autoencoder need both terms of its objective?",
            f"The KL brings the codes to the prior ({outside['reconstruction']} lie far from it without the KL, {outside['both']} with "
            "both) and the reconstruction makes them tell digits apart, but decoded samples are only a little nearer to digits than "
            f"without the KL (distance {numbers.text('both', 'novelty', '.3f')} versus "
            f"{numbers.text('reconstruction', 'novelty', '.3f')}).",
            f"{outside['reconstruction']} → {outside['both']}",
            "of the codes lie far from the prior, without and with the KL",
            ("error", "outside", "neighbours", "novelty"),
            figure="images",
            place=1,
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        first = self.first_seed_parts(settings, parts, "codes")
        captions = {
            "codes": ("Codes", f"Seed 0: codes of the first {settings.num_codes:,} test images, with a colour for each digit. "
                               "Each panel has its own "
                      "scale; the title gives the largest coordinate."),
            "samples": ("Samples from the prior", "Seed 0: decoded images of the same codes, drawn from a standard normal."),
            "reconstruction": ("Reconstruction", "Seed 0: test images above, their reconstructions below."),
            "interpolation": ("Interpolation", "Seed 0: decoded images along a straight line between the codes of two test images."),
        }  # fmt: skip
        figures = []
        for name, (title, text) in captions.items():
            suffixes = {
                label: f" (to {part['reach']:.1f})" if name == "codes" else ""
                for label, part in first.items()
            }
            panels = {label + suffixes[label]: part for label, part in first.items()}
            figures += grid_figures(title, text, panels, name)
        notes = [
            f"Encoder and decoder with two hidden layers of {settings.hidden} units, Bernoulli likelihood of grey values, "
            f"{settings.epochs} epochs of Adam with batches of {settings.batch}; {pluralize(len(parts.seeds))}. With the KL alone, "
            "the decoder is not trained.",
        ]
        rows = self.rows(settings, parts, METRICS)
        return Findings(answer(parts), METRICS, rows, figures, notes)


def to_unit(images: Tensor) -> Tensor:
    """Converts bytes to numbers from 0 to 1."""
    return images.float() / 255


def make_model(variant: str, s: Settings) -> Autoencoder:
    """Returns the model of a variant."""
    hidden = (s.hidden, s.hidden)
    if variant == "reconstruction":
        return Autoencoder(SHAPE, 2, hidden=hidden)
    return VAE(SHAPE, 2, hidden=hidden, reconstruction=1.0 if variant == "both" else 0.0)


def code_image(codes: Tensor, labels: Tensor) -> list[Any]:
    """Draws codes as a colour image of the plane, with a hue for each class on white. Later codes cover earlier ones.

    >>> picture = code_image(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([0, 5]))
    >>> len(picture), picture[0][PLANE - 1] == picture[PLANE - 1][0], picture[0][0]
    (64, False, [1.0, 1.0, 1.0])
    """
    codes, labels = codes.cpu(), labels.cpu()
    pixels = ((codes / codes.abs().max().clamp(min=1e-9) + 1) / 2 * (PLANE - 1)).round().long()
    angle = 2 * torch.pi * (labels[:, None] / 10 + torch.tensor([0.0, 1 / 3, 2 / 3]))
    brightness = torch.where(labels % 2 == 0, 0.35, 0.5)[:, None]
    canvas = torch.ones(PLANE, PLANE, 3)
    canvas[PLANE - 1 - pixels[:, 1], pixels[:, 0]] = (brightness + 0.35 * angle.cos()).clamp(0, 1)
    return round_values(canvas, 2)


def answer(parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""
    keys = ("reconstruction", "kl", "both")
    if not all(parts.values(key, "error") for key in keys):
        return "Some models have no results yet."

    def means(metric: str, format_: str) -> str:
        return ", ".join(f"{parts.mean(key, metric):{format_}}" for key in keys)

    return (
        f"Results by reconstruction alone, KL alone and both: reconstruction error {means('error', '.4f')}; codes outside the prior "
        f"{means('outside', '.0%')}; nearest neighbours of the same class {means('neighbours', '.0%')}; mean squared distance of "
        f"decoded samples to the nearest test image {means('novelty', '.4f')}."
    )
