"""Makes the helper modules of this folder importable, and provides an interrupted run."""

import sys
from pathlib import Path

import pytest

from flowbnn.training import EarlyStop

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def interrupted(tmp_path):
    """Folder with the checkpoint of a run that was interrupted in its second epoch."""
    from checkpoint_runs import halving, make, run, stop_at

    with pytest.raises(KeyboardInterrupt):
        run(make(schedule=halving), tmp_path, step=stop_at(6), early_stop=EarlyStop("loss"))
    return tmp_path
