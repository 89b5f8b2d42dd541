"""Tests of the initial positions of Markov chains."""

import pytest
import torch
from small_problem import QUIET
from torch import nn

import flowbnn as fb
from flowbnn.diagnostics import standard_error
from flowbnn.methods.mcmc.hamiltonian import draw_normals
from flowbnn.methods.mcmc.potential import LOG_NOISE, NetworkPotential
from flowbnn.methods.mcmc.starts import anchored_starts


def linear_potential(likelihood, prior_scale=0.7):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    inputs[:, 4] = 0.0  # the data do not determine the last weight
    targets = inputs @ torch.tensor([[1.0], [-1.0], [0.5], [2.0], [0.0]], dtype=torch.float64)
    torch.manual_seed(0)
    network = nn.Linear(5, 1, bias=False).double()
    return NetworkPotential(network, likelihood, (inputs, targets), 20, prior_scale), inputs, targets


def seeded(chains):
    return [torch.Generator().manual_seed(chain) for chain in range(chains)]


def test_starts_of_a_linear_model_are_the_anchored_optima():
    potential, inputs, targets = linear_potential(fb.likelihoods.Gaussian(0.5))
    starts = anchored_starts(potential, seeded(6), steps=500, lr=0.1)
    anchors = 0.7 * draw_normals(seeded(6), potential.start.expand(6, -1))
    precision = inputs.T @ inputs / 0.5**2 + torch.eye(5, dtype=torch.float64) / 0.7**2
    expected = torch.linalg.solve(precision, inputs.T @ targets / 0.5**2 + anchors.T / 0.7**2).T
    assert torch.allclose(starts, expected, atol=1e-3)
    assert torch.allclose(starts[:, 4], anchors[:, 4])  # the prior of an undetermined weight


def test_chains_far_from_the_data_start_at_the_network():
    potential, inputs, targets = linear_potential(fb.likelihoods.Gaussian(0.001))
    solution = torch.linalg.lstsq(inputs[:, :4], targets).solution[:, 0]
    potential.start = torch.cat([solution, solution.new_zeros(1)])
    assert torch.equal(anchored_starts(potential, seeded(3), steps=0), potential.start.expand(3, -1))
    starts = anchored_starts(potential, seeded(3), steps=500, lr=0.1)
    assert (starts[:, 4] - potential.start[4]).abs().min() > 1e-3
    assert torch.allclose(starts[:, :4], solution.expand(3, -1), atol=0.02)


def test_learned_noise_keeps_its_value():
    potential, _, _ = linear_potential(fb.likelihoods.Gaussian())
    assert list(potential.shapes) == ["weight", LOG_NOISE]
    starts = anchored_starts(potential, seeded(3), steps=300, lr=0.05)
    assert torch.equal(starts[:, -1], potential.start[-1:].expand(3))
    assert (starts[:, :-1] - potential.start[:-1]).abs().min() > 1e-4


def test_spread_starts_chains_around_the_network():
    potential, _, _ = linear_potential(fb.likelihoods.Gaussian(0.5))
    starts = fb.HMC(spread=1e-3)._starts(potential, seeded(4))
    deviations = (starts - potential.start) / (1e-3 * 0.7)
    assert torch.allclose(deviations, draw_normals(seeded(4), starts), atol=1e-6)


class Square(nn.Module):
    """Network whose weight w predicts w ** 2 for one kind of input, and 0.3 w for another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0]))

    def forward(self, inputs):
        return inputs[:, :1] * self.weight**2 + inputs[:, 1:] * 0.3 * self.weight


def test_chains_of_two_modes_have_a_large_rhat():
    """With the targets 1 and 0, the modes are near 1 and -1, at equal height, with a barrier of 50 nats between them."""
    data = [(torch.eye(2), torch.tensor([[1.0], [0.0]]))]
    likelihood = fb.likelihoods.Gaussian(0.1)
    settings = {"samples": 120, "warmup": 60, "chains": 12, "steps": 8, "epochs": 0, "spread": None}
    with pytest.warns(fb.FlowBNNWarning) as caught:
        posterior = fb.HMC(**settings).fit(Square(), data, likelihood=likelihood, seed=0, **QUIET)
    assert caught[0].message.fields["kind"] == "rhat"
    assert posterior.diagnostics().rhat_outputs > 1.5
    signs = posterior.chains["weight"].sign()
    assert (signs == signs[:, :1]).all()  # no chain crosses the barrier
    # chains that start around the network find one mode only, and their R-hat cannot tell
    near = fb.HMC(**settings | {"spread": 0.1}).fit(Square(), data, likelihood=likelihood, seed=0, **QUIET)
    assert near.diagnostics().rhat_outputs < 1.05


def test_independent_chains_with_adapted_trajectories_recover_a_conjugate_posterior():
    likelihood = fb.likelihoods.Gaussian(0.5)
    _, inputs, targets = linear_potential(likelihood)
    network = nn.Linear(5, 1, bias=False).double()
    method = fb.HMC(samples=150, warmup=60, steps=None, spread=None, epochs=0, prior_scale=0.7)
    posterior = method.fit(network, [(inputs, targets)], likelihood=likelihood, seed=0, **QUIET)
    precision = inputs.T @ inputs / 0.5**2 + torch.eye(5, dtype=torch.float64) / 0.7**2
    covariance = torch.linalg.inv(precision)
    mean = covariance @ (inputs.T @ targets)[:, 0] / 0.5**2
    draws = posterior.chains["weight"].flatten(2)
    errors = standard_error(draws)
    assert ((draws.mean((0, 1)) - mean).abs() < 4 * errors).all()
    squares = (draws - mean).square()
    assert ((squares.mean((0, 1)) - covariance.diagonal()).abs() < 4 * standard_error(squares)).all()
    assert posterior.diagnostics().rhat_outputs < 1.05
