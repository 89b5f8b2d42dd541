"""MNIST, Fashion-MNIST and CIFAR-10 from a torchvision-style folder, verified to the last byte, or downloaded."""

import hashlib
import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.options import File, check
from flowbnn_studies.data.download import checksum, extract, fetch
from flowbnn_studies.data.formats import damaged, read_cifar_binary, read_cifar_pickle, read_idx
from flowbnn_studies.data.images import ImageSet
from flowbnn_studies.data.sources import SOURCES, Piece, Source


def load_images(name: str, split: str = "train", root: File | None = None, download: bool = True) -> ImageSet:
    """The images of a published set, from a folder as torchvision lays it out.

    ======================  ==========================================================================
    ``"mnist"``             ``MNIST/raw/train-images-idx3-ubyte`` and its three companions, or their ``.gz``
    ``"fashion-mnist"``     the same names in ``FashionMNIST/raw``
    ``"cifar10"``           ``cifar-10-batches-bin/data_batch_1.bin`` ..., or the pickled ``cifar-10-batches-py/data_batch_1`` ...
    ======================  ==========================================================================

    Every file is checked at every load: length, header, counts, labels, and a digest of what it holds. Pickled files
    are unpickled only if they are the published ones, byte by byte.

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
    return load_source(SOURCES[name], split, data_folder(root), download)


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


def load_source(source: Source, split: str, root: Path, download: bool) -> ImageSet:
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


def _verified(source: Source, piece: Piece, paths: tuple[Path, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``[N, C, H, W]`` and labels ``[N]`` of one piece."""
    if source.layout == "idx":
        shape = (piece.count, *source.shape[1:])
        pixels, labels = read_idx(paths[0], shape), read_idx(paths[1], shape[:1])
    elif paths[0].suffix == ".bin":
        pixels, labels = read_cifar_binary(paths[0], piece.count, source.shape)
    else:
        pixels, labels = read_cifar_pickle(paths[0], piece.pickle_md5, piece.count, source.shape)
    if labels.max() >= len(source.classes):
        raise damaged(
            paths[-1], f"has a label {labels.max()}, expected 0 to {len(source.classes) - 1}: it is corrupted"
        )
    for path, what, array, wanted in (
        (paths[0], "images", pixels, piece.pixels),
        (paths[-1], "labels", labels, piece.labels),
    ):
        digest = hashlib.sha256(array.data).hexdigest()
        if digest != wanted:
            mine = _title(source, piece, what)
            content = _known(source).get(digest, f"other {what} (SHA-256 {digest[:12]}): it is corrupted")
            raise damaged(path, f"holds {content}, expected {mine} (SHA-256 {wanted[:12]})")
    return pixels.reshape(piece.count, *source.shape), labels


def _known(source: Source) -> dict[str, str]:
    """What each known digest belongs to, so that a swapped file can be called by its name."""
    return {
        digest: _title(known, piece, what)
        for known in (*SOURCES.values(), source)
        for pieces in known.splits.values()
        for piece in pieces
        for what, digest in (("images", piece.pixels), ("labels", piece.labels))
    }


def _title(source: Source, piece: Piece, what: str) -> str:
    split = next(name for name, pieces in source.splits.items() if piece in pieces)
    where = f", {piece.files[0]}" if len(source.splits[split]) > 1 else ""
    return f"the {what} of {source.title} ({split}{where})"


def _find(source: Source, pieces: tuple[Piece, ...], root: Path) -> list[Path]:
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


def _supply(source: Source, missing: list[Path], root: Path, download: bool) -> None:
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


def _unpack(source: Source, archive: Path) -> None:
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
