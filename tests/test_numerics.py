"""Tests of numerics."""

import pytest
import torch

from flowbnn.numerics import safe_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_safe_norm_neither_overflows_nor_underflows(dtype):
    units = torch.tensor([3.0, -4.0, 0.0], dtype=dtype)
    x = torch.stack([units, 1e30 * units, 1e-30 * units]).requires_grad_()
    norm = safe_norm(x)
    torch.testing.assert_close(norm, 5.0 * torch.tensor([1.0, 1e30, 1e-30], dtype=dtype))
    (gradient,) = torch.autograd.grad(norm.sum(), x)
    torch.testing.assert_close(gradient, (units / 5.0).expand(3, 3))


def test_safe_norm_has_derivatives_at_zero():
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    norm = safe_norm(x)
    assert norm[0] == 0.0
    (gradient,) = torch.autograd.grad(norm.sum(), x, create_graph=True)
    assert torch.equal(gradient[0], torch.zeros(2, dtype=torch.float64))
    direction = torch.tensor([1.0, -1.0], dtype=torch.float64)
    (second,) = torch.autograd.grad((gradient @ direction).sum(), x)
    assert torch.equal(second[0], torch.zeros(2, dtype=torch.float64))
    unit = x[1].detach() / 5.0**0.5
    hessian = (torch.eye(2, dtype=torch.float64) - torch.outer(unit, unit)) / 5.0**0.5
    torch.testing.assert_close(second[1], hessian @ direction)
    assert torch.autograd.gradgradcheck(safe_norm, x[1:].detach().requires_grad_())
