"""Finding and reading ``results.json``."""

import json
from pathlib import Path
from typing import Any

from flowbnn.errors import FlowBNNError
from flowbnn_studies.report.schema import check_results

__all__ = ["find_results", "load_results"]

FILE = "results.json"


def load_results(source: Path | str | dict[str, Any]) -> dict[str, Any]:
    """Read and check one study's results: a file, the folder that holds it, or the dictionary itself.

    Args:
        source: what to read; a dictionary is only checked.

    Raises:
        FlowBNNError: in one line, where the file is missing, is no JSON, is of another schema or lacks a field.

    >>> load_results({"schema": 7})
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: results has schema 7, but this flowbnn reads schema 1; run the study again
    """
    if isinstance(source, dict):
        return check_results(source, str(source.get("study") or "results"))
    path = Path(source)
    if path.is_dir():
        path = path / FILE
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FlowBNNError(f"there is no {path}; run a study first") from None
    except OSError as error:
        raise FlowBNNError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        detail = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise FlowBNNError(f"{path} is no valid JSON{detail}; delete it and run the study again") from None
    return check_results(results, str(path))


def find_results(folder: Path | str) -> list[Path]:
    """Every ``results.json`` in the folder itself or in one of its immediate subfolders, by name; or the file itself, if it is one.

    Each one is read and checked, so that what comes back can be drawn.

    Raises:
        FlowBNNError: in one line, where there is none or one of them is unusable.

    >>> find_results("no-such-folder")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: there is no folder no-such-folder; give the folder a study wrote to
    """
    root = Path(folder)
    if root.is_file():
        load_results(root)
        return [root]
    if not root.is_dir():
        raise FlowBNNError(f"there is no folder {root}; give the folder a study wrote to")
    try:
        paths = [root / FILE, *sorted(child / FILE for child in root.iterdir() if child.is_dir())]
        found = [path for path in paths if path.is_file()]
    except OSError as error:
        raise FlowBNNError(f"cannot read {root}: {error.strerror or error}") from None
    if not found:
        raise FlowBNNError(
            f"no {FILE} in {root} or its subfolders; run a study with this output folder first"
        )
    for path in found:
        load_results(path)
    return found
