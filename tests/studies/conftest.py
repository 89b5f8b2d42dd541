"""Lets the test modules of this folder import its case lists, which pytest's importlib mode does not."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages whose pictures are drawn, but neither laid out nor written down, which report/ has tests of and takes longest."""
    from matplotlib.figure import Figure

    def sketch(panel: Any, *_: Any) -> str:
        panel.draw(Figure())
        return "<svg/>"

    monkeypatch.setattr("flowbnn_studies.report.page.to_svg", sketch)
