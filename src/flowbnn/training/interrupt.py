"""Ctrl-C at a good moment: a step that has begun is finished before the interruption is felt."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """While active, holds back the first Ctrl-C inside :meth:`held`; a second one is felt at once.

    Outside the main thread, or where the program has its own handler, it does nothing.
    """

    def __init__(self) -> None:
        self.holding = False
        self.waiting = False
        self.previous: Any = None

    def __enter__(self) -> "Interrupts":
        alone = threading.current_thread() is threading.main_thread()
        if alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.previous = signal.signal(signal.SIGINT, self.receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
            self.previous = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.holding and not self.waiting:
            self.waiting = True
        else:
            raise KeyboardInterrupt

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
