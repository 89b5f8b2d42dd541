"""Data: a loader of tensors that lie in memory or on a GPU, toy data whose truth is known, and the digits of scikit-learn."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.options import Bounds, Count, NonNegative, Positive, checked

__all__ = [
    "CENTRES",
    "CLASSES",
    "NOISE",
    "SPAN",
    "Augment",
    "Digits",
    "Optimum",
    "TensorLoader",
    "best_possible",
    "clusters",
    "curve_points",
    "load_digits",
    "ring",
    "true_curve",
    "true_probability",
]

Augment = Callable[[Tensor, torch.Generator | None], Tensor]

_BLOCK, _MOST = 2**24, 64  # bytes, and batches, that are made together on a GPU


class TensorLoader:
    """Shuffled batches of tensors in memory: one index operation for a batch, where a ``DataLoader`` has one for an example.

    The tensors may lie on a GPU, as bytes for instance; ``augment`` and ``prepare`` then make of each batch's first
    tensor what the network takes, on that device.

    Args:
        tensors: with the examples on their first axis, all of one length and on one device; or arrays and lists of numbers.
        batch_size: examples in a batch; the last batch may be smaller.
        shuffle: a new order at every pass.
        generator: source of the orders and of the augmentation, kept in checkpoints; None takes torch's global one.
        augment: ``(images, generator) -> images`` on the first tensor of a batch, a random crop for instance.
        prepare: ``images -> images`` after that, such as a normalization.
        drop_last: leave out a last batch that is smaller; ``num_data`` counts what one pass gives.
        together: batches that are gathered, augmented and prepared in one go, which spares a GPU some thirty launches a batch. With
            a ``generator`` of the loader's own and whole passes the batches are the same as one by one. None is as many as make
            16 MiB on a GPU and one elsewhere; one also where ``augment`` or ``prepare`` is of your own making (anything but
            classes with the attribute ``row_wise``), since it may look at its whole batch.

    >>> loader = TensorLoader(torch.arange(5.0), torch.arange(5), batch_size=2)
    >>> len(loader), loader.num_data, [targets.tolist() for _, targets in loader]
    (3, 5, [[0, 1], [2, 3], [4]])
    >>> [targets.tolist() for _, targets in TensorLoader(torch.arange(5.0), torch.arange(5), batch_size=4, drop_last=True)]
    [[0, 1, 2, 3]]
    """

    @checked
    def __init__(
        self,
        *tensors: Any,
        batch_size: Count,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        augment: Augment | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        drop_last: bool = False,
        together: Count | None = None,
    ) -> None:
        self.tensors = tuple([_as_tensor(values) for values in tensors])
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        places = sorted({str(tensor.device) for tensor in self.tensors})
        number = shapes[0][0] if shapes and shapes[0] else -1
        self.num_data = number // batch_size * batch_size if drop_last else number
        problem = ""
        if number < 0 or any(shape[:1] != (number,) for shape in shapes):
            problem = f"takes tensors with as many examples each, on their first axis, not shapes {shapes}"
        elif any(tensor.layout is not torch.strided for tensor in self.tensors):
            problem = "takes dense tensors; use .to_dense()"
        elif len(places) > 1:
            problem = f"takes tensors on one device, not {', '.join(places)}"
        elif drop_last and not self.num_data:
            problem = (
                f"with drop_last leaves nothing of {pluralize(number, 'example')} in batches of {batch_size}"
            )
        if problem:
            raise FlowBNNError(f"a TensorLoader {problem}", kind="loader")
        self.batch_size, self.shuffle, self.generator = batch_size, shuffle, generator
        self.augment, self.prepare, self.drop_last, self.together = augment, prepare, drop_last, together

    def __len__(self) -> int:
        return -(-self.num_data // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Several batches are made at once and cut apart; what is random is drawn batch by batch, so their number does not matter."""
        order = self._order() if self.shuffle else None
        device, augment = self.tensors[0].device, cast("Any", self.augment)
        # does an example come out the same whatever else is in its batch? asked of the class itself: a subclass may do anything
        steps = (self.augment, self.prepare)
        separable = all(step is None or "row_wise" in vars(type(step)) for step in steps)
        length = self.batch_size * (self._block() if separable else 1)
        for begin in range(0, self.num_data, length):
            end = min(begin + length, self.num_data)
            numbers = [min(self.batch_size, end - start) for start in range(begin, end, self.batch_size)]
            places = slice(begin, end) if order is None else order[begin:end]
            block = [tensor[places] for tensor in self.tensors]
            if augment is not None and separable:
                draws = [augment.draw(number, device, self.generator) for number in numbers]
                block[0] = augment.apply(block[0], draws[0] if len(draws) == 1 else torch.cat(draws, -1))
            elif augment is not None:
                block[0] = augment(block[0], self.generator)
            if self.prepare is not None:
                block[0] = self.prepare(block[0])
            if len(numbers) == 1:
                yield tuple(block)
                continue
            yield from zip(*(tensor.split(self.batch_size) for tensor in block), strict=True)

    def _block(self) -> int:
        """How many batches are made together."""
        first = self.tensors[0]
        if self.together is not None or first.device.type != "cuda":
            return self.together or 1
        size = first[:1].numel() * self.batch_size * (4 if self.prepare is not None else first.element_size())
        return max(1, min(_MOST, _BLOCK // max(1, size)))

    def _order(self) -> Tensor:
        device = self.tensors[0].device
        source = device if self.generator is None else self.generator.device
        order = torch.randperm(len(self.tensors[0]), generator=self.generator, device=source)
        return order if source == device else order.to(device, non_blocking=True)


def _as_tensor(values: Any) -> Tensor:
    """Arrays and lists become tensors, of torch's default precision where they are real numbers."""
    if isinstance(values, Tensor):
        return values
    try:
        # torch refuses flipped arrays, and warns of those that are read only
        if isinstance(values, np.ndarray):
            values = np.require(values, requirements=("C", "W"))
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(values).__name__
        raise FlowBNNError(
            f"a TensorLoader takes tensors or arrays of numbers, not a {kind}: {error}"
        ) from None
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


# Four blobs in the plane, of two classes, whose true posterior is known.
CENTRES = ((-5.0, 3.0), (3.0, 3.0), (5.0, -3.0), (-3.0, -3.0))
CLASSES = (0, 0, 0, 1)


@checked
def clusters(
    number: Count, spread: Positive, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Points ``[number, 2]`` and their classes ``[number]``; each blob is equally likely.

    Args:
        number: how many points.
        spread: standard deviation of each blob, in both directions.
        generator: source of the draws; the same seed gives the same points.

    >>> points, targets = clusters(4, 1.0, torch.Generator().manual_seed(0))
    >>> points.shape, targets.shape
    (torch.Size([4, 2]), torch.Size([4]))
    """
    blob = torch.randint(len(CENTRES), (number,), generator=generator)
    points = torch.tensor(CENTRES)[blob] + spread * torch.randn(number, 2, generator=generator)
    return points, torch.tensor(CLASSES)[blob]


@checked
def true_probability(points: Tensor, spread: Positive) -> Tensor:
    r"""The exact probability of the second class, :math:`p(y = 1 \mid x)`, for points ``[..., 2]``.

    >>> true_probability(torch.tensor([-4.0, 0.0]), spread=1.0)  # halfway between two blobs
    tensor(0.5000)
    """
    if points.shape[-1:] != (2,) or not points.is_floating_point():
        given = f"{points.dtype} {list(points.shape)}"
        raise FlowBNNError(f"points must be real numbers [..., 2], not {given}", argument="points")
    return _second(_log_densities(points, spread))


@checked
def ring(
    number: Count,
    radius: Positive,
    generator: torch.Generator | None = None,
    thickness: Annotated[float, Bounds(ge=0, lt=1)] = 0.05,
) -> Tensor:
    """Points ``[number, 2]`` on a circle around the origin, far from all blobs where ``radius`` is large.

    Args:
        number: how many points.
        radius: of the circle.
        generator: source of the draws.
        thickness: how far radii stray from it, as a share of it.

    >>> points = ring(100, 20.0, torch.Generator().manual_seed(0))
    >>> bool(((points.norm(dim=-1) - 20).abs() <= 1).all())
    True
    """
    angle = 2 * math.pi * torch.rand(number, generator=generator)
    reach = radius * (1 + thickness * (2 * torch.rand(number, generator=generator) - 1))
    return torch.stack([reach * angle.cos(), reach * angle.sin()], -1)


class Optimum(NamedTuple):
    """What nobody can do better: accuracy, and negative log-likelihood in nats."""

    accuracy: float
    nll: float


@checked
def best_possible(spread: Positive, nodes: Count = 801) -> Optimum:
    r"""Accuracy and NLL of the exact posterior, :math:`\int \max_c p(x, c)\,dx` and :math:`H[y \mid x]`, by quadrature.

    The trapezoid rule on a square that holds all but :math:`10^{-13}` of the mass; for so smooth a density its error is
    below :math:`10^{-4}` in the accuracy (whose integrand has a kink) and far below in the entropy.

    >>> best = best_possible(1.95)
    >>> round(best.accuracy, 3), round(best.nll, 3)
    (0.961, 0.099)
    """
    reach = max(abs(value) for centre in CENTRES for value in centre) + 7.5 * spread
    axis = torch.linspace(-reach, reach, nodes, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    logs = _log_densities(points, spread)
    density = logs.exp().sum(-1) * float(axis[1] - axis[0]) ** 2
    one = _second(logs)
    entropy = -(torch.special.xlogy(one, one) + torch.special.xlogy(1 - one, 1 - one))
    return Optimum(float((density * torch.maximum(one, 1 - one)).sum()), float((density * entropy).sum()))


def _log_densities(points: Tensor, spread: float) -> Tensor:
    """Logs of the four joint densities ``[..., 4]``."""
    centres = torch.tensor(CENTRES, dtype=points.dtype, device=points.device)
    square = (points.unsqueeze(-2) - centres).square().sum(-1)
    return -square / (2 * spread**2) - math.log(2 * math.pi * spread**2 * len(CENTRES))


def _second(logs: Tensor) -> Tensor:
    """The probability of the second class, from the joint densities."""
    return torch.softmax(logs, -1)[..., [index for index, label in enumerate(CLASSES) if label == 1]].sum(-1)


# A curve whose noise lies within the sine waves.
NOISE = 0.02
SPAN = (0.0, 0.5)


@checked
def true_curve(inputs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    r"""The curve at ``inputs``, each with its own :math:`\varepsilon`, zero unless given.

    >>> true_curve(torch.tensor([0.0, 0.25, 0.5]))  # 0, 0.25 + 0.3, 0.5
    tensor([0.0000, 0.5500, 0.5000])
    """
    if isinstance(noise, Tensor) and noise.shape not in ((), inputs.shape):
        shapes = f"noise must have the shape of inputs, {list(inputs.shape)}, not {list(noise.shape)}"
        raise FlowBNNError(shapes, argument="noise")
    moved = inputs + noise
    if bool((moved.abs() > 1e30).any()):
        raise FlowBNNError("inputs beyond 1e30 have no place on the curve", kind="value", argument="inputs")
    return moved + 0.3 * torch.sin(2 * math.pi * moved) + 0.3 * torch.sin(4 * math.pi * moved)


@checked
def curve_points(
    number: Count,
    generator: torch.Generator | None = None,
    *,
    span: tuple[float, float] = SPAN,
    noise: NonNegative = NOISE,
) -> tuple[Tensor, Tensor]:
    r"""Points of the curve, ``[number, 1]`` each, with inputs spread evenly at random over ``span``.

    Args:
        number: how many.
        generator: source of the draws; the same seed gives the same points.
        span: where the inputs lie.
        noise: standard deviation of :math:`\varepsilon`.

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
    """Images with their labels, in four parts; :func:`load_digits` gives images ``[n, 1, 8, 8]`` in [0, 1].

    Args:
        train, validation, test: of the known classes, labelled from 0 in the order of :attr:`known`.
        novel: images of the classes put aside, labelled by them.
        known: the class (the digit) that each label stands for.
    """

    train: Pair
    validation: Pair
    test: Pair
    novel: Pair
    known: tuple[int, ...]


@checked
def load_digits(novel: Annotated[int, Bounds(ge=0, le=9)] = 8, seed: int = 0) -> Digits:
    """The 1,797 digits of scikit-learn (extra ``studies``), which come with the package and need no network.

    Every class is split alike, by an order drawn from ``seed``: 60 % to train, 15 % to validate, the rest to test.

    Args:
        novel: the digit that training never sees.
        seed: of the split.

    >>> digits = load_digits(novel=8)
    >>> [len(part[0]) for part in (digits.train, digits.validation, digits.test, digits.novel)]
    [974, 243, 406, 174]
    >>> digits.known
    (0, 1, 2, 3, 4, 5, 6, 7, 9)
    """
    try:
        from sklearn.datasets import load_digits as read_digits
    except ImportError:
        raise FlowBNNError(
            "the digits come with scikit-learn: pip install flowbnn[studies]", kind="missing package"
        ) from None
    bunch = read_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16.0
    labels = torch.from_numpy(bunch.target).long()
    known = tuple(digit for digit in range(10) if digit != novel)
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
    for digit in known:
        places = (labels == digit).nonzero().squeeze(1)
        places = places[torch.randperm(len(places), generator=generator)]
        first, second = round(0.6 * len(places)), round(0.75 * len(places))
        for name, piece in zip(parts, (places[:first], places[first:second], places[second:]), strict=True):
            parts[name].append(piece)
    names = torch.full((10,), -1).scatter_(0, torch.tensor(known), torch.arange(9))

    def pair(name: str) -> Pair:
        chosen = torch.cat(parts[name])
        chosen = chosen[torch.randperm(len(chosen), generator=generator)]
        return images[chosen], names[labels[chosen]]

    strange = labels == novel
    return Digits(pair("train"), pair("validation"), pair("test"), (images[strange], labels[strange]), known)
