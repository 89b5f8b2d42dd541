"""Scikit-learn's 8x8 digits, with one class put aside as novel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = ["Digits", "load_digits"]

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Digits:
    """Images ``[n, 1, 8, 8]`` in [0, 1] with their labels, in four parts.

    Args:
        train, validation, test: of the known digits, labelled from 0 to 8 in the order of :attr:`known`.
        novel: every image of the digit put aside, labelled by that digit.
        known: the digit that each label stands for.
    """

    train: Pair
    validation: Pair
    test: Pair
    novel: Pair
    known: tuple[int, ...]


def load_digits(novel: int = 8, seed: int = 0, train: float = 0.6, validation: float = 0.15) -> Digits:
    """The 1,797 digits of scikit-learn, which come with the package and need no network.

    Every class is split in the same shares, by an order drawn from ``seed``.

    Args:
        novel: the digit that training never sees.
        seed: of the split.
        train, validation: shares of the known images; the rest is the test.

    >>> digits = load_digits(novel=8)
    >>> [len(part[0]) for part in (digits.train, digits.validation, digits.test, digits.novel)]
    [974, 243, 406, 174]
    >>> digits.known
    (0, 1, 2, 3, 4, 5, 6, 7, 9)
    """
    if novel not in range(10):
        raise FlowBNNError(f"the novel digit is one of 0 to 9, not {novel}")
    if not (0 < train < 1 and 0 < validation < 1 and train + validation < 1):
        raise FlowBNNError(
            f"train and validation are shares that leave something for the test, not {train} and {validation}"
        )
    from sklearn.datasets import load_digits as read_digits

    found = read_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16.0
    labels = torch.from_numpy(found.target).long()
    known = tuple(digit for digit in range(10) if digit != novel)
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
    for digit in known:
        places = (labels == digit).nonzero().squeeze(1)
        places = places[torch.randperm(len(places), generator=generator)]
        first, second = round(train * len(places)), round((train + validation) * len(places))
        for name, piece in zip(parts, (places[:first], places[first:second], places[second:]), strict=True):
            parts[name].append(piece)
    names = torch.full((10,), -1).scatter_(0, torch.tensor(known), torch.arange(9))

    def pair(name: str) -> Pair:
        chosen = torch.cat(parts[name])
        chosen = chosen[torch.randperm(len(chosen), generator=generator)]
        return images[chosen], names[labels[chosen]]

    strange = labels == novel
    return Digits(pair("train"), pair("validation"), pair("test"), (images[strange], labels[strange]), known)
