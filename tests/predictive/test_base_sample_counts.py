"""Tests of predictives whose inputs have different numbers of samples. Only the samples of an input affect its results."""

import math

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive
from likelihood_cases import LIKELIHOODS

COUNTS = torch.tensor([1, 3, 7, 8, 4])
LOGITS = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
MEANS = torch.randn(8, 5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
VARIANCES = 0.1 + torch.rand(8, 5, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 0])
TARGETS = torch.randn(5, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def mask_missing(values: torch.Tensor) -> torch.Tensor:
    """Returns samples with NaN for those that an input does not have, as adaptive sampling does."""
    return values.masked_fill(torch.arange(8)[:, None, None] >= COUNTS[:, None], math.nan)


CLASSES = CategoricalPredictive(mask_missing(LOGITS), COUNTS)
NUMBERS = GaussianPredictive(mask_missing(MEANS), mask_missing(VARIANCES), COUNTS)
SINGLE_INPUTS = {
    CLASSES: [CategoricalPredictive(LOGITS[:n, i : i + 1]) for i, n in enumerate(COUNTS.tolist())],
    NUMBERS: [
        GaussianPredictive(MEANS[:n, i : i + 1], VARIANCES[:n, i : i + 1])
        for i, n in enumerate(COUNTS.tolist())
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
def test_properties_are_those_of_single_inputs(predictive, name):
    expected = torch.cat([getattr(single, name) for single in SINGLE_INPUTS[predictive]])
    torch.testing.assert_close(getattr(predictive, name), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("predictive", "call"),
    [
        (CLASSES, lambda p, i: p.nll(LABELS[i])),
        (CLASSES, lambda p, i: p.quantiles([0.0, 0.3, 1.0]).movedim(0, 1)),
        (CLASSES, lambda p, i: p.credible_set(0.8)),
        (CLASSES, lambda p, i: p.decide(0.5).values),
        (NUMBERS, lambda p, i: p.nll(TARGETS[i])),
        (NUMBERS, lambda p, i: p.cdf(TARGETS[i])),
        (NUMBERS, lambda p, i: p.quantiles([0.05, 0.5, 0.99]).movedim(0, 1)),
        (NUMBERS, lambda p, i: p.interval(0.9).high),
        (NUMBERS, lambda p, i: p.decide(0.5).values),
    ],
)
def test_methods_are_those_of_single_inputs(predictive, call):
    expected = torch.cat(
        [call(single, slice(i, i + 1)) for i, single in enumerate(SINGLE_INPUTS[predictive])]
    )
    result = call(predictive, slice(None))
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9, equal_nan=True)  # NaN abstains


def test_evaluation_averages_over_all_inputs():
    scores = CLASSES.evaluate(LABELS)
    assert scores["nll"] == pytest.approx(
        float(torch.cat([p.nll(LABELS[i : i + 1]) for i, p in enumerate(SINGLE_INPUTS[CLASSES])]).mean())
    )
    assert NUMBERS.evaluate(TARGETS).keys() == {"rmse", "nll", "crps", "coverage_90"}


@pytest.mark.parametrize("predictive", [CLASSES, NUMBERS])
def test_indexing_and_moving_keep_the_counts(predictive):
    assert predictive[1:4].sample_counts.tolist() == [3, 7, 8]
    assert predictive[-1].sample_counts.tolist() == [4]
    assert predictive[:2].sample_counts.tolist() == COUNTS[:2].tolist()
    assert predictive.to(torch.bfloat16).sample_counts.dtype == torch.int64
    assert "samples=1 to 8, 4.6 on average" in repr(predictive)


def test_missing_samples_are_nan():
    assert CLASSES.samples[1:, 0].isnan().all()
    assert not CLASSES.samples[:3, 1].isnan().any()
    with_values = CategoricalPredictive(LOGITS, COUNTS)
    assert with_values.samples[1:, 0].isnan().all()
    torch.testing.assert_close(with_values.entropy, CLASSES.entropy)


def test_decision_strength_by_hand():
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
    ("sample_counts", "kind"),
    [
        (torch.ones(4, dtype=torch.long), "shape"),
        (torch.ones(5), "shape"),
        (torch.tensor([0, 1, 2, 3, 4]), "range"),
        (torch.tensor([1, 1, 1, 1, 9]), "range"),
    ],
)
@pytest.mark.parametrize("name", sorted({*LIKELIHOODS} - {"Heads"}))
def test_bad_sample_counts_are_refused(name, sample_counts, kind):
    make, outputs, _ = LIKELIHOODS[name]
    with pytest.raises(FlowBNNError) as caught:
        make().predictive(torch.ones(8, 5, outputs), sample_counts)
    assert (caught.value.kind, caught.value.argument) == (kind, "sample_counts")


def test_samples_of_an_input_must_be_finite():
    samples = mask_missing(LOGITS)
    samples[0, 2] = math.nan
    with pytest.raises(FlowBNNError) as caught:
        CategoricalPredictive(samples, COUNTS)
    assert caught.value.kind == "not finite"
    assert caught.value.fields["inputs"] == 1
