"""A compiler that only traces, for tests of what is compiled."""

import weakref

import pytest
import torch
from compiling import compile_by

from flowbnn.posterior import forward as passes


@pytest.fixture
def traced(monkeypatch):
    """torch.compile that traces and does not generate code; counts the graphs and the ways to call it."""
    counts = {"graphs": 0}

    def backend(graph, inputs):
        counts["graphs"] += 1
        return graph.forward

    compile_by(backend, monkeypatch)
    monkeypatch.setattr(passes, "_COMPILED", weakref.WeakKeyDictionary())
    yield counts
    torch._dynamo.reset()
