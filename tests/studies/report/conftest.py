"""Fixtures with synthetic results."""

from collections.abc import Callable
from typing import Any

import pytest
import sample_results

from flowbnn_studies.report import write_report


def _fixture(make: Callable[[], dict[str, Any]]) -> Any:
    return pytest.fixture(lambda: make())


two_clusters = _fixture(sample_results.make_two_clusters)
digits = _fixture(sample_results.make_digits)
flow_length = _fixture(sample_results.make_flow_length)
lenet = _fixture(sample_results.make_lenet)
rivals = _fixture(sample_results.make_rivals)


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns one page of all five studies, which draws every kind of figure once."""
    studies = [
        sample_results.make_two_clusters(),
        sample_results.make_digits(),
        sample_results.make_flow_length(),
        sample_results.make_lenet(),
        sample_results.make_rivals(),
    ]
    return write_report(studies, tmp_path_factory.mktemp("page") / "report.html").read_text(encoding="utf-8")
