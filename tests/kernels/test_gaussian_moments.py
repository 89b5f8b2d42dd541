"""Moments of Gaussians by numpy equal those by torch's operations, with first and second derivatives."""

import pytest
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.kernels import MomentsFunction, moments_available
from flowbnn.noise import gaussians as gaussians_module
from flowbnn.noise import noise_layers
from flowbnn.noise.gaussians import Gaussians


def make_layers() -> list[fb.noise.Noise]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 2)).double()
    rules = {
        "2": fb.noise.NormalPlanar(length=2, prior_scale=0.3),
        "*": fb.noise.NormalAffine(base_scale=0.2),
    }
    layers = list(noise_layers(fb.to_stochastic(network, rules)).values())
    for layer in layers:
        _, affine, _ = layer.gaussian_base
        nn.init.normal_(affine.shift, std=0.3)
        nn.init.normal_(affine.raw_log_scale, std=0.3)
    return layers


def parameters_of(block: Gaussians) -> list[Tensor]:
    return [affine.shift for affine in block.affines] + [affine.raw_log_scale for affine in block.affines]


def apply(block: Gaussians, *parameters: Tensor) -> tuple[Tensor, ...]:
    centers = [affine.center for affine in block.affines]
    settings = block.sizes, block.flow_start, block.affines[0].bound, centers, block.constants
    return MomentsFunction.apply(*settings, block._compute_moments, *parameters)


def test_moments_and_their_derivatives_equal_those_of_torch():
    block = Gaussians(make_layers())
    parameters = parameters_of(block)
    values, expected = apply(block, *parameters), block._compute_moments(*parameters)
    weights = [torch.randn_like(value) for value in expected]
    slopes = torch.autograd.grad(values, parameters, weights)
    expected_slopes = torch.autograd.grad(expected, parameters, weights)
    for value, reference in zip((*values, *slopes), (*expected, *expected_slopes), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)


def test_derivatives_equal_finite_differences():
    block = Gaussians(make_layers())
    parameters = parameters_of(block)
    assert torch.autograd.gradcheck(lambda *values: apply(block, *values), parameters)
    assert torch.autograd.gradgradcheck(lambda *values: apply(block, *values), parameters)


def test_a_changed_parameter_is_found_before_the_backward_pass():
    block = Gaussians(make_layers())
    parameters = parameters_of(block)
    loss = apply(block, *parameters)[0].sum()
    with torch.no_grad():
        parameters[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_divergences_of_a_network_equal_those_without_numpy(monkeypatch: pytest.MonkeyPatch):
    layers, results = make_layers(), []
    for available in (moments_available, lambda constants, parameters: False):
        monkeypatch.setattr(gaussians_module.kernels, "moments_available", available)
        block = Gaussians(layers)
        assert (block.sums is None) == (available is not moments_available)
        by_layer, total = block.divergences(torch.Generator().manual_seed(1))
        slopes = torch.autograd.grad(total.kl + 0.1 * total.entropy, parameters_of(block))
        numbers = [value for divergence in by_layer.values() for value in (divergence.kl, divergence.entropy)]
        results.append([total.kl, total.entropy, *numbers, *slopes])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", ["learned prior", "half precision"])
def test_other_tensors_take_torch(change: str):
    constant, parameter = torch.ones(2), torch.zeros(2)
    assert moments_available([constant], [parameter])
    if change == "learned prior":
        constant.requires_grad_()
    else:
        parameter = parameter.bfloat16()
    assert not moments_available([constant], [parameter])
