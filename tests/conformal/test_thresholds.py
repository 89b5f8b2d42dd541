"""Thresholds of conformal prediction and of conformal risk control."""

import math

import pytest
import torch

from flowbnn import FlowBNNError
from flowbnn.conformal import conformal_quantile, risk_threshold
from flowbnn.conformal.thresholds import exact, least_examples, loss_threshold


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
def test_the_quantile_has_the_rank_of_the_theorem(coverage):
    """The rank is ceil((n + 1) c) in exact arithmetic, also where the product is an integer."""
    for number in range(19, 60):
        scores = torch.randperm(number, generator=torch.Generator().manual_seed(number)).double() + 1.0
        rank = -(-(number + 1) * round(100 * coverage) // 100)
        assert conformal_quantile(scores, coverage) == rank


def test_too_few_examples_name_the_least_number():
    for coverage, least in ((0.9, 9), (0.95, 19), (0.99, 99)):
        assert conformal_quantile(torch.arange(float(least)), coverage) == least - 1
        with pytest.raises(FlowBNNError) as caught:
            conformal_quantile(torch.arange(least - 1.0), coverage)
        assert (caught.value.kind, caught.value.argument) == ("examples", "held_out")
        assert caught.value.fields["least"] == least
        assert f"at least {least} " in str(caught.value)


def test_the_threshold_of_weighted_losses_equals_a_search_over_all_scores():
    generator = torch.Generator().manual_seed(0)
    for number in (12, 30, 71):
        scores = torch.randint(40, (number, 5), generator=generator).double()
        positions = torch.rand(number, 5, generator=generator) < 0.6
        positions[:, 0] = True
        weights = positions / positions.sum(1, keepdim=True)
        for level in (0.1, 0.25, 0.5):
            threshold = loss_threshold(scores[positions], weights[positions].double(), number, exact(level))
            risks = {
                value: float((weights.double() * (scores > value)).sum() + 1.0) / (number + 1)
                for value in scores.unique().tolist()
            }
            assert threshold == min(value for value, risk in risks.items() if risk <= level + 1e-9)


def test_no_threshold_is_needed_if_nothing_must_be_covered():
    assert loss_threshold(torch.ones(1), torch.ones(1), 20, exact(0.5)) == -math.inf
    assert loss_threshold(torch.ones(3), torch.ones(3), 3, exact(0.1)) == math.inf
    assert least_examples(exact(0.1)) == 9


def test_risk_control_of_any_loss_equals_its_definition():
    generator = torch.Generator().manual_seed(1)
    thresholds = torch.linspace(0.0, 1.0, 21)
    scores = torch.rand(40, 8, generator=generator)
    losses = (scores.unsqueeze(-1) > thresholds).double().mean(1)
    threshold = risk_threshold(losses, thresholds, 0.2)
    place = thresholds.tolist().index(threshold)
    risks = (losses.sum(0) + 1.0) / 41
    assert risks[place] <= 0.2 < risks[place - 1]


def test_risk_control_refuses_losses_that_grow_and_unreachable_levels():
    thresholds = torch.tensor([0.0, 1.0])
    for losses, kind in (
        (torch.tensor([[0.0, 1.0]]).expand(20, 2), "range"),
        (torch.ones(20, 2), "risk"),
        (torch.zeros(3, 2), "examples"),
    ):
        with pytest.raises(FlowBNNError) as caught:
            risk_threshold(losses, thresholds, 0.1)
        assert caught.value.kind == kind
