"""Fixtures of the tests of calibration."""

import pytest
from tests.calibrate.problems import MemorizedData, train_memorizing_network


@pytest.fixture(scope="session")
def memorized() -> MemorizedData:
    """Returns a network that has memorized its training data, and other data."""
    return train_memorizing_network()
