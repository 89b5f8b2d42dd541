"""Fetch a published file: mirrors in turn, a progress bar, a checksum, and never half a file under its final name."""

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO

from flowbnn.errors import FlowBNNError
from flowbnn.training.progress import track
from flowbnn_studies.data.sources import Download

CHUNK = 1 << 16


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
