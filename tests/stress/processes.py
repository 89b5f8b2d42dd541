"""Two processes fit with one checkpoint, one of them is killed: the other ends with the same result, and nothing is left."""

import os
import random
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import random_fit
from tests.stress.interruptions import RESUMABLE, Child, files, same, train

__all__ = ["stress"]


def stress(seed: int, budget: Budget, names: tuple[str, ...] = RESUMABLE) -> StressResult:
    """Fits in turn, with settings at random."""
    result, dice = StressResult("processes", seed), random.Random(seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        while hasattr(os, "fork") and budget.allows(result):
            fit = random_fit(
                names[result.trials % len(names)], dice
            )  # what is imported late is imported once, here
            quiet, folder = Path(place) / "one", Path(place) / "two"
            began = time.monotonic()
            trouble = Child(partial(train, fit, quiet)).ended()
            moment = dice.uniform(0.0, 2.0 * (time.monotonic() - began))
            if trouble == "done":
                victim, survivor = (Child(partial(train, fit, folder)) for _ in range(2))
                victim.ended(moment)
                trouble = survivor.ended()
            if trouble == "done":
                trouble = Child(partial(train, fit, folder)).ended()  # clears what the victim left
            trouble = trouble.removesuffix("done")
            if not trouble and not same(quiet, folder):
                trouble = "another result"
            if not trouble and (left := files(folder) - files(quiet)):
                trouble = f"left over: {sorted(left)[:3]}"
            result.add(
                "failed" if trouble else "survived",
                trouble and f"{fit}, one killed after {moment:.3f} s: {trouble}",
            )
            for one in (quiet, folder):
                shutil.rmtree(one, ignore_errors=True)
    return result
