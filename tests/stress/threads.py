"""Eight threads that ask one result and use its network at once: each answer is the one that a single thread gets.

Asked is whatever takes a ``seed``: methods of what a fit gives, and public functions of a posterior.
"""

import inspect
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any

import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import (
    FITS,
    Fit,
    fitted,
    loader,
    named_tensors,
    public,
    random_fit,
    small_settings,
    vectors,
)
from tests.stress.entry_points import EntryPoint, results_of
from tests.stress.fuzz import describe_error
from torch import Tensor

import flowbnn as fb
from flowbnn.noise import noise_layers, noise_mode

__all__ = ["answer", "seeded_calls", "stress"]

THREADS, CALLS = 8, 48
OFTEN = {
    "predict": 20,
    "sample": 6,
    "network": 6,
}  # what users ask, so many times as often as other seeded_calls


@lru_cache(maxsize=64)
def seeded_calls(fit: Fit) -> dict[str, EntryPoint]:
    """What can be asked of a fit's result, with a seed."""
    asked = {entry_point.name.split(".")[-1]: entry_point for entry_point in results_of(fit)}
    if isinstance(fitted(fit), fb.Posterior):
        for name, thing in public():
            if inspect.isfunction(thing) and "posterior" in inspect.signature(thing).parameters:
                last = name.split(".")[-1]
                data: dict[str, Any] = {
                    "loader": partial(loader, 8, fit.real),
                    f"{last}.posterior": partial(fitted, fit),
                }
                data[f"{last}.fit"] = lambda: lambda batches: fitted(fit)
                if thing is not fb.diagnostics.noise_chains:
                    data[f"{last}.chains"] = partial(chains, fit)
                asked[last] = EntryPoint(name, thing, data)
        asked["network"] = EntryPoint("network", partial(used, fitted(fit)))
    asked = {name: entry_point for name, entry_point in asked.items() if "seed" in entry_point.parameters}
    return {name: entry_point for name, entry_point in asked.items() if answers(entry_point)}


@lru_cache(maxsize=64)
def chains(fit: Fit) -> Any:
    """A small_settings steps of chains."""
    make = fb.diagnostics.noise_chains
    return make(fitted(fit), loader(8, fit.real), **small_settings(make))


def answers(entry_point: EntryPoint) -> bool:
    """Whether it does: not of every posterior there is all to be known."""
    try:
        answer(entry_point, 0, 2)
    except fb.FlowBNNError:
        return False
    return True


def answer(entry_point: EntryPoint, seed: int, rows: int) -> dict[str, Tensor]:
    """The named_tensors of one answer."""
    arguments = entry_point.arguments() | small_settings(entry_point.function) | {"seed": seed}
    if "inputs" in entry_point.parameters:
        arguments["inputs"] = vectors(16, 3)[:rows]
    if "progress" in entry_point.parameters:
        arguments["progress"] = False
    return named_tensors(entry_point.call(arguments))


def used(posterior: Any, inputs: Tensor, seed: int) -> Any:
    """The posterior's own network, called and copied."""
    own = posterior.model
    with torch.no_grad(), noise_mode(own, "off") if noise_layers(own) else nullcontext():
        outputs = own(inputs.to(next(own.parameters()).dtype))
    return outputs, (deepcopy(own) if seed else own).state_dict()


def stress(seed: int, budget: Budget, names: tuple[str, ...] = FITS, calls: int = CALLS) -> StressResult:
    """Fits in turn, the first time as they are, then with settings at random: 48 calls of 8 threads each."""
    result, dice = StressResult("threads", seed), random.Random(seed)
    warnings.simplefilter("ignore")
    number = 0
    while budget.allows(result):
        name = names[number % len(names)]
        fit = Fit(name) if number < len(names) else random_fit(name, dice)
        number += 1
        try:
            known = seeded_calls(fit)
        except Exception as error:
            result.add("failed", f"{fit}: {describe_error(error)}")
            continue
        often = [OFTEN.get(name, 1) for name in known]
        cases = [
            (dice.choices([*known], often)[0], dice.randrange(5), dice.randint(1, 16)) for _ in range(calls)
        ]
        right = {case: answer(known[case[0]], *case[1:]) for case in set(cases)}
        asked = [case for case in cases for _ in range(THREADS)]
        with ThreadPoolExecutor(THREADS) as pool:
            given = [pool.submit(answer, known[case[0]], *case[1:]) for case in asked]
        for case, future in zip(asked, given, strict=True):
            broken = future.exception()
            wrong = describe_error(broken) if broken else apart(future.result(), right[case])
            result.add("failed" if wrong else "right", wrong and f"{fit} {case}: {wrong}")
    return result


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """By how much two answers differ, if by more than rounding."""
    if one.keys() != other.keys() or any(one[key].shape != other[key].shape for key in one):
        return "another kind of answer"
    off = max(
        (
            float((one[key].double() - other[key].double()).abs().nan_to_num().max())
            for key in one
            if one[key].numel()
        ),
        default=0.0,
    )
    return f"off by {off:.2g}" if off > 1e-5 else ""
