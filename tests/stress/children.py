"""Runs trials in a forked process, so that crashes, hangs and memory are measured from outside."""

import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["peak_memory", "run_in_fork"]


def run_in_fork(function: Callable[[], Any], seconds: float = 60.0) -> tuple[Any, str]:
    """Returns the result of a function that runs in a forked process, and a description of its failure.

    Args:
        function: Function without arguments whose result JSON can store.
        seconds: Seconds after which the process is killed.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        _child(function, reader, writer)
    os.close(writer)
    deadline, content = time.monotonic() + seconds, b""
    os.set_blocking(reader, False)
    while time.monotonic() < deadline:
        try:
            chunk = os.read(reader, 2**16)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        if not chunk:
            break
        content += chunk
    else:
        os.kill(process, signal.SIGKILL)
    os.close(reader)
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return None, "a hang" if number == signal.SIGKILL else f"signal {signal.Signals(number).name}"
    answer = json.loads(content or b'{"failure": "no answer"}')
    return answer.get("result"), answer.get("failure", "")


def _child(function: Callable[[], Any], reader: int, writer: int) -> None:
    """Runs the function, writes its result and ends the process."""
    os.close(reader)
    try:
        answer = {"result": function()}
    except BaseException:
        answer = {"failure": traceback.format_exc().strip().splitlines()[-1][:300]}
    with os.fdopen(writer, "wb") as file:
        file.write(json.dumps(answer).encode())
    os._exit(0)


def peak_memory() -> float:
    """Returns the largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
