"""What is attacked: every way to fit that the library has, with the choices that its settings declare.

A way to fit is a method, or a public function with a ``seed`` that takes a ``checkpoint`` or gives a posterior. Both are found, and
their choices are read from the annotations, so that a new method, function or setting is attacked without a word here.
"""

import inspect
import random
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.methods import METHODS
from flowbnn.options import _allows as allows

__all__ = [
    "FITS",
    "Fit",
    "annotations_of",
    "equal_bits",
    "fitted",
    "loader",
    "named_tensors",
    "network",
    "noisy_network",
    "random_fit",
    "small_method",
    "vectors",
]

# settings of a moment's work: the first of these values that a setting of this name takes
SMALL_SETTINGS: dict[str, list[Any]] = {
    "epochs": [2],
    "fit_target.epochs": [1],  # of a hundred steps
    "evidence.samples": [40],
    "members": [2],
    "samples": [2, 25, 40],
    "warmup": [2],
    "chains": [1, 2],
    "steps": [2],
    "cycles": [1],
    "snapshots_per_epoch": [2],
    "max_extension": [1],
    "seconds": [0.0],
    "simulations": [2],
    "starts": [2],
}
# settings that are not chosen, and values: those of devices, of what is shown, of compilation and of fits that take half a minute
FIXED_SETTINGS = {
    "accelerator",
    "acceleration",
    "devices",
    "num_nodes",
    "progress",
    "resume",
    "checkpoint",
    "tensorboard",
    "calibrate.flow",
    "flowpp",
}


def network() -> nn.Module:
    """Three named_tensors in, two out."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def flow() -> nn.Module:
    """Of vectors of length 3."""
    torch.manual_seed(0)
    return fb.flows.RealNVP(3)


def autoencoder() -> nn.Module:
    """Of the same."""
    torch.manual_seed(0)
    return fb.vae.VAE((3,), 2, hidden=(4,))


def noisy_network() -> nn.Module:
    """With noise on its layers."""
    return fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})


def loader(rows: int = 24, real: bool = False) -> Any:
    """Batches of four, in another order in every pass; with classes as targets, or real named_tensors."""
    targets = vectors(rows, 2) if real else torch.arange(rows) % 2
    source = torch.Generator().manual_seed(3)
    return fb.data.TensorLoader(vectors(rows, 3), targets, batch_size=4, shuffle=True, generator=source)


def vectors(*shape: int) -> Tensor:
    """Numbers from 0 to 1, always the same."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


# what a function fits, and to what
FIT_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "network": network,
    "model": noisy_network,
    "flow": flow,
    "data": lambda: vectors(24, 3),
    "log_density": lambda: lambda x: -x.square().sum(-1),
    "fit_autoencoder.model": autoencoder,
    "fit_autoencoder.data": lambda: vectors(24, 3).round(),
}


def public() -> list[tuple[str, Any]]:
    """The classes and functions that the public modules list, each once, by its full name."""
    found: dict[int, tuple[str, Any]] = {}
    for module in [fb, *filter(inspect.ismodule, map(vars(fb).get, fb.__all__))]:
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                found.setdefault(id(thing), (f"{module.__name__}.{name}", thing))
    return list(found.values())


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, or of what makes an object of a class."""
    owner: Any = function.__init__ if inspect.isclass(function) else function
    try:
        found = typing.get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, AttributeError):
        found = {}
    return {
        name: found.get(name, one.annotation) for name, one in inspect.signature(function).parameters.items()
    }


def choices(annotation: Any) -> list[Any]:
    """The values that an annotation names."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return list(parts)
    if origin in (typing.Union, types.UnionType):
        return [value for part in parts for value in choices(part)]
    if origin is typing.Annotated:
        return choices(parts[0])
    return [False, True] if annotation is bool else [None] if annotation is types.NoneType else []


@dataclass(frozen=True)
class Fit:
    """One way to fit, by its name, with some settings; to classes, or to ``real`` named_tensors."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    real: bool = False

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings)
        return f"{self.name}({given}){' of real named_tensors' if self.real else ''}"

    @property
    def function(self) -> Callable[..., Any]:
        """What fits."""
        kind = METHODS.get(self.name)
        if kind is None:
            return FUNCTIONS[self.name]
        own = {field.name for field in fields(kind)}
        return small_method(self.name, **{name: value for name, value in self.settings if name in own}).fit

    def __call__(self, **run: Any) -> Any:
        """The result, of the same seed unless another is given."""
        function = self.function
        takes = inspect.signature(function).parameters
        given = {name: FIT_ARGUMENTS.get(f"{self.name}.{name}") or FIT_ARGUMENTS.get(name) for name in takes}
        arguments = {
            name: make()
            for name, make in given.items()
            if make is not None and takes[name].default is takes[name].empty
        }
        if "loader" in takes or "held_out" in takes:
            arguments["loader" if "loader" in takes else "held_out"] = loader(real=self.real)
        if self.name == "temperature":
            arguments["validation"] = loader(real=self.real)
        if self.name not in METHODS:
            arguments |= small_settings(function)
        arguments |= {name: value for name, value in self.settings if name in takes}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(**{**arguments, "seed": 0, "progress": False, **run})

    @property
    def saves(self) -> bool:
        """Whether a run can be resumed."""
        return "checkpoint" in inspect.signature(self.function).parameters

    def restored(self, path: Any) -> Any:
        """What was saved, read again."""
        result = fitted(self)
        if isinstance(result, fb.Posterior):
            return fb.load_posterior(path, network().to(next(result.model.parameters()).dtype))
        return fb.load_density(path, flow().to(next(result.parameters()).dtype))


def small_settings(function: Callable[..., Any]) -> dict[str, Any]:
    """Settings of a moment's work that a function, or a method, takes; those of its own first."""
    own, found = getattr(function, "__name__", ""), {}
    for name, kind in annotations_of(function).items():
        fitting = [
            one
            for one in SMALL_SETTINGS.get(f"{own}.{name}") or SMALL_SETTINGS.get(name) or []
            if allows(kind, one) and kind is not Any
        ]
        if fitting:
            found[name] = fitting[0]
    return found


def small_method(name: str, **settings: Any) -> Any:
    """A method that fits in a moment."""
    return METHODS[name](**small_settings(METHODS[name]) | settings)


def _functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, thing in public():
        if inspect.isfunction(thing) and "seed" in inspect.signature(thing).parameters:
            result = typing.get_type_hints(thing).get("return")
            posterior = inspect.isclass(result) and issubclass(result, fb.Posterior)
            if posterior or "checkpoint" in inspect.signature(thing).parameters:
                yield name.split(".")[-1], thing


FUNCTIONS = dict(_functions())
FITS = (*METHODS, *FUNCTIONS)


@cache
def settings_of(name: str) -> tuple[tuple[str, Any], ...]:
    """All choices of one way to fit that are not what it does anyway."""
    function = Fit(name).function
    owners: list[Callable[..., Any]] = [METHODS[name], function] if name in METHODS else [function]
    found = []
    for owner in owners:
        defaults = {
            key: one.default for key, one in inspect.signature(owner).parameters.items()
        } | small_settings(owner)
        for key, kind in annotations_of(owner).items():
            found += [
                (key, value)
                for value in choices(kind)
                if not FIXED_SETTINGS & {key, f"{name}.{key}", value} and value != defaults[key]
            ]
    return tuple(found)


def random_fit(name: str, dice: random.Random) -> Fit:
    """One way to fit with none, one or two of its choices, which it does not refuse."""
    while True:
        known = settings_of(name)
        chosen = dict(dice.sample(known, min(len(known), dice.choice([0, 1, 1, 2]))))
        fit = Fit(name, tuple(chosen.items()), dice.random() < 0.3)
        try:
            fitted(fit)
        except fb.FlowBNNError:
            continue
        except Exception:  # a failure, which is met again where it is counted
            return fit
        return fit


@lru_cache(maxsize=64)
def fitted(fit: Fit | str) -> Any:
    """What a fit gives."""
    return (Fit(fit) if isinstance(fit, str) else fit)()


def named_tensors(result: Any, name: str = "") -> dict[str, Tensor]:
    """All named_tensors of a result, by where they are in it; what it took in time is left out."""
    if isinstance(result, Tensor):
        return {name: result.detach()}
    if isinstance(result, int | float):
        return {name: torch.tensor(float(result), dtype=torch.float64)}
    parts: Mapping[Any, Any] = {}
    if isinstance(result, fb.Posterior):
        extra = {key: getattr(result, key, None) for key in ("history", "calibration", "bound", "gain")}
        parts = result.tensors() | extra
    elif isinstance(result, nn.Module):
        parts = result.state_dict() | {"history": getattr(result, "history", None)}
    elif isinstance(result, Mapping):
        parts = result
    elif is_dataclass(result):
        parts = {
            field.name: getattr(result, field.name) for field in fields(result) if field.name != "seconds"
        }
    elif isinstance(result, fb.predictive.Predictive):
        parts = vars(result)
    elif isinstance(result, Sequence) and not isinstance(result, str):
        parts = dict(enumerate(result))
    return {
        key: value
        for own, part in parts.items()
        for key, value in named_tensors(part, f"{name}/{own}").items()
    }


def equal_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two results have the same named_tensors, to the bit."""
    kinds = [{key: (value.shape, value.dtype) for key, value in part.items()} for part in (one, other)]
    return kinds[0] == kinds[1] and all(bits(one[key]).equal(bits(other[key])) for key in one)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().flatten().view(torch.uint8)
