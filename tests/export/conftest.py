"""Makes the helper modules of these tests importable by name, and exports faster."""

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def _make_registry():
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return cache(ONNXRegistry.from_torchlib)


@pytest.fixture(autouse=True)
def _registry(monkeypatch, _make_registry):
    """Builds torch's table of ONNX operators once, which takes a third of the time of a small export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(_make_registry))
