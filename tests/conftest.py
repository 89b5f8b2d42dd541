"""Helper modules of the tests are imported by name; every test starts from the same seed."""

import os
import sys
from pathlib import Path

# workers share the cores: with all their threads, or torch's compiler with processes of its own, they would wait for each other
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

sys.path[:0] = [
    str(Path(__file__).parent / folder)
    for folder in ("", "kernels", "transforms", "posterior", "methods", "studies", "studies/report")
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
