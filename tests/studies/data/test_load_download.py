"""Tests of downloads from local servers that behave well and badly."""

import http.server
import io
import socket
import threading
from contextlib import contextmanager
from urllib.parse import unquote

import pytest
from rich.console import Console

from flowbnn.errors import FlowBNNError
from flowbnn.training import progress
from flowbnn_studies.data.load import extract, fetch, load_dataset
from image_files import colour_source, download, grey_source, tar, write_grey

NOWHERE = "http://127.0.0.1:9/"  # the discard port, on which nobody listens


@contextmanager
def server(files, lie=0, stall=False):
    """Serves files. With ``lie`` the announced length is larger by that number; with ``stall`` the server never answers."""
    requests = []
    quiet = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = unquote(self.path.lstrip("/"))
            requests.append(name)
            if stall:
                quiet.wait(10)
                return
            if name not in files:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(files[name]) + lie))
            self.end_headers()
            self.wfile.write(files[name])

        def log_message(self, *_):
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/", requests
    finally:
        quiet.set()
        listening.shutdown()
        listening.server_close()
        thread.join()


RAW = bytes(range(256)) * 1000


def test_file_is_downloaded_completely(tmp_path):
    with server({"a.bin": RAW}) as (url, _):
        fetch(download("a.bin", RAW, (url,)), tmp_path / "deep" / "a.bin")
    assert (tmp_path / "deep" / "a.bin").read_bytes() == RAW
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.bin"]


@pytest.mark.parametrize(
    ("files", "lie", "words"),
    [
        ({}, 0, "HTTP status 404"),
        ({"a.bin": RAW[:-7]}, 0, "received 255,993 of 256,000 bytes"),
        ({"a.bin": RAW[:-7]}, 7, "255,993"),
        ({"a.bin": RAW[:-1] + b"x"}, 0, "a file other than the published one"),
        ({"a.bin": RAW + b"x"}, 0, "a file other than the published one"),
    ],
)
def test_bad_download_is_refused_and_leaves_nothing(tmp_path, files, lie, words):
    with server(files, lie) as (url, _), pytest.raises(FlowBNNError) as caught:
        fetch(download("a.bin", RAW, (url,)), tmp_path / "a.bin")
    assert words in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_next_mirror_is_used_after_a_failure(tmp_path):
    with server({"a.bin": RAW[:9]}) as (short, requests), server({"a.bin": RAW}) as (good, _):
        fetch(download("a.bin", RAW, (NOWHERE, short, good)), tmp_path / "a.bin")
    assert requests == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == RAW


def test_silent_mirror_is_abandoned(tmp_path):
    with server({}, stall=True) as (url, _), pytest.raises(FlowBNNError) as caught:
        fetch(download("a.bin", RAW, (url,)), tmp_path / "a.bin", timeout=0.2)
    assert caught.value.kind == "download"
    assert "timed out" in str(caught.value)


def test_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FlowBNNError) as caught:
        fetch(download("a.bin", RAW, (NOWHERE,)), tmp_path / "file" / "a.bin")
    assert caught.value.kind == "file"


def test_progress_bar_in_a_terminal(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "terminal", lambda: Console(file=screen, force_terminal=True, width=100))
    with server({"a.bin": RAW}) as (url, _):
        fetch(download("a.bin", RAW, (url,)), tmp_path / "a.bin")
        assert "a.bin" in screen.getvalue()
        assert "  4  " in screen.getvalue()  # chunks
        screen.truncate(0)
        fetch(download("a.bin", RAW, (url,)), tmp_path / "a.bin", progress=False)
    assert "a.bin" not in screen.getvalue()


def test_only_missing_idx_files_are_downloaded(tmp_path):
    source, content = grey_source()
    write_grey(source, content, tmp_path / "server", packed=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "server" / source.folder).iterdir()}
    with server(files) as (url, requests):
        source, _ = grey_source(mirrors=(NOWHERE, url))
        assert len(load_dataset(source, "train", tmp_path, download=True)) == 12
        assert requests == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
        assert len(load_dataset(source, "train", tmp_path, download=True)) == 12
        assert len(requests) == 2
        (tmp_path / source.folder / "train-labels-idx1-ubyte.gz").unlink()
        assert len(load_dataset(source, "train", tmp_path, download=True)) == 12
        assert requests[2:] == ["train-labels-idx1-ubyte.gz"]


def test_archive_is_downloaded_unpacked_and_deleted(tmp_path):
    _, content, archive = colour_source()
    with server({"colour.tar.gz": archive}) as (url, requests):
        source, _, _ = colour_source(mirrors=(url,))
        assert len(load_dataset(source, "train", tmp_path, download=True)) == 12
        assert len(load_dataset(source, "test", tmp_path, download=True)) == 6
        assert requests == ["colour.tar.gz"]
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["one.bin", "three.bin", "two.bin"]
    assert content.keys() == {"one", "two", "three"}


def test_local_archive_needs_no_network(tmp_path):
    source, _, archive = colour_source()
    path = tmp_path / "colour.tar.gz"
    path.write_bytes(archive)
    assert len(load_dataset(source, "train", tmp_path, download=False)) == 12
    assert path.exists()
    path.write_bytes(archive[:-30])
    (tmp_path / "colour-bin" / "one.bin").unlink()
    with pytest.raises(FlowBNNError) as caught:
        load_dataset(source, "train", tmp_path, download=False)
    assert "colour.tar.gz is not the published file" in str(caught.value)


def test_failed_download_names_files_and_folder(tmp_path):
    for source, folder in (
        (grey_source(mirrors=(NOWHERE,))[0], "Grey/raw"),
        (colour_source((NOWHERE,))[0], "colour-bin"),
    ):
        with pytest.raises(FlowBNNError) as caught:
            load_dataset(source, "train", tmp_path, download=True)
        message = str(caught.value)
        assert "\n" not in message
        assert f"into {tmp_path / folder}" in message
        assert caught.value.kind == "download"
        assert "FLOWBNN_DATA" in message
        assert "refused" in message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_unknown_host_is_refused(tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(FlowBNNError) as caught:
        fetch(download("a.bin", RAW, ("http://nowhere.invalid/",)), tmp_path / "a.bin")
    assert "Name or service not known" in str(caught.value)


def test_only_named_regular_files_are_extracted(tmp_path):
    outside = tmp_path / "outside"
    raw = tar(
        {"../evil.bin": b"no", "/deep/a.bin": b"abc", "b.bin/extra": b"no"},
        links={"x/a.bin": str(outside), "c.bin": str(outside)},
    )
    (tmp_path / "x.tar.gz").write_bytes(raw)
    extract(tmp_path / "x.tar.gz", ["a.bin"], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.bin"]
    assert (tmp_path / "out" / "a.bin").read_bytes() == b"abc"
    assert not (tmp_path / "out" / "a.bin").is_symlink()
    assert not outside.exists()
    assert not (tmp_path / "evil.bin").exists()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (tar({"a.bin": bytes(10**5)})[:60], "cannot extract"),
        (b"not an archive", "cannot extract"),
        (tar({"b.bin": b"abc"}), "lacks a.bin"),
    ],
)
def test_bad_archive_is_refused(tmp_path, raw, words):
    (tmp_path / "x.tar.gz").write_bytes(raw)
    with pytest.raises(FlowBNNError) as caught:
        extract(tmp_path / "x.tar.gz", ["a.bin"], tmp_path / "out")
    assert caught.value.kind == "file"
    assert words in str(caught.value)
    assert not list((tmp_path / "out").iterdir())
