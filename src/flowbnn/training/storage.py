"""Tensors and a JSON document in one safetensors file that appears whole or not at all.

The document travels in the header of the file, so one rename publishes both. A file is written beside its target, flushed to the
disk, and renamed over it: a reader, or a run that is killed, sees the old file or the new one. One checksum covers the document and
all tensors. Nothing is ever unpickled, so that loading a file cannot run code.
"""

import json
import os
import shutil
import socket
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cached_property, reduce
from glob import escape
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.options import checked

FORMAT = 3
HEADER = "flowbnn"
KIND = "__kind__"
NUMBERS = count()
MOST_HEADER = 100_000_000  # bytes, safetensors' own limit
MOST_NAMES = 100_000
PIECE = 2**24  # bytes that are checked at once
MOST_NETWORKS = 100_000  # as many weights as so many networks have are no posterior or checkpoint any more
Bytes = Callable[[str], Iterable[bytes]]  # those of a tensor, by its name, in pieces
SEQUENCES = {"tuple": tuple, "deque": deque}


@checked
def save_tensors(path: str | Path, tensors: Mapping[str, Any], document: Mapping[str, Any]) -> Path:
    """Write named tensors and a JSON document to one safetensors file, atomically.

    Tensors that are the same memory (tied weights) are stored once and come back as one tensor, all in their order. If anything fails,
    what was at ``path`` before is still there. Missing parent folders are made.

    Args:
        path: the file, by custom ``*.safetensors``.
        tensors: dense tensors on any device.
        document: anything ``json`` can write; floats come back to the bit.

    >>> import tempfile
    >>> weight = torch.ones(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_tensors(f"{folder}/a.safetensors", {"encoder": weight, "decoder": weight}, {"epoch": 3})
    ...     tensors, document = load_tensors(path)
    >>> tensors["encoder"] is tensors["decoder"], document
    (True, {'epoch': 3})
    """
    path = Path(path)
    with atomic_write(path) as temporary:
        stored, aliases = _without_aliases(tensors)
        content = json.dumps({"aliases": aliases, "document": document, "order": list(tensors)})
        header = json.dumps({"format": FORMAT, "checksum": _checksum(stored, content), "content": content})
        save_file(stored, temporary, metadata={HEADER: header})
    return path


@checked
def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: the tensors, on the CPU, and the document.

    A file that is missing, cut short, damaged, or something else altogether gives one :class:`FlowBNNError` line.
    """
    file = TensorFile(path)
    return file.tensors, file.document


class TensorFile:
    """A file of :func:`save_tensors` whose header has been read.

    ``document`` and ``views`` say what it holds, so that a file which does not fit is refused before any tensor is read: views have
    names, shapes and kinds of numbers and stay on the disk until they are used. ``tensors`` are copies, held against the checksum.

    Args:
        path: the file.
        weights: of the network it is for. A file as large as 100,000 such networks is refused.
    """

    def __init__(self, path: str | Path, weights: int | None = None) -> None:
        self.path = Path(path)
        with self.reading():
            trouble = self._misfit(weights)
            if trouble:
                raise FlowBNNError(f"'{path}' {trouble}", kind="file")
            header = self._open()
            if header is None:
                trouble = "is a safetensors file, but flowbnn did not write it"
            elif header["format"] != FORMAT:
                trouble = f"has format {header['format']!r}, this flowbnn reads {FORMAT}"
            if trouble:
                raise FlowBNNError(f"'{path}' {trouble}", kind="file")
            self.checksum, self.content = header["checksum"], header["content"]
            parts = json.loads(self.content)
            self.aliases, self.document = dict(parts["aliases"]), dict(parts["document"])
            self.order = parts.get("order", [])  # safetensors sorts by name
            self.views = self._all(self.stored)

    def _open(self) -> Any:
        """Map the tensors and return the header.

        safetensors opens a file twice, by its name. Where another process puts a new file in its place in between, header and tensors
        are of two files: then both are opened anew.
        """
        header = None
        for _ in range(10):
            self.identity, trouble = _identity(self.path), None
            try:
                with safe_open(self.path, framework="pt", device="cpu") as file:
                    header = json.loads((file.metadata() or {}).get(HEADER, "null"))
                    self.stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, ValueError, RuntimeError) as error:
                trouble = error
            if self.identity == _identity(self.path):
                break
        if trouble is not None:
            raise trouble
        return header

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors, read and checked."""
        with self.reading():
            with self._bytes() as pieces:
                whole = self.checksum == _checksum(self.stored, self.content, pieces)
            if not whole:
                text = f"'{self.path}' is damaged: its bytes are not those that were written"
                raise FlowBNNError(text, kind="file")
            read = {name: view.clone() for name, view in self.stored.items()}
            return self._all(read)

    def _all(self, stored: dict[str, Any]) -> dict[str, Any]:
        """The tensors with their aliases, in the order in which they were saved."""
        found = stored | {name: stored[of] for name, of in self.aliases.items()}
        return {name: found[name] for name in dict.fromkeys([*self.order, *found]) if name in found}

    @contextmanager
    def _bytes(self) -> Iterator[Bytes | None]:
        """Gives the bytes of a stored tensor in pieces from the disk, since a view that is walked through stays in memory.

        None where another file has taken the name since: then the views are all there is. The file is opened once, so that none can
        take the name in between.
        """
        with self.path.open("rb") as file:
            if _identity(file.fileno()) != self.identity:
                yield None
                return
            start = int.from_bytes(file.read(8), "little")
            places = json.loads(file.read(start))

            def pieces(name: str) -> Iterator[bytes]:
                first, last = places[name]["data_offsets"]
                file.seek(8 + start + first)
                for begin in range(first, last, PIECE):
                    yield file.read(min(PIECE, last - begin))

            yield pieces

    def check_names(self, known: Iterable[str]) -> None:
        """Refuse a file that has other tensors besides."""
        unknown = sorted(self.views.keys() - set(known))
        if unknown:
            raise FlowBNNError(
                f"'{self.path}' has tensors that belong to nothing, such as {unknown[0]!r:.80}", kind="file"
            )

    def holding(self, document: dict[str, Any]) -> "TensorFile":
        """The same tensors with a part of the document."""
        other = copy(self)
        other.document = document
        return other

    def _misfit(self, weights: int | None) -> str:
        """What shows, before torch or safetensors see the file, that it cannot be right."""
        if self.path.is_dir():
            return "is a folder; name the file in it"
        if not self.path.exists():
            return "is missing: there is no file"
        if not self.path.is_file():
            return "is no plain file but a pipe or a device, which is never read"
        size = self.path.stat().st_size
        most = MOST_NETWORKS * 8 * max(weights or 0, 1000)
        if weights is not None and size > most:
            return (
                f"has {size:,} bytes, and no file for a network of {weights:,} weights has more than {most:,}"
            )
        with self.path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER))
        if header.count(b'"data_offsets"') > MOST_NAMES:
            return f"names more than {MOST_NAMES:,} tensors, which no file of flowbnn does"
        return ""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Whatever goes wrong inside says that the file is damaged."""
        try:
            yield
            return
        except FlowBNNError:
            raise
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError, RecursionError) as error:
            trouble = f"has a damaged header ({type(error).__name__})"
        except (OSError, SafetensorError, ValueError, RuntimeError, MemoryError) as error:
            trouble = f"is damaged, cut short or no safetensors file ({_reason(error)})"
            if zipfile.is_zipfile(self.path):
                trouble = (
                    "is a pickle (torch.save), which can run code and is never read; save it with flowbnn"
                )
        raise FlowBNNError(f"'{self.path}' {trouble}", kind="file")


def save_state(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Write a nested state, such as an optimizer's, of tensors and plain values, atomically."""
    tensors: dict[str, Tensor] = {}
    document = {name: encode_state(value, name, tensors) for name, value in state.items()}
    return save_tensors(path, tensors, document)


def encode_state(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON tree of ``value``; its tensors go into ``tensors`` under ``name/...`` and leave their name behind.

    Tuples, deques, counters and dictionaries whose keys are not strings are marked, so that :func:`decode_state` gives back the same
    types.

    >>> tensors = {}
    >>> tree = encode_state({"state": {0: {"exp_avg": torch.ones(2)}}, "betas": (0.9, 0.999)}, "optimizer", tensors)
    >>> tensors
    {'optimizer/state/0/exp_avg': tensor([1., 1.])}
    >>> decode_state(tree, tensors)
    {'state': {0: {'exp_avg': tensor([1., 1.])}}, 'betas': (0.9, 0.999)}
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {KIND: "tensor", "name": name}
    if isinstance(value, Mapping):
        items = [[key, encode_state(part, f"{name}/{key}", tensors)] for key, part in value.items()]
        if isinstance(value, Counter) or KIND in value or not all(isinstance(key, str) for key in value):
            return {KIND: "counter" if isinstance(value, Counter) else "map", "items": items}
        return dict(items)
    if isinstance(value, list | tuple | deque):
        parts = [encode_state(part, f"{name}/{index}", tensors) for index, part in enumerate(value)]
        return parts if isinstance(value, list) else {KIND: type(value).__name__, "items": parts}
    return value


def decode_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`encode_state`."""
    if isinstance(tree, list):
        return [decode_state(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(KIND)
    if kind is None:
        return {key: decode_state(value, tensors) for key, value in tree.items()}
    if kind == "tensor":
        return tensors[tree["name"]]
    if kind in ("map", "counter"):
        pairs = {key: decode_state(value, tensors) for key, value in tree["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    return SEQUENCES[kind](decode_state(part, tensors) for part in tree["items"])


def copy_file(path: Path, other: Path) -> None:
    """Copy a file under another name, atomically; what had that name is replaced."""
    with atomic_write(other) as temporary:
        shutil.copyfile(path, temporary)


@checked
def check_writable(path: str | Path) -> None:
    """Find out now, by writing a file of one byte, whether ``path`` can be written later; removes what killed runs left."""
    trouble, target = "", Path(path)
    try:
        target = Path(os.path.realpath(path))
        trouble = f"'{path}' {_no_file(target)}" if _no_file(target) else ""
        with _workplace(target) as temporary:
            temporary.write_bytes(b"0")
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        trouble = f"cannot write in folder '{target.parent}' ({_reason(error)}); name another folder or make it writable"
    if trouble:
        raise FlowBNNError(trouble, kind="file")


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs; where that cannot be asked, it is taken to.

    >>> is_alive(os.getpid())
    True
    """
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # no permission to ask, or no such file on this system
        return True
    return state not in "ZX"  # zombies: dead, but their parent has not waited for them yet


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of ``path``, flushed to the disk, when the block has ended well.

    Where ``path`` is a link, its target is replaced and the link stays.
    """
    try:
        target = Path(os.path.realpath(path))
        if _no_file(target):
            raise OSError(f"it {_no_file(target)}")
        with _workplace(target) as temporary:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
    except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise FlowBNNError(
            f"cannot write '{path}' ({_reason(error)}); what was there before is kept", kind="file"
        ) from None


@contextmanager
def _workplace(target: Path) -> Iterator[Path]:
    """A file in a folder of its own beside ``target``, whose name says which process of which machine writes it.

    A folder, since safetensors writes to a file with a name of its own first, which a killed run would leave for ever. What killed
    processes of this machine left there is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for part in target.parent.glob(f".{escape(target.name)}.{_this_machine()}-*-*.part"):
        process = part.stem.split("-")[-2]
        if process.isdigit() and not is_alive(int(process)):  # else another process writes it just now
            shutil.rmtree(part, ignore_errors=True)
    number = next(NUMBERS)  # threads may write one file at once
    folder = target.with_name(f".{target.name}.{_this_machine()}-{os.getpid()}-{number}.part")
    try:
        folder.mkdir()
        yield folder / "file"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _no_file(target: Path) -> str:
    """Why something is no place for a file, if it is none."""
    if target.is_dir():
        return "is a folder, but a file is to be written there"
    return "is a pipe or a device" if target.exists() and not target.is_file() else ""


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        # a contiguous copy of its own: the format refuses views into one storage
        stored[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return stored, aliases


def _checksum(tensors: Mapping[str, Tensor], content: str, pieces: Bytes | None = None) -> int:
    """CRC-32 of the document and of all tensors: their names, kinds, shapes and bytes, which ``pieces`` may give by the name."""
    value = zlib.crc32(content.encode())
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        if pieces is None:
            value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
        else:
            value = reduce(lambda before, piece: zlib.crc32(piece, before), pieces(name), value)
    return value


def _identity(file: Path | int) -> tuple[int, int]:
    """What another file under this name does not have; of a path, or of an open file."""
    found = os.stat(file)
    return found.st_ino, found.st_mtime_ns


def _this_machine() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().split("\n")[0][:200] or type(error).__name__
