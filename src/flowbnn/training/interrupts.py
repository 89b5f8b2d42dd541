"""Ctrl-C, and SIGTERM from a launcher, held back until a step is whole."""

import signal
import threading
from types import FrameType
from typing import Any

from flowbnn.training.distributed import Terminated


class Interrupts:
    """While installed, Ctrl-C inside ``with interrupts:`` is raised at the end of that block; a second one at once.

    Outside the main thread, or where the program has its own handler, it does nothing. With ``terminate``, SIGTERM is treated in the
    same way: the launcher sends it to the processes that are left when one has died.
    """

    def __init__(self, terminate: bool) -> None:
        self.terminate = terminate
        self.former: dict[signal.Signals, Any] = {}
        self.holding = self.ending = False
        self.waiting: type[BaseException] | None = None

    def install(self) -> None:
        """Take the signals over."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.former[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        if self.terminate and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.former[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._handle)

    def remove(self) -> None:
        """Put the former handlers back."""
        for number, former in self.former.items():
            # a process that ends because another has died must still come to report it
            ignored = number == signal.SIGTERM and self.ending
            signal.signal(number, signal.SIG_IGN if ignored else former)

    def __enter__(self) -> None:
        self.holding = True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.holding = False
        if self.waiting is not None:
            raise self.waiting

    def _handle(self, number: int, frame: FrameType | None) -> None:
        wanted = KeyboardInterrupt if number == signal.SIGINT else Terminated
        if wanted is Terminated and self.ending:
            return
        self.ending = self.ending or wanted is Terminated
        if not self.holding or self.waiting is wanted:
            raise wanted
        self.waiting = self.waiting or wanted
