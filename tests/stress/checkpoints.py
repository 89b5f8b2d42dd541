"""Resumes from checkpoints and loads files in which one tensor has another shape, another dtype or NaN, with a valid checksum.

Each must be refused in one line. A process that crashes, hangs or accepts the file is a failure.
"""

import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import FITS, Fit, cached_fit
from tests.stress.children import run_in_fork
from torch import Tensor

import flowbnn as fb
from flowbnn.training import load_tensors, save_tensors

__all__ = ["stress"]

FORGERIES: dict[str, Callable[[Tensor], Tensor]] = {
    "no numbers": lambda tensor: tensor.new_zeros(0),
    "one number": lambda tensor: tensor.new_ones(1),
    "no axes": lambda tensor: tensor.new_ones(()),
    "one number more": lambda tensor: tensor.new_ones(tensor.numel() + 1),
    "one axis more": lambda tensor: tensor.unsqueeze(0).repeat(2, *(1,) * tensor.ndim),
    "another dtype": lambda tensor: tensor.to(torch.int16),
    "NaN": lambda tensor: torch.full_like(tensor, torch.nan),
}


def forgeries(path: Path) -> Iterator[tuple[str, str, Callable[[], Path]]]:
    """Yields the name of every tensor of a file with the name of a forgery and a function that writes it."""
    tensors, document = load_tensors(path)
    for name, tensor in tensors.items():
        for forgery, forge in FORGERIES.items():
            if forgery == "NaN" and not (tensor.is_floating_point() and tensor.numel()):
                continue
            forged = forge(tensor)
            if forged.shape != tensor.shape or forged.dtype != tensor.dtype or forgery == "NaN":
                yield name, forgery, partial(save_tensors, path, {**tensors, name: forged}, document)


def readers(name: str, folder: Path) -> Iterator[tuple[Path, Callable[[], Any]]]:
    """Yields the files that a fit writes, each with a function that reads it.

    Args:
        name: Name of the fit.
        folder: Folder of the files.
    """
    fit = Fit(name)
    if fit.has_checkpoint:
        fit(checkpoint=folder / "run")
        for path in sorted((folder / "run").rglob("*.safetensors")):
            yield path, partial(fit, checkpoint=folder / "run", resume=True)
    result = cached_fit(fit)
    if hasattr(result, "save"):
        path = result.save(folder / "saved.safetensors")
        yield path, partial(fit.load, path)


def read(function: Callable[[], Any]) -> str:
    """Returns the outcome of reading a forged file."""
    warnings.simplefilter("ignore")
    try:
        function()
    except fb.FlowBNNError as error:
        return "several lines" if "\n" in str(error) else "refused"
    return "accepted"


def stress(seed: int, budget: Budget, names: tuple[str, ...] = FITS) -> StressResult:
    """Forges every tensor of the files of every fit, in random order."""
    result, rng = StressResult("checkpoints", seed), random.Random(seed)
    warnings.simplefilter("ignore")
    while True:
        for name in rng.sample(names, len(names)):
            with tempfile.TemporaryDirectory() as folder:
                for path, function in readers(name, Path(folder)):
                    original, cases = path.read_bytes(), list(forgeries(path))
                    for tensor, forgery, write in rng.sample(cases, min(40, len(cases))):
                        if not budget.allows(result):
                            return result
                        write()
                        outcome, failure = run_in_fork(partial(read, function))
                        failure = failure or ("" if outcome == "refused" else outcome)
                        where = f"{name}, {path.name}, {tensor}, {forgery}"
                        result.add("failed" if failure else "refused", failure and f"{where}: {failure}")
                        path.write_bytes(original)
