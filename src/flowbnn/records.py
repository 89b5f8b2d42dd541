"""Records that files store as plain values, and that are restored by their annotations."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin, get_type_hints

from flowbnn.options import Bounds


class Record:
    """Base class for dataclasses that files store as plain values.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Score(Record):
    ...     mean: float
    ...     name: str | None = None
    >>> Score.from_dict(Score(0.5).to_dict())
    Score(mean=0.5, name=None)
    >>> Score.from_dict({"mean": "x"})
    Traceback (most recent call last):
    ValueError: mean is 'x', not float
    """

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can store."""
        values: Any = self
        return asdict(values)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Returns the record that :meth:`to_dict` stored.

        Raises:
            ValueError: If a value does not have its annotated type.
        """
        return restore(cls, document, cls.__name__)


def restore(annotation: Any, value: Any, name: str) -> Any:
    """Converts a value that was read from JSON to its annotated type.

    Lists become tuples and named tuples, and dictionaries become dataclasses. Numbers may be NaN or infinite.

    Args:
        annotation: Simple type, dataclass, named tuple, list, tuple, mapping, union, or ``Annotated`` with :class:`Bounds`.
        value: Stored value.
        name: Name of the value, for the message.

    Raises:
        ValueError: If the annotation does not allow the value.

    >>> restore(Mapping[str, tuple[int, ...]], {"a": [1, 2]}, "sizes")
    {'a': (1, 2)}
    """
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin is Any:
        return value
    if origin is Annotated:
        restored = restore(arguments[0], value, name)
        if all(restored in bounds for bounds in arguments[1:] if isinstance(bounds, Bounds)):
            return restored
    elif origin in (Union, UnionType):
        for choice in arguments:
            if (choice is NoneType) == (value is None):
                return restore(choice, value, name)
    elif is_dataclass(origin) and isinstance(value, Mapping):
        hints = get_type_hints(origin, include_extras=True)
        make: Any = origin
        return make(
            **{key: restore(hints.get(key, NoneType), entry, str(key)) for key, entry in value.items()}
        )
    elif isinstance(value, list | tuple) and issubclass(origin, Sequence) and origin is not str:
        fields = getattr(origin, "_fields", ())
        if fields:
            hints = get_type_hints(origin)
            return origin(
                *(restore(hints[key], entry, key) for key, entry in zip(fields, value, strict=True))
            )
        entries = [restore(arguments[0], entry, name) for entry in value]
        return tuple(entries) if origin is tuple else entries
    elif isinstance(value, Mapping) and issubclass(origin, Mapping):
        return {str(key): restore(arguments[1], entry, str(key)) for key, entry in value.items()}
    elif type(value) is origin or (origin is float and type(value) is int):
        return value
    raise ValueError(f"{name} is {value!r:.50}, not {getattr(origin, '__name__', origin)}")
