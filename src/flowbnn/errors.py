"""The exception and the warning of the library, and functions that write their messages."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from flowbnn.numerics import is_concrete


class FlowBNNError(ValueError):
    """Exception for invalid input, with a message of one line: the problem, the value, and a remedy.

    The command line prints the message without a traceback. In Python the exception is an ordinary ``ValueError``. Programs read its
    fields instead of its text:

    >>> error = FlowBNNError("epochs must be an integer of at least 1, got 0", kind="value", argument="epochs")
    >>> error.kind, error.argument, error.layer
    ('value', 'epochs', None)

    Args:
        message: Message of one line.
        fields: Machine-readable details. ``kind`` names the kind of error (``"value"`` by default), ``argument`` the argument at fault,
            ``layer`` the layer at fault.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(_one_line(message))
        self.fields: dict[str, Any] = {"kind": "value", **fields}
        self.kind, self.argument, self.layer = map(self.fields.get, ("kind", "argument", "layer"))


class MissingPackageError(FlowBNNError, ImportError):
    """Exception for an optional package that is not installed. It is also an ``ImportError``."""


class FlowBNNWarning(UserWarning):
    """Warning about input or results that are valid but rarely intended, such as a collapsed posterior.

    >>> warning = FlowBNNWarning("layer 'fc1' has collapsed", kind="collapse", layer="fc1")
    >>> warning.kind, warning.argument, warning.layer
    ('collapse', None, 'fc1')

    Args:
        message: Message of one line.
        fields: Machine-readable details, as in :class:`FlowBNNError`. ``kind`` is None by default.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(_one_line(message))
        self.fields: dict[str, Any] = fields
        self.kind, self.argument, self.layer = map(fields.get, ("kind", "argument", "layer"))


def _one_line(message: str) -> str:
    """Returns a message without the line breaks that names of layers and files may have."""
    return message if "\n" not in message else " ".join(message.split())


def warn(message: str, **fields: Any) -> None:
    """Issues a :class:`FlowBNNWarning` that points at the user's line of code.

    Args:
        message: Message of one line.
        fields: Machine-readable details, as in :class:`FlowBNNWarning`.
    """
    frame, level, outermost = sys._getframe(1), 1, 1
    while frame.f_back is not None:
        frame, level = frame.f_back, level + 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == "flowbnn":
            outermost = level
    warnings.warn(FlowBNNWarning(message, **fields), stacklevel=outermost + 2)


def quote_names(names: Sequence[str], limit: int = 5) -> str:
    """Returns the first names in quotes, and the number of names that are left out.

    Args:
        names: Names to quote.
        limit: Largest number of names to write out.

    >>> quote_names(["fc1", "fc2", "fc3"], limit=2)
    "'fc1', 'fc2' and 1 more"
    """
    text = ", ".join(f"'{name}'" for name in names[:limit])
    return text + (f" and {len(names) - limit} more" if len(names) > limit else "")


def pluralize(number: int, noun: str) -> str:
    """Returns a number with its noun in the singular or plural.

    >>> pluralize(1, "held-out example"), pluralize(3000, "epoch")
    ('1 held-out example', '3,000 epochs')
    """
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def close_words(word: str, choices: Sequence[str]) -> list[str]:
    """Returns up to three of the choices that resemble a word, the closest first.

    >>> close_words("lr", ["noise_lr", "weight_lr", "epochs"])
    ['noise_lr', 'weight_lr']
    """
    # "lr" stands for "learning_rate"
    initials = "".join(piece[:1] for piece in word.split("_")) if "_" in word else word
    compounds = [name for name in choices if {word, initials} & set(name.split("_"))]
    if compounds and not get_close_matches(word, choices, cutoff=0.8):
        return compounds[:3]
    return get_close_matches(word, choices, n=3, cutoff=0.5)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns the end of an error message that suggests the choices closest to a word, or lists the choices.

    >>> nearest("fc11", ["conv1", "fc1", "fc2"])
    "; did you mean 'fc1' or 'fc2'?"
    >>> nearest("zebra", ["conv1"]), nearest("zebra", ["conv1", "fc1"])
    ("; there is 'conv1'", "; there are 'conv1', 'fc1'")
    """
    choices = list(dict.fromkeys(choices))
    if close := close_words(word, choices):
        return "; did you mean " + " or ".join(f"'{name}'" for name in close) + "?"
    return f"; there {'are' if choices[1:] else 'is'} {quote_names(choices, 8)}" if choices else ""


def with_hint(text: str, hint: str) -> str:
    """Returns a message with a hint at its end, unless the hint is empty."""
    return f"{text}; {hint}" if hint else text


def requirement_error(
    subject: str, requirement: str, value: Any = None, hint: str = "", **fields: Any
) -> FlowBNNError:
    """Returns the error for a requirement that is not met. Its kind is ``"unsupported"`` by default.

    Args:
        subject: Name of the function, class or setting.
        requirement: Description of the requirement.
        value: Value instead of it. Strings are shown without quotes. None is not shown.
        hint: Advice that follows the message.
        fields: Fields of the error.

    >>> requirement_error("score='margin'", "classes", "real values", hint="use score='variance'", argument="score")
    FlowBNNError("score='margin' needs classes, got real values; use score='variance'")
    """
    got = "" if value is None else f", got {value}"
    text = with_hint(f"{subject} needs {requirement}{got}", hint)
    return FlowBNNError(text, **{"kind": "unsupported", **fields})


def value_error(argument: str, /, expected: str, value: Any, hint: str = "", **fields: Any) -> FlowBNNError:
    """Returns the error for an argument with a wrong value.

    Args:
        argument: Name of the argument.
        expected: Description of the valid values.
        value: Wrong value, or its description. Strings are shown without quotes.
        hint: Advice that follows the message.
        fields: Fields of the error. Its ``argument`` is that name by default.

    >>> value_error("targets", "integers", "torch.float32", hint="use targets.long()", kind="dtype")
    FlowBNNError('targets must be integers, got torch.float32; use targets.long()')
    """
    text = with_hint(f"{argument} must be {expected}, got {value}", hint)
    return FlowBNNError(text, **{"argument": argument, **fields})


def nonfinite_error(
    name: str,
    finite: Any,
    hint: str,
    location: str = "",
    cls: type[FlowBNNError] = FlowBNNError,
    **fields: Any,
) -> FlowBNNError:
    """Returns the error for values that are NaN or infinite.

    Args:
        name: Name of the values.
        finite: Mask ``[rows, ...]`` of the finite values.
        hint: Advice that follows the message.
        location: Description of the place of the first value. The default is its row.
        cls: Class of the error.
        fields: Fields of the error besides ``rows``, the number of rows.

    >>> import torch
    >>> nonfinite_error("the outputs", torch.tensor([True, False, True]), "check the weights")
    FlowBNNError('NaN or infinity in 1 of 3 rows of the outputs, first in row 1; check the weights')
    """
    rows = (~finite).reshape(len(finite), -1).any(1).nonzero()
    location = location or f"row {int(rows[0])}"
    text = f"NaN or infinity in {len(rows)} of {len(finite)} rows of {name}, first in {location}; {hint}"
    return cls(text, rows=len(rows), **fields)


def check_name(name: str, choices: Iterable[str], noun: str, **fields: Any) -> None:
    """Raises FlowBNNError if a name is unknown, with the names that resemble it.

    Args:
        name: Name to check.
        choices: Known names.
        noun: Noun for the thing that has the name.
        fields: Fields of the error.

    >>> check_name("fc3", ["fc1", "conv"], "layer", argument="layer")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: unknown layer 'fc3'; did you mean 'fc1'?
    """
    choices = list(choices)
    if name not in choices:
        raise FlowBNNError(f"unknown {noun} '{name}'{nearest(name, choices)}", **fields)


@contextmanager
def optional_import(feature: str, package: str, install: str) -> Iterator[None]:
    """Context manager that raises MissingPackageError if an import fails.

    Args:
        feature: Name of the module or function that needs the package.
        package: Name of the package.
        install: Argument of ``pip install``.

    >>> with optional_import("plots", "matplotlib", "flowbnn[plots]"):
    ...     import matplotlib
    """
    try:
        yield
    except ImportError as error:
        text = f"{feature} needs {package}: pip install {install}"
        raise MissingPackageError(text, kind="missing package", packages=[package]) from error


def check_shape(
    argument: str,
    /,
    values: Any,
    expected: Sequence[int | str],
    hint: str = "",
    kind: str = "shape",
    owner: str = "",
    **fields: Any,
) -> None:
    """Raises FlowBNNError if a tensor does not have the expected shape.

    Args:
        argument: Name of the argument that holds the tensor.
        values: Tensor to check.
        expected: Expected size of each axis. A name such as ``"batch"`` allows any size, ``"batch >= 1"`` any size from one on, and
            ``"..."`` any number of axes.
        hint: Advice that follows the message.
        kind: Kind of the error.
        owner: Name of the class that takes the tensor.
        fields: Further fields of the error.

    >>> import torch
    >>> check_shape("z", torch.zeros(3, 5), ("batch", 5))
    >>> check_shape("targets", torch.zeros(3, 1), (3,), hint="use targets.squeeze(1)")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: targets must have shape (3,), got (3, 1); use targets.squeeze(1)
    """
    axes, shape = list(expected), tuple(getattr(values, "shape", ()))
    if "..." in axes:
        place = axes.index("...")
        axes[place : place + 1] = ["any"] * (len(shape) - len(axes) + 1)
    fits = [
        size >= int(axis.partition(" >= ")[2] or 0) if isinstance(axis, str) else axis == size
        for axis, size in zip(axes, shape, strict=False)
    ]
    if len(axes) == len(shape) and all(fits):
        return
    sizes = ", ".join(map(str, expected)) + ("," if len(expected) == 1 else "")
    result = shape if hasattr(values, "shape") else describe_value(values)
    text = f"{f'{owner}: ' if owner else ''}{argument} must have shape ({sizes}), got {result}"
    raise FlowBNNError(with_hint(text, hint), **{"kind": kind, "argument": argument, **fields})


def check_entries(
    argument: str,
    /,
    values: Any,
    valid: Any,
    requirement: str,
    hint: str = "",
    kind: str = "range",
    **fields: Any,
) -> None:
    """Raises FlowBNNError if entries of a tensor are invalid.

    Args:
        argument: Name of the argument that holds the tensor.
        values: Tensor to check.
        valid: Mask of its valid entries, or of its valid rows.
        requirement: Words for a valid entry.
        hint: Advice that follows the message.
        kind: Kind of the error.
        fields: Further fields of the error.

    >>> import torch
    >>> values = torch.tensor([0.5, -2.0])
    >>> check_entries("variance", values, values > 0, "positive", hint="use exp() for a log-variance")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: variance must be positive, got -2 (1 of 2 entries); use exp() for a log-variance
    """
    if not is_concrete(valid) or bool(valid.all()):
        return
    invalid = values[~valid]
    numbers = [f"{number:.4g}" for number in invalid[0].flatten().tolist()]
    entry = ", ".join(numbers[:4]) + (", ..." if len(numbers) > 4 else "")
    entries = f"{entry} ({len(invalid)} of {valid.numel()} entries)"
    raise value_error(argument, requirement, entries, hint, kind=kind, **fields)


def describe_value(value: object) -> str:
    """Returns a short description of a value for an error message.

    Numbers and strings are shown as they are, classes by their name, other objects by the name of their class.

    >>> describe_value("adam"), describe_value(dict), describe_value([1, 2])
    ("'adam'", 'the class dict', 'a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | int | float):
        return f"{value!r:.60}"
    dtype = getattr(value, "dtype", None)  # of a tensor or an array
    is_complex = dtype is not None and "complex" in str(dtype)
    return f"a complex {type(value).__name__}" if is_complex else f"a {type(value).__name__}"
