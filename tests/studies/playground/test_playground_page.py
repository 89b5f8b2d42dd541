"""End-to-end tests of the page in chromium, with the network off, at two widths and by keyboard only."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs {CHROMIUM}, from apt-get install chromium"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
pytest.importorskip("uvicorn", reason="the playground needs pip install flowbnn[playground]")

WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
SECONDS = 120  # for anything that a busy machine may delay


@pytest.fixture(scope="module")
def address():
    """Address of a server that the command line has started."""
    command = [sys.executable, "-m", "flowbnn_studies", "playground", "--port", "0", "--no-browser"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        line = process.stdout.readline()
        yield re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as runner:
        browser = runner.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser, address, viewport=WIDE, **options):
    """Context manager that yields the page after its first fit, and checks at the end that nothing went wrong.

    Every request that does not go to the server is recorded and blocked.
    """
    context = browser.new_context(viewport=viewport, **options)
    context.set_default_timeout(1000 * SECONDS)
    page, problems = context.new_page(), []

    def block(route):
        problems.append(f"request to {route.request.url}")
        route.abort()

    context.route(lambda url: not url.startswith((address, "data:", "blob:")), block)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.goto(address)
    wait_for_fit(page)
    yield page
    page.goto("about:blank")  # the page says goodbye to the server
    context.close()
    assert not problems


def wait_for_fit(page):
    """Waits until no fit runs, and a result is there."""
    page.wait_for_selector("body:not(.fitting) #fit:enabled")
    page.wait_for_selector(".figures:not([hidden])")


def counts(page):
    """Returns the numbers of training points and of held-out points."""
    return tuple(map(int, re.findall(r"\d+", page.inner_text("#counts"))))


def fit(page):
    page.click("#fit")
    wait_for_fit(page)


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1400", "390"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_answer(browser, address, viewport, scheme):
    """The page shows a first fit by itself, fits its width, and names everything for screen readers."""
    with opened(browser, address, viewport, color_scheme=scheme) as page:
        assert page.inner_text("#status").startswith("Node noise: fitted in ")
        assert page.inner_text("#live") == page.inner_text("#status")
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
        background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
        figures = page.locator("svg[role=img]")
        assert figures.count() == 4
        assert all(figures.nth(index).get_attribute("aria-label") for index in range(4))
        captions = page.locator("figcaption").all_inner_texts()
        assert len(captions) == 4
        assert all(len(text) > 40 for text in captions)
        unnamed = page.evaluate(
            """[...document.querySelectorAll("button, input, select, [role=application]")].filter((node) =>
            !(node.textContent || node.labels?.[0]?.textContent || node.getAttribute("aria-label"))).length"""
        )
        assert unnamed == 0
        colours = page.evaluate(
            """(() => { const map = document.querySelector(".main-figure canvas");
            const data = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
            return new Set(Array.from({ length: map.width }, (_, i) => data.slice(4000 * i, 4000 * i + 3).join())).size })()"""
        )
        assert colours > 5  # the map is painted


def test_points_are_drawn_erased_and_restored(browser, address):
    with opened(browser, address) as page:
        page.click("#clear")
        assert counts(page) == (0, 0)
        box = page.locator("#board svg").bounding_box()
        place = lambda x, y: (box["x"] + x * box["width"], box["y"] + y * box["height"])  # noqa: E731
        for index in range(8):  # every fourth point is held out
            page.mouse.click(*place(0.3 + 0.05 * index, 0.3))
        assert counts(page) == (6, 2)
        page.click("text=class B")
        page.mouse.move(*place(0.3, 0.6))
        page.mouse.down()
        page.mouse.move(*place(0.8, 0.6), steps=30)
        page.mouse.up()
        train, held_out = counts(page)
        assert train >= 12
        assert page.locator("#board .class-1").count() == train + held_out - 8
        page.click("#undo")
        assert counts(page) == (6, 2)
        page.click("text=Erase")
        page.mouse.click(*place(0.3, 0.3))
        assert counts(page)[0] < 6
        page.click("#undo")
        assert counts(page) == (6, 2)
        # one class is not enough: the line of the server is shown
        page.click("#fit")
        page.wait_for_selector("body:not(.fitting) .notes .error")
        assert "second class" in page.inner_text(".notes .error")


def test_two_methods_on_a_curve_and_their_programs(browser, address, capsys):
    """Both methods are fitted to the same points, and the copied program runs and has the points."""
    with opened(browser, address, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.check("#compare")
        page.click(".preset[data-name=step]")
        page.wait_for_selector(".preset[data-name=step][aria-pressed=true]")
        first, second = page.locator(".form select.method").all()
        first.select_option("dropout")
        second.select_option("map")
        page.locator(".form details summary").first.click()
        page.locator(".form").first.get_by_role("slider", name="Epochs").press("Home")
        fit(page)
        headings = page.locator(".panel h3").all_inner_texts()
        assert headings == ["A: MC dropout", "B: Single network (MAP)"]
        assert page.locator(".panel path.mean").count() == 2
        page.click("#look label:has-text('Sampled functions')")
        assert page.locator(".panel path.function").count() == 40
        page.click("#code-tabs label:has-text('A')")
        page.click("#copy")
        page.wait_for_selector("#copy:has-text('Copied')")
        code = page.evaluate("navigator.clipboard.readText()")
        assert "fb.MCDropout(epochs=10" in code
        names: dict = {}
        exec(code.replace("seed=0)", "seed=0, progress=False)", 1), names)
        assert len(names["train_x"]) == counts(page)[0]
        page.click("#code-tabs label:has-text('B')")
        assert "fb.MAP(" in page.inner_text("#code")


def test_sliders_answer_without_a_fit(browser, address):
    with opened(browser, address) as page:
        requests: list = []
        page.on("request", lambda request: requests.append(request.url.rpartition("/")[2]))
        before = page.inner_text(".scores")
        page.get_by_role("slider", name="Temperature").press("End")
        page.wait_for_selector("#code:has-text('TemperedPosterior(posterior, 4.0)')")
        assert page.inner_text(".scores") != before
        page.get_by_role("slider", name="Networks").press("Home")
        page.wait_for_selector("#code:has-text('predict(grid, 1,')")
        page.locator(".pair-controls select").select_option("fc3")
        page.wait_for_selector("text=noise of unit")
        assert set(requests) == {"predict", "pair"}
        for view in ("Uncertainty", "Disagreement", "Single networks"):
            page.click(f"#look label:has-text('{view}')")
        assert page.locator(".panel .border.single").count() == 1  # one sampled network


def test_a_fit_can_be_stopped(browser, address):
    with opened(browser, address) as page:
        result = page.inner_text(".scores")
        page.locator(".form details summary").click()
        page.get_by_role("slider", name="Epochs").press("End")
        assert page.locator(".stale").is_visible()
        page.click("#fit")
        page.wait_for_selector("body.fitting #status:has-text('epoch')")
        assert page.inner_text("#fit") == "Stop"
        page.click("#fit")
        wait_for_fit(page)
        assert page.inner_text("#status") == "Stopped."
        assert page.inner_text(".scores") == result  # of the last finished fit
        page.get_by_role("slider", name="Epochs").press("Home")
        fit(page)
        assert not page.locator(".stale").is_visible()


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1400", "390"])
def test_everything_works_by_keyboard(browser, address, viewport):
    """A user without a mouse clears the board, draws two classes, and fits them."""
    with opened(browser, address, viewport) as page:
        focused = lambda: page.evaluate(  # noqa: E731
            "document.activeElement.id || document.activeElement.getAttribute('role') || document.activeElement.textContent"
        )

        def tab_to(name, key="Tab"):
            for _ in range(80):
                page.keyboard.press(key)
                if name in focused():
                    return
            raise AssertionError(f"{name} cannot be reached by {key}")

        tab_to("clear")
        page.keyboard.press("Enter")
        assert counts(page) == (0, 0)
        tab_to("application", "Shift+Tab")
        assert page.locator("#board .crosshair").count() == 1
        for label, move in (("1", "ArrowLeft"), ("2", "ArrowRight")):
            page.keyboard.press(label)
            for _ in range(8):
                page.keyboard.press(move)
                page.keyboard.press("Enter")
            page.keyboard.press("Shift+ArrowUp")
        assert counts(page) == (12, 4)
        assert page.inner_text("#live").count(",") == 1  # the place of the crosshair
        page.keyboard.press("Enter")
        assert "class B" in page.inner_text("#live")
        page.keyboard.press("Delete")
        assert counts(page) == (12, 4)
        tab_to("fit")
        page.keyboard.press("Enter")
        wait_for_fit(page)
        assert "fitted in" in page.inner_text("#live")
        assert page.locator(".main-figure .plot .mark").count() == 12
        tab_to("copy")


def test_a_page_that_goes_away_stops_its_fit(browser, address):
    """After a reload, the process of the page is free at once, although the fit would take a minute."""
    with opened(browser, address) as page:
        page.locator(".form details summary").click()
        page.get_by_role("slider", name="Epochs").press("End")
        page.get_by_role("slider", name="Units per layer").press("End")
        page.click("#fit")
        page.wait_for_selector("body.fitting #status:has-text('epoch')")
        start = time.monotonic()
        page.reload()
        wait_for_fit(page)
        assert page.inner_text("#status").startswith("Node noise: fitted")
        assert time.monotonic() - start < SECONDS
