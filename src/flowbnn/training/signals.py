"""Ctrl-C, or the word to end, at a good moment: a step that has begun is finished before it is felt."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupts", "Terminated"]


class Terminated(RuntimeError):
    """The process was told to end (SIGTERM)."""


class Interrupts:
    """While active, holds back the first Ctrl-C inside :meth:`held`; a second one is felt at once.

    Outside the main thread, or where the program has its own handler, it does nothing.

    Args:
        terminate: treat SIGTERM in the same way, as :class:`Terminated`: torchrun sends it to the processes that are left
            when one has died.
    """

    def __init__(self, terminate: bool = False) -> None:
        self.holding = False
        self.waiting = False
        self.previous: Any = None
        self.terminate = terminate
        self.ending = False

    def __enter__(self) -> "Interrupts":
        alone = threading.current_thread() is threading.main_thread()
        if alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.previous = signal.signal(signal.SIGINT, self.receive)
        self.terminate = self.terminate and alone and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self.terminate:
            signal.signal(signal.SIGTERM, self.end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
            self.previous = None
        if self.terminate:
            # a process that ends because another has died must still come to tell it
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.ending else signal.SIG_DFL)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.holding and not self.waiting:
            self.waiting = True
        else:
            raise KeyboardInterrupt

    def end(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM."""
        if self.ending:
            return
        self.ending = True
        if not self.holding:
            raise Terminated("told to end (SIGTERM)")

    @contextmanager
    def held(self) -> Iterator[None]:
        """A stretch that is not to be torn apart; a Ctrl-C inside it is raised at its end."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt
        if self.ending:
            raise Terminated("told to end (SIGTERM)")
