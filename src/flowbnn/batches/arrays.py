"""Conversion of arrays, data frames and lists of numbers to tensors."""

from collections.abc import Sequence
from contextlib import suppress
from numbers import Integral, Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, describe_value, nonfinite_error, value_error


def is_array(values: Any) -> bool:
    """Returns True for a numpy array, a pandas Series or DataFrame, and a list of numbers, of lists of numbers or of arrays.

    >>> is_array(np.zeros(3)), is_array([[0.0, 1.0]]), is_array(torch.zeros(3)), is_array([torch.zeros(3)])
    (True, True, False, False)
    """
    if isinstance(values, Tensor):
        return False
    if isinstance(values, np.ndarray):
        return True
    if isinstance(values, list):
        first: Any = values
        for _ in range(64):  # the most axes of an array; a list may hold itself
            if not isinstance(first, list | tuple) or not len(first):
                break
            first = first[0]
            if isinstance(first, np.ndarray) and first.ndim:
                return all(isinstance(value, np.ndarray) for value in values)
        return isinstance(first, Number | str) or (isinstance(first, np.ndarray) and not first.ndim)
    return hasattr(values, "__array__") and hasattr(values, "shape") and len(values.shape) > 0


def is_frame(values: Any) -> bool:
    """Returns True for a data frame of pandas or polars."""
    return hasattr(values, "columns") and hasattr(values, "dtypes")


def as_tensor(values: Any, name: str = "inputs", *, check: bool = True) -> Tensor:
    """Returns an array, a data frame or a list of numbers as a tensor. Tensors are returned unchanged.

    Real numbers keep their precision. A data frame of inputs becomes real numbers, whatever the types of its columns. A single column
    of integer targets becomes a vector of classes, and boolean targets become the classes 0 and 1.

    Args:
        values: Values with the examples on the first axis.
        name: Name of the values in messages, ``"inputs"`` or ``"targets"``.
        check: If True, raises an error if real values are missing or infinite.

    Raises:
        FlowBNNError: If the values are no numbers, or if some are missing. The message has the row and the column.

    >>> as_tensor(np.array([1, 2], dtype=np.uint16)), as_tensor([[0.5], [1.5]]).dtype
    (tensor([1, 2]), torch.float32)
    """
    if isinstance(values, Tensor):
        return values
    columns = values.columns if is_frame(values) else None
    array = _plain_array(values, name) if columns is None else _frame_array(values, columns, name)
    if array.dtype.kind == "f" and check:
        _check_missing(array, name, columns)
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "f" and size > 8:
        array = array.astype(np.float64)
    elif (kind == "u" and size > 1) or (kind == "b" and name == "targets"):
        array = array.astype(np.int64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # torch refuses flipped arrays and warns about read-only ones
    tensor = torch.from_numpy(np.require(array, requirements=("C", "W")))
    return tensor.to(torch.get_default_dtype()) if isinstance(values, list) and kind == "f" else tensor


def _plain_array(values: Any, name: str) -> np.ndarray:
    """Returns an array of numbers. Raises FlowBNNError if the values are none."""
    if isinstance(values, np.ma.MaskedArray) and values.mask.any():
        raise value_error(name, "complete", f"{int(values.mask.sum())} masked values", kind="missing")
    if hasattr(values, "isna") and (missing := np.asarray(values.isna())).any() and values.dtype.kind != "f":
        raise _missing(name, missing.reshape(len(missing), -1), None)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        value = f"a {type(values).__name__} ({str(error).splitlines()[0]})"
        raise value_error(name, "an array", value, kind="dtype") from None
    if array.dtype.kind == "O" and not isinstance(values, np.ndarray) and hasattr(values, "dtype"):
        with suppress(TypeError, ValueError):  # nullable types of pandas
            array = array.astype(float if "Float" in str(values.dtype) else int)
    if array.dtype.kind not in "fiubc" or not array.ndim:
        raise _not_numbers(array, name)
    return array


def _not_numbers(array: np.ndarray, name: str, column: Any = None) -> FlowBNNError:
    """Returns the error for an array whose dtype is no number."""
    first = array.reshape(-1)[0] if array.size else None
    subject = f"the {name} are" if column is None else f"column {column!r} of the {name} is"
    text = f"{subject} of dtype {array.dtype}"
    if isinstance(first, str):
        text = f"{subject} of strings, such as {str(first)!r}"
        advice = (
            "classes, targets = np.unique(targets, return_inverse=True)"
            if name == "targets"
            else "pandas.get_dummies"
        )
        text += f"; use {advice}"
        return FlowBNNError(text, kind="strings", argument=name, column=column)
    fields = {"kind": "dtype", "argument": name, "column": column}
    if array.dtype.kind != "O" or column is not None:
        advice = "select numeric columns" if column is not None else f"use {name}.astype(float)"
        return FlowBNNError(f"{text}, not numbers; {advice}", **fields)
    for place in np.ndindex(array.shape):
        if not isinstance(array[place], Number):
            position = f"row {place[0]}" + "".join(f", column {axis}" for axis in place[1:])
            text += f", with {describe_value(array[place])} in {position}; replace it by a number"
            return FlowBNNError(text, row=place[0], **fields)
    dtype = "int" if all(isinstance(value, Integral) for value in array.flat) else "float"
    return FlowBNNError(f"{text}, not numbers; use {name}.astype({dtype})", **fields)


def _frame_array(frame: Any, columns: Any, name: str) -> np.ndarray:
    """Returns the columns of a data frame as one array. Raises FlowBNNError with the name of a column that is not of numbers."""
    arrays = []
    for place, column in enumerate(columns):
        series = frame.iloc[:, place] if hasattr(frame, "iloc") else frame[column]
        missing = np.asarray(series.isna()) if hasattr(series, "isna") else np.zeros(len(frame), bool)
        array = np.asarray(series)
        if missing.any() and (name == "inputs" or array.dtype.kind != "f"):
            raise _missing(name, missing[:, None], [column])
        if array.dtype.kind == "O" and all(isinstance(value, Number) for value in array):
            array = array.astype(float)  # nullable types of pandas
        if array.dtype.kind not in "fiub":
            raise _not_numbers(array, name, column)
        arrays.append(array)
    if not arrays:
        raise FlowBNNError(f"the {name} have no columns", kind="dtype", argument=name)
    if name == "inputs":
        widest = np.result_type(np.float32, *[array.dtype for array in arrays])
        return np.stack([array.astype(widest) for array in arrays], 1)
    table = np.stack(arrays, 1)
    return table[:, 0] if table.shape[1] == 1 and table.dtype.kind != "f" else table


def _check_missing(array: np.ndarray, name: str, columns: Any) -> None:
    """Raises FlowBNNError if real numbers are missing or infinite."""
    if not np.isfinite(array.sum()) and (bad := ~np.isfinite(array)).any():
        raise _missing(name, bad.reshape(len(bad), -1), columns)


def _missing(name: str, bad: np.ndarray, columns: Sequence[Any] | None) -> FlowBNNError:
    """Returns the error for missing values.

    Args:
        name: Name of the values.
        bad: Mask of the missing values, ``[rows, columns]``.
        columns: Names of the columns, or None.
    """
    row, place = (int(index) for index in np.argwhere(bad)[0])
    column = place if columns is None else list(columns)[place]
    location = f"row {row}" if bad.shape[1] == 1 and columns is None else f"row {row}, column {column!r}"
    fields: dict[str, Any] = {"kind": "missing", "argument": name, "row": row, "column": column}
    return nonfinite_error(f"the {name}", torch.from_numpy(~bad), "fill or drop them", location, **fields)
