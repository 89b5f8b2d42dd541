"""Random split of a loader into training data and held-out data."""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from flowbnn.batches import rows, split_batch, take
from flowbnn.errors import FlowBNNError


def split_loader(loader: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    """Splits a loader at random into a training loader and a validation loader.

    Args:
        loader: List of batches, :class:`~flowbnn.data.TensorLoader`, or ``DataLoader`` with a random or sequential sampler.
        fraction: Fraction of the data in the validation loader.
        seed: Seed of the split.

    >>> data = [(torch.randn(2), 1.0)] * 50
    >>> train, validation = split_loader(DataLoader(data, batch_size=8, shuffle=True), 0.2, seed=0)
    >>> len(train.dataset), len(validation.dataset), train.batch_size
    (40, 10, 8)
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(loader, list | tuple):
        return _split_batches(list(loader), fraction, generator)
    if hasattr(loader, "tensors") and hasattr(loader, "num_data"):  # flowbnn.data.TensorLoader
        return _split_tensor_loader(loader, fraction, generator)
    has_batch_sampler = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
    supported = has_batch_sampler and type(loader.sampler) in (RandomSampler, SequentialSampler)
    if not supported:
        raise no_held_out_data()
    train_index, validation_index = _split_indices(len(loader.dataset), fraction, generator)

    def subset_loader(index: Tensor, *names: str, **options: Any) -> DataLoader[Any]:
        options |= {
            name: getattr(loader, name) for name in ("batch_size", "collate_fn", "num_workers", *names)
        }
        return DataLoader(Subset(loader.dataset, index.tolist()), **options)

    shuffle = isinstance(loader.sampler, RandomSampler)
    names = ("generator", "drop_last", "pin_memory", "worker_init_fn")
    return subset_loader(train_index, *names, shuffle=shuffle), subset_loader(validation_index)


def no_held_out_data() -> FlowBNNError:
    """Returns the error for a loader that cannot be split."""
    message = "held-out data are needed, and this loader cannot be split; set validation="
    return FlowBNNError(message, argument="validation")


def _split_tensor_loader(loader: Any, fraction: float, generator: torch.Generator) -> tuple[Any, Any]:
    train_index, validation_index = _split_indices(len(loader.tensors[0]), fraction, generator)
    train, validation = copy(loader), copy(loader)
    for subset, index in ((train, train_index), (validation, validation_index)):
        subset.tensors = tuple(tensor[index.to(tensor.device)] for tensor in loader.tensors)
        subset.num_data = len(index)
    if loader.drop_last:
        train.num_data = len(train_index) // loader.batch_size * loader.batch_size
    validation.shuffle, validation.augment, validation.drop_last = False, None, False
    return train, validation


def _split_indices(number: int, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns sorted training and validation indices; raises FlowBNNError if there are fewer than two examples."""
    if number < 2:
        raise no_held_out_data()
    order = torch.randperm(number, generator=generator)
    count = min(number - 1, max(1, round(fraction * number)))
    return order[count:].sort().values, order[:count].sort().values


def _split_batches(batches: list[Any], fraction: float, generator: torch.Generator) -> tuple[Any, Any]:
    """Holds out batches if there are enough of them, else the last rows of the last batch."""
    if round(fraction * len(batches)):
        train, validation = _split_indices(len(batches), fraction, generator)
        return [batches[i] for i in train.tolist()], [batches[i] for i in validation.tolist()]
    total = sum(rows(split_batch(batch)[0]) for batch in batches)
    inputs, targets = split_batch(batches[-1])
    count = rows(inputs)
    cut = count - min(count - 1, max(1, round(fraction * total)))
    if targets is None or cut == count:
        raise no_held_out_data()
    head, tail = ((take(inputs, *ends), take(targets, *ends)) for ends in ((0, cut), (cut, count)))
    return [*batches[:-1], head], [tail]
