"""R-hat and effective sample sizes against hand values, another implementation and chains whose autocorrelation is known."""

import math

import pytest
import torch

from flowbnn.diagnostics import effective_sample_size, split_rhat, standard_error
from flowbnn.errors import FlowBNNError


def autoregressive(chains: int, draws: int, rho: float, columns: int, seed: int) -> torch.Tensor:
    """Stationary AR(1) chains of variance one, with autocorrelation ``rho ** lag``."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(chains, draws, columns, generator=generator, dtype=torch.float64)
    values = [noise[:, 0]]
    for t in range(1, draws):
        values.append(rho * values[-1] + math.sqrt(1 - rho**2) * noise[:, t])
    return torch.stack(values, 1)


def test_rhat_of_ranks_by_hand():
    """One chain 1..8: halves hold the ranks 1-4 and 5-8; scores are normal quantiles of (r - 3/8) / 8.25."""
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
def test_agrees_with_arviz(rho, draws):
    stats = pytest.importorskip("arviz_stats.base").array_stats
    chains = autoregressive(4, draws, rho, 3, seed=1)
    chains[0, :, 1] += 0.5  # a chain that is elsewhere
    chains[:, :, 2] = chains[:, :, 2].round(decimals=1)  # ties
    for column in range(3):
        one = chains[:, :, column]
        given = {"chain_axis": 0, "draw_axis": 1}
        array = one.numpy()
        assert split_rhat(one).item() == pytest.approx(float(stats.rhat(array, **given)), rel=1e-9)
        for kind, more in (("bulk", {}), ("tail", {"prob": (0.05, 0.95)}), ("mean", {})):
            theirs = float(stats.ess(array, method=kind, **more, **given))
            assert effective_sample_size(one, kind).item() == pytest.approx(theirs, rel=1e-6)
        theirs = float(stats.mcse(array, method="mean", **given))
        assert standard_error(one).item() == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, -0.5])
def test_autoregressive_chains_have_their_known_size(rho):
    """ESS of the mean of an AR(1) chain is (1 - rho) / (1 + rho) of its length."""
    chains = autoregressive(4, 2000, rho, 40, seed=2)
    expected = 8000 * (1 - rho) / (1 + rho)
    found = effective_sample_size(chains, "mean")
    assert found.shape == (40,)
    assert found.mean().item() == pytest.approx(expected, rel=0.08)
    assert split_rhat(chains).mean() < 1.02
    hits = ((chains.mean((0, 1)) / standard_error(chains)).abs() < 1.96).double().mean()
    assert hits > 0.8  # 95 % intervals cover


def test_chains_that_disagree_in_place_or_width_are_told():
    agreed = autoregressive(4, 400, 0.0, 1, seed=3)[..., 0]
    moved, wider = agreed.clone(), agreed.clone()
    moved[0] += 2.0
    wider[0] *= 4.0
    assert split_rhat(agreed) < 1.01
    assert split_rhat(moved) > 1.1
    assert split_rhat(wider) > 1.1  # the folded ranks see it, the plain ones do not
    drifting = agreed + torch.linspace(0, 3, 400)
    assert split_rhat(drifting[:1]) > 1.1  # the halves of one chain


def test_constants():
    same = torch.full((2, 10), 3.0)
    assert split_rhat(same).item() == 1.0
    assert effective_sample_size(same).item() == 20.0
    stuck = torch.tensor([[0.0] * 10, [1.0] * 10])
    assert split_rhat(stuck).item() == math.inf


def test_refusals():
    with pytest.raises(FlowBNNError, match="at least 4 draws"):
        split_rhat(torch.zeros(4, 3))
    with pytest.raises(FlowBNNError, match="NaN or infinity"):
        split_rhat(torch.full((2, 8), math.nan))
    with pytest.raises(FlowBNNError, match="kind=.*'bulk', 'tail' or 'mean'"):
        effective_sample_size(torch.randn(2, 8), "median")
