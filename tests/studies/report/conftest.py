"""The made-up results as fixtures."""

from collections.abc import Callable
from typing import Any

import made_up
import pytest

from flowbnn_studies.report import write_report


def _fixture(make: Callable[[], dict[str, Any]]) -> Any:
    return pytest.fixture(lambda: make())


two_clusters = _fixture(made_up.make_two_clusters)
digits = _fixture(made_up.make_digits)
flow_length = _fixture(made_up.make_flow_length)
lenet = _fixture(made_up.make_lenet)
rivals = _fixture(made_up.make_rivals)


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One page of all five studies: every kind of figure is drawn here, once."""
    studies = [
        made_up.make_two_clusters(),
        made_up.make_digits(),
        made_up.make_flow_length(),
        made_up.make_lenet(),
        made_up.make_rivals(),
    ]
    return write_report(studies, tmp_path_factory.mktemp("page") / "report.html").read_text(encoding="utf-8")
