"""PlanarLU evaluates a chain as its maps one by one: values, log-determinants, gradients and second derivatives."""

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.kernels import reference
from flowbnn.transforms import Compose, LULinear, Planar, PlanarLU

RUNS = {
    "one planar": [("planar", 1)],
    "three planar": [("planar", 3)],
    "one LU": [("lu", 1)],
    "Xiong's report": [("planar", 2), ("lu", 3), ("planar", 2)],
    "LU first": [("lu", 2), ("planar", 1), ("lu", 1)],
}


def pair(runs, dim=5, seed=0, spread=0.5):
    """Returns a perturbed chain in float64 and the same maps one by one."""
    torch.manual_seed(seed)
    chain = PlanarLU(dim, runs).double()
    for parameter in chain.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    maps, planar, linear = [], 0, 0
    for kind, size in runs:
        for _ in range(size):
            if kind == "planar":
                layer = Planar(dim).double()
                for name in "wub":
                    getattr(layer, name).data = getattr(chain, name).data[planar : planar + 1].clone()
                planar += 1
            else:
                layer = LULinear(dim).double()
                layer.factors.data = chain.factors.data[linear].clone()
                linear += 1
            maps.append(layer)
    return chain, Compose(*maps)


def gradients(composed, chain, total, z):
    """Returns gradients of the maps one by one in the shapes of the chain's parameters."""
    z_grad, *grads = torch.autograd.grad(total, [z, *composed.parameters()])
    by_parameter = dict(zip(map(id, composed.parameters()), grads, strict=True))
    planar = [layer for layer in composed if isinstance(layer, Planar)]
    linear = [layer for layer in composed if isinstance(layer, LULinear)]
    result = [z_grad]
    if planar:
        result += [torch.cat([by_parameter[id(getattr(p, name))] for p in planar]) for name in "wub"]
    if linear:
        result.append(torch.stack([by_parameter[id(layer.factors)] for layer in linear]))
    return result


def close(first, second):
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("by_numpy", [True, False])
def test_chain_equals_its_maps_one_by_one(name, by_numpy):
    chain, composed = pair(RUNS[name])
    z = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    x_weights, log_det_weights = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    expected_x, expected_log_det = composed(z)
    x, log_det = chain(z) if by_numpy else reference.forward(chain.chain_shape, chain.chain.weights, z, True)
    assert close([x, log_det], [expected_x, expected_log_det])
    expected = gradients(
        composed, chain, (expected_x * x_weights).sum() + (expected_log_det * log_det_weights).sum(), z
    )
    actual = torch.autograd.grad(
        (x * x_weights).sum() + (log_det * log_det_weights).sum(), [z, *chain.chain.weights]
    )
    assert close(actual, expected)


@pytest.mark.parametrize("name", RUNS)
def test_values_and_gradients_are_equal_without_log_det(name):
    chain, composed = pair(RUNS[name])
    z = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, 5, dtype=torch.float64)
    x, log_det = chain.push(z, log_det=False)
    assert log_det is None
    actual = torch.autograd.grad((x * weights).sum(), [z, *chain.chain.weights])
    assert close(actual, gradients(composed, chain, (composed(z)[0] * weights).sum(), z))


def test_second_derivatives_pass_gradgradcheck():
    chain, _ = pair(RUNS["Xiong's report"], dim=3)
    z = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in chain.named_parameters()]

    def function(z, *weights):
        return torch.func.functional_call(chain, dict(zip(names, weights, strict=True)), (z,))

    assert torch.autograd.gradgradcheck(function, [z, *chain.parameters()])


def test_gradients_at_the_margin_and_for_a_short_w():
    chain, composed = pair([("planar", 2)], spread=0.0)
    with torch.no_grad():
        for index, planar in enumerate(composed):
            planar.w.mul_(1e-2 if index else 3.0)
            planar.u.copy_(-20.0 * planar.w / planar.w.square().sum())
            chain.w[index], chain.u[index] = planar.w[0], planar.u[0]
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    expected_x, expected_log_det = composed(z)
    x, log_det = chain(z)
    assert close([x, log_det], [expected_x, expected_log_det])
    expected = gradients(composed, chain, expected_x.sum() + expected_log_det.sum(), z)
    actual = torch.autograd.grad(x.sum() + log_det.sum(), [z, *chain.chain.weights])
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(actual, expected, strict=True))


def test_seed_gives_the_same_start_as_compose():
    torch.manual_seed(3)
    chain = PlanarLU(4, [("planar", 2), ("lu", 1)])
    torch.manual_seed(3)
    composed = Compose(Planar(4), Planar(4), LULinear(4))
    z = torch.randn(3, 4)
    assert torch.allclose(chain(z)[0], composed(z)[0], atol=1e-6)


def test_unknown_kind_of_map_raises():
    with pytest.raises(FlowBNNError) as caught:
        PlanarLU(3, [("radial", 2)])
    assert caught.value.argument == "runs"
