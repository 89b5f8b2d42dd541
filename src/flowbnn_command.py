"""The command ``flowbnn``, outside the packages, whose import takes seconds: Ctrl-C ends them in one line."""

import os
import signal
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Import the command line and run it."""
    former = signal.getsignal(signal.SIGINT)
    if former is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    from flowbnn_studies.cli import main as run

    signal.signal(signal.SIGINT, former)
    run()


def _stop(*_: Any) -> None:
    os.write(2, b"flowbnn: interrupted\n")  # no exception, which torch's import might turn into another one
    os._exit(130)


if __name__ == "__main__":
    main()
