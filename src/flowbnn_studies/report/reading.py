"""Reads and checks ``results.json``. An error names the file and the field."""

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from flowbnn.errors import FlowBNNError, nearest

FILE = "results.json"
SCHEMA = 1  # version of the file that this package reads
ResultsSource = Path | str | dict[str, Any]

# Schema of a value: a type; a list of one schema; a dictionary of fields ("name?" may be missing or null); the dimensions of an array
# (null for a gap); an array as long as another field ("x", "edges-1"); a table ("y x"); "pairs"; or "increasing" numbers.
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
    "curves": {"x_label?": str, "y_label?": str, "baseline?": str, "panels": [_CURVES]},
    "density": {"panels": [{"title": str, "x": 1, "posterior": "x", "prior?": "x", "modes?": int}], "pairs?": [_PAIR]},
    "draws": {"classes?": [str], "images?": [_IMAGE],
              "panels": [{"title": str, "sides": [{"note?": str, "samples": (2,)}]}]},
    "field": {"seed?": int, "models": [_FIELD]},
    "histogram": {"x_label?": str,
                  "panels": [{"title": str, "groups": [{"label": str, "edges": 1, "fraction": "edges-1"}]}]},
    "images": {"panels": [_IMAGE | {"bars?": [{"label": str, "value?": float}]}]},
    "map": {"label?": str, "top?": float, "x?": 1, "y?": 1, "points?": "pairs", "point_class?": "points", "ring?": float,
            "panels": [{"title": str, "note?": str, "values?": (2,), "points?": "pairs"}]},
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


def _parse_integer(text: str) -> int | float:
    """Returns an integer, or a float if it has more than 18 digits, which numpy could not store."""
    return int(text) if len(text) <= 18 else float(text)


def load_results(source: ResultsSource) -> dict[str, Any]:
    """Reads and checks the results of one study.

    Args:
        source: Path of the file, folder that holds it, or its content.

    Raises:
        FlowBNNError: The file cannot be read, or a field is missing or invalid. The error has the name of the field.

    >>> load_results({"schema": 7})
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: results has schema 7, expected 1; run the study again
    """
    if isinstance(source, dict):
        return _checked(source, str(source.get("study") or "results"))
    path = Path(source)
    if path.is_dir():
        path = path / FILE
    if path.exists() and not path.is_file():
        _refuse(str(path), "is not a regular file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_int=_parse_integer)
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
    """Returns every ``results.json`` in a folder or its immediate subfolders, by name. A file is returned as it is.

    >>> find_results("no-such-folder")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: no results.json in no-such-folder or its subfolders; run a study with this output folder first
    """
    root = Path(folder)
    paths = (
        [root]
        if root.is_file()
        else [path for path in (root / FILE, *sorted(root.glob(f"*/{FILE}"))) if path.is_file()]
    )
    if not paths:
        raise FlowBNNError(
            f"no {FILE} in {root} or its subfolders; run a study with this output folder first", kind="file"
        )
    return paths


def _drawable(value: Any) -> Any:
    """Replaces characters that no font, XML or file accepts: control characters and unpaired surrogates.

    >>> _drawable({"title": "a\\0b", "values": [1.0, 2.0]})
    {'title': 'a\ufffdb', 'values': [1.0, 2.0]}
    """
    if isinstance(value, str):
        return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", value)
    if isinstance(value, dict):
        return {_drawable(name): _drawable(item) for name, item in value.items()}
    numbers = isinstance(value, list) and value and isinstance(value[0], int | float)
    return [_drawable(item) for item in value] if isinstance(value, list) and not numbers else value


def _checked(results: Any, origin: str) -> dict[str, Any]:
    """Returns the results with drawable text.

    Raises:
        FlowBNNError: The results do not follow the schema.
    """
    try:
        results = _drawable(results)
    except RecursionError:
        _refuse(origin, "is nested too deeply")
    if not isinstance(results, dict):
        _refuse(origin, "must be one JSON object")
    if results.get("schema") != SCHEMA:
        _refuse(
            origin,
            f"has schema {results.get('schema')!r}, expected {SCHEMA}; run the study again",
        )
    _check(results, _RESULTS, origin, {})
    for index, metric in enumerate(results["metrics"]):
        if not re.fullmatch(r"[+,]?(\.\d{1,2})?[efg%]", metric.get("format") or ".3f"):
            _refuse(
                f"{origin}.metrics[{index}].format",
                f"is {metric['format']!r}, expected a format such as '.3f', '.2e' or '.1%'",
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
                    "must have a row for each y and a column for each x of the map",
                )
    return results


def _refuse(field: str, problem: str) -> NoReturn:
    """Raises an error that names the field."""
    raise FlowBNNError(f"{field} {problem}", kind="results", field=field)


def _shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of nested lists of numbers; empty if they are no array."""
    try:
        return np.array(value, dtype=np.float64).shape
    except (TypeError, ValueError, OverflowError):
        return ()


def _check(value: Any, shape: Any, field: str, siblings: dict[str, Any]) -> None:
    """Checks a value against its schema.

    Args:
        value: Value to check.
        shape: Schema of the value.
        field: Path of the field, for the error.
        siblings: Fields of the same object.
    """
    match shape:
        case type():
            expected = int | float if shape in (int, float) else shape
            if not isinstance(value, expected) or isinstance(value, bool):
                _refuse(field, f"must be {_WORDS[shape]}, not {type(value).__name__}")
        case dict():
            if not isinstance(value, dict):
                _refuse(field, f"must be an object with fields {', '.join(shape)}")
            for key, inner in shape.items():
                name = key.removesuffix("?")
                if value.get(name) is not None:
                    _check(value[name], inner, f"{field}.{name}", value)
                elif name == key:
                    _refuse(f"{field}.{name}", "is missing")
        case list():
            if not isinstance(value, list):
                _refuse(field, "must be a list")
            for index, item in enumerate(value):
                _check(item, shape[0], f"{field}[{index}]", {})
        case _:
            _check_array(value, shape, field, siblings)


def _check_array(value: Any, shape: Any, field: str, siblings: dict[str, Any]) -> None:
    """Checks an array against its schema. The arguments are those of :func:`_check`."""
    sizes = _shape(value)
    dimensions = shape if isinstance(shape, tuple) else (2 if shape in ("pairs", "y x") else 1,)
    if len(sizes) not in dimensions and sizes != (0,):
        depth = " or ".join(str(number) for number in dimensions)
        _refuse(field, f"must be numbers in a list of depth {depth}, rows of equal length")
    if shape == "pairs" and sizes != (0,) and sizes[1] != 2:
        _refuse(field, "must be a list of [x, y]")
    if shape == "increasing" and (sizes[0] < 2 or not np.all(np.diff(np.array(value, float)) > 0)):
        _refuse(field, "must be a grid of at least two increasing numbers")
    if shape == "y x" and sizes != (len(siblings["y"]), len(siblings["x"])):
        _refuse(field, f"must have {len(siblings['y'])} rows (y) of {len(siblings['x'])} (x)")
    name, _, less = shape.partition("-") if isinstance(shape, str) else ("", "", "")
    if name in siblings and sizes[0] != (expected := len(siblings[name]) - int(less or 0)):
        _refuse(field, f"has {sizes[0]} values, expected {expected} to match {name}")
