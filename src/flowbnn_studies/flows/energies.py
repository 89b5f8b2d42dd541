"""Variational inference of the four energies in the plane of Rezende & Mohamed 2015 (https://arxiv.org/abs/1505.05770)."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn import flows
from flowbnn.compare.results import Parts, figure
from flowbnn.density.target import TargetFit, fit_target
from flowbnn.options import Count, Positive, options
from flowbnn_studies.runner.findings import cell_centers, evaluate_on_grid, pluralize, ranking, round_values
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, time_call

RECIPES: Mapping[str, tuple[str, str, dict[str, Any], float]] = {  # label, flow, its settings, cost
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
REACH, EDGE = 4.0, 0.4  # of the pictures, where energies 2 to 4 begin to rise, and how fast
ROOM = 8.0  # of the quadrature, to either side of the origin


@options
class Settings:
    """What the study depends on.

    Args:
        energies: which of the four.
        epochs, samples, lr: of :func:`~flowbnn.fit_target`; an epoch has 100 steps.
        draws: for the ELBO, the evidence and k-hat.
        nodes: of the quadrature, on each side.
        grid: nodes of a picture on each side.
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
    description = "the four energies of Rezende and Mohamed 2015 by planar flows of length 2, 8 and 32 and others, beside quadrature"
    question = (
        "Of a density only the energy U(z) is known, p(z) = exp(-U(z)) / Z. How near does a flow come that maximises the ELBO, do "
        "longer planar flows come nearer, and is the normaliser found by importance sampling the true one?"
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
        _, name, own, _ = RECIPES[job.variant]
        content: dict[str, Any] = {"values": {}, "pictures": {}}
        for number in s.energies:
            torch.manual_seed(job.seed)
            flow, given = flows.named_flows()[name](2, **own), job.short_options(seed=job.seed)
            given |= {"epochs": s.epochs, "samples": s.samples, "lr": s.lr}
            fitted, seconds = time_call(fit_target, flow, log_density(number), **given)
            found, truth = fitted.evidence(s.draws, seed=100 + job.seed), log_normaliser(number, s.nodes)
            content["values"] |= {
                f"gap_{number}": truth - found["elbo"],
                f"error_{number}": found["log_evidence"] - truth,
                f"k_hat_{number}": found["k_hat"],
                f"elbo_{number}": found["elbo"],
                f"seconds_{number}": seconds,
            }
            if job.seed == 0:
                content["pictures"][str(number)] = picture(fitted, s)
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        kinds = {
            "gap": ("Gap", "lower", ".3f", "log Z less the ELBO, in nats: the KL divergence from the flow to the target; 0: exact."),
            "error": ("Evidence", "none", "+.4f", "log Z by importance sampling less the true one, in nats."),
            "k_hat": ("k-hat", "lower", ".2f", "Shape of the tail of the importance weights; above 0.7 they are not to be trusted."),
            "elbo": ("ELBO", "higher", ".3f", "Mean over draws of the flow of -U(z) - log q(z), in nats; at most log Z."),
            "seconds": ("Seconds", "none", ".1f", "Of the fit."),
        }  # fmt: skip
        metrics = make_metrics(kinds, {number: f"Energy {number}" for number in settings.energies}, "{1}")
        truth = {f"elbo_{number}": log_normaliser(number, settings.nodes) for number in settings.energies}
        exact = Parts([0], {("truth", 0): {"values": truth}}).row("truth", "log Z by quadrature", metrics)
        notes = [
            f"Each flow is fitted by {100 * settings.epochs:,} steps of {settings.samples} draws; the energy's weight grows from 0.01 "
            "to 1 over the first 30 % of them, after the paper's annealing. Flows have their default architectures but for the length "
            "that stands behind planar and radial ones in brackets. The rate was chosen on energies 1 and 3 with another seed.",
            f"log Z is a midpoint sum over {settings.nodes}² nodes on [-{ROOM:g}, {ROOM:g}]², where it has converged to 1e-6.",
            f"exp(-U) of energies 2 to 4 has no finite integral, as they do not grow with |z1|. Beyond |z1| = {REACH:g}, the edge of "
            f"the paper's figure, ½ ((|z1| - {REACH:g}) / {EDGE:g})² is added.",
            "The ELBO, the evidence and k-hat are of the same fresh draws of the fitted flow. They know only where the flow has been: "
            "a part of the target that it leaves out lowers the evidence and need not raise k-hat.",
        ]
        rows = [*self.rows(settings, parts, metrics), {**exact, "reference": "yes"}]
        return Findings(self.answer(settings, parts), metrics, rows, self.figures(settings, parts), notes)

    def answer(self, settings: Settings, parts: Parts) -> str:
        """The answer, put together from the numbers."""
        lines = []
        lengths = [key for key in RECIPES if key.startswith("planar") and parts.of(key)]
        if lengths:
            told = "; ".join(
                f"energy {number} " + ", ".join(f"{parts.mean(key, f'gap_{number}'):.3f}" for key in lengths)
                for number in settings.energies
            )
            long = ", ".join(key.removeprefix("planar-") for key in lengths)
            lines.append(
                f"Nats between the ELBO and log Z by planar flows of length {long} ({pluralize(len(parts.seeds))}): {told}."
            )
        for number in settings.energies:
            nearest = ranking(parts, self.variants(settings), f"gap_{number}")
            lines.append(f"{NAMES[number]}: nearest are {nearest}.")
        known = [part["values"] for key in RECIPES for part in parts.of(key)]
        pairs = [(one[f"k_hat_{n}"], abs(one[f"error_{n}"])) for one in known for n in settings.energies]
        good = [error for k_hat, error in pairs if k_hat is not None and k_hat < 0.7]
        if good:
            every = [error for _, error in pairs]
            lines.append(
                f"Importance sampling misses log Z by {statistics.median(good):.3f} nats in the median and {max(good):.3f} at most "
                f"where k-hat is below 0.7, in {len(good)} of {len(pairs)} fits; by {statistics.median(every):.3f} and "
                f"{max(every):.3f} in all."
            )
        return "\n".join(lines)

    def figures(self, settings: Settings, parts: Parts) -> list[dict[str, Any]]:
        """For each energy the target and the densities of the first seed."""
        made = []
        axis = cell_centers(-REACH, REACH, settings.grid)
        for number in settings.energies:
            log_target = evaluate_on_grid(log_density(number), axis)
            target = (log_target - log_normaliser(number, settings.nodes)).exp()
            panels: list[dict[str, Any]] = [{"title": "Target", "values": round_values(target, 3)}]
            for label, part in self.first_seed_parts(settings, parts, "pictures").items():
                if own := part["pictures"].get(str(number)):
                    note = f"gap {part['values'][f'gap_{number}']:.3f}"
                    panels.append({"title": label, "note": note, "values": own})
            caption = (
                "Seed 0: the target and the density of each flow, on one colour scale. Behind a name: how many nats its ELBO falls "
                "short of log Z."
            )
            data = {
                "label": "density",
                "x": round_values(axis, 3),
                "y": round_values(axis, 3),
                "top": float(target.max()),
            }
            made.append(figure("map", NAMES[number], caption, {**data, "columns": 4, "panels": panels}))
        return made


def energy(number: int, z: Tensor) -> Tensor:
    r"""One of the four energies :math:`U(z)` at points ``[..., 2]`` (Rezende & Mohamed 2015, table 1).

    With :math:`w_1 = \sin(\pi z_1 / 2)`, :math:`w_2 = 3 e^{-\frac12 ((z_1 - 1) / 0.6)^2}` and :math:`w_3 = 3 \sigma((z_1 - 1) / 0.3)`;
    energies 2 to 4 also rise beyond :math:`|z_1| = 4`.

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
    """Minus an energy."""
    return lambda z: -energy(number, z)


def log_normaliser(number: int, nodes: int) -> float:
    r""":math:`\log Z = \log \int e^{-U(z)} dz` by the midpoint rule.

    >>> round(log_normaliser(2, 200), 4)  # without the edges log 8 + log 0.4 sqrt(2 pi), and two halves of a Gaussian with them
    2.2002
    >>> round(math.log((8 + 0.4 * math.sqrt(2 * math.pi)) * 0.4 * math.sqrt(2 * math.pi)), 4)
    2.2002
    """
    axis = cell_centers(-ROOM, ROOM, nodes)
    logs = evaluate_on_grid(log_density(number), axis)
    return float(logs.flatten().logsumexp(0)) + 2 * math.log(2 * ROOM / nodes)


@torch.no_grad()
def picture(fitted: TargetFit, s: Settings) -> list[Any]:
    """The density of a fitted flow on a grid."""
    axis = cell_centers(-REACH, REACH, s.grid)
    return round_values(evaluate_on_grid(fitted.flow().log_prob, axis.float()).exp(), 3)
