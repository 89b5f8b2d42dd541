"""The change of variables in one dimension: the worked examples of Ravenda's report, each beside its closed form."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Independent, Uniform

from flowbnn.compare.results import Metric, Parts, figure
from flowbnn.density import fit_density
from flowbnn.distributions import Flow, NormalMixture
from flowbnn.flows import NSF
from flowbnn.options import Count, Positive, options
from flowbnn.transforms import Transform
from flowbnn_studies.runner.findings import cell_centers, histogram, panel, pluralize, round_values
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

VARIANTS = (
    Variant("square", "Square of a uniform number"),
    Variant("quantile", "Inverse transform sampling"),
    Variant("mixture", "A mixture, learned"),
)
RATE = 1.0  # of the exponential distribution
# fmt: off
METRICS = (
    Metric("density_error", "Density", "lower", ".1e", "Largest difference of the flow's density and the true one on a grid."),
    Metric("mass", "Mass", "none", ".4f", "Integral of the flow's density over the grid; 1 less what lies outside."),
    Metric("ks", "KS", "lower", ".4f", "Largest distance of the draws' distribution function and the true one (Kolmogorov-Smirnov)."),
    Metric("ks_chance", "KS of chance", "none", ".4f", "What 95 % of samples of the true distribution stay below, 1.36 / sqrt(n)."),
    Metric("gap", "Gap", "lower", ".4f", "Mean over unseen points of the true log-density less the flow's, in nats."),
)
# fmt: on


@options
class Settings:
    """What the study depends on.

    Args:
        draws: of each flow, which are compared with the true distribution.
        train, test: points that the mixture is learned from and tested on.
        epochs, batch, lr: of that fit.
        grid: points along the axis of the pictures.
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
    title = "The change of variables in one dimension"
    description = "the square of a uniform number, inverse transform sampling and a learned mixture, beside their closed forms"
    question = (
        "An invertible map turns a simple distribution into another, whose density is p(z) / |g'(z)|. Does that hold for the square of "
        "a uniform number, for inverse transform sampling, and for a map that is learned from the data of a mixture?"
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
        generator = torch.Generator().manual_seed(100 + job.seed)
        unit, two = torch.ones(1, dtype=torch.float64), torch.full((1,), 2.0, dtype=torch.float64)
        torch.manual_seed(job.seed)
        values: dict[str, float] = {}
        if job.variant == "mixture":
            truth = mixture()
            data, test = (truth.rsample((number,), generator).float() for number in (s.train, s.test))
            how: dict[str, Any] = {"epochs": s.epochs, "batch_size": s.batch, "lr": s.lr}
            flow = fit_density(NSF(1), data, **how, seed=job.seed, progress=False)
            draws = flow.sample(s.draws, seed=job.seed)[:, 0].double()
            axis = cell_centers(-4.0, 4.0, s.grid)
            density = flow.score(axis[:, None].float()).double().exp()
            true = truth.log_prob(axis[:, None]).exp()
            values["gap"] = float((truth.log_prob(test.double()) - flow.score(test).double()).mean())
            function = mixture_function(draws.sort().values)
        else:
            square = job.variant == "square"
            base = Independent(Uniform(0 * unit, two if square else unit), 1)
            known = Flow(base, Square() if square else ExponentialQuantile())
            draws = known.sample((s.draws,))[:, 0]
            axis = cell_centers(0.0, 4.0, s.grid)
            density = known.log_prob(axis[:, None]).exp()
            true = 0.25 / axis.sqrt() if square else RATE * (-RATE * axis).exp()
            ordered = draws.sort().values
            function = ordered.sqrt() / 2 if square else -torch.expm1(-RATE * ordered)
        values |= {
            "density_error": float((density - true).abs().max()),
            "mass": float(density.sum() * (axis[1] - axis[0])),
            "ks": distance(function),
            "ks_chance": 1.36 / math.sqrt(s.draws),
        }
        content: dict[str, Any] = {"values": values}
        if job.seed == 0:
            content["curve"] = {
                "x": round_values(axis),
                "flow": round_values(density),
                "truth": round_values(true),
            }
            low, high = (-4.0 if job.variant == "mixture" else 0.0), 4.0
            inside = draws[(draws > low) & (draws < high)]
            counted_in = histogram(inside, low, high, 40)
            share = len(inside) / len(draws)
            content["histogram"] = counted_in | {"fraction": [share * one for one in counted_in["fraction"]]}
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        notes = [
            "The square: z is uniform on (0, 2) and x = z² has the density 1 / (4 √x) on (0, 4). Inverse transform sampling: u is "
            f"uniform on (0, 1) and x = -log(1 - u) / {RATE:g} has the exponential distribution. Both are maps written for this "
            "study, whose density the library's Flow computes.",
            f"The mixture has two Gaussians, ½ N(-1.5, 0.5²) + ½ N(1, 0.7²). It is learned by NSF(1), a normal base and splines, "
            f"from {settings.train} points, a tenth of them held out to stop early.",
            "The mass of the square is a midpoint sum, which is below 1 beside the pole at 0; that of the exponential lacks the tail "
            "beyond 4.",
        ]
        rows = self.rows(settings, parts, METRICS)
        return Findings(
            answer(parts), METRICS, rows, figures(self.first_seed_parts(settings, parts, "curve")), notes
        )


def mixture() -> NormalMixture:
    """Two Gaussians on the line, equally likely."""
    return NormalMixture(torch.tensor([[-1.5], [1.0]]).double(), torch.tensor([[0.5], [0.7]]).double())


def mixture_function(x: Tensor) -> Tensor:
    """The distribution function of the mixture."""
    truth = mixture()
    return torch.special.ndtr((x[:, None] - truth.loc[:, 0]) / truth.scale[:, 0]).mean(-1)


def distance(function: Tensor) -> float:
    """The Kolmogorov-Smirnov distance of ordered draws, given the true distribution function at them.

    >>> distance(torch.tensor([0.5]).double()), round(distance(torch.tensor([0.2, 0.9]).double()), 2)
    (0.5, 0.4)
    """
    number = len(function)
    steps = torch.arange(number + 1, dtype=torch.float64) / number
    return float(torch.maximum(function - steps[:-1], steps[1:] - function).max())


def figures(drawn: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The densities of the first seed, and its draws."""
    panels = []
    for label, part in drawn.items():
        shown = part["curve"]
        edges, shares = part["histogram"]["edges"], part["histogram"]["fraction"]
        width = edges[1] - edges[0]
        lines = [
            {"label": "draws, by counting", "x": [low + width / 2 for low in edges[:-1]], "mean": [share / width for share in shares]},
            {"label": "density of the flow", "x": shown["x"], "mean": shown["flow"]},
            {"label": "closed form", "x": shown["x"], "mean": shown["truth"], "style": "dashed"},
        ]  # fmt: skip
        panels.append(panel(label, "density", lines))
    caption = "Seed 0. Where the map is flat, draws are squeezed together and the density is high; where it is steep, it is low."
    return [
        figure("curves", "Densities, draws and closed forms", caption, {"x_label": "x", "panels": panels})
    ]


def answer(parts: Parts) -> str:
    """The answer, put together from the numbers."""
    square, quantile = (parts.mean(key, "density_error") for key in ("square", "quantile"))
    inside = [max(parts.values(one.key, "ks")) <= parts.mean(one.key, "ks_chance") for one in VARIANTS[:2]]
    draws = (
        "no farther from the true distribution than chance allows"
        if all(inside)
        else "once farther than 95 % of chance"
    )
    return (
        f"Where the map is known the density is exact to {max(square, quantile):.0e}, and draws are {draws} "
        f"({pluralize(len(parts.seeds))}).\n"
        f"The learned map of the mixture falls {parts.mean('mixture', 'gap'):.4f} nats short of the true density on unseen points; "
        f"its density is off by at most {parts.mean('mixture', 'density_error'):.3f}."
    )
