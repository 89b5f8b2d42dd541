"""What a ``results.json`` must hold, and one line that names the first thing that is wrong with it."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from flowbnn.errors import FlowBNNError, nearest
from flowbnn_studies.report.style import COLOURS

__all__ = ["FIGURES", "SCHEMA", "check_results", "extent", "numbers"]

SCHEMA = 1

# A shape is a dict of fields ("name?" may be missing or null), a list of one shape, or one of the words
# below; "numbers", "table" and "pixels" are arrays of one, two, and two or three dimensions, null for a gap.
Shape = Any
LEAVES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda value: isinstance(value, str), "text"),
    "number": (lambda value: isinstance(value, int | float), "a number"),
    "object": (lambda value: isinstance(value, dict), "an object"),
    "list": (lambda value: isinstance(value, list), "a list"),
}
ARRAYS: dict[str, tuple[int, ...]] = {"numbers": (1,), "table": (2,), "pixels": (2, 3)}

_BINS: Shape = [
    {"low": "number", "high": "number", "confidence?": "number", "accuracy?": "number", "fraction": "number"}
]
_CURVE: Shape = {  # "style" is "dashed" for a line that is not ours, "like" the label whose colour it takes
    "label": "text",
    "x": "numbers",
    "mean": "numbers",
    "std?": "numbers",
    "style?": "text",
    "like?": "text",
}
_LEVEL: Shape = {"label": "text", "value": "number"}
_BAR: Shape = {"label": "text", "value": "number"}
_FIELD: Shape = {
    "label": "text",
    "accuracy?": "number",
    "ece?": "number",
    "points": "table",
    "point_class": "numbers",
    "grid": "table",
    "grid_class": "numbers",
    "grid_uncertainty?": "numbers",
    "bins": _BINS,
}
_DENSITY: Shape = {
    "title": "text",
    "x": "numbers",
    "posterior": "numbers",
    "prior?": "numbers",
    "modes?": "number",
}
_PAIR: Shape = {
    "title": "text",
    "x_label?": "text",
    "y_label?": "text",
    "x": "numbers",
    "y": "numbers",
    "density": "table",
}
_GROUP: Shape = {"label": "text", "edges": "numbers", "fraction": "numbers"}
_IMAGE: Shape = {"title": "text", "pixels": "pixels", "bars?": [{"label": "text", "value?": "number"}]}
_POINTS: Shape = {"x": "numbers", "y": "numbers"}
_BAND: Shape = {
    "title": "text",
    "note?": "text",
    "x": "numbers",
    "mean": "numbers",
    "epistemic": "numbers",
    "total": "numbers",
    "points": _POINTS,
}
_MAP: Shape = {"title": "text", "note?": "text", "values": "table"}
_DRAWS: Shape = {"title": "text", "note?": "text", "sides": [{"note?": "text", "samples": "table"}]}
_ITEM: Shape = {"label": "text", "colour?": "text", "x?": "number", "y?": "number"}

FIGURES: dict[str, Shape] = {
    "curves": {
        "x_label?": "text",
        "columns?": "number",
        "panels": [{"title": "text", "y_label?": "text", "lines": [_CURVE], "levels?": [_LEVEL]}],
    },
    "bars": {"panels": [{"title": "text", "x_label?": "text", "bars": [_BAR], "level?": "number"}]},
    "reliability": {"models": [{"label": "text", "ece?": "number", "bins": _BINS}]},
    "histogram": {"x_label?": "text", "panels": [{"title": "text", "groups": [_GROUP]}]},
    "density": {"panels": [_DENSITY], "pairs?": [_PAIR]},
    "field": {"models": [_FIELD], "seed?": "number"},
    "images": {"panels": [_IMAGE]},
    "bands": {"x_label?": "text", "span?": "numbers", "truth?": _POINTS, "panels": [_BAND]},
    "map": {
        "label?": "text",
        "top?": "number",
        "x?": "numbers",
        "y?": "numbers",
        "points?": "table",
        "point_class?": "numbers",
        "ring?": "number",
        "panels": [_MAP],
    },
    "draws": {"classes?": ["text"], "images?": [{"title": "text", "pixels": "pixels"}], "panels": [_DRAWS]},
    "pareto": {
        "families?": [{"label": "text", "colour": "text"}],
        "panels": [{"title": "text", "x_label?": "text", "y_label?": "text", "items": [_ITEM]}],
    },
}
_RESULTS: Shape = {
    "study": "text",
    "title": "text",
    "question": "text",
    "answer": "text",
    "source?": "text",
    "command?": "text",
    "created?": "text",
    "seconds?": "number",
    "device?": "text",
    "versions?": "object",
    "settings?": "object",
    "seeds": "list",
    "metrics": [
        {
            "key": "text",
            "label": "text",
            "format?": "text",
            "better?": "text",
            "definition?": "text",
            "group?": "text",
        }
    ],
    "rows": [
        {
            "key": "text",
            "label": "text",
            "values": "object",
            "colour?": "text",
            "cited?": "text",
            "unfinished?": "text",
        }
    ],
    "comparisons?": [
        {
            "title": "text",
            "metric": "text",
            "mean": "number",
            "low?": "number",
            "high?": "number",
            "p?": "number",
            "number": "number",
        }
    ],
    "headline?": ["text"],
    "trial?": "text",
    "figures": [{"kind": "text", "title": "text", "caption?": "text", "data": "object"}],
    "notes?": ["text"],
}
_VALUE: Shape = {"mean?": "number", "std?": "number", "per_seed?": "numbers", "published?": "number"}


def numbers(value: object) -> np.ndarray:
    """An array of floats; null and infinity become NaN, which figures leave blank.

    >>> numbers([1, None, float("inf")])
    array([ 1., nan, nan])
    """
    array = np.array(value, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)


def extent(*arrays: np.ndarray) -> tuple[float, float] | None:
    """The least and the greatest of all numbers that are there, or nothing where they do not differ.

    >>> extent(np.array([3.0, np.nan]), np.array([1.0])), extent(np.array([np.nan]))
    ((1.0, 3.0), None)
    """
    flat = np.concatenate([np.zeros(0), *[array.ravel() for array in arrays]])
    flat = flat[np.isfinite(flat)]
    if flat.size == 0 or flat.min() == flat.max():
        return None
    return float(flat.min()), float(flat.max())


def _check(value: Any, shape: Shape, where: str) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise FlowBNNError(f"{where} should be an object with fields {', '.join(shape)}")
        for field, inner in shape.items():
            name = field.removesuffix("?")
            if value.get(name) is None:
                if name not in value and name == field:
                    raise FlowBNNError(f"{where} lacks the field '{name}'")
                if name == field:
                    raise FlowBNNError(f"{where}.{name} is null, but must have a value")
                continue
            _check(value[name], inner, f"{where}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise FlowBNNError(f"{where} should be a list")
        for index, item in enumerate(value):
            _check(item, shape[0], f"{where}[{index}]")
    elif shape in ARRAYS:
        _check_array(value, ARRAYS[shape], where)
    elif not LEAVES[shape][0](value) or isinstance(value, bool):
        raise FlowBNNError(f"{where} should be {LEAVES[shape][1]}, not {type(value).__name__}")


def _check_array(value: Any, dimensions: tuple[int, ...], where: str) -> None:
    try:
        array = numbers(value)
    except (TypeError, ValueError, OverflowError):
        array = np.zeros(())
    if array.ndim not in dimensions and not (array.ndim == 1 and array.size == 0):
        depth = " or ".join(str(number) for number in dimensions)
        raise FlowBNNError(f"{where} should be numbers in a list of depth {depth}, rows of equal length")


def _check_lengths(kind: str, data: dict[str, Any], where: str) -> None:
    def equal(item: dict[str, Any], first: str, others: list[str], extra: int, place: str) -> None:
        for other in others:
            if item.get(other) is not None and len(item[first]) != len(item[other]) + extra:
                wanted = len(item[first]) - extra
                raise FlowBNNError(
                    f"{place}.{other} has {len(item[other])} values, but {wanted} go with its {first}"
                )

    for index, panel in enumerate(data.get("panels") or []):
        place = f"{where}.panels[{index}]"
        for number, line in enumerate(panel.get("lines", [])):
            equal(line, "x", ["mean", "std"], 0, f"{place}.lines[{number}]")
        for number, group in enumerate(panel.get("groups", [])):
            equal(group, "edges", ["fraction"], 1, f"{place}.groups[{number}]")
        if kind == "density":
            equal(panel, "x", ["posterior", "prior"], 0, place)
        if kind == "bands":
            equal(panel, "x", ["mean", "epistemic", "total"], 0, place)
            equal(panel["points"], "x", ["y"], 0, f"{place}.points")
        if kind == "map" and numbers(panel["values"]).shape != (
            len(data.get("y") or []),
            len(data.get("x") or []),
        ):
            raise FlowBNNError(
                f"{place}.values should have a row for each y and a column for each x of the map"
            )
    for index, pair in enumerate(data.get("pairs") or []):
        _check_pair(pair, f"{where}.pairs[{index}]")
    for index, model in enumerate(data.get("models", [])):
        if kind == "field":
            place = f"{where}.models[{index}]"
            equal(model, "points", ["point_class"], 0, place)
            equal(model, "grid", ["grid_class", "grid_uncertainty"], 0, place)
            for name in ("points", "grid"):
                if model[name] and len(model[name][0]) != 2:
                    raise FlowBNNError(f"{place}.{name} should be a list of [x, y]")


def _check_pair(pair: dict[str, Any], place: str) -> None:
    for axis in ("x", "y"):
        values = numbers(pair[axis])
        if len(values) < 2 or not bool(np.all(np.diff(values) > 0)):
            raise FlowBNNError(f"{place}.{axis} should be a grid of at least two increasing numbers")
    shape = numbers(pair["density"]).shape
    if shape != (len(pair["y"]), len(pair["x"])):
        raise FlowBNNError(f"{place}.density should have {len(pair['y'])} rows (y) of {len(pair['x'])} (x)")


def check_results(results: Any, origin: str) -> dict[str, Any]:
    """The results, unchanged, or a ``FlowBNNError`` that names the file and the field.

    >>> check_results({"schema": 1, "study": "digits"}, "results.json")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: results.json lacks the field 'title'
    """
    if not isinstance(results, dict):
        raise FlowBNNError(f"{origin} is no results file: it should hold one JSON object")
    if "schema" not in results:
        raise FlowBNNError(f"{origin} lacks the field 'schema'")
    if results["schema"] != SCHEMA:
        raise FlowBNNError(
            f"{origin} has schema {results['schema']!r}, but this flowbnn reads schema {SCHEMA}; run the study again"
        )
    _check(results, _RESULTS, origin)
    for index, metric in enumerate(results["metrics"]):
        form = metric.get("format") or ".3f"
        if not re.fullmatch(r"[+,]?(\.\d{1,2})?[efg%]", form):
            raise FlowBNNError(
                f"{origin}.metrics[{index}].format is {form!r}; write one like '.3f', '.2e' or '.1%'"
            )
    for index, row in enumerate(results["rows"]):
        if row.get("colour") and row["colour"] not in COLOURS:
            raise FlowBNNError(
                f"{origin}.rows[{index}].colour '{row['colour']}' is unknown{nearest(row['colour'], COLOURS)}"
            )
        for key, value in row["values"].items():
            if value is not None:
                _check(value, _VALUE, f"{origin}.rows[{index}].values.{key}")
    for index, figure in enumerate(results["figures"]):
        where = f"{origin}.figures[{index}]"
        if figure["kind"] not in FIGURES:
            raise FlowBNNError(
                f"{where}.kind '{figure['kind']}' is unknown{nearest(figure['kind'], FIGURES)}"
            )
        _check(figure["data"], FIGURES[figure["kind"]], f"{where}.data")
        _check_lengths(figure["kind"], figure["data"], f"{where}.data")
    return results
