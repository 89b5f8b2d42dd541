"""Tensors and a JSON document in one safetensors file that appears whole or not at all.

The document travels in the header of the file, so one rename publishes both. A file is written beside its target, flushed to the
disk, and renamed over it: a reader, or a run that is killed, sees the old file or the new one. One checksum covers the document and
all tensors. Nothing is ever unpickled, so that loading a file cannot run code.
"""

import json
import os
import shutil
import socket
import warnings
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flowbnn.batches import first_nonfinite_tensor
from flowbnn.errors import FlowBNNError, FlowBNNWarning

__all__ = [
    "check_weights",
    "check_writable",
    "decode_state",
    "encode_state",
    "is_alive",
    "keep_as",
    "kinds_of",
    "load_state",
    "load_tensors",
    "name_below",
    "save_state",
    "save_tensors",
    "warn_of_other_kinds",
]

FORMAT = 3
HEADER = "flowbnn"
KIND = "__kind__"
SEQUENCES = {"tuple": tuple, "deque": deque}


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
    with _replacing(path) as temporary:
        stored, aliases = _without_aliases(tensors)
        content = json.dumps({"aliases": aliases, "document": document})
        header = json.dumps({"format": FORMAT, "checksum": _checksum(stored, content), "content": content})
        save_file(stored, temporary, metadata={HEADER: header})
    return path


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: the tensors, on the CPU, and the document.

    A file that is missing, cut short, damaged, or something else altogether gives one :class:`FlowBNNError` line.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "null"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if header is None:
            trouble = "is a safetensors file, but flowbnn did not write it"
        elif header["format"] != FORMAT:
            trouble = f"has format {header['format']!r}, this flowbnn reads {FORMAT}"
        elif header["checksum"] != _checksum(tensors, header["content"]):
            trouble = "is damaged: its bytes are not those that were written"
        else:
            parts = json.loads(header["content"])
            aliases = {name: tensors[stored] for name, stored in parts["aliases"].items()}
            return tensors | aliases, parts["document"]
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError, RecursionError) as error:
        trouble = f"has a damaged header ({type(error).__name__})"
    except (OSError, SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        trouble = f"is damaged, cut short or no safetensors file ({_reason(error)})"
        if not path.is_file():
            trouble = "is a folder; name the file in it" if path.is_dir() else "is missing: there is no file"
        elif zipfile.is_zipfile(path):
            trouble = "is a pickle (torch.save), which can run code and is never read; save it with flowbnn"
    raise FlowBNNError(f"'{path}' {trouble}", kind="file")


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


def keep_as(path: Path, other: Path) -> None:
    """Copy a file under another name, atomically; what had that name is replaced."""
    with _replacing(other) as temporary:
        shutil.copyfile(path, temporary)


def check_writable(path: str | Path) -> None:
    """Find out now, by writing a file of one byte, whether ``path`` can be written later; removes what killed runs left."""
    path = Path(path)
    trouble = f"'{path}' is a folder, but a file is to be written there" if path.is_dir() else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for part in path.parent.glob(f".{path.name}.{_this_machine()}-*.part"):
            if not is_alive(int(part.stem.rpartition("-")[2])):  # else another process writes it just now
                part.unlink(missing_ok=True)
        _temporary(path).write_bytes(b"0")
        _temporary(path).unlink(missing_ok=True)
    except OSError as error:
        trouble = f"cannot write in folder '{path.parent}' ({_reason(error)}); name another folder or make it writable"
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
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place, flushed to the disk, when the block has ended well."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise FlowBNNError(
            f"cannot write '{path}' ({_reason(error)}); what was there before is kept", kind="file"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


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


def _checksum(tensors: Mapping[str, Tensor], content: str) -> int:
    """CRC-32 of the document and of all tensors: their names, kinds, shapes and bytes."""
    value = zlib.crc32(content.encode())
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return value


def _temporary(path: Path) -> Path:
    """Where a file is written before it gets its name, which says which process of which machine writes it."""
    return path.with_name(f".{path.name}.{_this_machine()}-{os.getpid()}.part")


def _this_machine() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().split("\n")[0][:200] or type(error).__name__


# -------------------- does a stored state fit a network?


def name_below(name: str, root: str) -> str:
    """The name of a module or parameter as seen from the submodule ``root``; one outside it keeps its name.

    >>> name_below("network.fc1.weight", "network"), name_below("likelihood.scale", "network")
    ('fc1.weight', 'likelihood.scale')
    """
    if not root:
        return name
    return "" if name == root else name.removeprefix(root + ".")


def check_weights(
    model: nn.Module,
    state: Mapping[str, Any],
    source: str | Path,
    names_below: str = "",
    finite: Iterable[str] = (),
) -> None:
    """Refuse a state that does not fit the model's names, shapes and kinds of numbers, or is not finite, naming the first few.

    Args:
        names_below: is left out of the names, as in :func:`flowbnn.training.train`.
        finite: names of tensors that must be.

    >>> check_weights(nn.Linear(2, 1), nn.Linear(3, 1).state_dict(), "a.safetensors")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: 'a.safetensors' is of another architecture: it differs in weight ((1, 3) there, (1, 2) here)
    """
    own = model.state_dict()
    unlike = {name: _unlike(state[name], own[name]) for name in own if name in state}
    differences = {
        "it lacks": [name_below(name, names_below) for name in own if name not in state],
        "it has besides": [name_below(name, names_below) for name in state if name not in own],
        "it differs in": [f"{name_below(name, names_below)} ({how})" for name, how in unlike.items() if how],
    }
    words = [f"{what} {_few(names)}" for what, names in differences.items() if names]
    trouble = f"is of another architecture: {'; '.join(words)}" if words else ""
    layer = None if trouble else first_nonfinite_tensor((name, state[name]) for name in finite)
    if layer is not None:
        layer = name_below(layer, names_below)
        trouble = f"holds NaN or infinite weights in {layer!r}; take an earlier file or begin again"
    if trouble:
        raise FlowBNNError(
            f"'{source}' {trouble}", kind="not finite" if layer else "architecture", layer=layer
        )


def _unlike(stored: Any, own: Any) -> str:
    """How two entries of a state differ, in words."""
    if not isinstance(stored, Tensor) or not isinstance(own, Tensor):
        return "" if type(stored) is type(own) else "no tensor on one side"
    if stored.shape != own.shape:
        return f"{tuple(stored.shape)} there, {tuple(own.shape)} here"
    same = stored.dtype == own.dtype
    return "" if same else f"{stored.dtype} there, {own.dtype} here".replace("torch.", "")


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def kinds_of(model: nn.Module) -> dict[str, str]:
    """The class of every module that holds no others: what computes with the weights, or between them.

    >>> kinds_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    {'0': 'Linear', '1': 'ReLU'}
    """
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if name and next(module.children(), None) is None
    }


def warn_of_other_kinds(model: nn.Module, stored: Mapping[str, str], path: Any) -> None:
    """Weights fit a network whose activations are others, and mean something else there."""
    own = kinds_of(model)
    changed = {name: (stored[name], own[name]) for name in own if stored.get(name, own[name]) != own[name]}
    if changed:
        words = _few([f"'{name}' was {before} and is {now}" for name, (before, now) in changed.items()])
        warnings.warn(
            FlowBNNWarning(
                f"'{path}' was made from a network of other layers: {words}; its predictions here are not those of the network that "
                "was trained",
                kind="layers",
                changed=changed,
            )
        )
