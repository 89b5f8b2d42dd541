"""Interrupted runs: deferred Ctrl-C and SIGTERM, so that a signal never splits an update of the weights, and the last save."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from flowbnn.batches import batch_size
from flowbnn.errors import FlowBNNError


class Terminated(RuntimeError):
    """Raised when this process receives SIGTERM during a training run."""


class Interrupts:
    """Signal handlers that can defer Ctrl-C to the end of a block.

    Inside :meth:`defer` a first Ctrl-C is raised at the end of the block, a second one at once. Outside of it, every Ctrl-C is
    raised at once. No handler is installed outside the main thread, or if the program has its own handlers.

    Args:
        terminate: If True, SIGTERM is handled in the same way. torchrun sends it to the remaining processes when one has died.

    Attributes:
        pending: Exception class of a deferred signal, or None.
        is_ending: True once the process is ending because of SIGTERM or the death of another process.
    """

    def __init__(self, terminate: bool) -> None:
        self.terminate = terminate
        self.handlers: dict[signal.Signals, Any] = {}  # the previous handlers
        self.is_deferring = self.is_ending = False
        self.pending: type[BaseException] | None = None

    def install(self) -> None:
        """Installs the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        if self.terminate and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._handle)

    def remove(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self.handlers.items():
            # SIGTERM must not end a process before it has reported the death of another one
            is_ignored = number == signal.SIGTERM and self.is_ending
            signal.signal(number, signal.SIG_IGN if is_ignored else handler)

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Context manager that raises a first signal at its end."""
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False
            if self.pending is not None:
                raise self.pending

    def _handle(self, number: int, frame: FrameType | None) -> None:
        kind = KeyboardInterrupt if number == signal.SIGINT else Terminated
        if kind is Terminated and self.is_ending:
            return
        self.is_ending = self.is_ending or kind is Terminated
        if not self.is_deferring or self.pending is kind:
            raise kind
        self.pending = self.pending or kind


def explain_interruption(run: Any, error: BaseException, interrupts: Interrupts) -> None:
    """Saves the last complete step of an interrupted run and prints the path, or raises a clearer error.

    Args:
        run: :class:`~flowbnn.training.loop.TrainingRun` that has ended.
        error: Exception that ended it.
        interrupts: Signal handlers of the run.
    """
    position = run.position
    was_ending, interrupts.is_ending = interrupts.is_ending, True  # from here on SIGTERM changes nothing
    lost_worker = run.process.describe_lost_worker(error)
    message = f"{lost_worker} {position}; {_save_and_describe(run)}" if lost_worker else ""
    interrupts.is_ending = was_ending or lost_worker is not None
    if "more than 1 value per channel" in str(error) and batch_size(run.batch) == 1:
        message = (
            f"epoch {position.epoch + 1}, batch {position.batches + 1} has one example, and BatchNorm needs at least 2; use "
            "drop_last=True or another batch size"
        )
    if message:
        raise FlowBNNError(message, kind="worker lost" if lost_worker else "batch") from error
    if isinstance(error, KeyboardInterrupt) and run.path is not None and run.is_main:
        message = f"flowbnn: interrupted in epoch {position.epoch + 1}; {_save_and_describe(run)}"
        print(message, file=sys.stderr)


def _save_and_describe(run: Any) -> str:
    """Saves the last complete step, unless an update was interrupted, and returns a sentence about the file."""
    try:
        if not run.is_updating:
            run.save()
    except FlowBNNError as error:
        return str(error)
    if run.path is None or not run.path.exists() or (run.is_main and run.state.saved_step is None):
        return "nothing was saved"
    return f"saved to '{run.path}'; continue with resume=True (flowbnn run: --resume)"
