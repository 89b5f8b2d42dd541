"""The one exception users meet, and the helper that names the nearest right word."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

__all__ = ["FlowBNNError", "FlowBNNWarning", "check_whole", "nearest", "some_of", "told"]


class FlowBNNError(ValueError):
    """Bad input, told in one line that says what is wrong and what to do.

    The command line prints the line and nothing else; from Python it is an ordinary ``ValueError``.
    """


class FlowBNNWarning(UserWarning):
    """Something that is allowed but rarely meant: a collapsed posterior, a layer that is never called.

    Args:
        message: the line.
        each: where it is about several layers, the line of each by itself.
    """

    def __init__(self, message: str = "", each: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.each = tuple(each)


def check_whole(name: str, value: object, least: int = 1) -> int:
    """A whole number of at least ``least``, or one clear line.

    >>> check_whole("epochs", 2.5)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: epochs must be a whole number of at least 1, got 2.5
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FlowBNNError(f"{name} must be a whole number of at least {least}, got {told(value)}")
    return value


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more there are.

    >>> some_of(["fc1", "fc2", "fc3"], most=2)
    "'fc1', 'fc2' and 1 more"
    """
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(word: str, known: Iterable[str], most: int = 3) -> str:
    """Words of ``known`` that resemble ``word``, as the tail of an error message.

    >>> nearest("fc11", ["conv1", "fc1", "fc2"])
    "; did you mean 'fc1' or 'fc2'?"
    >>> nearest("zebra", ["conv1"])
    "; there is 'conv1'"
    """
    known = list(dict.fromkeys(known))
    close = get_close_matches(word, known, n=most, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(f"'{name}'" for name in close) + "?"
    if not known:
        return ""
    shown = ", ".join(f"'{name}'" for name in known[:8])
    return f"; there is {shown}" + (f" and {len(known) - 8} more" if len(known) > 8 else "")


def told(value: object) -> str:
    """A plain value as it is, a class by its name, anything else by its kind, for an error message.

    >>> told("adam"), told(dict), told([1, 2])
    ("'adam'", 'the class dict', 'a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{value!r:.60}" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
