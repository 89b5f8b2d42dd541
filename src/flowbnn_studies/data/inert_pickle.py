"""Pickled CIFAR batches, read without letting the pickle run anything.

A pickle names functions to call. Here every name but the few that a numpy array needs is refused, and those few stand for
inert records of this module: no code of numpy, and none of the file's choosing, ever runs.
"""

import io
import pickle
from typing import Any, ClassVar

import numpy as np

__all__ = ["Refused", "decode_array", "load_inert"]


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
