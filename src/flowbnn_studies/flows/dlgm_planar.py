"""Rezende and Mohamed 2015 (https://arxiv.org/abs/1505.05770) and van den Berg et al. 2018 (https://arxiv.org/abs/1803.05649):
what a flow as the posterior of an autoencoder is worth on binary MNIST."""

from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch

from flowbnn.compare.results import Metric, Parts, figure
from flowbnn.data import TensorLoader
from flowbnn.density import Density
from flowbnn.flows import IAF, Sylvester
from flowbnn.options import Count, Positive, UnitInterval, options
from flowbnn.transforms import Transform
from flowbnn.vae import VAE, GatedConvDecoder, GatedConvEncoder, fit_autoencoder
from flowbnn_studies.images.data import binarise, read_binary, read_bytes
from flowbnn_studies.images.settings import ImageSource
from flowbnn_studies.runner.findings import grid_figures, image_grid, line, panel, pluralize
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

SHAPE = (1, 28, 28)
METRICS = (
    Metric("nll", "-ln p(x)", "lower", ".2f", "By importance sampling, mean over the test images, in nats."),
    Metric(
        "bound", "-ELBO", "lower", ".2f", "Minus the evidence lower bound, one draw for each image, in nats."
    ),
    Metric("gap", "Gap", "none", ".2f", "-ELBO less -ln p(x): what the posterior misses, in nats."),
)
LABELS = {"gaussian": "Gaussian", "planar": "planar", "iaf": "IAF", "sylvester": "Sylvester"}
# Rezende and Mohamed 2015, table 3; van den Berg et al. 2018, table 1 (O-SNF for Sylvester)
PUBLISHED: dict[str, dict[str, float]] = {
    **{
        f"planar-{length}": {"nll": value}
        for length, value in {0: 89.9, 10: 87.5, 20: 86.5, 40: 85.7, 80: 85.1}.items()
    },
    "conv-gaussian": {"bound": 86.55, "nll": 82.14},
    "conv-planar": {"bound": 86.06, "nll": 81.91},
    "conv-iaf": {"bound": 84.20, "nll": 80.79},
    "conv-sylvester": {"bound": 83.32, "nll": 80.22},
}


@options(kw_only=True)
class Settings(ImageSource):
    """What the study depends on.

    Args:
        binary: pixels of training images are drawn ``"anew"`` in every epoch, or ``"once"``; those of others always once.
        lengths: numbers of planar flows after the Gaussian of the fully connected autoencoder; 0 is that Gaussian alone.
        posteriors: of the convolutional autoencoder.
        latent, conv_latent: length of the code; of the convolutional ones.
        hidden: units of each of the two hidden layers of encoder and decoder.
        epochs, batch, lr: of the fully connected ones; the rate of Adam falls to zero along a cosine.
        warmup: the share of a training over which the weight of the KL grows to one.
        conv_epochs, conv_batch, conv_lr, conv_seeds: epochs, batch, rate and number of seeds of the convolutional ones.
        conv_length: flows after their Gaussian.
        width, features: channels of the first convolutions, and numbers that their encoder gives.
        made: units of the masked networks of IAF.
        validation: training images put aside, by which the best epoch is kept.
        importance: draws for each test image.
        tested: test images.
    """

    generated: Count = 200
    binary: Literal["anew", "once"] = "anew"
    lengths: tuple[int, ...] = (0, 10, 20, 40, 80)
    posteriors: tuple[str, ...] = tuple(LABELS)
    latent: Count = 40
    conv_latent: Count = 64
    hidden: Count = 400
    epochs: Count = 400
    batch: Count = 500
    lr: Positive = 1e-3
    warmup: UnitInterval = 0.2
    conv_epochs: Count = 120
    conv_batch: Count = 250
    conv_lr: Positive = 1e-3
    conv_seeds: Count = 1
    conv_length: Count = 16
    width: Count = 32
    features: Count = 256
    made: Count = 640
    validation: Count = 10_000
    importance: Count = 1000
    tested: Count = 10_000


class DlgmPlanar(Study):
    name = "dlgm-planar"
    title = "Flows as posteriors of autoencoders on binary MNIST"
    description = "-ln p(x) of autoencoders on binary MNIST against the number of planar flows, and with IAF and Sylvester flows"
    question = (
        "The posterior of a variational autoencoder begins with a Gaussian and goes on with a flow. How far does -ln p(x) of unseen "
        "digits fall with the number of planar flows, and how far with flows that are richer?"
    )
    source = "Rezende and Mohamed 2015, table 3; van den Berg et al. 2018, table 1"
    settings = Settings
    seeds = 3
    accelerator = "auto"
    headline = ("nll", "bound", "gap")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "lengths": (0, 2), "posteriors": ("sylvester",), "latent": 3, "conv_latent": 3, "hidden": 16,
        "epochs": 2, "batch": 50, "conv_epochs": 1, "conv_batch": 50, "conv_length": 1, "width": 2, "features": 8, "made": 8,
        "validation": 50, "importance": 4, "tested": 20,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        plain = [
            Variant(f"planar-{n}", f"{n} planar flows" if n else "Gaussian posterior", cost=1 + n / 10)
            for n in settings.lengths
        ]
        convolved = [
            Variant(f"conv-{name}", f"Convolutions, {LABELS[name]}", cost=20.0, seeds=settings.conv_seeds)
            for name in settings.posteriors
        ]
        return (*plain, *convolved)

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        convolved = job.variant.startswith("conv")
        images, test = read_binary(job, "train"), read_binary(job, "test")[: s.tested]
        grey = read_bytes(job, "mnist", "train")[0] if s.binary == "anew" else images
        epochs, batch, lr = s.epochs, s.batch, s.lr
        if convolved:
            epochs, batch, lr = s.conv_epochs, s.conv_batch, s.conv_lr
        augment = binarise if s.binary == "anew" else None
        seen = TensorLoader(grey[: -s.validation], batch_size=batch, shuffle=True, augment=augment)
        torch.manual_seed(job.seed)
        given = job.short_options(validation=images[-s.validation :], epochs=epochs, patience=epochs, lr=lr)
        model = fit_autoencoder(make_model(job.variant, s).to(job.device), seen, **given)
        bound = -float(Density(model).score(test).double().mean())
        rows = 20_000 if job.device == "cuda" else 1000
        nll = -float(model.log_likelihood(test, s.importance, rows=rows).double().mean())
        content: dict[str, Any] = {"values": {"nll": nll, "bound": bound, "gap": bound - nll}}
        if job.seed == 0:
            content["samples"] = image_grid(model.sample(40, seed=0, mean=True), 8)
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        drawn = (
            "are drawn anew in every epoch (chosen on validation images: drawn once, they are learned by heart)"
            if settings.binary == "anew"
            else "once as well"
        )
        notes = [
            "Grey values are the probabilities of binary pixels. Those of the test images, and of the images that choose the epoch, "
            f"are drawn once, from a fixed seed; those of the images to learn from {drawn}. The published numbers are for Larochelle's "
            f"draw, whose file is not used here, of training images as well. The last {settings.validation:,} training images choose "
            f"the epoch that is kept; {settings.tested:,} test images, {settings.importance} draws each.",
            f"Fully connected: two hidden layers of {settings.hidden} units (the paper has maxout), a code of {settings.latent}, "
            f"{settings.epochs} epochs of {settings.batch} images in a step by Adam (the paper has 500,000 steps of 100 images, by "
            "RMSprop). All parameters of the flows are linear functions of what the encoder gives.",
            f"Convolutions: the gated networks of van den Berg et al., a code of {settings.conv_latent}, {settings.conv_length} flows, "
            f"{settings.conv_epochs} epochs of {settings.conv_batch} images in a step (the paper has up to 2,000 of 100) and "
            f"{pluralize(settings.conv_seeds)}; Sylvester flows have 8 Householder reflections, IAF masked networks of "
            f"{settings.made} units. The weight of the KL grows over the first {settings.warmup:.0%} of a training.",
        ]
        rows = self.rows(settings, parts, METRICS, PUBLISHED)
        caption = "The decoder's means at codes from the prior, seed 0."
        first = self.first_seed_parts(settings, parts, "samples")
        figures = [length_figure(settings, parts), *grid_figures("New digits", caption, first, "samples")]
        return Findings(answer(settings, parts, self.row_labels(settings)), METRICS, rows, figures, notes)


def make_model(variant: str, s: Settings) -> VAE:
    """The autoencoder of a variant.

    >>> s = Settings(latent=2, conv_latent=2, hidden=8, width=1, features=4, made=4, conv_length=2)
    >>> [len(make_model(name, s).flow) for name in ("planar-0", "planar-10", "conv-iaf", "conv-sylvester")]
    [0, 1, 2, 2]
    """
    kind, _, what = variant.partition("-")
    if kind == "planar":
        chosen: dict[str, Any] = {"posterior": "planar", "length": int(what)} if int(what) else {}
        return VAE(SHAPE, s.latent, hidden=(s.hidden, s.hidden), warmup=s.warmup, **chosen)

    def flow(dim: int, context_dim: int) -> Transform:
        if what == "iaf":
            return IAF(dim, context_dim, s.conv_length, (s.made,)).transform
        return Sylvester(dim, context_dim, s.conv_length, reflections=8).transform

    return VAE(
        SHAPE,
        s.conv_latent,
        encoder=GatedConvEncoder(SHAPE, s.features, s.width),
        decoder_net=GatedConvDecoder(s.conv_latent, SHAPE, s.width),
        posterior=flow if what in ("iaf", "sylvester") else what,
        length=s.conv_length,
        warmup=s.warmup,
    )


def length_figure(s: Settings, parts: Parts) -> dict[str, Any]:
    """-ln p(x) and the bound against the number of planar flows."""
    keys = {length: f"planar-{length}" for length in s.lengths}
    panels = []
    for metric in METRICS[:2]:
        known = [length for length, key in keys.items() if parts.values(key, metric.key)]
        lines = [line("here", known, (parts.values(keys[length], metric.key) for length in known))]
        cited = {length: PUBLISHED.get(key, {}).get(metric.key) for length, key in keys.items()}
        told = {length: value for length, value in cited.items() if value is not None}
        if told:
            columns = ([value] for value in told.values())
            lines.append(line("Rezende and Mohamed 2015", told, columns, style="dashed"))
        panels.append(panel(metric.label, "nats", lines))
    caption = (
        "Fully connected autoencoders on binary MNIST, test images; mean and standard deviation over seeds."
    )
    data = {"x_label": "planar flows", "panels": panels}
    made = figure("curves", "More planar flows", caption, data)
    return {**made, "published": "Dashed: the published numbers."}


def answer(s: Settings, parts: Parts, labels: dict[str, str]) -> str:
    """The answer, put together from the numbers."""
    known = [length for length in s.lengths if parts.values(f"planar-{length}", "nll")]
    lines = []
    if len(known) > 1:
        values = [parts.mean(f"planar-{length}", "nll") for length in known]
        falls = all(value > later for value, later in pairwise(values))
        trend = "falls with every step" if falls else "does not fall with every step"
        told = ", ".join(f"{value:.2f} ({length})" for length, value in zip(known, values, strict=True))
        lines.append(f"-ln p(x) {trend} in the number of planar flows: {told}.")
    convolved = [key for key in labels if key.startswith("conv") and parts.values(key, "nll")]
    if convolved:
        told = ", ".join(
            f"{labels[key].partition(', ')[2]} {parts.mean(key, 'nll'):.2f} (bound {parts.mean(key, 'bound'):.2f})"
            for key in convolved
        )
        lines.append(f"With gated convolutions it is: {told}.")
    return "\n".join(lines) or "No autoencoder has numbers yet."
