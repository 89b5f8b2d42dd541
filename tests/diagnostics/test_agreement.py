"""Diagnostics on a density of the noise that has two modes, known on a grid."""

import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.errors import FlowBNNWarning
from flowbnn.likelihoods import Gaussian
from flowbnn.noise.joint import independent_vectors
from flowbnn.posterior.noise import NoisePosterior


class Squared(nn.Module):
    """Its output is z^2 x: noise of both signs explains the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.one.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(torch.ones_like(x)).square() * x


class TwoModes:
    """The density of the noise of :class:`Squared` on a grid, and a posterior at one of its modes."""

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


def test_two_modes_are_found_with_the_dip_between_them():
    known = TwoModes()
    found = fb.diagnostics.modes(known.posterior, known.loader, starts=8)
    assert len(found) == 2
    assert sum(found.found) == 8
    best, dip = float(known.density.max()), float(known.density[40_000])
    assert found.log_density.tolist() == pytest.approx([best, best], abs=1e-3)
    assert sorted(found.vectors[:, 0].sign().tolist()) == [-1.0, 1.0]
    assert float(found.dips[0, 1]) == pytest.approx(best - dip, abs=1e-3)
    assert repr(found).startswith("Modes(2 found by 8 climbs; log-density ")
    assert "tensor" not in repr(found)


def test_climbs_that_are_cut_are_told(monkeypatch):
    monkeypatch.setattr(import_module("flowbnn.diagnostics.agreement"), "STEPS", 1)
    known = TwoModes()
    with pytest.warns(FlowBNNWarning, match="climbs were not at their ends after 1 steps") as told:
        fb.diagnostics.modes(known.posterior, known.loader, starts=8)
    assert told[0].message.fields["kind"] == "modes"
    assert 0 < told[0].message.fields["cut"] <= 8


def test_a_mode_that_is_missed_is_told():
    known = TwoModes()
    with pytest.warns(FlowBNNWarning, match="nats apart") as told:
        found = fb.diagnostics.evidence(known.posterior, known.loader, "tempered", samples=1000)
    assert told[0].message.fields["kind"] == "evidence"
    assert abs(told[0].message.fields["difference"] - math.log(2)) < 4 * found.error + 0.02
    assert abs(found.value - known.evidence) < 4 * found.error < 0.6
    half = fb.diagnostics.evidence(known.posterior, known.loader, "psis", samples=1000)
    assert abs(half.value - (known.evidence - math.log(2))) < 4 * half.error + 0.01


def test_chains_that_do_not_mix_are_not_certified():
    known = TwoModes()
    with pytest.warns(FlowBNNWarning, match="have not mixed .* modes") as told:
        chains = fb.diagnostics.noise_chains(known.posterior, known.loader, samples=25, warmup=20)
    assert not chains.certified
    assert told[0].message.fields["layers"] == ["one"]
    assert chains.position.shape == (4, 100, 1)
    assert "4 chains x 100 draws x 1 dimension," in str(chains)
    assert "not certified" in str(chains)
    assert "tensor" not in repr(chains)
    found = fb.diagnostics.modes(known.posterior, known.loader, starts=8)
    for vectors, missed in (
        (chains.vectors.abs(), 1),
        (chains.vectors * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None], 0),
    ):
        assert found.missed(replace(chains, position=chains.space.position(vectors))) == missed
