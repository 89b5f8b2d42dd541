"""Facts about loaders that need no pass over them."""

from typing import Any

from flowbnn.batches.inputs import rows, split_weighted_batch
from flowbnn.errors import requirement_error, value_error


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
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    size = getattr(batch_sampler, "batch_size", None)
    if sampler is not None and isinstance(size, int) and hasattr(sampler, "__len__"):
        count = len(sampler)
        if getattr(batch_sampler, "drop_last", False):
            count = count // size * size
        return count * int(getattr(sampler, "num_replicas", 1))
    return None


def require_targets(targets: Any, argument: str = "loader") -> Any:
    """Returns targets. Raises FlowBNNError if there are none.

    Args:
        targets: Targets, or None.
        argument: Name of the argument that holds the data.
    """
    if targets is None:
        fields = {"kind": "loader", "argument": argument}
        raise requirement_error(argument, "(inputs, targets)", "inputs alone", **fields)
    return targets


def check_repeatable(loader: Any, argument: str = "loader") -> None:
    """Raises FlowBNNError if a loader is an iterator, which serves one pass only."""
    if hasattr(loader, "__next__"):
        hint = "use a DataLoader or list"
        raise value_error(argument, "repeatable", "an iterator", hint, kind="loader")
