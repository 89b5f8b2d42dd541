"""Noise of a trained network, fitted on images that its weights have not seen: what each structure of the posterior is worth."""

import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn import evaluate
from flowbnn.calibrate import calibrate
from flowbnn.data import TensorLoader
from flowbnn.likelihoods import Categorical
from flowbnn.methods import MLE
from flowbnn.methods.temperature import TemperedPosterior, temper
from flowbnn.models import LeNet
from flowbnn.options import Count, NonNegative, Positive, options
from flowbnn.posterior import PointPosterior, Posterior
from flowbnn.results import Metric, Parts
from flowbnn_studies.data import load_images
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.statistics import counted, paired
from flowbnn_studies.runner.study import Findings, Study, Variant

ROWS: dict[str, tuple[str, str, dict[str, Any] | None]] = {  # label, method, and what calibrate is given
    "plain": ("Plain", "mle", None),
    "temperature": ("Temperature scaling", "temperature", None),
    "factorized": ("Noise, factorized", "node-noise-gaussian", {"structure": "factorized", "prior": "fixed"}),
    "layers": ("Noise, full within layers", "node-noise-gaussian", {"structure": "layers", "prior": "fixed"}),
    "chain": ("Noise, chain of layers", "node-noise-gaussian", {"structure": "chain", "prior": "fixed"}),
    "joint": ("Noise, joint", "node-noise-gaussian", {"structure": "full", "prior": "fixed"}),
    "joint-fitted": (
        "Noise, joint, fitted prior",
        "node-noise-gaussian",
        {"structure": "full", "prior": "fitted"},
    ),
    "all": ("Plain on all images, tempered", "temperature", None),
}
NUMBERS = {
    "accuracy": ("Accuracy", "higher", ".4f", "Share of test images whose most probable class is right."),
    "nll": ("NLL", "lower", ".4f", "Mean negative log-likelihood of the right class, in nats."),
    "ece": ("ECE", "lower", ".4f", "Expected calibration error in 15 equal bins."),
    "seconds": (
        "Seconds",
        "none",
        ".1f",
        "Of the fit of temperature or noise, without the training of the weights.",
    ),
}


@options
class Settings:
    """What the study depends on.

    Args:
        data: of images.
        train: images that the weights are trained on, for each case.
        held_out: fresh images, for each case; 0: the images that the weights were trained on.
        epochs: of the weights' training on ``train`` images, for each case.
        folds: networks that are trained to find the temperature of the network on all images.
        test: images, at most.
    """

    data: str = "fashion-mnist"
    train: tuple[int, ...] = (1_000, 1_000, 1_000, 5_000)
    held_out: tuple[int, ...] = (1_000, 100, 0, 1_000)
    epochs: tuple[int, ...] = (60, 60, 60, 30)
    batch: Count = 50
    lr: Positive = 1e-3
    folds: NonNegative = 5
    samples: Count = 64
    test: Count = 10_000

    def cases(self) -> dict[str, tuple[int, int, int]]:
        """The cases by their keys."""
        return {
            f"{train}-{out or 'same'}": (train, out, epochs)
            for train, out, epochs in zip(self.train, self.held_out, self.epochs, strict=True)
        }


def metrics_of(settings: Settings) -> tuple[Metric, ...]:
    """Accuracy, NLL, ECE and seconds of every case."""
    return tuple(
        Metric(f"{key}_{case}", f"{label}, {title(case)}", direction, form, meaning, label)
        for key, (label, direction, form, meaning) in NUMBERS.items()
        for case in settings.cases()
    )


def title(case: str) -> str:
    """A case in words.

    >>> title("1000-100"), title("1000-same")
    ('1,000 + 100', '1,000, the same')
    """
    train, _, out = case.partition("-")
    return f"{int(train):,}, the same" if out == "same" else f"{int(train):,} + {int(out):,}"


class CalibrateStudy(Study):
    """What is a better posterior of the noise worth, and on which data?"""

    name = "calibrate"
    title = "Calibrating a trained network"
    description = "noise of a trained LeNet on fresh and on memorised images, from factorized to joint, beside temperature scaling"
    question = (
        "A LeNet is trained on a few images. Its weights stay, and its noise is fitted to fresh images, or to those that the weights "
        "have seen. Does a richer posterior predict better, and better than temperature scaling?"
    )
    source = "flowbnn's own"
    settings = Settings
    seeds = 10
    accelerator = "auto"
    headline = ("nll_1000-1000", "ece_1000-1000", "nll_1000-100", "nll_1000-same")
    quick: ClassVar[dict[str, Any]] = {
        "train": (100, 100),
        "held_out": (60, 0),
        "epochs": (2, 2),
        "folds": 2,
        "samples": 4,
        "test": 100,
    }

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return tuple(
            Variant(case, title(case), "mle", cost=sum(shape)) for case, shape in settings.cases().items()
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        size, out, epochs = s.cases()[job.variant]
        images, test = load_images(s.data), load_images(s.data, "test")
        order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(job.seed))
        index, rest = order[:size], order[-out:] if out else order[:size]
        seen = images.normalized()[index], images.labels[index]
        fresh = images.normalized()[rest], images.labels[rest]
        unseen = test.normalized()[: s.test], test.labels[: s.test]
        device: dict[str, Any] = {"accelerator": job.accelerator}
        plain = network_of(seen, epochs, s, job.seed, device)
        loader = TensorLoader(*fresh, batch_size=250)
        table: dict[str, dict[str, float]] = {}
        for key, (_, _, given) in ROWS.items():
            started = time.perf_counter()
            posterior: Posterior = plain
            if key == "temperature":
                posterior = temper(plain, loader, progress=False)
            elif key == "all":
                if not out or not s.folds:
                    continue
                both = torch.cat([seen[0], fresh[0]]), torch.cat([seen[1], fresh[1]])
                posterior = tempered_on_all(both, epochs, s, job.seed, device)
            elif given is not None:
                posterior = calibrate(
                    plain.model, loader, folds=0, seed=job.seed, progress=False, **given, **device
                )
            seconds = time.perf_counter() - started
            numbers = evaluate(posterior, unseen, samples=s.samples, progress=False)
            table[key] = {name: numbers[name] for name in ("accuracy", "nll", "ece")} | {"seconds": seconds}
        return {"values": {}, "table": table}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        content: dict[tuple[str, int], dict[str, Any]] = {}
        for (case, seed), part in parts.content.items():
            for row, numbers in part["table"].items():
                values = content.setdefault((row, seed), {"values": {}})["values"]
                values |= {f"{name}_{case}": value for name, value in numbers.items()}
        by_row = Parts(parts.seeds, content)
        metrics = metrics_of(settings)
        rows = [by_row.row(key, label, metrics, None, method) for key, (label, method, _) in ROWS.items()]
        notes = [
            "Columns: images that the weights are trained on + fresh images that temperature and noise are fitted to. “The same”: "
            "noise is fitted to the images of the weights.",
            "The prior of the noise is N(1, 0.5²), or fitted: a mean and a width for every layer by the ELBO.",
            f"Plain on all images: the same network trained on both kinds of images, with the temperature of {settings.folds} networks "
            "on the images that each has not seen.",
            "Nothing was chosen on test images.",
        ]
        return Findings(answer(settings, by_row), metrics, rows, [], notes)


def network_of(
    data: tuple[Tensor, Tensor], epochs: int, settings: Settings, seed: int, device: dict[str, Any]
) -> PointPosterior:
    """A LeNet trained on these images."""
    torch.manual_seed(seed)
    loader = TensorLoader(*data, batch_size=settings.batch, shuffle=True)
    network = LeNet(data[0].shape[1])
    return MLE(epochs=epochs, lr=settings.lr).fit(network, loader, seed=seed, progress=False, **device)


class Shown(nn.Module):
    """A network whose inputs are its outputs: logits that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", torch.zeros(()))

    def forward(self, logits: Tensor) -> Tensor:
        return logits


def tempered_on_all(
    data: tuple[Tensor, Tensor], epochs: int, settings: Settings, seed: int, device: dict[str, Any]
) -> Posterior:
    """A network on all images, with the temperature that suits networks on images that they have not seen."""
    folds, number = int(settings.folds), len(data[1])
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
    logits, targets = [], []
    for fold in range(folds):
        out = order[fold::folds]
        kept = torch.cat([order[other::folds] for other in range(folds) if other != fold])
        one = network_of((data[0][kept], data[1][kept]), epochs, settings, seed, device)
        logits.append(one.predict(data[0][out], progress=False).log_samples[0].cpu())
        targets.append(data[1][out])
    known = temper(
        PointPosterior(Shown(), Categorical()), [(torch.cat(logits), torch.cat(targets))], progress=False
    )
    return TemperedPosterior(network_of(data, epochs, settings, seed, device), known.temperature)


def answer(settings: Settings, parts: Parts) -> str:
    """The answer, put together from the numbers."""
    lines = []
    for case in settings.cases():
        nll = f"nll_{case}"
        joint = parts.mean("joint", nll)
        against = paired(*parts.common("joint", "factorized", nll))
        if case.endswith("same"):
            verdict = "better" if against.mean < 0 else "worse"
            lines.append(
                f"On images that the weights have memorised a joint posterior is {verdict} than a factorized one: NLL {joint:.3f} "
                f"against {parts.mean('factorized', nll):.3f}, {against.words(3)}."
            )
            continue
        tempered = paired(*parts.common("joint", "temperature", nll))
        best = min(("joint", "joint-fitted"), key=lambda key: parts.mean(key, nll))
        lines.append(
            f"{title(case)} images, {counted(len(parts.seeds))}: NLL {parts.mean('plain', nll):.3f} plain, "
            f"{parts.mean('temperature', nll):.3f} by temperature, {parts.mean('factorized', nll):.3f} with factorized and "
            f"{joint:.3f} with joint noise ({tempered.words(3)} from temperature, {against.words(3)} from factorized); best prior: "
            f"{'fixed' if best == 'joint' else 'fitted'} ({parts.mean(best, nll):.3f})."
        )
    return "\n".join(lines)
