"""The checkpoint of a training run: everything needed to go on as if it had never stopped."""

import math
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training.finite import is_finite, name_below
from flowbnn.training.history import Averages, History
from flowbnn.training.options import EarlyStop, TrainingOptions
from flowbnn.training.storage import POSITION, check_document, is_number, load_tensors, save_tensors

__all__ = [
    "RECIPES",
    "Position",
    "Trained",
    "changed_noise",
    "changed_settings",
    "check_architecture",
    "check_finite_weights",
    "check_same_kind",
    "decode_state",
    "encode_state",
    "fitting_optimizer_state",
    "fitting_schedule_state",
    "kinds_of",
    "load_weights",
    "read_run",
    "warn_of_other_kinds",
    "write_run",
]

# -------------------- optimizer_state.py

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


# -------------------- state.py

KIND = "__kind__"


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
        f"cannot store {name!r}: a {type(value).__name__} is neither a number, text nor a tensor"
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
    if kind in ("tuple", "deque"):
        parts = [decode_state(part, tensors) for part in tree["items"]]
        return tuple(parts) if kind == "tuple" else deque(parts)
    raise KeyError(f"unknown kind {kind!r}")


# -------------------- weights.py


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


@dataclass
class Position:
    """How far a run has come, and what it remembers on the way."""

    epoch: int = 0
    batches: int = 0
    step: int = 0
    averages: Averages = field(default_factory=Averages)
    history: History = field(default_factory=History)
    best: float | None = None
    best_weights: dict[str, Any] | None = None
    waited: int = 0
    saved_in: Path | None = None
    batches_per_epoch: int | None = None
    monitor: str | None = None
    mode: str | None = None

    @property
    def words(self) -> str:
        """The position, for an error message."""
        return f"in epoch {self.epoch + 1}, step {self.step + 1}"

    @property
    def last_good(self) -> str:
        """Where to go back to, as the tail of an error message."""
        return f"; the last good checkpoint is '{self.saved_in}'" if self.saved_in else ""

    def judge(self, record: Mapping[str, float], rule: EarlyStop | None, trained: "Trained") -> None:
        """Apply the rule for stopping early to the record of the epoch that ends here."""
        if rule is None:
            return
        value = rule.read(record)
        if rule.improves(value, self.best):
            self.best, self.waited, self.history.best_epoch = value, 0, self.epoch
            self.best_weights = trained.copy_weights() if rule.restore_best else None
        else:
            self.waited += 1
            self.history.stopped_early = self.waited >= rule.patience

    def go_on(self, options: TrainingOptions, batches_per_epoch: int | None, source: Path) -> None:
        """Take a stored position up under the options of this run, or say why that makes no sense."""
        begun = self.epoch + (self.batches > 0)
        if begun > options.epochs:
            raise FlowBNNError(
                f"'{source}' is in its epoch {begun} already and only {options.epochs} are asked for: "
                "ask for more epochs, or begin anew with resume=False"
            )
        stored, rule = self.batches_per_epoch, options.early_stop
        if stored is not None and batches_per_epoch is not None and stored != batches_per_epoch:
            raise FlowBNNError(
                f"'{source}' was written with {stored} batches per epoch, this loader has {batches_per_epoch}: "
                "give it the same data and batch size as before, or begin anew with resume=False"
            )
        if (
            rule is not None
            and self.monitor is not None
            and (self.monitor, self.mode) != (rule.monitor, rule.mode)
        ):
            raise FlowBNNError(
                f"'{source}' was written while early stopping watched {self.monitor!r} ({self.mode}), and this run "
                f"watches {rule.monitor!r} ({rule.mode}): keep the rule, or begin anew with resume=False"
            )
        if rule is None:
            self.best, self.waited, self.history.best_epoch = None, 0, None
        if rule is None or not rule.restore_best:
            self.best_weights = None
        self.history.stopped_early = rule is not None and self.waited >= rule.patience


@dataclass
class Trained:
    """What a run changes: the module, the optimizer with any parameters of its own, the schedule."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    names_below: str = ""

    def __post_init__(self) -> None:
        names = {
            id(parameter): name for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }
        self.groups = [
            [names.get(id(p), "(not in the model)") for p in group["params"]]
            for group in self.optimizer.param_groups
        ]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.outside: list[Tensor] = [p for p in parameters if id(p) not in names]
        self.names = [name for group in self.groups for name in group]
        self.told_names = [name_below(name, self.names_below) for name in self.names]
        self.parameters: list[nn.Parameter] = parameters

    def weights(self) -> dict[str, Any]:
        """The module's state, and parameters that only the optimizer knows (a likelihood's noise, say)."""
        return {"model": self.model.state_dict(), "outside": [p.detach() for p in self.outside]}

    def copy_weights(self) -> dict[str, Any]:
        """:meth:`weights`, as a copy that training does not touch."""
        tensors: dict[str, Tensor] = {}
        tree = encode_state(self.weights(), "", tensors)
        return decode_state(tree, {name: tensor.detach().clone() for name, tensor in tensors.items()})

    def check_architecture(self, weights: Any, source: Path) -> None:
        """Refuse stored :meth:`weights` of another model; nothing is changed."""
        if not isinstance(weights, dict) or weights.keys() != {"model", "outside"}:
            raise FlowBNNError(
                f"'{source}' is damaged: its weights are not those of a model and an optimizer"
            )
        if not isinstance(weights["model"], dict) or not isinstance(weights["outside"], list):
            raise FlowBNNError(f"'{source}' is damaged: its weights are no mapping and list of tensors")
        check_architecture(self.model, weights["model"], source, self.names_below)

    def check_weights(self, weights: Any, source: Path) -> None:
        """Refuse stored :meth:`weights` that do not fit or are not finite; nothing is changed."""
        self.check_architecture(weights, source)
        mine, theirs = (
            {f"parameter {number} of the optimizer alone": p for number, p in enumerate(parameters)}
            for parameters in (self.outside, weights["outside"])
        )
        check_same_kind(mine, theirs, source)
        check_finite_weights(weights["model"], self.names, source, self.names_below)
        check_finite_weights(theirs, theirs, source)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Put back what :meth:`weights` gave."""
        self.model.load_state_dict(weights["model"])
        with torch.no_grad():
            for parameter, value in zip(self.outside, weights["outside"], strict=True):
                parameter.copy_(value)

    def take_over(self, parts: Mapping[str, Any]) -> None:
        """Load the checked parts of a file; if one is refused after all, what was there before comes back."""
        before = (
            self.copy_weights(),
            self.optimizer.state_dict(),
            None if self.schedule is None else self.schedule.state_dict(),
        )
        try:
            self._load(parts["weights"], parts["optimizer"], parts["schedule"])
        except Exception:
            self._load(*before)
            raise

    def _load(self, weights: Mapping[str, Any], optimizer: dict[str, Any], schedule: Any) -> None:
        self.load_weights(weights)
        self.optimizer.load_state_dict(optimizer)
        self._lay_out_state()
        if self.schedule is not None:
            self.schedule.load_state_dict(schedule)

    @torch.no_grad()
    def _lay_out_state(self) -> None:
        """Momenta in the memory layout of their weights: a file has them in the plain one, and fused updates walk raw memory."""
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if (
                    isinstance(value, Tensor)
                    and value.shape == parameter.shape
                    and value.stride() != parameter.stride()
                ):
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def write_run(
    path: Path,
    trained: Trained,
    position: Position,
    random: Mapping[str, Any],
    scaler: Mapping[str, Any],
    extra: Mapping[str, Any],
    epochs: int | None = None,
) -> None:
    """Write the run's state to ``path``, atomically; :mod:`flowbnn.training.storage` says what the document holds."""
    tensors: dict[str, Tensor] = {}
    parts = {
        "weights": trained.weights(),
        "optimizer": trained.optimizer.state_dict(),
        "schedule": None if trained.schedule is None else trained.schedule.state_dict(),
        "scaler": dict(scaler),
        "random": dict(random),
        "best_weights": position.best_weights,
    }
    document = {
        "kind": "training",
        "position": {name: getattr(position, name) for name in POSITION},
        "averages": position.averages.to_dict(),
        "history": position.history.to_dict(),
        "groups": trained.groups,
        "optimizer": type(trained.optimizer).__name__,
        "schedule": None if trained.schedule is None else type(trained.schedule).__name__,
        "state": {name: encode_state(value, name, tensors) for name, value in parts.items()},
        "extra": dict(extra),
        "epochs": epochs,
        "torch": torch.__version__,
    }
    save_tensors(path, tensors, document)


def read_run(path: Path, trained: Trained) -> tuple[Position, dict[str, Any]]:
    """Read a run's state and check that it fits; nothing of ``trained`` is changed.

    Returns:
        the position, and the decoded ``weights``, ``optimizer``, ``schedule``, ``scaler``, ``random`` and ``extra`` parts.
    """
    tensors, document = load_tensors(path)
    check_document(document, path)
    try:
        parts = {name: decode_state(tree, tensors) for name, tree in document["state"].items()}
        random = parts["random"]["now"], parts["random"]["epoch_start"]
        if not all(isinstance(part, dict) for part in random):
            raise TypeError("its random states are no mappings")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError) as error:
        raise FlowBNNError(
            f"'{path}' is damaged: its training state does not decode ({error!r:.150})"
        ) from None
    position = Position(
        **document["position"],
        averages=Averages(**document["averages"]),
        history=History.from_dict(document["history"]),
        best_weights=parts["best_weights"],
    )
    trained.check_architecture(parts["weights"], path)
    _check_class("optimizer", document["optimizer"], trained.optimizer, path)
    if document["groups"] != trained.groups:
        raise FlowBNNError(
            f"'{path}' was written by an optimizer with other parameter groups; build it as before"
        )
    _check_class("learning-rate schedule", document["schedule"], trained.schedule, path)
    parts["extra"] = document["extra"]
    for weights in (parts["weights"], parts["best_weights"]):
        if weights is not None:
            trained.check_weights(weights, path)
    parts["optimizer"] = fitting_optimizer_state(
        parts["optimizer"], trained.optimizer, trained.told_names, path
    )
    if trained.schedule is not None:
        parts["schedule"] = fitting_schedule_state(parts["schedule"], trained.schedule, path)
    return position, parts


def _check_class(what: str, stored: str | None, own: object | None, source: Path) -> None:
    mine = None if own is None else type(own).__name__
    if stored != mine:
        had, has = (f"the {what} {stored}" if stored else f"no {what}"), (mine or "none")
        raise FlowBNNError(
            f"'{source}' was written with {had} and this run has {has}: build it as before, or begin with resume=False"
        )


# -------------------- changes.py

OPTIMIZER = ("lr", "momentum", "betas", "eps", "weight_decay", "nesterov", "alpha")
RECIPES = "recipes"  # the noise of each layer among the settings: what has changed there is refused, not told


def changed_settings(
    begun: Mapping[str, Any],
    now: Mapping[str, Any],
    optimizer: Any,
    groups: list[dict[str, Any]],
    rates: bool,
) -> Iterator[str]:
    """One line for each setting of a method or an optimizer that has changed.

    Args:
        begun, now: the method's own settings, those of the file and those of the caller.
        optimizer: the stored state of the optimizer, whose settings stay in force.
        groups: the parameter groups of the caller's optimizer.
        rates: whether learning rates can be compared: a schedule that goes by what it sees has no rate to begin with.

    >>> list(changed_settings({"beta": 1.0}, {"beta": 2.0}, {"param_groups": []}, [], True))
    ['beta was 1.0 when it began and is 2.0 from here on']
    >>> list(changed_settings({}, {}, {"param_groups": [{"lr": 0.1}]}, [{"lr": 0.2, "name": "noise"}], True))
    ["lr of 'noise' stays 0.1, as it was when it began, and is not 0.2"]
    """
    for name, value in now.items():
        if name != RECIPES and name in begun and begun[name] != value:
            yield f"{name} was {begun[name]} when it began and is {value} from here on"
    stored = optimizer.get("param_groups", []) if isinstance(optimizer, dict) else []
    for number, (old, new) in enumerate(zip(stored, groups, strict=False)):
        for name in OPTIMIZER:
            if name not in old or name not in new or (name == "lr" and not rates):
                continue
            first = f"initial_{name}"
            had, has = old.get(first, old[name]), new.get(first, new[name])
            if _plain(had) != _plain(has):
                told = new.get("name") or (f"group {number}" if len(groups) > 1 else "")
                yield f"{name}{f' of {told!r}' if told else ''} stays {_plain(had)}, as it was when it began, and is not {_plain(has)}"


def changed_noise(begun: Any, now: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first layer whose noise is not what it was, in words; None where all is as before or the file does not say.

    Args:
        begun, now: the recipe of each layer as plain values, those of the file and those of the caller.

    >>> old, new = ({"recipe": "NormalAffine", "prior_scale": scale} for scale in (0.5, 0.1))
    >>> changed_noise({"0": old}, {"0": new})
    "the noise of layer '0' was NormalAffine(prior_scale=0.5) and is now NormalAffine(prior_scale=0.1)"
    """
    if not isinstance(begun, dict) or not all(isinstance(recipe, dict) for recipe in begun.values()):
        return None
    for name in (*now, *(name for name in begun if name not in now)):
        had, has = begun.get(name, {}), now.get(name, {})
        # the batch axis is found out from the data; a setting that only one of the two knows is of another version
        names = [
            key for key in has if key in had and key != "batch_axis" and _plain(had[key]) != _plain(has[key])
        ]
        if names or bool(had) != bool(has):
            place = f"layer '{name}'" if name else "the network"
            return f"the noise of {place} was {_told(had, names)} and is now {_told(has, names)}"
    return None


def _told(recipe: Mapping[str, Any], names: list[str]) -> str:
    settings = [f"{name}={recipe[name]!r}" for name in names if name != "recipe"]
    return f"{recipe['recipe']}({', '.join(settings)})" if "recipe" in recipe else "none"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(part) for part in value)
    return value.item() if hasattr(value, "item") else value
