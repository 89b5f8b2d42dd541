"""Building blocks of findings: figures as plain data, and paired comparisons of rows over seeds."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowbnn import errors
from flowbnn.compare.results import SeedResults, best_first, figure, format_means, summary
from flowbnn.diagnostics import marginal
from flowbnn.diagnostics.noise_chains import NoiseChains
from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers
from flowbnn.noise.flow_noise import InputNoise


def round_values(values: Tensor, digits: int = 4) -> list[Any]:
    """Returns values rounded to ``digits`` decimals as nested lists, which keeps the results file small.

    >>> round_values(torch.tensor([0.123456, 2.0]))
    [0.1235, 2.0]
    """
    return torch.round(values.detach().double().cpu(), decimals=digits).tolist()


def cell_centers(low: float, high: float, number: int) -> Tensor:
    """Returns the centers of equal cells between two ends.

    >>> cell_centers(-1.0, 1.0, 4).tolist()
    [-0.75, -0.25, 0.25, 0.75]
    """
    return low + (high - low) * (torch.arange(number, dtype=torch.float64) + 0.5) / number


def evaluate_on_grid(function: Callable[[Tensor], Tensor], axis: Tensor) -> Tensor:
    """Evaluates a function of points ``[N, 2]`` on a square grid, with a row for each y."""
    return function(torch.cartesian_prod(axis, axis)).reshape(len(axis), -1).T


def line(label: str, x: Iterable[Any], columns: Iterable[Sequence[float]], **fields: Any) -> dict[str, Any]:
    """Returns a line of a panel: mean and standard deviation over seeds at each place.

    Args:
        label: Label of the line.
        x: Places along the horizontal axis.
        columns: Values of all seeds at each place.
        fields: Further fields of the line, such as ``style``.

    >>> line("here", [0, 10], [[1.0, 3.0], [2.0, 2.0]], style="dashed")
    {'label': 'here', 'x': [0, 10], 'mean': [2.0, 2.0], 'std': [1.4142135623730951, 0.0], 'style': 'dashed'}
    """
    cells = [summary(values) for values in columns]
    spread = [cell["std"] for cell in cells]
    has_spread = any(std is not None for std in spread)
    means = [cell["mean"] for cell in cells]
    return {"label": label, "x": list(x), "mean": means, "std": spread if has_spread else None, **fields}


def curve(label: str, histories: Sequence[Sequence[float]], scale: float = 1.0) -> dict[str, Any]:
    """Returns a line over the epochs that all seeds have.

    Args:
        label: Label of the line.
        histories: Values by epoch, one sequence for each seed.
        scale: Factor of all values.

    >>> curve("here", [[1.0, 2.0], [3.0, 2.0]])
    {'label': 'here', 'x': [1, 2], 'mean': [2.0, 2.0], 'std': [1.4142135623730951, 0.0]}
    """
    epochs = range(min(len(history) for history in histories))
    columns = ([scale * history[epoch] for history in histories] for epoch in epochs)
    return line(label, (epoch + 1 for epoch in epochs), columns)


def histogram(values: Tensor, low: float, high: float, bins: int) -> dict[str, list[float]]:
    """Returns the fractions of values in equal bins. Values outside are counted in the outermost bins.

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
    """Returns a panel for each label with the histograms of its groups, averaged over seeds.

    Args:
        contents: Histograms by label; for each seed, by group. All have the same edges.
        groups: Labels of the groups.
    """

    def pooled(label: str, histograms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        fractions = torch.tensor([entry["fraction"] for entry in histograms], dtype=torch.float64).mean(0)
        return {"label": label, "edges": histograms[0]["edges"], "fraction": round_values(fractions, 6)}

    return [
        {
            "title": title,
            "groups": [pooled(label, [content[key] for content in seeds]) for key, label in groups.items()],
        }
        for title, seeds in contents.items()
    ]


def panel(title: str, unit: str, lines: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Returns a panel of curves."""
    return {"title": title, "y_label": unit, "lines": list(lines), **fields}


def training_figure(
    parts: SeedResults, labels: Mapping[str, str], noisy: Sequence[str], trained: Sequence[str], caption: str
) -> dict[str, Any]:
    """Returns a figure of the training: ELBO, log-likelihood and KL over epochs.

    Args:
        parts: Results by variant and seed.
        labels: Labels by variant.
        noisy: Variants with an ELBO and a KL.
        trained: Variants with a log-likelihood.
        caption: Caption of the figure.
    """
    panels = (
        ("elbo", "ELBO", "nats per example", noisy),
        ("log_likelihood", "Log-likelihood", "nats per example", trained),
        ("kl", "KL to the prior", "nats", noisy),
    )
    curves = []
    for name, title, unit, keys in panels:
        lines = [curve(labels[key], [part["history"][name] for part in parts.of(key)]) for key in keys]
        curves.append(panel(title, unit, lines))
    return figure("curves", "Training", caption, {"x_label": "epoch", "panels": curves})


def _most_changed(noise: InputNoise, number: int) -> list[int]:
    """Returns the dimensions whose marginals differ most from the prior, by the KL of normals with the same moments."""
    draws = noise.draw((2000,), torch.Generator(noise.prior.distribution().mean.device).manual_seed(0))
    prior = noise.prior.distribution()
    ratio = draws.var(0) / prior.variance
    divergence = ratio - ratio.log() + (draws.mean(0) - prior.mean).square() / prior.variance
    return divergence.argsort(descending=True)[:number].tolist()


@torch.no_grad()
def density_panels(
    model: nn.Module, layers: Sequence[str], number: int, networks: int = 128
) -> list[dict[str, Any]]:
    """Returns the marginal densities of the noise dimensions of each layer that differ most from the prior.

    There are 4000 draws, or fewer if fewer networks than usual are averaged in a prediction.

    Args:
        model: Stochastic network.
        layers: Names of the layers.
        number: Number of dimensions of each layer.
        networks: Number of networks averaged in a prediction.
    """
    panels = []
    for layer in layers:
        noise = noise_layers(model)[layer]
        assert isinstance(noise, InputNoise)
        for dimension in _most_changed(noise, number):
            density = marginal(model, layer, dimension, min(4000, 32 * networks))
            panels.append(
                {
                    "title": f"{layer}, noise dimension {dimension}",
                    "x": round_values(density.grid),
                    "posterior": round_values(density.density),
                    "prior": round_values(density.prior),
                    "modes": density.modes,
                }
            )
    return panels


def kernel_density(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Estimates the joint density of two columns of draws on a grid ``[len(y), len(x)]``, by Gaussian kernels of Scott's width.

    >>> density = kernel_density(torch.randn(500), torch.randn(500), torch.linspace(-6, 6, 50), torch.linspace(-6, 6, 40))
    >>> density.shape, round(float(density.sum()) * (12 / 49) * (12 / 39), 2)
    (torch.Size([40, 50]), 1.0)
    """
    kernels = []
    for column, grid in ((first, x), (second, y)):
        width = column.std().clamp_min(1e-6) * len(column) ** (-1 / 6)
        distance = (grid[:, None] - column) / width
        kernels.append(torch.exp(-0.5 * distance.square()) / (width * (2 * torch.pi) ** 0.5))
    return kernels[1] @ kernels[0].T / len(first)


@torch.no_grad()
def density_pair(model: nn.Module, layer: str, nodes: int = 40, samples: int = 3000) -> dict[str, Any]:
    """Estimates the joint density of the two noise dimensions of a layer that differ most from the prior.

    Args:
        model: Stochastic network.
        layer: Name of the layer.
        nodes: Number of grid points along each axis.
        samples: Number of draws.
    """
    noise = noise_layers(model)[layer]
    assert isinstance(noise, InputNoise)
    first, second = _most_changed(noise, 2)
    device = noise.prior.distribution().mean.device
    draws = noise.draw((samples,), torch.Generator(device).manual_seed(1)).double().cpu()
    grids = []
    for column in (draws[:, first], draws[:, second]):
        margin = 2 * column.std().clamp_min(1e-6) * samples ** (-1 / 6)
        low, high = float(column.min() - margin), float(column.max() + margin)
        grids.append(torch.linspace(low, high, nodes, dtype=torch.float64))
    density = kernel_density(draws[:, first], draws[:, second], *grids)
    return {
        "title": f"{layer}, noise dimensions {first} and {second}",
        "x_label": f"dimension {first}",
        "y_label": f"dimension {second}",
        "x": round_values(grids[0]),
        "y": round_values(grids[1]),
        "density": round_values(density),
    }


def density_figure(parts: SeedResults, caption: str, **fields: Any) -> dict[str, Any]:
    """Returns the densities of the flow noise of the first seed. The caption counts the multimodal dimensions of all seeds."""
    modes = [panel["modes"] for part in parts.of("flow") for panel in part["densities"]]
    multimodal = sum(number > 1 for number in modes)
    caption = (
        f"Seed {parts.seeds[0]}: {caption} {multimodal} of the {len(modes)} dimensions considered over all seeds "
        f"{'has' if multimodal == 1 else 'have'} more than one mode."
    )
    data = {"panels": parts.content["flow", parts.seeds[0]]["densities"], **fields}
    return figure("density", "Learned noise distributions", caption, data)


def image_grid(images: Tensor, columns: int) -> list[Any]:
    """Arranges images ``[N, C, H, W]`` with values from 0 to 1 in one picture, row by row.

    >>> image_grid(torch.tensor([0.0, 1.0, 0.5, 0.25]).view(4, 1, 1, 1), 2)
    [[0.0, 1.0], [0.5, 0.25]]
    """
    images = images[: len(images) // columns * columns].float().clamp(0, 1)
    number, channels, height, width = images.shape
    rows = images.reshape(number // columns, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    picture = rows.reshape(number // columns * height, columns * width, channels)
    return round_values(picture[..., 0] if channels == 1 else picture, 2)


def grid_figures(
    title: str, caption: str, contents: Mapping[str, dict[str, Any]], name: str
) -> list[dict[str, Any]]:
    """Returns a figure with a grid of images for each label, or nothing if there are no images.

    Args:
        title: Title of the figure.
        caption: Caption of the figure.
        contents: SeedResults by label.
        name: Field of the parts that has the images.
    """
    panels = [{"title": label, "pixels": part[name]} for label, part in contents.items()]
    return [figure("images", title, caption, {"panels": panels})] if panels else []


# metrics that treat the Markov chains as the exact posterior
CHAIN_METRICS = ("gap", "per_example", "variation", "agreement", "excess")


# -------------------- statistics over seeds


def pluralize(number: int, noun: str = "seed") -> str:
    """Returns a number with its noun.

    >>> pluralize(1), pluralize(3, "split")
    ('1 seed', '3 splits')
    """
    return errors.pluralize(number, noun)


def ranking(
    parts: SeedResults, candidates: Iterable[Any], metric: str, higher: bool = False, form: str = ".3f"
) -> str:
    """Describes the three best means of a metric and the worst.

    Args:
        parts: Results by key and seed.
        candidates: Objects with a ``key`` and a ``label``.
        metric: Name of the metric.
        higher: Higher values are better.
        form: Format of the numbers.
    """
    order = best_first(parts, candidates, metric, higher)
    best, last = (format_means(parts, group, metric, form) for group in (order[:3], order[-1:]))
    return f"{best}; last {last}" if len(order) > 3 else best or "none"


@dataclass(frozen=True)
class PairedDifference:
    """Mean of ``first - second`` over seeds, its 95 % confidence interval by Student's t, and the p-value of the sign-flip test.

    Args:
        mean: Mean difference.
        low, high: Ends of the 95 % confidence interval.
        number: Number of seeds.
        p: Two-sided p-value by :func:`sign_flip_p_value`.
    """

    mean: float
    low: float
    high: float
    number: int
    p: float = 1.0

    @property
    def significant(self) -> bool:
        """True if the confidence interval excludes zero. Always False with one seed."""
        return self.low > 0 or self.high < 0

    @property
    def inconclusive(self) -> str:
        """Verdict on a difference that is not significant. One seed has no spread to test against."""
        return "not significant" if self.number > 1 else "undecided with one seed"

    def describe(self, digits: int = 4) -> str:
        """Returns the difference and its confidence interval as text."""
        if self.number < 2:
            return f"{self.mean:+.{digits}f} (one seed)"
        return f"{self.mean:+.{digits}f} (95 % CI {self.low:+.{digits}f} to {self.high:+.{digits}f})"


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    r"""Compares two rows seed by seed: :math:`\bar d \pm t_{0.975, n-1} \, s_d / \sqrt n`.

    Args:
        first, second: Values of the two rows, in the same order of seeds.

    >>> result = paired_difference([1.0, 2.0, 3.0], [0.5, 1.6, 2.4])
    >>> round(result.mean, 3), result.significant
    (0.5, True)
    """
    if len(first) != len(second):
        message = f"paired_difference needs the same seeds, got {len(first)} and {len(second)} values"
        raise FlowBNNError(message, kind="seeds", argument="second")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, number = statistics.fmean(differences), len(differences)
    if number < 2:
        return PairedDifference(mean, -math.inf, math.inf, number)
    from scipy.special import stdtrit  # imported here because it slows down every command

    reach = float(stdtrit(number - 1, 0.975)) * statistics.stdev(differences) / math.sqrt(number)
    return PairedDifference(mean, mean - reach, mean + reach, number, sign_flip_p_value(differences))


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Computes the exact two-sided p-value of the sign-flip test (Fisher, 1935).

    Under the null hypothesis both signs of every difference are equally likely. The p-value is the fraction of all ``2 ** n``
    choices of signs whose mean is at least as far from zero as the observed one. The test assumes only that differences are
    symmetric. The p-value cannot fall below ``2 / 2 ** n``, which is 0.25 with three seeds. With more than 16 differences, 100,000
    fixed random choices of signs are used instead of all.

    >>> sign_flip_p_value([1.0, 2.0, 3.0]), sign_flip_p_value([1.0, -2.0, 3.0])
    (0.25, 0.75)
    """
    observed = abs(sum(differences)) * (1 - 1e-12)
    if len(differences) > 16:
        signs = 2.0 * np.random.default_rng(0).integers(0, 2, (100_000, len(differences))) - 1.0
        extreme = np.abs(signs @ np.asarray(differences)) >= observed
        return float((extreme.sum() + 1) / (len(signs) + 1))  # the observed choice counts as one
    sums = [0.0]
    for difference in differences:
        sums = [total + sign * difference for total in sums for sign in (1, -1)]
    return sum(abs(total) >= observed for total in sums) / len(sums)


def have_converged(rhat: float | None) -> bool:
    """Returns True if the chains can be treated as the exact posterior. An infinite R-hat is stored as None."""
    return rhat is not None and rhat <= NoiseChains.max_rhat


def drop_unconverged(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers without those that were measured against chains that have not converged.

    >>> drop_unconverged({"gap": 1.0, "k": 0.3, "rhat": None}), drop_unconverged({"gap": 1.0, "k": 0.3, "rhat": 1.002})
    ({'k': 0.3, 'rhat': None}, {'gap': 1.0, 'k': 0.3, 'rhat': 1.002})
    """
    trusted = have_converged(numbers["rhat"])
    return {key: value for key, value in numbers.items() if trusted or not key.startswith(CHAIN_METRICS)}


def describe_convergence(chains: Iterable[tuple[str, float | None]]) -> str:
    """Describes the chains that have not converged.

    Args:
        chains: Name and R-hat of each chain.
    """
    unconverged = [
        f"{name} ({'infinite' if rhat is None else f'{rhat:.3f}'})"
        for name, rhat in chains
        if not have_converged(rhat)
    ]
    text = f"Excluded from the comparison because R-hat is above {NoiseChains.max_rhat}: {', '.join(unconverged)}."
    return text if unconverged else f"All chains have an R-hat of at most {NoiseChains.max_rhat}."


def mark_trial(results: dict[str, Any], generated: bool = False) -> dict[str, Any]:
    """Returns the fields that a trial run changes: title, answer and notes say what it is, and published values are removed.

    Args:
        results: Results of the study.
        generated: The data were generated instead of read.

    >>> mark_trial({"title": "LeNet on Fashion-MNIST", "rows": [], "figures": [], "notes": []}, generated=True)["title"]
    'LeNet on Fashion-MNIST (trial run with generated data)'
    """
    small = "generated data" if generated else "tiny settings"
    text = f"This is a trial run with {small}. Its numbers are not meaningful."
    rows = [
        {**row, "values": {key: {**cell, "published": None} for key, cell in row["values"].items()}}
        for row in results["rows"]
        if not row.get("cited")
    ]

    def without_published(panel: dict[str, Any]) -> dict[str, Any]:
        lines = [line for line in panel["lines"] if line.get("style") != "dashed"]
        return {**panel, "lines": lines, "levels": []}

    figures = []
    for entry in results["figures"]:
        data = entry["data"]
        # otherwise dashed lines and levels are computed here, such as closed forms
        if entry.get("published"):
            data = {**data, "panels": [without_published(panel) for panel in data["panels"]]}
        figures.append({**entry, "data": data, "published": None})
    return {
        "title": f"{results['title']} (trial run with {small})",
        "answer": text,
        "trial": "yes",
        "rows": rows,
        "figures": figures,
        "notes": [f"{text} Published values are not shown.", *results["notes"]],
    }
