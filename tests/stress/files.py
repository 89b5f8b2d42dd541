"""Damaged and hostile files: refused in one line, within 30 seconds and 2 GiB, and no code in them runs.

Good files of every kind that the library reads (posteriors, checkpoints, IDX, CIFAR, results) are cut, filled, spliced and rewritten,
or replaced by bombs, pickles, pipes and folders. A file that is read all the same must hold what was written, bit by bit. The files are
read in forked processes whose memory is limited.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import FITS, Fit, equal_bits, fitted, named_tensors, random_fit
from tests.stress.fuzz import NAN, describe_error, silenced

import flowbnn as fb
from flowbnn_studies.data.images import DataFile, PublishedDataset
from flowbnn_studies.data.load import load_dataset
from flowbnn_studies.report.reading import load_results

__all__ = ["stress"]

MEMORY = 2**31
TOGETHER = 25  # files of one process
SHAPE = (1, 4, 4)


class Bomb:
    """A pickle that runs code when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def image_source(
    layout: Any, folder: str, raw: dict[str, bytes], content: tuple[np.ndarray, np.ndarray]
) -> PublishedDataset:
    """A set of six images in the layout of MNIST or CIFAR-10."""
    digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in content]
    names = tuple(name.removesuffix(".bin") for name in raw)
    md5 = hashlib.md5(next(iter(raw.values()))).hexdigest()
    piece = DataFile(names, len(content[1]), digests[0], digests[1], md5)
    return PublishedDataset(
        "tiny",
        "Tiny",
        layout,
        folder,
        SHAPE,
        ("a", "b"),
        (0.5,),
        (0.5,),
        {"train": (piece,), "test": (piece,)},
    )


def images(source: PublishedDataset, root: Path, path: Path) -> torch.Tensor:
    """The images of a set."""
    return load_dataset(source, "train", root, False).images


def resumed(fit: Fit, folder: Path, path: Path) -> Any:
    """The result of a fit that had ended."""
    return fit(checkpoint=folder / "run", checkpoint_every=5, resume=True)


def subjects(
    place: Path, names: tuple[str, ...], dice: random.Random
) -> dict[str, tuple[Path, Callable[[Path], Any]]]:
    """Good files, and how each is read; equal files give equal answers."""
    pixels, labels = np.arange(96, dtype=np.uint8).reshape(6, 1, 4, 4), np.array([0, 1, 0, 1, 1, 0], np.uint8)
    head = lambda *sizes: bytes((0, 0, 8, len(sizes))) + struct.pack(f">{len(sizes)}I", *sizes)  # noqa: E731
    idx = {"images": head(6, 4, 4) + pixels.tobytes(), "labels": head(6) + labels.tobytes()}
    binary = {"batch.bin": np.concatenate([labels[:, None], pixels.reshape(6, -1)], 1).tobytes()}
    pickled = {"batch": pickle.dumps({b"data": pixels.reshape(6, -1), b"labels": labels.tolist()})}
    found: dict[str, tuple[Path, Callable[[Path], Any]]] = {}
    for kind, layout, folder, raw in (
        ("idx", "idx", "idx", idx),
        ("cifar", "cifar", "bin", binary),
        ("pickle", "cifar", "pickle", pickled),
    ):
        root = place / kind
        below = root / {"idx": "idx", "cifar": "bin-bin", "pickle": "pickle-py"}[kind]
        below.mkdir(parents=True)
        for name, data in raw.items():
            (below / name).write_bytes(data)
        source = image_source(layout, folder, raw, (pixels, labels))
        found[kind] = below / next(iter(raw)), partial(images, source, root)
    for number, fit in enumerate(fit for name in names for fit in (Fit(name), random_fit(name, dice))):
        result, at = fitted(fit), place / f"fit-{number}"
        if hasattr(result, "save"):
            found[str(fit)] = result.save(place / f"fit-{number}.safetensors"), fit.restored
        if fit.saves:
            resumed(fit, at, at)
            for path in sorted(at.rglob("*")):
                if path.is_file():
                    found[f"{fit}, {path.name}"] = path, partial(resumed, fit, at)
    results = place / "results.json"
    results.write_text(json.dumps({"schema": 1, "study": "x", "rows": [], "figures": []}))
    found["results"] = results, load_results
    return found


def rewritten(raw: bytes, dice: random.Random) -> bytes:
    """A safetensors file whose header says something else: longer tensors, other kinds, other places, deeper documents."""
    length = int.from_bytes(raw[:8], "little")
    try:
        header = json.loads(raw[8 : 8 + length])
    except ValueError:
        return raw[::-1]
    name = dice.choice([key for key in header if key != "__metadata__"] or ["x"])
    odd = [2**40, -1, 0, NAN, "x", None, [], [2**31, 2**31], {"a": 1}, "A" * 10_000]
    entry = header.setdefault(name, {})
    change = dice.choice(["shape", "dtype", "data_offsets", "metadata", "names", "drop"])
    if change == "metadata":
        header["__metadata__"] = dice.choice(
            [{}, {"flowbnn": "[" * 50_000}, {"flowbnn": json.dumps(dice.choice(odd))}, 3]
        )
    elif change == "names":
        header |= {f"n{index}": entry for index in range(dice.choice([10, 200_000]))}
    elif change == "drop":
        del header[name]
    else:
        entry[change] = dice.choice([odd, *odd, [dice.choice([2**33, 4, 10**12])] * dice.randint(1, 4)])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def hostile(raw: bytes, marker: Path, dice: random.Random) -> bytes:
    """Other bytes in place of a good file's."""
    at, end = sorted(dice.randrange(len(raw) + 1) for _ in range(2))
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(marker)))
    bit = bytearray(raw)
    for _ in range(dice.choice([1, 1, 4, 64])):
        bit[dice.randrange(len(bit))] ^= 1 << dice.randrange(8)
    choices = [
        lambda: bytes(bit),
        lambda: raw[:at],
        lambda: raw[:at] + raw[end:],
        lambda: raw[:at] + bytes(end - at) + raw[end:],
        lambda: raw[:at] + dice.randbytes(64) + raw[at:],
        lambda: raw + raw,
        lambda: dice.randbytes(dice.choice([0, 1, 8, 12, 1000])),
        lambda: rewritten(raw, dice),
        lambda: rewritten(raw, dice),
        lambda: struct.pack("<Q", dice.choice([2**63, 2**40, 2**31, 0])) + raw[8:],
        lambda: pickle.dumps(Bomb(marker)),
        lambda: b"\x80\x05\x96" + struct.pack("<Q", dice.choice([2**33, 2**40, 2**62])) + b".",  # BYTEARRAY8
        zipped.getvalue,
        lambda: b"[" * 100_000,
        lambda: (
            b'{"schema": 1, "rows": ' + dice.choice([b"NaN", b"1e999", b'{"a": ' * 5000, b'"\\ud800"']) + b"}"
        ),
        lambda: gzip.compress(bytes(10**7)),
    ]
    return dice.choice(choices)()


def strange(path: Path, dice: random.Random) -> str:
    """Something that is no file in a file's place."""
    path.unlink()
    kind = dice.choice(["a pipe", "a folder", "a loop", "a hole"])
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a loop":
        path.symlink_to(path)
    else:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", 100))
            file.truncate(2**33)
    return kind


def one(path: Path, read: Callable[[Path], Any], right: Any, marker: Path, label: str) -> tuple[str, str]:
    """Read one file: how it ended, and what failed."""
    with silenced():
        try:
            found = read(path)
        except fb.FlowBNNError as error:
            ended = ("refused", "") if "\n" not in str(error) else ("failed", f"not one line: {error}")
        except BaseException as error:
            ended = ("failed", describe_error(error))
        else:
            same = (
                found == right
                if isinstance(right, dict)
                else equal_bits(named_tensors(found), named_tensors(right))
            )
            ended = ("read as it was", "") if same else ("failed", "read as something else")
    if marker.exists():
        marker.rmdir()
        ended = "failed", "its code ran"
    return ended[0], ended[1] and f"{label}: {ended[1]}"


def batch(found: dict[str, Any], right: dict[str, Any], place: Path, seed: int) -> list[tuple[str, str]]:
    """Some files, of which the seed tells all."""
    dice, marker, outcomes = random.Random(seed), place / "marker", []
    for number in range(TOGETHER):
        name = dice.choice(list(found))
        path, read = found[name]
        raw, label = path.read_bytes(), f"file {number} of batch {seed}, {name}"
        if dice.random() < 0.05:
            label += f", {strange(path, dice)}"
        else:
            path.write_bytes(hostile(raw, marker, dice))
        outcomes.append(one(path, read, right[name], marker, label))
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(raw)
    return outcomes


def stress(seed: int, budget: Budget, names: tuple[str, ...] = FITS) -> StressResult:
    """Batch by batch, each in a process of its own."""
    result = StressResult("files", seed)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        found = subjects(place, names, random.Random(seed))
        right = {}
        for name, (path, read) in found.items():
            try:
                right[name] = read(path)
            except fb.FlowBNNError:
                right[name] = None  # results that are too short for a report
        number = 0
        while budget.allows(result):
            number += 1
            for ended in limited(lambda: batch(found, right, place, 1000 * seed + number), result):  # noqa: B023
                result.add(*ended)
    return result


def limited(work: Callable[[], list[tuple[str, str]]], result: StressResult) -> list[tuple[str, str]]:
    """What a forked process answers that may take 2 GiB more than this one has."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            answer = json.dumps(work()).encode()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(answer)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(child, 0)
    result.most["GiB"] = max(result.most.get("GiB", 0.0), round(usage.ru_maxrss / 2**20, 2))
    if status or not answer:
        return [("failed", f"a batch of {TOGETHER} files died with status {status}")]
    return [(ended, failure) for ended, failure in json.loads(answer)]
