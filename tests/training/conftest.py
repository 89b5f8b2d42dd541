"""Lets the test modules of this folder import its small runs, which pytest's importlib mode does not; and a run that was stopped."""

import sys
from pathlib import Path

import pytest

from flowbnn.training import EarlyStop

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def stopped(tmp_path):
    """The checkpoint of a run that was interrupted in its second epoch."""
    from checkpoint_runs import halving, make, run, stop_at

    with pytest.raises(KeyboardInterrupt):
        run(make(schedule=halving), tmp_path, step=stop_at(6), early_stop=EarlyStop("loss"))
    return tmp_path
