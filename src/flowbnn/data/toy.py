"""Toy data with a known distribution, and the digits of scikit-learn."""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import check_entries, check_shape, optional_import
from flowbnn.options import Bounds, Count, NonNegative, Positive, checked

# centres and classes of four Gaussian blobs in the plane, whose true class probabilities are known
CENTRES = ((-5.0, 3.0), (3.0, 3.0), (5.0, -3.0), (-3.0, -3.0))
CLASSES = (0, 0, 0, 1)


@checked
def clusters(
    number: Count, spread: Positive, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draws points from four equally likely Gaussian blobs of two classes.

    Args:
        number: Number of points.
        spread: Standard deviation of each blob, in both directions.
        generator: Generator of the draws.

    Returns:
        Points ``[number, 2]`` and their classes ``[number]``.

    >>> points, targets = clusters(4, 1.0, torch.Generator().manual_seed(0))
    >>> points.shape, targets.shape
    (torch.Size([4, 2]), torch.Size([4]))
    """
    blob = torch.randint(len(CENTRES), (number,), generator=generator)
    points = torch.tensor(CENTRES)[blob] + spread * torch.randn(number, 2, generator=generator)
    return points, torch.tensor(CLASSES)[blob]


@checked
def true_probability(points: Tensor, spread: Positive) -> Tensor:
    r"""Returns the exact probability of the second class, :math:`p(y = 1 \mid x)`, under :func:`clusters`.

    Args:
        points: Points ``[..., 2]``.
        spread: Standard deviation of each blob.

    >>> true_probability(torch.tensor([-4.0, 0.0]), spread=1.0)  # halfway between two blobs
    tensor(0.5000)
    """
    check_shape("points", points, ("...", 2))
    return _second_class(_log_densities(points, spread))


@checked
def ring(
    number: Count,
    radius: Positive,
    generator: torch.Generator | None = None,
    thickness: Annotated[float, Bounds(ge=0, lt=1)] = 0.05,
) -> Tensor:
    """Draws points ``[number, 2]`` near a circle around the origin, which is far from all blobs if its radius is large.

    Args:
        number: Number of points.
        radius: Radius of the circle.
        generator: Generator of the draws.
        thickness: Largest relative deviation from the radius.

    >>> points = ring(100, 20.0, torch.Generator().manual_seed(0))
    >>> bool(((points.norm(dim=-1) - 20).abs() <= 1).all())
    True
    """
    angle = 2 * math.pi * torch.rand(number, generator=generator)
    distance = radius * (1 + thickness * (2 * torch.rand(number, generator=generator) - 1))
    return torch.stack([distance * angle.cos(), distance * angle.sin()], -1)


class Optimum(NamedTuple):
    """Scores of the best possible classifier.

    Args:
        accuracy: Accuracy.
        nll: Negative log-likelihood (NLL) in nats.
    """

    accuracy: float
    nll: float


@checked
def best_possible(spread: Positive, nodes: Count = 801) -> Optimum:
    r"""Computes accuracy and NLL of the exact class probabilities of :func:`clusters` by quadrature.

    They are :math:`\int \max_c p(x, c)\,dx` and :math:`H[y \mid x]`. The trapezoid rule is used on a square with all but
    :math:`10^{-13}` of the mass. Its error is below :math:`10^{-4}` for the accuracy, whose integrand has a kink, and far smaller for
    the entropy.

    Args:
        spread: Standard deviation of each blob.
        nodes: Number of quadrature nodes per axis.

    >>> best = best_possible(1.95)
    >>> round(best.accuracy, 3), round(best.nll, 3)
    (0.961, 0.099)
    """
    limit = max(abs(value) for centre in CENTRES for value in centre) + 7.5 * spread
    axis = torch.linspace(-limit, limit, nodes, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    logs = _log_densities(points, spread)
    density = logs.exp().sum(-1) * float(axis[1] - axis[0]) ** 2
    second = _second_class(logs)
    entropy = -(torch.special.xlogy(second, second) + torch.special.xlogy(1 - second, 1 - second))
    accuracy = (density * torch.maximum(second, 1 - second)).sum()
    return Optimum(float(accuracy), float((density * entropy).sum()))


def _log_densities(points: Tensor, spread: float) -> Tensor:
    """Returns the logarithms ``[..., 4]`` of the joint densities of points and blobs."""
    centres = torch.tensor(CENTRES, dtype=points.dtype, device=points.device)
    square = (points.unsqueeze(-2) - centres).square().sum(-1)
    return -square / (2 * spread**2) - math.log(2 * math.pi * spread**2 * len(CENTRES))


def _second_class(logs: Tensor) -> Tensor:
    """Returns the probability of the second class from the logarithms of the joint densities."""
    return torch.softmax(logs, -1)[..., [index for index, label in enumerate(CLASSES) if label == 1]].sum(-1)


SPAN = (0.0, 0.5)  # input range of the curve of Blundell et al. (2015)


@checked
def true_curve(inputs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    r"""Evaluates the curve :math:`y = u + 0.3 \sin 2 \pi u + 0.3 \sin 4 \pi u` with :math:`u = x + \varepsilon`.

    Args:
        inputs: Inputs :math:`x`.
        noise: Noise :math:`\varepsilon` inside the sine waves.

    >>> true_curve(torch.tensor([0.0, 0.25, 0.5]))  # 0, 0.25 + 0.3, 0.5
    tensor([0.0000, 0.5500, 0.5000])
    """
    if isinstance(noise, Tensor) and noise.ndim:
        check_shape("noise", noise, inputs.shape)
    shifted = inputs + noise
    check_entries("inputs", shifted, ~(shifted.abs() > 1e30), "at most 1e30", kind="value")
    return shifted + 0.3 * torch.sin(2 * math.pi * shifted) + 0.3 * torch.sin(4 * math.pi * shifted)


@checked
def curve_points(
    number: Count,
    generator: torch.Generator | None = None,
    *,
    span: tuple[float, float] = SPAN,
    noise: NonNegative = 0.02,
) -> tuple[Tensor, Tensor]:
    r"""Draws inputs and targets ``[number, 1]`` of :func:`true_curve`, with inputs uniform over ``span``.

    Args:
        number: Number of points.
        generator: Generator of the draws.
        span: Range of the inputs.
        noise: Standard deviation of :math:`\varepsilon`.

    >>> inputs, targets = curve_points(5, torch.Generator().manual_seed(0))
    >>> inputs.shape, targets.shape, bool(((inputs >= 0) & (inputs <= 0.5)).all())
    (torch.Size([5, 1]), torch.Size([5, 1]), True)
    """
    low, high = span
    inputs = low + (high - low) * torch.rand(number, 1, generator=generator)
    return inputs, true_curve(inputs, noise * torch.randn(number, 1, generator=generator))


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Digits:
    """Images and labels of the digits, split into four sets.

    Args:
        train: Training images and labels of the known classes, labelled by their index in :attr:`known`.
        validation: Validation images and labels of the known classes.
        test: Test images and labels of the known classes.
        novel: Images and labels of the novel class.
        known: Class (digit) of each label.
    """

    train: Pair
    validation: Pair
    test: Pair
    novel: Pair
    known: tuple[int, ...]


@checked
def load_digits(novel: Annotated[int, Bounds(ge=0, le=9)] = 8, seed: int = 0) -> Digits:
    """Loads the 1,797 digits of scikit-learn (extra ``studies``), which need no download.

    Every class is shuffled by ``seed`` and split into 60 % training, 15 % validation and 25 % test images ``[n, 1, 8, 8]`` in [0, 1].

    Args:
        novel: Digit that is left out of the training.
        seed: Seed of the split.

    >>> digits = load_digits(novel=8)
    >>> [len(images) for images, _ in (digits.train, digits.validation, digits.test, digits.novel)]
    [974, 243, 406, 174]
    >>> digits.known
    (0, 1, 2, 3, 4, 5, 6, 7, 9)
    """
    with optional_import("load_digits", "scikit-learn", "flowbnn[studies]"):
        from sklearn.datasets import load_digits as read_digits
    bunch = read_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16.0
    labels = torch.from_numpy(bunch.target).long()
    known = tuple(digit for digit in range(10) if digit != novel)
    generator = torch.Generator().manual_seed(seed)
    indices: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
    for digit in known:
        rows = (labels == digit).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        first, second = round(0.6 * len(rows)), round(0.75 * len(rows))
        for name, split in zip(indices, (rows[:first], rows[first:second], rows[second:]), strict=True):
            indices[name].append(split)
    label_of_digit = torch.full((10,), -1).scatter_(0, torch.tensor(known), torch.arange(9))

    def select(name: str) -> Pair:
        rows = torch.cat(indices[name])
        rows = rows[torch.randperm(len(rows), generator=generator)]
        return images[rows], label_of_digit[labels[rows]]

    is_novel = labels == novel
    return Digits(
        select("train"), select("validation"), select("test"), (images[is_novel], labels[is_novel]), known
    )
