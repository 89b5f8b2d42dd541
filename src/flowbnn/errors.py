"""The one exception users meet, and the helper that names the nearest right word."""

import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class FlowBNNError(ValueError):
    """Bad input, in one line that says what is wrong and what to do.

    The command line prints the line and nothing else; from Python it is an ordinary ``ValueError``. What a program may want to know is
    in ``fields``, so that nothing has to read the text:

    >>> error = FlowBNNError("epochs must be an integer of at least 1, got 0", kind="value", argument="epochs")
    >>> error.kind, error.argument, error.layer
    ('value', 'epochs', None)

    Args:
        message: the line.
        fields: ``kind`` (``"value"`` unless given: something handed over is not what it should be), ``argument``, ``layer`` and
            whatever else the place that raises it knows.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields = {"kind": "value", **fields}
        self.kind, self.argument, self.layer = map(fields.get, ("kind", "argument", "layer"))


class FlowBNNWarning(UserWarning):
    """Something that is allowed but rarely meant: a collapsed posterior, a layer that is never called.

    Args:
        message: the line.
        fields: ``kind``, ``layers`` and whatever else the place that warns knows.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


def warn(message: str, **fields: Any) -> None:
    """Give a :class:`FlowBNNWarning` that points at the caller's own line, outside of this package."""
    frame, level, outermost = sys._getframe(1), 1, 1
    while frame.f_back is not None:
        frame, level = frame.f_back, level + 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == "flowbnn":
            outermost = level
    warnings.warn(FlowBNNWarning(message, **fields), stacklevel=outermost + 2)


def quote_names(names: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more there are.

    >>> quote_names(["fc1", "fc2", "fc3"], most=2)
    "'fc1', 'fc2' and 1 more"
    """
    describe_value = ", ".join(f"'{name}'" for name in names[:most])
    return describe_value + (f" and {len(names) - most} more" if len(names) > most else "")


def pluralize(number: int, noun: str) -> str:
    """A number with its noun.

    >>> pluralize(1, "held-out example"), pluralize(3000, "epoch")
    ('1 held-out example', '3,000 epochs')
    """
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def close_words(word: str, known: Sequence[str]) -> list[str]:
    """Up to three words of ``known`` that resemble ``word``, the nearest first."""
    short = "".join(part[:1] for part in word.split("_")) if "_" in word else word  # of learning_rate
    parts = [name for name in known if {word, short} & set(name.split("_"))]  # noise_lr for lr
    if parts and not get_close_matches(word, known, cutoff=0.8):
        return parts[:3]
    return get_close_matches(word, known, n=3, cutoff=0.5)


def nearest(word: str, known: Iterable[str]) -> str:
    """Words of ``known`` that resemble ``word``, or the first of them, as the tail of an error message.

    >>> nearest("fc11", ["conv1", "fc1", "fc2"])
    "; did you mean 'fc1' or 'fc2'?"
    >>> nearest("zebra", ["conv1"]), nearest("zebra", ["conv1", "fc1"])
    ("; there is 'conv1'", "; there are 'conv1', 'fc1'")
    """
    known = list(dict.fromkeys(known))
    if close := close_words(word, known):
        return "; did you mean " + " or ".join(f"'{name}'" for name in close) + "?"
    return f"; there {'are' if known[1:] else 'is'} {quote_names(known, 8)}" if known else ""


def describe_value(value: object) -> str:
    """A plain value as it is, a class by its name, anything else by its kind, for an error message.

    >>> describe_value("adam"), describe_value(dict), describe_value([1, 2])
    ("'adam'", 'the class dict', 'a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{value!r:.60}" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
