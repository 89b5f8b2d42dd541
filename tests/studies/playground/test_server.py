"""Tests of the server: security, limits, and the life of a fit."""

import json
import re
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the playground needs pip install flowbnn[playground]")
try:
    from starlette.testclient import TestClient
except (ImportError, RuntimeError):  # an extra of starlette
    pytest.skip("the test client of starlette needs httpx", allow_module_level=True)

from flowbnn.errors import FlowBNNError
from flowbnn.plots.style import DARK, LIGHT
from flowbnn_studies.playground import pages
from flowbnn_studies.playground.presets import PRESETS, make_preset
from flowbnn_studies.playground.server import ADDRESS, MAX_BYTES, STATIC, create_app, page_options, serve

PORT = 8123
ORIGIN = f"http://{ADDRESS}:{PORT}"


@pytest.fixture(scope="module")
def static():
    """Client of a server without processes."""
    return TestClient(create_app(PORT), base_url=ORIGIN)


@pytest.fixture(scope="module")
def client():
    """Client of a server with processes, which are started once."""
    with TestClient(create_app(PORT), base_url=ORIGIN) as client:
        yield client


def request(page, slot="a", method="map", **values):
    """Returns the document of a fit."""
    settings = {"method": method, "values": {"epochs": 10, "width": 8, **values}}
    return {
        "page": page,
        "slot": slot,
        "points": make_preset("ring", number=20),
        "settings": settings,
        "samples": 4,
    }


def lines(response):
    """Returns the messages of a fit."""
    return [json.loads(line) for line in response.text.splitlines()]


# -------------------- security


def test_pages_have_a_strict_policy(static):
    for path in ("/", "/static/main.js", "/api/options", "/missing"):
        response = static.get(path)
        assert response.status_code == (404 if path == "/missing" else 200)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": f"localhost:{PORT}"}, 200),
        ({"host": f"LOCALHOST:{PORT}"}, 200),
        ({"origin": ORIGIN}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": f"evil.example:{PORT}"}, 403),
        ({"host": ADDRESS}, 403),
        ({"host": f"{ADDRESS}:{PORT + 1}"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": f"https://{ADDRESS}:{PORT}"}, 403),
        ({"origin": f"http://{ADDRESS}:{PORT + 1}"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_foreign_hosts_and_origins_are_refused(static, headers, status):
    assert static.get("/", headers=headers).status_code == status
    assert static.get("/static/main.js", headers=headers).status_code == status
    response = static.post("/api/preset", json={"name": "ring"}, headers=headers)
    assert response.status_code == status
    assert ("error" in response.json()) == (status == 403)


def test_files_outside_of_the_page_are_not_served(static):
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static/"):
        assert static.get(path).status_code == 404


def test_the_page_loads_nothing_from_elsewhere():
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$|\s// .*$", "", text, flags=re.MULTILINE), path.name
        assert " style=" not in text  # the policy forbids it
        assert "innerHTML" not in text


# -------------------- limits


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b"3", 400),
        (b'{"name": "ring"', 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"name": "' + b"x" * MAX_BYTES + b'"}', 413),
    ],
)
def test_bad_bodies_are_answered_in_one_line(static, body, status):
    response = static.post("/api/preset", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert "\n" not in response.json()["error"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_bodies_must_be_declared_as_json(static, kind):
    response = static.post("/api/preset", content=b'{"name": "ring"}', headers={"content-type": kind})
    assert response.status_code == 415


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "moon"},
        {"name": 3},
        {"number": 10**6},
        {"number": 0},
        {"number": "many"},
        {"noise": -1},
        {"noise": 9},
        {"noise": "loud"},
        {"seed": -1},
        {"seed": 2**40},
    ],
)
def test_presets_have_limits(static, changes):
    response = static.post("/api/preset", json={"name": "ring", **changes})
    assert response.status_code == 400
    assert "\n" not in response.json()["error"]


def test_presets_and_options(static):
    points = static.post("/api/preset", json={"name": "ring", "number": 30, "noise": 0.0, "seed": 5}).json()
    assert points == make_preset("ring", 30, 0.0, 5)
    options = static.get("/api/options").json()
    assert [preset["name"] for preset in options["presets"]] == list(PRESETS)
    assert options == json.loads(json.dumps(page_options()))


def test_unknown_pages_are_refused(static):
    for path in ("fit", "stop", "predict", "pair"):
        for page in ("guess", None, 3, ["a"]):
            assert static.post(f"/api/{path}", json={"page": page}).status_code == 404
    assert static.post("/api/close", json={"page": "guess"}).status_code == 200
    assert static.get("/api/fit").status_code == 405


# -------------------- fits


def test_a_fit_reports_its_progress_and_its_result(client):
    page = client.post("/api/open", json={}).json()["page"]
    response = client.post("/api/fit", json=request(page))
    *progress, last = lines(response)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert progress[-1]["progress"]["epoch"] == 10
    assert last["result"]["num_held_out"] == 300
    changed = client.post("/api/predict", json={"page": page, "slot": "a", "samples": 2}).json()
    assert changed["samples"] == 2
    pair = {"page": page, "slot": "a", "layer": "fc2.weight", "units": [0, 1]}
    assert client.post("/api/pair", json=pair).json()["pair"]["units"] == [0, 1]
    # errors of the library, in one line
    for path, document in [
        ("fit", request(page, epochs=0)),
        ("fit", {**request(page), "points": {"task": "classes", "train": [], "held_out": []}}),
    ]:
        (answer,) = lines(client.post(f"/api/{path}", json=document))
        assert "\n" not in answer["error"]
    response = client.post("/api/predict", json={"page": page, "slot": "b"})
    assert response.status_code == 400
    assert response.json()["error"] == "there is no fit yet; press Fit"
    # one page does not see the fits of another, also not one that gets its process
    client.post("/api/close", json={"page": page})
    second = client.post("/api/open", json={}).json()["page"]
    assert second != page
    assert client.post("/api/predict", json={"page": second, "slot": "a"}).status_code == 400
    assert client.post("/api/predict", json={"page": page, "slot": "a"}).status_code == 404
    client.post("/api/close", json={"page": second})


def test_a_fit_can_be_stopped_and_only_one_runs(client):
    page = client.post("/api/open", json={}).json()["page"]
    assert client.post("/api/stop", json={"page": page}).json() == {"stopped": False}
    answers = []
    long = threading.Thread(
        target=lambda: answers.extend(lines(client.post("/api/fit", json=request(page, epochs=3000))))
    )
    long.start()
    while client.app.state.pages.find(page).fitting is None:  # the request may not have arrived yet
        assert long.is_alive()
        time.sleep(0.01)
    busy = client.post("/api/fit", json=request(page))
    assert busy.status_code == 409
    assert "\n" not in busy.json()["error"]
    assert client.post("/api/stop", json={"page": page}).json() == {"stopped": True}
    long.join(60)
    assert answers[-1] == {"stopped": "stopped"}
    assert "result" in lines(client.post("/api/fit", json=request(page)))[-1]
    client.post("/api/close", json={"page": page})


def test_a_fit_has_a_time_limit(client, monkeypatch):
    monkeypatch.setattr(pages, "MAX_SECONDS", 0.0)
    page = client.post("/api/open", json={}).json()["page"]
    answers = lines(client.post("/api/fit", json=request(page, epochs=3000)))
    assert "limit" in answers[-1]["stopped"]
    client.post("/api/close", json={"page": page})


# -------------------- the page and the command


def test_colours_are_those_of_the_plots():
    light, dark = (STATIC / "style.css").read_text().split("prefers-color-scheme: dark")[:2]
    for text, palette in ((light, LIGHT), (dark, DARK)):
        for label in range(3):
            assert f"--class-{label}: {palette.colour(label).lower()};" in text
        assert f"--ink: {palette.ink};" in text
        assert f"--plot: {palette.background};" in text


def test_every_script_is_loaded_and_exists():
    names = {path.name for path in STATIC.glob("*.js")}
    loaded = {"main.js"}
    for path in STATIC.glob("*.js"):
        loaded |= set(re.findall(r'from "\./([\w.]+)"', path.read_text()))
    assert loaded == names
    index = (STATIC / "index.html").read_text()
    for name in re.findall(r'/static/([\w.]+)"', index):
        assert (STATIC / name).exists()


def test_ports_are_checked():
    with pytest.raises(FlowBNNError) as caught:
        serve(2**16, browser=False)
    assert caught.value.argument == "port"
    import socket

    with socket.create_server((ADDRESS, 0)) as taken, pytest.raises(FlowBNNError) as caught:
        serve(taken.getsockname()[1], browser=False)
    assert caught.value.kind == "port"


@pytest.mark.slow
def test_the_wheel_has_the_page():
    """Every file of the page matches a pattern of the package data."""
    import tomllib

    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = STATIC.parents[1]
    for path in STATIC.iterdir():
        assert any(path in package.glob(pattern) for pattern in patterns["flowbnn_studies"]), path.name
