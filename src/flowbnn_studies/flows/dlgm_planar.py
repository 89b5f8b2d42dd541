"""Flows as posteriors of autoencoders on binary MNIST.

After Rezende and Mohamed 2015 (https://arxiv.org/abs/1505.05770) and van den Berg et al. 2018 (https://arxiv.org/abs/1803.05649).
"""

from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch

from flowbnn.compare.results import Metric, SeedResults, figure
from flowbnn.data import TensorLoader
from flowbnn.density import Density
from flowbnn.flows import IAF, Sylvester
from flowbnn.options import Count, Positive, UnitInterval, options
from flowbnn.transforms import Transform
from flowbnn.vae import VAE, GatedConvDecoder, GatedConvEncoder, fit_autoencoder
from flowbnn_studies.images.data import binarise, read_binary, read_bytes
from flowbnn_studies.images.settings import ImageSource
from flowbnn_studies.runner.findings import grid_figures, image_grid, line, panel, pluralize
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

SHAPE = (1, 28, 28)
METRICS = (
    Metric(
        "nll",
        "-ln p(x)",
        "lower",
        ".2f",
        "Negative log-likelihood by importance sampling, mean over test images, in nats.",
    ),
    Metric("bound", "-ELBO", "lower", ".2f", "Negative ELBO with one draw for each image, in nats."),
    Metric("gap", "Gap", "none", ".2f", "-ELBO minus -ln p(x): gap of the posterior, in nats."),
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
    """Settings of the study.

    Args:
        binary: Binary pixels of training images are drawn in every epoch (``"anew"``) or ``"once"``. Those of other images are
            drawn once.
        lengths: Numbers of planar flows of the fully connected autoencoder; 0 is the Gaussian alone.
        posteriors: Posteriors of the convolutional autoencoder.
        latent, conv_latent: Length of the code of the fully connected and of the convolutional autoencoders.
        hidden: Number of units of each of the two hidden layers of encoder and decoder.
        epochs, batch, lr: Epochs, batch size and learning rate of the fully connected autoencoders. The rate decays to zero along a
            cosine.
        warmup: Fraction of a training over which the weight of the KL grows to one.
        conv_epochs, conv_batch, conv_lr, conv_seeds: Epochs, batch size, learning rate and number of seeds of the convolutional
            autoencoders.
        conv_length: Number of flows of the convolutional autoencoders.
        width, features: Number of channels of the first convolutions, and of outputs of the encoder.
        iaf_hidden: Number of units of the masked networks of IAF.
        validation: Number of validation images, which choose the epoch.
        importance: Number of importance samples for each test image.
        num_tested: Number of test images.
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
    iaf_hidden: Count = 640
    validation: Count = 10_000
    importance: Count = 1000
    num_tested: Count = 10_000


class DlgmPlanar(Study):
    name = "dlgm-planar"
    title = "Flows as posteriors of autoencoders on binary MNIST"
    description = (
        "-ln p(x) of autoencoders on binary MNIST by number of planar flows, and with IAF and Sylvester flows"
    )
    question = (
        "The posterior of a variational autoencoder is a Gaussian followed by a flow. How much does -ln p(x) of test digits "
        "decrease with the number of planar flows, and with more flexible flows?"
    )
    source = "Rezende and Mohamed 2015, table 3; van den Berg et al. 2018, table 1"
    settings = Settings
    seeds = 3
    accelerator = "auto"
    headline = ("nll", "bound", "gap")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "lengths": (0, 2), "posteriors": ("sylvester",), "latent": 3, "conv_latent": 3, "hidden": 16,
        "epochs": 2, "batch": 50, "conv_epochs": 1, "conv_batch": 50, "conv_length": 1, "width": 2, "features": 8, "iaf_hidden": 8,
        "validation": 50, "importance": 4, "num_tested": 20,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        connected = [
            Variant(f"planar-{n}", f"{n} planar flows" if n else "Gaussian posterior", cost=1 + n / 10)
            for n in settings.lengths
        ]
        convolutional = [
            Variant(f"conv-{name}", f"Convolutions, {LABELS[name]}", cost=20.0, seeds=settings.conv_seeds)
            for name in settings.posteriors
        ]
        return (*connected, *convolutional)

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        convolutional = job.variant.startswith("conv")
        images, test = read_binary(job, "train"), read_binary(job, "test")[: s.num_tested]
        grey = read_bytes(job, "mnist", "train")[0] if s.binary == "anew" else images
        epochs, batch, lr = s.epochs, s.batch, s.lr
        if convolutional:
            epochs, batch, lr = s.conv_epochs, s.conv_batch, s.conv_lr
        augment = binarise if s.binary == "anew" else None
        loader = TensorLoader(grey[: -s.validation], batch_size=batch, shuffle=True, augment=augment)
        torch.manual_seed(job.seed)
        options = job.short_options(validation=images[-s.validation :], epochs=epochs, patience=epochs, lr=lr)
        model = fit_autoencoder(make_model(job.variant, s).to(job.device), loader, **options)
        bound = -float(Density(model).score(test).double().mean())
        rows = 20_000 if job.device == "cuda" else 1000
        nll = -float(model.log_likelihood(test, s.importance, rows=rows).double().mean())
        content: dict[str, Any] = {"values": {"nll": nll, "bound": bound, "gap": bound - nll}}
        if job.seed == 0:
            content["samples"] = image_grid(model.sample(40, seed=0, mean=True), 8)
        return content

    def story(self, numbers: Numbers) -> Story:
        counts = sorted(int(key.removeprefix("planar-")) for key in numbers.rows if key.startswith("planar-"))
        first, last = (numbers.text(f"planar-{count}", "nll") for count in (counts[0], counts[-1]))
        return Story(
            "How much do flows improve the posterior of a variational autoencoder?",
            f"{counts[-1]} planar flows lower −ln p(x) of unseen digits from {first} to {last} nats, but better networks "
            "matter more: with "
            f"convolutions it is {numbers.text('conv-gaussian', 'nll')} without a flow and "
            f"{numbers.text('conv-sylvester', 'nll')} with "
            "Sylvester flows (one seed).",
            f"{first} → {last}",
            f"−ln p(x) in nats, without a flow and with {counts[-1]} planar flows",
            ("nll", "bound", "gap"),
            figure="curves",
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        drawing = (
            "are drawn in every epoch (chosen on validation images: pixels that are drawn once are memorized)"
            if settings.binary == "anew"
            else "are drawn once as well"
        )
        notes = [
            "Grey values are the probabilities of binary pixels. Those of test and validation images are drawn once, from a fixed "
            f"seed; those of training images {drawing}. The published numbers are for the fixed binary images of Larochelle, which "
            f"are not used here. The last {settings.validation:,} training images choose the epoch. There are "
            f"{settings.num_tested:,} test images with {settings.importance} draws each.",
            f"Fully connected: two hidden layers of {settings.hidden} units (maxout in the paper), a code of {settings.latent}, "
            f"{settings.epochs} epochs of Adam with batches of {settings.batch} (the paper has 500,000 steps of RMSprop with "
            "batches of 100). All parameters of the flows are linear functions of the output of the encoder.",
            f"Convolutional: the gated networks of van den Berg et al., a code of {settings.conv_latent}, {settings.conv_length} "
            f"flows, {settings.conv_epochs} epochs with batches of {settings.conv_batch} (up to 2,000 epochs with batches of 100 in "
            f"the paper) and {pluralize(settings.conv_seeds)}. Sylvester flows have 8 Householder reflections, IAF has masked "
            f"networks of {settings.iaf_hidden} units. The weight of the KL grows over the first {settings.warmup:.0%} of a "
            "training.",
        ]
        rows = self.rows(settings, parts, METRICS, PUBLISHED)
        caption = "Seed 0: decoded means of codes drawn from the prior."
        first = self.first_seed_parts(settings, parts, "samples")
        figures = [length_figure(settings, parts), *grid_figures("Samples", caption, first, "samples")]
        return Findings(answer(settings, parts, self.row_labels(settings)), METRICS, rows, figures, notes)


def make_model(variant: str, s: Settings) -> VAE:
    """Returns the autoencoder of a variant.

    >>> s = Settings(latent=2, conv_latent=2, hidden=8, width=1, features=4, iaf_hidden=4, conv_length=2)
    >>> [len(make_model(name, s).flow) for name in ("planar-0", "planar-10", "conv-iaf", "conv-sylvester")]
    [0, 1, 2, 2]
    """
    kind, _, posterior = variant.partition("-")
    if kind == "planar":
        options: dict[str, Any] = {"posterior": "planar", "length": int(posterior)} if int(posterior) else {}
        return VAE(SHAPE, s.latent, hidden=(s.hidden, s.hidden), warmup=s.warmup, **options)

    def flow(dim: int, context_dim: int) -> Transform:
        if posterior == "iaf":
            return IAF(dim, context_dim, s.conv_length, (s.iaf_hidden,)).transform
        return Sylvester(dim, context_dim, s.conv_length, reflections=8).transform

    return VAE(
        SHAPE,
        s.conv_latent,
        encoder=GatedConvEncoder(SHAPE, s.features, s.width),
        decoder_net=GatedConvDecoder(s.conv_latent, SHAPE, s.width),
        posterior=flow if posterior in ("iaf", "sylvester") else posterior,
        length=s.conv_length,
        warmup=s.warmup,
    )


def length_figure(s: Settings, parts: SeedResults) -> dict[str, Any]:
    """Returns the figure of -ln p(x) and -ELBO against the number of planar flows."""
    keys = {length: f"planar-{length}" for length in s.lengths}
    panels = []
    for metric in METRICS[:2]:
        lengths = [length for length, key in keys.items() if parts.values(key, metric.key)]
        lines = [line("this study", lengths, (parts.values(keys[length], metric.key) for length in lengths))]
        all_published = {length: PUBLISHED.get(key, {}).get(metric.key) for length, key in keys.items()}
        published = {length: value for length, value in all_published.items() if value is not None}
        if published:
            columns = ([value] for value in published.values())
            lines.append(line("Rezende and Mohamed 2015", published, columns, style="dashed"))
        panels.append(panel(metric.label, "nats", lines))
    caption = "Fully connected autoencoders on test images of binary MNIST, with mean and standard deviation over seeds."
    data = {"x_label": "planar flows", "panels": panels}
    result = figure("curves", "-ln p(x) against the number of planar flows", caption, data)
    return {**result, "published": "Dashed lines: published numbers."}


def answer(s: Settings, parts: SeedResults, labels: dict[str, str]) -> str:
    """Returns the answer, computed from the numbers."""
    lengths = [length for length in s.lengths if parts.values(f"planar-{length}", "nll")]
    lines = []
    if len(lengths) > 1:
        values = [parts.mean(f"planar-{length}", "nll") for length in lengths]
        decreasing = all(value > next_value for value, next_value in pairwise(values))
        trend = "decreases" if decreasing else "does not decrease"
        entries = ", ".join(f"{value:.2f} ({length})" for length, value in zip(lengths, values, strict=True))
        lines.append(f"-ln p(x) {trend} with every increase of the number of planar flows: {entries}.")
    convolutional = [key for key in labels if key.startswith("conv") and parts.values(key, "nll")]
    if convolutional:
        entries = ", ".join(
            f"{labels[key].partition(', ')[2]} {parts.mean(key, 'nll'):.2f} (-ELBO {parts.mean(key, 'bound'):.2f})"
            for key in convolutional
        )
        lines.append(f"With gated convolutions: {entries}.")
    return "\n".join(lines) or "No autoencoder has results yet."
