"""Finding and reading ``results.json``; what is wrong with one is said in one line that names the file and the field."""

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from flowbnn.errors import FlowBNNError, nearest

FILE = "results.json"
SCHEMA = 1
ResultsSource = Path | str | dict[str, Any]

# What a value must be: a type; a list of one shape; a dictionary of fields ("name?" may be missing or null); the dimensions of an array
# (null for a gap); or in words: an array as long as a field beside it ("x", "edges-1"), a table ("y x"), "pairs", "increasing" numbers.
# fmt: off
_BINS = [{"low": float, "high": float, "confidence?": float, "accuracy?": float, "fraction": float}]
_LINE = {"label": str, "x": 1, "mean": "x", "std?": "x", "style?": str, "like?": str}
_NAMED = {"label": str, "value": float, "method?": str}
_POINTS = {"x": 1, "y": "x"}
_IMAGE = {"title": str, "pixels": (2, 3)}
_BAND = {"title": str, "note?": str, "x": 1, "mean": "x", "epistemic": "x", "total": "x", "points": _POINTS}
_CURVES = {"title": str, "y_label?": str, "better?": str, "lines": [_LINE], "levels?": [_NAMED]}
_PAIR = {"title": str, "x_label?": str, "y_label?": str, "x": "increasing", "y": "increasing", "density": "y x"}
_FIELD = {"label": str, "accuracy?": float, "ece?": float, "points": "pairs", "point_class": "points", "grid": "pairs",
          "grid_class": "grid", "grid_uncertainty?": "grid", "bins": _BINS}
_DOT = {"label": str, "method?": str, "x?": float, "y?": float, "x_std?": float, "y_std?": float}
FIGURES: dict[str, Any] = {
    "bands": {"x_label?": str, "span?": 1, "truth?": _POINTS, "truth_label?": str, "panels": [_BAND]},
    "bars": {"panels": [{"title": str, "x_label?": str, "bars": [_NAMED], "level?": float}]},
    "curves": {"x_label?": str, "y_label?": str, "columns?": int, "baseline?": str, "panels": [_CURVES]},
    "density": {"panels": [{"title": str, "x": 1, "posterior": "x", "prior?": "x", "modes?": int}], "pairs?": [_PAIR]},
    "draws": {"classes?": [str], "images?": [_IMAGE],
              "panels": [{"title": str, "sides": [{"note?": str, "samples": (2,)}]}]},
    "field": {"seed?": int, "models": [_FIELD]},
    "histogram": {"x_label?": str,
                  "panels": [{"title": str, "groups": [{"label": str, "edges": 1, "fraction": "edges-1"}]}]},
    "images": {"panels": [_IMAGE | {"bars?": [{"label": str, "value?": float}]}]},
    "map": {"label?": str, "top?": float, "x?": 1, "y?": 1, "points?": "pairs", "point_class?": "points", "ring?": float,
            "columns?": int, "panels": [{"title": str, "note?": str, "values?": (2,), "points?": "pairs"}]},
    "pareto": {"panels": [{"title": str, "x_label?": str, "y_label?": str, "items": [_DOT]}]},
    "reliability": {"models": [{"label": str, "ece?": float, "bins": _BINS}]},
    "shares": {"x_label?": str, "classes?": [str], "images?": [_IMAGE],
               "panels": [{"title": str, "note?": str, "x": 1, "shares": (2,)}]},
}
_VALUE = {"mean?": float, "std?": float, "per_seed?": 1, "published?": float}
_METRIC = {"key": str, "label": str, "format?": str, "better?": str, "definition?": str, "group?": str}
_ROW = {"key": str, "label": str, "method?": str, "values": dict, "cited?": str, "reference?": str, "unfinished?": str}
_RESULTS: dict[str, Any] = {
    "study": str, "title": str, "question": str, "answer": str, "source?": str, "command?": str, "created?": str,
    "seconds?": float, "device?": str, "versions?": dict, "settings?": dict, "seeds": list, "metrics": [_METRIC], "rows": [_ROW],
    "comparisons?": [{"title": str, "metric": str, "mean": float, "low?": float, "high?": float, "p?": float}],
    "headline?": [str], "trial?": str, "notes?": [str],
    "figures": [{"kind": str, "title": str, "caption?": str, "published?": str, "data": dict}],
}
# fmt: on
_WORDS = {str: "a string", float: "a number", int: "a number", dict: "an object", list: "a list"}


def load_results(source: ResultsSource) -> dict[str, Any]:
    """Read and check one study's results: a file, the folder that holds it, or the dictionary itself.

    >>> load_results({"schema": 7})
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: results has schema 7, but this flowbnn reads schema 1; run the study again
    """
    if isinstance(source, dict):
        return _checked(source, str(source.get("study") or "results"))
    path = Path(source)
    if path.is_dir():
        path = path / FILE
    if path.exists() and not path.is_file():
        _refuse(str(path), "is a pipe or a device, which is never read")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlowBNNError(
            f"cannot read {path}: {error.strerror or error}; run a study first", kind="file"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        line = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise FlowBNNError(
            f"{path} is not valid JSON{line}; delete it and run the study again", kind="file"
        ) from None
    return _checked(content, str(path))


def find_results(folder: Path | str) -> list[Path]:
    """Every ``results.json`` in the folder itself or in one of its immediate subfolders, by name; or the file itself, if it is one.

    >>> find_results("no-such-folder")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: no results.json in no-such-folder or its subfolders; run a study with this output folder first
    """
    root = Path(folder)
    found = (
        [root]
        if root.is_file()
        else [path for path in (root / FILE, *sorted(root.glob(f"*/{FILE}"))) if path.is_file()]
    )
    if not found:
        raise FlowBNNError(
            f"no {FILE} in {root} or its subfolders; run a study with this output folder first", kind="file"
        )
    return found


def _drawable(value: Any) -> Any:
    """The value with a mark in place of characters that no font, XML or file takes: controls and halves of surrogate pairs.

    >>> _drawable({"title": "a\\0b", "values": [1.0, 2.0]})
    {'title': 'a\ufffdb', 'values': [1.0, 2.0]}
    """
    if isinstance(value, str):
        return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", value)
    if isinstance(value, dict):
        return {_drawable(name): _drawable(part) for name, part in value.items()}
    numbers = isinstance(value, list) and value and isinstance(value[0], int | float)
    return [_drawable(part) for part in value] if isinstance(value, list) and not numbers else value


def _checked(results: Any, origin: str) -> dict[str, Any]:
    """The results, with text that can be drawn, if they have the shape that the report draws."""
    try:
        results = _drawable(results)
    except RecursionError:
        _refuse(origin, "is nested too deeply")
    if not isinstance(results, dict):
        _refuse(origin, "should hold one JSON object")
    if results.get("schema") != SCHEMA:
        _refuse(
            origin,
            f"has schema {results.get('schema')!r}, but this flowbnn reads schema {SCHEMA}; run the study again",
        )
    _check(results, _RESULTS, origin, {})
    for index, metric in enumerate(results["metrics"]):
        if not re.fullmatch(r"[+,]?(\.\d{1,2})?[efg%]", metric.get("format") or ".3f"):
            _refuse(
                f"{origin}.metrics[{index}].format",
                f"is {metric['format']!r}; write one like '.3f', '.2e' or '.1%'",
            )
    for index, row in enumerate(results["rows"]):
        for key, value in row["values"].items():
            if value is not None:
                _check(value, _VALUE, f"{origin}.rows[{index}].values.{key}", {})
    for index, figure in enumerate(results["figures"]):
        where, data = f"{origin}.figures[{index}]", figure["data"]
        if figure["kind"] not in FIGURES:
            _refuse(f"{where}.kind", f"'{figure['kind']}' is unknown{nearest(figure['kind'], FIGURES)}")
        _check(data, FIGURES[figure["kind"]], f"{where}.data", {})
        for place, panel in enumerate(data["panels"] if figure["kind"] == "map" else []):
            sides = len(data.get("y") or []), len(data.get("x") or [])
            if panel.get("values") is not None and _shape(panel["values"]) != sides:
                _refuse(
                    f"{where}.data.panels[{place}].values",
                    "should have a row for each y and a column for each x of the map",
                )
    return results


def _refuse(where: str, problem: str) -> NoReturn:
    raise FlowBNNError(f"{where} {problem}", kind="results", field=where)


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of nested lists of numbers; none where they are no array."""
    try:
        return np.array(value, dtype=np.float64).shape
    except (TypeError, ValueError, OverflowError):
        return ()


def _check(value: Any, shape: Any, where: str, beside: dict[str, Any]) -> None:
    match shape:
        case type():
            wanted = int | float if shape in (int, float) else shape
            if not isinstance(value, wanted) or isinstance(value, bool):
                _refuse(where, f"should be {_WORDS[shape]}, not {type(value).__name__}")
        case dict():
            if not isinstance(value, dict):
                _refuse(where, f"should be an object with fields {', '.join(shape)}")
            for field, inner in shape.items():
                name = field.removesuffix("?")
                if value.get(name) is not None:
                    _check(value[name], inner, f"{where}.{name}", value)
                elif name == field:
                    _refuse(where, f"lacks the field '{name}'")
        case list():
            if not isinstance(value, list):
                _refuse(where, "should be a list")
            for index, item in enumerate(value):
                _check(item, shape[0], f"{where}[{index}]", {})
        case _:
            _check_array(value, shape, where, beside)


def _check_array(value: Any, shape: Any, where: str, beside: dict[str, Any]) -> None:
    sizes = _shape(value)
    dimensions = shape if isinstance(shape, tuple) else (2 if shape in ("pairs", "y x") else 1,)
    if len(sizes) not in dimensions and sizes != (0,):
        depth = " or ".join(str(number) for number in dimensions)
        _refuse(where, f"should be numbers in a list of depth {depth}, rows of equal length")
    if shape == "pairs" and sizes != (0,) and sizes[1] != 2:
        _refuse(where, "should be a list of [x, y]")
    if shape == "increasing" and (sizes[0] < 2 or not np.all(np.diff(np.array(value, float)) > 0)):
        _refuse(where, "should be a grid of at least two increasing numbers")
    if shape == "y x" and sizes != (len(beside["y"]), len(beside["x"])):
        _refuse(where, f"should have {len(beside['y'])} rows (y) of {len(beside['x'])} (x)")
    name, _, less = shape.partition("-") if isinstance(shape, str) else ("", "", "")
    if name in beside and sizes[0] != (wanted := len(beside[name]) - int(less or 0)):
        _refuse(where, f"has {sizes[0]} values, but {wanted} go with its {name}")
