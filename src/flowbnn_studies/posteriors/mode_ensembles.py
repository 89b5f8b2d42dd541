"""Modes of the noise as members of an ensemble, against Gaussian noise and a deep ensemble.

The plan, written before the first run, is docs/results/mode-ensembles/plan.md.
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
from flowbnn.compare.results import Parts
from flowbnn.data import TensorLoader, clusters
from flowbnn.methods import MLE, ModeEnsemble
from flowbnn.methods.ensemble import EnsemblePosterior
from flowbnn.methods.mode_ensemble import CANDIDATE_SCALES
from flowbnn.methods.temperature import temper
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
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, parts_by_row, time_call

TensorPair = tuple[Tensor, Tensor]
ROWS = {
    "plain": ("Plain, all data", "mle"),
    "temperature": ("Temperature scaling", "temperature"),
    "gaussian": ("Gaussian noise, joint", "node-noise-gaussian"),
    "modes": ("Modes", "mode-ensemble"),
    "laplace": ("Modes with Gaussians", "mode-ensemble-laplace"),
    "ensemble": ("Deep ensemble, all data", "deep-ensemble"),
}
PROBLEMS = {
    "blobs": "blobs",
    "boston": "tables",
    "concrete": "tables",
    "lenet-fashion": "lenet",
    "resnet18-cifar10": "resnet18",
}  # and the setting that has its training
LARGE = "resnet18-cifar10"
NEAR = 0.01  # nats to a deep ensemble
# fmt: off
NUMBERS = {
    "nll": ("NLL", "lower", ".4f", "Mean negative log-likelihood of a test example, in nats and in the units of the data."),
    "accuracy": ("Accuracy", "higher", ".4f", "Share of test examples whose most probable class is right."),
    "rmse": ("RMSE", "lower", ".4g", "Root mean squared error, in the units of the data."),
    "ece": ("ECE", "lower", ".4f", "Expected calibration error in 15 equal bins."),
    "width": ("Width", "none", ".3g", "Of the prior of the noise, chosen on validation data."),
    "parameters": ("Numbers kept", "lower", ".3g", "Real numbers that the posterior keeps in order to predict."),
    "seconds": ("Seconds", "none", ".1f", "Of the fit on top of the weights; of plain network and ensemble, of their training."),
}
# fmt: on


@options
class SmallTraining:
    """How the weights of a small network are trained: Adam, with a rate that falls to zero as a cosine."""

    epochs: Count = 100
    batch: Count = 32
    lr: Positive = 1e-2


@options
class Settings:
    """What the study depends on.

    Args:
        source: ``"files"`` reads the data sets; ``"generated"`` makes small ones, for a trial run.
        share: of the numbers of examples in the plan, for a trial run.
        width: multiplies the channels of ResNet18.
        members, few_members: modes, and networks of the deep ensemble; those of ResNet18.
        steps, few_steps: of a climb; of ResNet18.
        widths: of the prior of Gaussian noise, out of which validation data choose.
        samples: networks averaged in a prediction with Gaussian noise.
        blobs, tables, lenet, resnet18: how weights are trained.
    """

    source: Literal["files", "generated"] = "files"
    share: Positive = 1.0
    width: Positive = 1.0
    members: Count = 16
    few_members: Count = 5
    steps: Count = 300
    few_steps: Count = 100
    widths: tuple[Positive, ...] = CANDIDATE_SCALES
    samples: Count = 64
    blobs: SmallTraining = SmallTraining(batch=20)
    tables: SmallTraining = SmallTraining()
    lenet: SmallTraining = SmallTraining(epochs=30, batch=50, lr=1e-3)
    resnet18: Training = replace(SHORT_RESNET18, epochs=16)

    def relevant(self, variant: str) -> dict[str, Any]:
        """The settings that a problem's result depends on."""
        others = set(PROBLEMS.values()) - {PROBLEMS[variant]}
        return {name: value for name, value in asdict(self).items() if name not in others}


@dataclass
class EnsembleProblem:
    """Data in four parts, and how weights are learned from some of them.

    Args:
        data: the examples of the parts a (for weights), b (for noise) and c (for the width of the prior), in this order.
        sizes: how many examples each part has.
        test: examples to test on.
        learn: from some of the data, and a seed, to a trained network.
        unit: of the targets of a regression, in units of the file.
    """

    data: TensorPair
    sizes: tuple[int, int, int]
    test: TensorPair
    learn: Callable[[slice, int], PointPosterior]
    unit: float = 1.0

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        first, second, third = self.sizes
        return slice(0, first), slice(first, first + second), slice(first + second, first + second + third)

    def loader(self, some: slice) -> TensorLoader:
        return TensorLoader(*(tensor[some] for tensor in self.data), batch_size=1000)


class ModeEnsembles(Study):
    name = "mode-ensembles"
    title = "Modes of the noise as members"
    description = "modes of the noise as an ensemble, against Gaussian noise and a deep ensemble; planned before it was run"
    question = (
        "A network's weights are trained, then stay. Are maxima of the posterior density of its noise, used as members of an ensemble, "
        "worth more than Gaussian noise around one of them, and do they come near a deep ensemble with as many members?"
    )
    source = "flowbnn's own; the plan is docs/results/mode-ensembles/plan.md"
    settings = Settings
    seeds = 10
    accelerator = "auto"
    headline = tuple(f"nll_{problem}" for problem in PROBLEMS)
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "share": 0.002, "width": 0.0625, "members": 2, "few_members": 2, "steps": 2, "few_steps": 1,
        "widths": (0.5,), "samples": 2, **dict.fromkeys(("blobs", "tables", "lenet"), SmallTraining(epochs=1)),
        "resnet18": replace(SHORT_RESNET18, epochs=1, batch=20),
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        cost = {"lenet-fashion": 10.0, LARGE: 50.0}
        return tuple(Variant(problem, problem, "mle", cost=cost.get(problem, 1.0)) for problem in PROBLEMS)

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        problem, large = _problem(job), job.variant == LARGE
        device: dict[str, Any] = {"accelerator": job.accelerator, "progress": False}
        a, b, c = problem.parts
        weights = problem.learn(a, job.seed)
        fresh, validation = problem.loader(b), problem.loader(c)
        members, steps = (s.few_members, s.few_steps) if large else (s.members, s.steps)
        half = large and job.accelerator != "cpu" and job.precision.startswith("bf16")
        precision: Any = job.precision if half else "32-true"
        points: list[PointPosterior] = []

        def told(posterior: Posterior, data: Any) -> dict[str, float]:
            quiet: dict[str, Any] = {"precision": precision, "compile": False, "progress": False}
            return evaluate(posterior, data, samples=sample_count(posterior, s.samples), **quiet)

        def climb(width: Literal["point", "laplace"]) -> tuple[Posterior, float]:
            method = ModeEnsemble(members, epochs=0, steps=steps, width=width)
            posterior = method.fit(weights.model, fresh, validation=validation, seed=job.seed, **device)
            return posterior, min(posterior.validation_nll, key=lambda scale: posterior.validation_nll[scale])

        def gaussian() -> tuple[Posterior, float]:
            how: dict[str, Any] = {
                "structure": "full",
                "prior": "fixed",
                "folds": 0,
                "seed": job.seed,
                **device,
            }
            made = {scale: calibrate(weights.model, fresh, prior_scale=scale, **how) for scale in s.widths}
            best = min(made, key=lambda scale: told(made[scale], validation)["nll"])
            return made[best], best

        def apart(number: int) -> list[PointPosterior]:
            """So many networks on all data, those that are there among them."""
            for member in range(len(points), number):
                points.append(problem.learn(slice(a.start, c.stop), job.seed + 1000 * member))
            return points

        fits: dict[str, Callable[[], Any]] = {
            "temperature": lambda: temper(weights, problem.loader(slice(b.start, c.stop)), progress=False),
            "gaussian": gaussian,
            "modes": lambda: climb("point"),
            **({} if large else {"laplace": lambda: climb("laplace")}),
            "plain": lambda: apart(1)[0],
            "ensemble": lambda: EnsemblePosterior.from_points(apart(members)),
        }
        table: dict[str, dict[str, float]] = {}
        for key, fit in fits.items():
            made, seconds = time_call(fit)
            posterior, *width = made if isinstance(made, tuple) else (made,)
            numbers = told(posterior, problem.test)
            table[key] = {
                name: numbers[name] for name in ("accuracy", "nll", "ece", "rmse") if name in numbers
            }
            table[key] |= {"parameters": float(count_stored_numbers(posterior)), "seconds": seconds}
            if width:
                table[key]["width"] = width[0]
            if "rmse" in numbers:
                table[key]["rmse"] *= problem.unit
                table[key]["nll"] += float(torch.tensor(problem.unit).log())
        table["ensemble"]["seconds"] += table["plain"]["seconds"]  # its first member
        return {"values": {}, "table": table}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        tables = ((seed, problem, part["table"]) for (problem, seed), part in parts.content.items())
        by_row = parts_by_row(parts.seeds, tables)
        every = make_metrics(NUMBERS, {problem: problem for problem in PROBLEMS})
        metrics = [one for one in every if any(by_row.values(row, one.key) for row in ROWS)]
        rows = [by_row.row(key, label, metrics, None, method) for key, (label, method) in ROWS.items()]
        numbers = ", ".join(f"{problem} {len(parts.of(problem))}" for problem in PROBLEMS)
        notes = [
            f"Seeds: {numbers}. The plan was written before the first run: docs/results/mode-ensembles/plan.md.",
            "Plain network and deep ensemble are trained on all that the others have for weights, noise and the width of the prior.",
        ]
        return Findings("\n".join(claims(by_row)), metrics, [row for row in rows if row["values"]], [], notes)


def claims(parts: Parts) -> list[str]:
    """The four claims of the plan, each met or not, with the differences that decide it."""
    lines = []
    for title, first, second, wanted in (
        ("Modes beat Gaussian noise", "modes", "gaussian", 3),
        ("Modes beat temperature scaling", "modes", "temperature", 3),
        ("Modes come near a deep ensemble", "modes", "ensemble", 3),
        ("A Gaussian at each mode pays", "laplace", "modes", 2),
    ):
        better, worse, told = 0, 0, []
        for problem in PROBLEMS:
            pair = parts.common(first, second, f"nll_{problem}")
            if len(pair[0]) < (3 if problem == LARGE else 2):
                continue
            result = paired_difference(*pair)
            near = second == "ensemble"
            better += result.high < (NEAR if near else 0.0)
            worse += result.low > 0.0 and not near
            told.append(f"{problem} {result.describe()}")
        if told:
            met = "met" if better >= wanted and not worse else "not met"
            lines.append(
                f"{title}: {met} ({better} of {len(told)} problems for it, {worse} against). NLL: {'; '.join(told)}."
            )
    return lines or ["Too little has been trained for an answer."]


# -------------------- problems


def _problem(job: Job) -> EnsembleProblem:
    name = job.variant
    make = {"blobs": _blobs, "lenet-fashion": _fashion, LARGE: _cifar10}.get(name, _table)
    return make(job)


def _count(settings: Settings, number: int) -> int:
    return max(20, round(settings.share * number))


def _small(job: Job, data: TensorPair, training: SmallTraining, network: Callable[[], nn.Module]) -> Any:
    """How a small network learns from some of the data."""

    def learn(some: slice, seed: int) -> PointPosterior:
        torch.manual_seed(seed)
        loader = shuffled_loader([tensor[some] for tensor in data], training.batch, seed)
        fused = partial(torch.optim.Adam, fused=True)  # whose steps can be recorded as a CUDA graph
        method = MLE(epochs=training.epochs, lr=training.lr, schedule=cosine, optimizer=fused)
        return method.fit(network(), loader, seed=seed, progress=False, accelerator=job.accelerator)

    return learn


def _blobs(job: Job) -> EnsembleProblem:
    s: Settings = job.settings
    source = torch.Generator().manual_seed(1000 + job.seed)
    size = _count(s, 100)
    data, test = clusters(3 * size, 1.95, source), clusters(_count(s, 10_000), 1.95, source)
    return EnsembleProblem(data, (size,) * 3, test, _small(job, data, s.blobs, lambda: MLP(2, (32,), 2)))


def _table(job: Job) -> EnsembleProblem:
    """A UCI table: its published split, the training rows in an order of the seed's, in units of their deviations."""
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
    inputs, unseen = standardize(inputs, test[0])
    level, unit = targets.mean(), float(targets.std())
    data = inputs, (targets - level) / unit
    fifth = len(inputs) // 5
    sizes = (len(inputs) - 2 * fifth, fifth, fifth)
    learn = _small(job, data, s.tables, lambda: MLP(inputs.shape[1], (50,), 1))
    return EnsembleProblem(data, sizes, (unseen, (test[1] - level) / unit), learn, unit)


def _pictures(job: Job, data: str) -> tuple[ImageData, Tensor]:
    """The images, and an order of those to learn from."""
    s: Settings = job.settings
    generated = max(80, round(s.share * 50_000))
    pictures = load_image_data(ImageSettings(source=s.source, generated=generated), data, [], job.device)
    order = torch.randperm(pictures.num_data, generator=torch.Generator().manual_seed(job.seed))
    return pictures, order.to(pictures.device)


def _fashion(job: Job) -> EnsembleProblem:
    s: Settings = job.settings
    pictures, order = _pictures(job, "fashion-mnist")
    sizes = _count(s, 5_000), _count(s, 1_000), _count(s, 1_000)
    chosen = pictures.train.subset(order[: sum(sizes)])
    data = chosen.normalizer()(chosen.images), chosen.labels
    return EnsembleProblem(data, sizes, pictures.test, _small(job, data, s.lenet, lambda: LeNet(1)))


def _cifar10(job: Job) -> EnsembleProblem:
    s: Settings = job.settings
    pictures, order = _pictures(job, "cifar10")
    chosen = pictures.train.subset(order)
    tenth = len(chosen) // 10
    data = chosen.normalizer()(chosen.images), chosen.labels

    def learn(some: slice, seed: int) -> PointPosterior:
        torch.manual_seed(seed)
        network = make_network("resnet18", 3, s.width)
        part = replace(pictures, train=chosen.subset(some))
        given = job.short_options(seed=1 + seed)
        made = fit_variant("best-plain", "resnet18", s.resnet18, network, part, given, seed)
        assert isinstance(made, PointPosterior)
        return made

    return EnsembleProblem(data, (len(chosen) - 2 * tenth, tenth, tenth), pictures.test, learn)
