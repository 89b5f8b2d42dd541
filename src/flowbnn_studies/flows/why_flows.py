"""Exactness and times of densities and samples, for four families of flows and a variational autoencoder."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.compare.results import Metric, SeedResults
from flowbnn.density import Density, fit_density
from flowbnn.flows import FFJORD, MAF, RealNVP, ResidualFlow
from flowbnn.options import Count, Positive, options
from flowbnn.vae import VAE
from flowbnn_studies.runner.findings import pluralize
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, regroup_parts, time_call

LABELS = {
    "coupling": "Coupling flow (RealNVP)",
    "autoregressive": "Autoregressive flow (MAF)",
    "continuous": "Continuous flow (FFJORD)",
    "residual": "Residual flow",
    "vae": "VAE, ELBO",
    "vae-weighted": "VAE, importance-weighted",
}
FLOWS = tuple(LABELS)[:4]
COUPLING, NOISE = 2.0, 0.5  # strength of the dependence and standard deviation of the noise in the chain
METRICS = tuple(
    Metric(key, label, better, format_, definition, group)
    for group, metrics in {
        "Densities": {
            "gap": ("Gap", "lower", ".2f", "Mean over test points of the true log-density minus that of the model or its bound, "
                                           "in nats."),
            "log_likelihood": ("Log-likelihood", "higher", ".2f", "Mean log-density of test points, or a bound on it, in nats."),
            "inverse_error": ("Inverse", "lower", ".0e", "Largest error of inverse followed by forward map."),
            "log_det_error": ("Log-det", "lower", ".0e", "Largest difference of the log-determinant to that of the Jacobian by "
                                                         "autograd."),
        },
        "Time": {
            "density_ratio": ("Density", "lower", ".1f", "Time of the log-densities of a batch, relative to the coupling flow."),
            "sampling_ratio": ("Sampling", "lower", ".1f", "Time of a batch of samples, relative to the coupling flow."),
            "density_ms": ("Density, ms", "none", ".1f", "Time of the log-densities of a batch, in milliseconds."),
            "sampling_ms": ("Sampling, ms", "none", ".1f", "Time of a batch of samples, in milliseconds."),
            "training_s": ("Training, s", "none", ".0f", "Wall-clock time of the fit."),
        },
    }.items()
    for key, (label, better, format_, definition) in metrics.items()
)  # fmt: skip


@options
class Settings:
    """Settings of the study.

    Args:
        dim: Dimension of a point.
        train, test: Number of points. A tenth of the training points is held out for early stopping.
        epochs, batch, lr: Options of :func:`~flowbnn.fit_density`.
        hidden: Width of the two hidden layers of every network.
        samples: Number of importance samples for each point.
        num_checked: Number of points for the measurement of exactness.
        timed_points, rounds: Number of points in a timed batch, and of batches of each model.
    """

    dim: Count = 16
    train: Count = 10_000
    test: Count = 2000
    epochs: Count = 30
    batch: Count = 250
    lr: Positive = 2e-3
    hidden: Count = 64
    samples: Count = 100
    num_checked: Count = 50
    timed_points: Count = 500
    rounds: Count = 7


class WhyFlows(Study):
    name = "why-flows"
    title = "Exactness and speed of flows"
    description = (
        "exactness and times of a coupling, an autoregressive, a continuous and a residual flow, and of a VAE"
    )
    question = (
        "Nielsen's lecture states that flows have exact and fast densities and fast samples, autoregressive models slow samples, "
        "and variational autoencoders approximate densities. Is this confirmed by measurement, and for which flows?"
    )
    source = "Nielsen's lecture, table “Why Flows?”"
    settings = Settings
    partial = False
    seeds = 3
    headline = ("gap", "inverse_error", "log_det_error", "density_ratio", "sampling_ratio")
    quick: ClassVar[dict[str, Any]] = {
        "dim": 3, "train": 100, "test": 20, "epochs": 1, "batch": 50, "hidden": 8, "samples": 3, "num_checked": 2,
        "timed_points": 5, "rounds": 1,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return (Variant("together", "All models", in_table=False, exclusive=True),)

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        generator = torch.Generator().manual_seed(100 + job.seed)
        data, test = (chain(number, s.dim, generator) for number in (s.train, s.test))
        models = {key: fit_model(key, data, job) for key in (*FLOWS, "vae")}
        vae: Any = models["vae"][0].flow
        scores = {key: density.score(test).double() for key, (density, _) in models.items()}
        scores["vae-weighted"] = vae.log_likelihood(test, s.samples).double()
        functions: dict[str, Callable[[], Any]] = {}
        batch = test[: s.timed_points]
        for key, (density, _) in models.items():
            functions[f"{key}/density"] = partial(density.score, batch)
            functions[f"{key}/sampling"] = partial(density.sample, len(batch))
        functions["vae-weighted/density"] = partial(vae.log_likelihood, batch, s.samples)
        times = median_times(functions, s.rounds)
        times["vae-weighted/sampling"] = times["vae/sampling"]
        truth = chain_log_prob(test.double())
        values: dict[str, float] = {}
        for key, score in scores.items():
            density, seconds = models[key.removesuffix("-weighted")]
            numbers = {
                "gap": float((truth - score).mean()),
                "log_likelihood": float(score.mean()),
                "training_s": seconds,
            }
            for task in ("density", "sampling"):
                numbers[f"{task}_ms"] = 1000 * times[f"{key}/{task}"]
                numbers[f"{task}_ratio"] = times[f"{key}/{task}"] / times[f"coupling/{task}"]
            if key in FLOWS:
                numbers |= measure_exactness(density.flow, density.standardize(test[: s.num_checked]))
            values |= {f"{key}/{name}": value for name, value in numbers.items()}
        return {"values": values}

    def story(self, numbers: Numbers) -> Story:
        best = numbers.ranked("gap", ("coupling", "autoregressive", "continuous", "residual"))[0]
        slower = numbers.mean(best, "sampling_ratio")
        return Story(
            "Are flows exact and fast, as lectures say?",
            f"Coupling flows are: exact to {numbers.text('coupling', 'inverse_error', '.0e')} and fast both ways, but their "
            "density falls "
            f"{numbers.text('coupling', 'gap', '.1f')} nats short of the truth, and the closest family "
            f"({numbers.name(best)}, {numbers.text(best, 'gap', '.1f')}) samples {slower:.0f} times slower.",
            f"{slower:.0f} ×",
            f"sampling time of the {numbers.name(best)} relative to a coupling flow",
            ("gap", "density_ratio", "sampling_ratio"),
            charts=("gap", "sampling_ratio"),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        by_model = regroup_parts(parts, lambda _, name: (name.partition("/")[0], name.partition("/")[2]))
        rows = [by_model.row(key, label, METRICS) for key, label in LABELS.items() if by_model.of(key)]
        notes = [
            f"A point is a chain of {settings.dim} numbers with a known density: x1 from N(0, 1), then x = {COUPLING:g} "
            f"sin(previous x) + N(0, {NOISE:g}²). {settings.train:,} training points, a tenth of them held out for early stopping, "
            f"and {settings.test:,} test points, drawn anew for every seed.",
            f"All networks have two hidden layers of {settings.hidden} units, and all trainings at most {settings.epochs} epochs "
            f"with batches of {settings.batch}. The flows have their default lengths. FFJORD is fitted by flow matching, which "
            "needs no solver but does not maximize the likelihood. The VAE has Gaussian encoder and decoder and a code of "
            f"{settings.dim}.",
            "Exactness is measured in double precision, so the remaining error is the tolerance of a solver or rounding. The "
            "log-determinant of the residual flow is exact in so few dimensions; in many it is an unbiased estimate.",
            f"Times are medians of the CPU time over {settings.rounds} rounds, in which all models take turns on one thread, for "
            f"{settings.timed_points} points. The importance-weighted likelihood of the VAE has {settings.samples} samples for each "
            "point; both of its rows sample alike.",
        ]
        return Findings(answer(by_model), METRICS, rows, [], notes)


def chain(number: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draws points ``[number, dim]`` of the chain."""
    noise = torch.randn(number, dim, generator=generator)
    points = [noise[:, 0]]
    for index in range(1, dim):
        points.append(COUPLING * points[-1].sin() + NOISE * noise[:, index])
    return torch.stack(points, 1)


def chain_log_prob(x: Tensor) -> Tensor:
    r"""Computes the log-density of the chain, :math:`\log N(x_1; 0, 1) + \sum_i \log N(x_i; 2 \sin x_{i - 1}, 0.5^2)`.

    >>> round(float(chain_log_prob(torch.zeros(1, 2))), 4)  # -2 log sqrt(2 pi) + log 2
    -1.1447
    """
    residuals = (x[:, 1:] - COUPLING * x[:, :-1].sin()) / NOISE
    squares = x[:, 0].square() + residuals.square().sum(1)
    return -0.5 * (squares + x.shape[1] * math.log(2 * math.pi)) - residuals.shape[1] * math.log(NOISE)


def fit_model(key: str, data: Tensor, job: Job) -> tuple[Density, float]:
    """Fits a model to the data. Returns the model and the seconds of its training."""
    s: Settings = job.settings
    hidden, dim = (s.hidden, s.hidden), s.dim
    torch.manual_seed(job.seed)
    factories: Mapping[str, Callable[[], Any]] = {
        "coupling": lambda: RealNVP(dim, hidden=hidden),
        "autoregressive": lambda: MAF(dim, hidden=hidden),
        "continuous": lambda: FFJORD(dim, hidden=hidden),
        "residual": lambda: ResidualFlow(dim, hidden=hidden, data_init=True),
        "vae": lambda: VAE((dim,), latent_dim=dim, hidden=hidden, decoder="gaussian"),
    }
    options: dict[str, Any] = {"objective": "flow-matching"} if key == "continuous" else {}
    options |= {"standardize": False} if key == "vae" else {}
    options |= {"epochs": s.epochs, "batch_size": s.batch, "lr": s.lr}
    return time_call(fit_density, factories[key](), data, **options, **job.short_options(seed=job.seed))


def measure_exactness(flow: nn.Module, points: Tensor) -> dict[str, float]:
    """Measures the errors of the inverse and of the log-determinant of a flow in double precision.

    >>> errors = measure_exactness(RealNVP(3), torch.randn(4, 3))
    >>> max(errors.values()) < 1e-12
    True
    """
    transform: Any = deepcopy(flow).double().transform
    x = points.double().requires_grad_()
    z, log_det = transform.inverse(x)
    rows = [torch.autograd.grad(z[:, index].sum(), x, retain_graph=True)[0] for index in range(x.shape[1])]
    by_autograd = torch.linalg.slogdet(torch.stack(rows, 1)).logabsdet
    with torch.no_grad():
        inverse_error, log_det_error = transform(z)[0] - x, log_det - by_autograd
    return {
        "inverse_error": float(inverse_error.abs().max()),
        "log_det_error": float(log_det_error.abs().max()),
    }


def median_times(functions: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns the median CPU seconds of each function. They take turns, so that other load has little effect. A first round warms
    up.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            started = time.process_time()
            function()
            times[name].append(time.process_time() - started)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def answer(by_model: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""

    def means(metric: str, format_: str) -> str:
        return ", ".join(f"{key} {by_model.mean(key, metric):{format_}}" for key in FLOWS)

    ratios = ", ".join(
        f"{key} {by_model.mean(key, 'density_ratio'):.1f} and {by_model.mean(key, 'sampling_ratio'):.1f}"
        for key in FLOWS[1:]
    )
    bound, weighted = (by_model.mean(key, "gap") for key in ("vae", "vae-weighted"))
    return (
        f"Times of a density and of a sample, relative to the coupling flow ({pluralize(len(by_model.seeds))}): {ratios}.\nLargest "
        f"errors of the inverse: {means('inverse_error', '.0e')}; of the log-determinant: {means('log_det_error', '.0e')}.\nGap to "
        f"the true log-density in nats: {means('gap', '.2f')}.\nThe VAE samples in {by_model.mean('vae', 'sampling_ratio'):.1f} of "
        f"the time of the coupling flow, but has only a bound on the density. Its gap is {bound:.2f} nats by the ELBO and "
        f"{weighted:.2f} by importance sampling, which takes {by_model.mean('vae-weighted', 'density_ratio'):.0f} times as long as "
        "the density of the coupling flow."
    )
