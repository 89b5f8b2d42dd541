"""JSON on disk that appears whole or not at all."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flowbnn.errors import FlowBNNError

__all__ = ["plain", "read_json", "write_json"]


def plain(value: Any) -> Any:
    """Plain values for JSON: tensors and tuples become lists, numbers that are none become null.

    >>> plain({"a": torch.tensor([1.0, float("nan")]), "b": (1, 2.5)})
    {'a': [1.0, None], 'b': [1, 2.5]}
    """
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write ``content`` beside ``path``, flush it, and rename it over ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(plain(content), file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise FlowBNNError(
            f"cannot write '{path}' ({error.strerror or error}); what is finished is kept, --resume goes on from it"
        ) from None
    return path


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file, or None where there is no file or it does not read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
