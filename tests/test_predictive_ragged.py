"""Predictives whose inputs had different numbers of samples: every number is that of the input's own samples alone."""

import math

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive

SPENT = torch.tensor([1, 3, 7, 8, 4])
LOGITS = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
MEANS = torch.randn(8, 5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
VARIANCES = 0.1 + torch.rand(8, 5, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 0])
TARGETS = torch.randn(5, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def unfinished(values: torch.Tensor) -> torch.Tensor:
    """What a sampler leaves: NaN where it spent no sample."""
    return values.masked_fill(torch.arange(8)[:, None, None] >= SPENT[:, None], math.nan)


CLASSES = CategoricalPredictive(unfinished(LOGITS), SPENT)
NUMBERS = GaussianPredictive(unfinished(MEANS), unfinished(VARIANCES), SPENT)
ALONE = {
    CLASSES: [CategoricalPredictive(LOGITS[:n, i : i + 1]) for i, n in enumerate(SPENT.tolist())],
    NUMBERS: [
        GaussianPredictive(MEANS[:n, i : i + 1], VARIANCES[:n, i : i + 1])
        for i, n in enumerate(SPENT.tolist())
    ],
}
BOTH = ["standard_error", "sampling_error", "sample_counts"]
CASES = [
    *(
        (CLASSES, name)
        for name in [*BOTH, *CLASSES.uncertainties, "probabilities", "log_probabilities", "labels"]
    ),
    *(
        (CLASSES, name)
        for name in ["confidence", "variance", "expected_entropy", "mutual_information", "decision_strength"]
    ),
    *((NUMBERS, name) for name in [*BOTH, *NUMBERS.uncertainties, "mean"]),
]


@pytest.mark.parametrize(
    ("predictive", "name"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_properties(predictive, name):
    expected = torch.cat([getattr(part, name) for part in ALONE[predictive]])
    torch.testing.assert_close(getattr(predictive, name), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("predictive", "ask"),
    [
        (CLASSES, lambda p, i: p.nll(LABELS[i])),
        (CLASSES, lambda p, i: p.quantiles([0.0, 0.3, 1.0]).movedim(0, 1)),
        (CLASSES, lambda p, i: p.credible_set(0.8)),
        (CLASSES, lambda p, i: p.decide(0.5)),
        (NUMBERS, lambda p, i: p.nll(TARGETS[i])),
        (NUMBERS, lambda p, i: p.cdf(TARGETS[i])),
        (NUMBERS, lambda p, i: p.quantiles([0.05, 0.5, 0.99]).movedim(0, 1)),
        (NUMBERS, lambda p, i: p.interval(0.9).high),
        (NUMBERS, lambda p, i: p.decide(0.5).values),
    ],
)
def test_methods(predictive, ask):
    expected = torch.cat([ask(part, slice(i, i + 1)) for i, part in enumerate(ALONE[predictive])])
    torch.testing.assert_close(ask(predictive, slice(None)), expected, rtol=1e-9, atol=1e-9)


def test_evaluation_is_of_the_whole():
    scores = CLASSES.evaluate(LABELS)
    assert scores["nll"] == pytest.approx(
        float(torch.cat([p.nll(LABELS[i : i + 1]) for i, p in enumerate(ALONE[CLASSES])]).mean())
    )
    assert NUMBERS.evaluate(TARGETS).keys() == {"rmse", "nll", "crps", "coverage_90"}


@pytest.mark.parametrize("predictive", [CLASSES, NUMBERS])
def test_cutting_and_moving_keep_the_counts(predictive):
    assert predictive[1:4].sample_counts.tolist() == [3, 7, 8]
    assert predictive[-1].sample_counts.tolist() == [4]
    assert predictive[:2].sample_counts.tolist() == SPENT[:2].tolist()
    assert predictive.to(torch.bfloat16).sample_counts.dtype == torch.int64
    assert "samples=1 to 8, 4.6 on average" in repr(predictive)


def test_samples_that_were_not_spent_are_marked():
    assert CLASSES.samples[1:, 0].isnan().all()
    assert not CLASSES.samples[:3, 1].isnan().any()
    whatever = CategoricalPredictive(LOGITS, SPENT)
    assert whatever.samples[1:, 0].isnan().all(), "also when the sampler left numbers there"
    torch.testing.assert_close(whatever.entropy, CLASSES.entropy)


def test_the_strength_of_a_decision_by_hand():
    samples = torch.tensor([[[0.6, 0.3, 0.1]], [[0.8, 0.1, 0.1]]], dtype=torch.float64)
    strength = CategoricalPredictive.from_probabilities(samples).decision_strength
    # leads over the second class: 0.3 and 0.7, mean 0.5, standard error 0.2; over the third: 0.5, 0.7: 0.6, 0.1
    torch.testing.assert_close(strength, torch.tensor([2.5], dtype=torch.float64))
    same = samples[:1].expand(4, 1, 3)
    assert CategoricalPredictive.from_probabilities(same).decision_strength.item() == math.inf
    assert CategoricalPredictive.from_probabilities(samples[:1]).decision_strength.item() == 0.0
    tie = torch.full((3, 1, 2), 0.5, dtype=torch.float64)
    assert CategoricalPredictive.from_probabilities(tie).decision_strength.item() == 0.0


@pytest.mark.parametrize(
    ("sample_counts", "line"),
    [
        (torch.ones(4, dtype=torch.long), "a vector of 5 integers"),
        (torch.ones(5), "a vector of 5 integers .* not torch.float32"),
        (torch.tensor([0, 1, 2, 3, 4]), "from 1 to 8"),
        (torch.tensor([1, 1, 1, 1, 9]), "from 1 to 8"),
    ],
)
def test_counts_that_do_not_fit(sample_counts, line):
    with pytest.raises(FlowBNNError, match=line):
        CategoricalPredictive(LOGITS, sample_counts)


def test_a_sample_that_was_spent_must_be_a_number():
    broken = unfinished(LOGITS)
    broken[0, 2] = math.nan
    with pytest.raises(FlowBNNError, match="not finite for 1 of 5 inputs"):
        CategoricalPredictive(broken, SPENT)
