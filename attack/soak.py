"""The life of a library in a server: fits, predictions, saves and loads in random order, with invariants checked after each.

Probabilities sum to one, a seed gives the same answer again, alone or among others; what is saved and loaded predicts the same; the
network that was handed in does not change, nor torch's generator by predicting; files, threads and memory do not pile up.
"""

import os
import random
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import flowbnn as fb
from attack import Budget, Tally
from attack.fuzz import fitted, loader, network, small, vectors
from flowbnn.methods import METHODS

__all__ = ["attack"]

GROWTH = 300  # MiB that memory may grow by, after the first rounds


def resources() -> tuple[int, int, float]:
    """Open files, threads, and MiB of memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def checks(name: str, dice: random.Random, folder: Path) -> Iterator[tuple[str, bool]]:
    """One round with one method: what must hold, and whether it does."""
    posterior, inputs, seed = fitted(name), vectors(9, 3), dice.randrange(100)
    before = torch.get_rng_state()
    first = posterior.predict(inputs, 5, seed=seed).probabilities
    yield "prediction leaves torch's generator alone", torch.equal(before, torch.get_rng_state())
    yield "probabilities sum to one", bool(((first.sum(-1) - 1).abs() < 1e-5).all() and (first >= 0).all())
    yield (
        "a seed gives the same answer",
        torch.equal(first, posterior.predict(inputs, 5, seed=seed).probabilities),
    )
    alone = posterior.predict(inputs[3:4], 5, seed=seed).probabilities
    yield "an input gets the same answer alone", torch.allclose(alone[0], first[3], atol=1e-5)
    batches = [inputs[:4], inputs[4:]]
    yield (
        "nor do batches matter",
        torch.allclose(posterior.predict(batches, 5, seed=seed).probabilities, first, atol=1e-5),
    )
    loaded = fb.load_posterior(posterior.save(folder / f"{name}.safetensors"), network())
    yield "loaded is as saved", torch.equal(loaded.predict(inputs, 5, seed=seed).probabilities, first)
    try:
        posterior.predict(torch.full((2, 3), float("nan")))
    except fb.FlowBNNError:
        again = posterior.predict(inputs, 5, seed=seed).probabilities
        yield "a refused call leaves nothing behind", torch.equal(again, first)
    if dice.random() < 0.3:
        given, kept = network(), [value.clone() for value in network().parameters()]
        more = {"validation": loader()} if name == "temperature" else {}
        small(name).fit(given, loader(), seed=seed, progress=False, **more)
        yield "the network handed in is unchanged", all(map(torch.equal, given.parameters(), kept))
    yield (
        "only the files asked for",
        set(os.listdir(folder)) <= {f"{method}.safetensors" for method in METHODS},
    )


def attack(seed: int, budget: Budget, names: tuple[str, ...] = tuple(METHODS)) -> Tally:
    """Methods at random."""
    tally, dice = Tally("soak", seed), random.Random(seed)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        base, rounds = resources(), 0
        while budget.allows(tally):
            name = names[rounds] if rounds < len(names) else dice.choice(names)
            rounds += 1
            for what, holds in checks(name, dice, Path(folder)):
                tally.add("held" if holds else "failed", "" if holds else f"{name}, round {rounds}: {what}")
            if rounds == len(names):
                base = resources()  # all is imported and warm
        files, threads, memory = (now - then for now, then in zip(resources(), base, strict=True))
        tally.most["MiB grown"] = round(memory, 1)
        bad = rounds > len(names) and (files > 2 or threads > 2 or memory > GROWTH)
        grown = f"grown by {files} files, {threads} threads, {memory:.0f} MiB"
        tally.add("failed" if bad else "held", grown if bad else "")
    return tally
