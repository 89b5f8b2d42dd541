"""What the document of a training checkpoint must hold: types and ranges, checked before anything is changed."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowbnn.errors import FlowBNNError

__all__ = ["HISTORY", "check_document", "complaints", "is_number", "is_whole"]

Field = tuple[str, Callable[[Any], bool]]
LARGEST = 2**53


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, zero or more, that a float can hold."""
    return type(value) is int and 0 <= value <= LARGEST


def is_number(value: Any) -> bool:
    """Whether this is an int or a float, which may be NaN or infinite; a bool is none."""
    return type(value) is float or (type(value) is int and abs(value) <= LARGEST)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and is_number(v) for k, v in value.items())


def _is_settings(value: Any) -> bool:
    return _is_numbers(value) and all(math.isfinite(v) and v >= 0 for v in value.values())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


WHOLE: Field = ("a whole number, zero or more", is_whole)
WHOLE_OR_NONE: Field = ("a whole number, zero or more, or null", lambda v: v is None or is_whole(v))
NUMBER_OR_NONE: Field = ("a number or null", lambda v: v is None or (is_number(v) and not math.isnan(v)))
TEXT: Field = ("text", lambda v: isinstance(v, str))
TEXT_OR_NONE: Field = ("text or null", lambda v: v is None or isinstance(v, str))
MAPPING: Field = ("a mapping", lambda v: isinstance(v, dict))
NUMBERS: Field = ("a mapping from names to numbers", _is_numbers)
ANYTHING: Field = ("anything", lambda v: True)

POSITION = {
    "epoch": WHOLE,
    "batches": WHOLE,
    "step": WHOLE,
    "best": NUMBER_OR_NONE,
    "waited": WHOLE,
    "batches_per_epoch": WHOLE_OR_NONE,
    "monitor": TEXT_OR_NONE,
    "mode": TEXT_OR_NONE,
}
HISTORY = {
    "records": (
        "a list of mappings from names to numbers",
        lambda v: isinstance(v, list) and all(_is_numbers(record) for record in v),
    ),
    "steps": WHOLE,
    "seconds": ("a number of seconds", lambda v: is_number(v) and math.isfinite(v) and v >= 0),
    "stopped_early": ("true or false", lambda v: isinstance(v, bool)),
    "best_epoch": WHOLE_OR_NONE,
}
AVERAGES = {
    "totals": NUMBERS,
    "weights": (
        "a mapping from names to positive numbers",
        lambda v: _is_numbers(v) and all(weight > 0 for weight in v.values()),
    ),
}
STATE = {
    "weights": MAPPING,
    "optimizer": MAPPING,
    "schedule": ("a mapping or null", lambda v: v is None or isinstance(v, dict)),
    "scaler": ("a mapping from names to numbers, zero or more", _is_settings),
    "random": MAPPING,
    "best_weights": ("a mapping or null", lambda v: v is None or isinstance(v, dict)),
}
DOCUMENT = {
    "kind": TEXT,
    "position": MAPPING,
    "averages": MAPPING,
    "history": MAPPING,
    "groups": (
        "a list of lists of names",
        lambda v: isinstance(v, list) and all(_is_texts(part) for part in v),
    ),
    "optimizer": TEXT,
    "schedule": TEXT_OR_NONE,
    "state": MAPPING,
    "extra": MAPPING,
    "epochs": WHOLE_OR_NONE,
    "torch": TEXT,
}
PARTS = {"position": POSITION, "averages": AVERAGES, "history": HISTORY, "state": STATE}


def complaints(
    values: Any, fields: Mapping[str, Field], name: str = "", partly: bool = False
) -> Iterator[str]:
    """What is wrong with ``values``, one phrase at a time.

    Args:
        values: what should be a dictionary with just the keys of ``fields``.
        fields: for each key, what it must be, in words and as a test.
        name: where ``values`` stands.
        partly: whether keys may be missing.

    >>> list(complaints({"steps": -1, "pages": 3}, {"steps": WHOLE, "seconds": WHOLE}, "history"))
    ["history lacks 'seconds'", "history has an unknown 'pages'", 'history.steps must be a whole number, zero or more, got -1']
    """
    if not isinstance(values, dict):
        yield f"{name or 'it'} must be a mapping, got {values!r:.60}"
        return
    place = name or "it"
    if not partly:
        yield from (f"{place} lacks {key!r}" for key in fields if key not in values)
    yield from (f"{place} has an unknown {key!r:.60}" for key in values if key not in fields)
    for key, (words, test) in fields.items():
        if key in values and not test(values[key]):
            yield f"{name}{'.' if name else ''}{key} must be {words}, got {values[key]!r:.60}"


def check_document(document: Mapping[str, Any], source: str | Path) -> None:
    """Refuse a document that :func:`flowbnn.training.checkpoint.write_run` cannot have written, in one line."""
    if document.get("kind") != "training":
        raise FlowBNNError(
            f"'{source}' is no checkpoint of a training run, but holds {document.get('kind')!r:.60}"
        )
    found = next(_all_complaints(document), None)
    if found is not None:
        raise FlowBNNError(f"'{source}' is damaged: {found}; begin anew with resume=False")


def _all_complaints(document: Mapping[str, Any]) -> Iterator[str]:
    yield from complaints({"epochs": None, **document}, DOCUMENT)  # older files do not tell their epochs
    for name, fields in PARTS.items():
        yield from complaints(document[name], fields, name)
    position, history, averages = document["position"], document["history"], document["averages"]
    epoch, batches, step = position["epoch"], position["batches"], position["step"]
    if len(history["records"]) != epoch:
        yield f"position.epoch is {epoch}, but history.records has {len(history['records'])}"
    if step < max(epoch + (batches > 0), batches, history["steps"]):
        yield f"position.step is {step}, too few for epoch {epoch} and batch {batches}"
    if averages["totals"].keys() != averages["weights"].keys() or ("loss" in averages["totals"]) != (
        batches > 0
    ):
        yield "averages do not belong to its position"
    if history["best_epoch"] is not None and history["best_epoch"] >= epoch:
        yield f"history.best_epoch is {history['best_epoch']}, after the last of {epoch} epochs"
    if (position["best"] is None) != (history["best_epoch"] is None):
        yield "position.best and history.best_epoch do not belong together"
    if (position["monitor"] is None) != (position["mode"] is None):
        yield "position.monitor and position.mode do not belong together"
