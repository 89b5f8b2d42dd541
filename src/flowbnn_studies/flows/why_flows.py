"""Why flows? Exactness, time of a density and time of a sample, for four families of flows and a variational autoencoder."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.compare.results import Metric, Parts
from flowbnn.density import Density, fit_density
from flowbnn.flows import FFJORD, MAF, RealNVP, ResidualFlow
from flowbnn.options import Count, Positive, options
from flowbnn.vae import VAE
from flowbnn_studies.runner.findings import pluralize
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, regroup_parts, time_call

LABELS = {
    "coupling": "Coupling flow (RealNVP)",
    "autoregressive": "Autoregressive flow (MAF)",
    "continuous": "Continuous flow (FFJORD)",
    "residual": "Residual flow",
    "vae": "VAE, its bound",
    "vae-weighted": "VAE, importance-weighted",
}
FLOWS = tuple(LABELS)[:4]
PULL, NOISE = 2.0, 0.5  # of the chain
METRICS = tuple(
    Metric(key, label, better, form, meaning, group)
    for group, some in {
        "Densities": {
            "gap": ("Gap", "lower", ".2f", "Mean over unseen points of the true log-density less the model's or its bound, in nats."),
            "log_likelihood": ("Log-likelihood", "higher", ".2f", "Mean log-density of unseen points, or a bound on it, in nats."),
            "inverse_error": ("Inverse", "lower", ".0e", "Largest distance of a point to its image under the inverse and the map."),
            "log_det_error": ("Log-det", "lower", ".0e", "Largest difference of the log-determinant to that of autograd's Jacobian."),
        },
        "Time": {
            "density_ratio": ("Density", "lower", ".1f", "Time of the log-densities of a batch, in that of the coupling flow."),
            "sampling_ratio": ("Sampling", "lower", ".1f", "Time of a batch of samples, in that of the coupling flow."),
            "density_ms": ("Density, ms", "none", ".1f", "The same in milliseconds."),
            "sampling_ms": ("Sampling, ms", "none", ".1f", "The same in milliseconds."),
            "training_s": ("Training, s", "none", ".0f", "Of the fit, by the clock."),
        },
    }.items()
    for key, (label, better, form, meaning) in some.items()
)  # fmt: skip


@options
class Settings:
    """What the study depends on.

    Args:
        dim: numbers of a point.
        train, test: number of points; a tenth of those to train on is held out to stop early.
        epochs, batch, lr: of :func:`~flowbnn.fit_density`.
        hidden: width of the two hidden layers of every network.
        samples: for each point, of the importance-weighted likelihood.
        checked: points at which exactness is measured.
        timed_points, rounds: points in a timed batch, and batches of each model in turn.
    """

    dim: Count = 16
    train: Count = 10_000
    test: Count = 2000
    epochs: Count = 30
    batch: Count = 250
    lr: Positive = 2e-3
    hidden: Count = 64
    samples: Count = 100
    checked: Count = 50
    timed_points: Count = 500
    rounds: Count = 7


class WhyFlows(Study):
    name = "why-flows"
    title = "Why flows? Exactness and time"
    description = (
        "exactness and times of a coupling, an autoregressive, a continuous and a residual flow and of a VAE"
    )
    question = (
        "Nielsen's lecture says that flows have exact densities that are fast and samples that are fast, autoregressive models slow "
        "samples, and variational autoencoders approximate densities. Does that hold when it is measured, and for which flows?"
    )
    source = "Nielsen's lecture, table “Why Flows?”"
    settings = Settings
    partial = False
    seeds = 3
    headline = ("gap", "inverse_error", "log_det_error", "density_ratio", "sampling_ratio")
    quick: ClassVar[dict[str, Any]] = {
        "dim": 3, "train": 100, "test": 20, "epochs": 1, "batch": 50, "hidden": 8, "samples": 3, "checked": 2,
        "timed_points": 5, "rounds": 1,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return (Variant("together", "All models, side by side", in_table=False, exclusive=True),)

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        generator = torch.Generator().manual_seed(100 + job.seed)
        data, test = (chain(number, s.dim, generator) for number in (s.train, s.test))
        models = {key: fit_model(key, data, job) for key in (*FLOWS, "vae")}
        vae: Any = models["vae"][0].flow
        scores = {key: density.score(test).double() for key, (density, _) in models.items()}
        scores["vae-weighted"] = vae.log_likelihood(test, s.samples).double()
        works: dict[str, Callable[[], Any]] = {}
        some = test[: s.timed_points]
        for key, (density, _) in models.items():
            works[f"{key}/density"] = partial(density.score, some)
            works[f"{key}/sampling"] = partial(density.sample, len(some))
        works["vae-weighted/density"] = partial(vae.log_likelihood, some, s.samples)
        taken = median_times(works, s.rounds)
        taken["vae-weighted/sampling"] = taken["vae/sampling"]
        truth = chain_log_prob(test.double())
        values: dict[str, float] = {}
        for key, score in scores.items():
            density, seconds = models[key.removesuffix("-weighted")]
            found = {
                "gap": float((truth - score).mean()),
                "log_likelihood": float(score.mean()),
                "training_s": seconds,
            }
            for what in ("density", "sampling"):
                found[f"{what}_ms"] = 1000 * taken[f"{key}/{what}"]
                found[f"{what}_ratio"] = taken[f"{key}/{what}"] / taken[f"coupling/{what}"]
            if key in FLOWS:
                found |= measure_exactness(density.flow, density.scaled(test[: s.checked]))
            values |= {f"{key}/{name}": value for name, value in found.items()}
        return {"values": values}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        by_model = regroup_parts(parts, lambda _, name: (name.partition("/")[0], name.partition("/")[2]))
        rows = [by_model.row(key, label, METRICS) for key, label in LABELS.items() if by_model.of(key)]
        notes = [
            f"A point is a chain of {settings.dim} numbers, x1 from N(0, 1) and then x = {PULL:g} sin(x before) + N(0, {NOISE:g}²), so "
            f"that its density is known. {settings.train:,} points to learn from, a tenth of them held out to stop early, and "
            f"{settings.test:,} to test on, drawn anew for every seed.",
            f"All networks have two hidden layers of {settings.hidden} units, all trainings at most {settings.epochs} epochs of "
            f"{settings.batch} points in a step; the flows have their default lengths. FFJORD is fitted by flow matching, which needs "
            f"no solver but does not maximise the likelihood. The VAE has Gaussians on both sides and a code of {settings.dim}.",
            "Exactness is that of the fitted flows in double precision: what is left is the tolerance of a solver or rounding. The "
            "residual flow's log-determinant is exact in so few dimensions; in many it is an unbiased estimate.",
            f"Times are medians of the processor's time over {settings.rounds} rounds, in which all models take their turn on one "
            f"thread, for {settings.timed_points} points. The importance-weighted likelihood of the VAE has {settings.samples} samples "
            "for each point; both of its rows sample alike.",
        ]
        return Findings(answer(by_model), METRICS, rows, [], notes)


def chain(number: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draws of the chain, ``[number, dim]``."""
    noise = torch.randn(number, dim, generator=generator)
    points = [noise[:, 0]]
    for place in range(1, dim):
        points.append(PULL * points[-1].sin() + NOISE * noise[:, place])
    return torch.stack(points, 1)


def chain_log_prob(x: Tensor) -> Tensor:
    r"""The log-density of the chain, :math:`\log N(x_1; 0, 1) + \sum_i \log N(x_i; 2 \sin x_{i - 1}, 0.5^2)`.

    >>> round(float(chain_log_prob(torch.zeros(1, 2))), 4)  # twice -log sqrt(2 pi), and log 2
    -1.1447
    """
    rest = (x[:, 1:] - PULL * x[:, :-1].sin()) / NOISE
    squares = x[:, 0].square() + rest.square().sum(1)
    return -0.5 * (squares + x.shape[1] * math.log(2 * math.pi)) - rest.shape[1] * math.log(NOISE)


def fit_model(key: str, data: Tensor, job: Job) -> tuple[Density, float]:
    """A model of the data, and the seconds of its training."""
    s: Settings = job.settings
    hidden, dim = (s.hidden, s.hidden), s.dim
    torch.manual_seed(job.seed)
    made: Mapping[str, Callable[[], Any]] = {
        "coupling": lambda: RealNVP(dim, hidden=hidden),
        "autoregressive": lambda: MAF(dim, hidden=hidden),
        "continuous": lambda: FFJORD(dim, hidden=hidden),
        "residual": lambda: ResidualFlow(dim, hidden=hidden, data_init=True),
        "vae": lambda: VAE((dim,), latent_dim=dim, hidden=hidden, decoder="gaussian"),
    }
    own: dict[str, Any] = {"objective": "flow-matching"} if key == "continuous" else {}
    own |= {"standardize": False} if key == "vae" else {}
    own |= {"epochs": s.epochs, "batch_size": s.batch, "lr": s.lr}
    return time_call(fit_density, made[key](), data, **own, **job.short_options(seed=job.seed))


def measure_exactness(flow: nn.Module, points: Tensor) -> dict[str, float]:
    """How far the inverse and the log-determinant of a flow are off, in double precision.

    >>> found = measure_exactness(RealNVP(3), torch.randn(4, 3))
    >>> max(found.values()) < 1e-12
    True
    """
    transform: Any = deepcopy(flow).double().transform
    x = points.double().requires_grad_()
    z, log_det = transform.inverse(x)
    rows = [torch.autograd.grad(z[:, place].sum(), x, retain_graph=True)[0] for place in range(x.shape[1])]
    by_autograd = torch.linalg.slogdet(torch.stack(rows, 1)).logabsdet
    with torch.no_grad():
        away, off = transform(z)[0] - x, log_det - by_autograd
    return {"inverse_error": float(away.abs().max()), "log_det_error": float(off.abs().max())}


def median_times(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each, all in turn, so that what else the machine does counts little; a first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            started = time.process_time()
            work()
            taken[name].append(time.process_time() - started)
    return {name: statistics.median(some[1:]) for name, some in taken.items()}


def answer(by_model: Parts) -> str:
    """The answer, put together from the numbers."""

    def told(metric: str, form: str) -> str:
        return ", ".join(f"{key} {by_model.mean(key, metric):{form}}" for key in FLOWS)

    taken = ", ".join(
        f"{key} {by_model.mean(key, 'density_ratio'):.1f} and {by_model.mean(key, 'sampling_ratio'):.1f}"
        for key in FLOWS[1:]
    )
    bound, weighted = (by_model.mean(key, "gap") for key in ("vae", "vae-weighted"))
    return (
        f"Time of a density and of a sample, in those of the coupling flow: {taken} ({pluralize(len(by_model.seeds))}).\n"
        f"Inverses are off by at most: {told('inverse_error', '.0e')}; log-determinants: {told('log_det_error', '.0e')}.\n"
        f"Nats short of the true density: {told('gap', '.2f')}.\n"
        f"The VAE samples in {by_model.mean('vae', 'sampling_ratio'):.1f} of the coupling flow's time, but its density is only "
        f"bounded: {bound:.2f} nats short by the bound, {weighted:.2f} by importance weights, which take "
        f"{by_model.mean('vae-weighted', 'density_ratio'):.0f} times the coupling flow's time."
    )
