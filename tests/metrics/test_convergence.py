"""Tests of R-hat and effective sample sizes on hand-computed values and on chains with a known autocorrelation."""

import math
import sys

import pytest
import torch

from flowbnn.diagnostics import effective_sample_size, split_rhat, standard_error
from flowbnn.errors import FlowBNNError


def autoregressive(chains: int, draws: int, rho: float, columns: int, seed: int) -> torch.Tensor:
    """Returns stationary AR(1) chains of variance one, with autocorrelation ``rho ** lag``."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(chains, draws, columns, generator=generator, dtype=torch.float64)
    values = [noise[:, 0]]
    for t in range(1, draws):
        values.append(rho * values[-1] + math.sqrt(1 - rho**2) * noise[:, t])
    return torch.stack(values, 1)


def test_rhat_of_one_chain_by_hand():
    """The halves of the chain 1..8 hold the ranks 1-4 and 5-8; scores are normal quantiles of (r - 3/8) / 8.25."""
    scores = [
        torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor((r - 0.375) / 8.25)).item()
        for r in range(1, 9)
    ]
    low, high = scores[:4], scores[4:]
    mean = sum(low) / 4
    within = sum((s - mean) ** 2 for s in low) / 3
    between = (sum(high) / 4 - mean) ** 2 / 2
    expected = math.sqrt(0.75 + between / within)
    assert split_rhat(torch.arange(1.0, 9.0)[None]).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rho", [0.0, 0.6, -0.4])
@pytest.mark.parametrize("draws", [40, 101, 300])
def test_every_quantity_agrees_with_arviz(rho, draws):
    stats = pytest.importorskip("arviz_stats.base").array_stats
    chains = autoregressive(4, draws, rho, 3, seed=1)
    chains[0, :, 1] += 0.5  # one chain has another mean
    chains[:, :, 2] = chains[:, :, 2].round(decimals=1)  # ties
    for column in range(3):
        array = chains[:, :, column].numpy()  # arviz takes [chains, draws] by default
        assert split_rhat(chains)[column].item() == pytest.approx(float(stats.rhat(array)), rel=1e-9)
        for kind, options in (("bulk", {}), ("tail", {"prob": (0.05, 0.95)}), ("mean", {})):
            expected = float(stats.ess(array, method=kind, **options))
            assert effective_sample_size(chains, kind)[column].item() == pytest.approx(expected, rel=1e-6)
        expected = float(stats.mcse(array, method="mean"))
        assert standard_error(chains)[column].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, -0.5])
def test_effective_sample_size_of_autoregressive_chains(rho):
    """The ESS of the mean of an AR(1) chain is (1 - rho) / (1 + rho) times its length."""
    chains = autoregressive(4, 2000, rho, 40, seed=2)
    expected = 8000 * (1 - rho) / (1 + rho)
    sizes = effective_sample_size(chains, "mean")
    assert sizes.shape == (40,)
    assert sizes.mean().item() == pytest.approx(expected, rel=0.08)
    assert split_rhat(chains).mean() < 1.02
    covered = ((chains.mean((0, 1)) / standard_error(chains)).abs() < 1.96).double().mean()
    assert covered > 0.8  # of 95 % intervals


def test_rhat_detects_chains_that_differ_in_location_or_scale():
    chains = autoregressive(4, 400, 0.0, 1, seed=3)[..., 0]
    shifted, scaled = chains.clone(), chains.clone()
    shifted[0] += 2.0
    scaled[0] *= 4.0
    assert split_rhat(chains) < 1.01
    assert split_rhat(shifted) > 1.1
    assert split_rhat(scaled) > 1.1  # only the R-hat of distances from the median detects it
    drifting = chains + torch.linspace(0, 3, 400)
    assert split_rhat(drifting[:1]) > 1.1  # by the halves of one chain


def test_constant_chains():
    constant = torch.full((2, 10), 3.0)
    assert split_rhat(constant).item() == 1.0
    assert split_rhat(constant[:1]).item() == 1.0
    assert effective_sample_size(constant).item() == 20.0
    stuck = torch.tensor([[0.0] * 10, [1.0] * 10])
    assert split_rhat(stuck).item() == math.inf


@pytest.mark.parametrize(
    ("draws", "kind"), [(torch.zeros(4, 3), "shape"), (torch.full((2, 8), math.nan), "not finite")]
)
def test_bad_draws_are_refused(draws, kind):
    with pytest.raises(FlowBNNError) as caught:
        split_rhat(draws)
    assert (caught.value.kind, caught.value.argument) == (kind, "draws")


def test_an_unknown_kind_of_sample_size_is_refused():
    with pytest.raises(FlowBNNError) as caught:
        effective_sample_size(torch.randn(2, 8), "median")
    assert caught.value.argument == "kind"


def test_missing_arviz_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_stats.base", None)
    with pytest.raises(FlowBNNError) as caught:
        split_rhat(torch.randn(2, 8))
    assert caught.value.kind == "missing package"
