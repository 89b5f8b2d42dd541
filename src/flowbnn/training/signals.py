"""Ctrl-C and SIGTERM at a good moment: a step that has begun is finished first."""

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "Terminated"]


class Terminated(RuntimeError):
    """The process was asked to end (SIGTERM)."""


class Interrupts:
    """While installed, Ctrl-C inside ``with interrupts:`` is raised at the end of that block; a second one at once.

    Outside the main thread, or where the program has its own handler, it does nothing.

    Args:
        terminate: treat SIGTERM in the same way, as :class:`Terminated`: the launcher sends it to the processes that are left
            when one has died.
    """

    def __init__(self, terminate: bool = False) -> None:
        self.holding = self.waiting = self.ending = False
        self.terminate = terminate
        self.previous: Any = None

    def install(self) -> None:
        """Take the signals over."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.previous = signal.signal(signal.SIGINT, self._interrupt)
        self.terminate = self.terminate and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self.terminate:
            signal.signal(signal.SIGTERM, self._end)

    def remove(self) -> None:
        """Put the former handlers back."""
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
            self.previous = None
        if self.terminate:
            # a process that ends because another has died must still come to report it
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.ending else signal.SIG_DFL)

    def __enter__(self) -> None:
        self.holding = True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.holding = False
        if kind is not None:
            return
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt
        if self.ending:
            raise Terminated("asked to end (SIGTERM)")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.holding and not self.waiting:
            self.waiting = True
        else:
            raise KeyboardInterrupt

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self.ending:
            self.ending = True
            if not self.holding:
                raise Terminated("asked to end (SIGTERM)")
