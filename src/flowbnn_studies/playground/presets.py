"""Data sets of the page, with known shapes: blobs, a ring, moons, XOR, spirals and curves."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, nearest
from flowbnn_studies.playground.points import RANGE, Task

MAX_NOISE = 0.6
NUM_HELD_OUT = 300
Shape = Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Preset:
    """Data set that the page can load.

    Args:
        name: Name in requests.
        label: Name on the page.
        task: Kind of points.
        hint: One sentence on what to look for.
        shape: Function from a number of points and a generator to points without noise: ``[N, 3]`` with classes, or ``[N, 2]``.
        noise: Default standard deviation of the noise on the coordinates, or on the values of a curve.
        number: Default number of training points.
    """

    name: str
    label: str
    task: Task
    hint: str
    shape: Shape
    noise: float
    number: int

    def draw(self, number: int, noise: float, generator: torch.Generator) -> list[list[float]]:
        """Returns noisy points as lists of numbers.

        Args:
            number: Number of points.
            noise: Standard deviation of the noise.
            generator: Generator of the draws.
        """
        rows = self.shape(number, generator).double()
        first = 0 if self.task == "classes" else 1
        deviation = torch.randn(number, 2 - first, generator=generator).double()
        rows[:, first:2] = (rows[:, first:2] + noise * deviation).clamp(-RANGE, RANGE)
        points = torch.round(rows, decimals=2).tolist()
        return [[x, y, int(rest[0])] if rest else [x, y] for x, y, *rest in points]


def make_preset(name: str, number: int | None = None, noise: float | None = None, seed: int = 0) -> Any:
    """Returns the points of a preset in the form of :meth:`Points.parse <flowbnn_studies.playground.points.Points.parse>`.

    Args:
        name: Name of the preset.
        number: Number of training points. None for the default of the preset.
        noise: Standard deviation of the noise. None for the default of the preset.
        seed: Seed of the points. The held-out points come from the same distribution.

    >>> document = make_preset("two-moons", number=100)
    >>> document["task"], len(document["train"]), len(document["held_out"])
    ('classes', 100, 300)
    """
    if name not in PRESETS:
        raise FlowBNNError(f"unknown preset {name!r}{nearest(str(name), PRESETS)}", argument="name")
    preset = PRESETS[name]
    generator = torch.Generator().manual_seed(seed)
    number, noise = preset.number if number is None else number, preset.noise if noise is None else noise
    train, held_out = (preset.draw(count, noise, generator) for count in (number, NUM_HELD_OUT))
    return {"task": preset.task, "train": train, "held_out": held_out}


def _uniform(number: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(number, generator=generator)


def _classes(number: int, count: int) -> Tensor:
    """Returns classes in turn, so that all are equally frequent."""
    return torch.arange(number) % count


def _with_classes(x: Tensor, y: Tensor, classes: Tensor) -> Tensor:
    return torch.stack([x, y, classes.to(x)], 1)


def two_clusters(number: int, generator: torch.Generator) -> Tensor:
    """Two points, one for each class."""
    classes = _classes(number, 2)
    side = 2.0 * classes - 1.0
    return _with_classes(1.1 * side, 0.8 * side, classes)


def three_clusters(number: int, generator: torch.Generator) -> Tensor:
    """Three points on a circle, one for each class."""
    classes = _classes(number, 3)
    angle = 2.0 * math.pi * classes / 3.0 + math.pi / 2.0
    return _with_classes(1.6 * angle.cos(), 1.6 * angle.sin(), classes)


def ring(number: int, generator: torch.Generator) -> Tensor:
    """A point in the middle of a circle."""
    classes = _classes(number, 2)
    angle = _uniform(number, 0.0, 2.0 * math.pi, generator)
    radius = 2.2 * classes
    return _with_classes(radius * angle.cos(), radius * angle.sin(), classes)


def two_moons(number: int, generator: torch.Generator) -> Tensor:
    """Two half circles that reach into each other."""
    classes = _classes(number, 2)
    angle = _uniform(number, 0.0, math.pi, generator)
    side = 1.0 - 2.0 * classes
    x = side * angle.cos() + classes - 0.5
    y = side * angle.sin() + 0.5 * classes - 0.25
    return _with_classes(1.5 * x, 1.5 * y, classes)


def xor(number: int, generator: torch.Generator) -> Tensor:
    """Four squares, of which opposite ones have the same class."""
    x, y = (_uniform(number, -2.2, 2.2, generator) for _ in range(2))
    return _with_classes(x, y, ((x > 0) == (y > 0)).long())


def spirals(number: int, generator: torch.Generator) -> Tensor:
    """Two spirals around the origin."""
    classes = _classes(number, 2)
    share = _uniform(number, 0.05, 1.0, generator).sqrt()
    angle = 1.4 * 2.0 * math.pi * share + math.pi * classes
    return _with_classes(2.6 * share * angle.cos(), 2.6 * share * angle.sin(), classes)


def step(number: int, generator: torch.Generator) -> Tensor:
    """A curve with one jump."""
    x = _uniform(number, -2.5, 2.5, generator)
    return torch.stack([x, torch.where(x < 0.0, -1.0, 1.0)], 1)


def gap(number: int, generator: torch.Generator) -> Tensor:
    """A wave without points in the middle."""
    x = _uniform(number, 0.9, 2.7, generator) * torch.where(_classes(number, 2) == 0, -1.0, 1.0)
    return torch.stack([x, torch.sin(2.0 * x)], 1)


def wave(number: int, generator: torch.Generator) -> Tensor:
    """A wave that grows."""
    x = _uniform(number, -2.5, 2.5, generator)
    return torch.stack([x, 0.4 * x + torch.sin(2.5 * x)], 1)


# fmt: off
PRESETS = {preset.name: preset for preset in (
    Preset("two-moons", "Two moons", "classes",
           "The classes are clear. How fast does certainty fade away from the points?", two_moons, 0.18, 160),
    Preset("two-clusters", "Two clusters", "classes",
           "The clusters overlap, so that even the best network must be uncertain between them.", two_clusters, 0.6, 120),
    Preset("three-clusters", "Three clusters", "classes", "Three classes meet in the middle.", three_clusters, 0.6, 150),
    Preset("ring", "Ring", "classes", "One class surrounds the other.", ring, 0.3, 160),
    Preset("xor", "XOR with noise", "classes", "No straight line separates the classes, and noise blurs the corners.", xor, 0.15, 200),
    Preset("spirals", "Spirals", "classes", "Hard for a small network: train it for 1,500 epochs or more.", spirals, 0.05, 240),
    Preset("gap", "Curve with a gap", "curve", "There are no points in the middle. Does the interval widen there?", gap, 0.1, 80),
    Preset("step", "Step", "curve", "A jump is hard for a smooth network.", step, 0.1, 80),
    Preset("wave", "Wave", "curve", "Does the network know that it knows nothing beyond the last points?", wave, 0.2, 80),
)}
# fmt: on
