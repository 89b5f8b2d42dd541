"""Stand-in for an accelerator on a machine without one: tensors that refuse to meet tensors of the CPU.

A :class:`DeviceTensor` holds its numbers in the memory of the CPU and reports the device ``mps``. Operations with a tensor of the CPU
that has axes raise the error that torch raises for two devices. Inside :func:`accelerator`, ``to`` and factory functions with this
device return such tensors, and ``flowbnn`` trains and predicts on it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("mps")
CPU = torch.device("cpu")
# functions that read tensors of several devices on any accelerator
ALLOWED = {
    "expand_as",
    "reshape_as",
    "view_as",
    "copy_",
    "to",
    "cpu",
    "type_as",
    "__getitem__",
    "__setitem__",
    "index_put_",
    "set_",
    "__set__",
    "_fused_adam_",
    "_has_compatible_shallow_copy_type",
}
Generator = torch.Generator


class DeviceTensor(Tensor):
    """Tensor on the stand-in device."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        with torch._C.DisableTorchFunctionSubclass():
            copy = self.detach().clone().as_subclass(DeviceTensor).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):  # nn.Parameter recognizes its instances by this attribute
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.__name__
        if name == "__get__" and (attribute := getattr(func, "__self__", None)) in (
            Tensor.device,
            Tensor.is_cpu,
        ):
            return DEVICE if attribute is Tensor.device else False
        leaves = tree_leaves((args, kwargs))
        strangers = [
            leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)
        ]
        if any(tensor.ndim for tensor in strangers) and name not in ALLOWED:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {DEVICE} and cpu in {name}"
            )
        args, kwargs, target = _without_device(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        to_host = target == CPU or name in ("cpu", "numpy", "tolist")
        return tree_map_only(Tensor, _to_host if to_host else _to_device, result)


def _to_device(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DeviceTensor):
        return tensor
    return tensor.as_subclass(DeviceTensor)


def _to_host(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _without_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], torch.device | None]:
    """Returns the arguments with the CPU in place of the stand-in device, and the device among them."""
    found: list[torch.device] = []

    def replace(value: Any) -> Any:
        if isinstance(value, torch.device) or (isinstance(value, str) and value in ("mps", "cpu")):
            found.append(torch.device(value))
            return CPU
        return value

    args = tuple(replace(value) for value in args)
    kwargs = {key: replace(value) for key, value in kwargs.items()}
    return args, kwargs, found[0] if found else None


class _Factories(TorchFunctionMode):
    """Mode in which factories and ``to`` make tensors on the stand-in device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ in ("_parse_to", "device") or any(issubclass(kind, DeviceTensor) for kind in types):
            return func(*args, **kwargs)
        new_args, new_kwargs, target = _without_device(args, kwargs)
        if target is None or target.type != DEVICE.type:
            return func(*args, **kwargs)
        return tree_map_only(Tensor, _to_device, func(*new_args, **new_kwargs))


class _Generator(Generator):
    """Generator of the stand-in device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return Generator.__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        pass


@contextmanager
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context manager in which ``flowbnn`` trains and predicts on the stand-in device."""
    monkeypatch.setattr(
        sys.modules["flowbnn.training.device"], "device_kind", lambda accelerator: DEVICE.type
    )
    monkeypatch.setattr(torch, "Generator", _Generator)
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: _to_host(tensor))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with _Factories():
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
