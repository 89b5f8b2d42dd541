"""Readers of the published formats: IDX (plain or gzip), CIFAR's binary files, CIFAR's pickled files.

Each checks what can be checked without a checksum and raises :class:`FlowBNNError` with one line that names the file. A pickle names
functions to call; here every name but the few that a numpy array needs is refused, and those few stand for inert records of this
module: no code of numpy, and none of the file's choosing, ever runs.
"""

import gzip
import io
import math
import pickle
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flowbnn.errors import FlowBNNError

__all__ = [
    "ALLOWED",
    "Refused",
    "damaged",
    "decode_array",
    "load_inert",
    "read_cifar_binary",
    "read_cifar_pickle",
    "read_idx",
]

REMEDY = "delete it and load again with download=True, or copy it anew"
KINDS = {1: "labels", 3: "images"}


def damaged(path: Path, what: str) -> FlowBNNError:
    """The error for a file that is not what it should be.

    >>> print(damaged(Path("a.bin"), "is 3 bytes long, expected 4"))
    a.bin is 3 bytes long, expected 4; delete it and load again with download=True, or copy it anew
    """
    return FlowBNNError(f"{path} {what}; {REMEDY}")


def _read(path: Path, most: int) -> bytes:
    """The content, unpacked, but never more than ``most + 1`` bytes of it."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return packed.read(most + 1)
        with path.open("rb") as plain:
            return plain.read(most + 1)
    except EOFError:
        raise damaged(path, "ends in the middle of its gzip stream: it is truncated") from None
    except (gzip.BadGzipFile, zlib.error):
        raise damaged(path, "is not a whole gzip file: it is damaged") from None
    except OSError as error:
        raise FlowBNNError(f"{path} cannot be read: {error.strerror or error}") from None


def _length(path: Path, raw: bytes, wanted: int) -> None:
    if len(raw) != wanted:
        found = f"is {len(raw):,} bytes long" if len(raw) < wanted else "is longer"
        packed = " when unpacked" if path.suffix == ".gz" else ""
        tail = ": it is truncated" if len(raw) < wanted else ""
        raise damaged(path, f"{found}{packed}, expected {wanted:,} bytes{tail}")


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
    found = tuple(int(length) for length in np.frombuffer(raw[4:header], ">u4"))
    if found != shape:
        raise damaged(
            path,
            f"says it holds {_times(found)}, expected {_times(shape)}: perhaps the file of another split or set",
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


def read_cifar_pickle(path: Path, count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of a pickled batch, ``{"data": bytes [count, pixels], "labels": [...]}``; nothing in it is run."""
    size = math.prod(shape)
    most = 8 * count * (size + 8) + 100_000  # the wordiest pickle protocol escapes a byte in four letters
    raw = _read(path, most)
    if len(raw) > most:
        raise damaged(path, f"is longer than any pickle of {count:,} images of {size:,} bytes")
    try:
        content = load_inert(raw)
        labels = content.get("labels")
        if not isinstance(labels, list) or any(type(label) is not int for label in labels):
            raise Refused("has no list of integers under 'labels'")
        if len(labels) != count:
            raise Refused(f"holds {len(labels):,} labels, expected {count:,}")
        if not all(0 <= label < 256 for label in labels):
            raise Refused(f"has labels from {min(labels)} to {max(labels)}")
        pixels = decode_array(content.get("data"), (count, size))
    except Refused as reason:
        raise damaged(path, str(reason)) from None
    return np.ascontiguousarray(pixels).reshape(count, *shape), np.array(labels, np.uint8)


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{length:,}" for length in shape)


class Refused(Exception):
    """Why a pickle is not read; the caller knows the file's name."""


class _Kind:
    """Stands for ``numpy.dtype``."""

    def __init__(self, name: Any = None, *rest: Any) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for ``numpy.ndarray``: keeps the state that a pickle gives it."""

    state: Any = None

    def __init__(self, *rest: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Buffer(_Array):
    """Stands for ``numpy.core.numeric._frombuffer``, which the newest pickles call."""

    def __init__(self, content: Any, kind: Any, sizes: Any, order: Any) -> None:
        if isinstance(content, bytes | bytearray):
            self.state = (1, sizes, kind, order == "F", bytes(content))


class _Encoded(bytes):
    """Stands for ``_codecs.encode``, by which Python 3 writes bytes in old pickles."""

    def __new__(cls, text: Any = "", encoding: Any = "latin1") -> "_Encoded":
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise Refused("holds text in a form that CIFAR files do not have")
        return super().__new__(cls, text, "latin1")

    def __setstate__(self, state: Any) -> None:
        raise Refused("changes text, which no CIFAR file does")


# classes with a __setstate__ each, and no functions: a pickle can set attributes of what has none
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Buffer,
    ("numpy._core.numeric", "_frombuffer"): _Buffer,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _Encoded,
}


_InPython: Any = pickle._Unpickler  # its parts are not declared anywhere


class _Unpickler(_InPython):
    """The unpickler written in Python: in the compiled one, a few damaged bytes reserve gigabytes.

    Dictionaries have names as keys and numbers are of a size, for a few hundred bytes can nest a key whose hash, or write a
    number whose digits, take hours.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def _check_keys(self, keys: list[Any]) -> None:
        if not all(isinstance(key, str | bytes) for key in keys):
            raise Refused(
                "has a dictionary whose keys are no names, which no CIFAR file does: do not trust this file"
            )

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])  # all since the mark
        super().load_setitems()

    def load_dict(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_dict()

    def _check_digits(self, count: int, most: int) -> None:
        if count > most:
            raise Refused(
                "holds a number of hundreds of digits, which no CIFAR file does: do not trust this file"
            )

    def load_long1(self) -> None:
        size = self.read(1)[0]
        self._check_digits(size, 8)
        self.append(pickle.decode_long(self.read(size)))

    def load_long4(self) -> None:
        self._check_digits(9, 8)

    def load_long(self) -> None:
        digits = self.readline()[:-1].rstrip(b"L")
        self._check_digits(len(digits), 20)
        self.append(int(digits, 0))

    def load_int(self) -> None:
        digits = self.readline()[:-1]
        self._check_digits(len(digits), 20)
        self.append(digits == b"01" if digits in (b"00", b"01") else int(digits, 0))

    def load_set(self) -> None:
        raise Refused("holds a set, which no CIFAR file does: do not trust this file")

    dispatch |= {
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.LONG1[0]: load_long1,
        pickle.LONG4[0]: load_long4,
        pickle.LONG[0]: load_long,
        pickle.INT[0]: load_int,
        pickle.EMPTY_SET[0]: load_set,
        pickle.ADDITEMS[0]: load_set,
        pickle.FROZENSET[0]: load_set,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise Refused(
                f"asks to call {module}.{name}, which no CIFAR file does: it was not run; do not trust this file"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        raise Refused("refers to data outside itself, which no CIFAR file does: do not trust this file")


def load_inert(raw: bytes) -> dict[str, Any]:
    """The dictionary that a CIFAR batch is, with its arrays still undecoded.

    >>> sorted(load_inert(pickle.dumps({"labels": [3], b"data": np.zeros((1, 2), np.uint8)}, protocol=2)))
    ['data', 'labels']
    """
    try:
        found = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except Refused:
        raise
    except Exception as error:  # a damaged pickle fails in any way it likes
        raise Refused(f"is not a whole pickle ({type(error).__name__}): it is truncated or damaged") from None
    if not isinstance(found, dict):
        raise Refused(f"holds a {type(found).__name__} where a CIFAR batch is a dictionary")
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in found.items()
    }


def decode_array(found: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The array of bytes in ``found``, which must have ``shape``."""
    state = found.state if isinstance(found, _Array) else None
    if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[2], _Kind)):
        raise Refused("has no array of pixels under 'data'")
    _, sizes, kind, fortran, content = state
    if kind.name not in ("u1", "|u1"):
        raise Refused(f"has pixels of type {kind.name!r:.20} where bytes ('u1') are expected")
    if not (isinstance(sizes, tuple) and all(type(size) is int for size in sizes)):
        raise Refused("has pixels without a shape")
    if sizes != shape:
        raise Refused(f"has pixels of shape {sizes!r:.40}, expected {shape}")
    if not isinstance(content, bytes) or len(content) != int(np.prod(shape)):
        raise Refused(f"has another number of pixels than its shape {shape} says")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
