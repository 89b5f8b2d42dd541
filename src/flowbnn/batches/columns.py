"""Names of the columns of inputs. A posterior finds the columns that it was fitted to by their names, in any order."""

from collections.abc import Iterable, Mapping
from typing import Any

from flowbnn.batches.arrays import is_frame
from flowbnn.errors import quote_names, value_error

ColumnNames = Mapping[str, list[str]]  # by the path to a data frame, or by the path to a mapping and "{}"
ColumnOrders = Mapping[str, list[int]]


def column_names(inputs: Any, path: str = "") -> dict[str, list[str]]:
    """Returns the names of the columns of each data frame among inputs by the path to it, and the keys of each mapping.

    As in scikit-learn, names are used only if all of them are strings.

    >>> column_names(({"age": [31], "income": [2.1]}, [[0.5]]))
    {'0{}': ['age', 'income']}
    """
    entries: Iterable[tuple[Any, Any]] = ()
    label_path, labels = path, list[Any]()
    if is_frame(inputs):
        labels = list(inputs.columns)
    elif isinstance(inputs, Mapping):
        label_path, labels, entries = f"{path}{{}}", list(inputs), inputs.items()
    elif isinstance(inputs, tuple):
        entries = enumerate(inputs)
    names = {label_path: labels} if labels and all(isinstance(label, str) for label in labels) else {}
    for key, value in entries:
        names |= column_names(value, _join(path, key))
    return names


def column_orders(
    names: ColumnNames, expected: ColumnNames, argument: str = "inputs"
) -> dict[str, list[int]]:
    """Returns the positions of the expected columns, where their order differs.

    A mapping may have other keys, because arguments of a network may be optional.

    Args:
        names: Names of the columns of inputs.
        expected: Names of the columns at the fit.
        argument: Name of the argument that holds the inputs, for messages.

    Raises:
        FlowBNNError: If columns are missing or unknown.

    >>> column_orders({"": ["income", "age"]}, {"": ["age", "income"]})
    {'': [1, 0]}
    """
    orders = {}
    for path, columns in names.items():
        expected_names = expected.get(path, columns)
        missing = [name for name in expected_names if name not in columns]
        unknown = [name for name in columns if name not in expected_names]
        if columns == expected_names or (path.endswith("{}") and (missing or unknown)):
            continue
        if missing or unknown or len(columns) != len(expected_names):
            value = f"no {quote_names(missing)}" if missing else f"also {quote_names(unknown or columns)}"
            fields: dict[str, Any] = {"kind": "columns", "missing": missing, "unknown": unknown}
            raise value_error(
                argument, f"the columns {quote_names(expected_names, 8)} of the fit", value, **fields
            )
        orders[path] = [columns.index(name) for name in expected_names]
    return orders


def reorder_columns(inputs: Any, orders: ColumnOrders, path: str = "") -> Any:
    """Returns inputs with the columns of their tensors, and the keys of their mappings, in another order.

    Args:
        inputs: Tensor, or nested tuples and mappings of tensors.
        orders: Result of :func:`column_orders`.
        path: Path to the inputs.

    >>> reorder_columns({"income": 1, "age": 2}, {"{}": [1, 0]})
    {'age': 2, 'income': 1}
    """
    if not orders:
        return inputs
    if isinstance(inputs, Mapping):
        keys = list(inputs)
        keys = [keys[position] for position in orders.get(f"{path}{{}}", range(len(keys)))]
        return {key: reorder_columns(inputs[key], orders, _join(path, key)) for key in keys}
    if isinstance(inputs, tuple):
        return tuple(reorder_columns(value, orders, _join(path, key)) for key, value in enumerate(inputs))
    return inputs[:, orders[path]] if path in orders else inputs


def _join(path: str, key: Any) -> str:
    """Returns the path to an entry."""
    return f"{path}.{key}" if path else str(key)
