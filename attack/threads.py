"""Eight threads that predict from one posterior and use its network at once: each answer is the one that a single thread gets."""

import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from attack import Budget, Tally
from attack.fuzz import fitted, vectors
from flowbnn.methods import METHODS
from flowbnn.noise import noise_layers, noise_mode

__all__ = ["attack"]

THREADS, CALLS = 8, 48


def answer(name: str, case: tuple[int, int, str]) -> Tensor:
    """The probabilities of one case: a seed, a number of inputs, and a call."""
    seed, rows, call = case
    posterior, inputs = fitted(name), vectors(16, 3)[:rows]
    if call == "sample":
        with torch.no_grad():
            return torch.softmax(posterior.sample(seed).eval()(inputs), -1)
    if call == "network":
        own = posterior.model
        with torch.no_grad(), noise_mode(own, "off") if noise_layers(own) else nullcontext():
            outputs = own(inputs).flatten().double()
        weights = deepcopy(own).state_dict() if seed else own.state_dict()
        return torch.cat([outputs, *(value.flatten().double() for value in weights.values())])
    return posterior.predict(inputs, 6, seed=seed, progress=False).probabilities


def attack(seed: int, budget: Budget, names: tuple[str, ...] = tuple(METHODS), calls: int = CALLS) -> Tally:
    """Methods in turn, 48 calls of 8 threads each."""
    tally, dice = Tally("threads", seed), random.Random(seed)
    warnings.simplefilter("ignore")
    round_number = 0
    while budget.allows(tally):
        name = names[round_number % len(names)]
        round_number += 1
        cases = [
            (dice.randrange(5), dice.randint(1, 16), dice.choice(["predict"] * 3 + ["sample", "network"]))
            for _ in range(calls)
        ]
        right = {case: answer(name, case) for case in set(cases)}
        with ThreadPoolExecutor(THREADS) as pool:
            given = [pool.submit(partial(answer, name), case) for case in cases for _ in range(THREADS)]
        asked = [case for case in cases for _ in range(THREADS)]
        for case, future in zip(asked, given, strict=True):
            error = future.exception()
            if error is not None:
                tally.add("failed", f"{name} {case}: {type(error).__name__}: {error}")
                continue
            off = float((future.result() - right[case]).abs().max())
            tally.add(
                "failed" if off > 1e-5 else "right", f"{name} {case}: off by {off:.2g}" if off > 1e-5 else ""
            )
    return tally
