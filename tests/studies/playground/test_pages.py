"""Tests of the processes of pages: what happens when a page goes away, or its process."""

import asyncio
from contextlib import aclosing

import pytest

from flowbnn.errors import FlowBNNError
from flowbnn_studies.playground import pages
from flowbnn_studies.playground.pages import Pages
from flowbnn_studies.playground.presets import make_preset

LONG = {
    "slot": "a",
    "points": make_preset("gap", number=20),
    "settings": {"method": "map", "values": {"epochs": 3000, "width": 8}},
}
SHORT = {**LONG, "settings": {"method": "map", "values": {"epochs": 10, "width": 8}}}


async def here():
    return False


async def collect(page, arguments, is_gone=here, react=lambda answer: None):
    """Returns the answers to a fit.

    Args:
        page: Open page.
        arguments: Arguments of the fit.
        is_gone: Function that returns True if the page has gone.
        react: Function that is called with every answer.
    """
    answers = []
    async with aclosing(page.fit(arguments, is_gone)) as stream:
        async for answer in stream:
            answers.append(answer)
            react(answer)
    return answers


@pytest.mark.slow  # starts two processes
def test_a_fit_ends_with_its_page_and_the_page_survives_its_process():
    async def scenario():
        opened = Pages()
        await opened.prepare()
        page = opened.find(await opened.open())
        progress: list = []

        async def gone():
            return len(progress) > 2

        answers = await collect(page, LONG, gone, progress.append)
        assert "progress" in answers[0]
        assert "gone" in answers[-1]["stopped"]
        assert page.fitting is None
        # the process has stopped the fit and answers the next command
        worker = page.worker
        assert "result" in (await collect(page, SHORT))[-1]
        assert page.worker is worker
        assert worker.queues == {}
        # an answer that is left early stops the fit as well
        async with aclosing(page.fit(LONG, here)) as stream:
            assert "progress" in await anext(stream)
            (refused,) = await collect(page, SHORT)
            assert "\n" not in refused["error"]
        assert page.fitting is None
        # a process that dies is reported, and replaced by the next command
        (*_, last) = await collect(page, LONG, react=lambda answer: worker.kill())
        assert "error" in last
        await worker.close()
        assert not worker.is_alive
        assert "result" in (await collect(page, SHORT))[-1]
        assert page.worker is not worker
        await opened.close_all()
        assert not page.worker.is_alive

    asyncio.run(scenario())


class FakeWorker:
    """Worker without a process."""

    def __init__(self):
        self.is_alive, self.forgotten = False, 0

    async def start(self):
        self.is_alive = True

    async def close(self):
        self.is_alive = False

    def forget(self):
        self.forgotten += 1


def test_the_number_of_processes_is_limited(monkeypatch):
    monkeypatch.setattr(pages, "Worker", FakeWorker)

    async def scenario():
        opened = Pages()
        await opened.prepare()
        spare = opened.spare
        names = [await opened.open() for _ in range(pages.MAX_PAGES)]
        assert len(set(names)) == pages.MAX_PAGES
        first = opened.find(names[0])
        assert first.worker is spare
        first.last_used -= 100.0
        fifth = await opened.open()  # the first page was idle longest, and its process is used again
        assert opened.find(fifth).worker is spare
        assert spare.forgotten == 1
        with pytest.raises(FlowBNNError) as caught:
            opened.find(names[0])
        assert caught.value.kind == "page"
        for page in opened.pages.values():
            page.fitting = asyncio.Event()
        with pytest.raises(FlowBNNError) as caught:
            await opened.open()
        assert caught.value.kind == "too many"
        # pages that were idle for long are closed first
        stale = opened.find(fifth)
        stale.fitting, stale.last_used = None, stale.last_used - 2 * pages.IDLE_SECONDS
        await opened.open()
        assert fifth not in opened.pages
        await opened.close_all()
        assert not opened.pages
        assert not spare.is_alive

    asyncio.run(scenario())
