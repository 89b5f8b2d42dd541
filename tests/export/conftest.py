"""Makes the helper modules of these tests importable by name, and exports faster."""

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def _make_tables():
    from torch._export import utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return cache(ONNXRegistry.from_torchlib), cache(utils._materialize_cpp_cia_ops)


@pytest.fixture(autouse=True)
def _tables(monkeypatch, _make_tables):
    """Builds torch's tables of operators once, which take a third of the time of a small export."""
    from torch._export import utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(_make_tables[0]))
    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", _make_tables[1])
