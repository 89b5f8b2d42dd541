"""Measures the playground: the time from the press of Fit to the answer, of every method at its defaults.

    python benchmarks/playground.py [--repeats 5] [--presets two-moons gap] [--only noise map] [--browser]

``answer`` is the median time until the whole result has arrived from the server, ``slowest`` the longest. ``slider`` is the time of
a prediction with another number of networks. ``CPU`` is the processor time of fit and prediction in one thread, which other programs
on the machine disturb least. ``size`` is the size of the result. ``--browser`` adds the time from a click on Fit to the painted map in
chromium. The server runs in a process of its own, as ``flowbnn playground`` starts it.
"""

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import make_parser

from flowbnn_studies.playground.methods import ENTRIES
from flowbnn_studies.playground.presets import make_preset
from flowbnn_studies.playground.server import STATIC
from flowbnn_studies.playground.worker import Workbench

CHROMIUM = "/usr/bin/chromium"


@contextmanager
def server() -> Iterator[int]:
    """Context manager that starts the server and yields its port."""
    command = [sys.executable, "-u", "-m", "flowbnn_studies", "playground", "--no-browser"]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        match = re.search(r":(\d+)/", process.stdout.readline())
        assert match is not None
        print(f"server: address after {time.perf_counter() - begin:.1f} s")
        yield int(match[1])
    finally:
        process.terminate()
        process.wait()


def post(port: int, path: str, document: dict[str, Any]) -> bytes:
    """Returns the body of the answer to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps(document)
    connection.request("POST", f"/api/{path}", body, {"content-type": "application/json"})
    answer = connection.getresponse().read()
    connection.close()
    return answer


def seconds_of(work: Any) -> tuple[float, Any]:
    """Returns the duration of a call and its result."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def measure(port: int, preset: str, method: str, page: str, repeats: int) -> str:
    """Returns one row of the table."""
    request = {"slot": "a", "points": make_preset(preset), "settings": {"method": method}}
    answers = [seconds_of(lambda: post(port, "fit", {**request, "page": page})) for _ in range(repeats)]
    times = [seconds for seconds, _ in answers]
    result = answers[-1][1].splitlines()[-1]
    if b'"result"' not in result[:20]:
        return f"{preset:<14}{method:<20}{json.loads(result)}"
    sliders = [
        seconds_of(lambda: post(port, "predict", {"page": page, "slot": "a", "samples": 65}))[0]
        for _ in range(repeats)
    ]
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Workbench().run({**request, "command": "fit"}, lambda progress: None)
    cpu = time.process_time() - begin
    return (
        f"{preset:<14}{method:<20}{statistics.median(times):>8.2f} s{max(times):>8.2f} s{statistics.median(sliders):>8.2f} s"
        f"{cpu:>8.2f} s{len(result) / 1000:>8.0f} kB"
    )


def measure_browser(port: int, repeats: int) -> None:
    """Prints the time from a click on Fit to the painted map, for the method that the page begins with."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        finished = "body:not(.fitting) #fit:enabled"
        begin = time.perf_counter()
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector(".figures:not([hidden]) .scores div", timeout=120_000)
        page.wait_for_selector(finished)
        print(f"browser: first map {time.perf_counter() - begin:.2f} s after the page was opened")
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            page.click("#fit")
            page.wait_for_selector("body.fitting")
            page.wait_for_selector(finished, timeout=120_000)
            times.append(time.perf_counter() - begin)
        print(
            f"browser: map {statistics.median(times):.2f} s after the click on Fit (slowest {max(times):.2f} s)"
        )
        browser.close()


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--presets", nargs="+", default=["two-moons", "gap"])
    parser.add_argument("--only", nargs="+", default=list(ENTRIES))
    parser.add_argument("--browser", action="store_true")
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    size = sum(path.stat().st_size for path in STATIC.iterdir())
    print(f"page: {size / 1000:.0f} kB in {len(list(STATIC.iterdir()))} files")
    with server() as port:
        opened, answer = seconds_of(lambda: post(port, "open", {}))
        page = json.loads(answer)["page"]
        warm = {
            "page": page,
            "slot": "a",
            "points": make_preset("gap", number=10),
            "settings": {"method": "map"},
        }
        ready, _ = seconds_of(lambda: post(port, "fit", warm))
        print(f"server: page opened after {opened:.2f} s, its process ready after {ready:.1f} s more")
        print(f"{'data':<14}{'method':<20}{'answer':>10}{'slowest':>10}{'slider':>10}{'CPU':>10}{'size':>11}")
        for preset in options.presets:
            for method in options.only:
                print(measure(port, preset, method, page, options.repeats), flush=True)
        if options.browser:
            post(port, "close", {"page": page})
            measure_browser(port, options.repeats)


if __name__ == "__main__":
    main()
