"""Helper modules of the tests are imported by name; every test starts from the same seed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("", "inference", "report")]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
