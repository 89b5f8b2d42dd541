"""Tensors and a JSON document in one safetensors file that appears whole or not at all.

The document travels in the header of the file, so one rename publishes both. A file is written beside its target,
flushed to the disk, and renamed over it: a reader, or a run that is killed, sees the old file or the new one.
Nothing is ever unpickled.
"""

import json
import math
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = [
    "HISTORY",
    "check_document",
    "check_writable",
    "complaints",
    "is_alive",
    "is_number",
    "is_whole",
    "keep_as",
    "load_document",
    "load_tensors",
    "save_tensors",
]

FORMAT = 1
HEADER = "flowbnn"
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
        sums = {name: _checksum(tensor) for name, tensor in stored.items()}
        text = json.dumps({"format": FORMAT, "aliases": aliases, "sums": sums, "document": document})
    except (TypeError, ValueError, RecursionError) as error:
        raise FlowBNNError(f"cannot write '{path}': its document is not JSON ({error})") from None
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(stored, temporary, metadata={HEADER: text})
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise FlowBNNError(
            f"cannot write '{path}' ({_reason(error)}); what was there before is kept"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: the tensors, on the CPU, and the document.

    A file that is missing, cut short, or something else altogether gives one :class:`FlowBNNError` line.
    """
    path = Path(path)
    if not path.exists():
        raise FlowBNNError(f"there is no file '{path}'")
    if path.is_dir():
        raise FlowBNNError(f"'{path}' is a folder; name the file in it")
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            header = (opened.metadata() or {}).get(HEADER)
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        if _looks_like_pickle(path):
            raise FlowBNNError(
                f"'{path}' is a pickle (torch.save), which can run code and is never read; save it with flowbnn"
            ) from None
        raise FlowBNNError(f"'{path}' is cut short or no safetensors file ({_reason(error)})") from None
    if header is None:
        raise FlowBNNError(f"'{path}' is a safetensors file, but flowbnn did not write it")
    stored = dict(tensors)
    found = _with_document(path, tensors, header)
    sums = json.loads(header).get("sums")
    if isinstance(sums, dict):  # files of an earlier flowbnn have none
        for name, tensor in stored.items():
            if sums.get(name) != _checksum(tensor):
                raise FlowBNNError(
                    f"'{path}' is damaged: the bytes of '{name}' are not those that were written; take another copy of the file"
                )
    return found


def load_document(path: str | Path) -> dict[str, Any]:
    """The document alone of what :func:`save_tensors` wrote, without reading the tensors; as strict as :func:`load_tensors`."""
    path = Path(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            header = (opened.metadata() or {}).get(HEADER)
            names = dict.fromkeys(opened.keys(), torch.empty(0))
    except (OSError, SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        raise FlowBNNError(f"'{path}' is cut short or no safetensors file ({_reason(error)})") from None
    if header is None:
        raise FlowBNNError(f"'{path}' is a safetensors file, but flowbnn did not write it")
    return _with_document(path, names, header)[1]


def keep_as(path: Path, other: Path) -> None:
    """Give a file a second name, atomically; what had that name is replaced. ``path`` stays where it is."""
    temporary = _temporary(other)
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without links
            shutil.copyfile(path, temporary)
            _flush(temporary)
        os.replace(temporary, other)
        _flush(other.parent)
    except OSError as error:
        raise FlowBNNError(
            f"cannot keep '{path}' as '{other}' ({_reason(error)}); it stays as it is: name another folder"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def check_writable(path: str | Path) -> None:
    """Find out now, by writing a file of one byte, whether ``path`` can be written later; clears old left-overs."""
    path = Path(path)
    if path.is_dir():
        raise FlowBNNError(f"'{path}' is a folder, but a file is to be written there")
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
            f"cannot write in folder '{path.parent}' ({_reason(error)}); name another folder or make it writable"
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
    except OSError:  # not ours to ask, or no such file on this system
        return True
    return state not in "ZX"  # dead, and not yet taken note of by its parent


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise FlowBNNError(f"{name!r} cannot name a stored tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise FlowBNNError(
                f"tensor {name!r} is sparse, quantized or on the meta device: store a dense one"
            )
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        # a contiguous copy of its own: views into one storage are refused by the format
        stored[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return stored, aliases


def _with_document(
    path: Path, tensors: dict[str, Tensor], header: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        content = json.loads(header)
        version, aliases, document = content["format"], content["aliases"], content["document"]
        if version != FORMAT:
            raise FlowBNNError(
                f"'{path}' has format {version!r}, this flowbnn reads {FORMAT}: install the one that wrote it"
            )
        if not isinstance(document, dict):
            raise TypeError("its document is not a mapping")
        tensors.update({name: tensors[target] for name, target in aliases.items()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, FlowBNNError):
            raise
        raise FlowBNNError(
            f"'{path}' has a damaged header ({type(error).__name__}: {_reason(error)})"
        ) from None
    return tensors, document


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
    """Where a file is written before it gets its name: it tells the machine and the process that write it."""
    return path.with_name(f".{path.name}.{_this_machine()}-{os.getpid()}.part")


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes, which tells every flipped bit."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _this_machine() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _is_left_over(part: Path) -> bool:
    """Whether nobody writes this any more. Another process of the same run may be writing its checkpoint just now."""
    try:
        old = time.time() - part.stat().st_mtime > DAY
    except FileNotFoundError:  # it has got its name meanwhile
        return False
    writer = re.search(r"\.([0-9a-f]{8})-(\d+)\.part$", part.name)
    if writer is None or old:
        return True
    machine, process = writer[1], int(writer[2])
    return machine == _this_machine() and (process == os.getpid() or not is_alive(process))


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


# -------------------- schema.py

Field = tuple[str, Callable[[Any], bool]]
LARGEST = 2**53


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, zero or more, that a float can hold."""
    return type(value) is int and 0 <= value <= LARGEST


def is_number(value: Any) -> bool:
    """Whether this is an int or a float, which may be NaN or infinite; a bool is none."""
    return type(value) is float or (type(value) is int and abs(value) <= LARGEST)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and is_number(v) for k, v in value.items())


def _is_settings(value: Any) -> bool:
    return _is_numbers(value) and all(math.isfinite(v) and v >= 0 for v in value.values())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


WHOLE: Field = ("a whole number, zero or more", is_whole)
WHOLE_OR_NONE: Field = ("a whole number, zero or more, or null", lambda v: v is None or is_whole(v))
NUMBER_OR_NONE: Field = ("a number or null", lambda v: v is None or (is_number(v) and not math.isnan(v)))
TEXT: Field = ("text", lambda v: isinstance(v, str))
TEXT_OR_NONE: Field = ("text or null", lambda v: v is None or isinstance(v, str))
MAPPING: Field = ("a mapping", lambda v: isinstance(v, dict))
NUMBERS: Field = ("a mapping from names to numbers", _is_numbers)
ANYTHING: Field = ("anything", lambda v: True)

POSITION = {
    "epoch": WHOLE,
    "batches": WHOLE,
    "step": WHOLE,
    "best": NUMBER_OR_NONE,
    "waited": WHOLE,
    "batches_per_epoch": WHOLE_OR_NONE,
    "monitor": TEXT_OR_NONE,
    "mode": TEXT_OR_NONE,
}
HISTORY = {
    "records": (
        "a list of mappings from names to numbers",
        lambda v: isinstance(v, list) and all(_is_numbers(record) for record in v),
    ),
    "steps": WHOLE,
    "seconds": ("a number of seconds", lambda v: is_number(v) and math.isfinite(v) and v >= 0),
    "stopped_early": ("true or false", lambda v: isinstance(v, bool)),
    "best_epoch": WHOLE_OR_NONE,
}
AVERAGES = {
    "totals": NUMBERS,
    "weights": (
        "a mapping from names to positive numbers",
        lambda v: _is_numbers(v) and all(weight > 0 for weight in v.values()),
    ),
}
STATE = {
    "weights": MAPPING,
    "optimizer": MAPPING,
    "schedule": ("a mapping or null", lambda v: v is None or isinstance(v, dict)),
    "scaler": ("a mapping from names to numbers, zero or more", _is_settings),
    "random": MAPPING,
    "best_weights": ("a mapping or null", lambda v: v is None or isinstance(v, dict)),
}
DOCUMENT = {
    "kind": TEXT,
    "position": MAPPING,
    "averages": MAPPING,
    "history": MAPPING,
    "groups": (
        "a list of lists of names",
        lambda v: isinstance(v, list) and all(_is_texts(part) for part in v),
    ),
    "optimizer": TEXT,
    "schedule": TEXT_OR_NONE,
    "state": MAPPING,
    "extra": MAPPING,
    "epochs": WHOLE_OR_NONE,
    "torch": TEXT,
}
PARTS = {"position": POSITION, "averages": AVERAGES, "history": HISTORY, "state": STATE}


def complaints(
    values: Any, fields: Mapping[str, Field], name: str = "", partly: bool = False
) -> Iterator[str]:
    """What is wrong with ``values``, one phrase at a time.

    Args:
        values: what should be a dictionary with just the keys of ``fields``.
        fields: for each key, what it must be, in words and as a test.
        name: where ``values`` stands.
        partly: whether keys may be missing.

    >>> list(complaints({"steps": -1, "pages": 3}, {"steps": WHOLE, "seconds": WHOLE}, "history"))
    ["history lacks 'seconds'", "history has an unknown 'pages'", 'history.steps must be a whole number, zero or more, got -1']
    """
    if not isinstance(values, dict):
        yield f"{name or 'it'} must be a mapping, got {values!r:.60}"
        return
    place = name or "it"
    if not partly:
        yield from (f"{place} lacks {key!r}" for key in fields if key not in values)
    yield from (f"{place} has an unknown {key!r:.60}" for key in values if key not in fields)
    for key, (words, test) in fields.items():
        if key in values and not test(values[key]):
            yield f"{name}{'.' if name else ''}{key} must be {words}, got {values[key]!r:.60}"


def check_document(document: Mapping[str, Any], source: str | Path) -> None:
    """Refuse a document that :func:`flowbnn.training.checkpoint.write_run` cannot have written, in one line."""
    if document.get("kind") != "training":
        raise FlowBNNError(
            f"'{source}' is no checkpoint of a training run, but holds {document.get('kind')!r:.60}"
        )
    found = next(_all_complaints(document), None)
    if found is not None:
        raise FlowBNNError(f"'{source}' is damaged: {found}; begin anew with resume=False")


def _all_complaints(document: Mapping[str, Any]) -> Iterator[str]:
    yield from complaints({"epochs": None, **document}, DOCUMENT)  # older files do not tell their epochs
    for name, fields in PARTS.items():
        yield from complaints(document[name], fields, name)
    position, history, averages = document["position"], document["history"], document["averages"]
    epoch, batches, step = position["epoch"], position["batches"], position["step"]
    if len(history["records"]) != epoch:
        yield f"position.epoch is {epoch}, but history.records has {len(history['records'])}"
    if step < max(epoch + (batches > 0), batches, history["steps"]):
        yield f"position.step is {step}, too few for epoch {epoch} and batch {batches}"
    if averages["totals"].keys() != averages["weights"].keys() or ("loss" in averages["totals"]) != (
        batches > 0
    ):
        yield "averages do not belong to its position"
    if history["best_epoch"] is not None and history["best_epoch"] >= epoch:
        yield f"history.best_epoch is {history['best_epoch']}, after the last of {epoch} epochs"
    if (position["best"] is None) != (history["best_epoch"] is None):
        yield "position.best and history.best_epoch do not belong together"
    if (position["monitor"] is None) != (position["mode"] is None):
        yield "position.monitor and position.mode do not belong together"
