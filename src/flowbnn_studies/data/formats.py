"""Readers of the published formats: IDX (plain or gzip), CIFAR's binary files, CIFAR's pickled files.

Each raises :class:`FlowBNNError` with one line that names the file where it is not what it should be. A pickle can run code, so its
checksum comes first: only the published bytes are unpickled.
"""

import gzip
import hashlib
import math
import pickle
import zlib
from pathlib import Path

import numpy as np

from flowbnn.errors import FlowBNNError

REMEDY = "delete it and load again with download=True, or copy it anew"
KINDS = {1: "labels", 3: "images"}


def damaged(path: Path, what: str) -> FlowBNNError:
    """The error for a file that is not what it should be.

    >>> print(damaged(Path("a.bin"), "is 3 bytes long, expected 4"))
    a.bin is 3 bytes long, expected 4; delete it and load again with download=True, or copy it anew
    """
    return FlowBNNError(f"{path} {what}; {REMEDY}", kind="file")


def _read(path: Path, most: int) -> bytes:
    """The content, unpacked, but never more than ``most + 1`` bytes of it."""
    if path.exists() and not path.is_file():
        raise FlowBNNError(f"{path} is a folder, a pipe or a device, not a file", kind="file")
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return packed.read(most + 1)
        with path.open("rb") as plain:
            return plain.read(most + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise damaged(path, "is not a whole gzip file: it is truncated or damaged") from None
    except OSError as error:
        raise FlowBNNError(f"{path} cannot be read: {error.strerror or error}", kind="file") from None


def _length(path: Path, raw: bytes, wanted: int) -> None:
    if len(raw) != wanted:
        length = f"is {len(raw):,} bytes long" if len(raw) < wanted else "is longer"
        packed = " when unpacked" if path.suffix == ".gz" else ""
        tail = ": it is truncated" if len(raw) < wanted else ""
        raise damaged(path, f"{length}{packed}, expected {wanted:,} bytes{tail}")


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes of an IDX file: two zeros, the type (8: bytes), the number of axes, their lengths, the data.

    Args:
        path: plain, or compressed when it ends in ``.gz``.
        shape: what its header must say.
    """
    header = 4 + 4 * len(shape)
    wanted = header + math.prod(shape)
    raw = _read(path, wanted)
    if len(raw) < header:
        _length(path, raw, wanted)
    if raw[:4] != bytes((0, 0, 8, len(shape))):
        kind = KINDS.get(raw[3]) if raw[:3] == b"\0\0\x08" else None
        number, right = int.from_bytes(raw[:4], "big"), 0x800 + len(shape)
        what = f"holds {kind}" if kind else "is not an IDX file of bytes"
        raise damaged(
            path, f"{what} (magic number {number}), expected {KINDS.get(len(shape), 'data')} ({right})"
        )
    sizes = tuple(int(length) for length in np.frombuffer(raw[4:header], ">u4"))
    if sizes != shape:
        raise damaged(
            path,
            f"says it holds {_times(sizes)}, expected {_times(shape)}: perhaps the file of another split or set",
        )
    _length(path, raw, wanted)
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_cifar_binary(path: Path, count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``[count, *shape]`` and labels of a file that repeats: one byte of label, the pixels channel by channel."""
    record = 1 + math.prod(shape)
    raw = _read(path, count * record)
    _length(path, raw, count * record)
    rows = np.frombuffer(raw, np.uint8).reshape(count, record)
    return np.ascontiguousarray(rows[:, 1:]).reshape(count, *shape), np.ascontiguousarray(rows[:, 0])


def read_cifar_pickle(
    path: Path, md5: str, count: int, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of a pickled batch, ``{b"data": bytes [count, pixels], b"labels": [...]}``, if it is the published file."""
    raw = _read(path, 2 * count * math.prod(shape) + 100_000)
    digest = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if digest != md5:
        raise damaged(path, f"is not the published file (MD5 {digest}, expected {md5}): it was not unpickled")
    content = pickle.loads(raw, encoding="bytes")
    return content[b"data"].reshape(count, *shape), np.array(content[b"labels"], np.uint8)


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{length:,}" for length in shape)
