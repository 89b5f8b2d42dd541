"""Tests of the products of the chains on a CPU: torch computes large ones, because numpy's threads ignore torch's settings."""

import numpy as np
import pytest
import torch

from flowbnn.kernels import flow_chains
from flowbnn.transforms import PlanarLU


@pytest.mark.parametrize("dim", [8, 96])
def test_torch_computes_large_products(dim, monkeypatch):
    torch.manual_seed(0)
    sizes = []
    original = torch.from_numpy

    def from_numpy(array):
        sizes.append(array.shape)
        return original(array)

    a, b = np.random.default_rng(0).normal(size=(2, dim, dim))
    expected = a @ b
    monkeypatch.setattr(torch, "from_numpy", from_numpy)
    assert np.allclose(flow_chains._product(a, b.T.copy().T), expected)
    assert len(sizes) == (2 if dim == 96 else 0)


def test_chains_of_large_products_equal_the_formulas():
    torch.manual_seed(0)
    maps = PlanarLU(96, [("planar", 2), ("lu", 2)]).double()
    with torch.no_grad():
        for parameter in maps.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    z = torch.randn(64, 96, dtype=torch.float64, requires_grad=True)
    shape, weights = maps.chain
    found = flow_chains.evaluate(maps.chain, z)
    expected = flow_chains.reference.forward(shape, weights, z, True)
    torch.testing.assert_close(found, expected)
    parameters = [z, *maps.parameters()]
    gradients = [
        torch.autograd.grad(x.square().sum() + log_det.sum(), parameters, retain_graph=True)
        for x, log_det in (found, expected)
    ]
    torch.testing.assert_close(*gradients)
