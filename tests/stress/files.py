"""Reads damaged and hostile files. Each must be rejected in one line, within 20 seconds and 2 GiB, and no code in it may run.

Valid files of every kind that the library reads (posteriors, checkpoints, IDX, CIFAR, results) are cut, overwritten, joined and
rewritten, or replaced by pickles, compressed zeros, pipes and folders. A file that is accepted must hold the original data, bit by bit.
The files are read in forked processes with limited memory.
"""

import gzip
import hashlib
import io
import json
import os
import pickle
import random
import resource
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import FITS, Fit, cached_fit, equal_bits, named_tensors, random_fit
from tests.stress.fuzz import NAN, describe_error, silenced

import flowbnn as fb
from flowbnn_studies.data.images import DataFile, PublishedDataset
from flowbnn_studies.data.load import load_dataset
from flowbnn_studies.report.reading import load_results

__all__ = ["stress"]

Reader = Callable[[Path], Any]
BATCH_SIZE = 25  # files that one child process reads
FITS_PER_ROUND, BATCHES_PER_ROUND = 4, 8  # whose files are read, and how often
IMAGE_SHAPE = (1, 4, 4)


class ExecutablePickle:
    """Object whose pickle creates a folder when it is loaded.

    Args:
        marker: Path of the folder.
    """

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def make_dataset(
    layout: Any, folder: str, raw: dict[str, bytes], content: tuple[np.ndarray, np.ndarray]
) -> PublishedDataset:
    """Returns the description of a data set of six images in the layout of MNIST or CIFAR-10."""
    digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in content]
    names = tuple(name.removesuffix(".bin") for name in raw)
    md5 = hashlib.md5(next(iter(raw.values()))).hexdigest()
    file = DataFile(names, len(content[1]), digests[0], digests[1], md5)
    splits = {"train": (file,), "test": (file,)}
    return PublishedDataset("tiny", "Tiny", layout, folder, IMAGE_SHAPE, ("a", "b"), (0.5,), (0.5,), splits)


def read_images(dataset: PublishedDataset, folder: Path, path: Path) -> torch.Tensor:
    """Returns the images of a data set."""
    return load_dataset(dataset, "train", folder, False).images


def resume_fit(fit: Fit, folder: Path, path: Path) -> Any:
    """Returns the result of a fit that is complete in its checkpoint."""
    return fit(checkpoint=folder / "run", checkpoint_every=5, resume=True)


def write_image_files(root: Path) -> dict[str, tuple[Path, Reader]]:
    """Writes image files of three formats. Returns the path and the reader of each."""
    pixels, labels = np.arange(96, dtype=np.uint8).reshape(6, 1, 4, 4), np.array([0, 1, 0, 1, 1, 0], np.uint8)

    def idx_header(*sizes: int) -> bytes:
        return bytes((0, 0, 8, len(sizes))) + struct.pack(f">{len(sizes)}I", *sizes)

    idx = {"images": idx_header(6, 4, 4) + pixels.tobytes(), "labels": idx_header(6) + labels.tobytes()}
    binary = {"batch.bin": np.concatenate([labels[:, None], pixels.reshape(6, -1)], 1).tobytes()}
    pickled = {"batch": pickle.dumps({b"data": pixels.reshape(6, -1), b"labels": labels.tolist()})}
    files: dict[str, tuple[Path, Reader]] = {}
    for kind, layout, name, subfolder, contents in (
        ("idx", "idx", "idx", "idx", idx),
        ("cifar", "cifar", "bin", "bin-bin", binary),
        ("pickle", "cifar", "pickle", "pickle-py", pickled),
    ):
        folder = root / kind / subfolder
        folder.mkdir(parents=True)
        for file_name, data in contents.items():
            (folder / file_name).write_bytes(data)
        dataset = make_dataset(layout, name, contents, (pixels, labels))
        files[kind] = folder / next(iter(contents)), partial(read_images, dataset, root / kind)
    return files


def write_files(root: Path, names: Sequence[str], rng: random.Random) -> dict[str, tuple[Path, Reader]]:
    """Writes valid files of every kind. Returns the path and the reader of each."""
    files = write_image_files(root)
    for number, fit in enumerate(fit for name in names for fit in (Fit(name), random_fit(name, rng))):
        result, folder = cached_fit(fit), root / f"fit-{number}"
        if hasattr(result, "save"):
            files[str(fit)] = result.save(root / f"fit-{number}.safetensors"), fit.load
        if fit.has_checkpoint:
            resume_fit(fit, folder, folder)
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    files[f"{fit}, {path.name}"] = path, partial(resume_fit, fit, folder)
    results = root / "results.json"
    results.write_text(json.dumps({"schema": 1, "study": "x", "rows": [], "figures": []}))
    files["results"] = results, load_results
    return files


def change_header(raw: bytes, rng: random.Random) -> bytes:
    """Returns a safetensors file with another header: other shapes, types, offsets, metadata or names."""
    length = int.from_bytes(raw[:8], "little")
    try:
        header = json.loads(raw[8 : 8 + length])
    except ValueError:
        return raw[::-1]
    name = rng.choice([key for key in header if key != "__metadata__"] or ["x"])
    values = [2**40, -1, 0, NAN, "x", None, [], [2**31, 2**31], {"a": 1}, "A" * 10_000]
    entry = header.setdefault(name, {})
    change = rng.choice(["shape", "dtype", "data_offsets", "metadata", "names", "drop"])
    if change == "metadata":
        header["__metadata__"] = rng.choice(
            [{}, {"flowbnn": "[" * 50_000}, {"flowbnn": json.dumps(rng.choice(values))}, 3]
        )
    elif change == "names":
        header |= {f"n{index}": entry for index in range(rng.choice([10, 200_000]))}
    elif change == "drop":
        del header[name]
    else:
        entry[change] = rng.choice([values, *values, [rng.choice([2**33, 4, 10**12])] * rng.randint(1, 4)])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def damage(raw: bytes, marker: Path, rng: random.Random) -> bytes:
    """Returns other bytes that replace those of a valid file.

    Args:
        raw: Bytes of the valid file.
        marker: Folder that code inside the bytes creates.
        rng: Random number generator.
    """
    start, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(ExecutablePickle(marker)))
    flipped = bytearray(raw)
    for _ in range(rng.choice([1, 1, 4, 64])):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    choices = [
        lambda: bytes(flipped),
        lambda: raw[:start],
        lambda: raw[:start] + raw[end:],
        lambda: raw[:start] + bytes(end - start) + raw[end:],
        lambda: raw[:start] + rng.randbytes(64) + raw[start:],
        lambda: raw + raw,
        lambda: rng.randbytes(rng.choice([0, 1, 8, 12, 1000])),
        lambda: change_header(raw, rng),
        lambda: change_header(raw, rng),
        lambda: struct.pack("<Q", rng.choice([2**63, 2**40, 2**31, 0])) + raw[8:],
        lambda: pickle.dumps(ExecutablePickle(marker)),
        lambda: b"\x80\x05\x96" + struct.pack("<Q", rng.choice([2**33, 2**40, 2**62])) + b".",  # BYTEARRAY8
        zipped.getvalue,
        lambda: b"[" * 100_000,
        lambda: (
            b'{"schema": 1, "rows": ' + rng.choice([b"NaN", b"1e999", b'{"a": ' * 5000, b'"\\ud800"']) + b"}"
        ),
        lambda: gzip.compress(bytes(10**7)),
    ]
    return rng.choice(choices)()


def replace_by_special_file(path: Path, rng: random.Random) -> str:
    """Replaces a file by a pipe, a folder, a link to itself or a sparse file. Returns its kind."""
    path.unlink()
    kind = rng.choice(["pipe", "folder", "link to itself", "sparse file"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path)
    else:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", 100))
            file.truncate(2**33)
    return kind


def try_read(path: Path, read: Reader, expected: Any, marker: Path, label: str) -> tuple[str, str]:
    """Reads one file.

    Args:
        path: File to read.
        read: Reader of the file.
        expected: Content of the valid file.
        marker: Folder that code inside the file would create.
        label: Description of the file.

    Returns:
        The outcome, and a description of the failure or an empty string.
    """
    with silenced():
        try:
            content = read(path)
        except fb.FlowBNNError as error:
            outcome, failure = (
                ("failed", f"not one line: {error}") if "\n" in str(error) else ("rejected", "")
            )
        except BaseException as error:
            outcome, failure = "failed", describe_error(error)
        else:
            if isinstance(expected, dict):
                same = content == expected
            else:
                same = equal_bits(named_tensors(content), named_tensors(expected))
            outcome, failure = ("accepted", "") if same else ("failed", "accepted with other content")
    if marker.exists():
        marker.rmdir()
        outcome, failure = "failed", "code inside the file was executed"
    return outcome, failure and f"{label}: {failure}"


def read_batch(
    files: dict[str, Any], expected: dict[str, Any], root: Path, seed: int
) -> list[tuple[str, str]]:
    """Damages and reads some files. The seed determines all choices."""
    rng, marker, outcomes = random.Random(seed), root / "marker", []
    for number in range(BATCH_SIZE):
        name = rng.choice(list(files))
        path, read = files[name]
        raw, label = path.read_bytes(), f"file {number} of batch {seed}, {name}"
        if rng.random() < 0.05:
            label += f", {replace_by_special_file(path, rng)}"
        else:
            path.write_bytes(damage(raw, marker, rng))
        outcomes.append(try_read(path, read, expected[name], marker, label))
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(raw)
    return outcomes


def stress(seed: int, budget: Budget, names: tuple[str, ...] = FITS) -> StressResult:
    """Reads damaged files of a few fits at a time, each batch in a child process."""
    result, rng, number = StressResult("files", seed), random.Random(seed), 0
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while budget.allows(result):
        with tempfile.TemporaryDirectory() as folder:
            root, expected = Path(folder), {}
            files = write_files(root, rng.sample(names, min(FITS_PER_ROUND, len(names))), rng)
            for name, (path, read) in files.items():
                try:
                    expected[name] = read(path)
                except fb.FlowBNNError:
                    expected[name] = None  # results that are too short for a report
            for _ in range(BATCHES_PER_ROUND):
                if not budget.allows(result):
                    break
                number += 1
                work = partial(read_batch, files, expected, root, 1000 * seed + number)
                for outcome in run_with_limited_memory(work, result):
                    result.add(*outcome)
    return result


def run_with_limited_memory(
    function: Callable[[], list[tuple[str, str]]], result: StressResult
) -> list[tuple[str, str]]:
    """Calls a function in a forked process that may use 2 GiB more than this one.

    Args:
        function: Function to call.
        result: Result of the suite, which gets the peak memory.

    Returns:
        The outcomes that the function returned, or one failure if the process died.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 2**31
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            answer = json.dumps(function()).encode()
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(answer)
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(child, 0)
    result.maxima["GiB"] = max(result.maxima.get("GiB", 0.0), round(usage.ru_maxrss / 2**20, 2))
    if status or not answer:
        return [("failed", f"a process that read {BATCH_SIZE} files died with status {status}")]
    return [(outcome, failure) for outcome, failure in json.loads(answer)]
