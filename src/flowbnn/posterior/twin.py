"""Networks that share their tensors and nothing else, so that a prediction may change one while other threads use the other."""

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.noise import Noise

PLAIN = frozenset([
    NoneType, bool, int, float, str, bytes, type, BuiltinFunctionType, ModuleType, Tensor, torch.Size, torch.dtype, torch.device
])  # fmt: skip
CONTAINERS = frozenset([dict, OrderedDict, list, tuple, set])
# a module's parts, tensors and hooks
TABLES = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)}
FURTHEST = 1000  # objects that are looked at


class _Bound(Exception):
    """Something in a network reaches its modules in a way that cannot be turned to others."""


def twin(network: nn.Module) -> nn.Module:
    """A network with modules of its own on the parameters and buffers of this one, in a fraction of a millisecond.

    Weights put into the place of its own, hooks, and its mode (``eval()``) do not touch ``network``; noise, on which a pass leaves
    nothing, is shared. ``torch.func.functional_call`` would not do: for the length of the call it puts the weights into the network
    itself, where other threads find them.

    A network that cannot be copied like this (TorchScript, ``torch.compile``, functions that hold its modules) is returned itself.

    >>> network = nn.Linear(2, 1)
    >>> other = twin(network)
    >>> other.weight is network.weight, other is network
    (True, False)
    """
    memo: dict[int, Any] = {}  # what stands in the place of what
    modules: list[nn.Module] = []
    waiting: list[nn.Module | None] = [network]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in memo:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            return network
        if isinstance(module, Noise):
            memo[id(module)] = module
            continue
        modules.append(module)
        memo[id(module)] = object.__new__(type(module))
        memo |= {id(one): one for held in (module._parameters, module._buffers) for one in held.values()}
        waiting += module._modules.values()
    memo.pop(id(None), None)
    try:
        for module in modules:
            made = memo[id(module)].__dict__
            for name, value in module.__dict__.items():
                if type(value) in PLAIN:
                    made[name] = value
                elif name not in TABLES:
                    made[name] = _copied(value, memo)
                else:
                    made[name] = table = value.copy()
                    for key, one in value.items():
                        table[key] = _copied(one, memo)
    except _Bound:
        return network
    return memo[id(network)]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A value that an attribute of a module has, with other modules in the place of those in ``memo``."""
    kind = type(value)
    if id(value) in memo:
        return memo[id(value)]
    if kind in PLAIN or isinstance(value, Tensor):
        return value
    made: Any = value  # what is not the network's is shared: whoever put it there may wait for what it gets
    if kind is MethodType:
        made = MethodType(value.__func__, _copied(value.__self__, memo))
    elif kind is weakref.ref:
        found = memo.get(id(value()), value())
        made = value if found is value() else weakref.ref(found)
    elif kind is partial:
        made = partial(*_copied((value.func, *value.args), memo), **_copied(value.keywords, memo))
    elif _reaches(value, memo):
        if kind is FunctionType:
            raise _Bound
        if isinstance(value, dict) and kind in CONTAINERS:
            made = kind({key: _copied(one, memo) for key, one in value.items()})
        elif kind in CONTAINERS:
            made = kind([_copied(one, memo) for one in value])
        else:
            try:
                made = deepcopy(value, memo)
            except Exception as error:  # whatever the reason, it cannot be turned to other modules
                raise _Bound from error
    memo[id(value)] = made
    return made


def _reaches(value: Any, memo: dict[int, Any]) -> bool:
    """Whether an object holds a module or a tensor of the network, itself or in what it holds."""
    waiting, seen = [value], {id(value)}
    while waiting and len(seen) < FURTHEST:
        one = waiting.pop()
        parts = list(vars(one).values()) if hasattr(one, "__dict__") and not isinstance(one, type) else []
        if isinstance(one, Mapping):
            parts += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            parts += one
        elif isinstance(one, MethodType):
            parts += [one.__self__, one.__func__]
        elif isinstance(one, FunctionType):
            parts += _held(one)
        elif isinstance(one, partial):
            parts += [one.func, one.args, one.keywords]
        for part in parts:
            if id(part) in memo:
                return True
            if id(part) not in seen and type(part) not in PLAIN:
                seen.add(id(part))
                waiting.append(part)
    return False


def _held(function: FunctionType) -> Iterator[Any]:
    """What a function holds of its surroundings."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
