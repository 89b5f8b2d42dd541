"""Does a stored state fit a network? Names, shapes and kinds of its weights, and the classes of its layers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowbnn.batches import first_nonfinite_tensor
from flowbnn.errors import FlowBNNError, warn


def name_below(name: str, root: str) -> str:
    """The name of a module or parameter as seen from the submodule ``root``; one outside it keeps its name.

    >>> name_below("network.fc1.weight", "network"), name_below("likelihood.scale", "network")
    ('fc1.weight', 'likelihood.scale')
    """
    if not root:
        return name
    return "" if name == root else name.removeprefix(root + ".")


def check_weights(
    model: nn.Module,
    state: Mapping[str, Any],
    source: str | Path,
    names_below: str = "",
    finite: Iterable[str] = (),
) -> None:
    """Refuse a state that does not fit the model's names, shapes and kinds of numbers, or is not finite, naming the first few.

    Args:
        names_below: is left out of the names, as in :func:`flowbnn.training.train`.
        finite: names of tensors that must be.

    >>> check_weights(nn.Linear(2, 1), nn.Linear(3, 1).state_dict(), "a.safetensors")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: 'a.safetensors' is of another architecture: it differs in weight ((1, 3) there, (1, 2) here)
    """
    own = model.state_dict()
    unlike = {name: _unlike(state[name], own[name]) for name in own if name in state}
    differences = {
        "it lacks": [name_below(name, names_below) for name in own if name not in state],
        "it has besides": [name_below(name, names_below) for name in state if name not in own],
        "it differs in": [f"{name_below(name, names_below)} ({how})" for name, how in unlike.items() if how],
    }
    words = [f"{what} {_few(names)}" for what, names in differences.items() if names]
    trouble = f"is of another architecture: {'; '.join(words)}" if words else ""
    layer = None if trouble else first_nonfinite_tensor((name, state[name]) for name in finite)
    if layer is not None:
        layer = name_below(layer, names_below)
        trouble = f"holds NaN or infinite weights in {layer!r}; take an earlier file or begin again"
    if trouble:
        raise FlowBNNError(
            f"'{source}' {trouble}", kind="not finite" if layer else "architecture", layer=layer
        )


def _unlike(stored: Any, own: Any) -> str:
    """How two entries of a state differ, in words."""
    if not isinstance(stored, Tensor) or not isinstance(own, Tensor):
        return "" if type(stored) is type(own) else "no tensor on one side"
    if stored.shape != own.shape:
        return f"{tuple(stored.shape)} there, {tuple(own.shape)} here"
    same = stored.dtype == own.dtype
    return "" if same else f"{stored.dtype} there, {own.dtype} here".replace("torch.", "")


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def kinds_of(model: nn.Module) -> dict[str, str]:
    """The class of every module that holds no others: what computes with the weights, or between them.

    >>> kinds_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    {'0': 'Linear', '1': 'ReLU'}
    """
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if name and next(module.children(), None) is None
    }


def warn_of_other_kinds(model: nn.Module, stored: Mapping[str, str], path: Any) -> None:
    """Weights fit a network whose activations are others, and mean something else there."""
    own = kinds_of(model)
    changed = {name: (stored[name], own[name]) for name in own if stored.get(name, own[name]) != own[name]}
    if changed:
        words = _few([f"'{name}' was {before} and is {now}" for name, (before, now) in changed.items()])
        warn(
            f"'{path}' was made from a network of other layers: {words}; its predictions here are not those of the network that "
            "was trained",
            kind="layers",
            changed=changed,
        )
