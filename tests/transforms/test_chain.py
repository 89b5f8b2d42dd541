"""A chain evaluated at once, by numpy or by torch, is its maps one after the other: values, log-dets, gradients, their gradients."""

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
    """A perturbed chain in float64 and the same maps one by one."""
    torch.manual_seed(seed)
    chain = PlanarLU(dim, runs).double()
    for parameter in chain.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    maps, planar, linear = [], 0, 0
    for kind, size in runs:
        for _ in range(size):
            if kind == "planar":
                part = Planar(dim).double()
                for name in "wub":
                    getattr(part, name).data = getattr(chain, name).data[planar : planar + 1].clone()
                planar += 1
            else:
                part = LULinear(dim).double()
                part.factors.data = chain.factors.data[linear].clone()
                linear += 1
            maps.append(part)
    return chain, Compose(*maps)


def gradients(composed, chain, total, z):
    """Of the maps one by one, in the chain's own shapes."""
    found = torch.autograd.grad(total, [z, *composed.parameters()])
    by_parameter = dict(zip(map(id, composed.parameters()), found[1:], strict=True))
    planar = [part for part in composed if isinstance(part, Planar)]
    linear = [part for part in composed if isinstance(part, LULinear)]
    result = [found[0]]
    if planar:
        result += [torch.cat([by_parameter[id(getattr(p, name))] for p in planar]) for name in "wub"]
    if linear:
        result.append(torch.stack([by_parameter[id(part.factors)] for part in linear]))
    return result


def close(first, second):
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("by_numpy", [True, False])
def test_values_log_dets_and_gradients_are_those_of_the_maps_one_by_one(name, by_numpy):
    chain, composed = pair(RUNS[name])
    z = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    of_x, of_log_det = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    truth, true_log_det = composed(z)
    x, log_det = chain(z) if by_numpy else reference.forward(chain.plan, chain.chain.weights, z, True)
    assert close([x, log_det], [truth, true_log_det])
    expected = gradients(composed, chain, (truth * of_x).sum() + (true_log_det * of_log_det).sum(), z)
    found = torch.autograd.grad((x * of_x).sum() + (log_det * of_log_det).sum(), [z, *chain.chain.weights])
    assert close(found, expected)


@pytest.mark.parametrize("name", RUNS)
def test_without_log_det_the_values_and_their_gradients_stay(name):
    chain, composed = pair(RUNS[name])
    z = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, 5, dtype=torch.float64)
    x, nothing = chain.push(z, log_det=False)
    assert nothing is None
    found = torch.autograd.grad((x * weights).sum(), [z, *chain.chain.weights])
    assert close(found, gradients(composed, chain, (composed(z)[0] * weights).sum(), z))


def test_a_gradient_of_the_gradient_is_right():
    chain, _ = pair(RUNS["Xiong's report"], dim=3)
    z = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in chain.named_parameters()]

    def function(z, *weights):
        return torch.func.functional_call(chain, dict(zip(names, weights, strict=True)), (z,))

    assert torch.autograd.gradgradcheck(function, [z, *chain.parameters()])


def test_the_squeeze_at_its_margin_and_a_short_w_have_the_gradients_of_planar():
    chain, composed = pair([("planar", 2)], spread=0.0)
    with torch.no_grad():
        for part, name in ((composed[0], 0), (composed[1], 1)):
            part.w.mul_(1e-2 if name else 3.0)
            part.u.copy_(-20.0 * part.w / part.w.square().sum())
            chain.w[name], chain.u[name] = part.w[0], part.u[0]
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    truth, true_log_det = composed(z)
    x, log_det = chain(z)
    assert close([x, log_det], [truth, true_log_det])
    expected = gradients(composed, chain, truth.sum() + true_log_det.sum(), z)
    found = torch.autograd.grad(x.sum() + log_det.sum(), [z, *chain.chain.weights])
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(found, expected, strict=True))


def test_the_same_seed_starts_the_chain_where_the_maps_one_by_one_start():
    torch.manual_seed(3)
    chain = PlanarLU(4, [("planar", 2), ("lu", 1)])
    torch.manual_seed(3)
    composed = Compose(Planar(4), Planar(4), LULinear(4))
    z = torch.randn(3, 4)
    assert torch.allclose(chain(z)[0], composed(z)[0], atol=1e-6)


def test_a_run_of_another_kind_is_refused():
    with pytest.raises(FlowBNNError, match="must hold 'planar' or 'lu', got 'radial'"):
        PlanarLU(3, [("radial", 2)])
