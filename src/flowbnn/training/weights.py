"""Do stored weights fit a network? Names, shapes, kinds of numbers, finiteness, and the classes of its layers."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training.finite import is_finite, name_below

__all__ = ["check_architecture", "check_finite_weights", "kinds_of", "warn_of_other_kinds"]


def check_architecture(
    model: nn.Module, state: Mapping[str, Any], source: str | Path, names_below: str = ""
) -> None:
    """Refuse a state that does not fit the model's names, shapes and kinds of numbers, naming the first few.

    ``names_below`` is left out of the names, as in :func:`flowbnn.training.train`.

    >>> check_architecture(nn.Linear(2, 1), nn.Linear(3, 1).state_dict(), "a.safetensors")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: 'a.safetensors' is of another architecture: it differs in weight ((1, 3) there, (1, 2) here)
    """
    own = model.state_dict()
    differences = [
        _few("it lacks", [name_below(name, names_below) for name in own if name not in state]),
        _few("it has besides", [name_below(name, names_below) for name in state if name not in own]),
        _few(
            "it differs in",
            [
                f"{name_below(name, names_below)} ({there} there, {here} here)"
                for name in own
                if name in state
                for there, here in [_unlike(state[name], own[name])]
                if there != here
            ],
        ),
    ]
    if any(differences):
        raise FlowBNNError(
            f"'{source}' is of another architecture: {'; '.join(filter(None, differences))}",
            kind="architecture",
        )


def _unlike(stored: Any, own: Any) -> tuple[str, str]:
    """Two words that differ where two entries of a state do."""
    if not isinstance(stored, Tensor) or not isinstance(own, Tensor):
        return str(isinstance(stored, Tensor)), str(isinstance(own, Tensor))
    if stored.shape != own.shape:
        return str(tuple(stored.shape)), str(tuple(own.shape))
    return str(stored.dtype).removeprefix("torch."), str(own.dtype).removeprefix("torch.")


def _few(words: str, names: list[str], most: int = 3) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{words} {', '.join(names[:most])}{rest}"


def check_finite_weights(
    state: Mapping[str, Any], names: Iterable[str], source: str | Path, names_below: str = ""
) -> None:
    """Refuse a state in which a tensor of ``names`` holds NaN or infinite numbers."""
    for name in names:
        value = state.get(name)
        if isinstance(value, Tensor) and not is_finite(value):
            layer = name_below(name, names_below)
            raise FlowBNNError(
                f"'{source}' holds NaN or infinite weights in {layer!r}; take an earlier file or begin again",
                kind="not finite",
                layer=layer,
            )


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
        words = [f"'{name}' was {before} and is {now}" for name, (before, now) in changed.items()]
        warnings.warn(
            FlowBNNWarning(
                f"'{path}' was made from a network of other layers: {_few('', words).strip()}; its predictions here are not "
                "those of the network that was trained",
                kind="layers",
                changed=changed,
            )
        )
