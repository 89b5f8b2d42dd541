"""Fixtures of the tests of diagnostics."""

import pytest
from tests.diagnostics.linear_problem import LinearProblem


@pytest.fixture(scope="session")
def problem() -> LinearProblem:
    """Returns a problem with a known evidence and posterior. Its chains are run once."""
    return LinearProblem()
