"""The made-up results as fixtures."""

import json
from typing import Any

import pytest
from made_up import make_digits, make_flow_length, make_lenet, make_rivals, make_two_clusters

from flowbnn_studies.report import write_report


@pytest.fixture
def rivals() -> dict[str, Any]:
    return make_rivals()


@pytest.fixture
def lenet() -> dict[str, Any]:
    return make_lenet()


@pytest.fixture
def two_clusters() -> dict[str, Any]:
    return make_two_clusters()


@pytest.fixture
def digits() -> dict[str, Any]:
    return make_digits()


@pytest.fixture
def flow_length() -> dict[str, Any]:
    return make_flow_length()


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One page of all three studies, from a dictionary and from files."""
    folder = tmp_path_factory.mktemp("page")
    sources: list[Any] = [make_two_clusters()]
    for study in (make_digits(), make_flow_length()):
        sources.append(folder / f"{study['study']}.json")
        sources[-1].write_text(json.dumps(study))
    return write_report(sources, folder / "report.html").read_text(encoding="utf-8")
