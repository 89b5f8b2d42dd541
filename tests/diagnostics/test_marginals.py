"""Counting modes and judging the health of posteriors, on cases with a known answer."""

import math

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.diagnostics import LayerHealth, count_modes, health_warnings, marginal, posterior_health
from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers


def test_modes_by_hand():
    assert count_modes(torch.tensor([0.0, 1.0, 0.0])) == 1
    assert count_modes(torch.tensor([0.0, 1.0, 0.2, 0.8, 0.0])) == 2
    assert count_modes(torch.tensor([0.0, 1.0, 0.95, 1.0, 0.0])) == 1, "a dent is no valley"
    assert count_modes(torch.tensor([0.0, 0.5, 1.0])) == 1, "a peak at the edge"


def test_marginal_of_a_known_mixture():
    torch.manual_seed(0)
    model = fb.to_stochastic(nn.Linear(2, 1), {"*": fb.noise.NormalAffine(components=2)})
    (noise,) = noise_layers(model).values()
    with torch.no_grad():
        noise.base.loc.copy_(torch.tensor([[-1.0, 1.0], [3.0, 1.0]]))
        noise.base.log_scale.fill_(-1.0)
    assert (marginal(model, "", 0).modes, marginal(model, "", 1).modes) == (2, 1)
    found = marginal(model, "", 0)
    step = found.grid[1] - found.grid[0]
    assert abs(float(found.density.sum() * step) - 1) < 0.02
    assert abs(float(found.prior.sum() * step) - 1) < 0.02
    truth = 0.5 * sum(
        torch.distributions.Normal(mean, torch.tensor(-1.0).exp()).log_prob(found.grid).exp()
        for mean in (-1.0, 3.0)
    )
    assert (found.density - truth).abs().mean() < 0.02


def test_health():
    model = fb.to_stochastic(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)),
        {"*": fb.noise.NormalAffine(base_scale=0.5)},
    )
    layers = noise_layers(model)
    with torch.no_grad():
        layers["1"].transform[0].raw_log_scale.fill_(-8.0)
        layers["2"].transform[0].shift.fill_(0.5)
    health = posterior_health(model)
    assert [h.state for h in health] == ["prior", "point", "healthy"]
    assert health[2].kl == pytest.approx(3 * 0.5 * 0.25 / 0.25, rel=1e-5)
    assert health[1].spread == pytest.approx(math.exp(8 * math.tanh(-8.0 / 8)), rel=0.1)


def test_layers_of_one_ailment_share_a_warning():
    ill = [LayerHealth(f"fc{n}", 0.0, 0.0001 * n, 1.0, "prior") for n in range(7)]
    ill += [LayerHealth("conv", 9.0, 3.0, 0.01, "point"), LayerHealth("out", 1.0, 0.1, 0.9, "healthy")]
    point, prior = health_warnings(ill)
    assert "the noise of layer 'conv' has collapsed to a point (its spread is 1.0% of" in str(point)
    assert point.fields == {"kind": "point", "layers": ["conv"]}
    assert str(prior).startswith(
        "the noise of layers 'fc0', 'fc1', 'fc2', 'fc3', 'fc4' and 2 more has fallen back onto its prior (KL at most 0.0006 nats"
    )
    assert str(prior).count("train longer") == 1
    assert prior.fields["layers"] == [health.layer for health in ill[:7]]
    assert health_warnings(ill[8:]) == []


def test_refusals():
    model = fb.to_stochastic(nn.Sequential(nn.Linear(3, 3)), {"*": fb.noise.NormalAffine()})
    with pytest.raises(FlowBNNError, match="no layer 'fc'"):
        marginal(model, "fc", 0)
    with pytest.raises(FlowBNNError, match="dimensions 0 to 2, not 3"):
        marginal(model, "0", 3)
