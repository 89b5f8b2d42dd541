"""Runs a fit in two processes with one checkpoint and kills one of them. The other must return the same result and leave no file."""

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
from tests.stress.interruptions import RESUMABLE, Child, compare_folders, train

__all__ = ["stress"]


def stress(seed: int, budget: Budget, names: tuple[str, ...] = RESUMABLE) -> StressResult:
    """Runs each fit in turn, with random settings."""
    result, rng = StressResult("processes", seed), random.Random(seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        while hasattr(os, "fork") and budget.allows(result):
            # it fits once here, so that late imports are done in the parent
            fit = random_fit(names[result.trials % len(names)], rng)
            reference, folder = Path(root) / "one", Path(root) / "two"
            start = time.monotonic()
            outcome = Child(partial(train, fit, reference)).join()
            moment = rng.uniform(0.0, 2.0 * (time.monotonic() - start))
            if outcome == "done":
                victim, survivor = (Child(partial(train, fit, folder)) for _ in range(2))
                victim.join(moment)
                outcome = survivor.join()
            if outcome == "done":
                outcome = Child(partial(train, fit, folder)).join()  # removes what the killed process left
            failure = compare_folders(reference, folder) if outcome == "done" else outcome
            result.add(
                "failed" if failure else "survived",
                failure and f"{fit}, one process killed after {moment:.3f} s: {failure}",
            )
            for path in (reference, folder):
                shutil.rmtree(path, ignore_errors=True)
    return result
