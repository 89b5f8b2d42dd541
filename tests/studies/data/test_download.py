"""Downloads, from servers on this machine that behave well and badly."""

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
from flowbnn_studies.data.load import extract, fetch, load_source
from image_files import colour_source, download, grey_source, tar, write_grey

NOWHERE = "http://127.0.0.1:9/"  # the discard port: nobody listens


@contextmanager
def server(files, lie=0, stall=False):
    """Serve ``files``; say that each is ``lie`` bytes longer than it is; or never answer."""
    asked = []
    quiet = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = unquote(self.path.lstrip("/"))
            asked.append(name)
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
        yield f"http://127.0.0.1:{listening.server_port}/", asked
    finally:
        quiet.set()
        listening.shutdown()
        listening.server_close()
        thread.join()


RAW = bytes(range(256)) * 1000


def test_a_file_arrives_whole_under_its_name(tmp_path):
    with server({"a.bin": RAW}) as (url, _):
        fetch(download("a.bin", RAW, (url,)), tmp_path / "deep" / "a.bin")
    assert (tmp_path / "deep" / "a.bin").read_bytes() == RAW
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.bin"]


@pytest.mark.parametrize(
    ("given", "lie", "words"),
    [
        ({}, 0, "answers 404"),
        ({"a.bin": RAW[:-7]}, 0, "gave 255,993 of 256,000 bytes"),
        ({"a.bin": RAW[:-7]}, 7, "255,993"),
        ({"a.bin": RAW[:-1] + b"x"}, 0, "another file than the published one"),
        ({"a.bin": RAW + b"x"}, 0, "another file than the published one"),
    ],
)
def test_a_bad_download_is_told_and_leaves_nothing(tmp_path, given, lie, words):
    with server(given, lie) as (url, _), pytest.raises(FlowBNNError) as caught:
        fetch(download("a.bin", RAW, (url,)), tmp_path / "a.bin")
    assert words in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_next_mirror_is_asked_when_one_fails(tmp_path):
    with server({"a.bin": RAW[:9]}) as (short, asked), server({"a.bin": RAW}) as (good, _):
        fetch(download("a.bin", RAW, (NOWHERE, short, good)), tmp_path / "a.bin")
    assert asked == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == RAW


def test_a_silent_mirror_is_given_up(tmp_path):
    with server({}, stall=True) as (url, _), pytest.raises(FlowBNNError, match="timed out"):
        fetch(download("a.bin", RAW, (url,)), tmp_path / "a.bin", timeout=0.2)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FlowBNNError, match="cannot be written"):
        fetch(download("a.bin", RAW, (NOWHERE,)), tmp_path / "file" / "a.bin")


def test_a_bar_is_shown_on_a_terminal(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "terminal", lambda: Console(file=screen, force_terminal=True, width=100))
    with server({"a.bin": RAW}) as (url, _):
        fetch(download("a.bin", RAW, (url,)), tmp_path / "a.bin")
        assert "a.bin" in screen.getvalue()
        assert "4/" in screen.getvalue()  # chunks
        screen.truncate(0)
        fetch(download("a.bin", RAW, (url,)), tmp_path / "a.bin", progress=False)
    assert "a.bin" not in screen.getvalue()


def test_missing_idx_files_are_fetched_and_those_there_are_kept(tmp_path):
    source, content = grey_source()
    write_grey(source, content, tmp_path / "server", packed=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "server" / source.folder).iterdir()}
    with server(files) as (url, asked):
        source, _ = grey_source(mirrors=(NOWHERE, url))
        assert len(load_source(source, "train", tmp_path, download=True)) == 12
        assert asked == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
        assert len(load_source(source, "train", tmp_path, download=True)) == 12
        assert len(asked) == 2
        (tmp_path / source.folder / "train-labels-idx1-ubyte.gz").unlink()
        assert len(load_source(source, "train", tmp_path, download=True)) == 12
        assert asked[2:] == ["train-labels-idx1-ubyte.gz"]


def test_the_archive_is_fetched_unpacked_and_not_kept(tmp_path):
    _, content, archive = colour_source()
    with server({"colour.tar.gz": archive}) as (url, asked):
        source, _, _ = colour_source(mirrors=(url,))
        assert len(load_source(source, "train", tmp_path, download=True)) == 12
        assert len(load_source(source, "test", tmp_path, download=True)) == 6
        assert asked == ["colour.tar.gz"]
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["one.bin", "three.bin", "two.bin"]
    assert content.keys() == {"one", "two", "three"}


def test_an_archive_put_into_the_folder_needs_no_network(tmp_path):
    source, _, archive = colour_source()
    path = tmp_path / "colour.tar.gz"
    path.write_bytes(archive)
    assert len(load_source(source, "train", tmp_path, download=False)) == 12
    assert path.exists()
    path.write_bytes(archive[:-30])
    (tmp_path / "colour-bin" / "one.bin").unlink()
    with pytest.raises(FlowBNNError, match="colour.tar.gz is not the published file"):
        load_source(source, "train", tmp_path, download=False)


def test_without_a_network_one_line_says_what_to_put_where(tmp_path):
    for source, folder in (
        (grey_source(mirrors=(NOWHERE,))[0], "Grey/raw"),
        (colour_source((NOWHERE,))[0], "colour-bin"),
    ):
        with pytest.raises(FlowBNNError) as caught:
            load_source(source, "train", tmp_path, download=True)
        message = str(caught.value)
        assert "\n" not in message
        assert f"into {tmp_path / folder}" in message
        assert "cannot be downloaded" in message
        assert "FLOWBNN_DATA" in message
        assert "refused" in message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_name_that_no_server_answers_to_is_told(tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(FlowBNNError, match="Name or service not known"):
        fetch(download("a.bin", RAW, ("http://nowhere.invalid/",)), tmp_path / "a.bin")


def test_only_the_named_regular_files_leave_an_archive(tmp_path):
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
        (tar({"a.bin": bytes(10**5)})[:60], "not a whole archive"),
        (b"nothing of the kind", "not a whole archive"),
        (tar({"b.bin": b"abc"}), "lacks a.bin"),
    ],
)
def test_a_bad_archive_is_told(tmp_path, raw, words):
    (tmp_path / "x.tar.gz").write_bytes(raw)
    with pytest.raises(FlowBNNError, match=words):
        extract(tmp_path / "x.tar.gz", ["a.bin"], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
