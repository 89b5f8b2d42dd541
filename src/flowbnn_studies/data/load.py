"""MNIST, Fashion-MNIST and CIFAR-10 from a torchvision-style folder, verified to the last byte, or downloaded."""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch

from flowbnn.errors import FlowBNNError, nearest
from flowbnn_studies.data.formats import damaged, read_cifar_binary, read_cifar_pickle, read_idx
from flowbnn_studies.data.images import ImageSet
from flowbnn_studies.data.locate import obtain
from flowbnn_studies.data.sources import SOURCES, Piece, Source

__all__ = ["data_folder", "load_images", "load_source"]


def load_images(
    name: str, split: str = "train", root: str | Path | None = None, download: bool = True
) -> ImageSet:
    """The images of a published set, from a folder as torchvision lays it out.

    ======================  ==========================================================================
    ``"mnist"``             ``MNIST/raw/train-images-idx3-ubyte`` and its three companions, or their ``.gz``
    ``"fashion-mnist"``     the same names in ``FashionMNIST/raw``
    ``"cifar10"``           ``cifar-10-batches-bin/data_batch_1.bin`` ..., or the pickled ``cifar-10-batches-py/data_batch_1`` ...
    ======================  ==========================================================================

    Every file is checked at every load: length, header, counts, labels, and a digest of what it holds. Pickled files
    are read without running what is in them.

    Args:
        name: of the set.
        split: ``"train"`` or ``"test"``.
        root: the folder; None takes the environment's ``FLOWBNN_DATA``, else ``flowbnn`` in the user's cache.
        download: fetch what is not there.

    Example, where the files are: ``load_images("cifar10", "test")`` gives
    ``ImageSet(cifar10, test: 10000 images of 3x32x32 in 10 classes)``.

    >>> load_images("cifar-10")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: there is no image set called 'cifar-10'; did you mean 'cifar10'?
    """
    if name not in SOURCES:
        hint = nearest(str(name).lower(), SOURCES)
        raise FlowBNNError(f"there is no image set called {name!r}{hint}")
    return load_source(SOURCES[name], split, data_folder(root), download)


def data_folder(root: str | Path | None = None) -> Path:
    """Where data sets lie: ``root``, else ``FLOWBNN_DATA``, else ``flowbnn`` in the user's cache folder."""
    if root is None:
        root = os.environ.get("FLOWBNN_DATA") or None
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        root = (Path(cache) if os.path.isabs(cache) else Path("~/.cache")) / "flowbnn"
    folder = Path(root).expanduser()
    if folder.exists() and not folder.is_dir():
        raise FlowBNNError(f"the data folder {folder} is a file; name a folder with root= or FLOWBNN_DATA")
    return folder


def load_source(source: Source, split: str, root: Path, download: bool) -> ImageSet:
    """One split of the set that ``source`` describes."""
    if split not in source.splits:
        raise FlowBNNError(f"{source.name} has no split {split!r}{nearest(str(split), source.splits)}")
    pieces = source.splits[split]
    read = [
        _verified(source, piece, paths)
        for piece, paths in zip(pieces, obtain(source, pieces, root, download), strict=True)
    ]
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
    else:
        read = read_cifar_binary if paths[0].suffix == ".bin" else read_cifar_pickle
        pixels, labels = read(paths[0], piece.count, source.shape)
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
            found = _known(source).get(digest, f"other {what} (SHA-256 {digest[:12]}): it is corrupted")
            raise damaged(path, f"holds {found}, expected {mine} (SHA-256 {wanted[:12]})")
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
