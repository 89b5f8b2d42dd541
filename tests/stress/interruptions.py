"""Every fit with a checkpoint, killed by SIGKILL at random moments and resumed: the same result to the bit, and no file left.

Children are forked from a process that has imported torch, and killed by their parent after a random time, or by themselves just
before or after a file takes its place. Where fork is not to be had, nothing is try_call.
"""

import os
import random
import shutil
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

__all__ = ["RESUMABLE", "Child", "same", "stress", "train"]

RESUMABLE = tuple(name for name in FITS if Fit(name).saves)

MOST = 8  # kills of one training
PATIENCE = 60.0  # seconds for a child


def train(fit: Fit, folder: Path, prepare: Callable[[], None] | None = None) -> None:
    """One fit with a checkpoint, which goes on where an earlier one stopped; saves what it returns."""
    if prepare is not None:
        prepare()
    torch.manual_seed(os.getpid())  # a resumed run must not need the state of the process before
    result = fit(checkpoint=folder / "run", checkpoint_every=2, resume=True)
    save_tensors(folder / "result.safetensors", named_tensors(result), {})


def die_writing(number: int, after: bool) -> Callable[[], None]:
    """Let this process die just before or after the file of this number takes its place."""

    def prepare() -> None:
        replace, left = os.replace, iter(range(number, -1, -1))

        def deadly(source: str, target: str) -> None:
            mine = next(left, -1) == 0
            if mine and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = deadly  # type: ignore[assignment]

    return prepare


@dataclass
class Child:
    """A forked process that does some work; what it dies of comes back through a pipe."""

    work: Callable[[], None]

    def __post_init__(self) -> None:
        self.pipe, writing = os.pipe()
        self.number = os.fork()
        if self.number == 0:
            code = 1
            try:
                self.work()
                code = 0
            except BaseException as error:
                os.write(writing, describe_error(error).encode())
            finally:
                os._exit(code)
        os.close(writing)

    def ended(self, seconds: float = PATIENCE) -> str:
        """``"done"``, ``"killed"``, which it is after so many seconds, or what it died of."""
        end = time.monotonic() + seconds
        while not (done := os.waitpid(self.number, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(self.number, signal.SIGKILL)
                done = os.waitpid(self.number, 0)
                break
            time.sleep(0.001)
        with os.fdopen(self.pipe, "rb") as pipe:
            reason = pipe.read().decode()
        return "killed" if os.WIFSIGNALED(done[1]) else reason if os.WEXITSTATUS(done[1]) else "done"


def files(folder: Path) -> set[str]:
    """All that lies in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def same(one: Path, other: Path) -> bool:
    """Whether two results have the same named_tensors, to the bit."""
    return equal_bits(*(load_tensors(folder / "result.safetensors")[0] for folder in (one, other)))


def stress(seed: int, budget: Budget, names: tuple[str, ...] = RESUMABLE) -> StressResult:
    """Fits in turn, with settings at random, each with one to eight kills."""
    result, dice = StressResult("kills", seed), random.Random(seed)
    if not hasattr(os, "fork"):
        return result
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        while budget.allows(result):
            fit = random_fit(
                names[result.trials % len(names)], dice
            )  # what is imported late is imported before the clock runs
            quiet, folder = Path(place) / "peaceful", Path(place) / "killed"
            began, kills, plan = time.monotonic(), 0, []
            ended = Child(partial(train, fit, quiet)).ended()
            if ended != "done":
                result.add("failed", f"{fit}, not killed: {ended}")
                continue
            seconds = time.monotonic() - began
            for _ in range(dice.randint(1, MOST)):
                number, after, moment = dice.randrange(12), dice.random() < 0.5, dice.uniform(0.0, seconds)
                inside = dice.random() < 0.4
                plan.append(
                    f"{'after' if after else 'before'} file {number}" if inside else f"{moment:.3f} s"
                )
                prepare = die_writing(number, after) if inside else None
                work = partial(train, fit, folder, prepare)
                kills += Child(work).ended(PATIENCE if inside else moment) == "killed"
            ended = Child(partial(train, fit, folder)).ended()
            trouble = "" if ended == "done" else f"the last run: {ended}"
            if not trouble and not same(quiet, folder):
                trouble = "another result"
            left = files(folder) - files(quiet)
            if not trouble and left:
                trouble = f"left over: {sorted(left)[:3]}"
            result.counts["kills"] = result.counts.get("kills", 0) + kills
            result.add("failed" if trouble else "resumed", trouble and f"{fit}, killed {plan}: {trouble}")
            for one in (quiet, folder):
                shutil.rmtree(one, ignore_errors=True)
    return result
