"""Open pages, each with a process that fits and predicts for it (:mod:`~flowbnn_studies.playground.worker`)."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from flowbnn.errors import FlowBNNError

MAX_PAGES = 4  # pages with a process; the one that was idle longest gives way to a new one
MAX_SECONDS = 60.0  # of one fit
SECONDS_TO_STOP = 5.0  # after which a process that does not react to a cancel is killed
IDLE_SECONDS = 1800.0  # after which a page loses its process
LINE_LIMIT = 2**24  # bytes of one answer
POLL_SECONDS = 0.25  # between two checks whether the page is still there


class Worker:
    """Process of one page.

    It answers one command after the other. The answers of a command are read by :meth:`ask`.
    """

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.queues: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self.reader: asyncio.Task[None] | None = None
        self.number = 0

    async def start(self) -> None:
        """Starts the process."""
        options: dict[str, Any] = {"start_new_session": True}  # Ctrl-C of the terminal is for the server
        if sys.platform == "win32":
            options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "flowbnn_studies.playground.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            **options,
        )
        self.reader = asyncio.create_task(self._read(self.process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Passes the answers on, until the process ends."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            message = json.loads(line)
            if message.get("id") in self.queues:
                self.queues[message.pop("id")].put_nowait(message)
        for waiting in self.queues.values():
            waiting.put_nowait({"error": "the process of this page has ended; press Fit again"})

    @property
    def is_alive(self) -> bool:
        """True if the process is running."""
        return self.process is not None and self.process.returncode is None

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the process."""
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(OSError, RuntimeError):  # an ended process is noticed by the reader
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def ask(
        self, command: str, arguments: Mapping[str, Any], poll: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Sends a command and yields its answers. Leaving the iteration early cancels the command.

        Args:
            command: Name of the command.
            arguments: Arguments of the command.
            poll: Function that is called while waiting. An exception ends the iteration.
        """
        self.number += 1
        number, answers = self.number, asyncio.Queue[dict[str, Any]]()
        self.queues[number] = answers
        finished = False
        try:
            self.send({**arguments, "command": command, "id": number})
            while not finished:
                try:
                    answer = await asyncio.wait_for(answers.get(), POLL_SECONDS)
                except TimeoutError:
                    if poll is not None:
                        await poll()
                    continue
                finished = "progress" not in answer
                yield answer
                if poll is not None and not finished:
                    await poll()
        finally:
            if finished:
                del self.queues[number]
            else:
                self.cancel(number)

    def cancel(self, number: int) -> None:
        """Cancels a command. A process that does not stop is killed."""
        self.send({"cancel": number})
        task = asyncio.get_running_loop().create_task(self._kill_unless_stopped(number))
        _background.add(task)
        task.add_done_callback(_background.discard)

    async def _kill_unless_stopped(self, number: int) -> None:
        answers = self.queues.get(number)
        if answers is None:
            return
        try:
            async with asyncio.timeout(SECONDS_TO_STOP):
                while "progress" in await answers.get():
                    pass
        except TimeoutError:
            self.kill()
        self.queues.pop(number, None)

    def forget(self) -> None:
        """Makes the process forget its fits."""
        self.send({"id": 0, "command": "forget"})

    def kill(self) -> None:
        """Ends the process at once."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()

    async def close(self) -> None:
        """Ends the process and waits for it."""
        self.kill()
        if self.process is not None:
            await self.process.wait()
        if self.reader is not None:
            await self.reader


_background: set[asyncio.Task[None]] = set()  # keeps tasks alive until they are done


class Page:
    """One open page.

    Args:
        worker: Process of the page.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.fitting: asyncio.Event | None = None  # set to stop the running fit
        self.last_used = time.monotonic()

    async def live_worker(self) -> Worker:
        """Returns the process of the page, a new one if it has ended."""
        if not self.worker.is_alive:
            self.worker = Worker()
            await self.worker.start()
        return self.worker

    async def fit(
        self, arguments: Mapping[str, Any], is_gone: Callable[[], Awaitable[bool]]
    ) -> AsyncGenerator[dict[str, Any]]:
        """Fits and yields progress, and at the end the result or one line that says why there is none.

        Args:
            arguments: Arguments of the command.
            is_gone: Function that returns True if the page no longer waits.
        """
        if self.fitting is not None:
            yield {"error": "a fit is running; stop it first"}
            return
        stop = self.fitting = asyncio.Event()
        deadline = time.monotonic() + MAX_SECONDS

        async def poll() -> None:
            if stop.is_set():
                raise _Stopped("stopped")
            if time.monotonic() > deadline:
                raise _Stopped(
                    f"stopped after {MAX_SECONDS:.0f} seconds, the limit of a fit; use fewer epochs"
                )
            if await is_gone():
                raise _Stopped("the page is gone")

        try:
            worker = await self.live_worker()
            async with aclosing(worker.ask("fit", arguments, poll)) as answers:
                async for answer in answers:
                    yield answer
        except _Stopped as reason:
            yield {"stopped": str(reason)}
        finally:
            self.fitting = None
            self.last_used = time.monotonic()

    async def ask(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the only answer to a command."""
        self.last_used = time.monotonic()
        async for answer in (await self.live_worker()).ask(command, arguments):
            return answer
        raise AssertionError("a command has an answer")

    def stop(self) -> bool:
        """Stops the running fit. Returns False if there is none."""
        if self.fitting is None:
            return False
        self.fitting.set()
        return True


class _Stopped(Exception):
    """Raised to end a fit early."""


class Pages:
    """All open pages, and one process that is started ahead of the next page."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.spare: Worker | None = None

    async def prepare(self) -> None:
        """Starts a process for the first page, which then need not wait for it."""
        self.spare = Worker()
        await self.spare.start()

    async def open(self) -> str:
        """Opens a page and returns its name, which other pages cannot guess."""
        now = time.monotonic()
        idle = [name for name, page in self.pages.items() if now - page.last_used > IDLE_SECONDS]
        for name in idle:
            await self.close(name)
        while len(self.pages) >= MAX_PAGES:
            waiting = [name for name, page in self.pages.items() if page.fitting is None]
            if not waiting:
                text = f"{MAX_PAGES} pages are fitting; wait for one of them, or close it"
                raise FlowBNNError(text, kind="too many", argument="page")
            await self.close(min(waiting, key=lambda name: self.pages[name].last_used))
        worker, self.spare = self.spare, None
        if worker is None or not worker.is_alive:
            worker = Worker()
            await worker.start()
        name = secrets.token_urlsafe(16)
        self.pages[name] = Page(worker)
        return name

    def find(self, name: Any) -> Page:
        """Returns the page of a name.

        Raises:
            FlowBNNError: If the page is not open.
        """
        page = self.pages.get(name) if isinstance(name, str) else None
        if page is None:
            raise FlowBNNError("this page is no longer known; reload it", kind="page", argument="page")
        return page

    async def close(self, name: Any) -> None:
        """Closes a page. Its process waits for the next page, if none does so already, and is ended otherwise."""
        page = self.pages.pop(name, None) if isinstance(name, str) else None
        if page is None:
            return
        page.stop()
        if page.worker.is_alive and (self.spare is None or not self.spare.is_alive):
            page.worker.forget()
            self.spare = page.worker
        else:
            await page.worker.close()

    async def close_all(self) -> None:
        """Closes all pages."""
        for name in list(self.pages):
            await self.close(name)
        if self.spare is not None:
            await self.spare.close()
