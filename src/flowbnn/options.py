"""Typed options: the annotation of an option declares its valid values, and this module checks them.

A class of options is a frozen dataclass made by :func:`options`. A public function is decorated with :func:`checked`. Both raise an
error of one line that names the option, its valid values and similar names:

>>> @options
... class Optimization:
...     steps: Count = 10
...     method: Literal["sgd", "adam"] = "sgd"
...     rate: Annotated[float, Bounds(gt=0), Hint("per step")] = 0.1
>>> Optimization(steps=2.5)
Traceback (most recent call last):
flowbnn.errors.FlowBNNError: Optimization(steps=...) must be an integer of at least 1, got 2.5
>>> Optimization(method="adan")
Traceback (most recent call last):
flowbnn.errors.FlowBNNError: Optimization(method=...) must be 'sgd' or 'adam', got 'adan'; did you mean 'adam'?
>>> Optimization(stepps=3)
Traceback (most recent call last):
flowbnn.errors.FlowBNNError: Optimization has no setting 'stepps'; did you mean 'steps'?

Code inside the library relies on the types and checks nothing again.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce, wraps
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from operator import or_
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

import numpy as np
import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, close_words, describe_value, nearest
from flowbnn.memory import is_out_of_memory

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a number, for use in ``Annotated``.

    Args:
        ge: Lower bound that is allowed.
        gt: Lower bound that is not allowed.
        le: Upper bound that is allowed.
        lt: Upper bound that is not allowed.

    >>> 0.5 in Bounds(gt=0, le=1), 0 in Bounds(gt=0, le=1)
    (True, False)
    """

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
    """Returns the bounds of numbers that are at least ``bound``."""
    return Bounds(ge=bound)


class NonEmpty(Bounds):
    """Condition that a string, a path, a list or a dictionary is not empty, for use in ``Annotated``.

    >>> "" in NonEmpty(), "runs" in NonEmpty(), [] in NonEmpty()
    (False, True, False)
    """

    def __contains__(self, value: Any) -> bool:
        return bool(str(value).strip() if isinstance(value, str | PathLike) else len(value))

    def __str__(self) -> str:
        return "(not empty)"


@dataclass(frozen=True)
class Hint:
    """Words that follow the description of an option in error messages, for use in ``Annotated``.

    Args:
        text: Example or unit of the option.
    """

    text: str


Count = Annotated[int, Ge(1)]
# sizes that fit into memory: lengths of vectors, numbers of layers, numbers of sampled networks
Dim = Annotated[int, Bounds(ge=1, le=2**24)]
Depth = Annotated[int, Bounds(ge=1, le=10_000)]
SampleCount = Annotated[int, Bounds(ge=1, le=10**6)]
Positive = Annotated[float, Bounds(gt=0)]
NonNegative = Annotated[float, Ge(0)]
UnitInterval = Annotated[float, Bounds(ge=0, le=1)]
Probability = Annotated[float, Bounds(gt=0, lt=1)]
Seed = Annotated[int, Bounds(ge=0, lt=2**32)]
File = Annotated[str | PathLike[str], NonEmpty()]

# descriptions of types in error messages
PHRASES: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    NoneType: "None",
    Tensor: "a dense real tensor",
    Sequence: "a list",
    Iterable: "a list or DataLoader",
    Mapping: "a dictionary",
    dict: "a dictionary",
    PathLike: "a path",
    Callable: "a function",
}


# -------------------- decorators


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def options(cls: type[T] | None = None, /, *, owner: str = "", **kwargs: Any) -> Any:
    """Makes a class a frozen dataclass whose fields are checked by their annotations.

    Conditions on several fields belong in ``__post_init__``, which runs after the checks.

    Args:
        cls: Class to decorate.
        owner: Name of the function that takes these options as arguments. Messages name it instead of the class.
        kwargs: Further arguments of :func:`dataclasses.dataclass`.
    """

    def decorate(cls: Any) -> Any:
        result: Any = dataclass(**{"frozen": True, **kwargs})(cls)
        result.__init__ = _check_calls(result.__init__, result, owner or cls.__name__)
        return result

    return decorate if cls is None else decorate(cls)


def checked(function: F) -> F:
    """Checks the arguments of a function by their names and annotations before it is called.

    Args:
        function: Function to decorate.

    >>> @checked
    ... def optimize(steps: Count, *, method: Literal["sgd", "adam"] = "sgd"):
    ...     return steps
    >>> optimize(0)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: optimize(steps=...) must be an integer of at least 1, got 0
    """
    name = function.__name__
    return _check_calls(function, function, "" if name == "__init__" else name)


def accepts_options_of(cls: type) -> Callable[[F], F]:
    """Adds the arguments of a class to the signature of a function with ``**kwargs``.

    ``help``, editors and :func:`checked` use the new signature.

    Args:
        cls: Class of options.
    """

    def decorate(function: F) -> F:
        original = signature(function)
        parameters = original.parameters
        named_parameters = [value for value in parameters.values() if value.kind is not Parameter.VAR_KEYWORD]
        new_parameters = [
            value.replace(kind=Parameter.KEYWORD_ONLY)
            for name, value in signature(cls).parameters.items()
            if name not in parameters
        ]
        function.__signature__ = original.replace(parameters=[*named_parameters, *new_parameters])  # type: ignore[attr-defined]
        annotations = cls.__init__.__annotations__  # type: ignore[misc]
        function.__annotations__ |= {value.name: annotations[value.name] for value in new_parameters}
        return function

    return decorate


def _signature_and_hints(function: Any, annotation_source: Any) -> tuple[Signature, dict[str, Any]]:
    """Returns the signature of a function and its annotations, except annotations that allow every value."""
    hints = get_type_hints(annotation_source, include_extras=True)
    return signature(function), {name: hint for name, hint in hints.items() if hint is not Any}


def _check_calls(function: F, annotation_source: Any, owner: str) -> F:
    """Returns a function that checks its arguments.

    Args:
        function: Function to call after the checks.
        annotation_source: Function or class with the annotations.
        owner: Name of the function or class in messages. An empty name stands for the class of the first argument.
    """
    # read at the first call, because reading all of them would take a tenth of the time of an import
    declaration: list[tuple[Signature, dict[str, Any]]] = []
    is_constructor = function.__name__ == "__init__"

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        name = owner or type(args[0]).__name__
        if not declaration:
            declaration.append(_signature_and_hints(function, annotation_source))
        call_signature, hints = declaration[0]
        try:
            bound = call_signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _call_error(name, call_signature, kwargs, error) from None
        converted = False
        for argument, value in bound.arguments.items():
            parameter = call_signature.parameters[argument]
            if argument not in hints or value is parameter.default:
                continue
            # equal strings of two modules may be two objects
            if type(value) is str and value == parameter.default:
                continue
            if parameter.kind is Parameter.VAR_POSITIONAL:
                for entry in value:
                    check(argument, entry, hints[argument], name)
            elif parameter.kind is not Parameter.VAR_KEYWORD:
                if hasattr(value, "__array__") and not isinstance(value, Tensor):
                    array = numbers_as_tensor(value)
                    if array is not None and _allows(hints[argument], array):
                        value = bound.arguments[argument] = array
                        converted = True
                check(argument, value, hints[argument], name)
                is_builtin = type(value) in (bool, int, float)  # others, such as numpy.int64, are converted
                if hints[argument] is not Any and isinstance(value, Real) and not is_builtin:
                    bound.arguments[argument] = int(value) if isinstance(value, Integral) else float(value)
                    converted = True
        if converted:
            args, kwargs = bound.args, bound.kwargs
        try:
            return function(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            # predictions catch such errors, and continue with fewer rows
            if not is_constructor or not isinstance(args[0], nn.Module) or not is_out_of_memory(error):
                raise
        sizes = ", ".join(f"{key}={value}" for key, value in bound.arguments.items() if type(value) is int)
        text = f"{name}({sizes}) needs more memory than is free; use smaller sizes"
        raise FlowBNNError(text, kind="memory")

    wrapper.__signature__ = _simplify_signature(signature(function))  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def numbers_as_tensor(values: Any) -> Tensor | None:
    """Returns an array of numpy or a series of pandas as a tensor, or None if it does not hold numbers.

    >>> numbers_as_tensor(np.array([1, 2])), numbers_as_tensor(np.array(["a"]))
    (tensor([1, 2]), None)
    """
    array = np.asarray(values)
    kinds: dict[str, Any] = {"b": bool, "i": np.int64, "u": np.int64, "f": np.float64}
    if array.ndim == 0 or array.dtype.kind not in kinds:
        return None
    is_single = array.dtype.kind == "f" and array.dtype.itemsize <= 4
    # a copy, because torch warns about arrays that it cannot write
    return torch.from_numpy(np.array(array, dtype=np.float32 if is_single else kinds[array.dtype.kind]))


def _simplify_signature(original: Signature) -> Signature:
    """Returns a signature for ``help`` and documentation, with plain types instead of conditions.

    >>> def optimize(steps: Count, rate: Positive | None = None): ...
    >>> _simplify_signature(signature(optimize))
    <Signature (steps: int, rate: float | None = None)>
    """
    parameters = original.parameters.values()
    return original.replace(
        parameters=[value.replace(annotation=_simplify_annotation(value.annotation)) for value in parameters]
    )


@cache
def _simplify_annotation(annotation: Any) -> Any:
    """Returns an annotation without the conditions of ``Annotated``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _simplify_annotation(arguments[0])
    if origin in (Union, UnionType):
        return reduce(or_, map(_simplify_annotation, arguments))
    if origin in (Sequence, Mapping, Iterable, list, dict):
        return origin[tuple(map(_simplify_annotation, arguments))]
    return annotation


def _call_error(
    owner: str, call_signature: Signature, kwargs: Mapping[str, Any], error: TypeError
) -> FlowBNNError:
    """Returns the error of a call with unknown, missing or too many arguments."""
    names = [name for name in call_signature.parameters if name != "self"]
    open_ended = any(value.kind is Parameter.VAR_KEYWORD for value in call_signature.parameters.values())
    unknown = next((name for name in kwargs if not open_ended and name not in names), None)
    if unknown is None:
        return FlowBNNError(f"{owner}: {error}", kind="call")
    message = f"{owner} has no setting '{unknown}'{nearest(unknown, names)}"
    return FlowBNNError(message, kind="unknown setting", argument=unknown)


def all_subclasses(cls: type[T]) -> Iterator[type[T]]:
    """Yields the direct and indirect subclasses of a class."""
    for subclass in cls.__subclasses__():
        yield subclass
        yield from all_subclasses(subclass)


def call_factory(function: Callable[..., Any], *args: Any, name: str, kind: type) -> Any:
    """Calls a user's function and checks the class of its result.

    Args:
        function: Function that creates an object.
        args: Arguments of the function.
        name: Name of the option that holds the function.
        kind: Expected class of the result.

    >>> call_factory(dict, name="optimizer", kind=torch.optim.Optimizer)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: optimizer must return an Optimizer, got a dict
    """
    try:
        result = function(*args)
    except (TypeError, ValueError) as error:
        raise FlowBNNError(f"{name} raises an error: {error}".splitlines()[0], argument=name) from error
    if not isinstance(result, kind):
        text = f"{name} must return {_describe(kind)}, got {describe_value(result)}"
        raise FlowBNNError(text, argument=name)
    return result


# -------------------- checks


def check(name: str, value: Any, annotation: Any, owner: str = "", kind: str = "value") -> None:
    """Raises an error if an annotation does not allow a value.

    Args:
        name: Name of the option.
        value: Value of the option.
        annotation: Type, union, literal, or ``Annotated`` with a :class:`Bounds` or a :class:`Hint`.
        owner: Name of the function or class that has the option.
        kind: Kind of the error.

    >>> check("rate", 1.5, UnitInterval)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: rate must be a number from 0 to 1, got 1.5
    >>> check("widths", [4, 0], Sequence[Count])
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: widths must hold an integer of at least 1, got 0
    """
    if _allows(annotation, value):
        return
    verb, hint = "be", ""
    while invalid := [pair for pair in _entries(annotation, value) if not _allows(*pair)]:
        verb, hint = "hold", hint or _hint(annotation)
        annotation, value = invalid[0]
    subject = f"{owner}({name}=...)" if owner else name
    expected = f"{verb} {_describe(annotation)}{hint}"
    suggestion = _suggestion(annotation, value)
    text = f"{subject} must {expected}, got {describe_value(value)}{suggestion}"
    raise FlowBNNError(text, kind=kind, argument=name)


def _suggestion(annotation: Any, value: Any) -> str:
    """Returns the end of an error message that suggests a valid value."""
    if isinstance(value, str):
        words = _literals(annotation)
        return nearest(value, words) if close_words(value, words) else ""
    if isinstance(value, type):
        classes = tuple(kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
        return f"; write {value.__name__}() with its brackets" if issubclass(value, classes) else ""
    if hasattr(value, "to_tensors"):  # an estimator of flowbnn.sklearn
        posterior = getattr(value, "posterior_", None)
        if posterior is None:
            return "; call its fit(X, y) first"
        attribute = "posterior_" if _allows(annotation, posterior) else "posterior_.model"
        return f"; use its .{attribute} with data to_tensors(X, y)"
    if hasattr(value, "model") and _allows(annotation, value.model):
        return "; use its .model"
    return ""


def _allows(annotation: Any, value: Any) -> bool:
    """Returns True if an annotation allows a value."""
    if annotation is Any or isinstance(annotation, TypeVar | str):
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        allowed = _allows(arguments[0], value)
        for entry in arguments[1:]:
            allowed = allowed and (not isinstance(entry, Bounds) or value in entry)
        return allowed
    if origin in (Union, UnionType):
        allowed = False
        for choice in arguments:
            allowed = allowed or _allows(choice, value)
        return allowed
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
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
    return isinstance(value, kind) and all(_allows(*pair) for pair in _entries(annotation, value))


def _entries(annotation: Any, value: Any) -> list[tuple[Any, Any]]:
    """Returns the entries of a list or dictionary, each with its annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _entries(arguments[0], value)
    if origin in (Union, UnionType):
        return next((entries for choice in arguments if (entries := _entries(choice, value))), [])
    fits: bool = isinstance(origin, type) and isinstance(value, origin)
    if not fits or isinstance(value, str):
        return []
    if origin in (Sequence, list) or arguments[1:] == (...,):
        return [(arguments[0], entry) for entry in value]
    if origin is tuple:
        return list(zip(arguments, value, strict=False))
    if origin in (Mapping, dict):
        return [pair for item in value.items() for pair in zip(arguments, item, strict=True)]
    return []


def _literals(annotation: Any) -> list[str]:
    """Returns the strings that an annotation allows."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [word for argument in get_args(annotation) for word in _literals(argument)]


def _hint(annotation: Any) -> str:
    return "".join(f" ({entry.text})" for entry in get_args(annotation) if isinstance(entry, Hint))


def _describe(annotation: Any) -> str:
    """Returns a description of the values that an annotation allows."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [str(entry) for entry in arguments[1:] if isinstance(entry, Bounds)]
        return " ".join([_describe(arguments[0]), *bounds]) + _hint(annotation)
    if origin in (Union, UnionType, Literal):
        choices = [repr(choice) if origin is Literal else _describe(choice) for choice in arguments]
        return " or ".join([", ".join(choices[:-1]), choices[-1]] if choices[1:] else choices)
    kind = origin or annotation
    if kind in PHRASES:
        return PHRASES[kind]
    noun = str(getattr(kind, "__name__", kind))
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
