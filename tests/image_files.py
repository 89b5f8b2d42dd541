"""Tiny image data sets in the published file formats, with their descriptions."""

import gzip
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import numpy as np

from flowbnn_studies.data.images import DataFile, Download, PublishedDataset

GREY, COLOUR = (1, 5, 4), (3, 4, 4)
Batch = tuple[np.ndarray, np.ndarray]


def batch(count: int, shape: tuple[int, ...], seed: int) -> Batch:
    """Returns random images and labels."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, *shape), np.uint8), random.integers(0, 3, count, np.uint8)


def data_file(files: tuple[str, ...], content: Batch, pickle_md5: str = "") -> DataFile:
    """Returns the description of a data file with its checksums."""
    digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in content]
    return DataFile(files, len(content[1]), *digests, pickle_md5)


def idx(array: np.ndarray) -> bytes:
    """Returns an array in the IDX format of MNIST."""
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def binary(content: Batch) -> bytes:
    """Returns images in the binary format of CIFAR-10."""
    pixels, labels = content
    return np.concatenate([labels[:, None], pixels.reshape(len(pixels), -1)], 1).tobytes()


def pickled_by_python2(content: Batch) -> bytes:
    """Returns the opcodes of the published files: strings of Python 2, and old names of numpy."""
    pixels, labels = content
    raw = pixels.tobytes()

    def short(text: bytes) -> bytes:
        return b"U" + bytes((len(text),)) + text

    state = (
        b"K\x01" + b"M" + struct.pack("<H", len(pixels)) + b"M" + struct.pack("<H", pixels[0].size) + b"\x86"
    )
    kind = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|") + b"NNN"
    kind += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
    array += b"(" + state + kind + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    numbers = b"".join(b"K" + bytes((label,)) for label in labels.tolist())
    return b"\x80\x02}(" + short(b"data") + array + short(b"labels") + b"](" + numbers + b"e" + b"u."


def grey_source(seed: int = 0, mirrors: tuple[str, ...] = ()) -> tuple[PublishedDataset, dict[str, Batch]]:
    """Returns a grey data set in the layout of MNIST, and its content."""
    content = {"train": batch(12, GREY, seed), "test": batch(7, GREY, seed + 1)}
    names = {
        split: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
        for split, stem in (("train", "train"), ("test", "t10k"))
    }
    downloads = []
    for split, files in names.items():
        for name, array in zip(files, (content[split][0][:, 0], content[split][1]), strict=True):
            raw = gzip.compress(idx(array), mtime=0)
            downloads.append(download(f"{name}.gz", raw, mirrors))
    source = PublishedDataset(
        name="grey",
        title="Grey",
        layout="idx",
        folder="Grey/raw",
        shape=GREY,
        classes=("a", "b", "c"),
        mean=(0.5,),
        std=(0.25,),
        splits={split: (data_file(names[split], content[split]),) for split in names},
        downloads=tuple(downloads),
    )
    return source, content


def write_grey(source: PublishedDataset, content: dict[str, Batch], root: Path, packed: bool = False) -> None:
    """Writes the files of a grey data set, compressed if ``packed``."""
    folder = root / source.folder
    folder.mkdir(parents=True, exist_ok=True)
    for split, (pixels, labels) in content.items():
        for name, array in zip(source.splits[split][0].files, (pixels[:, 0], labels), strict=True):
            raw = idx(array)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(raw, mtime=0) if packed else raw)


def colour_source(mirrors: tuple[str, ...] = ()) -> tuple[PublishedDataset, dict[str, Batch], bytes]:
    """Returns a colour data set in the layout of CIFAR-10, its content and its archive."""
    content = {name: batch(6, COLOUR, seed) for seed, name in enumerate(("one", "two", "three"))}
    archive = tar({f"colour-bin/{name}.bin": binary(images) for name, images in content.items()})
    data_files = {
        name: data_file((name,), images, hashlib.md5(pickled_by_python2(images)).hexdigest())
        for name, images in content.items()
    }
    source = PublishedDataset(
        name="colour",
        title="Colour",
        layout="cifar",
        folder="colour",
        shape=COLOUR,
        classes=("a", "b", "c"),
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.25, 0.3),
        splits={"train": (data_files["one"], data_files["two"]), "test": (data_files["three"],)},
        downloads=(download("colour.tar.gz", archive, mirrors),),
    )
    return source, content, archive


def write_colour(content: dict[str, Batch], root: Path, packed: bool = False) -> None:
    """Writes the binary files of a colour data set, or the pickled ones if ``packed``."""
    folder = root / ("colour-py" if packed else "colour-bin")
    folder.mkdir(parents=True, exist_ok=True)
    for name, images in content.items():
        path = folder / (name if packed else f"{name}.bin")
        path.write_bytes(pickled_by_python2(images) if packed else binary(images))


def download(name: str, raw: bytes, mirrors: tuple[str, ...]) -> Download:
    """Returns the description of a download."""
    return Download(
        name, len(raw), hashlib.md5(raw).hexdigest(), tuple(f"{mirror}{name}" for mirror in mirrors)
    )


def tar(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    """Returns a compressed tar archive of files and symbolic links."""
    packed = io.BytesIO()
    # without times, so that the same files give the same bytes
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return packed.getvalue()
