"""MNIST, Fashion-MNIST and CIFAR-10 from a torchvision-style folder, verified to the last byte, or downloaded."""

import gzip
import hashlib
import http.client
import math
import os
import pickle
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.options import File, check
from flowbnn.training.progress import track
from flowbnn_studies.data.images import DATASETS, DataFile, Download, ImageSet, PublishedDataset

REMEDY = "delete it and load again with download=True, or copy it anew"
CHUNK = 1 << 16


def load_images(name: str, split: str = "train", root: File | None = None, download: bool = True) -> ImageSet:
    """The images of a published set, from a folder as torchvision lays it out.

    ======================  ==========================================================================
    ``"mnist"``             ``MNIST/raw/train-images-idx3-ubyte`` and its three companions, or their ``.gz``
    ``"fashion-mnist"``     the same names in ``FashionMNIST/raw``
    ``"cifar10"``           ``cifar-10-batches-bin/data_batch_1.bin`` ..., or the pickled ``cifar-10-batches-py/data_batch_1`` ...
    ======================  ==========================================================================

    Every file is checked at every load: its length, and a digest of what it holds. Pickled files are unpickled only if they are the
    published ones, byte by byte.

    Args:
        name: of the set.
        split: ``"train"`` or ``"test"``.
        root: the folder; None takes the environment's ``FLOWBNN_DATA``, else ``flowbnn`` in the user's cache.
        download: fetch what is not there.

    Example, where the files are: ``load_images("cifar10", "test")`` gives
    ``ImageSet(cifar10, test: 10000 images of 3x32x32 in 10 classes)``.

    >>> load_images("cifar-10")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: name must be 'mnist', 'fashion-mnist' or 'cifar10', got 'cifar-10'; did you mean 'cifar10'?
    """
    check("name", name, Literal["mnist", "fashion-mnist", "cifar10"])
    return load_source(DATASETS[name], split, data_folder(root), download)


def data_folder(root: File | None = None) -> Path:
    """Where data sets lie: ``root``, else ``FLOWBNN_DATA``, else ``flowbnn`` in the user's cache folder."""
    if root is None:
        root = os.environ.get("FLOWBNN_DATA") or None
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        root = (Path(cache) if os.path.isabs(cache) else Path("~/.cache")) / "flowbnn"
    folder = Path(root).expanduser()
    if folder.exists() and not folder.is_dir():
        raise FlowBNNError(
            f"the data folder {folder} is a file; name a folder with root= or FLOWBNN_DATA", kind="file"
        )
    return folder


def load_source(source: PublishedDataset, split: str, root: Path, download: bool) -> ImageSet:
    """One split of the set that ``source`` describes."""
    check("split", split, Literal["train", "test"])
    pieces = source.splits[split]
    files = _find(source, pieces, root)
    missing = [path for path in files if not path.is_file()]
    if missing:
        _supply(source, missing, root, download)
        files = _find(source, pieces, root)
    paths = iter(files)
    read = [_verified(source, piece, tuple(next(paths) for _ in piece.files)) for piece in pieces]
    pixels, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
    return ImageSet(
        torch.from_numpy(pixels),
        torch.from_numpy(labels.astype(np.int64)),
        source.classes,
        source.name,
        split,
        source.mean,
        source.deviation,
    )


def _verified(
    source: PublishedDataset, piece: DataFile, paths: tuple[Path, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``[N, C, H, W]`` and labels ``[N]`` of one piece."""
    if source.layout == "idx":
        shape = (piece.count, *source.shape[1:])
        pixels, labels = read_idx(paths[0], shape), read_idx(paths[1], shape[:1])
    elif paths[0].suffix == ".bin":
        pixels, labels = read_cifar_binary(paths[0], piece.count, source.shape)
    else:
        pixels, labels = read_cifar_pickle(paths[0], piece.pickle_md5, piece.count, source.shape)
    for path, what, array, wanted in (
        (paths[0], "images", pixels, piece.pixels),
        (paths[-1], "labels", labels, piece.labels),
    ):
        digest = hashlib.sha256(array.data).hexdigest()
        if digest != wanted:
            mine = _title(source, piece, what)
            digests = f"SHA-256 {digest[:12]}, expected {wanted[:12]}"
            raise damaged(path, f"does not hold {mine} ({digests}): it is corrupted, or another file")
    return pixels.reshape(piece.count, *source.shape), labels


def _title(source: PublishedDataset, piece: DataFile, what: str) -> str:
    split = next(name for name, pieces in source.splits.items() if piece in pieces)
    where = f", {piece.files[0]}" if len(source.splits[split]) > 1 else ""
    return f"the {what} of {source.title} ({split}{where})"


def _find(source: PublishedDataset, pieces: tuple[DataFile, ...], root: Path) -> list[Path]:
    """A path for every name: of the two formats of CIFAR, the one that is complete, else the binary one."""
    names = [name for piece in pieces for name in piece.files]
    if source.layout == "idx":
        plain = [root / source.folder / name for name in names]
        packed = [path.with_name(f"{path.name}.gz") for path in plain]
        return [
            other if other.is_file() and not path.is_file() else path
            for path, other in zip(plain, packed, strict=True)
        ]
    binary = [root / f"{source.folder}-bin" / f"{name}.bin" for name in names]
    pickled = [root / f"{source.folder}-py" / name for name in names]
    lacking = [sum(not path.is_file() for path in paths) for paths in (binary, pickled)]
    return pickled if lacking[1] < lacking[0] else binary


def _supply(source: PublishedDataset, missing: list[Path], root: Path, download: bool) -> None:
    archive = root / source.downloads[0].file if source.layout == "cifar" and source.downloads else None
    if not download and not (archive and archive.is_file()):
        raise FlowBNNError(
            f"{source.title} is not complete in {root}: {_advice(missing, archive)}; or let it be downloaded",
            kind="file",
        )
    try:
        if archive is not None:
            _unpack(source, archive)
        else:
            for wanted in source.downloads:
                target = root / source.folder / wanted.file
                if target.with_suffix("") in missing:
                    fetch(wanted, target)
    except FlowBNNError as error:
        raise FlowBNNError(
            f"{source.title} is not complete in {root} and cannot be downloaded: {_advice(missing, archive)} ({error})",
            kind="file",
        ) from None


def _advice(missing: list[Path], archive: Path | None) -> str:
    names = ", ".join(path.name for path in missing)
    whole = f" (or {archive.name} into {archive.parent})" if archive else " (or with .gz)"
    return f"put {names}{whole} into {missing[0].parent}, or name the folder that has them by root= or FLOWBNN_DATA"


def _unpack(source: PublishedDataset, archive: Path) -> None:
    """The binary files out of the published archive, which is kept only if it was there before."""
    wanted = source.downloads[0]
    fetched = not archive.is_file()
    if fetched:
        fetch(wanted, archive)
    elif checksum(archive) != wanted.md5:
        raise FlowBNNError(
            f"{archive} is not the published file (MD5 {wanted.md5}); delete it and load again", kind="file"
        )
    pieces = [piece for split in source.splits.values() for piece in split]
    names = [f"{piece.files[0]}.bin" for piece in pieces]
    extract(archive, names, archive.parent / f"{source.folder}-bin")
    if fetched:
        archive.unlink(missing_ok=True)


# -------------------- formats: IDX, plain or packed, and CIFAR's binary and pickled files


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
    """The bytes of an IDX file after its header: two zeros, the type (8: bytes), the number of axes, their lengths.

    Args:
        path: plain, or compressed when it ends in ``.gz``.
        shape: of the bytes.
    """
    header = 4 + 4 * len(shape)
    wanted = header + math.prod(shape)
    raw = _read(path, wanted)
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
    """Pixels and labels of a pickled batch, ``{b"data": bytes [count, pixels], b"labels": [...]}``, if it is the published file.

    A pickle can run code, so the checksum comes first.
    """
    raw = _read(path, 2 * count * math.prod(shape) + 100_000)
    digest = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if digest != md5:
        raise damaged(path, f"is not the published file (MD5 {digest}, expected {md5}): it was not unpickled")
    content = pickle.loads(raw, encoding="bytes")
    return content[b"data"].reshape(count, *shape), np.array(content[b"labels"], np.uint8)


# -------------------- downloads


def fetch(wanted: Download, target: Path, timeout: float = 30.0, progress: bool = True) -> None:
    """Download ``wanted`` to ``target``, from the first mirror that gives the right bytes.

    What is being written lies beside the target, as ``.part``, until its checksum has been found right.

    Args:
        wanted: the file, its length, its MD5 and its mirrors.
        target: where it goes; folders are made.
        timeout: seconds of silence after which a mirror is given up.
        progress: a bar, where there is a terminal.
    """
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    reasons: dict[str, list[str]] = {}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for url in wanted.mirrors:
            with part.open("wb") as file:
                reason = _try(url, wanted, file, timeout, progress)
            if reason is None:
                os.replace(part, target)
                return
            reasons.setdefault(reason, []).append(url.split("/")[2])
        part.unlink(missing_ok=True)
    except OSError as error:
        raise FlowBNNError(f"{target} cannot be written: {error.strerror or error}", kind="file") from None
    failures = "; ".join(f"{', '.join(hosts)}: {reason}" for reason, hosts in reasons.items())
    raise FlowBNNError(failures or f"no mirror of {wanted.file} is known", kind="download")


def _try(url: str, wanted: Download, file: IO[bytes], timeout: float, progress: bool) -> str | None:
    """Write the bytes of one mirror; None, or why they are not the right ones."""
    request = urllib.request.Request(url, headers={"User-Agent": "flowbnn"})
    digest, length = hashlib.md5(usedforsecurity=False), 0
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            for chunk in track(iter(partial(answer.read, CHUNK), b""), wanted.file, progress):
                file.write(chunk)
                digest.update(chunk)
                length += len(chunk)
                if length > 2 * wanted.size:  # the checksum decides; this only ends what has no end
                    break
    except urllib.error.HTTPError as error:
        error.close()
        return f"answers {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        inner = getattr(error, "reason", error)
        reason = " ".join(str(getattr(inner, "strerror", None) or inner or type(inner).__name__).split())[
            :120
        ]
        return f"stopped after {length:,} of {wanted.size:,} bytes ({reason})" if length else reason
    if digest.hexdigest() == wanted.md5:
        return None
    if length < wanted.size:
        return f"gave {length:,} of {wanted.size:,} bytes"
    return f"gave another file than the published one (MD5 {wanted.md5})"


def checksum(path: Path) -> str:
    """MD5 of a file, which is what the data sets' authors publish."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def extract(archive: Path, names: Iterable[str], folder: Path) -> None:
    """Write the named regular files of a tar archive into ``folder``; nothing else. A file that is there is left alone."""
    missing = {name for name in names if not (folder / name).exists()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as packed:
            for member in packed:
                name = member.name.rsplit("/", 1)[-1]
                if name in missing and member.isfile():
                    missing.remove(name)
                    part = folder / f"{name}.{os.getpid()}.part"
                    with part.open("wb") as file:
                        shutil.copyfileobj(packed.extractfile(member), file)  # type: ignore[arg-type]
                    os.replace(part, folder / name)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise FlowBNNError(
            f"{archive} is not a whole archive, or {folder} cannot be written ({error}); delete it and load again",
            kind="file",
        ) from None
    if missing:
        raise FlowBNNError(
            f"{archive} lacks {', '.join(sorted(missing))}; delete it and load again", kind="file"
        )
