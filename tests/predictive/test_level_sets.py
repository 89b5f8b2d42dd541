"""Sets of values with a high predictive density."""

import math

import torch

from flowbnn.predictive import GaussianPredictive
from flowbnn.predictive.level_sets import level_set, marginal_log_density


def test_the_set_of_a_gaussian_is_symmetric_and_exact_far_in_the_tails():
    """The set at the density of z standard deviations is the mean plus and minus z, also beyond the grid."""
    mean, std = torch.tensor([[[1.0], [-20.0], [300.0]]]).double(), torch.tensor([0.1, 1.0, 7.0]).double()
    predictive = GaussianPredictive(mean, std.square().view(1, 3, 1))
    for z in (0.5, 2.0, 12.0):
        for row in range(3):
            level = -0.5 * z**2 - math.log(float(std[row]) * math.sqrt(2.0 * math.pi))
            low, high = level_set(predictive[row], torch.tensor([level], dtype=torch.float64))
            torch.testing.assert_close(low.flatten(), mean[0, row] - z * std[row])
            torch.testing.assert_close(high.flatten(), mean[0, row] + z * std[row])


def test_the_set_equals_a_search_on_a_dense_grid():
    generator = torch.Generator().manual_seed(0)
    predictive = GaussianPredictive(3.0 * torch.randn(4, 6, 2, generator=generator), 0.3)
    level = torch.tensor([-2.5, -3.5])
    low, high = level_set(predictive, level)
    points = torch.linspace(-12.0, 12.0, 4001).expand(6, 2, -1)
    expected = marginal_log_density(predictive, points) >= level.view(-1, 1)
    inside = ((points >= low.unsqueeze(-1)) & (points <= high.unsqueeze(-1))).any(0)
    distance = (marginal_log_density(predictive, points) - level.view(-1, 1)).abs()
    assert torch.equal(inside[distance > 0.05], expected[distance > 0.05])
    assert bool((low[1:] > high[:-1])[~low[1:].isnan()].all())


def test_a_level_above_the_density_gives_the_mode():
    predictive = GaussianPredictive(torch.tensor([[[1.0]]]), 1.0)
    low, high = level_set(predictive, torch.tensor([5.0]))
    assert torch.equal(low, high)
    torch.testing.assert_close(low.flatten(), torch.ones(1), atol=0.05, rtol=0.0)
