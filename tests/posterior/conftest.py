"""Fixture with a compiler that only traces."""

import pytest
import torch
from sampling_helpers import CACHES, compile_by


@pytest.fixture
def traced(monkeypatch):
    """torch.compile that traces and does not generate code; counts the graphs and the ways to call it."""
    counts = {"graphs": 0}

    def backend(graph, inputs):
        counts["graphs"] += 1
        return graph.forward

    compile_by(backend, monkeypatch)
    CACHES.clear()
    yield counts
    torch._dynamo.reset()
