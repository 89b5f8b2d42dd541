"""Tests of the search for modes, on a density of the noise with two modes that is known on a grid."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.diagnostics.modes import find_modes
from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.errors import FlowBNNWarning
from flowbnn.likelihoods import Gaussian
from flowbnn.noise.joint import independent_vectors
from flowbnn.posterior.noise import NoisePosterior


class Squared(nn.Module):
    """Returns z^2 x for noise z, so that noise of both signs explains the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.one.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(torch.ones_like(x)).square() * x


class TwoModes:
    """Density of the noise of :class:`Squared` on a grid, and a posterior at one of its modes."""

    def __init__(self) -> None:
        rules = {"*": fb.noise.NormalAffine(prior_scale=2.0, prior_loc=0.0)}
        model = fb.to_stochastic(Squared(), rules, joint="full")
        x = torch.linspace(0.5, 1.5, 10)[:, None]
        self.loader = [(x, x)]
        grid = torch.linspace(-4, 4, 80_001, dtype=torch.float64)
        squares = float(x.square().sum())
        self.density = -0.5 * ((1 - grid**2).square() * squares / 0.5**2 + (grid / 2) ** 2)
        self.density += -10 * math.log(0.5) - math.log(2) - 5.5 * math.log(2 * math.pi)
        self.evidence = float(self.density.logsumexp(0) + (grid[1] - grid[0]).log())
        right = self.density[grid > 0].softmax(0)
        mean = (right * grid[grid > 0]).sum()
        variance = (right * (grid[grid > 0] - mean).square()).sum()
        ((vector, _),) = independent_vectors(model)
        vector.set_gaussian(mean[None], [(1.3 * variance).sqrt()[None, None]])
        self.posterior = NoisePosterior(model, Gaussian(0.5))


@pytest.fixture(scope="module")
def two_modes() -> TwoModes:
    return TwoModes()


def test_modes_finds_both_modes_and_the_dip_between_them(two_modes):
    modes = fb.diagnostics.modes(two_modes.posterior, two_modes.loader, starts=8)
    assert len(modes) == 2
    assert sum(modes.counts) == 8
    best, dip = float(two_modes.density.max()), float(two_modes.density[40_000])
    assert modes.log_density.tolist() == pytest.approx([best, best], abs=1e-3)
    assert sorted(modes.vectors[:, 0].sign().tolist()) == [-1.0, 1.0]
    assert float(modes.dips[0, 1]) == pytest.approx(best - dip, abs=1e-3)
    assert repr(modes).startswith("Modes(2 modes from 8 runs; log-density ")
    assert "tensor" not in repr(modes)


def test_runs_that_do_not_converge_are_warned_about(two_modes):
    with pytest.warns(FlowBNNWarning) as caught:
        find_modes(NoiseTarget(two_modes.posterior, two_modes.loader), starts=8, max_iterations=1)
    assert caught[0].message.kind == "modes"
    assert 0 < caught[0].message.fields["unconverged"] <= 8


def test_tempering_detects_a_mode_that_the_posterior_misses(two_modes):
    with pytest.warns(FlowBNNWarning) as caught:
        tempered = fb.diagnostics.evidence(two_modes.posterior, two_modes.loader, "tempered", samples=1000)
    assert caught[0].message.kind == "evidence"
    assert abs(caught[0].message.fields["difference"] - math.log(2)) < 4 * tempered.error + 0.02
    assert abs(tempered.value - two_modes.evidence) < 4 * tempered.error < 0.6
    half = fb.diagnostics.evidence(two_modes.posterior, two_modes.loader, "psis", samples=1000)
    assert abs(half.value - (two_modes.evidence - math.log(2))) < 4 * half.error + 0.01


def test_chains_that_do_not_mix_are_not_certified(two_modes):
    with pytest.warns(FlowBNNWarning) as caught:
        chains = fb.diagnostics.noise_chains(two_modes.posterior, two_modes.loader, samples=25, warmup=20)
    assert caught[0].message.kind == "chains"
    assert caught[0].message.fields["layers"] == ["one"]
    assert not chains.converged
    assert chains.position.shape == (4, 100, 1)
    assert "4 chains x 100 draws x 1 dimension," in str(chains)
    assert "not converged" in str(chains)
    assert "tensor" not in repr(chains)
    modes = fb.diagnostics.modes(two_modes.posterior, two_modes.loader, starts=8)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None]
    for vectors, missed in ((chains.vectors.abs(), 1), (chains.vectors * signs, 0)):
        assert modes.missed(replace(chains, position=chains.space.position(vectors))) == missed
