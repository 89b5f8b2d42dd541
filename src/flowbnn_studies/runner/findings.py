"""What findings are made of: figures as plain data, in the forms that the report draws, and whether two rows really differ."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowbnn import errors
from flowbnn.compare.results import Parts, best_first, figure, listed, summary
from flowbnn.diagnostics import marginal
from flowbnn.diagnostics.noise_chains import RHAT
from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers
from flowbnn.noise.flow_noise import InputNoise


def short(values: Tensor, digits: int = 4) -> list[Any]:
    """Values rounded to ``digits`` decimals: a picture needs no more, and the file stays small.

    >>> short(torch.tensor([0.123456, 2.0]))
    [0.1235, 2.0]
    """
    return torch.round(values.detach().double().cpu(), decimals=digits).tolist()


def middles(low: float, high: float, number: int) -> Tensor:
    """Middles of equal cells.

    >>> middles(-1.0, 1.0, 4).tolist()
    [-0.75, -0.25, 0.25, 0.75]
    """
    return low + (high - low) * (torch.arange(number, dtype=torch.float64) + 0.5) / number


def over_plane(function: Callable[[Tensor], Tensor], axis: Tensor) -> Tensor:
    """A function of points ``[N, 2]`` on a square grid, a row for each y."""
    return function(torch.cartesian_prod(axis, axis)).reshape(len(axis), -1).T


def line(label: str, x: Iterable[Any], columns: Iterable[Sequence[float]], **more: Any) -> dict[str, Any]:
    """A line of a panel: at each place the mean and the standard deviation over the values of the seeds.

    >>> line("here", [0, 10], [[1.0, 3.0], [2.0, 2.0]], style="dashed")
    {'label': 'here', 'x': [0, 10], 'mean': [2.0, 2.0], 'std': [1.4142135623730951, 0.0], 'style': 'dashed'}
    """
    cells = [summary(values) for values in columns]
    spread = [cell["std"] for cell in cells]
    known = any(one is not None for one in spread)
    means = [cell["mean"] for cell in cells]
    return {"label": label, "x": list(x), "mean": means, "std": spread if known else None, **more}


def curve(label: str, histories: Sequence[Sequence[float]], scale: float = 1.0) -> dict[str, Any]:
    """A line over epochs, as far as all seeds have them.

    >>> curve("plain", [[1.0, 2.0], [3.0, 2.0]])
    {'label': 'plain', 'x': [1, 2], 'mean': [2.0, 2.0], 'std': [1.4142135623730951, 0.0]}
    """
    epochs = range(min(len(history) for history in histories))
    columns = ([scale * history[epoch] for history in histories] for epoch in epochs)
    return line(label, (epoch + 1 for epoch in epochs), columns)


def histogram(values: Tensor, low: float, high: float, bins: int) -> dict[str, list[float]]:
    """Shares of the values in equal bins; what lies outside counts in the outermost ones.

    >>> histogram(torch.tensor([0.1, 0.2, 0.9, 1.5]), 0.0, 1.0, 2)
    {'edges': [0.0, 0.5, 1.0], 'fraction': [0.5, 0.5]}
    """
    width = (high - low) / bins
    place = ((values.detach().double().cpu() - low) / width).long().clamp(0, bins - 1)
    counts = torch.bincount(place, minlength=bins)
    return {
        "edges": [low + width * index for index in range(bins + 1)],
        "fraction": (counts / max(1, len(place))).tolist(),
    }


def histogram_panels(
    contents: Mapping[str, Sequence[Mapping[str, Any]]], groups: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A panel for each label: histograms by group, averaged over seeds, which share their edges.

    Args:
        contents: by label, the histograms of each seed by group.
        groups: label of every group.
    """

    def pooled(label: str, many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        fractions = torch.tensor([one["fraction"] for one in many], dtype=torch.float64).mean(0)
        return {"label": label, "edges": many[0]["edges"], "fraction": short(fractions, 6)}

    return [
        {
            "title": title,
            "groups": [pooled(label, [one[key] for one in seeds]) for key, label in groups.items()],
        }
        for title, seeds in contents.items()
    ]


def panel(title: str, unit: str, lines: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A panel of curves."""
    return {"title": title, "y_label": unit, "lines": list(lines), **more}


def training_figure(
    parts: Parts, labels: Mapping[str, str], noisy: Sequence[str], trained: Sequence[str], caption: str
) -> dict[str, Any]:
    """ELBO and KL of the ``noisy`` variants and the log-likelihood of all that were ``trained``, over epochs."""
    panels = (
        ("elbo", "ELBO", "nats per example", noisy),
        ("log_likelihood", "Log-likelihood", "nats per example", trained),
        ("kl", "KL to the prior", "nats", noisy),
    )
    drawn = []
    for name, title, unit, keys in panels:
        lines = [curve(labels[key], [part["history"][name] for part in parts.of(key)]) for key in keys]
        drawn.append(panel(title, unit, lines))
    return figure("curves", "Training", caption, {"x_label": "epoch", "panels": drawn})


def _farthest(noise: InputNoise, number: int) -> list[int]:
    """Dimensions whose marginal has moved farthest from the prior, by the KL of normals of the same moments."""
    draws = noise.draw((2000,), torch.Generator(noise.prior.distribution().mean.device).manual_seed(0))
    prior = noise.prior.distribution()
    ratio = draws.var(0) / prior.variance
    moved = ratio - ratio.log() + (draws.mean(0) - prior.mean).square() / prior.variance
    return moved.argsort(descending=True)[:number].tolist()


@torch.no_grad()
def density_panels(
    model: nn.Module, layers: Sequence[str], number: int, networks: int = 128
) -> list[dict[str, Any]]:
    """Marginal densities of the ``number`` noise dimensions of each layer that have moved farthest from their prior.

    From 4000 draws, or fewer where fewer ``networks`` than usual are averaged in a prediction.
    """
    panels = []
    for layer in layers:
        noise = noise_layers(model)[layer]
        assert isinstance(noise, InputNoise)
        for dimension in _farthest(noise, number):
            density = marginal(model, layer, dimension, min(4000, 32 * networks))
            panels.append(
                {
                    "title": f"{layer}, noise dimension {dimension}",
                    "x": short(density.grid),
                    "posterior": short(density.density),
                    "prior": short(density.prior),
                    "modes": density.modes,
                }
            )
    return panels


def kernel_density(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The joint density of two columns of draws on a grid ``[len(y), len(x)]``, by Gaussian kernels of Scott's width.

    >>> density = kernel_density(torch.randn(500), torch.randn(500), torch.linspace(-6, 6, 50), torch.linspace(-6, 6, 40))
    >>> density.shape, round(float(density.sum()) * (12 / 49) * (12 / 39), 2)
    (torch.Size([40, 50]), 1.0)
    """
    kernels = []
    for column, grid in ((first, x), (second, y)):
        width = column.std().clamp_min(1e-6) * len(column) ** (-1 / 6)
        away = (grid[:, None] - column) / width
        kernels.append(torch.exp(-0.5 * away.square()) / (width * (2 * torch.pi) ** 0.5))
    return kernels[1] @ kernels[0].T / len(first)


@torch.no_grad()
def density_pair(model: nn.Module, layer: str, nodes: int = 40, samples: int = 3000) -> dict[str, Any]:
    """The joint density of the two noise dimensions of a layer that have moved farthest, by a Gaussian kernel on draws."""
    noise = noise_layers(model)[layer]
    assert isinstance(noise, InputNoise)
    first, second = _farthest(noise, 2)
    device = noise.prior.distribution().mean.device
    draws = noise.draw((samples,), torch.Generator(device).manual_seed(1)).double().cpu()
    grids = []
    for column in (draws[:, first], draws[:, second]):
        room = 2 * column.std().clamp_min(1e-6) * samples ** (-1 / 6)
        low, high = float(column.min() - room), float(column.max() + room)
        grids.append(torch.linspace(low, high, nodes, dtype=torch.float64))
    density = kernel_density(draws[:, first], draws[:, second], *grids)
    return {
        "title": f"{layer}, noise dimensions {first} and {second}",
        "x_label": f"dimension {first}",
        "y_label": f"dimension {second}",
        "x": short(grids[0]),
        "y": short(grids[1]),
        "density": short(density),
    }


def density_figure(parts: Parts, caption: str, **more: Any) -> dict[str, Any]:
    """The densities of the flow noise of the first seed, and how many of those of all seeds have more than one mode."""
    modes = [panel["modes"] for part in parts.of("flow") for panel in part["densities"]]
    several = sum(number > 1 for number in modes)
    caption = (
        f"Seed {parts.seeds[0]}: {caption} Of the {len(modes)} dimensions looked at over all seeds, {several or 'none'} "
        f"{'has' if several < 2 else 'have'} more than one mode."
    )
    data = {"panels": parts.content["flow", parts.seeds[0]]["densities"], **more}
    return figure("density", "The noise that was learned", caption, data)


def picture_grid(images: Tensor, columns: int) -> list[Any]:
    """Images ``[N, C, H, W]`` with values from 0 to 1 as one picture, row by row, for a figure of kind ``images``.

    >>> picture_grid(torch.tensor([0.0, 1.0, 0.5, 0.25]).view(4, 1, 1, 1), 2)
    [[0.0, 1.0], [0.5, 0.25]]
    """
    images = images[: len(images) // columns * columns].float().clamp(0, 1)
    number, channels, height, width = images.shape
    rows = images.reshape(number // columns, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    whole = rows.reshape(number // columns * height, columns * width, channels)
    return short(whole[..., 0] if channels == 1 else whole, 2)


def grid_figures(
    title: str, caption: str, drawn: Mapping[str, dict[str, Any]], name: str
) -> list[dict[str, Any]]:
    """A figure with a grid of pictures for each label, which its part has under ``name``; none where nothing is drawn."""
    panels = [{"title": label, "pixels": part[name]} for label, part in drawn.items()]
    return [figure("images", title, caption, {"panels": panels})] if panels else []


AGAINST = ("gap", "per_example", "variation", "agreement", "excess")  # numbers that take chains for the truth


# -------------------- statistics over seeds


def pluralize(number: int, noun: str = "seed") -> str:
    """A number with its noun.

    >>> pluralize(1), pluralize(3, "split")
    ('1 seed', '3 splits')
    """
    return errors.pluralize(number, noun)


def ranking(
    parts: Parts, candidates: Iterable[Any], metric: str, higher: bool = False, form: str = ".3f"
) -> str:
    """The three best means of a metric and the worst, for a sentence; candidates have a ``key`` and a ``label``."""
    order = best_first(parts, candidates, metric, higher)
    best, last = (listed(parts, some, metric, form) for some in (order[:3], order[-1:]))
    return f"{best}; last {last}" if len(order) > 3 else best or "none"


@dataclass(frozen=True)
class Paired:
    """The mean of ``first - second`` over seeds, its 95 % interval by Student's t, and the p-value of :func:`sign_flip`."""

    mean: float
    low: float
    high: float
    number: int
    p: float = 1.0

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero; never with a single seed."""
        return self.low > 0 or self.high < 0

    @property
    def even(self) -> str:
        """How two rows stand that are not clearly apart; one seed has no spread to measure chance by."""
        return "within chance" if self.number > 1 else "undecided with one seed"

    def words(self, digits: int = 4) -> str:
        """The difference with its interval, for a sentence."""
        if self.number < 2:
            return f"{self.mean:+.{digits}f} (one seed)"
        return f"{self.mean:+.{digits}f} (95 % interval {self.low:+.{digits}f} to {self.high:+.{digits}f})"


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    r"""Compare two rows seed by seed: :math:`\bar d \pm t_{0.975, n-1} \, s_d / \sqrt n`.

    >>> result = paired([1.0, 2.0, 3.0], [0.5, 1.6, 2.4])
    >>> round(result.mean, 3), result.clear
    (0.5, True)
    """
    if len(first) != len(second):
        raise FlowBNNError(f"a paired comparison needs the same seeds, got {len(first)} and {len(second)}")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, number = statistics.fmean(differences), len(differences)
    if number < 2:
        return Paired(mean, -math.inf, math.inf, number)
    from scipy.special import stdtrit  # not above: every command would wait for it

    reach = float(stdtrit(number - 1, 0.975)) * statistics.stdev(differences) / math.sqrt(number)
    return Paired(mean, mean - reach, mean + reach, number, sign_flip(differences))


def sign_flip(differences: Sequence[float]) -> float:
    """The exact two-sided p-value of the sign-flip test: if neither side were better, every sign would be as likely as not.

    The share of all ``2 ** n`` choices of signs whose mean is at least as far from zero as the one seen (Fisher, 1935). It
    assumes nothing of the differences but their symmetry, and cannot fall below ``2 / 2 ** n``: 0.25 with three seeds. Above 16
    differences, 100,000 choices of signs (always the same) stand for all.

    >>> sign_flip([1.0, 2.0, 3.0]), sign_flip([1.0, -2.0, 3.0])
    (0.25, 0.75)
    """
    seen = abs(sum(differences)) * (1 - 1e-12)
    if len(differences) > 16:
        signs = 2.0 * np.random.default_rng(0).integers(0, 2, (100_000, len(differences))) - 1.0
        extreme = np.abs(signs @ np.asarray(differences)) >= seen
        return float((extreme.sum() + 1) / (len(signs) + 1))  # the choice that was seen is one of them
    sums = [0.0]
    for difference in differences:
        sums = [total + sign * difference for total in sums for sign in (1, -1)]
    return sum(abs(total) >= seen for total in sums) / len(sums)


def certified(rhat: float | None) -> bool:
    """Whether chains may be taken for the truth; an infinite R-hat is stored as None."""
    return rhat is not None and rhat <= RHAT


def gated(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that may be told: none that was measured against chains which have not mixed.

    >>> gated({"gap": 1.0, "k": 0.3, "rhat": None}), gated({"gap": 1.0, "k": 0.3, "rhat": 1.002})
    ({'k': 0.3, 'rhat': None}, {'gap': 1.0, 'k': 0.3, 'rhat': 1.002})
    """
    trusted = certified(numbers["rhat"])
    return {key: value for key, value in numbers.items() if trusted or not key.startswith(AGAINST)}


def uncertified(chains: Iterable[tuple[str, float | None]]) -> str:
    """A line on chains, by name and R-hat, that have not mixed."""
    wrong = [
        f"{name} ({'infinite' if rhat is None else f'{rhat:.3f}'})"
        for name, rhat in chains
        if not certified(rhat)
    ]
    text = f"Nothing is compared with chains whose R-hat is above {RHAT}: {', '.join(wrong)}."
    return text if wrong else f"All chains have an R-hat of at most {RHAT}."


def mark_trial(results: dict[str, Any], generated: bool = False) -> dict[str, Any]:
    """What a trial run shows instead: title, answer and a note that say what it is, and nothing published beside its numbers.

    Args:
        results: of the study.
        generated: whether the data were generated in place of the set that the title names.

    >>> mark_trial({"title": "LeNet on Fashion-MNIST", "rows": [], "figures": [], "notes": []}, generated=True)["title"]
    'LeNet on Fashion-MNIST (generated data, a trial run: the numbers mean nothing)'
    """
    small = "generated data" if generated else "tiny settings"
    text = f"This is a trial run with {small}: its numbers mean nothing."
    rows = [
        {**row, "values": {key: {**cell, "published": None} for key, cell in row["values"].items()}}
        for row in results["rows"]
        if not row.get("cited")
    ]

    def own(panel: dict[str, Any]) -> dict[str, Any]:
        lines = [line for line in panel["lines"] if line.get("style") != "dashed"]
        return {**panel, "lines": lines, "levels": []}

    figures = []
    for one in results["figures"]:
        data = one["data"]
        if one.get("published"):  # else dashed lines and levels are our own, as a closed form is
            data = {**data, "panels": [own(panel) for panel in data["panels"]]}
        figures.append({**one, "data": data, "published": None})
    return {
        "title": f"{results['title']} ({small}, a trial run: the numbers mean nothing)",
        "answer": text,
        "trial": "yes",
        "rows": rows,
        "figures": figures,
        "notes": [f"{text} No published values stand beside them.", *results["notes"]],
    }
