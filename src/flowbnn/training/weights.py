"""Stored weights against a model: do names, shapes and kinds fit, and are they numbers?"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training.guard import is_finite, name_below
from flowbnn.training.state import decode_state
from flowbnn.training.storage import load_tensors

__all__ = [
    "check_architecture",
    "check_finite_weights",
    "check_same_kind",
    "kinds_of",
    "load_weights",
    "warn_of_other_kinds",
]


def check_architecture(
    model: nn.Module, state: Mapping[str, Any], source: str | Path, names_below: str = ""
) -> None:
    """Refuse a state that does not fit the model's names, shapes and kinds of numbers, naming the first few.

    ``names_below`` is left out of the names, as in :func:`flowbnn.training.train`.
    """
    check_same_kind(model.state_dict(), state, source, names_below)


def check_same_kind(
    own: Mapping[str, Any], state: Mapping[str, Any], source: str | Path, names_below: str = ""
) -> None:
    """Refuse named tensors that are not of the same names, shapes and kinds as one's ``own``."""

    def told(names: Iterable[Any]) -> list[str]:
        return [name_below(str(name), names_below) for name in names]

    differences = [
        _difference(name_below(name, names_below), state[name], own[name]) for name in own if name in state
    ]
    found = [
        _few("it lacks", told(name for name in own if name not in state)),
        _few("it has besides", told(name for name in state if name not in own)),
        _few("it differs in", [difference for difference in differences if difference]),
    ]
    if any(found):
        raise FlowBNNError(f"'{source}' is of another architecture: {'; '.join(filter(None, found))}")


def check_finite_weights(
    state: Mapping[str, Any], names: Iterable[str], source: str | Path, names_below: str = ""
) -> None:
    """Refuse a state in which a tensor of ``names`` holds NaN or infinite numbers.

    >>> import torch
    >>> check_finite_weights({"bias": torch.tensor([1.0, float("nan")])}, ["bias"], "a.safetensors")
    Traceback (most recent call last):
    ...
    flowbnn.errors.FlowBNNError: 'a.safetensors' holds NaN or infinite weights in 'bias'; take an earlier file or begin anew
    """
    for name in names:
        value = state.get(name)
        if isinstance(value, Tensor) and not is_finite(value):
            raise FlowBNNError(
                f"'{source}' holds NaN or infinite weights in {name_below(name, names_below)!r}; "
                "take an earlier file or begin anew"
            )


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights of a training checkpoint (those of the best epoch, where it kept them) into a model.

    The model is untouched when the file does not fit, or when a trainable parameter in it is not finite.
    """
    tensors, document = load_tensors(path)
    try:
        tree = document["state"]["best_weights"] or document["state"]["weights"]
        state = decode_state(tree, tensors)["model"]
        assert isinstance(state, dict)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, RecursionError):
        raise FlowBNNError(f"'{path}' is no checkpoint of a training run") from None
    check_architecture(model, state, path)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    check_finite_weights(state, trainable, path)
    model.load_state_dict(state)
    return model


def _difference(name: str, stored: Any, own: Any) -> str:
    if not isinstance(own, Tensor) or not isinstance(stored, Tensor):
        return "" if isinstance(own, Tensor) == isinstance(stored, Tensor) else name
    if stored.shape != own.shape:
        return f"{name} ({tuple(stored.shape)} there, {tuple(own.shape)} here)"
    if stored.dtype != own.dtype:
        kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (stored, own)]
        return f"{name} ({kinds[0]} there, {kinds[1]} here)"
    return ""


def _few(words: str, names: list[str], most: int = 3) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{words} {', '.join(names[:most])}{rest}"


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


def warn_of_other_kinds(model: nn.Module, stored: Any, path: Any) -> None:
    """Weights fit a network whose activations are others, and mean something else there."""
    if not isinstance(stored, dict):  # a file of an earlier flowbnn
        return
    own = kinds_of(model)
    other = [
        f"'{name}' is {_a(own[name])} and was {_a(stored[name])}"
        for name in own
        if name in stored and own[name] != stored[name]
    ]
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        warnings.warn(
            f"'{path}' was made from a network of other layers: {', '.join(other[:3])}{more}; its predictions here are not those "
            "of the network that was trained",
            FlowBNNWarning,
        )


def _a(kind: Any) -> str:
    return f"an {kind}" if str(kind)[:1] in "AEIOaeio" else f"a {kind}"
