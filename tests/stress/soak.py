"""The life of a library in a server: fits, predictions, saves and loads in random order, with invariants checked after each.

Probabilities sum to one, a seed gives the same answer again, alone or among others; what is saved and loaded predicts the same; the
network that was handed in does not change, nor torch's generator by predicting; files, threads and memory do not pile up.
"""

import contextlib
import inspect
import os
import random
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import FITS, Fit, equal_bits, fitted, named_tensors, network, random_fit, vectors
from tests.stress.fuzz import describe_error
from tests.stress.threads import answer, seeded_calls
from torch import Tensor

import flowbnn as fb

__all__ = ["stress"]

GROWTH = 300  # MiB that memory may grow by, after the first rounds


def resources() -> tuple[int, int, float]:
    """Open files, threads, and MiB of memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def checks(fit: Fit, dice: random.Random, folder: Path) -> Iterator[tuple[str, bool]]:
    """One round with one fit: what must hold, and whether it does."""
    result, seed, before = fitted(fit), dice.randrange(100), torch.get_rng_state()
    known = seeded_calls(fit)
    for name in dice.sample([*known], min(3, len(known))):
        entry_point, rows = known[name], dice.randint(1, 16)
        first = answer(entry_point, seed, rows)
        yield f"{name}: a seed gives the same answer", equal_bits(first, answer(entry_point, seed, rows))
        yield f"{name} leaves torch's generator alone", torch.equal(before, torch.get_rng_state())
    if isinstance(result, fb.Posterior):
        yield from predictions(result, seed)
    if hasattr(result, "save"):
        loaded = fit.restored(result.save(folder / "saved.safetensors"))
        whole = fb.Posterior.tensors if isinstance(result, fb.Posterior) else named_tensors
        yield "loaded is as saved", equal_bits(whole(loaded), whole(result))
    if dice.random() < 0.3:
        given = {"network": network()} if "network" in inspect.signature(fit.function).parameters else {}
        again = fit(**given)
        yield "a fit with the same seed is the same", equal_bits(named_tensors(again), named_tensors(result))
        kept = network()
        yield (
            "the network handed in is unchanged",
            all(equal_bits(named_tensors(one), named_tensors(kept)) for one in given.values()),
        )
    yield "only the files asked for", set(os.listdir(folder)) <= {"saved.safetensors"}


def predictions(posterior: Any, seed: int) -> Iterator[tuple[str, bool]]:
    """What holds of predictions."""
    inputs = vectors(9, 3)

    def outputs(inputs: Any) -> Tensor:
        predictive = posterior.predict(inputs, 5, seed=seed)
        return predictive.probabilities if hasattr(predictive, "probabilities") else predictive.mean

    first = outputs(inputs)
    if isinstance(posterior.likelihood, fb.likelihoods.Categorical):
        yield (
            "probabilities sum to one",
            bool(((first.sum(-1) - 1).abs() < 1e-5).all() and (first >= 0).all()),
        )
    yield "an input gets the same answer alone", torch.allclose(outputs(inputs[3:4])[0], first[3], atol=1e-5)
    yield "nor do batches matter", torch.allclose(outputs([inputs[:4], inputs[4:]]), first, atol=1e-5)
    with contextlib.suppress(fb.FlowBNNError):
        posterior.predict(torch.full((2, 3), float("nan")))
    yield "a refused call leaves nothing behind", torch.equal(outputs(inputs), first)


def stress(seed: int, budget: Budget, names: tuple[str, ...] = FITS) -> StressResult:
    """Fits at random."""
    result, dice = StressResult("soak", seed), random.Random(seed)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        base, rounds = resources(), 0
        while budget.allows(result):
            fit = Fit(names[rounds]) if rounds < len(names) else random_fit(dice.choice(names), dice)
            rounds += 1
            try:
                for what, holds in checks(fit, dice, Path(folder)):
                    result.add(
                        "held" if holds else "failed", "" if holds else f"{fit}, round {rounds}: {what}"
                    )
            except Exception as error:
                result.add("failed", f"{fit}, round {rounds}: {describe_error(error)}")
            if rounds == 5 * len(names):
                base = resources()  # all is imported and warm
        files, threads, memory = (now - then for now, then in zip(resources(), base, strict=True))
        result.most["MiB grown"] = round(memory, 1)
        bad = rounds > 5 * len(names) and (files > 2 or threads > 2 or memory > GROWTH)
        grown = f"grown by {files} files, {threads} threads, {memory:.0f} MiB"
        result.add("failed" if bad else "held", grown if bad else "")
    return result
