"""Trainings of every method, killed by SIGKILL at random moments and resumed: the same posterior to the bit, and no file left.

Children are forked from a process that has imported torch, and killed by their parent after a random time, or by themselves just
before or after a file takes its place. Where fork is not to be had, nothing is tried.
"""

import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import flowbnn as fb
from attack import Budget, Tally
from attack.fuzz import network, small, vectors
from flowbnn.methods import METHODS
from flowbnn.training import load_tensors

__all__ = ["attack", "in_child", "same", "train"]

MOST = 4  # kills of one training
PATIENCE = 60.0  # seconds for a child


def train(name: str, folder: Path) -> None:
    """One training with a checkpoint, which goes on where an earlier one stopped; saves what it returns."""
    torch.manual_seed(os.getpid())  # a resumed run must not need the state of the process before
    source = torch.Generator().manual_seed(3)
    loader = fb.data.TensorLoader(
        vectors(24, 3), torch.arange(24) % 2, batch_size=4, shuffle=True, generator=source
    )
    more = {"validation": loader} if name == "temperature" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = {
            "seed": 0,
            "checkpoint": folder / "run",
            "checkpoint_every": 2,
            "resume": True,
            "progress": False,
        }
        posterior = small(name).fit(network(), loader, **run, **more)
    posterior.save(folder / "result.safetensors")


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


def in_child(
    work: Callable[[], None], seconds: float = PATIENCE, prepare: Callable[[], None] | None = None
) -> str:
    """Run in a forked process that is killed after some seconds: ``"done"``, ``"killed"`` or ``"failed"``."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if prepare is not None:
                prepare()
            work()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "killed" if os.WIFSIGNALED(status) else "failed" if os.WEXITSTATUS(status) else "done"
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "killed"
        time.sleep(0.001)


def files(folder: Path) -> set[str]:
    """All that lies in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def same(one: Path, other: Path) -> bool:
    """Whether two posteriors have the same tensors, to the bit."""
    left, right = (load_tensors(folder / "result.safetensors")[0] for folder in (one, other))
    return left.keys() == right.keys() and all(
        left[key].numpy().tobytes() == right[key].numpy().tobytes() for key in left
    )


def attack(seed: int, budget: Budget, names: tuple[str, ...] = tuple(METHODS)) -> Tally:
    """Methods in turn, each with one to four kills."""
    tally, dice = Tally("kills", seed), random.Random(seed)
    if not hasattr(os, "fork"):
        return tally
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        peaceful: dict[str, tuple[Path, float]] = {}
        while budget.allows(tally):
            name = names[tally.tries % len(names)]
            if name not in peaceful:
                train(name, Path(place) / "first")  # what is imported late is imported before the clock runs
                shutil.rmtree(Path(place) / "first")
                began, folder = time.monotonic(), Path(place) / f"{name}-peaceful"
                if in_child(lambda: train(name, folder)) != "done":  # noqa: B023
                    tally.add("failed", f"{name}: fails without a kill")
                    return tally
                peaceful[name] = folder, time.monotonic() - began
            quiet, seconds = peaceful[name]
            folder, kills, plan = Path(place) / f"{name}-killed", 0, []
            for _ in range(dice.randint(1, MOST)):
                number, after, moment = dice.randrange(12), dice.random() < 0.5, dice.uniform(0.0, seconds)
                inside = dice.random() < 0.4
                plan.append(
                    f"{'after' if after else 'before'} file {number}" if inside else f"{moment:.3f} s"
                )
                prepare = die_writing(number, after) if inside else None
                ended = in_child(lambda: train(name, folder), PATIENCE if inside else moment, prepare)  # noqa: B023
                kills += ended == "killed"
            ended = in_child(lambda: train(name, folder))  # noqa: B023
            trouble = "" if ended == "done" else f"the last run {ended}"
            if not trouble and not same(quiet, folder):
                trouble = "another posterior"
            left = files(folder) - files(quiet)
            if not trouble and left:
                trouble = f"left over: {sorted(left)[:3]}"
            tally.counts["kills"] = tally.counts.get("kills", 0) + kills
            tally.add("failed" if trouble else "resumed", trouble and f"{name}, killed {plan}: {trouble}")
            shutil.rmtree(folder, ignore_errors=True)
    return tally
