"""Typed settings: what a value may be is declared where the setting is declared, and checked here, in one place.

A class of settings is a frozen dataclass made by :func:`options`; a function that users call is marked with :func:`checked`. Both read
the annotations, so that bad input ends in one line which names the setting, says what it may be, and suggests the nearest name:

>>> @options
... class Walk:
...     steps: Count = 10
...     gait: Literal["slow", "fast"] = "slow"
...     stride: Annotated[float, Bounds(gt=0), Hint("metres")] = 0.7
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
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
    is_typeddict,
)

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, close_words, describe_value, nearest

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a number: at least ``ge``, above ``gt``, at most ``le``, below ``lt``."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    def __contains__(self, value: Any) -> bool:
        return self.ge <= value <= self.le and self.gt < value < self.lt

    def __str__(self) -> str:
        if math.isfinite(self.ge) and math.isfinite(self.le):
            return f"from {self.ge} to {self.le}"
        bounds = {"of at least": self.ge, "above": self.gt, "of at most": self.le, "below": self.lt}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound))


def Ge(bound: float) -> Bounds:
    """At least."""
    return Bounds(ge=bound)


@dataclass(frozen=True)
class Hint:
    """A few words that follow the description of a setting in a message: what to write instead, or the unit."""

    text: str


Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Bounds(gt=0)]
NonNegative = Annotated[float, Ge(0)]
UnitInterval = Annotated[float, Bounds(ge=0, le=1)]
Probability = Annotated[float, Bounds(gt=0, lt=1)]
Seed = Annotated[int, Bounds(ge=0, lt=2**32)]
File = str | PathLike[str]

_NOUNS: dict[Any, str] = {
    Sequence: "list",
    Iterable: "list or DataLoader",
    Mapping: "dictionary",
    dict: "dictionary",
}
_NOUNS |= {PathLike: "path", Callable: "function"}
_ARTICLES = {bool: "True or False", int: "an integer", float: "a number", str: "a string", NoneType: "None"}
_ARTICLES[Tensor] = "a dense tensor of real numbers"


def check(name: str, value: Any, annotation: Any, owner: str = "") -> None:
    """Refuse a value that its annotation does not allow, in one line.

    >>> check("rate", 1.5, UnitInterval)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: rate must be a number from 0 to 1, got 1.5
    >>> check("widths", [4, 0], Sequence[Count])
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: widths must hold an integer of at least 1, got 0
    """
    if _allows(annotation, value):
        return
    verb, hints = "be", ""
    while wrong := [(kind, part) for kind, part in _parts(annotation, value) if not _allows(kind, part)]:
        verb, hints = "hold", hints or _hints_of(annotation)
        annotation, value = wrong[0]
    close = ""
    if isinstance(value, str) and (words := _literals(annotation)):
        close = nearest(value, words) if close_words(value, words) else ""
    elif isinstance(value, type):
        kinds = tuple(one for one in (annotation, *get_args(annotation)) if isinstance(one, type))
        close = f"; write {value.__name__}() with its brackets" if issubclass(value, kinds) else ""
    elif hasattr(value, "model") and _allows(annotation, value.model):
        close = "; its network is its .model"
    elif hasattr(value, "transform") and _allows(annotation, value.transform):
        close = (
            "; give the module, not what it returns"
            if _allows(annotation, torch.nn.Module())
            else "; give its .transform"
        )
    elif annotation is Tensor and hasattr(value, "__len__") and not isinstance(value, Tensor | str):
        close = "; torch.as_tensor makes one of numbers"
    where = f"{owner}({name}=...)" if owner else name
    text = f"{where} must {verb} {_describe(annotation)}{hints}, got {describe_value(value)}{close}"
    raise FlowBNNError(text, argument=name)


def call_factory(function: Callable[..., Any], *given: Any, name: str, kind: type) -> Any:
    """What a user's function makes of these arguments: of this kind, or one line that names the setting.

    >>> call_factory(dict, name="optimizer", kind=torch.optim.Optimizer)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: optimizer must be an Optimizer (which the function returns), got a dict
    """
    try:
        made = function(*given)
    except (TypeError, ValueError) as error:
        text = f"{name} must be a function that returns {_describe(kind)}, and fails: {error}"
        raise FlowBNNError(text.splitlines()[0], argument=name) from error
    check(name, made, Annotated[kind, Hint("which the function returns")])
    return made


def _allows(annotation: Any, value: Any) -> bool:
    if annotation is Any or isinstance(annotation, TypeVar | str):
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allows(arguments[0], value) and all(
            value in one for one in arguments[1:] if isinstance(one, Bounds)
        )
    if origin in (Union, UnionType):
        return any(_allows(one, value) for one in arguments)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    if annotation is None:
        return value is None
    if annotation is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if annotation is Tensor:
        dense = isinstance(value, Tensor) and value.layout is torch.strided
        return dense and not value.is_complex() and not value.is_meta
    kind = dict if is_typeddict(annotation) else origin or annotation
    if kind is Callable:
        return callable(value)
    if kind in (Sequence, Iterable) and (isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0):
        return False
    if not isinstance(kind, type):
        return True
    return isinstance(value, kind) and all(_allows(one, part) for one, part in _parts(annotation, value))


def _parts(annotation: Any, value: Any) -> list[tuple[Any, Any]]:
    """What a list or dictionary holds, each with what it may be."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _parts(arguments[0], value)
    if origin in (Union, UnionType):
        return next((parts for one in arguments if (parts := _parts(one, value))), [])
    fits: bool = isinstance(origin, type) and isinstance(value, origin)
    if not fits or isinstance(value, str):
        return []
    if origin in (Sequence, list) or arguments[1:] == (...,):
        return [(arguments[0], part) for part in value]
    if origin is tuple:
        return list(zip(arguments, value, strict=False))
    if origin in (Mapping, dict):
        return [pair for item in value.items() for pair in zip(arguments, item, strict=True)]
    return []


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [one for one in get_args(annotation) if isinstance(one, str)]
    return [word for one in get_args(annotation) for word in _literals(one)]


def _hints_of(annotation: Any) -> str:
    return "".join(f" ({one.text})" for one in get_args(annotation) if isinstance(one, Hint))


def _describe(annotation: Any) -> str:
    """What a setting may be, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [str(one) for one in arguments[1:] if isinstance(one, Bounds)]
        return " ".join([_describe(arguments[0]), *bounds]) + _hints_of(annotation)
    if origin in (Union, UnionType, Literal):
        parts = [repr(one) if origin is Literal else _describe(one) for one in arguments]
        return " or ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
    if annotation in _ARTICLES:
        return _ARTICLES[annotation]
    kind = origin or annotation
    name = str(_NOUNS.get(kind) or getattr(kind, "__name__", kind))
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def all_subclasses(kind: type[T]) -> Iterator[type[T]]:
    """The subclasses of a class and theirs, which files and messages name."""
    for below in kind.__subclasses__():
        yield below
        yield from all_subclasses(below)


@cache
def _layout(function: Any, annotated: Any) -> tuple[Signature, dict[str, Any]]:
    """A function's parameters and what each may be, read at its first call: to read them all would take a tenth of an import."""
    return signature(function), get_type_hints(annotated, include_extras=True)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def options(cls: type[T] | None = None, /, *, of: str = "", **how: Any) -> Any:
    """Make a class a frozen dataclass whose fields are checked by their annotations when it is made.

    What concerns several fields at once goes into ``__post_init__``, which runs after the fields have been checked.

    Args:
        of: the function that takes these settings as its own arguments, which messages then name instead of the class.
        how: as in :func:`dataclasses.dataclass`.
    """

    def decorate(cls: Any) -> Any:
        made: Any = dataclass(**{"frozen": True, **how})(cls)
        made.__init__ = _checked(made.__init__, made, of or cls.__name__)
        return made

    return decorate if cls is None else decorate(cls)


def checked(function: F) -> F:
    """Check the arguments of a function by their annotations before it begins, and unknown ones by their names.

    >>> @checked
    ... def walk(steps: Count, *, gait: Literal["slow", "fast"] = "slow"):
    ...     return steps
    >>> walk(0)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: walk(steps=...) must be an integer of at least 1, got 0
    """
    name = function.__name__
    return _checked(function, function, "" if name == "__init__" else name)


def _checked(function: F, annotated: Any, owner: str) -> F:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        name = owner or type(args[0]).__name__  # of the class that is made, which may inherit __init__
        layout, hints = _layout(function, annotated)
        try:
            given = layout.bind(*args, **kwargs).arguments
        except TypeError as error:
            known = [one for one in layout.parameters if one != "self"]
            open_ended = any(one.kind is Parameter.VAR_KEYWORD for one in layout.parameters.values())
            unknown = next((name for name in kwargs if not open_ended and name not in known), None)
            reason = f" has no setting '{unknown}'{nearest(unknown, known)}" if unknown else f": {error}"
            kind = "unknown setting" if unknown else "call"
            raise FlowBNNError(name + reason, kind=kind, argument=unknown) from None
        for argument, value in given.items():
            parameter = layout.parameters[argument]
            if argument in hints and value is not parameter.default:
                if parameter.kind is Parameter.VAR_POSITIONAL:
                    for part in value:
                        check(argument, part, hints[argument], name)
                elif parameter.kind is not Parameter.VAR_KEYWORD:
                    check(argument, value, hints[argument], name)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def accepts_options_of(kind: type) -> Callable[[F], F]:
    """Let a function with ``**settings`` take the arguments of a class, which ``help``, editors and :func:`checked` see."""

    def decorate(function: F) -> F:
        layout = signature(function).parameters
        own = [one for one in layout.values() if one.kind is not Parameter.VAR_KEYWORD]
        known = [one for one in signature(kind).parameters.values() if one.name not in layout]
        more = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in known]
        function.__signature__ = Signature([*own, *more])  # type: ignore[attr-defined]
        function.__annotations__ |= {one.name: one.annotation for one in more}
        return function

    return decorate
