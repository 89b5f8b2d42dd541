"""Examples that are not batched, and their batches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from flowbnn.batches import as_tensors, split_labels
from flowbnn.errors import FlowBNNError


def is_example(value: Any) -> bool:
    """Returns True for one example of a list of examples, and False for a batch.

    The label of an example is one number or string: ``(x, y)`` and ``{"x": x, "labels": y}``. An example without a label is a mapping
    of single numbers. Tokens ``input_ids`` in one row are an example as well, whatever its labels, as in the datasets of Hugging Face.

    >>> is_example({"x": [0.5, 1.5], "labels": 1}), is_example({"x": [0.5, 1.5], "labels": [1, 0]}), is_example({"age": 31})
    (True, False, True)
    """
    if isinstance(value, Mapping):
        inputs, labels = split_labels(value)
        tokens = inputs.get("input_ids", [[]])  # a batch has a row of them for each example
        if (tokens.ndim == 1) if hasattr(tokens, "ndim") else all(map(_is_single, tokens)):
            return True
        return _is_single(inputs if labels is None else labels)
    if not isinstance(value, tuple | list) or len(value) < 2:
        return False
    is_row = all(isinstance(entry, Number | str) for entry in value)  # of a table
    return not is_row and _is_single(value[-1])


def _is_single(value: Any) -> bool:
    """Returns True for one number or string, and for a tuple or mapping of them."""
    if isinstance(value, Mapping | tuple):
        entries = list(value.values()) if isinstance(value, Mapping) else value
        return len(entries) > 0 and all(map(_is_single, entries))
    return isinstance(value, str | Number | np.generic) or getattr(value, "ndim", None) == 0


def collate(examples: list[Any]) -> Any:
    """Returns a batch of examples, as :func:`torch.utils.data.default_collate`.

    Raises:
        FlowBNNError: If the examples differ in their shapes or keys, or have entries such as None.
    """
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        text = f"the examples cannot be collated: {str(error).splitlines()[0]}"
        hint = "use DataLoader(examples, batch_size=64, collate_fn=...)"
        raise FlowBNNError(f"{text}; {hint}", kind="examples") from error


def collate_lists(examples: list[Any]) -> Any:
    """Returns a batch of examples like :func:`collate`. Lists of numbers are vectors.

    >>> collate_lists([{"x": [0.5, 1.5], "labels": 1}, {"x": [2.5, 3.5], "labels": 0}])
    {'x': tensor([[0.5000, 1.5000], [2.5000, 3.5000]]), 'labels': tensor([1, 0])}
    """
    return collate([as_tensors(example) for example in examples])


@contextmanager
def explain_lists(data: Any) -> Iterator[None]:
    """Context manager that adds advice to errors of the forward pass, if the data are a list that may have been meant as one batch.

    Args:
        data: Inputs of a prediction. A list is read as a loader.
    """
    try:
        yield
    except FlowBNNError as error:
        first = data[0] if isinstance(data, list) and data else None
        if error.kind not in ("network", "shape") or not isinstance(first, Tensor | Mapping | list):
            raise
        hint = "the list was read as batches; use DataLoader(examples, batch_size=64) for examples"
        if isinstance(first, list):
            hint = "[a, b] was read as inputs and targets; use predict(([a, b],)) if the network takes a list"
        if isinstance(first, Tensor) and first.ndim == 1:
            hint = "the list was read as batches; use torch.stack(examples) for examples"
        elif isinstance(first, Tensor):
            hint = "the list was read as batches; use predict(([a, b],)) if the network takes a list"
        text = str(error).partition("; ")[0]
        raise FlowBNNError(f"{text}; {hint}", **error.fields) from error
