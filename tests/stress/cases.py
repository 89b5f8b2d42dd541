"""Cases of the stress tests: every fit of the library, with the choices that its settings declare.

A fit is a method, or a public function with a ``seed`` that takes a ``checkpoint`` or returns a posterior. Fits are found by
inspection, and their choices by the annotations. So the tests cover every new method, function and setting without a change here.
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
from flowbnn.methods.calibrators.base import Calibrator
from flowbnn.options import _allows as allows

__all__ = [
    "FITS",
    "Fit",
    "annotations_of",
    "cached_fit",
    "equal_bits",
    "loader",
    "named_tensors",
    "network",
    "noisy_network",
    "public_names",
    "random_fit",
    "small_method",
    "small_settings",
    "vectors",
]

# settings that make calls short: for each name, the first value that the annotation allows
SMALL_SETTINGS: dict[str, list[Any]] = {
    "epochs": [2],
    "fit_target.epochs": [1],  # an epoch has 100 steps
    "cross_calibrate.method": [fb.MAP(epochs=1)],
    "cross_calibrate.folds": [2],
    "gated.components": [2],
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
# settings and values that are never chosen: devices, output, compilation, and fits that take half a minute
FIXED_SETTINGS = {
    "accelerator",
    "acceleration",
    "devices",
    "num_nodes",
    "progress",
    "resume",
    "checkpoint",
    "log",
    "callbacks",
    "calibrate.flow",
    "hmc.samples",
    "nuts.samples",
    "flowpp",
}


def network() -> nn.Module:
    """Returns a network with three inputs and two outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def flow() -> nn.Module:
    """Returns a flow of vectors of length 3."""
    torch.manual_seed(0)
    return fb.flows.RealNVP(3)


def autoencoder() -> fb.vae.Autoencoder:
    """Returns an autoencoder of vectors of length 3."""
    torch.manual_seed(0)
    return fb.vae.VAE((3,), 2, hidden=(4,))


def noisy_network() -> nn.Module:
    """Returns the network with noise on its layers."""
    return fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})


def loader(rows: int = 24, regression: bool = False) -> Any:
    """Returns a loader of shuffled batches of four, with classes or, for regression, real numbers as targets."""
    targets = vectors(rows, 2) if regression else torch.arange(rows) % 2
    generator = torch.Generator().manual_seed(3)
    return fb.data.TensorLoader(vectors(rows, 3), targets, batch_size=4, shuffle=True, generator=generator)


def vectors(*shape: int) -> Tensor:
    """Returns random numbers from 0 to 1, the same in every call."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


def point_posterior() -> fb.Posterior:
    """Returns a posterior of one network."""
    return cached_fit("map")


# arguments of the fits, by the name of the argument, or by those of the function and the argument
FIT_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "network": network,
    "flowbnn.fit.network": noisy_network,
    "model": noisy_network,
    "flow": flow,
    "data": lambda: vectors(24, 3),
    "log_density": lambda: lambda x: -x.square().sum(-1),
    "cross_calibrate.make_network": lambda: network,
    "cross_calibrate.data": lambda: loader(),
    "gated.posterior": point_posterior,
    "fit_autoencoder.model": autoencoder,
    "fit_autoencoder.data": lambda: vectors(24, 3).round(),
}


def public_names() -> list[tuple[str, Any]]:
    """Returns the classes and functions in ``__all__`` of the public modules, each once, with its full name."""
    names: dict[int, tuple[str, Any]] = {}
    for module in [fb, *filter(inspect.ismodule, map(vars(fb).get, fb.__all__))]:
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                names.setdefault(id(thing), (f"{module.__name__}.{name}", thing))
    return list(names.values())


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the annotations of the parameters of a function, or of the constructor of a class."""
    owner: Any = function.__init__ if inspect.isclass(function) else function
    try:
        hints = typing.get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, AttributeError):
        hints = {}
    parameters = inspect.signature(function).parameters
    return {name: hints.get(name, parameter.annotation) for name, parameter in parameters.items()}


def choices(annotation: Any) -> list[Any]:
    """Returns the values that an annotation lists."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return list(arguments)
    if origin in (typing.Union, types.UnionType):
        return [value for argument in arguments for value in choices(argument)]
    if origin is typing.Annotated:
        return choices(arguments[0])
    return [False, True] if annotation is bool else [None] if annotation is types.NoneType else []


@dataclass(frozen=True)
class Fit:
    """A fit with some settings.

    Args:
        name: Name of the method or function.
        settings: Names and values of settings.
        regression: If True, the targets are real numbers instead of classes.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    regression: bool = False

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings)
        return f"{self.name}({settings}){' regression' if self.regression else ''}"

    @property
    def function(self) -> Callable[..., Any]:
        """Function that fits."""
        method = METHODS.get(self.name)
        if method is None:
            return FUNCTIONS[self.name]
        names = {field.name for field in fields(method)}
        return small_method(method, **{name: value for name, value in self.settings if name in names}).fit

    def __call__(self, **kwargs: Any) -> Any:
        """Runs the fit, with seed 0 unless another is given, and returns its result."""
        function = self.function
        parameters = inspect.signature(function).parameters
        arguments: dict[str, Any] = {}
        for name, parameter in parameters.items():
            keys = (f"flowbnn.{self.name}.{name}", f"{self.name}.{name}", name)
            factory = next((FIT_ARGUMENTS[key] for key in keys if key in FIT_ARGUMENTS), None)
            if factory is not None and parameter.default is parameter.empty:
                arguments[name] = factory()
        if "loader" in parameters or "held_out" in parameters:
            name = "loader" if "loader" in parameters else "held_out"
            arguments[name] = loader(regression=self.regression)
        if self.name not in METHODS:
            arguments |= small_settings(function)
        arguments |= {name: value for name, value in self.settings if name in parameters}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(**{**arguments, "seed": 0, "progress": False, **kwargs})

    @property
    def has_checkpoint(self) -> bool:
        """True if the fit can be resumed from a checkpoint. A calibrator without a method trains nothing."""
        method = METHODS.get(self.name)
        if method is not None and issubclass(method, Calibrator) and not dict(self.settings).get("method"):
            return False
        return "checkpoint" in inspect.signature(self.function).parameters

    def load(self, path: Any) -> Any:
        """Loads a saved result of this fit."""
        result = cached_fit(self)
        if isinstance(result, fb.Posterior):
            return fb.load_posterior(path, network().to(next(result.model.parameters()).dtype))
        if isinstance(result, fb.vae.Autoencoder):
            return fb.vae.load_autoencoder(path, autoencoder().to(next(result.parameters()).dtype))
        return fb.load_density(path, flow().to(next(result.parameters()).dtype))


def small_settings(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns settings that make a call of a function or a method short."""
    function_name, settings = getattr(function, "__name__", ""), {}
    for name, annotation in annotations_of(function).items():
        values = SMALL_SETTINGS.get(f"{function_name}.{name}") or SMALL_SETTINGS.get(name) or []
        allowed = [value for value in values if allows(annotation, value) and annotation is not Any]
        if allowed:
            settings[name] = allowed[0]
    return settings


def small_method(method: str | type[fb.methods.Method], **settings: Any) -> Any:
    """Returns a method, by its name or class, with settings that make its fit short."""
    method = METHODS[method] if isinstance(method, str) else method
    try:
        return method(**small_settings(method) | settings)
    except fb.FlowBNNError:  # a calibrator has no settings of a training
        return method(**settings)


def _fit_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the public functions that fit, by their names."""
    for name, thing in public_names():
        if inspect.isfunction(thing) and "seed" in inspect.signature(thing).parameters:
            result = typing.get_type_hints(thing).get("return")
            returns_posterior = inspect.isclass(result) and issubclass(result, fb.Posterior)
            if returns_posterior or "checkpoint" in inspect.signature(thing).parameters:
                yield name.split(".")[-1], thing


FUNCTIONS = dict(_fit_functions())
FITS = (*METHODS, *FUNCTIONS)


@cache
def settings_of(name: str) -> tuple[tuple[str, Any], ...]:
    """Returns the names and values of all settings of a fit that differ from its defaults."""
    function = Fit(name).function
    owners: list[Callable[..., Any]] = [METHODS[name], function] if name in METHODS else [function]
    settings = []
    for owner in owners:
        parameters = inspect.signature(owner).parameters
        defaults = {key: parameter.default for key, parameter in parameters.items()} | small_settings(owner)
        for key, annotation in annotations_of(owner).items():
            settings += [
                (key, value)
                for value in choices(annotation)
                if not FIXED_SETTINGS & {key, f"{name}.{key}", value} and value != defaults[key]
            ]
    return tuple(settings)


def random_fit(name: str, rng: random.Random) -> Fit:
    """Returns a fit with at most two random settings that it does not reject."""
    while True:
        settings = settings_of(name)
        chosen = dict(rng.sample(settings, min(len(settings), rng.choice([0, 1, 1, 2]))))
        fit = Fit(name, tuple(chosen.items()), rng.random() < 0.3)
        try:
            cached_fit(fit)
        except fb.FlowBNNError:
            continue
        except Exception:  # the caller meets this failure again and counts it
            return fit
        return fit


@lru_cache(maxsize=64)
def cached_fit(fit: Fit | str) -> Any:
    """Returns the result of a fit, which is computed once."""
    return (Fit(fit) if isinstance(fit, str) else fit)()


def named_tensors(result: Any, name: str = "") -> dict[str, Tensor]:
    """Returns all numbers of a result as tensors, by their path in it. Times are left out."""
    if isinstance(result, Tensor):
        return {name: result.detach()}
    if isinstance(result, int | float):
        return {name: torch.tensor(float(result), dtype=torch.float64)}
    items: Mapping[Any, Any] = {}
    if isinstance(result, fb.Posterior):
        extra = {key: getattr(result, key, None) for key in ("history", "calibration", "report")}
        items = result.tensors() | extra
    elif isinstance(result, nn.Module):
        items = result.state_dict() | {"history": getattr(result, "history", None)}
    elif isinstance(result, Mapping):
        items = result
    elif is_dataclass(result):
        items = {
            field.name: getattr(result, field.name) for field in fields(result) if field.name != "seconds"
        }
    elif isinstance(result, fb.predictive.Predictive):
        items = vars(result)
    elif isinstance(result, Sequence) and not isinstance(result, str):
        items = dict(enumerate(result))
    return {
        key: value
        for item_name, item in items.items()
        for key, value in named_tensors(item, f"{name}/{item_name}").items()
    }


def equal_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Returns whether two results have the same numbers, to the bit."""
    kinds = [
        {key: (value.shape, value.dtype) for key, value in tensors.items()} for tensors in (first, second)
    ]
    return kinds[0] == kinds[1] and all(as_bytes(first[key]).equal(as_bytes(second[key])) for key in first)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor."""
    # a tensor with one element may be contiguous with any stride
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
