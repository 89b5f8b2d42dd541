"""Parts of a batch: inputs, targets and weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from flowbnn.batches.arrays import as_tensor, is_array
from flowbnn.batches.containers import graph_targets, is_container, is_graph, is_leaf, needs_whole_batch
from flowbnn.batches.rows import rows
from flowbnn.errors import FlowBNNError

LABELS = ("labels", "label", "label_ids")  # keys of the targets in the batches of Hugging Face


class Batch(NamedTuple):
    """Batch with named parts.

    Args:
        inputs: Inputs of the network.
        targets: Targets, or None.
        weights: Weight of the log-likelihood of every example, ``[B]``, or None.
    """

    inputs: Any
    targets: Any = None
    weights: Tensor | None = None


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Splits a batch into inputs and targets. Targets are None if the batch has none.

    * Tuple or list: the last entry has the targets, all others are inputs. Three tensors are therefore two inputs and the targets.
      Name the columns with :class:`~flowbnn.data.Columns` if the third is something else. A single entry has inputs alone.
    * Mapping with ``labels``, ``label`` or ``label_ids``: these are the targets, and are not passed to the network.
    * Graph of torch_geometric: ``y`` has the targets. The network gets the graph.
    * Everything else has inputs alone. Arrays become tensors.

    Args:
        batch: Batch of a loader. The inputs may be a tensor, a tuple (called as ``model(*inputs)``) or a mapping (called as
            ``model(**inputs)``).

    Raises:
        FlowBNNError: If the targets are no numbers, or if the batch has weights, which :func:`split_weighted_batch` returns.

    >>> import torch
    >>> split_batch((torch.zeros(1), torch.ones(1)))
    (tensor([0.]), tensor([1.]))
    >>> split_batch({"input_ids": torch.zeros(1), "labels": torch.ones(1)})
    ({'input_ids': tensor([0.])}, tensor([1.]))
    """
    inputs, targets, weights = split_weighted_batch(batch)
    if weights is not None:
        text = "this method cannot use weights of examples; remove weights= of flowbnn.data.Columns"
        raise FlowBNNError(text, kind="weights", argument="loader")
    return inputs, targets


def split_weighted_batch(batch: Any) -> Batch:
    """Returns the inputs, the targets and the weights of a batch, as :func:`split_batch`. Weights are None if there are none."""
    if isinstance(batch, Batch):
        return batch
    if type(batch) in (tuple, list) and len(batch) == 2:
        inputs, targets = batch
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return Batch(inputs, targets)
    if isinstance(batch, Mapping):
        inputs, targets = split_labels(batch)
        return Batch(as_tensors(inputs), as_targets(targets))
    if is_graph(batch):
        return Batch(batch, graph_targets(batch))
    if is_leaf(batch) or not isinstance(batch, list | tuple):
        return Batch(as_tensors(batch))
    if len(batch) <= 1:
        return Batch(as_tensors(batch[0]))
    inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
    return Batch(as_tensors(inputs), as_targets(batch[-1]))


def split_labels(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns a mapping without its labels, and the labels or None.

    >>> split_labels({"x": 1, "label": 2})
    ({'x': 1}, 2)
    """
    key = next((name for name in LABELS if name in batch), None)
    return {name: value for name, value in batch.items() if name != key}, None if key is None else batch[key]


def as_tensors(inputs: Any) -> Any:
    """Returns inputs with all arrays as tensors."""
    if isinstance(inputs, Tensor) or is_leaf(inputs):
        return inputs
    if is_array(inputs):
        is_text = isinstance(inputs, list) and any(isinstance(value, str) for value in inputs)
        return inputs if is_text else as_tensor(inputs)
    if isinstance(inputs, Mapping):
        return {name: as_tensors(value) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple) and not needs_whole_batch(inputs):
        return tuple(as_tensors(value) for value in inputs)
    return inputs


def as_targets(targets: Any) -> Any:
    """Returns targets as a tensor, or as a tuple or mapping of tensors for a network with several heads.

    Raises:
        FlowBNNError: If they are no numbers.
    """
    if targets is None or isinstance(targets, Tensor):
        return targets
    if isinstance(targets, tuple) and targets and isinstance(targets[0], str):
        targets = list(targets)  # as a DataLoader collates them
    if is_array(targets):
        return as_tensor(targets, "targets")
    if isinstance(targets, Mapping) and targets:
        return {name: as_targets(value) for name, value in targets.items()}
    if isinstance(targets, list | tuple) and targets and not needs_whole_batch(targets):
        return tuple(as_targets(value) for value in targets)
    kind = type(targets).__name__
    text = f"the targets of a batch must be a tensor or an array, not a {kind}"
    if isinstance(targets, int | float):
        text += "; use DataLoader(examples, batch_size=64) for a list of examples"
    raise FlowBNNError(text, kind="targets")


def is_batch(inputs: Any) -> bool:
    """Returns True for one batch of inputs, and False for a loader."""
    if isinstance(inputs, Tensor) or is_container(inputs) or hasattr(inputs, "keys"):
        return True
    if not isinstance(inputs, tuple) or not all(is_leaf(value) for value in inputs):
        return False
    return any(isinstance(value, Tensor) or is_container(value) for value in inputs)


def reported_size(loader: Any) -> int | None:
    """Returns the number of examples in one pass over a loader, over all processes, or None if the loader does not report it.

    Args:
        loader: ``DataLoader``, list of batches, or an object with an attribute ``num_data``.
    """
    number = getattr(loader, "num_data", None)
    if isinstance(number, int):
        return number
    if isinstance(loader, list | tuple):
        batches = [split_weighted_batch(batch) for batch in loader]
        return sum([rows(batch.inputs if batch.targets is None else batch.targets) for batch in batches])
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    size = getattr(batches, "batch_size", None)
    if sampler is not None and isinstance(size, int) and hasattr(sampler, "__len__"):
        count = len(sampler)
        if getattr(batches, "drop_last", False):
            count = count // size * size
        return count * int(getattr(sampler, "num_replicas", 1))
    return None


def check_repeatable(loader: Any, argument: str = "loader") -> None:
    """Raises FlowBNNError if a loader is an iterator, which serves one pass only."""
    if hasattr(loader, "__next__"):
        text = (
            f"{argument} is an iterator, which can be read only once; use a DataLoader or a list of batches"
        )
        raise FlowBNNError(text, kind="loader", argument=argument)
