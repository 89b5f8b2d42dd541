"""Fetch a published file: mirrors in turn, a progress bar, a checksum, and never half a file under its final name."""

import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from flowbnn.errors import FlowBNNError
from flowbnn_studies.data.sources import Download

__all__ = ["checksum", "extract", "fetch"]

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
    _make_folder(target.parent)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    reasons: dict[str, list[str]] = {}
    try:
        for url in wanted.mirrors:
            reason = _try(url, wanted, part, timeout, progress)
            if reason is None:
                os.replace(part, target)
                return
            reasons.setdefault(reason, []).append(url.split("/")[2])
    except OSError as error:
        raise FlowBNNError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    failures = "; ".join(f"{', '.join(hosts)}: {reason}" for reason, hosts in reasons.items())
    raise FlowBNNError(failures or f"no mirror of {wanted.file} is known", kind="download")


def _try(url: str, wanted: Download, part: Path, timeout: float, progress: bool) -> str | None:
    """Write the bytes of one mirror to ``part``; None, or why they are not the right ones."""
    request = urllib.request.Request(url, headers={"User-Agent": "flowbnn"})
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        return f"answers {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _reason(error)
    with answer, part.open("wb") as file:
        digest = hashlib.md5(usedforsecurity=False)
        length = 0
        with _bar(wanted.file, wanted.size, progress) as advance:
            while length <= 2 * wanted.size:  # the checksum decides; this only ends what has no end
                try:
                    chunk = answer.read(CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    return f"stopped after {length:,} of {wanted.size:,} bytes ({_reason(error)})"
                if not chunk:
                    break
                file.write(chunk)
                digest.update(chunk)
                length += len(chunk)
                advance(len(chunk))
    if digest.hexdigest() != wanted.md5:
        if length < wanted.size:
            return f"gave {length:,} of {wanted.size:,} bytes"
        return f"gave another file than the published one (MD5 {wanted.md5})"
    return None


def _reason(error: BaseException) -> str:
    inner = getattr(error, "reason", error)
    reason = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    return " ".join(str(reason).split())[:120]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlowBNNError(f"the folder {folder} cannot be made: {error.strerror or error}") from None


def checksum(path: Path) -> str:
    """MD5 of a file, which is what the data sets' authors publish."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def extract(archive: Path, files: Mapping[str, int], folder: Path) -> None:
    """Write the named regular files of a tar archive, of exactly the given lengths, into ``folder``; nothing else.

    A file that is there already is left alone.
    """
    _make_folder(folder)
    missing = {name: size for name, size in files.items() if not (folder / name).exists()}
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                name = member.name.rsplit("/", 1)[-1]
                if name not in missing or not member.isfile():
                    continue
                if member.size != missing.pop(name):
                    raise FlowBNNError(f"{archive} holds a {name} of {member.size:,} bytes; fetch it anew")
                content = packed.extractfile(member)
                assert content is not None
                _write(content, folder / name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise FlowBNNError(f"{archive} is not a whole archive ({error}); delete it and load again") from None
    except OSError as error:
        raise FlowBNNError(f"{archive} cannot be unpacked into {folder}: {error.strerror or error}") from None
    if missing:
        raise FlowBNNError(f"{archive} lacks {', '.join(missing)}; delete it and load again")


def _write(content: IO[bytes], target: Path) -> None:
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            while chunk := content.read(CHUNK):
                file.write(chunk)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _bar(description: str, total: int, shown: bool) -> Iterator[Callable[[int], object]]:
    """A bar of bytes on a terminal, nothing elsewhere; gives what advances it."""
    from flowbnn.training.progress import terminal

    console = terminal() if shown else None
    if console is None:
        yield lambda number: None
        return
    from rich.errors import LiveError
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(description), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(description, total=total)
    with suppress(LiveError):  # the caller shows a live display of its own on this console
        bar.start()
    try:
        yield lambda number: bar.advance(task, number)
    finally:
        bar.stop()
