"""Split of a loader into training data and held-out data.

The split is a function of the number of examples. All fits on the same data therefore hold out the same rows. A network that was
trained with the default ``validation=0.1`` has not seen the rows on which ``fb.fit`` verifies its noise.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from flowbnn.batches import Batch, has_row_axis, pick, rows, split_weighted_batch
from flowbnn.data import Columns
from flowbnn.errors import FlowBNNError, describe_value, pluralize


@dataclass(frozen=True)
class RowSplit:
    """Indices of the rows for training and of the held-out rows.

    Args:
        number: Number of examples.
        fraction: Fraction of the examples to hold out.
        seed: Seed of the order of the examples.
        fold: Index of the held-out block in this order. Blocks of different folds are disjoint.

    >>> RowSplit(10, 0.2, fold=1).held_out_rows.tolist(), len(RowSplit(10, 0.2).training_rows)
    ([5, 7], 8)
    """

    number: int
    fraction: float
    seed: int = 0
    fold: int = 0

    @property
    def count(self) -> int:
        """Number of held-out examples."""
        return min(self.number - 1, max(1, round(self.fraction * self.number)))

    @property
    def held_out_rows(self) -> Tensor:
        """Sorted indices of the held-out examples."""
        order = torch.randperm(self.number, generator=torch.Generator().manual_seed(self.seed))
        return order[self.fold * self.count : (self.fold + 1) * self.count].sort().values

    @property
    def training_rows(self) -> Tensor:
        """Sorted indices of all other examples."""
        mask = torch.ones(self.number, dtype=torch.bool)
        mask[self.held_out_rows] = False
        return mask.nonzero().flatten()


def cannot_split(loader: Any, number: int | None = None) -> FlowBNNError:
    """Returns the error for a loader that cannot be split.

    Args:
        loader: Loader.
        number: Number of its examples, if these are too few.
    """
    data = describe_value(loader) if number is None else pluralize(number, "example")
    text = f"{data} cannot be split; set validation= to held-out data"
    return FlowBNNError(text, kind="split", argument="validation")


def split_loader(loader: Any, fraction: float, seed: int = 0, fold: int = 0) -> tuple[Any, Any]:
    """Splits a loader at random into a training loader and a loader of held-out data.

    Both keep the batch size, the collate function and the workers of the loader. The training loader is shuffled as the loader is.

    Args:
        loader: List of batches, :class:`~flowbnn.data.TensorLoader`, or ``DataLoader`` with a random or sequential sampler.
        fraction: Fraction of the data to hold out.
        seed: Seed of the split.
        fold: Index of the held-out block, see :class:`RowSplit`.

    Raises:
        FlowBNNError: If the loader has another type or sampler, or fewer than two examples.

    >>> data = [(torch.randn(2), 1.0)] * 50
    >>> train, held_out = split_loader(DataLoader(data, batch_size=8, shuffle=True), 0.2)
    >>> len(train.sampler), len(held_out.sampler), train.batch_size
    (40, 10, 8)
    """
    if isinstance(loader, Columns) and isinstance(loader.loader, list | tuple):
        columns = {id(batch): loader.select(batch) for batch in loader.loader}
        return _split_batches([columns[id(batch)] for batch in loader.loader], fraction, seed, fold)
    if isinstance(loader, Columns):
        training, held_out = split_loader(loader.loader, fraction, seed, fold)
        return loader.with_loader(training), loader.with_loader(held_out)
    if isinstance(loader, list | tuple):
        return _split_batches(list(loader), fraction, seed, fold)
    if hasattr(loader, "tensors") and hasattr(loader, "num_data"):  # flowbnn.data.TensorLoader
        return _split_tensor_loader(loader, fraction, seed, fold)
    batches: Any = loader.batch_sampler if isinstance(loader, DataLoader) else None
    # loader.sampler is not used by a DataLoader with batch_sampler=, such as that of a Trainer
    sampler = batches.sampler if type(batches) is BatchSampler else None
    if not isinstance(sampler, RandomSampler | SequentialSampler):
        raise cannot_split(loader)
    number = len(loader.dataset)
    if number < 2 or len(sampler) != number or getattr(sampler, "replacement", False):
        raise cannot_split(loader)
    split = RowSplit(number, fraction, seed, fold)
    order: Any = split.training_rows.tolist()
    if isinstance(sampler, RandomSampler):
        order = SubsetRandomSampler(order, sampler.generator)
    held_out_rows = split.held_out_rows.tolist()
    return _with_sampler(loader, order, batches.drop_last), _with_sampler(loader, held_out_rows, False)


def _with_sampler(loader: Any, sampler: Any, drop_last: bool) -> Any:
    """Returns a copy of a ``DataLoader`` with another sampler, which keeps all other attributes and the class."""
    result = copy(loader)
    # DataLoader refuses to set these attributes, because its own constructor derives them from each other
    batches = BatchSampler(sampler, loader.batch_sampler.batch_size, drop_last)
    vars(result).update(sampler=sampler, batch_sampler=batches, drop_last=drop_last, _iterator=None)
    return result


def _split_tensor_loader(loader: Any, fraction: float, seed: int, fold: int) -> tuple[Any, Any]:
    """Splits the tensors of a :class:`~flowbnn.data.TensorLoader`."""
    number = len(loader.tensors[0])
    if number < 2:
        raise cannot_split(loader, number)
    split = RowSplit(number, fraction, seed, fold)
    train, held_out = copy(loader), copy(loader)
    for subset, index in ((train, split.training_rows), (held_out, split.held_out_rows)):
        subset.tensors = tuple(tensor[index.to(tensor.device)] for tensor in loader.tensors)
        subset.num_data = len(index)
    if loader.drop_last:
        train.num_data = len(split.training_rows) // loader.batch_size * loader.batch_size
        if not train.num_data:
            raise cannot_split(loader)
    held_out.shuffle, held_out.augment, held_out.drop_last = False, None, False
    return train, held_out


def _split_batches(batches: list[Any], fraction: float, seed: int, fold: int) -> tuple[Any, Any]:
    """Holds out rows of the batches. A batch that occurs several times loses the same rows each time."""
    distinct = {id(batch): batch for batch in batches}
    parts = {key: split_weighted_batch(batch) for key, batch in distinct.items()}
    if any(part.targets is None or not has_row_axis(part) for part in parts.values()):
        raise cannot_split(batches)
    sizes = {key: rows(part.targets) for key, part in parts.items()}
    number = sum(sizes.values())
    if number < 2:
        raise cannot_split(batches, number)
    mask = torch.zeros(number, dtype=torch.bool)
    mask[RowSplit(number, fraction, seed, fold).held_out_rows] = True
    masks = dict(zip(sizes, mask.split(list(sizes.values())), strict=True))

    def select(keys: Any, is_held_out: bool) -> list[Any]:
        index = {key: (masks[key] == is_held_out).nonzero().flatten() for key in masks}
        selected: list[Batch] = [pick(parts[key], index[key]) for key in keys if len(index[key])]
        return [batch if batch.weights is not None else batch[:2] for batch in selected]

    return select(map(id, batches), False), select(distinct, True)
