"""Change of variables in one dimension: the examples of Ravenda's report, compared with their closed forms."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Independent, Uniform

from flowbnn.compare.results import Metric, SeedResults, figure
from flowbnn.density import fit_density
from flowbnn.distributions import Flow, NormalMixture
from flowbnn.flows import NSF
from flowbnn.options import Count, Positive, options
from flowbnn.transforms import Transform
from flowbnn_studies.runner.findings import cell_centers, histogram, panel, pluralize, round_values
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

VARIANTS = (
    Variant("square", "Square of a uniform variable"),
    Variant("quantile", "Inverse transform sampling"),
    Variant("mixture", "Learned mixture"),
)
RATE = 1.0  # rate of the exponential distribution
# fmt: off
METRICS = (
    Metric("density_error", "Density", "lower", ".1e", "Largest difference of the density of the flow and the true density on a grid."),
    Metric("mass", "Mass", "none", ".4f", "Integral of the density of the flow over the grid; 1 minus the mass outside."),
    Metric("ks", "KS", "lower", ".4f", "Kolmogorov-Smirnov distance of the draws to the true distribution."),
    Metric("ks_chance", "Critical KS", "none", ".4f", "95 % quantile of KS for samples of the true distribution, 1.36 / sqrt(n)."),
    Metric("gap", "Gap", "lower", ".4f", "Mean over test points of the true log-density minus that of the flow, in nats."),
)
# fmt: on


@options
class Settings:
    """Settings of the study.

    Args:
        draws: Number of draws of each flow that are compared with the true distribution.
        train, test: Number of points for the fit and the test of the mixture.
        epochs, batch, lr: Epochs, batch size and learning rate of that fit.
        grid: Number of points along the axis of the figures.
    """

    draws: Count = 20_000
    train: Count = 5000
    test: Count = 10_000
    epochs: Count = 40
    batch: Count = 500
    lr: Positive = 1e-2
    grid: Count = 400


class Square(Transform):
    r""":math:`x = z^2` for :math:`z > 0`, which is invertible there, with :math:`\log|dx/dz| = \log 2 z`."""

    event_dim = 0

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return z.square(), (2 * z).log()

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x.sqrt(), -(2 * x.sqrt()).log()


class ExponentialQuantile(Transform):
    r""":math:`x = F^{-1}(u) = -\log(1 - u) / \lambda` for :math:`0 < u < 1`, so that :math:`x` has the distribution function F."""

    event_dim = 0

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = -torch.log1p(-z) / RATE
        return x, RATE * x - math.log(RATE)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return -torch.expm1(-RATE * x), math.log(RATE) - RATE * x


class ChangeOfVariables(Study):
    name = "change-of-variables"
    title = "Change of variables in one dimension"
    description = "square of a uniform variable, inverse transform sampling and a learned mixture, compared with closed forms"
    question = (
        "An invertible map g transforms a simple distribution into one with the density p(z) / |g'(z)|. Does this hold numerically "
        "for the square of a uniform variable, for inverse transform sampling, and for a map that is learned from samples of a "
        "mixture?"
    )
    source = "Ravenda's report, section 2.1 and figures 7, 8 and 10"
    settings = Settings
    partial = False
    seeds = 3
    headline = tuple(metric.key for metric in METRICS)
    quick: ClassVar[dict[str, Any]] = {
        "draws": 200, "train": 200, "test": 100, "epochs": 1, "batch": 100, "grid": 20,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return VARIANTS

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        torch.manual_seed(job.seed)
        low, high = (-4.0 if job.variant == "mixture" else 0.0), 4.0
        axis = cell_centers(low, high, s.grid)
        if job.variant == "mixture":
            draws, density, truth, cdf, values = _learned_mixture(job, axis)
        else:
            draws, density, truth, cdf = _known_map(job, axis)
            values = {}
        values |= {
            "density_error": float((density - truth).abs().max()),
            "mass": float(density.sum() * (axis[1] - axis[0])),
            "ks": distance(cdf),
            "ks_chance": 1.36 / math.sqrt(s.draws),
        }
        content: dict[str, Any] = {"values": values}
        if job.seed == 0:
            curve = {"x": axis, "flow": density, "truth": truth}
            content["curve"] = {name: round_values(numbers) for name, numbers in curve.items()}
            inside = draws[(draws > low) & (draws < high)]
            bins = histogram(inside, low, high, 40)
            fraction = len(inside) / len(draws)
            content["histogram"] = bins | {"fraction": [fraction * value for value in bins["fraction"]]}
        return content

    def story(self, numbers: Numbers) -> Story:
        return Story(
            "Does the density of a transformed variable follow the formula?",
            "Yes, to rounding error where the map is known; a map that is learned from data falls "
            f"{numbers.text('mixture', 'gap', '.4f')} nats short, and its density is off by up to "
            f"{numbers.text('mixture', 'density_error', '.2f')}.",
            f"{numbers.text('mixture', 'gap', '.4f')} nats",
            "shortfall of the learned map",
            ("density_error", "ks", "gap"),
            figure="curves",
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        notes = [
            "Square: z is uniform on (0, 2), and x = z² has the density 1 / (4 √x) on (0, 4). Inverse transform sampling: u is "
            f"uniform on (0, 1), and x = -log(1 - u) / {RATE:g} has the exponential distribution. Both maps are defined in this "
            "study; the library's Flow computes their densities.",
            "The mixture is ½ N(-1.5, 0.5²) + ½ N(1, 0.7²). It is learned by NSF(1), a normal base and splines, from "
            f"{settings.train} points, a tenth of them held out for early stopping.",
            "The mass of the square is a midpoint sum, which is below 1 because of the pole at 0. That of the exponential lacks "
            "the tail beyond 4.",
        ]
        rows = self.rows(settings, parts, METRICS)
        return Findings(
            answer(parts), METRICS, rows, figures(self.first_seed_parts(settings, parts, "curve")), notes
        )


def _known_map(job: Job, axis: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns draws, the density of the flow, the true density, and the true distribution function at sorted draws."""
    square = job.variant == "square"
    zero = torch.zeros(1, dtype=torch.float64)
    base = Independent(Uniform(zero, zero + (2.0 if square else 1.0)), 1)
    flow = Flow(base, Square() if square else ExponentialQuantile())
    draws = flow.sample((job.settings.draws,))[:, 0]
    density = flow.log_prob(axis[:, None]).exp()
    truth = 0.25 / axis.sqrt() if square else RATE * (-RATE * axis).exp()
    ordered = draws.sort().values
    return draws, density, truth, ordered.sqrt() / 2 if square else -torch.expm1(-RATE * ordered)


def _learned_mixture(job: Job, axis: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, float]]:
    """Returns the same as :func:`_known_map` for a flow that is fitted to samples of a mixture, and the gap on test points."""
    s: Settings = job.settings
    generator = torch.Generator().manual_seed(100 + job.seed)
    true_density = mixture()
    data, test = (true_density.rsample((number,), generator).float() for number in (s.train, s.test))
    options: dict[str, Any] = {"epochs": s.epochs, "batch_size": s.batch, "lr": s.lr}
    flow = fit_density(NSF(1), data, **options, seed=job.seed, progress=False)
    draws = flow.sample(s.draws, seed=job.seed)[:, 0].double()
    density = flow.score(axis[:, None].float()).double().exp()
    truth = true_density.log_prob(axis[:, None]).exp()
    gap = float((true_density.log_prob(test.double()) - flow.score(test).double()).mean())
    return draws, density, truth, mixture_function(draws.sort().values), {"gap": gap}


def mixture() -> NormalMixture:
    """Returns a mixture of two Gaussians in one dimension with equal weights."""
    return NormalMixture(torch.tensor([[-1.5], [1.0]]).double(), torch.tensor([[0.5], [0.7]]).double())


def mixture_function(x: Tensor) -> Tensor:
    """Computes the distribution function of the mixture."""
    truth = mixture()
    return torch.special.ndtr((x[:, None] - truth.loc[:, 0]) / truth.scale[:, 0]).mean(-1)


def distance(function: Tensor) -> float:
    """Computes the Kolmogorov-Smirnov distance from the true distribution function at sorted draws.

    >>> distance(torch.tensor([0.5]).double()), round(distance(torch.tensor([0.2, 0.9]).double()), 2)
    (0.5, 0.4)
    """
    number = len(function)
    steps = torch.arange(number + 1, dtype=torch.float64) / number
    return float(torch.maximum(function - steps[:-1], steps[1:] - function).max())


def figures(contents: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the densities of the first seed and its draws."""
    panels = []
    for label, part in contents.items():
        curve = part["curve"]
        edges, shares = part["histogram"]["edges"], part["histogram"]["fraction"]
        width = edges[1] - edges[0]
        lines = [
            {"label": "histogram of draws", "x": [low + width / 2 for low in edges[:-1]], "mean": [share / width for share in shares]},
            {"label": "density of the flow", "x": curve["x"], "mean": curve["flow"]},
            {"label": "closed form", "x": curve["x"], "mean": curve["truth"], "style": "dashed"},
        ]  # fmt: skip
        panels.append(panel(label, "density", lines))
    caption = "Seed 0. The density is high where the map is flat, and low where it is steep."
    return [
        figure("curves", "Densities, draws and closed forms", caption, {"x_label": "x", "panels": panels})
    ]


def answer(parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""
    square, quantile = (parts.mean(key, "density_error") for key in ("square", "quantile"))
    within = all(
        max(parts.values(variant.key, "ks")) <= parts.mean(variant.key, "ks_chance")
        for variant in VARIANTS[:2]
    )
    verdict = "not significant" if within else "significant at 5 % at least once"
    return (
        f"With a known map the density is exact to {max(square, quantile):.0e}, and the difference of the draws to the true "
        f"distribution is {verdict} ({pluralize(len(parts.seeds))}).\nThe learned map of the mixture has a gap of "
        f"{parts.mean('mixture', 'gap'):.4f} nats to the true density on test points; the largest error of its density is "
        f"{parts.mean('mixture', 'density_error'):.3f}."
    )
