"""Stored state of an optimizer and of a schedule against the ones at hand, before either takes it over.

torch trusts what it is given: a moment of the wrong size makes its fused kernels read foreign memory. What a torch
optimizer keeps for a parameter is found out by one step of a stand-in with a gradient of zero.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flowbnn.errors import FlowBNNError
from flowbnn.training.schema import is_number

__all__ = ["fitting_optimizer_state", "fitting_schedule_state"]

HOW = ("foreach", "fused", "capturable", "differentiable")
"""How this run computes its steps, which is no state: kept from the optimizer at hand."""


def fitting_optimizer_state(
    stored: Any, optimizer: Optimizer, names: Sequence[str], source: str | Path
) -> dict[str, Any]:
    """The stored state as ``optimizer.load_state_dict`` can take it; one that does not fit is refused in one line.

    Args:
        stored: what ``optimizer.state_dict()`` gave when the file was written.
        optimizer: built as it was then; it is not changed.
        names: of its parameters, in its order, for the message.
        source: the file.
    """
    try:
        groups = _fitting_groups(stored["param_groups"], optimizer.state_dict()["param_groups"])
        state, base = stored["state"], _torch_base(optimizer)
        if not isinstance(state, dict):
            raise _Misfit("its state is no mapping")
        owners = [
            (group, p)
            for group, own in zip(groups, optimizer.param_groups, strict=True)
            for p in own["params"]
        ]
        for group, own in zip(groups, optimizer.param_groups, strict=True):
            if base is not None:
                _check_settings(base, optimizer.defaults, group, own)
        for key, entry in state.items():
            known = type(key) is int and 0 <= key < len(owners)
            if not known and base is None:
                continue  # optimizers from elsewhere may keep something of their own beside the parameters
            if not known or not isinstance(entry, dict):
                raise _Misfit(f"its state of parameter {key!r:.60} is not one of this optimizer")
            _check_entry(entry, base, optimizer, *owners[key], names[key])
    except (_Misfit, KeyError, TypeError) as error:
        told = error if isinstance(error, _Misfit) else f"{error!r:.100}"
        raise FlowBNNError(f"'{source}' does not fit this {type(optimizer).__name__}: {told}") from None
    return {**stored, "param_groups": groups}


def fitting_schedule_state(stored: Any, schedule: LRScheduler, source: str | Path) -> dict[str, Any]:
    """The stored state of a learning-rate schedule, or one line that says why it does not fit."""
    own, kind = schedule.state_dict(), type(schedule)
    try:
        if not isinstance(stored, dict):
            raise _Misfit("its state is no mapping")
        for key in stored:
            if key not in own and (key == "optimizer" or hasattr(kind, str(key))):
                raise _Misfit(f"{key!r:.60} is no part of its state")
        for key in own if kind.__module__.startswith("torch.optim.") else ():
            optional = key.startswith("_") or key == "verbose"  # these come and go with torch's versions
            if key not in stored and not optional:
                raise _Misfit(f"its {key!r} is missing")
            if key in stored and not _same_kind(stored[key], own[key]):
                raise _Misfit(f"its {key!r} is {stored[key]!r:.60}")
    except _Misfit as error:
        raise FlowBNNError(f"'{source}' does not fit this {kind.__name__}: {error}") from None
    return stored


class _Misfit(Exception):
    """What does not fit, in words."""


def _fitting_groups(stored: Any, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(stored, list) or len(stored) != len(own):
        raise _Misfit(f"it has {len(own)} parameter groups, which the file has not")
    return [_fitting_group(group, mine) for group, mine in zip(stored, own, strict=True)]


def _fitting_group(stored: Any, own: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(stored, dict) or stored.get("params") != own["params"] or "lr" not in stored:
        raise _Misfit("a parameter group has other parameters or no learning rate")
    group = {**own, **stored, **{key: own[key] for key in HOW if key in own}}
    for key, value in group.items():
        if key in own and not _same_kind(value, own[key]):
            raise _Misfit(f"its setting {key!r} is {value!r:.60}")
    rates = [group["lr"]] if is_number(group["lr"]) else []
    if any(not math.isfinite(rate) or rate < 0 for rate in rates):
        raise _Misfit(f"its learning rate is {group['lr']}")
    return group


def _same_kind(stored: Any, own: Any) -> bool:
    if own is None:
        return stored is None or isinstance(stored, (bool, str)) or is_number(stored)
    if isinstance(own, (bool, str)):
        return type(stored) is type(own)
    if isinstance(own, (int, float)):
        return is_number(stored) and not math.isnan(stored)
    if isinstance(own, Tensor):
        return isinstance(stored, Tensor) and stored.shape == own.shape and not _has_nan(stored)
    if isinstance(own, (list, tuple)):
        fits = isinstance(stored, (list, tuple)) and len(stored) == len(own)
        return fits and all(_same_kind(a, b) for a, b in zip(stored, own, strict=True))
    if isinstance(own, Counter):
        fits = isinstance(stored, Counter)
        return fits and all(is_number(k) and type(v) is int for k, v in stored.items())
    if isinstance(own, Mapping):
        fits = isinstance(stored, Mapping) and stored.keys() == own.keys()
        return fits and all(_same_kind(stored[key], own[key]) for key in own)
    return True


def _torch_base(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch's own that the optimizer is, or is derived from."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim.") and kind is not Optimizer:
            return kind
    return None


def _kept_state(
    base: type[Optimizer], defaults: Mapping[str, Any], group: Mapping[str, Any], parameter: Tensor
) -> dict[str, Any] | None:
    """What ``base`` keeps for a parameter, by one step of a stand-in; None when that step fails."""
    stand_in = torch.zeros_like(parameter, device="cpu", requires_grad=False)
    stand_in.grad = torch.zeros_like(stand_in)
    how = {key: False for key in HOW if key in group}
    copy = base.__new__(base)
    copy.__setstate__(
        {
            "defaults": {**defaults, "differentiable": False},
            "state": defaultdict(dict),
            "param_groups": [{**group, **how, "params": [stand_in]}],
        }
    )
    try:
        with torch.no_grad():
            copy.step()
    except Exception:
        return None  # the settings make no sense, or it needs sparse gradients
    return dict(copy.state[stand_in])


def _check_settings(
    base: type[Optimizer], defaults: Mapping[str, Any], group: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    smallest = min(own["params"], key=Tensor.numel, default=None)
    if smallest is None or _kept_state(base, defaults, group, smallest) is not None:
        return
    if _kept_state(base, defaults, own, smallest) is not None:
        plain = {key: value for key, value in group.items() if key != "params"}
        raise _Misfit(f"it refuses the stored settings {plain!r:.150}")


def _check_entry(
    entry: dict[str, Any],
    base: type[Optimizer] | None,
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: Tensor,
    name: str,
) -> None:
    kept = _kept_state(base, optimizer.defaults, group, parameter) or {} if base is not None else {}
    for key, value in kept.items():
        if value is not None and entry.get(key) is None:
            raise _Misfit(f"its {key!r} of {name!r} is missing")
    for key, value in entry.items():
        _check_value(str(key), value, kept.get(key), base is not None, parameter, name)


def _check_value(key: str, value: Any, kept: Any, strictly: bool, parameter: Tensor, name: str) -> None:
    if isinstance(value, Tensor):
        shapes = (
            [kept.shape] if isinstance(kept, Tensor) else [parameter.shape, torch.Size(), torch.Size([1])]
        )
        if strictly and value.shape not in shapes:
            raise _Misfit(f"its {key!r} of {name!r} is {tuple(value.shape)}, not {tuple(shapes[0])}")
        kind = kept.dtype if isinstance(kept, Tensor) else parameter.dtype
        if strictly and value.dtype != kind and not (value.is_floating_point() and kind.is_floating_point):
            raise _Misfit(f"its {key!r} of {name!r} is of {value.dtype}, not {kind}")
        if _has_nan(value):
            raise _Misfit(f"its {key!r} of {name!r} holds NaN")
    elif isinstance(kept, Tensor) or (strictly and not (value is None or is_number(value))):
        raise _Misfit(f"its {key!r} of {name!r} is {value!r:.60}")
    if strictly and key == "step" and value is not None:
        count = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not is_number(count) or not 0 <= count < math.inf:
            raise _Misfit(f"its step count of {name!r} is {count!r:.60}")


def _has_nan(tensor: Tensor) -> bool:
    return bool(torch.isnan(tensor).any()) if tensor.is_floating_point() or tensor.is_complex() else False
