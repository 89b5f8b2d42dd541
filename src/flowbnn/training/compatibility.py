"""Checks that the contents of a file fit the object that loads them: tensors, layers and the state of an optimizer.

Every load and every resumed run compares names, shapes, dtypes and finiteness by :func:`check_tensors`, and layers by
:func:`describe_layers`. Nothing of the object changes before all checks have passed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from flowbnn.errors import FlowBNNError, warn
from flowbnn.training.history import History
from flowbnn.training.storage import TensorFile, save_tensors


def strip_prefix(name: str, prefix: str) -> str:
    """Returns the name of a module or parameter relative to the submodule ``prefix``; other names are unchanged.

    >>> strip_prefix("network.fc1.weight", "network"), strip_prefix("likelihood.scale", "network")
    ('fc1.weight', 'likelihood.scale')
    """
    if not prefix:
        return name
    return "" if name == prefix else name.removeprefix(prefix + ".")


# -------------------- tensors


def check_tensors(
    expected: Mapping[str, Any],
    stored: Mapping[str, Any],
    source: str | Path,
    *,
    owner: str = "the network",
    name_prefix: str = "",
    finite: bool = False,
) -> None:
    """Raises an error if stored tensors do not have the expected names, shapes and dtypes, or are not finite.

    Args:
        expected: Tensors and plain values by name, as the object has them.
        stored: Tensors and plain values by name, as the file has them.
        source: File, for messages.
        owner: Name of the object, for messages.
        name_prefix: Name of a submodule that messages leave out.
        finite: If True, stored numbers must be finite. Entries that are not finite in the object either, as in a mask, are exempt.

    >>> check_tensors({"weight": torch.ones(2)}, {"weight": torch.ones(3)}, "a.safetensors")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: 'a.safetensors' does not fit the network: weight is (3,) in the file, (2,) here
    """
    differences = {
        strip_prefix(name, name_prefix): difference
        for name in dict.fromkeys([*expected, *stored])
        if (difference := _difference(name, expected, stored))
    }
    if differences:
        description = _first_few([f"{name} {difference}" for name, difference in differences.items()])
        text = f"'{source}' does not fit {owner}: {description}"
        raise FlowBNNError(text, kind="architecture", differences=differences)
    for name in stored if finite else ():
        if _is_less_finite(stored[name], expected[name]):
            layer = strip_prefix(name, name_prefix)
            text = f"'{source}' has NaN or infinite values in {layer!r}; use an earlier file or start again"
            raise FlowBNNError(text, kind="not finite", layer=layer)


def check_weights(
    model: nn.Module,
    state: Mapping[str, Any],
    source: str | Path,
    name_prefix: str = "",
    finite: bool = False,
) -> None:
    """Raises an error if a state does not have the names, shapes and dtypes of a network, or is not finite.

    Args:
        model: Network that is to load the state.
        state: Tensors by name.
        source: File of the state, for messages.
        name_prefix: Name of a submodule that messages leave out.
        finite: If True, stored numbers must be finite, except where those of the network are not.

    >>> check_weights(nn.Linear(2, 1), nn.Linear(3, 1).state_dict(), "a.safetensors")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: 'a.safetensors' does not fit the network: weight is (1, 3) in the file, (1, 2) here
    """
    check_tensors(model.state_dict(), state, source, name_prefix=name_prefix, finite=finite)


def _difference(name: str, expected: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """Returns a description of the difference between a stored and an expected value, or an empty string."""
    if name not in stored or name not in expected:
        return "is not stored" if name not in stored else "is not here"
    value, current = stored[name], expected[name]
    if not isinstance(value, Tensor) or not isinstance(current, Tensor):
        return "" if _kind(value) == _kind(current) else "has another type"
    if value.shape != current.shape:
        return f"is {tuple(value.shape)} in the file, {tuple(current.shape)} here"
    if value.dtype != current.dtype:
        return f"is {value.dtype} in the file, {current.dtype} here".replace("torch.", "")
    return ""


def _kind(value: Any) -> type:
    """Returns the type of a plain value. Numbers and None have the same one, because a record may begin as None."""
    return float if isinstance(value, bool | int | float | None) else type(value)


def _is_less_finite(value: Any, current: Any) -> bool:
    """Returns True if a stored tensor is not finite where the current one is."""
    if not isinstance(value, Tensor) or bool(value.isfinite().all()):
        return False
    return bool((~value.isfinite() & current.isfinite().to(value.device)).any())


def _first_few(items: list[str], limit: int = 3) -> str:
    """Returns the first items of a list, and the number of the others."""
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


# -------------------- layers


def describe_layers(model: nn.Module) -> dict[str, str]:
    """Returns the class of every layer, with its settings.

    Layers are the modules without children, those of flows, and those with a function as attribute, such as an activation. Settings are
    the plain public attributes of layers of torch and of flows. Of user-defined layers only the functions are included, because other
    attributes may change in use. The name of the network itself is empty.

    >>> describe_layers(nn.Sequential(nn.Linear(2, 3), nn.LeakyReLU(0.2)))
    {'0': 'Linear(in_features=2, out_features=3)', '1': 'LeakyReLU(negative_slope=0.2)'}
    """
    descriptions = {}
    subpackages = "transforms", "distributions", "flows", "nets", "vae.decoders"
    packages = ("torch.nn.modules.", *(f"flowbnn.{name}." for name in subpackages))
    for name, module in model.named_modules():
        structural = f"{type(module).__module__}.".startswith(packages)
        settings = _plain_attributes(module) if structural else _functions(module)
        if (name and (structural or next(module.children(), None) is None)) or (settings and not structural):
            arguments = ", ".join(f"{key}={value}" for key, value in settings.items())
            descriptions[name] = f"{type(module).__name__}({arguments})"
    return descriptions


def _plain_attributes(module: nn.Module) -> dict[str, str]:
    """Returns descriptions of the public attributes of a layer that are numbers, strings, functions or options."""
    transient = "training", "inplace", "is_initialized", "use_nested_tensor"  # do not change the function
    values = {
        name: _describe_setting(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in transient
    }
    return {name: description for name, description in values.items() if description}


def _functions(module: nn.Module) -> dict[str, str]:
    """Returns the names of the functions among the public attributes of a user-defined layer."""
    return {
        name: value.__name__
        for name, value in vars(module).items()
        if isinstance(value, FunctionType | BuiltinFunctionType)
        and not name.startswith("_")
        and name != "forward"
    }


def _describe_setting(value: Any) -> str:
    """Returns a description of a setting that is the same in every process, or an empty string for other values."""
    if isinstance(value, bool | int | float | str | None | torch.dtype | torch.Size):
        return repr(value)
    if isinstance(value, list | tuple):
        entries = [_describe_setting(entry) for entry in value]
        return f"({', '.join(entries)})" if all(entries) else ""
    parameters: Any = getattr(value, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen and not isinstance(value, type):
        pairs = {entry.name: _describe_setting(getattr(value, entry.name)) for entry in fields(value)}
        arguments = [f"{name}={setting}" for name, setting in pairs.items() if setting]
        return f"{type(value).__name__}({', '.join(arguments)})"
    return getattr(value, "__name__", "") if callable(value) else ""


def changed_layers(model: nn.Module, stored: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns the layers that differ from the stored ones, each as it was and as it is.

    Args:
        model: Network that loads the weights.
        stored: Descriptions that :func:`describe_layers` returned.
    """
    current = describe_layers(model)
    pairs = {
        name: (stored.get(name, "absent"), current.get(name, "absent")) for name in {**stored, **current}
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def warn_changed_layers(model: nn.Module, stored: Mapping[str, str], path: Any) -> None:
    """Warns if the layers of a network, such as its activations, are not those that it had when its weights were saved.

    Args:
        model: Network that loads the weights.
        stored: Descriptions that :func:`describe_layers` returned.
        path: File of the weights, for the message.
    """
    changed = changed_layers(model, stored) if stored else {}
    if changed:
        layers = _first_few(
            [f"'{name or 'network'}' was {before} and is {now}" for name, (before, now) in changed.items()]
        )
        text = f"'{path}' was saved from a network with other layers ({layers}), so its predictions differ"
        warn(text, kind="layers", changed=changed)


# -------------------- modules


def count_weights(module: nn.Module) -> int:
    """Returns the number of values that the state of a module holds."""
    values = [value for value in module.state_dict().values() if isinstance(value, Tensor)]
    return sum(value.numel() for value in values if not is_lazy(value))


def save_module(path: str | PathLike[str], module: nn.Module, kind: str, history: History) -> Path:
    """Writes the tensors of a module, its layers and its history to one safetensors file, atomically.

    Args:
        path: Path of the file.
        module: Module to save.
        kind: Kind of the file.
        history: Record of the training.
    """
    document = {"kind": kind, "history": history.to_dict(), "layers": describe_layers(module)}
    return save_tensors(path, module.state_dict(), document)


def read_module(file: TensorFile, module: nn.Module, kind: str) -> History:
    """Reads the tensors of a file of :func:`save_module` into a module.

    Args:
        file: File to read.
        module: Module to change. It is unchanged if the file does not fit it.
        kind: Kind of the file.

    Returns:
        Record of the training.

    Raises:
        FlowBNNError: If kind, layers, their settings, or tensors differ, or if numbers are not finite.
    """
    if file.document.get("kind") != kind:
        raise FlowBNNError(f"'{file}' holds no {kind}", kind="file", argument="path")
    check_weights(module, file.views, file.path)  # before any tensor is read
    with file.reading():
        changed = changed_layers(module, dict(file.document["layers"]))
        history = History.from_dict(file.document["history"])
    if changed:
        layers = _first_few(
            [
                f"'{name or 'network'}' is {before} there, {now} here"
                for name, (before, now) in changed.items()
            ]
        )
        text = f"'{file}' was saved from other layers: {layers}"
        raise FlowBNNError(text, kind="architecture", differences=changed)
    check_weights(module, file.tensors, file.path, finite=True)
    module.load_state_dict(file.tensors)
    return history


# -------------------- optimizers


def merge_groups(optimizer: Optimizer, stored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns parameter groups with the stored hyperparameters and the implementation (``fused``, ``foreach``) of this run.

    Args:
        optimizer: Optimizer of this run.
        stored: Parameter groups that ``state_dict`` returned.
    """
    implementation = "params", "foreach", "fused", "capturable", "differentiable"
    return [
        {**current, **group, **{name: current[name] for name in implementation if name in current}}
        for current, group in zip(optimizer.state_dict()["param_groups"], stored, strict=True)
    ]


def check_optimizer_state(
    optimizer: Optimizer, stored: Mapping[str, Any], names: Sequence[str], source: Path, finite: bool = False
) -> None:
    """Raises an error if a stored state is not one that this optimizer makes for these parameters.

    Fused optimizers walk over the memory of their state without checking its shape. A wrong shape would corrupt memory.

    Args:
        optimizer: Optimizer that is to load the state.
        stored: State that ``state_dict`` returned.
        names: Name of every parameter, in the order of the optimizer.
        source: File of the state, for messages.
        finite: If True, stored numbers must be finite.
    """

    def flatten(states: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
        owners = {number: names[number] if number in range(len(names)) else repr(number) for number in states}
        return {
            f"{key} of {owners[number]}": value for number in states for key, value in states[number].items()
        }

    states = stored["state"]
    fresh = enumerate(_fresh_states(optimizer, merge_groups(optimizer, stored["param_groups"])))
    expected = {number: state for number, state in fresh if states.get(number)}
    check_tensors(flatten(expected), flatten(states), source, owner="the optimizer", finite=finite)


def _fresh_states(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the state of every parameter after one step with a gradient of zero. The optimizer is not changed.

    Args:
        optimizer: Optimizer to imitate.
        groups: Parameter groups with the hyperparameters to use.
    """
    trial = object.__new__(type(optimizer))  # copies by `copy` lose the attributes of user-defined optimizers
    vars(trial).update(vars(optimizer), _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
    vars(trial).pop("step", None)  # a schedule replaces it by a function that steps the original
    for current, group in zip(optimizer.param_groups, groups, strict=True):
        for parameter in current["params"]:
            if optimizer.state.get(parameter):  # some optimizers make their state when they are created
                yield optimizer.state[parameter]
                continue
            zeros = torch.zeros_like(parameter).requires_grad_()
            zeros.grad = torch.zeros_like(parameter)
            trial.param_groups, trial.state = [{**group, "params": [zeros]}], defaultdict(dict)
            trial.step()
            yield trial.state[zeros]


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Moves the state of an optimizer to the device and dtype of its parameters, except the step number.

    Most optimizers make their state in the first step. Adagrad and a few others make it when they are created, and the parameters may
    have moved since.

    Args:
        optimizer: Optimizer to change.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                state[name] = value.to(parameter.device, parameter.dtype)


def load_optimizer(optimizer: Optimizer, stored: dict[str, Any]) -> None:
    """Loads the state of an optimizer, but keeps the implementation (``fused``, ``foreach``) of this run.

    Args:
        optimizer: Optimizer to change.
        stored: State that ``state_dict`` returned.
    """
    optimizer.load_state_dict({**stored, "param_groups": merge_groups(optimizer, stored["param_groups"])})
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # files store the plain memory layout, but fused updates require the layout of the parameter
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
