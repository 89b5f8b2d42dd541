"""What a resumed run is asked to do otherwise than when it began."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["RECIPES", "changed_noise", "changed_settings"]

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
