"""Codes of two numbers under reconstruction alone, under the KL alone, and under both."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.compare.results import Metric, Parts
from flowbnn.options import Count, Positive, options
from flowbnn.vae import VAE, Autoencoder, fit_autoencoder
from flowbnn_studies.images.data import read_bytes
from flowbnn_studies.images.settings import ImageSource
from flowbnn_studies.runner.findings import grid_figures, image_grid, pluralize, round_values
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

SHAPE = (1, 28, 28)
COLUMNS, PLANE = 8, 64  # pictures in a row; pixels of the plane's side
# fmt: off
METRICS = (
    Metric("error", "Reconstruction error", "lower", ".4f", "Mean squared error of a test pixel, from 0 to 1."),
    Metric("kl", "KL", "none", ".2f", "Mean KL of the posterior of a code to the standard normal prior, in nats."),
    Metric("neighbours", "Same class nearby", "higher", ".3f",
           "Share of test images whose nearest other code, among those looked at, is of their own class."),
    Metric("outside", "Codes off the prior", "lower", ".3f", "Share of codes farther from 0 than 99 % of the prior's draws."),
    Metric("novelty", "Samples off the data", "lower", ".4f",
           "Mean squared distance of a pixel between an image decoded from the prior and the nearest test image."),
)
# fmt: on
REACH = 3.0349  # of 99 % of a standard normal in two dimensions: sqrt(-2 log 0.01)


@options(kw_only=True)
class Settings(ImageSource):
    """What the study depends on.

    Args:
        hidden: units of each of the two hidden layers of encoder and decoder.
        epochs, batch, lr: of all trainings.
        shown: test images whose codes are looked at.
        drawn: images decoded from the prior for the last column.
    """

    generated: Count = 200
    hidden: Count = 500
    epochs: Count = 60
    batch: Count = 500
    lr: Positive = 1e-3
    shown: Count = 2_000
    drawn: Count = 500


class AutoencoderVsVae(Study):
    name = "autoencoder-vs-vae"
    title = "Codes of MNIST in two dimensions"
    description = "MNIST in two latent dimensions under reconstruction alone, the KL alone, and both: codes, samples, interpolation"
    question = (
        "An autoencoder gives each digit a code of two numbers. Which codes come of reconstruction alone, which of the KL to a "
        "standard normal alone, which of both, and what does the decoder make of codes that are drawn from that normal?"
    )
    source = "Shown with figures only, in lectures on variational autoencoders after Kingma and Welling 2014"
    settings = Settings
    seeds = 3
    accelerator = "auto"
    headline = tuple(one.key for one in METRICS)
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "hidden": 16, "epochs": 2, "batch": 50, "shown": 30, "drawn": 20,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return (
            Variant("reconstruction", "Reconstruction only"),
            Variant("kl", "KL only"),
            Variant("both", "Both: a VAE"),
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        train, (test, labels) = (
            to_unit(read_bytes(job, "mnist", "train")[0]),
            read_bytes(job, "mnist", "test"),
        )
        test, labels = to_unit(test)[: s.shown], labels[: s.shown]
        torch.manual_seed(job.seed)
        given = job.short_options(validation=0.0, epochs=s.epochs, lr=s.lr, batch_size=s.batch)
        model = fit_autoencoder(make_model(job.variant, s).to(job.device), train, **given)
        with torch.no_grad():
            codes = model.encode(test)
            generator = torch.Generator().manual_seed(job.seed)
            drawn = torch.randn(s.drawn, 2, generator=generator).to(codes)
            made = model.decoder.mean(model.decode(drawn))
            kl = float(model.terms(test)[1].double().mean()) if isinstance(model, VAE) else None
        apart = torch.cdist(codes, codes).fill_diagonal_(torch.inf).argmin(1)
        values = {
            "error": float((model.reconstruct(test) - test).square().double().mean()),
            "kl": kl,
            "neighbours": float((labels[apart] == labels).double().mean()),
            "outside": float((codes.norm(dim=1) > REACH).double().mean()),
            "novelty": float(torch.cdist(made.flatten(1), test.flatten(1)).min(1).values.square().mean())
            / 784,
        }
        content: dict[str, Any] = {"values": values}
        if job.seed == 0:
            some = test[:COLUMNS]
            path = model.interpolate(some[:4], some[4:8], COLUMNS).transpose(0, 1).flatten(0, 1)
            content |= {
                "codes": code_image(codes, labels),
                "samples": image_grid(made[:40], COLUMNS),
                "reconstruction": image_grid(torch.cat([some, model.reconstruct(some)]), COLUMNS),
                "interpolation": image_grid(path, COLUMNS),
                "reach": float(codes.abs().max()),
            }
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        first = self.first_seed_parts(settings, parts, "codes")
        caption = {
            "codes": ("Codes", f"Seed 0: the codes of the first {settings.shown:,} test images, each panel on its own scale (the note "
                      "gives the largest coordinate), a colour for each digit."),
            "samples": ("From the prior", "Seed 0: what each decoder makes of the same codes, drawn from a standard normal."),
            "reconstruction": ("Reconstruction", "Seed 0: test images above, their reconstructions below."),
            "interpolation": ("Between two digits", "Seed 0: along a straight line between the codes of two test images."),
        }  # fmt: skip
        figures = []
        for name, (title, text) in caption.items():
            to = {
                label: f" (to {part['reach']:.1f})" if name == "codes" else ""
                for label, part in first.items()
            }
            drawn = {label + to[label]: part for label, part in first.items()}
            figures += grid_figures(title, text, drawn, name)
        notes = [
            f"Two hidden layers of {settings.hidden} units each way, Bernoulli likelihood of grey values, {settings.epochs} epochs of "
            f"{settings.batch} images by Adam; {pluralize(len(parts.seeds))}. With the KL alone the decoder is never trained.",
        ]
        rows = self.rows(settings, parts, METRICS)
        return Findings(answer(parts), METRICS, rows, figures, notes)


def to_unit(images: Tensor) -> Tensor:
    """Bytes as numbers from 0 to 1."""
    return images.float() / 255


def make_model(variant: str, s: Settings) -> Autoencoder:
    """The model of a variant."""
    hidden = (s.hidden, s.hidden)
    if variant == "reconstruction":
        return Autoencoder(SHAPE, 2, hidden=hidden)
    return VAE(SHAPE, 2, hidden=hidden, reconstruction=1.0 if variant == "both" else 0.0)


def code_image(codes: Tensor, labels: Tensor) -> list[Any]:
    """Codes as a picture of the plane in colour, white where there is none: a hue for each class, the last code on top.

    >>> picture = code_image(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([0, 5]))
    >>> len(picture), picture[0][PLANE - 1] == picture[PLANE - 1][0], picture[0][0]
    (64, False, [1.0, 1.0, 1.0])
    """
    codes, labels = codes.cpu(), labels.cpu()
    places = ((codes / codes.abs().max().clamp(min=1e-9) + 1) / 2 * (PLANE - 1)).round().long()
    angle = 2 * torch.pi * (labels[:, None] / 10 + torch.tensor([0.0, 1 / 3, 2 / 3]))
    dark = torch.where(labels % 2 == 0, 0.35, 0.5)[:, None]
    canvas = torch.ones(PLANE, PLANE, 3)
    canvas[PLANE - 1 - places[:, 1], places[:, 0]] = (dark + 0.35 * angle.cos()).clamp(0, 1)
    return round_values(canvas, 2)


def answer(parts: Parts) -> str:
    """The answer, put together from the numbers."""
    if not all(parts.values(key, "error") for key in ("reconstruction", "kl", "both")):
        return "Not every model has numbers yet."

    def told(metric: str, form: str) -> str:
        return ", ".join(f"{parts.mean(key, metric):{form}}" for key in ("reconstruction", "kl", "both"))

    return (
        f"Under reconstruction alone, the KL alone and both: the reconstruction error is {told('error', '.4f')}; codes "
        f"far from the prior are {told('outside', '.0%')}; neighbours of one class are {told('neighbours', '.0%')}; images "
        f"decoded from the prior are {told('novelty', '.4f')} away from the nearest test image."
    )
