"""Variational inference of the four energies in the plane of Rezende and Mohamed 2015 (https://arxiv.org/abs/1505.05770)."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn import flows
from flowbnn.compare.results import SeedResults, figure
from flowbnn.density.target import TargetFit, fit_target
from flowbnn.options import Count, Positive, options
from flowbnn_studies.runner.findings import cell_centers, evaluate_on_grid, pluralize, ranking, round_values
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, time_call

RECIPES: Mapping[str, tuple[str, str, dict[str, Any], float]] = {  # label, flow, its arguments, relative cost
    "planar-2": ("Planar (2)", "planar", {"length": 2}, 1.0),
    "planar-8": ("Planar (8)", "planar", {"length": 8}, 1.0),
    "planar-32": ("Planar (32)", "planar", {"length": 32}, 1.0),
    "radial-8": ("Radial (8)", "radial", {"length": 8}, 2.0),
    "realnvp": ("RealNVP", "realnvp", {}, 1.5),
    "iaf": ("IAF", "iaf", {}, 1.5),
    "nsf": ("NSF", "nsf", {}, 4.0),
}
NAMES = {
    1: "Energy 1, two sides of a ring",
    2: "Energy 2, a wave",
    3: "Energy 3, a wave that splits and joins",
    4: "Energy 4, a wave that splits",
}
# half the side of the figures, beyond which energies 2 to 4 rise, and the scale of the rise
REACH, EDGE = 4.0, 0.4
QUADRATURE_REACH = 8.0  # half the side of the square of the quadrature, where it has converged


@options
class Settings:
    """Settings of the study.

    Args:
        energies: Numbers of the energies.
        epochs, samples, lr: Options of :func:`~flowbnn.fit_target`; an epoch has 100 steps.
        draws: Number of draws for the ELBO, the evidence and k-hat.
        nodes: Number of nodes of the quadrature along each axis.
        grid: Number of grid points along each axis of a figure.
    """

    energies: tuple[int, ...] = tuple(NAMES)
    epochs: Count = 10
    samples: Count = 256
    lr: Positive = 1e-2
    draws: Count = 20_000
    nodes: Count = 800
    grid: Count = 48


class Energies(Study):
    name = "energies"
    title = "Four energies in the plane: variational inference by flows"
    description = "four energies of Rezende and Mohamed 2015 by planar flows of length 2, 8 and 32 and other flows, versus quadrature"
    question = (
        "Only the energy U(z) of a density p(z) = exp(-U(z)) / Z is known. How close is a flow that maximizes the ELBO, are longer "
        "planar flows closer, and does importance sampling find the true normalizer?"
    )
    source = "Rezende and Mohamed 2015, table 1 and figure 3"
    settings = Settings
    seeds = 3
    headline = tuple(f"gap_{number}" for number in NAMES)
    quick: ClassVar[dict[str, Any]] = {"epochs": 1, "samples": 8, "draws": 100, "nodes": 100, "grid": 7}

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return tuple(Variant(key, label, cost=cost) for key, (label, _, _, cost) in RECIPES.items())

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        _, name, arguments, _ = RECIPES[job.variant]
        content: dict[str, Any] = {"values": {}, "pictures": {}}
        for number in s.energies:
            torch.manual_seed(job.seed)
            flow, options = flows.named_flows()[name](2, **arguments), job.short_options(seed=job.seed)
            options |= {"epochs": s.epochs, "samples": s.samples, "lr": s.lr}
            fitted, seconds = time_call(fit_target, flow, log_density(number), **options)
            evidence, truth = fitted.evidence(s.draws, seed=100 + job.seed), log_normaliser(number, s.nodes)
            content["values"] |= {
                f"gap_{number}": truth - evidence["elbo"],
                f"error_{number}": evidence["log_evidence"] - truth,
                f"k_hat_{number}": evidence["k_hat"],
                f"elbo_{number}": evidence["elbo"],
                f"seconds_{number}": seconds,
            }
            if job.seed == 0:
                content["pictures"][str(number)] = picture(fitted, s)
        return content

    def story(self, numbers: Numbers) -> Story:
        gaps = [key for key in numbers.metrics if key.startswith("gap_")]
        short, long = ([numbers.mean(key, gap) for gap in gaps] for key in ("planar-2", "planar-32"))
        winners = [numbers.ranked(gap)[0] for gap in gaps]
        return Story(
            "How close do flows come to a density that is known up to a constant?",
            f"32 planar flows come within {min(long):.2f} to {max(long):.2f} nats of four such densities and 2 planar flows within "
            f"{min(short):.2f} to {max(short):.2f}, but no family is best on all: {len(set(winners))} different flows win.",
            f"{max(short):.2f} → {max(long):.2f}",
            "nats short in the worst case: 2 and 32 planar flows",
            tuple(gaps),
            figure="map",
            place=2,
            panels=("Target", "Planar (2)", "Planar (32)", "NSF"),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        kinds = {
            "gap": ("Gap", "lower", ".3f", "log Z minus the ELBO, in nats: the KL divergence from the flow to the target; 0 is exact."),
            "error": ("Evidence", "none", "+.4f", "log Z by importance sampling minus the true log Z, in nats."),
            "k_hat": ("k-hat", "lower", ".2f", "Pareto k-hat of the importance weights; above 0.7 they are unreliable."),
            "elbo": ("ELBO", "higher", ".3f", "Mean over draws of the flow of -U(z) - log q(z), in nats; at most log Z."),
            "seconds": ("Seconds", "none", ".1f", "Time of the fit."),
        }  # fmt: skip
        metrics = make_metrics(kinds, {number: f"Energy {number}" for number in settings.energies}, "{1}")
        truth = {f"elbo_{number}": log_normaliser(number, settings.nodes) for number in settings.energies}
        exact = SeedResults([0], {("truth", 0): {"values": truth}}).row(
            "truth", "log Z by quadrature", metrics
        )
        notes = [
            f"Each flow is fitted by {100 * settings.epochs:,} steps of {settings.samples} draws. The weight of the energy grows "
            "from 0.01 to 1 over the first 30 % of the steps, similar to the annealing of the paper. Flows have their default "
            "architectures, except the length in brackets of planar and radial flows. The learning rate was chosen on energies 1 "
            "and 3 with another seed.",
            f"log Z is a midpoint sum over {settings.nodes}² nodes on [-{QUADRATURE_REACH:g}, {QUADRATURE_REACH:g}]², converged to "
            "1e-6.",
            f"exp(-U) of energies 2 to 4 has no finite integral because they do not grow with |z1|. Beyond |z1| = {REACH:g}, the "
            f"edge of the figure in the paper, ½ ((|z1| - {REACH:g}) / {EDGE:g})² is added.",
            "The ELBO, the evidence and k-hat use the same new draws of the fitted flow. If the flow misses part of the target, "
            "the evidence is too low and k-hat may not show it.",
        ]
        rows = [*self.rows(settings, parts, metrics), {**exact, "reference": "yes"}]
        return Findings(self.answer(settings, parts), metrics, rows, self.figures(settings, parts), notes)

    def answer(self, settings: Settings, parts: SeedResults) -> str:
        """Returns the answer, computed from the numbers."""
        lines = []
        planar = [key for key in RECIPES if key.startswith("planar") and parts.of(key)]
        if planar:
            gaps = "; ".join(
                f"energy {number} " + ", ".join(f"{parts.mean(key, f'gap_{number}'):.3f}" for key in planar)
                for number in settings.energies
            )
            lengths = ", ".join(key.removeprefix("planar-") for key in planar)
            lines.append(
                f"Gap of planar flows of length {lengths} in nats ({pluralize(len(parts.seeds))}): {gaps}."
            )
        for number in settings.energies:
            best = ranking(parts, self.variants(settings), f"gap_{number}")
            lines.append(f"{NAMES[number]}, smallest gaps: {best}.")
        results = [part["values"] for key in RECIPES for part in parts.of(key)]
        pairs = [
            (values[f"k_hat_{n}"], abs(values[f"error_{n}"])) for values in results for n in settings.energies
        ]
        good = [error for k_hat, error in pairs if k_hat is not None and k_hat < 0.7]
        if good:
            errors = [error for _, error in pairs]
            lines.append(
                f"Error of log Z by importance sampling where k-hat is below 0.7 ({len(good)} of {len(pairs)} fits): median "
                f"{statistics.median(good):.3f} nats, largest {max(good):.3f}; over all fits {statistics.median(errors):.3f} and "
                f"{max(errors):.3f}."
            )
        return "\n".join(lines)

    def figures(self, settings: Settings, parts: SeedResults) -> list[dict[str, Any]]:
        """Returns the target and the densities of the first seed for each energy."""
        result = []
        axis = cell_centers(-REACH, REACH, settings.grid)
        for number in settings.energies:
            log_target = evaluate_on_grid(log_density(number), axis)
            target = (log_target - log_normaliser(number, settings.nodes)).exp()
            panels: list[dict[str, Any]] = [{"title": "Target", "values": round_values(target, 3)}]
            for label, part in self.first_seed_parts(settings, parts, "pictures").items():
                if values := part["pictures"].get(str(number)):
                    note = f"gap {part['values'][f'gap_{number}']:.3f}"
                    panels.append({"title": label, "note": note, "values": values})
            caption = "Seed 0: target and density of each flow on one colour scale. After a name: gap of its ELBO to log Z, in nats."
            data = {
                "label": "density",
                "x": round_values(axis, 3),
                "y": round_values(axis, 3),
                "top": float(target.max()),
            }
            result.append(figure("map", NAMES[number], caption, {**data, "panels": panels}))
        return result


def energy(number: int, z: Tensor) -> Tensor:
    r"""Computes one of the four energies :math:`U(z)` at points ``[..., 2]`` (Rezende and Mohamed 2015, table 1).

    With :math:`w_1 = \sin(\pi z_1 / 2)`, :math:`w_2 = 3 e^{-\frac12 ((z_1 - 1) / 0.6)^2}` and :math:`w_3 = 3 \sigma((z_1 - 1) / 0.3)`;
    energies 2 to 4 rise beyond :math:`|z_1| = 4`.

    >>> [round(float(energy(number, torch.tensor([1.0, -0.5]))), 4) for number in (1, 2, 3, 4)]
    [3.8197, 7.0312, 8.4905, -0.0009]
    """
    first, second = z.unbind(-1)
    wave = (0.5 * math.pi * first).sin()

    def bell(x: Tensor, width: float) -> Tensor:
        return -0.5 * (x / width).square()

    if number == 1:
        sides = torch.logaddexp(bell(first - 2, 0.6), bell(first + 2, 0.6))
        return -bell(z.norm(dim=-1) - 2, 0.4) - sides
    outside = -bell((first.abs() - REACH).clamp(min=0.0), EDGE)
    if number == 2:
        return -bell(second - wave, 0.4) + outside
    if number == 3:
        below, width = 3 * bell(first - 1, 0.6).exp(), 0.35
    else:
        below, width = 3 * ((first - 1) / 0.3).sigmoid(), 0.4
    return outside - torch.logaddexp(bell(second - wave, width), bell(second - wave + below, 0.35))


def log_density(number: int) -> Callable[[Tensor], Tensor]:
    """Returns the negative energy as a function."""
    return lambda z: -energy(number, z)


def log_normaliser(number: int, nodes: int) -> float:
    r"""Computes :math:`\log Z = \log \int e^{-U(z)} dz` by the midpoint rule.

    >>> round(log_normaliser(2, 200), 4)  # closed form: a strip of length 8 with Gaussian edges
    2.2002
    >>> round(math.log((8 + 0.4 * math.sqrt(2 * math.pi)) * 0.4 * math.sqrt(2 * math.pi)), 4)
    2.2002
    """
    axis = cell_centers(-QUADRATURE_REACH, QUADRATURE_REACH, nodes)
    logs = evaluate_on_grid(log_density(number), axis)
    return float(logs.flatten().logsumexp(0)) + 2 * math.log(2 * QUADRATURE_REACH / nodes)


@torch.no_grad()
def picture(fitted: TargetFit, s: Settings) -> list[Any]:
    """Returns the density of a fitted flow on a grid."""
    axis = cell_centers(-REACH, REACH, s.grid)
    return round_values(evaluate_on_grid(fitted.flow().log_prob, axis.float()).exp(), 3)
