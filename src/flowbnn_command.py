"""Command ``flowbnn``, in its own module so that Ctrl-C during the slow imports prints one line instead of a traceback."""

import os
import signal
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Imports the command line and runs it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    from flowbnn_studies.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()


def _exit(*_: Any) -> None:
    os.write(2, b"flowbnn: interrupted\n")  # an exception could be caught and replaced by torch's import
    os._exit(130)


if __name__ == "__main__":
    main()
