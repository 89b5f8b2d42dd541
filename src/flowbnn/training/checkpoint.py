"""The checkpoint of a training run: everything needed to go on as if it had never stopped."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowbnn.errors import FlowBNNError
from flowbnn.training.history import Averages, History
from flowbnn.training.options import EarlyStop, TrainingOptions
from flowbnn.training.storage import load_document, load_tensors, save_tensors
from flowbnn.training.weights import check_architecture, check_finite_weights

__all__ = [
    "Position",
    "changed_settings",
    "changed_structure",
    "decode_state",
    "encode_state",
    "load_optimizer",
    "load_weights",
    "read_checkpoint",
    "unfinished",
    "write_checkpoint",
]

KIND = "__kind__"


@dataclass
class Position:
    """How far a run has come, and what it remembers on the way."""

    epoch: int = 0
    batches: int = 0  # of the present epoch that are done
    step: int = 0
    best: float | None = None  # value of the monitored number
    waited: int = 0  # epochs since then
    batches_per_epoch: int | None = None
    monitor: str | None = None
    mode: str | None = None
    averages: Averages = field(default_factory=Averages)
    history: History = field(default_factory=History)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {**vars(self), "averages": self.averages.to_dict(), "history": self.history.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Position":
        """The inverse of :meth:`to_dict`."""
        more = {"averages": Averages(**values["averages"]), "history": History.from_dict(values["history"])}
        return cls(**{**values, **more})

    def __str__(self) -> str:
        return f"in epoch {self.epoch + 1}, step {self.step + 1}"

    def check(self, options: TrainingOptions, batches_per_epoch: int | None, source: Path) -> None:
        """Refuse to go on from here under options, or with a loader, that do not fit."""
        begun, rule, stored = self.epoch + (self.batches > 0), options.early_stop, self.batches_per_epoch
        trouble = ""
        if begun > options.epochs:
            trouble = f"is in its epoch {begun} already and only {options.epochs} are asked for: ask for more epochs"
        elif None not in (stored, batches_per_epoch) and stored != batches_per_epoch:
            trouble = (
                f"was written with {stored} batches per epoch, this loader has {batches_per_epoch}: give it the same data and "
                "batch size as before"
            )
        elif rule is not None and self.monitor and (self.monitor, self.mode) != (rule.monitor, rule.mode):
            trouble = (
                f"was written while early stopping monitored {self.monitor!r} ({self.mode}), and this run monitors "
                f"{rule.monitor!r} ({rule.mode}): keep the rule"
            )
        if trouble:
            raise FlowBNNError(f"'{source}' {trouble}, or begin again with resume=False", kind="checkpoint")

    def follow(self, rule: EarlyStop | None) -> None:
        """Take over a rule for early stopping that may have been dropped or been given more patience."""
        if rule is None:
            self.best, self.waited, self.history.best_epoch = None, 0, None
        self.history.stopped_early = rule is not None and self.waited >= rule.patience


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a nested state of tensors and plain values, atomically."""
    tensors: dict[str, Tensor] = {}
    document = {"kind": "training", "torch": torch.__version__}
    document |= {name: encode_state(value, name, tensors) for name, value in state.items()}
    save_tensors(path, tensors, document)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state that :func:`write_checkpoint` wrote, or one line."""
    tensors, document = load_tensors(path)
    if document.get("kind") != "training":
        raise FlowBNNError(f"'{path}' is no checkpoint of a training run", kind="file")
    return decode_state(document, tensors)


def unfinished(path: Path) -> Position | None:
    """How far an interrupted run has come; None where there is no file, it is finished, or nothing of it can be used."""
    try:
        document = load_document(path)
        position = Position.from_dict(document["position"])
    except (FlowBNNError, KeyError, TypeError):
        return None
    finished = position.history.stopped_early or position.epoch >= document["epochs"]
    return None if finished or position.step == 0 else position


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights of a training checkpoint (those of the best epoch, where it kept them) into a model.

    The model is untouched when the file does not fit, or when a trainable parameter in it is not finite.
    """
    stored = read_checkpoint(Path(path))
    state = stored["best_weights"] or stored["weights"]
    check_architecture(model, state, path)
    check_finite_weights(state, [name for name, one in model.named_parameters() if one.requires_grad], path)
    model.load_state_dict(state)
    return model


def load_optimizer(optimizer: Optimizer, stored: dict[str, Any]) -> None:
    """Load a stored state; how this run computes its steps (``fused``, ``foreach``) is no state and stays."""
    groups = [
        {**own, **group, **{name: own[name] for name in HOW if name in own}}
        for own, group in zip(optimizer.state_dict()["param_groups"], stored["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**stored, "param_groups": groups})
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # a file has momenta in the plain memory layout, and fused updates walk raw memory
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


HOW = ("foreach", "fused", "capturable", "differentiable")
HYPERPARAMETERS = ("lr", "momentum", "betas", "eps", "weight_decay", "nesterov", "alpha")


def changed_settings(
    stored: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], rates: bool = True
) -> dict[str, tuple[Any, Any]]:
    """Settings of an optimizer that are not those of the file: ``{name: (stored, given)}``.

    Args:
        stored, groups: parameter groups, as in ``optimizer.param_groups``.
        rates: whether learning rates are compared: a schedule that goes by what it sees has no initial rate.

    >>> changed_settings([{"lr": 0.1, "eps": 0.01}], [{"lr": 0.2, "eps": 0.01, "name": "noise"}])
    {'lr of noise': (0.1, 0.2)}
    """
    changed = {}
    for number, (before, now) in enumerate(zip(stored, groups, strict=True)):
        group = now.get("name") or (f"group {number}" if len(groups) > 1 else "")
        for name in HYPERPARAMETERS:
            if name in before and name in now and (rates or name != "lr"):
                first = f"initial_{name}"
                pair = _plain(before.get(first, before[name])), _plain(now.get(first, now[name]))
                if pair[0] != pair[1]:
                    changed[f"{name} of {group}" if group else name] = pair
    return changed


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(part) for part in value)
    return value.item() if hasattr(value, "item") else value


def changed_structure(
    stored: Mapping[str, Mapping[str, Any]], given: Mapping[str, Mapping[str, Any]]
) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """The first layer described by other values than in the file: its name, and the values that differ, there and here.

    >>> old, new = ({"recipe": "NormalAffine", "prior_scale": scale} for scale in (0.5, 0.1))
    >>> changed_structure({"0": old}, {"0": new})
    ('0', {'prior_scale': 0.5}, {'prior_scale': 0.1})
    """
    for name in dict.fromkeys([*given, *stored]):
        before, now = stored.get(name, {}), given.get(name, {})
        keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
        if keys:
            return name, *({key: one[key] for key in keys if key in one} for one in (before, now))  # type: ignore[return-value]
    return None


def encode_state(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON tree of ``value``; its tensors go into ``tensors`` under ``name/...`` and leave their name behind.

    Tuples, deques, counters, numpy arrays and dictionaries whose keys are not strings are marked, so that
    :func:`decode_state` gives back the same types.

    >>> tensors = {}
    >>> tree = encode_state({"state": {0: {"exp_avg": torch.ones(2)}}, "betas": (0.9, 0.999)}, "optimizer", tensors)
    >>> tensors
    {'optimizer/state/0/exp_avg': tensor([1., 1.])}
    >>> decode_state(tree, tensors)
    {'state': {0: {'exp_avg': tensor([1., 1.])}}, 'betas': (0.9, 0.999)}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value
        return {KIND: "tensor", "name": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {KIND: "array", "value": encode_state(torch.from_numpy(value.copy()), name, tensors)}
    if isinstance(value, Mapping):
        items = [
            [encode_state(k, name, {}), encode_state(v, f"{name}/{k}", tensors)] for k, v in value.items()
        ]
        if isinstance(value, Counter):
            return {KIND: "counter", "items": items}
        if all(isinstance(key, str) for key in value) and KIND not in value:
            return dict(items)
        return {KIND: "map", "items": items}
    if isinstance(value, (list, tuple, deque)):
        parts = [encode_state(part, f"{name}/{index}", tensors) for index, part in enumerate(value)]
        if isinstance(value, list):
            return parts
        return {KIND: "tuple" if isinstance(value, tuple) else "deque", "items": parts}
    raise FlowBNNError(
        f"cannot store {name!r}: a {type(value).__name__} is neither a number, text nor a tensor", kind="file"
    )


def decode_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`encode_state`."""
    if isinstance(tree, list):
        return [decode_state(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(KIND)
    if kind is None:
        return {key: decode_state(value, tensors) for key, value in tree.items()}
    if kind == "tensor":
        return tensors[tree["name"]]
    if kind == "array":
        return decode_state(tree["value"], tensors).numpy()
    if kind in ("map", "counter"):
        pairs = {decode_state(key, tensors): decode_state(value, tensors) for key, value in tree["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    parts = [decode_state(part, tensors) for part in tree["items"]]
    return tuple(parts) if kind == "tuple" else deque(parts)
