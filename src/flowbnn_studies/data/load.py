"""Loads MNIST, Fashion-MNIST and CIFAR-10 from a folder in torchvision's layout. Files are verified, and downloaded if missing."""

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


def load_images(name: str, split: str = "train", root: File | None = None, download: bool = True) -> ImageSet:
    """Loads the images of a published data set from a folder in torchvision's layout.

    ======================  ==========================================================================
    ``"mnist"``             ``MNIST/raw/train-images-idx3-ubyte`` and its three companions, or their ``.gz``
    ``"fashion-mnist"``     the same names in ``FashionMNIST/raw``
    ``"cifar10"``           ``cifar-10-batches-bin/data_batch_1.bin`` ..., or the pickled ``cifar-10-batches-py/data_batch_1`` ...
    ======================  ==========================================================================

    Length and checksum of every file are verified at every load. Pickled files are unpickled only if they equal the published ones.

    Args:
        name: Name of the data set.
        split: ``"train"`` or ``"test"``.
        root: Folder; None for the environment variable ``FLOWBNN_DATA``, else ``flowbnn`` in the user's cache.
        download: Download missing files.

    If the files are present, ``load_images("cifar10", "test")`` returns
    ``ImageSet(cifar10, test: 10000 images of 3x32x32 in 10 classes)``.

    >>> load_images("cifar-10")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: name must be 'mnist', 'fashion-mnist' or 'cifar10', got 'cifar-10'; did you mean 'cifar10'?
    """
    check("name", name, Literal["mnist", "fashion-mnist", "cifar10"])
    return load_dataset(DATASETS[name], split, data_folder(root), download)


def data_folder(root: File | None = None) -> Path:
    """Returns the folder of data sets: ``root``, else ``FLOWBNN_DATA``, else ``flowbnn`` in the user's cache."""
    if root is None:
        root = os.environ.get("FLOWBNN_DATA") or None
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        root = (Path(cache) if os.path.isabs(cache) else Path("~/.cache")) / "flowbnn"
    folder = Path(root).expanduser()
    if folder.exists() and not folder.is_dir():
        raise FlowBNNError(
            f"data folder {folder} is a file; set root or FLOWBNN_DATA to a folder",
            kind="file",
            argument="root",
        )
    return folder


def load_dataset(source: PublishedDataset, split: str, root: Path, download: bool) -> ImageSet:
    """Loads one split of a data set."""
    check("split", split, Literal["train", "test"])
    data_files = source.splits[split]
    files = _find(source, data_files, root)
    missing = [path for path in files if not path.is_file()]
    if missing:
        _supply(source, missing, root, download)
        files = _find(source, data_files, root)
    paths = iter(files)
    arrays = [
        _read_verified(source, data_file, tuple(next(paths) for _ in data_file.files))
        for data_file in data_files
    ]
    pixels, labels = (np.concatenate(values) for values in zip(*arrays, strict=True))
    return ImageSet(
        torch.from_numpy(pixels),
        torch.from_numpy(labels.astype(np.int64)),
        source.classes,
        source.name,
        split,
        source.mean,
        source.std,
    )


def _read_verified(
    source: PublishedDataset, data_file: DataFile, paths: tuple[Path, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Reads and verifies pixels ``[N, C, H, W]`` and labels ``[N]`` of one data file."""
    if source.layout == "idx":
        shape = (data_file.count, *source.shape[1:])
        pixels, labels = read_idx(paths[0], shape), read_idx(paths[1], shape[:1])
    elif paths[0].suffix == ".bin":
        pixels, labels = read_cifar_binary(paths[0], data_file.count, source.shape)
    else:
        pixels, labels = read_cifar_pickle(paths[0], data_file.pickle_md5, data_file.count, source.shape)
    for path, kind, array, expected in (
        (paths[0], "images", pixels, data_file.pixels),
        (paths[-1], "labels", labels, data_file.labels),
    ):
        digest = hashlib.sha256(array.data).hexdigest()
        if digest != expected:
            title = _title(source, data_file, kind)
            digests = f"SHA-256 {digest[:12]}, expected {expected[:12]}"
            raise damaged_file_error(path, f"does not hold {title} ({digests})")
    return pixels.reshape(data_file.count, *source.shape), labels


def _title(source: PublishedDataset, data_file: DataFile, kind: str) -> str:
    """Returns the name of the content of a data file, for messages."""
    split = next(key for key, data_files in source.splits.items() if data_file in data_files)
    name = f", {data_file.files[0]}" if len(source.splits[split]) > 1 else ""
    return f"the {kind} of {source.title} ({split}{name})"


def _find(source: PublishedDataset, data_files: tuple[DataFile, ...], root: Path) -> list[Path]:
    """Returns the path of every file. If CIFAR is present in both formats, the complete one is used."""
    names = [name for data_file in data_files for name in data_file.files]
    if source.layout == "idx":
        plain = [root / source.folder / name for name in names]
        packed = [path.with_name(f"{path.name}.gz") for path in plain]
        return [
            packed_path if packed_path.is_file() and not path.is_file() else path
            for path, packed_path in zip(plain, packed, strict=True)
        ]
    binary = [root / f"{source.folder}-bin" / f"{name}.bin" for name in names]
    pickled = [root / f"{source.folder}-py" / name for name in names]
    num_missing = [sum(not path.is_file() for path in paths) for paths in (binary, pickled)]
    return pickled if num_missing[1] < num_missing[0] else binary


def _supply(source: PublishedDataset, missing: list[Path], root: Path, download: bool) -> None:
    """Downloads or unpacks missing files.

    Raises:
        FlowBNNError: The files are missing and cannot be downloaded.
    """
    archive = root / source.downloads[0].file if source.layout == "cifar" and source.downloads else None
    if not download and not (archive and archive.is_file()):
        raise FlowBNNError(
            f"{source.title} is incomplete in {root}; {_advice(missing, archive)} or set download=True",
            kind="file",
        )
    try:
        if archive is not None:
            _unpack(source, archive)
        else:
            for file in source.downloads:
                target = root / source.folder / file.file
                if target.with_suffix("") in missing:
                    fetch(file, target)
    except FlowBNNError as error:
        raise FlowBNNError(
            f"{source.title} is incomplete in {root} and the download failed ({error}); {_advice(missing, archive)}",
            kind="download",
        ) from None


def _advice(missing: list[Path], archive: Path | None) -> str:
    """Returns instructions for missing files."""
    names = ", ".join(path.name for path in missing)
    alternative = f" (or {archive.name} into {archive.parent})" if archive else " (or with .gz)"
    return (
        f"put {names}{alternative} into {missing[0].parent}, or set FLOWBNN_DATA to the folder that has them"
    )


def _unpack(source: PublishedDataset, archive: Path) -> None:
    """Unpacks the binary files of the published archive. A downloaded archive is deleted afterwards."""
    file = source.downloads[0]
    downloaded = not archive.is_file()
    if downloaded:
        fetch(file, archive)
    elif checksum(archive) != file.md5:
        raise FlowBNNError(
            f"{archive} is not the published file (MD5 {file.md5}); delete it and load again", kind="file"
        )
    data_files = [data_file for split in source.splits.values() for data_file in split]
    names = [f"{data_file.files[0]}.bin" for data_file in data_files]
    extract(archive, names, archive.parent / f"{source.folder}-bin")
    if downloaded:
        archive.unlink(missing_ok=True)


# -------------------- formats: IDX, plain or compressed, and CIFAR's binary and pickled files


def damaged_file_error(path: Path, problem: str) -> FlowBNNError:
    """Returns the error for a damaged file.

    >>> print(damaged_file_error(Path("a.bin"), "is 3 bytes long, expected 4"))
    a.bin is 3 bytes long, expected 4; delete it and load again with download=True
    """
    return FlowBNNError(f"{path} {problem}; delete it and load again with download=True", kind="file")


def _read(path: Path, limit: int) -> bytes:
    """Reads the content, decompressed, but at most ``limit + 1`` bytes."""
    if path.exists() and not path.is_file():
        raise FlowBNNError(f"{path} is not a regular file", kind="file")
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as compressed:
                return compressed.read(limit + 1)
        with path.open("rb") as plain:
            return plain.read(limit + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise damaged_file_error(path, "is a truncated or damaged gzip file") from None
    except OSError as error:
        raise FlowBNNError(f"{path} cannot be read: {error.strerror or error}", kind="file") from None


def _check_length(path: Path, raw: bytes, expected: int) -> None:
    """Raises an error if the length is wrong."""
    if len(raw) != expected:
        length = f"is {len(raw):,} bytes long" if len(raw) < expected else "is longer"
        unpacked = " when unpacked" if path.suffix == ".gz" else ""
        reason = ": it is truncated" if len(raw) < expected else ""
        raise damaged_file_error(path, f"{length}{unpacked}, expected {expected:,} bytes{reason}")


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Reads the bytes of an IDX file after its header: two zeros, the type (8: bytes), the number of axes, their lengths.

    Args:
        path: Path of the file, compressed if it ends in ``.gz``.
        shape: Shape of the bytes.
    """
    header = 4 + 4 * len(shape)
    expected = header + math.prod(shape)
    raw = _read(path, expected)
    _check_length(path, raw, expected)
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_cifar_binary(path: Path, count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Reads pixels ``[count, *shape]`` and labels of a binary file. A record is one byte of label and the pixels by channel."""
    record = 1 + math.prod(shape)
    raw = _read(path, count * record)
    _check_length(path, raw, count * record)
    rows = np.frombuffer(raw, np.uint8).reshape(count, record)
    return np.ascontiguousarray(rows[:, 1:]).reshape(count, *shape), np.ascontiguousarray(rows[:, 0])


def read_cifar_pickle(
    path: Path, md5: str, count: int, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Reads pixels and labels of a pickled batch ``{b"data": bytes [count, pixels], b"labels": [...]}``.

    A pickle can execute code, so the checksum is verified before unpickling.
    """
    raw = _read(path, 2 * count * math.prod(shape) + 100_000)
    digest = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if digest != md5:
        raise damaged_file_error(
            path, f"is not the published file and was not unpickled (MD5 {digest}, expected {md5})"
        )
    content = pickle.loads(raw, encoding="bytes")
    return content[b"data"].reshape(count, *shape), np.array(content[b"labels"], np.uint8)


# -------------------- downloads


def fetch(download: Download, target: Path, timeout: float = 30.0, progress: bool = True) -> None:
    """Downloads a file from the first mirror that has the right content.

    The data are written to a ``.part`` file beside the target until the checksum is verified.

    Args:
        download: Description of the file.
        target: Path of the file; folders are created.
        timeout: Seconds without data after which a mirror is abandoned.
        progress: Show a progress bar in a terminal.
    """
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    reasons: dict[str, list[str]] = {}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for url in download.mirrors:
            with temporary.open("wb") as stream:
                reason = _download(url, download, stream, timeout, progress)
            if reason is None:
                os.replace(temporary, target)
                return
            reasons.setdefault(reason, []).append(url.split("/")[2])
        temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FlowBNNError(f"cannot write {target}: {error.strerror or error}", kind="file") from None
    failures = "; ".join(f"{', '.join(hosts)}: {reason}" for reason, hosts in reasons.items())
    raise FlowBNNError(failures or f"{download.file} has no mirror", kind="download")


def _download(url: str, download: Download, file: IO[bytes], timeout: float, progress: bool) -> str | None:
    """Writes the content of one mirror. Returns None, or the reason why the content is wrong."""
    request = urllib.request.Request(url, headers={"User-Agent": "flowbnn"})
    digest, length = hashlib.md5(usedforsecurity=False), 0
    size = 1 << 16  # bytes between two updates of the progress bar
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            for chunk in track(iter(partial(response.read, size), b""), download.file, progress):
                file.write(chunk)
                digest.update(chunk)
                length += len(chunk)
                if length > 2 * download.size:  # stops endless responses
                    break
    except urllib.error.HTTPError as error:
        error.close()
        return f"HTTP status {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)
        reason = " ".join(str(getattr(cause, "strerror", None) or cause or type(cause).__name__).split())[
            :120
        ]
        return f"stopped after {length:,} of {download.size:,} bytes ({reason})" if length else reason
    if digest.hexdigest() == download.md5:
        return None
    if length < download.size:
        return f"received {length:,} of {download.size:,} bytes"
    return f"received a file other than the published one (MD5 {download.md5})"


def checksum(path: Path) -> str:
    """Computes the MD5 of a file, which the authors of the data sets publish."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def extract(archive: Path, names: Iterable[str], folder: Path) -> None:
    """Extracts the named regular files of a tar archive into a folder. Existing files are kept."""
    missing = {name for name in names if not (folder / name).exists()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                if name in missing and member.isfile():
                    missing.remove(name)
                    temporary = folder / f"{name}.{os.getpid()}.part"
                    with temporary.open("wb") as file:
                        shutil.copyfileobj(tar.extractfile(member), file)  # type: ignore[arg-type]
                    os.replace(temporary, folder / name)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise FlowBNNError(
            f"cannot extract {archive} into {folder} ({error}); delete the archive and load again",
            kind="file",
        ) from None
    if missing:
        raise FlowBNNError(
            f"{archive} lacks {', '.join(sorted(missing))}; delete it and load again", kind="file"
        )
