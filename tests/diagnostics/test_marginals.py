"""Tests of marginal densities, mode counts and the health of noise layers, on cases with a known answer."""

import math

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.diagnostics import LayerHealth, count_modes, health_warnings, marginal, posterior_health
from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers


@pytest.mark.parametrize(
    ("density", "modes"),
    [
        ([0.0, 1.0, 0.0], 1),
        ([0.0, 1.0, 0.2, 0.8, 0.0], 2),
        ([0.0, 1.0, 0.95, 1.0, 0.0], 1),  # a shallow dent
        ([0.0, 0.5, 1.0], 1),  # a peak at the edge
    ],
)
def test_count_modes_by_hand(density, modes):
    assert count_modes(torch.tensor(density)) == modes


def test_marginal_of_a_mixture():
    torch.manual_seed(0)
    model = fb.to_stochastic(nn.Linear(2, 1), {"*": fb.noise.NormalAffine(components=2)})
    (noise,) = noise_layers(model).values()
    with torch.no_grad():
        noise.base.loc.copy_(torch.tensor([[-1.0, 1.0], [3.0, 1.0]]))
        noise.base.log_scale.fill_(-1.0)
    first, second = marginal(model, "", 0), marginal(model, "", 1)
    assert (first.modes, second.modes) == (2, 1)
    step = first.grid[1] - first.grid[0]
    assert abs(float(first.density.sum() * step) - 1) < 0.02
    assert abs(float(first.prior.sum() * step) - 1) < 0.02
    components = [
        torch.distributions.Normal(mean, torch.tensor(-1.0).exp()).log_prob(first.grid).exp()
        for mean in (-1.0, 3.0)
    ]
    assert (first.density - 0.5 * sum(components)).abs().mean() < 0.02


def test_posterior_health_of_known_layers():
    model = fb.to_stochastic(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)),
        {"*": fb.noise.NormalAffine(base_scale=0.5)},
    )
    layers = noise_layers(model)
    with torch.no_grad():
        layers["1"].transform[0].raw_log_scale.fill_(-8.0)
        layers["2"].transform[0].shift.fill_(0.5)
    health = posterior_health(model)
    assert [layer.state for layer in health] == ["prior", "point", "healthy"]
    assert health[2].kl == pytest.approx(3 * 0.5 * 0.25 / 0.25, rel=1e-5)
    assert health[1].spread == pytest.approx(math.exp(8 * math.tanh(-8.0 / 8)), rel=0.1)


def test_layers_with_the_same_problem_share_a_warning():
    layers = [LayerHealth(f"fc{n}", 0.0, 0.0001 * n, 1.0, "prior") for n in range(7)]
    layers += [LayerHealth("conv", 9.0, 3.0, 0.01, "point"), LayerHealth("out", 1.0, 0.1, 0.9, "healthy")]
    point, prior = health_warnings(layers)
    assert point.fields == {"kind": "point", "layers": ["conv"]}
    assert prior.fields["layers"] == [health.layer for health in layers[:7]]
    assert "'fc0', 'fc1', 'fc2', 'fc3', 'fc4' and 2 more" in str(prior)
    assert health_warnings(layers[8:]) == []


@pytest.mark.parametrize(("layer", "dimension", "argument"), [("fc", 0, "layer"), ("0", 3, "dimension")])
def test_marginal_refuses_unknown_layers_and_dimensions(layer, dimension, argument):
    model = fb.to_stochastic(nn.Sequential(nn.Linear(3, 3)), {"*": fb.noise.NormalAffine()})
    with pytest.raises(FlowBNNError) as caught:
        marginal(model, layer, dimension)
    assert (caught.value.argument, caught.value.layer) == (argument, layer)
