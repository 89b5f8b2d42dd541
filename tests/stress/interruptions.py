"""Kills checkpointed fits at random moments and resumes them. The result must be the same to the bit, and no file may be left over.

Children are forked from a process that has imported torch. The parent kills them with SIGKILL after a random time, or they kill
themselves just before or after a file is replaced. Without ``fork`` nothing is run.
"""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import FITS, Fit, equal_bits, named_tensors, random_fit
from tests.stress.fuzz import describe_error

from flowbnn.training import load_tensors, save_tensors

__all__ = ["RESUMABLE", "Child", "compare_folders", "stress", "train"]

RESUMABLE = tuple(name for name in FITS if Fit(name).has_checkpoint)
TIMEOUT = 60.0  # seconds that a child may take


def train(fit: Fit, folder: Path, prepare: Callable[[], None] | None = None) -> None:
    """Runs or resumes a fit with a checkpoint and saves its result.

    Args:
        fit: Fit to run.
        folder: Folder of the checkpoint and the result.
        prepare: Function to call first.
    """
    if prepare is not None:
        prepare()
    torch.manual_seed(os.getpid())  # a resumed fit must not depend on the state of the first process
    result = fit(checkpoint=folder / "run", checkpoint_every=2, resume=True)
    save_tensors(folder / "result.safetensors", named_tensors(result), {})


def kill_at_replace(number: int, after: bool) -> Callable[[], None]:
    """Returns a function that makes this process kill itself when it replaces a file.

    Args:
        number: Number of replaced files before that, counted from 0.
        after: If True, the process dies just after the replacement instead of just before.
    """

    def prepare() -> None:
        replace, countdown = os.replace, iter(range(number, -1, -1))

        def replace_and_die(source: str, target: str) -> None:
            is_last = next(countdown, -1) == 0
            if is_last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace_and_die  # type: ignore[assignment]

    return prepare


@dataclass
class Child:
    """Forked process that calls a function. A description of its exception comes back through a pipe.

    Args:
        function: Function to call.
    """

    function: Callable[[], None]

    def __post_init__(self) -> None:
        self.pipe, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self.function()
                code = 0
            except BaseException as error:
                os.write(write_end, describe_error(error).encode())
            finally:
                os._exit(code)
        os.close(write_end)

    def join(self, seconds: float = TIMEOUT) -> str:
        """Waits for the process and kills it after a number of seconds.

        Returns:
            ``"done"``, ``"killed"``, or a description of the exception.
        """
        end = time.monotonic() + seconds
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                done = os.waitpid(self.pid, 0)
                break
            time.sleep(0.001)
        with os.fdopen(self.pipe, "rb") as pipe:
            reason = pipe.read().decode()
        return "killed" if os.WIFSIGNALED(done[1]) else reason if os.WEXITSTATUS(done[1]) else "done"


def files(folder: Path) -> set[str]:
    """Returns the relative paths of everything in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def compare_folders(reference: Path, folder: Path) -> str:
    """Returns the difference of two folders of fits: other numbers or left-over files. It is empty if there is none."""
    results = [load_tensors(path / "result.safetensors")[0] for path in (reference, folder)]
    if not equal_bits(*results):
        return "the result differs"
    extra = files(folder) - files(reference)
    return f"files left over: {sorted(extra)[:3]}" if extra else ""


def stress(seed: int, budget: Budget, names: tuple[str, ...] = RESUMABLE) -> StressResult:
    """Runs each fit in turn, with random settings, and interrupts it one to eight times."""
    result, rng = StressResult("interruptions", seed), random.Random(seed)
    if not hasattr(os, "fork"):
        return result
    torch.set_num_threads(1)
    while budget.allows(result):
        # it fits once here, so that late imports are done before the time is measured
        fit = random_fit(names[result.trials % len(names)], rng)
        with tempfile.TemporaryDirectory() as root:
            reference, folder = Path(root) / "uninterrupted", Path(root) / "interrupted"
            start = time.monotonic()
            outcome = Child(partial(train, fit, reference)).join()
            if outcome != "done":
                result.add("failed", f"{fit}, not interrupted: {outcome}")
                continue
            kills, plan = interrupt(fit, folder, time.monotonic() - start, rng)
            outcome = Child(partial(train, fit, folder)).join()
            failure = compare_folders(reference, folder) if outcome == "done" else f"the last run: {outcome}"
            result.counts["kills"] = result.counts.get("kills", 0) + kills
            result.add("failed" if failure else "resumed", failure and f"{fit}, killed {plan}: {failure}")
    return result


def interrupt(fit: Fit, folder: Path, seconds: float, rng: random.Random) -> tuple[int, list[str]]:
    """Starts a fit one to eight times and kills it each time.

    Args:
        fit: Fit to run.
        folder: Folder of the checkpoint.
        seconds: Time of an uninterrupted fit.
        rng: Random number generator.

    Returns:
        Number of processes that were killed, and the moments chosen for it.
    """
    kills, plan = 0, []
    for _ in range(rng.randint(1, 8)):
        number, after, moment = rng.randrange(12), rng.random() < 0.5, rng.uniform(0.0, seconds)
        at_replace = rng.random() < 0.4
        plan.append(f"{'after' if after else 'before'} file {number}" if at_replace else f"{moment:.3f} s")
        prepare = kill_at_replace(number, after) if at_replace else None
        child = Child(partial(train, fit, folder, prepare))
        kills += child.join(TIMEOUT if at_replace else moment) == "killed"
    return kills, plan
