"""Makes the helper modules of the tests importable and starts every test from the same seed."""

import gc
import os
import sys
from pathlib import Path

# parallel test workers share the cores, so each uses one thread and compiles in its own process
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest

sys.path[:0] = [
    str(Path(__file__).parent / folder)
    for folder in ("", "kernels", "transforms", "posterior", "methods", "studies", "studies/report")
]

gc.disable()  # imports create half a million objects and no garbage


def pytest_collection_finish() -> None:
    """Excludes imported objects from garbage collection, which would look through all of them again and again."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # graphs of the compiler live long
    gc.enable()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def unrefined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits Gaussians without the refinement by the Hessian, which takes longest and has tests of its own."""
    from flowbnn.methods.variational.hessian_refinement import HessianRefinement

    monkeypatch.setattr(HessianRefinement, "suits", staticmethod(lambda _: False))
