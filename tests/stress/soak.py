"""Fits, predicts, saves and loads in random order, as a server does, and checks invariants after each step.

- Probabilities sum to one.
- A seed gives the same answer again, for an input alone and inside a batch.
- A saved and loaded result predicts the same.
- Fits do not change the network that they get. Predictions do not change the generator of torch.
- The numbers of open files and threads, and the memory, do not grow.
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
from tests.stress.cases import (
    FIT_ARGUMENTS,
    FITS,
    Fit,
    cached_fit,
    equal_bits,
    named_tensors,
    network,
    random_fit,
    vectors,
)
from tests.stress.fuzz import describe_error
from tests.stress.threads import answer, seeded_calls
from torch import Tensor

import flowbnn as fb

__all__ = ["stress"]


def resources() -> tuple[int, int, float]:
    """Returns the number of open files, the number of threads, and the memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return len(os.listdir("/proc/self/fd")), threading.active_count(), memory


def check_invariants(fit: Fit, rng: random.Random, folder: Path) -> Iterator[tuple[str, bool]]:
    """Runs one round with one fit. Yields each invariant and whether it holds."""
    result, seed, before = cached_fit(fit), rng.randrange(100), torch.get_rng_state()
    points = seeded_calls(fit)
    for name in rng.sample([*points], min(3, len(points))):
        point, rows = points[name], rng.randint(1, 16)
        first = answer(point, seed, rows)
        yield f"{name}: a seed gives the same answer", equal_bits(first, answer(point, seed, rows))
        yield f"{name} leaves the generator of torch unchanged", torch.equal(before, torch.get_rng_state())
    if isinstance(result, fb.Posterior):
        yield from check_predictions(result, seed)
    if hasattr(result, "save"):
        loaded = fit.load(result.save(folder / "saved.safetensors"))
        tensors = fb.Posterior.tensors if isinstance(result, fb.Posterior) else named_tensors
        yield "the loaded result equals the saved one", equal_bits(tensors(loaded), tensors(result))
    if rng.random() < 0.3:
        make_network = FIT_ARGUMENTS.get(f"flowbnn.{fit.name}.network", network)
        takes_network = "network" in inspect.signature(fit.function).parameters
        arguments = {"network": make_network()} if takes_network else {}
        repeated = fit(**arguments)
        yield (
            "a fit with the same seed is the same",
            equal_bits(named_tensors(repeated), named_tensors(result)),
        )
        if not dict(fit.settings).get("inplace"):
            original = named_tensors(make_network())
            unchanged = all(equal_bits(named_tensors(value), original) for value in arguments.values())
            yield "the network is unchanged", unchanged
    yield "no other files are written", set(os.listdir(folder)) <= {"saved.safetensors"}


def check_predictions(posterior: Any, seed: int) -> Iterator[tuple[str, bool]]:
    """Yields the invariants of predictions and whether they hold."""
    inputs = vectors(9, 3)

    def outputs(inputs: Any) -> Tensor:
        predictive = posterior.predict(inputs, 5, seed=seed)
        return predictive.probabilities if hasattr(predictive, "probabilities") else predictive.mean

    first = outputs(inputs)
    if isinstance(posterior.likelihood, fb.likelihoods.Categorical):
        sums_to_one = ((first.sum(-1) - 1).abs() < 1e-5).all() and (first >= 0).all()
        yield "probabilities sum to one", bool(sums_to_one)
    alone = torch.allclose(outputs(inputs[3:4])[0], first[3], atol=1e-5)
    yield "an input alone gets the same answer", alone
    batched = torch.allclose(outputs([inputs[:4], inputs[4:]]), first, atol=1e-5)
    yield "batches get the same answer", batched
    with contextlib.suppress(fb.FlowBNNError):
        posterior.predict(torch.full((2, 3), float("nan")))
    yield "a rejected call changes no later answer", torch.equal(outputs(inputs), first)


def stress(seed: int, budget: Budget, names: tuple[str, ...] = FITS) -> StressResult:
    """Runs rounds with random fits."""
    result, rng = StressResult("soak", seed), random.Random(seed)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        base, rounds = resources(), 0
        while budget.allows(result):
            fit = Fit(names[rounds]) if rounds < len(names) else random_fit(rng.choice(names), rng)
            rounds += 1
            try:
                for invariant, holds in check_invariants(fit, rng, Path(folder)):
                    failure = "" if holds else f"{fit}, round {rounds}: {invariant}"
                    result.add("held" if holds else "failed", failure)
            except Exception as error:
                result.add("failed", f"{fit}, round {rounds}: {describe_error(error)}")
            if rounds == 5 * len(names):
                base = resources()  # by now everything is imported and cached
        files, threads, memory = (now - then for now, then in zip(resources(), base, strict=True))
        result.maxima["MiB grown"] = round(memory, 1)
        leaks = rounds > 5 * len(names) and (files > 2 or threads > 2 or memory > 300)
        growth = f"grown by {files} files, {threads} threads, {memory:.0f} MiB"
        result.add("failed" if leaks else "held", growth if leaks else "")
    return result
