"""Files that appear whole or not at all."""

import os
from pathlib import Path

from flowbnn.errors import FlowBNNError

__all__ = ["write_file"]


def write_file(path: Path, content: bytes) -> None:
    """All of it or nothing: a reader never sees half a file, and an old one survives a failure."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(content)
        os.replace(scratch, path)
    except OSError as error:
        raise FlowBNNError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if scratch.is_file():
            scratch.unlink()
