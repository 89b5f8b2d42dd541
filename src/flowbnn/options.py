"""Typed settings: what a value may be is declared where the setting is declared, and checked here, in one place.

A class of settings is a frozen dataclass made by :func:`options`; a function that users call is marked with :func:`checked`. Both read
the annotations, so that bad input ends in one line which names the setting, says what it may be, and suggests the nearest name:

>>> @options
... class Walk:
...     steps: Count = 10
...     gait: Literal["slow", "fast"] = "slow"
...     stride: Annotated[float, Gt(0), Hint("metres")] = 0.7
>>> Walk(steps=2.5)
Traceback (most recent call last):
flowbnn.errors.FlowBNNError: Walk(steps=...) must be an integer of at least 1, got 2.5
>>> Walk(gait="fats")
Traceback (most recent call last):
flowbnn.errors.FlowBNNError: Walk(gait=...) must be 'slow' or 'fast', got 'fats'; did you mean 'fast'?
>>> Walk(stepps=3)
Traceback (most recent call last):
flowbnn.errors.FlowBNNError: Walk has no setting 'stepps'; did you mean 'steps' or 'stride'?

Inside the library code relies on the types and checks nothing again.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial, wraps
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from flowbnn.errors import FlowBNNError, nearest, shown

__all__ = [
    "Count",
    "File",
    "Ge",
    "Gt",
    "Hint",
    "Interval",
    "Le",
    "Lt",
    "NonNegative",
    "Positive",
    "Probability",
    "Seed",
    "Share",
    "check",
    "checked",
    "options",
    "takes",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Bounds of a number: at least ``ge``, above ``gt``, at most ``le``, below ``lt``."""

    ge: Any = None
    gt: Any = None
    le: Any = None
    lt: Any = None

    def __contains__(self, value: Any) -> bool:
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        if self.ge is not None and self.le is not None:
            return f"from {self.ge} to {self.le}"
        bounds = {"of at least": self.ge, "above": self.gt, "of at most": self.le, "below": self.lt}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)


def Ge(bound: Any) -> Interval:
    """At least."""
    return Interval(ge=bound)


def Gt(bound: Any) -> Interval:
    """Above."""
    return Interval(gt=bound)


def Le(bound: Any) -> Interval:
    """At most."""
    return Interval(le=bound)


def Lt(bound: Any) -> Interval:
    """Below."""
    return Interval(lt=bound)


@dataclass(frozen=True)
class Hint:
    """A few words that follow the description of a setting in a message: what to write instead, or the unit."""

    text: str


Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Probability = Annotated[float, Interval(gt=0, lt=1)]
Seed = Annotated[int, Interval(ge=0, lt=2**32)]
File = str | PathLike[str]

_NOUNS = {Sequence: "list", Iterable: "sequence", Mapping: "dictionary", dict: "dictionary"}
_ARTICLES = {bool: "True or False", int: "an integer", float: "a number", str: "a string", NoneType: "None"}


def check(name: str, value: Any, annotation: Any, owner: str = "") -> None:
    """Refuse a value that its annotation does not allow, in one line.

    >>> check("rate", 1.5, Share)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: rate must be a number from 0 to 1, got 1.5
    """
    if _allows(annotation, value):
        return
    where = f"{owner}({name}=...)" if owner else name
    close = nearest(value, words) if isinstance(value, str) and (words := _literals(annotation)) else ""
    close = close if "did you mean" in close else ""
    raise FlowBNNError(
        f"{where} must be {_describe(annotation)}, got {shown(value)}{close}", kind="value", argument=name
    )


def _allows(annotation: Any, value: Any) -> bool:
    if annotation is Any or isinstance(annotation, TypeVar | str):
        return True
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, *constraints = get_args(annotation)
        return _allows(kind, value) and all(value in one for one in constraints if isinstance(one, Interval))
    if origin in (Union, UnionType):
        return any(map(partial(_allows, value=value), get_args(annotation)))
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(annotation))
    if annotation in (None, NoneType):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    kind = origin or annotation
    if kind is Callable:
        return callable(value)
    if kind in (Sequence, Iterable) and isinstance(value, str):
        return False
    return isinstance(value, kind) if isinstance(kind, type) else True


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [one for one in get_args(annotation) if isinstance(one, str)]
    return [word for one in get_args(annotation) for word in _literals(one)]


def _describe(annotation: Any) -> str:
    """What a setting may be, in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, *constraints = get_args(annotation)
        hints = [one.text for one in constraints if isinstance(one, Hint)]
        bounds = [str(one) for one in constraints if isinstance(one, Interval)]
        return " ".join([_describe(kind), *bounds]) + "".join(f" ({hint})" for hint in hints)
    if origin in (Union, UnionType, Literal):
        parts = [repr(one) if origin is Literal else _describe(one) for one in get_args(annotation)]
        return ", ".join(parts[:-1]) + f" or {parts[-1]}" if len(parts) > 1 else parts[0]
    if annotation in _ARTICLES:
        return _ARTICLES[annotation]
    kind = origin or annotation
    if kind is Callable:
        return "a function"
    if kind is PathLike:
        return "a path"
    name = str(_NOUNS.get(kind) or getattr(kind, "__name__", kind))
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@cache
def _hints(owner: Any) -> dict[str, Any]:
    return get_type_hints(owner, include_extras=True)


_KINDS: set[type] = set()  # classes made by options


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def options(cls: type[T] | None = None, /, **how: Any) -> Any:
    """Make a class a frozen dataclass whose fields are checked by their annotations when it is made.

    What concerns several fields at once goes into ``__post_init__``, which runs after the fields have been checked. ``how`` is given to
    :func:`dataclasses.dataclass`.
    """

    def decorate(cls: Any) -> Any:
        own = vars(cls).get("__post_init__")

        def __post_init__(self: Any) -> None:
            if cls is next(
                filter(_KINDS.__contains__, type(self).__mro__)
            ):  # else the subclass has checked all fields already
                hints = _hints(type(self))  # type: ignore[arg-type]
                for one in fields(self):
                    value = getattr(self, one.name)
                    if value is not one.default:
                        check(one.name, value, hints.get(one.name, Any), type(self).__name__)
            if own is not None:
                own(self)
            elif (inherited := getattr(super(cls, self), "__post_init__", None)) is not None:
                inherited()

        cls.__post_init__ = __post_init__
        made: Any = dataclass(frozen=True, **how)(cls)
        _KINDS.add(made)
        init, names = made.__init__, [field.name for field in fields(made) if field.init]

        @wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            _refuse_unknown(cls.__name__, kwargs, names)
            init(self, *args, **kwargs)

        made.__init__ = __init__
        return made

    return decorate if cls is None else decorate(cls)


def _refuse_unknown(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise FlowBNNError(
                f"{owner} has no setting '{name}'{nearest(name, known)}",
                kind="unknown setting",
                argument=name,
            )


F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F) -> F:
    """Check the arguments of a function by their annotations before it begins, and unknown ones by their names.

    >>> @checked
    ... def walk(steps: Count, *, gait: Literal["slow", "fast"] = "slow"):
    ...     return steps
    >>> walk(0)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: walk(steps=...) must be an integer of at least 1, got 0
    """
    layout = signature(function)
    name = function.__qualname__.removesuffix(".__init__").split(".")[-1]
    named = [one for one in layout.parameters if one != "self"]
    open_ended = any(one.kind is Parameter.VAR_KEYWORD for one in layout.parameters.values())

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not open_ended:
            _refuse_unknown(name, kwargs, named)
        hints = _hints(function)
        try:
            given = layout.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise FlowBNNError(f"{name}: {error}", kind="call") from None
        for argument, value in given.items():
            kind = layout.parameters[argument].kind
            if argument in hints and kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
                check(argument, value, hints[argument], name)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def takes(kind: type) -> Callable[[F], F]:
    """Let a function with ``**settings`` show the fields of a class of settings in its signature, for ``help`` and editors."""

    def decorate(function: F) -> F:
        own = [
            one for one in signature(function).parameters.values() if one.kind is not Parameter.VAR_KEYWORD
        ]
        names = {one.name for one in own}
        more = [
            one.replace(kind=Parameter.KEYWORD_ONLY)
            for one in signature(kind).parameters.values()
            if one.name not in names
        ]
        function.__signature__ = Signature([*own, *more])  # type: ignore[attr-defined]
        return function

    return decorate
