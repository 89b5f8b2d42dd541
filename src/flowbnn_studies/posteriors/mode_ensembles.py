"""Modes of the noise as members of an ensemble, compared with Gaussian noise and a deep ensemble.

The plan was written before the first run: docs/results/mode-ensembles/plan.md.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flowbnn import evaluate
from flowbnn.calibrate import calibrate
from flowbnn.compare.measurement import count_stored_numbers, sample_count
from flowbnn.compare.results import SeedResults
from flowbnn.data import TensorLoader, clusters
from flowbnn.methods import MLE, ModeEnsemble
from flowbnn.methods.calibrators.temperature import Temperature
from flowbnn.methods.ensemble import EnsemblePosterior
from flowbnn.models import MLP, LeNet
from flowbnn.options import Count, Positive, options
from flowbnn.posterior import PointPosterior, Posterior
from flowbnn.training import cosine
from flowbnn_studies.data.tables import load_uci, standardize
from flowbnn_studies.images.data import ImageData, load_image_data
from flowbnn_studies.images.settings import ImageSettings, Training, make_network
from flowbnn_studies.images.study import SHORT_RESNET18
from flowbnn_studies.images.training import fit_variant
from flowbnn_studies.runner.findings import paired_difference
from flowbnn_studies.runner.methods import shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, parts_by_row, time_call

TensorPair = tuple[Tensor, Tensor]
ROWS = {
    "plain": ("Deterministic, all data", "mle"),
    "temperature": ("Temperature scaling", "temperature"),
    "gaussian": ("Gaussian noise, joint", "node-noise-gaussian"),
    "modes": ("Modes", "mode-ensemble"),
    "laplace": ("Modes with a Gaussian each", "mode-ensemble-laplace"),
    "ensemble": ("Deep ensemble, all data", "deep-ensemble"),
}
PROBLEMS = {  # and the setting with its training
    "blobs": "blobs",
    "boston": "tables",
    "concrete": "tables",
    "lenet-fashion": "lenet",
    "resnet18-cifar10": "resnet18",
}
LARGE = "resnet18-cifar10"
MAX_GAP = 0.01  # nats above the NLL of a deep ensemble that the plan allows
# fmt: off
NUMBERS = {
    "nll": ("NLL", "lower", ".4f", "Mean negative log-likelihood (NLL) of a test example, in nats and in the units of the data."),
    "accuracy": ("Accuracy", "higher", ".4f", "Fraction of test examples whose most probable class is right."),
    "rmse": ("RMSE", "lower", ".4g", "Root mean squared error, in the units of the data."),
    "ece": ("ECE", "lower", ".4f", "Expected calibration error in 15 equal bins."),
    "width": ("Width", "none", ".3g", "Width of the prior of the noise, chosen on validation data."),
    "parameters": ("Parameters", "lower", ".3g", "Real numbers that the posterior needs for predictions."),
    "seconds": ("Seconds", "none", ".1f", "Time of the fit with fixed weights; for the deterministic network and the ensemble, "
                                          "time of their training."),
}
# fmt: on


@options
class SmallTraining:
    """Training of a small network by Adam with a cosine schedule.

    Args:
        epochs: Number of epochs.
        batch: Number of examples in a step.
        lr: Learning rate.
    """

    epochs: Count = 100
    batch: Count = 32
    lr: Positive = 1e-2


@options
class Settings:
    """Settings of the study.

    Args:
        source: ``"files"`` reads the data sets; ``"generated"`` generates small ones for a trial run.
        data_fraction: Fraction of the numbers of examples in the plan, for a trial run.
        width: Factor of the channels of ResNet18.
        members, large_members: Number of modes and of networks of the deep ensemble; for ResNet18.
        steps, large_steps: Number of steps of the search for a mode; for ResNet18.
        prior_widths: Candidate widths of the prior of Gaussian noise, chosen on validation data.
        samples: Number of networks averaged in a prediction with Gaussian noise.
        blobs, tables, lenet, resnet18: Trainings of the weights.
    """

    source: Literal["files", "generated"] = "files"
    data_fraction: Positive = 1.0
    width: Positive = 1.0
    members: Count = 16
    large_members: Count = 5
    steps: Count = 300
    large_steps: Count = 100
    prior_widths: tuple[Positive, ...] = (0.25, 0.5, 1.0, 2.0)
    samples: Count = 64
    blobs: SmallTraining = SmallTraining(batch=20)
    tables: SmallTraining = SmallTraining()
    lenet: SmallTraining = SmallTraining(epochs=30, batch=50, lr=1e-3)
    resnet18: Training = replace(SHORT_RESNET18, epochs=16)

    def relevant(self, variant: str) -> dict[str, Any]:
        """Returns the settings that the result of a problem depends on."""
        other_trainings = set(PROBLEMS.values()) - {PROBLEMS[variant]}
        return {name: value for name, value in asdict(self).items() if name not in other_trainings}


@dataclass
class EnsembleProblem:
    """Data of a problem in parts, and a function that trains networks on them.

    Args:
        data: Examples of the parts a (weights), b (noise) and c (width of the prior), in this order.
        sizes: Number of examples of each part.
        test: Test examples.
        learn: Function that trains a network on a slice of the data with a seed.
        unit: Standard deviation of the targets of a regression, in the units of the file.
    """

    data: TensorPair
    sizes: tuple[int, int, int]
    test: TensorPair
    learn: Callable[[slice, int], PointPosterior]
    unit: float = 1.0

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """Slices of the three parts."""
        first, second, third = self.sizes
        return slice(0, first), slice(first, first + second), slice(first + second, first + second + third)

    def loader(self, rows: slice) -> TensorLoader:
        """Returns a loader of a slice of the data."""
        return TensorLoader(*(tensor[rows] for tensor in self.data), batch_size=1000)


class ModeEnsembles(Study):
    name = "mode-ensembles"
    title = "Modes of the noise as ensemble members"
    description = (
        "modes of the noise as an ensemble, versus Gaussian noise and a deep ensemble; planned in advance"
    )
    question = (
        "The weights of a network are trained and then fixed. Are modes of the posterior density of its noise, used as members of "
        "an ensemble, better than Gaussian noise around one of them, and are they close to a deep ensemble with as many members?"
    )
    source = "no published counterpart; plan in docs/results/mode-ensembles/plan.md"
    settings = Settings
    seeds = 10
    accelerator = "auto"
    headline = tuple(f"nll_{problem}" for problem in PROBLEMS)
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "data_fraction": 0.002, "width": 0.0625, "members": 2, "large_members": 2, "steps": 2, "large_steps": 1,
        "prior_widths": (0.5,), "samples": 2, **dict.fromkeys(("blobs", "tables", "lenet"), SmallTraining(epochs=1)),
        "resnet18": replace(SHORT_RESNET18, epochs=1, batch=20),
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        cost = {"lenet-fashion": 10.0, LARGE: 50.0}
        return tuple(Variant(problem, problem, "mle", cost=cost.get(problem, 1.0)) for problem in PROBLEMS)

    def train(self, job: Job) -> dict[str, Any]:
        problem = _make_problem(job)
        table: dict[str, dict[str, float]] = {}
        for key, fit in _fits(job, problem).items():
            result, seconds = time_call(fit)
            posterior, *width = result if isinstance(result, tuple) else (result,)
            numbers = _evaluate(job, posterior, problem.test)
            names = ("accuracy", "nll", "ece", "rmse")
            table[key] = {name: numbers[name] for name in names if name in numbers}
            table[key] |= {"parameters": float(count_stored_numbers(posterior)), "seconds": seconds}
            if width:
                table[key]["width"] = width[0]
            if "rmse" in numbers:
                table[key]["rmse"] *= problem.unit
                table[key]["nll"] += float(torch.tensor(problem.unit).log())
        table["ensemble"]["seconds"] += table["plain"]["seconds"]  # the first member
        return {"values": {}, "table": table}

    def story(self, numbers: Numbers) -> Story:
        problems = [key for key in numbers.metrics if key.startswith("nll_")]
        verdicts = [numbers.better("modes", "gaussian", problem) for problem in problems]
        ensemble = sum(numbers.better("ensemble", "modes", problem) > 0 for problem in problems)
        won = sum(verdict > 0 for verdict in verdicts)
        charts = tuple(key for key in ("nll_blobs", "nll_concrete", "nll_lenet-fashion") if key in problems)
        return Story(
            "Are the modes of the noise worth more than Gaussian noise around one of them?",
            f"{'Sometimes' if won else 'No'}: modes predict significantly better on {won} of {len(problems)} problems and worse on "
            f"{sum(verdict < 0 for verdict in verdicts)}, and a deep ensemble, which needs more training, is significantly better than "
            f"modes on {ensemble}.",
            f"{won} of {len(problems)}",
            "problems on which modes beat Gaussian noise",
            tuple(problems[:4]),
            charts=charts or tuple(problems[:1]),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        tables = ((seed, problem, part["table"]) for (problem, seed), part in parts.content.items())
        by_row = parts_by_row(parts.seeds, tables)
        all_metrics = make_metrics(NUMBERS, {problem: problem for problem in PROBLEMS})
        metrics = [metric for metric in all_metrics if any(by_row.values(row, metric.key) for row in ROWS)]
        rows = [by_row.row(key, label, metrics, None, method) for key, (label, method) in ROWS.items()]
        numbers = ", ".join(f"{problem} {len(parts.of(problem))}" for problem in PROBLEMS)
        notes = [
            f"Seeds: {numbers}. The plan was written before the first run: docs/results/mode-ensembles/plan.md.",
            "The deterministic network and the deep ensemble are trained on all data that the other methods use for weights, noise "
            "and the width of the prior.",
        ]
        return Findings("\n".join(claims(by_row)), metrics, [row for row in rows if row["values"]], [], notes)


def _evaluate(job: Job, posterior: Posterior, data: Any) -> dict[str, float]:
    """Evaluates a posterior. The large network has the precision of the training."""
    half = job.variant == LARGE and job.accelerator != "cpu" and job.precision.startswith("bf16")
    precision: Any = job.precision if half else "32-true"
    options: dict[str, Any] = {"precision": precision, "compile": False, "progress": False}
    return evaluate(posterior, data, samples=sample_count(posterior, job.settings.samples), **options)


def _fits(job: Job, problem: EnsembleProblem) -> dict[str, Callable[[], Any]]:
    """Returns functions that fit each row. Those that choose a prior also return its width."""
    s: Settings = job.settings
    large = job.variant == LARGE
    a, b, c = problem.parts
    weights = problem.learn(a, job.seed)
    noise_data, validation = problem.loader(b), problem.loader(c)
    members, steps = (s.large_members, s.large_steps) if large else (s.members, s.steps)
    device: dict[str, Any] = {"accelerator": job.accelerator, "progress": False}
    points: list[PointPosterior] = []

    def find_modes(width: Literal["point", "laplace"]) -> tuple[Posterior, float]:
        method = ModeEnsemble(members, epochs=0, steps=steps, width=width)
        posterior = method.fit(weights.model, noise_data, validation=validation, seed=job.seed, **device)
        return posterior, min(posterior.validation_nll, key=lambda scale: posterior.validation_nll[scale])

    def gaussian() -> tuple[Posterior, float]:
        options: dict[str, Any] = {
            "structure": "full",
            "prior": "fixed",
            "folds": 0,
            "seed": job.seed,
            **device,
        }
        posteriors = {
            scale: calibrate(weights.model, noise_data, prior_scale=scale, **options)
            for scale in s.prior_widths
        }
        best = min(posteriors, key=lambda scale: _evaluate(job, posteriors[scale], validation)["nll"])
        return posteriors[best], best

    def train_networks(number: int) -> list[PointPosterior]:
        """Trains networks on all data until there are ``number``."""
        for member in range(len(points), number):
            points.append(problem.learn(slice(a.start, c.stop), job.seed + 1000 * member))
        return points

    return {
        "temperature": lambda: Temperature().fit(
            weights, problem.loader(slice(b.start, c.stop)), progress=False
        ),
        "gaussian": gaussian,
        "modes": lambda: find_modes("point"),
        **({} if large else {"laplace": lambda: find_modes("laplace")}),
        "plain": lambda: train_networks(1)[0],
        "ensemble": lambda: EnsemblePosterior.from_points(train_networks(members)),
    }


def claims(parts: SeedResults) -> list[str]:
    """Returns the four claims of the plan, each met or not, with the differences that decide it."""
    lines = []
    for title, first, second, required in (
        ("Modes are better than Gaussian noise", "modes", "gaussian", 3),
        ("Modes are better than temperature scaling", "modes", "temperature", 3),
        ("Modes are close to a deep ensemble", "modes", "ensemble", 3),
        ("A Gaussian at each mode is better than the modes alone", "laplace", "modes", 2),
    ):
        better, worse, differences = 0, 0, []
        for problem in PROBLEMS:
            pair = parts.common(first, second, f"nll_{problem}")
            if len(pair[0]) < (3 if problem == LARGE else 2):
                continue
            result = paired_difference(*pair)
            better += result.high < (MAX_GAP if second == "ensemble" else 0.0)
            worse += result.low > 0.0 and second != "ensemble"
            differences.append(f"{problem} {result.describe()}")
        if differences:
            met = "met" if better >= required and not worse else "not met"
            lines.append(
                f"{title}: {met} ({better} of {len(differences)} problems for it, {worse} against). Differences of the NLL: "
                f"{'; '.join(differences)}."
            )
    return lines or ["There are too few results for an answer."]


# -------------------- problems


def _make_problem(job: Job) -> EnsembleProblem:
    """Returns the problem of a job."""
    name = job.variant
    make = {"blobs": _blobs, "lenet-fashion": _fashion, LARGE: _cifar10}.get(name, _table)
    return make(job)


def _count(settings: Settings, number: int) -> int:
    """Returns a number of examples, reduced for trial runs. Of 20 examples of blobs, all may be of one class."""
    return max(40, round(settings.data_fraction * number))


def _small_trainer(
    job: Job, data: TensorPair, training: SmallTraining, network: Callable[[], nn.Module]
) -> Any:
    """Returns a function that trains a small network on a slice of the data."""

    def learn(rows: slice, seed: int) -> PointPosterior:
        torch.manual_seed(seed)
        loader = shuffled_loader([tensor[rows] for tensor in data], training.batch, seed)
        fused = partial(torch.optim.Adam, fused=True)  # fused steps can be recorded as a CUDA graph
        method = MLE(epochs=training.epochs, lr=training.lr, schedule=cosine, optimizer=fused)
        return method.fit(network(), loader, seed=seed, progress=False, accelerator=job.accelerator)

    return learn


def _blobs(job: Job) -> EnsembleProblem:
    """Returns the problem of four blobs."""
    s: Settings = job.settings
    source = torch.Generator().manual_seed(1000 + job.seed)
    size = _count(s, 100)
    data, test = clusters(3 * size, 1.95, source), clusters(_count(s, 10_000), 1.95, source)
    return EnsembleProblem(
        data, (size,) * 3, test, _small_trainer(job, data, s.blobs, lambda: MLP(2, (32,), 2))
    )


def _table(job: Job) -> EnsembleProblem:
    """Returns the problem of a UCI table: the published split, with shuffled training rows, standardized."""
    s: Settings = job.settings
    source = torch.Generator().manual_seed(job.seed)
    if s.source == "files":
        inputs, targets, *test = load_uci(job.variant, job.seed)
    else:
        inputs, *test = torch.randn(2, 60, 4, generator=source)
        targets, noise = inputs.sum(1, keepdim=True).sin(), torch.randn(60, 1, generator=source)
        targets, test = targets + 0.1 * noise, [test[0], test[0].sum(1, keepdim=True).sin()]
    order = torch.randperm(len(inputs), generator=source)
    inputs, targets = inputs[order], targets[order]
    inputs, test_inputs = standardize(inputs, test[0])
    mean, unit = targets.mean(), float(targets.std())
    data = inputs, (targets - mean) / unit
    fifth = len(inputs) // 5
    sizes = (len(inputs) - 2 * fifth, fifth, fifth)
    learn = _small_trainer(job, data, s.tables, lambda: MLP(inputs.shape[1], (50,), 1))
    return EnsembleProblem(data, sizes, (test_inputs, (test[1] - mean) / unit), learn, unit)


def _load_shuffled(job: Job, data: str) -> tuple[ImageData, Tensor]:
    """Returns the images and a random order of the training images."""
    s: Settings = job.settings
    generated = max(150, round(s.data_fraction * 50_000))
    images = load_image_data(ImageSettings(source=s.source, generated=generated), data, [], job.device)
    order = torch.randperm(images.num_data, generator=torch.Generator().manual_seed(job.seed))
    return images, order.to(images.device)


def _fashion(job: Job) -> EnsembleProblem:
    """Returns the problem of LeNet on Fashion-MNIST."""
    s: Settings = job.settings
    images, order = _load_shuffled(job, "fashion-mnist")
    sizes = _count(s, 5_000), _count(s, 1_000), _count(s, 1_000)
    subset = images.train.subset(order[: sum(sizes)])
    data = subset.normalizer()(subset.images), subset.labels
    return EnsembleProblem(data, sizes, images.test, _small_trainer(job, data, s.lenet, lambda: LeNet(1)))


def _cifar10(job: Job) -> EnsembleProblem:
    """Returns the problem of ResNet18 on CIFAR-10."""
    s: Settings = job.settings
    images, order = _load_shuffled(job, "cifar10")
    shuffled = images.train.subset(order)
    tenth = len(shuffled) // 10
    data = shuffled.normalizer()(shuffled.images), shuffled.labels

    def learn(rows: slice, seed: int) -> PointPosterior:
        torch.manual_seed(seed)
        network = make_network("resnet18", 3, s.width)
        subset = replace(images, train=shuffled.subset(rows))
        options = job.short_options(seed=1 + seed)
        posterior = fit_variant("best-plain", "resnet18", s.resnet18, network, subset, options, seed)
        assert isinstance(posterior, PointPosterior)
        return posterior

    return EnsembleProblem(data, (len(shuffled) - 2 * tenth, tenth, tenth), images.test, learn)
