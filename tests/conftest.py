"""Helper modules of the tests are imported by name; every test starts from the same seed."""

import gc
import os
import sys
from contextlib import nullcontext
from pathlib import Path

# workers share the cores: with all their threads, or torch's compiler with processes of its own, they would wait for each other
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest

sys.path[:0] = [
    str(Path(__file__).parent / folder)
    for folder in ("", "kernels", "transforms", "posterior", "methods", "studies", "studies/report")
]

gc.disable()  # imports make half a million objects and no garbage


def pytest_collection_finish() -> None:
    import torch  # not above, where the process that only hands out the tests would import it too
    from torch._dynamo import guards

    if not torch.cuda.is_available():
        # torch.manual_seed would note the stack, a millisecond, for each kind of device that is not there
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: (
            None
        )
    # each step of an optimizer and of a loader would be marked for a profiler that is not there
    torch.autograd.profiler.record_function = lambda *given: nullcontext()
    # torch clears the processor's caches to time the guards of each graph: 30 ms for a number that nobody reads
    guards.profile_guard_manager = lambda *given: 0.0
    gc.freeze()  # what has been imported, which no collection of the tests' garbage need look through
    gc.set_threshold(20_000, 10, 10)  # the compiler's graphs live for long
    gc.enable()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
