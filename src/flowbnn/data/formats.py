"""Conversion of all data formats to a loader, or to inputs of a network.

Functions that read inputs and targets call :func:`as_loader`. Functions that predict call :func:`as_inputs`. Every public function
calls one of them first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flowbnn.batches import (
    Batch,
    ColumnNames,
    ColumnOrders,
    as_targets,
    as_tensors,
    column_names,
    column_orders,
    has_row_axis,
    is_batch,
    is_frame,
    is_graph,
    is_leaf,
    rebuild,
    reorder_columns,
    reported_size,
    rows,
    split_labels,
    split_weighted_batch,
    tensors_of,
)
from flowbnn.batches.arrays import as_tensor, is_array
from flowbnn.data.collation import collate, collate_lists, is_example
from flowbnn.data.tensor_loader import TensorLoader
from flowbnn.errors import FlowBNNError, check_shape, nearest
from flowbnn.options import checked

Names = int | str | list[int | str]
Column = Names | tuple[Names, ...] | Callable[[Any], Any]
Stage = Literal["train", "validation", "test"]
BATCH_SIZE = 64  # default number of examples in a training batch
READ_SIZE = 256  # examples of a Dataset that are read at once for a prediction


def as_loader(
    data: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    stage: Stage = "test",
    argument: str = "loader",
    columns: ColumnNames | None = None,
) -> Any:
    """Returns data of any format as a loader of batches, which :func:`~flowbnn.batches.split_batch` splits.

    * Tuple ``(inputs, targets)`` of tensors, arrays, data frames or lists of numbers. Inputs may be a tuple or a mapping. If there are
      more than two entries, the last one has the targets.
    * Mapping of tensors or arrays with a key ``labels`` or ``label``.
    * ``Dataset``, also of torch_geometric and Hugging Face, and a list of graphs.
    * List of examples ``(x, y)`` or ``{"x": x, "labels": y}``, each with a label that is one number.
    * One graph of torch_geometric with targets ``y``.
    * Lightning data module, whose loader for ``stage`` is used.
    * Loaders, lists of batches and other objects are returned unchanged.

    Args:
        data: Data of any format.
        batch_size: Number of examples in a batch, if the data are not a loader. The default is 64 for training. Data in memory are one
            batch otherwise.
        shuffle: If True, data that are not a loader are read in a new order at every pass.
        stage: Loader of a data module.
        argument: Name of the argument that holds the data, for messages.
        columns: Names of the columns of the inputs at the fit, see :func:`~flowbnn.networks.input_columns`. Data frames with these
            columns in another order are reordered.

    Raises:
        FlowBNNError: If the data are empty, are not numbers, have different numbers of inputs and targets, or have other columns.

    >>> import numpy as np
    >>> loader = as_loader((np.zeros((100, 3)), np.arange(100) % 2), batch_size=50)
    >>> [(inputs.shape, targets.shape) for inputs, targets in loader]
    [(torch.Size([50, 3]), torch.Size([50])), (torch.Size([50, 3]), torch.Size([50]))]
    """
    if _is_data_module(data):
        return _module_loader(data, stage)
    if isinstance(data, Dataset) or hasattr(data, "with_format") or is_list_of_examples(data):
        return _dataset_loader(data, batch_size, shuffle, argument)
    if is_array(data):
        return [(as_tensor(data),)]
    if not is_in_memory(data):
        data = list(data) if type(data) is tuple else data  # which as_inputs reads as a loader
        return data if columns is None else align_columns(data, columns)
    # strings in an unknown column would raise a less helpful error later
    column_orders(column_names(_inputs_of(data)), columns or {})
    loader = _memory_loader(data, batch_size, shuffle, argument)
    return loader if columns is None else align_columns(loader, columns)


def as_inputs(data: Any, argument: str = "inputs", columns: ColumnNames | None = None) -> Any:
    """Returns data of any format as one batch of inputs, or as a loader.

    Arrays, data frames and lists of numbers become tensors. A tuple holds the inputs of a network with several arguments. Labels inside
    a mapping are left out. Everything else is treated as in :func:`as_loader`.

    Args:
        data: Inputs, or data with inputs and targets.
        argument: Name of the argument that holds the data, for messages.
        columns: Names of the columns of the inputs at the fit, as in :func:`as_loader`.

    >>> as_inputs([[1.0, 2.0]]), as_inputs({"x": [1.0], "labels": [0]})
    (tensor([[1., 2.]]), {'x': tensor([1.])})
    """
    if isinstance(data, Tensor):
        return data
    values = data if isinstance(data, tuple) else [data]
    if isinstance(data, Mapping):
        data = split_labels(data)[0]
    elif isinstance(data, tuple) and any(map(_is_list_of_tensors, data)):
        return [(data, None)]  # one batch of inputs, with a list that is one argument of the network
    elif is_list_of_examples(data) or not all(is_leaf(value) or is_array(value) for value in values):
        return data if is_batch(data) else as_loader(data, argument=argument, columns=columns)
    orders = column_orders(column_names(data), columns or {}, argument)
    return reorder_columns(as_tensor(data) if is_array(data) else as_tensors(data), orders)


class BatchList(list[Any]):
    """List of batches with the names of the columns of their inputs.

    Args:
        batches: Batches.
        input_columns: Result of :func:`~flowbnn.batches.column_names` for the inputs.
    """

    def __init__(self, batches: Any, input_columns: ColumnNames) -> None:
        super().__init__(batches)
        self.input_columns = input_columns


def columns_of(loader: Any) -> ColumnNames:
    """Returns the names of the columns of the inputs of a loader, if it was made from data frames or mappings in memory."""
    return loader.input_columns if isinstance(loader, BatchList | TensorLoader | Columns) else {}


def align_columns(loader: Any, columns: ColumnNames) -> Any:
    """Returns a loader whose inputs have the given columns in the given order. Loaders without names are returned unchanged.

    Args:
        loader: Loader.
        columns: Names of the columns.

    Raises:
        FlowBNNError: If columns are missing or unknown.
    """
    orders = column_orders(columns_of(loader), columns)
    if not orders:
        return loader
    if isinstance(loader, BatchList):
        return BatchList([(reorder_columns(batch[0], orders), *batch[1:]) for batch in loader], columns)
    result = copy(loader)
    result.input_columns = columns
    if isinstance(loader, TensorLoader):
        result.tensors = (reorder_columns(loader.tensors[0], orders), *loader.tensors[1:])
    else:
        result.orders = orders
    return result


def _inputs_of(data: Any) -> Any:
    """Returns the inputs of data in memory, unchanged."""
    if isinstance(data, Mapping):
        return split_labels(data)[0]
    if isinstance(data, Batch) or not isinstance(data, tuple):
        return getattr(data, "inputs", None)
    return data[0] if len(data) == 2 else data[:-1]


def is_in_memory(data: Any) -> bool:
    """Returns True for a tuple of inputs and targets, a mapping of inputs with labels, or a graph, and False for a loader.

    A tuple of batches is a loader, because its last entry is neither a tensor nor an array.
    """
    if isinstance(data, Mapping | Batch) or is_graph(data):
        return True
    if not isinstance(data, tuple) or len(data) < 2:
        return False
    last = data[-1]
    if isinstance(last, tuple | list) and not is_array(last):  # targets of several heads, or a batch
        return isinstance(data[0], Tensor) and all(isinstance(value, Tensor) for value in last)
    if last is None:  # inputs without targets
        return isinstance(data[0], Tensor) or is_array(data[0])
    return isinstance(last, Tensor | Mapping) or is_array(last)


def _memory_loader(data: Any, batch_size: int | None, shuffle: bool, argument: str) -> Any:
    """Returns data in memory as a loader, which has the names of the columns of the inputs."""
    names, batch = column_names(_inputs_of(data)), split_weighted_batch(data)
    inputs, targets, weights = batch
    number = rows(inputs)
    if targets is None:
        return BatchList([(inputs,)], names)
    if not has_row_axis((inputs, targets)):
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            check_shape("targets", targets, (number, "..."), kind="length", argument=argument)
        return BatchList([(inputs, targets)], names)  # a graph, whose rows belong together
    if not number:
        raise FlowBNNError(f"the {argument} has no examples", kind="empty", argument=argument)
    if weights is None and batch_size is None and not shuffle:
        return BatchList([(inputs, targets)], names)
    loader: Any
    if weights is None and isinstance(inputs, Tensor) and isinstance(targets, Tensor):
        loader = TensorLoader(inputs, targets, batch_size=batch_size or _even_size(number), shuffle=shuffle)
    elif weights is None:
        loader = Columns((inputs, targets), batch_size=batch_size, shuffle=shuffle)
    else:
        loader = Columns(batch, weights=2, batch_size=batch_size, shuffle=shuffle)
    loader.input_columns = names
    return loader


def _even_size(number: int) -> int:
    """Returns the batch size that splits examples into batches of about 64, so that the last one is not much smaller."""
    return -(-number // max(1, round(number / BATCH_SIZE)))


def _dataset_loader(data: Any, batch_size: int | None, shuffle: bool, argument: str) -> Any:
    """Returns a ``DataLoader`` of a ``Dataset``."""
    size = batch_size or (BATCH_SIZE if shuffle else READ_SIZE)
    if isinstance(data, IterableDataset):
        return DataLoader(data, size)
    if not len(data):
        raise FlowBNNError(
            f"the {argument} is an empty {type(data).__name__}", kind="empty", argument=argument
        )
    if isinstance(data, TensorDataset) and type(data) is TensorDataset:
        return TensorLoader(*data.tensors, batch_size=size, shuffle=shuffle)
    if is_graph(data[0]):
        from torch_geometric.loader import DataLoader as GraphLoader

        return GraphLoader(data, batch_size=size, shuffle=shuffle)
    if hasattr(data, "with_format"):  # a dataset of Hugging Face
        data = data.with_format("torch")
    function = collate_lists if isinstance(data, list) else collate
    return DataLoader(data, size, shuffle=shuffle, collate_fn=function)


def is_list_of_examples(data: Any) -> bool:
    """Returns True for a list of graphs or of other examples that are not batched."""
    if not isinstance(data, list) or not data:
        return False
    return is_example(data[0]) or (is_graph(data[0]) and not hasattr(data[0], "ptr"))


def _is_list_of_tensors(data: Any) -> bool:
    """Returns True for a list of tensors, which is one argument of a network."""
    return isinstance(data, list) and bool(data) and all(isinstance(value, Tensor) for value in data)


def _is_data_module(data: Any) -> bool:
    """Returns True for a data module of Lightning."""
    return hasattr(data, "train_dataloader") and hasattr(data, "prepare_data") and hasattr(data, "setup")


def _module_loader(module: Any, stage: Stage) -> Any:
    """Returns the loader of a data module for a stage, or for the other held-out stage if there is none."""
    names = {"train": ("train",), "validation": ("val", "test"), "test": ("test", "val")}[stage]
    stages = {"train": "fit", "val": "validate", "test": "test"}
    module.prepare_data()
    for name in names:
        method = getattr(type(module), f"{name}_dataloader", None)
        if method is None or getattr(method, "__module__", "").startswith(
            ("lightning.", "pytorch_lightning.")
        ):
            continue  # not defined by the user
        module.setup(stages[name])
        return getattr(module, f"{name}_dataloader")()
    text = f"{type(module).__name__} defines no {names[0]}_dataloader"
    raise FlowBNNError(text, kind="loader", argument="loader")


class Columns:
    """Loader that names the inputs, the targets and the weights of the batches of another loader.

    A batch of three tensors has two inputs and one target by default. If the third entry is an index or a weight, name the columns:
    ``Columns(loader, inputs=0, targets=1)`` or ``Columns(loader, inputs=0, targets=1, weights=2)``.

    Args:
        data: Loader or ``Dataset``, whose batches are tuples, mappings or other objects, or a tuple or mapping of arrays, or a data
            frame.
        inputs: Position or key of the inputs. A tuple of positions is a tuple of inputs. A list of keys is a mapping with these keys.
            A function gets the whole batch. The default is the first entry. In a data frame, a name is a vector, and a list of names is
            a matrix of these columns. The default is all columns without targets and weights.
        targets: Position or key of the targets, a tuple or list of them, or a function. None has no targets.
        weights: Position or key of the weights of the examples ``[B]``, or a function. The log-likelihood of an example is multiplied
            by its weight. Weights with a mean of 1 keep the balance between data and prior.
        batch_size: Number of examples in a batch, if ``data`` is not a loader. The default is about 64 if the data are shuffled, or
            256.
        shuffle: If True, data that are not a loader are read in a new order at every pass.

    >>> import torch
    >>> batches = [(torch.zeros(4, 2), torch.arange(4), torch.arange(100, 104))]
    >>> [(inputs.shape, targets) for inputs, targets, _ in Columns(batches, inputs=0, targets=1)]
    [(torch.Size([4, 2]), tensor([0, 1, 2, 3]))]
    """

    structure: Any = None  # tuple or mapping in memory, whose tensors are in the loader
    input_columns: ColumnNames = MappingProxyType({})
    orders: ColumnOrders = MappingProxyType({})  # of the columns of the inputs, see align_columns

    @checked
    def __init__(
        self,
        data: Any,
        inputs: Column | None = None,
        targets: Column | None = 1,
        weights: Column | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
    ) -> None:
        self.columns = {"inputs": 0 if inputs is None else inputs, "targets": targets, "weights": weights}
        if is_frame(data) or isinstance(data, Mapping) or (isinstance(data, tuple) and is_in_memory(data)):
            values = self._read_frame(data, inputs) if is_frame(data) else as_tensors(data)
            size = batch_size or (_even_size(rows(values)) if shuffle else READ_SIZE)
            self.loader = TensorLoader(*tensors_of(values), batch_size=size, shuffle=shuffle)
            self.structure = values
        else:
            self.loader = as_loader(data, batch_size=batch_size, shuffle=shuffle)

    def _read_frame(self, frame: Any, inputs: Column | None) -> Batch:
        """Returns the inputs, the targets and the weights in a data frame. If ``inputs`` is None, they are all other columns."""
        other_columns = [self.columns[name] for name in ("targets", "weights")]
        used_names = {
            name
            for entry in other_columns
            for name in (entry if isinstance(entry, list | tuple) else [entry])
        }
        input_names = [name for name in frame.columns if name not in used_names] if inputs is None else inputs
        values = [
            _frame_entry(frame, name, column)
            for name, column in (self.columns | {"inputs": input_names}).items()
        ]
        self.input_columns = column_names(values[0])
        weights = values[2] if values[2] is None else as_tensor(values[2], "weights")
        return Batch(as_tensors(values[0]), as_targets(values[1]), weights)

    @property
    def has_weights(self) -> bool:
        """True if the batches have weights of examples."""
        return self.columns["weights"] is not None

    def select(self, batch: Any) -> Batch:
        """Returns the inputs, the targets and the weights of a batch."""
        if self.structure is not None:
            batch = rebuild(self.structure, iter(batch))
        if not isinstance(self.structure, Batch):  # not from a data frame
            batch = Batch(*(_entry(batch, name, column) for name, column in self.columns.items()))
        return Batch(reorder_columns(batch.inputs, self.orders), *batch[1:])

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            yield self.select(batch)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # attributes of loaders that the library reads: number of examples, generators and batch size
        if name in ("sampler", "batch_sampler", "generator", "batch_size"):
            return getattr(self.loader, name)
        return super().__getattribute__(name)  # raises the AttributeError of Python

    @property
    def num_data(self) -> int | None:
        """Number of examples in one pass, or None if it is unknown."""
        return reported_size(self.loader)

    def with_loader(self, loader: Any) -> "Columns":
        """Returns the same columns of another loader."""
        result = copy(self)
        result.loader = loader
        return result


def _entry(batch: Any, name: str, column: Any) -> Any:
    """Returns one or several entries of a batch, as tensors if they are arrays."""
    if column is None:
        return None
    if callable(column):
        return column(batch)
    if isinstance(column, list):
        return {key: _entry(batch, name, key) for key in column}
    if isinstance(column, tuple):
        return tuple(_entry(batch, name, key) for key in column)
    try:
        value = batch[column]
    except (KeyError, IndexError, TypeError):
        keys = batch.keys() if hasattr(batch, "keys") else range(len(batch))
        raise _unknown_column(column, name, keys) from None
    return as_tensor(value, name) if is_array(value) else value


def _frame_entry(frame: Any, name: str, column: Any) -> Any:
    """Returns one or several columns of a data frame, as it has them."""
    if column is None:
        return None
    if callable(column):
        return column(frame)
    if isinstance(column, tuple):
        return tuple(_frame_entry(frame, name, entry) for entry in column)
    labels = list(frame.columns)
    for label in column if isinstance(column, list) else [column]:
        if label not in labels:
            raise _unknown_column(label, name, labels)
    return frame[column]


def _unknown_column(column: Any, name: str, choices: Iterable[Any]) -> FlowBNNError:
    """Returns the error for a column that the data do not have."""
    text = f"unknown column {column!r} for {name}{nearest(str(column), [str(key) for key in choices])}"
    return FlowBNNError(text, kind="columns", argument=name)
