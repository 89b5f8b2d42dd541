"""Tensors and a JSON document in one safetensors file that appears whole or not at all.

The document travels in the header of the file, so one rename publishes both. A file is written beside its target, flushed to the
disk, and renamed over it: a reader, or a run that is killed, sees the old file or the new one. One checksum covers the document and
all tensors. Nothing is ever unpickled, so that loading a file cannot run code.
"""

import json
import os
import re
import shutil
import socket
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = [
    "check_writable",
    "decode_state",
    "encode_state",
    "is_alive",
    "keep_as",
    "load_document",
    "load_state",
    "load_tensors",
    "save_state",
    "save_tensors",
]

FORMAT = 2
HEADER = "flowbnn"
KIND = "__kind__"
DAY = 24 * 3600.0


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> Path:
    """Write named tensors and a JSON document to one safetensors file, atomically.

    Tensors that are the same memory (tied weights) are stored once and come back as one tensor. If anything fails,
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
    stored, aliases = _without_aliases(tensors)
    try:
        content = json.dumps({"aliases": aliases, "document": document})
    except (TypeError, ValueError, RecursionError) as error:
        raise FlowBNNError(
            f"cannot write '{path}': its document is not JSON ({error})", kind="file"
        ) from None
    header = json.dumps({"format": FORMAT, "checksum": _checksum(stored, content), "content": content})
    with _renamed_to(path, f"cannot write '{path}'") as temporary:
        save_file(stored, temporary, metadata={HEADER: header})
    return path


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: the tensors, on the CPU, and the document.

    A file that is missing, cut short, damaged, or something else altogether gives one :class:`FlowBNNError` line.
    """
    return _load(Path(path), with_tensors=True)


def load_document(path: str | Path) -> dict[str, Any]:
    """The document alone of what :func:`save_tensors` wrote, without reading the tensors or the checksum."""
    return _load(Path(path), with_tensors=False)[1]


def _load(path: Path, with_tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    document: dict[str, Any] = {}
    trouble, text = "", None
    if not path.is_file():
        missing = f"there is no file '{path}'"
        missing = f"'{path}' is a folder; name the file in it" if path.is_dir() else missing
        raise FlowBNNError(missing, kind="file")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get(HEADER)
            if with_tensors:
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if text is None:
            trouble = "is a safetensors file, but flowbnn did not write it"
    except (OSError, SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        trouble = f"is cut short or no safetensors file ({_reason(error)})"
        if _looks_like_pickle(path):
            trouble = "is a pickle (torch.save), which can run code and is never read; save it with flowbnn"
    if text is not None and not trouble:
        try:
            header = json.loads(text)
            version, checksum, content = header["format"], header.get("checksum"), header.get("content")
            if version != FORMAT:
                trouble = f"has format {version!r}, this flowbnn reads {FORMAT}"
            elif with_tensors and checksum != _checksum(tensors, content):
                trouble = "is damaged: its bytes are not those that were written"
            else:
                parts = json.loads(content)
                document = parts["document"]
                for name, target in parts["aliases"].items():
                    tensors[name] = tensors[target] if with_tensors else torch.empty(0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            trouble = f"has a damaged header ({type(error).__name__})"
    if trouble:
        raise FlowBNNError(f"'{path}' {trouble}", kind="file")
    return tensors, document


def save_state(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Write a nested state, such as an optimizer's, of tensors and plain values, atomically."""
    tensors: dict[str, Tensor] = {}
    document = {name: encode_state(value, name, tensors) for name, value in state.items()}
    return save_tensors(path, tensors, document)


def load_state(path: str | Path) -> dict[str, Any]:
    """Read what :func:`save_state` wrote, with the same types."""
    tensors, document = load_tensors(path)
    return decode_state(document, tensors)


def encode_state(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON tree of ``value``; its tensors go into ``tensors`` under ``name/...`` and leave their name behind.

    Tuples, deques, counters, numpy arrays and dictionaries whose keys are not strings are marked, so that
    :func:`decode_state` gives back the same types.

    >>> tensors = {}
    >>> tree = encode_state({"state": {0: {"exp_avg": torch.ones(2)}}, "betas": (0.9, 0.999)}, "optimizer", tensors)
    >>> tensors
    {'optimizer/state/0/exp_avg': tensor([1., 1.])}
    >>> decode_state(tree, tensors)
    {'state': {0: {'exp_avg': tensor([1., 1.])}}, 'betas': (0.9, 0.999)}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value
        return {KIND: "tensor", "name": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {KIND: "array", "value": encode_state(torch.from_numpy(value.copy()), name, tensors)}
    if isinstance(value, Mapping):
        items = [
            [encode_state(k, name, {}), encode_state(v, f"{name}/{k}", tensors)] for k, v in value.items()
        ]
        if isinstance(value, Counter):
            return {KIND: "counter", "items": items}
        if all(isinstance(key, str) for key in value) and KIND not in value:
            return dict(items)
        return {KIND: "map", "items": items}
    if isinstance(value, (list, tuple, deque)):
        parts = [encode_state(part, f"{name}/{index}", tensors) for index, part in enumerate(value)]
        if isinstance(value, list):
            return parts
        return {KIND: "tuple" if isinstance(value, tuple) else "deque", "items": parts}
    raise FlowBNNError(
        f"cannot store {name!r}: a {type(value).__name__} is neither a number, text nor a tensor", kind="file"
    )


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
    if kind == "array":
        return decode_state(tree["value"], tensors).numpy()
    if kind in ("map", "counter"):
        pairs = {decode_state(key, tensors): decode_state(value, tensors) for key, value in tree["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    parts = [decode_state(part, tensors) for part in tree["items"]]
    return tuple(parts) if kind == "tuple" else deque(parts)


def keep_as(path: Path, other: Path) -> None:
    """Give a file a second name, atomically; what had that name is replaced. ``path`` stays where it is."""
    with _renamed_to(other, f"cannot keep '{path}' as '{other}'") as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without links
            shutil.copyfile(path, temporary)


def check_writable(path: str | Path) -> None:
    """Find out now, by writing a file of one byte, whether ``path`` can be written later; removes what killed runs left."""
    path = Path(path)
    if path.is_dir():
        raise FlowBNNError(f"'{path}' is a folder, but a file is to be written there", kind="file")
    probe = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for part in path.parent.glob(f".{path.name}.*.part"):
            if _is_left_over(part):
                part.unlink(missing_ok=True)
        probe.write_bytes(b"0")
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise FlowBNNError(
            f"cannot write in folder '{path.parent}' ({_reason(error)}); name another folder or make it writable",
            kind="file",
        ) from None


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs; where that cannot be asked, it is taken to.

    >>> is_alive(os.getpid())
    True
    """
    if os.name == "nt":  # there, signal 0 is Ctrl-C
        return True
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # no permission to ask, or no such file on this system
        return True
    return state not in "ZX"  # zombies: dead, but their parent has not waited for them yet


@contextmanager
def _renamed_to(path: Path, trouble: str) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place, flushed to the disk, when the block has ended well."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise FlowBNNError(
            f"{trouble} ({_reason(error)}); what was there before is kept", kind="file"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise FlowBNNError(
                f"tensor {name!r} is sparse, quantized or on the meta device: store a dense one", kind="file"
            )
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        # a contiguous copy of its own: the format refuses views into one storage
        stored[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return stored, aliases


def _checksum(tensors: Mapping[str, Tensor], content: str) -> int:
    """CRC-32 of the document and of all tensors: their names, kinds, shapes and bytes."""
    value = zlib.crc32(content.encode())
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return value


def _looks_like_pickle(path: Path) -> bool:
    """Whether a file that is no whole safetensors file begins like a pickle; one of ours may begin with 0x80 too."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError:
        return False
    protocol = len(start) == 9 and start[0] == 0x80 and 2 <= start[1] <= 5
    return start[:4] == b"PK\x03\x04" or (protocol and start[5:] != b"\0\0\0{")


def _temporary(path: Path) -> Path:
    """Where a file is written before it gets its name, which says which process of which machine writes it."""
    return path.with_name(f".{path.name}.{_this_machine()}-{os.getpid()}.part")


def _this_machine() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _is_left_over(part: Path) -> bool:
    """Whether nobody writes this any more. Another process of the same run may be writing its checkpoint just now."""
    writer = re.search(r"\.([0-9a-f]{8})-(\d+)\.part$", part.name)
    with suppress(FileNotFoundError):  # it has got its name meanwhile
        if writer is None or time.time() - part.stat().st_mtime > DAY:
            return True
        return writer[1] == _this_machine() and (
            int(writer[2]) == os.getpid() or not is_alive(int(writer[2]))
        )
    return False


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder, and renames there need no flush
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().split("\n")[0][:200] or type(error).__name__
