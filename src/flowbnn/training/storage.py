"""Storage of tensors and a JSON document in one safetensors file that is written atomically.

The document is stored in the header of the file. A file is written next to its target, flushed to the disk, and renamed. A reader, or
a run that is killed, therefore sees the old file or the new one. One checksum covers the document, a second one the document and
all tensors. Nothing is unpickled, so loading a file cannot run code.
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
from flowbnn.options import File, checked

KIND = "__kind__"  # key of the type of an encoded value
ReadBytes = Callable[[str], Iterable[bytes]]  # chunks of bytes of a tensor, by its name
_file_numbers = count()  # threads may write the same file at once


@checked
def save_tensors(path: File, tensors: Mapping[str, Any], document: Mapping[str, Any]) -> Path:
    """Writes named tensors and a JSON document to one safetensors file, atomically.

    Tensors that share memory (tied weights) are stored once and loaded as one tensor. If writing fails, an existing file is unchanged.
    Missing parent folders are created.

    Args:
        path: Path of the file, usually ``*.safetensors``.
        tensors: Dense tensors on any device, by name.
        document: Values that ``json`` can write. Floats are restored bitwise.

    Returns:
        Path of the file.

    >>> import tempfile
    >>> weight = torch.ones(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_tensors(f"{folder}/a.safetensors", {"encoder": weight, "decoder": weight}, {"epoch": 3})
    ...     tensors, document = load_tensors(path)
    >>> tensors["encoder"] is tensors["decoder"], document
    (True, {'epoch': 3})
    """
    path = Path(path)
    dense = torch.strided, None  # atomic_write refuses what is no tensor
    sparse = next(
        (name for name, value in tensors.items() if getattr(value, "layout", None) not in dense), None
    )
    if sparse is not None:
        hint = "use register_buffer(..., persistent=False), or a dense tensor"
        text = f"cannot write '{path}': tensor '{sparse}' is {tensors[sparse].layout}; {hint}"
        raise FlowBNNError(text, kind="file", tensor=sparse)
    with atomic_write(path) as temporary:
        stored, aliases = _without_aliases(tensors)
        content = json.dumps({"aliases": aliases, "document": document, "order": list(tensors)})
        checksums = {
            "document_checksum": zlib.crc32(content.encode()),
            "checksum": _checksum(stored, content),
        }
        header = {"format": TensorFile.format, **checksums, "content": content}
        save_file(stored, temporary, metadata={TensorFile.metadata_key: json.dumps(header)})
    return path


@checked
def load_tensors(path: File) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads a file of :func:`save_tensors`.

    Args:
        path: Path of the file.

    Returns:
        Tensors on the CPU, by name, and the document.

    Raises:
        FlowBNNError: If the file is missing, truncated, damaged or no file of flowbnn.
    """
    file = TensorFile(path)
    return file.tensors, file.document


class TensorFile:
    """File of :func:`save_tensors` whose header has been read.

    Names, shapes and dtypes can be checked before any tensor is read.

    Args:
        path: Path of the file.
        weights: Number of weights of the network that loads it. A file that is larger than 100,000 such networks is refused.

    Attributes:
        document: Document of the file.
        views: Tensors by name, which stay on the disk until they are used.
    """

    format = 5  # version of the file format
    metadata_key = "flowbnn"  # key of the document in the metadata of safetensors
    chunk_bytes = 2**24  # bytes that are read at once for the checksum

    def __init__(self, path: str | os.PathLike[str], weights: int | None = None) -> None:
        self.path = Path(path)
        with self.reading():
            problem = self._find_problem(weights)
            if problem:
                raise FlowBNNError(f"'{path}' {problem}", kind="file")
            header = self._open()
            if header is None:
                raise FlowBNNError(f"'{path}' was not written by flowbnn", kind="file")
            if header["format"] != self.format:
                text = f"'{path}' has format {header['format']!r}, this version reads {self.format}"
                raise FlowBNNError(text, kind="file")
            self.checksum, self.content = header["checksum"], header["content"]
            if header["document_checksum"] != zlib.crc32(self.content.encode()):
                raise FlowBNNError(f"'{path}' is damaged (wrong checksum)", kind="file")
            content = json.loads(self.content)
            self.aliases, self.document = dict(content["aliases"]), dict(content["document"])
            self.order = content.get("order", [])  # safetensors sorts by name
            self.views = self._with_aliases(self.stored)

    def _open(self) -> Any:
        """Maps the tensors and returns the header.

        safetensors opens a file twice by its name. If another process replaces the file in between, both are opened again.
        """
        header = None
        for _ in range(10):
            self.identity, failure = _identity(self.path), None
            try:
                with safe_open(self.path, framework="pt", device="cpu") as file:
                    header = json.loads((file.metadata() or {}).get(self.metadata_key, "null"))
                    self.stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, ValueError, RuntimeError) as error:
                failure = error
            if self.identity == _identity(self.path):
                break
        if failure is not None:
            raise failure
        return header

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Copies of the tensors in memory, after a check of the checksum."""
        with self.reading():
            with self._open_bytes() as read_bytes:
                intact = self.checksum == _checksum(self.stored, self.content, read_bytes)
            if not intact:
                raise FlowBNNError(f"'{self.path}' is damaged (wrong checksum)", kind="file")
            return self._with_aliases({name: view.clone() for name, view in self.stored.items()})

    def _with_aliases(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Returns the tensors and their aliases, in the order in which they were saved."""
        tensors = stored | {name: stored[target] for name, target in self.aliases.items()}
        return {name: tensors[name] for name in dict.fromkeys([*self.order, *tensors]) if name in tensors}

    @contextmanager
    def _open_bytes(self) -> Iterator[ReadBytes | None]:
        """Context manager that yields a function which reads the bytes of a tensor in chunks.

        Reading from the disk needs less memory than views, whose pages stay in memory. None is yielded if another file has replaced
        this one; then the views are used.
        """
        with self.path.open("rb") as file:
            if _identity(file.fileno()) != self.identity:
                yield None
                return
            header_bytes = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(header_bytes))

            def read_bytes(name: str) -> Iterator[bytes]:
                start, stop = entries[name]["data_offsets"]
                file.seek(8 + header_bytes + start)
                for begin in range(start, stop, self.chunk_bytes):
                    yield file.read(min(self.chunk_bytes, stop - begin))

            yield read_bytes

    def check_tensors(self, expected: Mapping[str, Tensor]) -> None:
        """Raises an error if tensors of the file have other names, shapes or dtypes than those of the object that was read."""
        unknown = sorted(self.views.keys() - set(expected))
        if unknown:
            text = f"'{self.path}' has unknown tensors, such as {unknown[0]!r:.80}"
            raise FlowBNNError(text, kind="file", names=unknown)
        for name, view in self.views.items():
            if (view.shape, view.dtype) != (expected[name].shape, expected[name].dtype):
                text = f"'{self.path}' is damaged: {name!r:.80} has the shape {tuple(view.shape)} and the dtype {view.dtype}"
                raise FlowBNNError(text, kind="file", names=[name])

    def _find_problem(self, weights: int | None) -> str:
        """Returns a problem that shows before torch or safetensors read the file, or an empty string."""
        if not self.path.exists():
            return "does not exist"
        if problem := _describe_target(self.path):
            return problem
        size = self.path.stat().st_size
        max_size = 100_000 * 8 * max(weights or 0, 1000)  # far more than any posterior or checkpoint needs
        if weights is not None and size > max_size:
            return f"has {size:,} bytes, too many for a network of {weights:,} weights"
        with self.path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), 10**8))  # the limit of safetensors
        if header.count(b'"data_offsets"') > 100_000:  # far more tensors than any network has
            return "has more than 100,000 tensors"
        return ""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager that turns every error inside into a FlowBNNError about a damaged file."""
        try:
            yield
            return
        except FlowBNNError:
            raise
        except (json.JSONDecodeError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reason = f"header: {type(error).__name__}"
        except (OSError, SafetensorError, ValueError, RuntimeError, MemoryError) as error:
            reason = _reason(error)
        advice = (
            "; a pickle of torch.save can run code: use posterior.save"
            if zipfile.is_zipfile(self.path)
            else ""
        )
        raise FlowBNNError(f"'{self.path}' is damaged or no safetensors file ({reason}){advice}", kind="file")


class NestedTensorFile(TensorFile):
    """Part of a file that holds the document and the tensors of another object, such as an inner posterior.

    Args:
        parent: File.
        prefix: Start of the names of the tensors of the part. It is removed from the names.
        document: Document of the part.
    """

    def __init__(self, parent: TensorFile, prefix: str, document: dict[str, Any]) -> None:
        self.path, self.parent, self.prefix, self.document = parent.path, parent, prefix, document
        self.views = self._select(parent.views)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Copies of the tensors of the part, after a check of the checksum of the whole file."""
        return self._select(self.parent.tensors)

    def _select(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        prefix = self.prefix
        return {
            name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
        }


def save_state(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Writes a nested state of tensors and plain values, such as that of an optimizer, atomically.

    Args:
        path: Path of the file.
        state: State by name.
    """
    tensors: dict[str, Tensor] = {}
    document = {name: encode_state(value, name, tensors) for name, value in state.items()}
    return save_tensors(path, tensors, document)


def encode_state(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns a nested value as a JSON tree, in which tensors are replaced by their names.

    Tuples, deques, counters and dictionaries whose keys are not strings are marked, so :func:`decode_state` restores their types.

    Args:
        value: Nested value of tensors and plain values.
        name: Prefix of the names of the tensors.
        tensors: Dictionary that receives the tensors as ``name/...``.

    >>> tensors = {}
    >>> tree = encode_state({"state": {0: {"exp_avg": torch.ones(2)}}, "betas": (0.9, 0.999)}, "optimizer", tensors)
    >>> tensors
    {'optimizer/state/0/exp_avg': tensor([1., 1.])}
    >>> decode_state(tree, tensors)
    {'state': {0: {'exp_avg': tensor([1., 1.])}}, 'betas': (0.9, 0.999)}
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {KIND: "tensor", "name": name, "like": describe_tensor(value)}
    if isinstance(value, Mapping):
        items = [[key, encode_state(entry, f"{name}/{key}", tensors)] for key, entry in value.items()]
        if isinstance(value, Counter) or KIND in value or not all(isinstance(key, str) for key in value):
            return {KIND: "counter" if isinstance(value, Counter) else "map", "items": items}
        return dict(items)
    if isinstance(value, list | tuple | deque):
        entries = [encode_state(entry, f"{name}/{index}", tensors) for index, entry in enumerate(value)]
        return entries if isinstance(value, list) else {KIND: type(value).__name__, "items": entries}
    return value


def decode_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value that :func:`encode_state` encoded. Raises ValueError if the tensors are not those of the tree."""
    remaining = dict(tensors)
    value = _decode(tree, remaining)
    if remaining:
        raise ValueError(f"unknown tensor {next(iter(remaining))!r:.80}")
    return value


def describe_tensor(tensor: Tensor) -> list[Any]:
    """Returns the dtype and the shape of a tensor as JSON.

    >>> describe_tensor(torch.ones(2, 3))
    ['float32', 2, 3]
    """
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _decode(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the value of a tree, and removes its tensors from the dictionary."""
    if isinstance(tree, list):
        return [_decode(entry, tensors) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(KIND)
    if kind is None:
        return {key: _decode(value, tensors) for key, value in tree.items()}
    if kind == "tensor":
        tensor = tensors.pop(tree["name"])
        if describe_tensor(tensor) != tree["like"]:
            text = f"{tree['name']!r:.80} is {describe_tensor(tensor)}, and was saved as {tree['like']!s:.80}"
            raise ValueError(text)
        return tensor
    if kind in ("map", "counter"):
        pairs = {key: _decode(value, tensors) for key, value in tree["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    return {"tuple": tuple, "deque": deque}[kind](_decode(entry, tensors) for entry in tree["items"])


def copy_file(path: Path, other: Path) -> None:
    """Copies a file, atomically; an existing target is replaced."""
    with atomic_write(other) as temporary:
        shutil.copyfile(path, temporary)


@checked
def check_writable(path: File) -> None:
    """Raises an error if a file cannot be written, and removes temporary files of killed runs.

    Args:
        path: Path of the file, which is not changed.
    """
    problem, target = "", Path(path)
    try:
        target = Path(os.path.realpath(path))
        problem = f"'{path}' {_describe_target(target)}" if _describe_target(target) else ""
        with _temporary_file(target) as temporary:
            temporary.write_bytes(b"0")
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        problem = f"cannot write in folder '{target.parent}' ({_reason(error)}); name another folder"
    if problem:
        raise FlowBNNError(problem, kind="file")


def is_alive(process: int) -> bool:
    """Returns True if a process of this machine is running, or if that cannot be determined.

    >>> is_alive(os.getpid())
    True
    """
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # no permission, or no /proc on this system
        return True
    return state not in "ZX"  # zombies are dead


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary file, which replaces ``path`` if the block succeeds.

    If ``path`` is a link, its target is replaced.

    Args:
        path: Path of the file to write.
    """
    try:
        target = Path(os.path.realpath(path))
        if _describe_target(target):
            raise OSError(f"it {_describe_target(target)}")
        with _temporary_file(target) as temporary:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
    except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
        text = f"cannot write '{path}' ({_reason(error)}); an existing file is unchanged"
        raise FlowBNNError(text, kind="file") from None


@contextmanager
def _temporary_file(target: Path) -> Iterator[Path]:
    """Context manager that yields a file in a temporary folder next to ``target``.

    The name of the folder contains the machine and the process, so that folders of killed processes of this machine can be removed.
    A folder is needed because safetensors first writes to a file with another name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{escape(target.name)}.{_machine_id()}-*-*.part"):
        process = leftover.stem.split("-")[-2]
        if process.isdigit() and not is_alive(int(process)):
            shutil.rmtree(leftover, ignore_errors=True)
    name = f".{target.name}.{_machine_id()}-{os.getpid()}-{next(_file_numbers)}.part"
    folder = target.with_name(name)
    try:
        folder.mkdir()
        yield folder / "file"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _describe_target(target: Path) -> str:
    """Returns the reason why an existing path is no regular file, or an empty string."""
    if target.is_dir():
        return "is a folder"
    return "is no regular file" if target.exists() and not target.is_file() else ""


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns contiguous copies of the distinct tensors, and the names of those that share their memory."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"'{name}' is a {type(tensor).__name__}, no tensor")
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in names:
            aliases[name] = names[memory]
            continue
        names[memory] = name
        # safetensors refuses views into one storage
        stored[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return stored, aliases


def _checksum(tensors: Mapping[str, Tensor], content: str, read_bytes: ReadBytes | None = None) -> int:
    """Returns the CRC-32 of the document and of the names, dtypes, shapes and bytes of all tensors."""
    value = zlib.crc32(content.encode())
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        if read_bytes is None:
            value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
        else:
            value = reduce(lambda before, chunk: zlib.crc32(chunk, before), read_bytes(name), value)
    return value


def _identity(file: Path | int) -> tuple[int, int]:
    """Returns values that identify a file even if another file takes its name."""
    status = os.stat(file)
    return status.st_ino, status.st_mtime_ns


def _machine_id() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _reason(error: BaseException) -> str:
    """Returns the first line of an error message."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().split("\n")[0][:200] or type(error).__name__
