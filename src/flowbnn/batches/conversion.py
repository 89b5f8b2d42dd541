"""Inputs and targets of a batch as tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flowbnn.batches.arrays import as_tensor, is_array
from flowbnn.batches.containers import is_leaf, needs_whole_batch
from flowbnn.errors import describe_value, value_error
from flowbnn.packing import pack_targets


def split_labels(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns a mapping without its labels, and the labels or None.

    >>> split_labels({"x": 1, "label": 2})
    ({'x': 1}, 2)
    """
    keys = ("labels", "label", "label_ids")  # in the batches of Hugging Face
    key = next((name for name in keys if name in batch), None)
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
        values = [as_tensors(value) for value in inputs]
        if isinstance(inputs, list):
            return values
        return type(inputs)(*values) if hasattr(inputs, "_fields") else tuple(values)
    return inputs


def as_targets(targets: Any) -> Any:
    """Returns targets as a tensor. Those of several heads, a tuple or mapping, are packed into one.

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
        return pack_targets({name: as_targets(value) for name, value in targets.items()})
    if isinstance(targets, list | tuple) and targets and not needs_whole_batch(targets):
        return pack_targets(tuple(as_targets(value) for value in targets))
    hint = "use DataLoader(examples, batch_size=64)" if isinstance(targets, int | float) else ""
    raise value_error("targets", "a tensor or an array", describe_value(targets), hint, kind="targets")
