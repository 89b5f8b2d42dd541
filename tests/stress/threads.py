"""Calls the methods of several fits, and their networks, from eight threads. Each answer must equal that of a single thread.

The calls are those that take a ``seed``: methods of the result of a fit, and public functions of a posterior.
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
    cached_fit,
    loader,
    named_tensors,
    public_names,
    random_fit,
    small_settings,
    vectors,
)
from tests.stress.entry_points import EntryPoint, entry_points_of_fit
from tests.stress.fuzz import describe_error
from torch import Tensor

import flowbnn as fb
from flowbnn.noise import noise_layers, noise_mode

__all__ = ["answer", "seeded_calls", "stress"]

NUM_THREADS = 8
GROUP_SIZE = 3  # fits that are used at the same time
WEIGHTS = {"predict": 20, "sample": 6, "network": 6}  # how often a call is chosen; 1 for all others


@lru_cache(maxsize=64)
def seeded_calls(fit: Fit) -> dict[str, EntryPoint]:
    """Returns the calls with a seed that the result of a fit supports, by name."""
    points = {point.name.split(".")[-1]: point for point in entry_points_of_fit(fit)}
    if isinstance(cached_fit(fit), fb.Posterior):
        for full_name, thing in public_names():
            name = full_name.split(".")[-1]
            # fits seed the global generator, which predictions leave as it is; figures stay open until they are closed
            if name in FITS or full_name.startswith("flowbnn.plots"):
                continue
            if inspect.isfunction(thing) and "posterior" in inspect.signature(thing).parameters:
                arguments: dict[str, Any] = {
                    "loader": partial(loader, 8, fit.regression),
                    f"{name}.posterior": partial(cached_fit, fit),
                }
                arguments[f"{name}.fit"] = lambda: lambda batches: cached_fit(fit)
                if thing is not fb.diagnostics.noise_chains:
                    arguments[f"{name}.chains"] = partial(chains, fit)
                points[name] = EntryPoint(full_name, thing, arguments)
        points["network"] = EntryPoint("network", partial(use_network, cached_fit(fit)))
    points = {name: point for name, point in points.items() if "seed" in point.parameters}
    return {name: point for name, point in points.items() if is_supported(point)}


@lru_cache(maxsize=64)
def chains(fit: Fit) -> Any:
    """Returns short chains of the noise of a fit."""
    function = fb.diagnostics.noise_chains
    return function(cached_fit(fit), loader(8, fit.regression), **small_settings(function))


def is_supported(point: EntryPoint) -> bool:
    """Returns whether a call succeeds. Not every posterior supports every call."""
    try:
        answer(point, 0, 2)
    except fb.FlowBNNError:
        return False
    return True


def answer(point: EntryPoint, seed: int, rows: int) -> dict[str, Tensor]:
    """Returns the numbers of the result of one call.

    Args:
        point: Entry point to call.
        seed: Seed of the call.
        rows: Number of rows of the inputs.
    """
    arguments = point.arguments() | small_settings(point.function) | {"seed": seed}
    if "inputs" in point.parameters:
        arguments["inputs"] = vectors(16, 3)[:rows]
    if "progress" in point.parameters:
        arguments["progress"] = False
    return named_tensors(point.call(arguments))


def use_network(posterior: Any, inputs: Tensor, seed: int) -> Any:
    """Calls the network of a posterior and, for a seed above 0, copies it."""
    model = posterior.model
    with torch.no_grad(), noise_mode(model, "off") if noise_layers(model) else nullcontext():
        outputs = model(inputs.to(next(model.parameters()).dtype))
    return outputs, (deepcopy(model) if seed else model).state_dict()


def stress(seed: int, budget: Budget, names: tuple[str, ...] = FITS, calls: int = 48) -> StressResult:
    """Runs groups of up to three fits, first with their defaults, then with random settings, and 48 calls in each of 8 threads.

    The calls of a group run at the same time, because posteriors may share state of torch that no lock of theirs protects.
    """
    result, rng = StressResult("threads", seed), random.Random(seed)
    warnings.simplefilter("ignore")
    number = 0
    while budget.allows(result):
        group: dict[str, dict[str, EntryPoint]] = {}
        for _ in range(min(GROUP_SIZE, len(names))):
            name = names[number % len(names)]
            fit = Fit(name) if number < len(names) else random_fit(name, rng)
            number += 1
            try:
                group[str(fit)] = seeded_calls(fit)
            except Exception as error:
                result.add("failed", f"{fit}: {describe_error(error)}")
        if group:
            run_calls(result, group, rng, calls)
    return result


def run_calls(
    result: StressResult, group: dict[str, dict[str, EntryPoint]], rng: random.Random, calls: int
) -> None:
    """Runs random calls of several fits in all threads, and adds the outcomes.

    Args:
        result: Outcomes of the suite.
        group: Calls by name, for each fit.
        rng: Generator of the choices.
        calls: Number of different calls.
    """
    chosen = []
    for _ in range(calls):
        fit = rng.choice([*group])
        weights = [WEIGHTS.get(name, 1) for name in group[fit]]
        name = rng.choices([*group[fit]], weights)[0]
        chosen.append((fit, name, rng.randrange(5), rng.randint(1, 16)))
    expected = {call: answer(group[call[0]][call[1]], *call[2:]) for call in set(chosen)}
    repeated = [call for call in chosen for _ in range(NUM_THREADS)]
    rng.shuffle(repeated)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [pool.submit(answer, group[call[0]][call[1]], *call[2:]) for call in repeated]
    for call, future in zip(repeated, futures, strict=True):
        exception = future.exception()
        failure = describe_error(exception) if exception else difference(future.result(), expected[call])
        others = ", ".join(fit for fit in group if fit != call[0])
        result.add("failed" if failure else "right", failure and f"{call} beside {others}: {failure}")


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> str:
    """Returns a description of the difference of two answers, empty if they differ only by rounding."""
    if first.keys() != second.keys() or any(first[key].shape != second[key].shape for key in first):
        return "another kind of answer"
    largest = max(
        (
            float((first[key].double() - second[key].double()).abs().nan_to_num().max())
            for key in first
            if first[key].numel()
        ),
        default=0.0,
    )
    return f"a difference of {largest:.2g}" if largest > 1e-5 else ""
