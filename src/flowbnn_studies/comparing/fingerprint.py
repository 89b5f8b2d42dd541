"""What data a comparison was made on, in a few numbers that do not depend on the order of the examples."""

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.posterior.batches import is_batch, rows, split_batch, tensors_of
from flowbnn.training.randomness import Randomness, loader_generators, seed_all

__all__ = ["fingerprint", "weights_of"]

DIGITS = 9


def fingerprint(loader: Any, inputs: bool = True) -> dict[str, Any] | None:
    """The number of examples, their shapes and the sums of their values, as plain values; None for no data.

    The loader is read once from a fixed seed, so that one that shuffles and drops its last batch gives the same examples every
    time; all generators are then put back.

    Args:
        loader: of batches, or one batch.
        inputs: whether the inputs count with their values; those of a loader that augments at random cannot.

    >>> x, y = torch.randn(6, 3), torch.arange(6)
    >>> whole, turned = [(x, y)], [(x[3:], y[3:]), (x[:3], y[:3])]
    >>> fingerprint(whole) == fingerprint(turned), fingerprint(whole) == fingerprint([(-x, y)])
    (True, False)
    """
    if loader is None:
        return None
    generators = loader_generators(loader)
    randomness = Randomness(generators)
    before = randomness.state()
    try:
        seed_all(0)
        for generator in generators:
            generator.manual_seed(0)
        return _read([loader] if is_batch(loader) else loader, inputs)
    except FlowBNNError:
        return None  # no data to train on or to predict: the methods say why
    finally:
        randomness.restore(before)


def weights_of(network: nn.Module) -> dict[str, str]:
    """What every parameter and buffer of a network is: its shape, and a digest of its values.

    >>> first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> weights_of(first) == weights_of(second), weights_of(first) == weights_of(first)
    (False, True)
    """
    found = {}
    for name, value in (*network.named_parameters(), *network.named_buffers()):
        whole = value.detach().to_dense() if value.is_sparse else value.detach()
        numbers = whole.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found[name] = f"{list(value.shape)} {hashlib.sha256(numbers).hexdigest()[:16]}"
    return found


def _read(batches: Iterable[Any], inputs: bool) -> dict[str, Any]:
    count, shapes, sums = 0, set(), _Sums()
    for batch in batches:
        given, targets = split_batch(batch)
        parts, truth = list(tensors_of(given)), list(tensors_of(targets))
        count += rows(given)
        shapes.add(str([[list(part.shape[1:]) for part in some] for some in (parts, truth)]))
        if inputs:
            for number, part in enumerate(parts):
                sums.add(f"inputs {number}", _values(part))
        for number, part in enumerate(truth):
            sums.add(f"targets {number}", _values(part))
        if (
            inputs and parts and truth and len(parts[0]) == len(truth[0])
        ):  # which target belongs to which input
            sums.add("both", _values(parts[0]).mean(1, keepdim=True) * _values(truth[0]))
    return {"examples": count, "shapes": sorted(shapes), **sums.told()}


def _values(tensor: Tensor) -> Tensor:
    """Numbers in double precision, a row for each example."""
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = (
        tensor.cpu().double().reshape(len(tensor), -1) if tensor.ndim else tensor.cpu().double().view(1, 1)
    )
    return torch.where(values.isfinite(), values, 0.0)


class _Sums:
    """Sums of values, of their sizes and of their squares, by name."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        new = torch.stack([values.sum(), values.abs().sum(), values.square().sum()])
        self.found[name] = self.found[name] + new if name in self.found else new

    def told(self) -> dict[str, list[float]]:
        """The sums and the sums of squares, so far as the order of summation does not change them."""
        found = {}
        for name, (plain, size, squares) in ((name, sums.tolist()) for name, sums in self.found.items()):
            found[name] = [_rounded(plain, size), _rounded(squares, squares)]
        return found


def _rounded(value: float, size: float) -> float:
    """To some digits of ``size``: a sum of values of both signs has no more than those."""
    if not 0.0 < size < math.inf:
        return 0.0
    return round(value, DIGITS - 1 - math.floor(math.log10(size)))
