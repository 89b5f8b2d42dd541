"""The files of a data set in a folder; what is missing is downloaded, or said plainly."""

import math
from pathlib import Path

from flowbnn.errors import FlowBNNError
from flowbnn_studies.data.download import checksum, extract, fetch
from flowbnn_studies.data.sources import Piece, Source

__all__ = ["obtain"]

Paths = list[tuple[Path, ...]]


def obtain(source: Source, pieces: tuple[Piece, ...], root: Path, download: bool) -> Paths:
    """The files of each piece, downloaded when they are not all there.

    Args:
        source: the set.
        pieces: those of one split.
        root: the folder that holds the set's own folder.
        download: whether to use the network.
    """
    found = _find(source, pieces, root)
    missing = [path for path in found if not path.is_file()]
    if missing:
        _supply(source, missing, root, download)
        found = _find(source, pieces, root)
    taken = iter(found)
    return [tuple(next(taken) for _ in piece.files) for piece in pieces]


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
            f"{source.title} is not complete in {root}: {_advice(missing, archive)}; or let it be downloaded"
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
            f"{source.title} is not complete in {root} and cannot be downloaded: {_advice(missing, archive)} ({error})"
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
            f"{archive} is not the published file (MD5 {wanted.md5}); delete it and load again"
        )
    pieces = [piece for split in source.splits.values() for piece in split]
    files = {f"{piece.files[0]}.bin": piece.count * (1 + math.prod(source.shape)) for piece in pieces}
    extract(archive, files, archive.parent / f"{source.folder}-bin")
    if fetched:
        archive.unlink(missing_ok=True)
