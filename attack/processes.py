"""Two processes train with one checkpoint, one of them is killed: the other ends with the same posterior, and nothing is left."""

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch

from attack import Budget, Tally
from attack.kills import PATIENCE, files, in_child, same, train
from flowbnn.methods import METHODS

__all__ = ["attack"]


def start(name: str, folder: Path) -> int:
    """A forked process that trains; its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(name, folder)
            code = 0
        finally:
            os._exit(code)
    return child


def attack(seed: int, budget: Budget, names: tuple[str, ...] = tuple(METHODS)) -> Tally:
    """Methods in turn."""
    tally, dice, seconds = Tally("processes", seed), random.Random(seed), dict[str, float]()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        while hasattr(os, "fork") and budget.allows(tally):
            name = names[tally.tries % len(names)]
            quiet, folder = Path(place) / name, Path(place) / "two"
            if name not in seconds:
                train(name, folder)  # what is imported late is imported once, here
                shutil.rmtree(folder)
                began = time.monotonic()
                if in_child(lambda: train(name, quiet)) != "done":  # noqa: B023
                    tally.add("failed", f"{name}: fails alone")
                    continue
                seconds[name] = time.monotonic() - began
            moment = dice.uniform(0.0, 2.0 * seconds[name])
            victim, survivor = start(name, folder), start(name, folder)
            time.sleep(moment)
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            end = time.monotonic() + PATIENCE
            while not (done := os.waitpid(survivor, os.WNOHANG))[0] and time.monotonic() < end:
                time.sleep(0.005)
            trouble = "the survivor failed" if done[1] else ""
            if not done[0]:
                os.kill(survivor, signal.SIGKILL)
                os.waitpid(survivor, 0)
                trouble = "the survivor hangs"
            if not trouble and in_child(lambda: train(name, folder)) != "done":  # clears what the victim left  # noqa: B023
                trouble = "a third run fails"
            if not trouble and not same(quiet, folder):
                trouble = "another posterior"
            if not trouble and (left := files(folder) - files(quiet)):
                trouble = f"left over: {sorted(left)[:3]}"
            tally.add(
                "failed" if trouble else "survived",
                trouble and f"{name}, one killed after {moment:.3f} s: {trouble}",
            )
            shutil.rmtree(folder, ignore_errors=True)
    return tally
