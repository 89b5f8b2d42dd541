"""What a resumed run is asked to do otherwise than when it began."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["changed_settings"]

OPTIMIZER = ("lr", "momentum", "betas", "eps", "weight_decay", "nesterov", "alpha")


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
        if name in begun and begun[name] != value:
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


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(part) for part in value)
    return value.item() if hasattr(value, "item") else value
