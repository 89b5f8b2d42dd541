"""Inputs that are neither tensors nor tuples or mappings of them: graphs of torch_geometric and packed sequences.

A container is passed to a network as one object. Its rows cannot be selected, so a container is always predicted as a whole.
"""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from flowbnn.batches.arrays import is_array

Leaf = Tensor | PackedSequence | str | int | float | None


def is_graph(value: Any) -> bool:
    """Returns True for a graph or a batch of graphs of torch_geometric (``Data``, ``HeteroData``, ``Batch``)."""
    return hasattr(value, "edge_stores") and hasattr(value, "to_dict")


def is_container(value: Any) -> bool:
    """Returns True for an object of several tensors that is one argument of a network."""
    return isinstance(value, PackedSequence) or is_graph(value)


def is_leaf(value: Any) -> bool:
    """Returns True for one argument of a network: a tensor, a container, a number, a string, a flag or None."""
    return isinstance(value, Leaf) or is_graph(value)


def container_rows(value: Any) -> int:
    """Returns the number of sequences, of graphs in a batch, or of nodes of one graph."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0]) if len(value.batch_sizes) else 0
    return int(
        value.num_graphs if hasattr(value, "ptr") or hasattr(value, "_slice_dict") else value.num_nodes
    )


def container_tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a container by name. The targets of a graph are the last."""
    if isinstance(value, PackedSequence):
        return [("data", value.data)]
    tensors = [(name, tensor) for name, tensor in _flatten("", value.to_dict()) if name != "y"]
    targets = graph_targets(value)
    return tensors if targets is None else [*tensors, ("y", targets)]


def _flatten(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Returns the tensors of nested mappings with the path to each."""
    result: list[tuple[str, Tensor]] = []
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Tensor):
            result.append((name, value))
        elif isinstance(value, Mapping):
            result += _flatten(name, value)
    return result


def graph_targets(value: Any) -> Tensor | None:
    """Returns the targets ``y`` of a graph, or None."""
    targets = getattr(value, "y", None)
    return targets if isinstance(targets, Tensor) else None


def convert_container(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of a container, with a function applied to its tensors.

    Args:
        value: Graph or packed sequence.
        function: Function that moves or converts a tensor.
    """
    if isinstance(value, PackedSequence):
        data = function(value.data)
        moved: Any = value.to(data.device)  # type: ignore[arg-type]  # with its indices; the lengths stay on the CPU
        return PackedSequence(data, moved.batch_sizes, moved.sorted_indices, moved.unsorted_indices)
    return copy(value).apply(function)


def graph_arguments(value: Any, names: list[str]) -> dict[str, Any] | None:
    """Returns the attributes of a graph that a network takes by name, or None if it takes the graph as one argument.

    Args:
        value: Graph of torch_geometric.
        names: Names of the arguments of ``forward``.
    """
    if "edge_index" not in names or not hasattr(value, "edge_index"):
        return None
    return {name: value[name] for name in names if name in value and value[name] is not None}


def needs_whole_batch(value: Any) -> bool:
    """Returns True for a container, and for a sequence without tensors such as a list of strings, whose rows cannot be selected."""
    if is_container(value):
        return True
    plain = isinstance(value, list | tuple) and len(value) > 0
    return plain and not any(
        isinstance(entry, Tensor | list | tuple | Mapping) or is_graph(entry) or is_array(entry)
        for entry in value
    )
