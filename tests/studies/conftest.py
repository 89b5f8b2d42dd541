"""Adds this folder to the import path for shared test modules, and provides fixtures."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the figures of a report without layout and SVG output, which take longest and have tests of their own."""
    from matplotlib.figure import Figure

    def sketch(panel: Any, *_: Any) -> str:
        panel.draw(Figure())
        return "<svg/>"

    monkeypatch.setattr("flowbnn_studies.report.figures.to_svg", sketch)
