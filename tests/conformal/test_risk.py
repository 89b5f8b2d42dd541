"""Control of false negatives and of selective errors."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian
from flowbnn.posterior import PointPosterior

LABELS = PointPosterior(nn.Identity(), Bernoulli())
CLASSES = PointPosterior(nn.Identity(), Categorical())


def label_data(number, generator):
    logits = 2.0 * torch.randn(number, 6, generator=generator)
    return logits, torch.bernoulli((0.5 * logits - 1.0).sigmoid(), generator=generator)


def class_data(number, generator):
    logits = 4.0 * torch.randn(number, 4, generator=generator)
    return logits, torch.multinomial((0.8 * logits).softmax(-1), 1, generator=generator).flatten()


def test_the_false_negative_rate_is_controlled_over_splits():
    generator, rates = torch.Generator().manual_seed(0), []
    for _ in range(200):
        sets = fb.control_risk(LABELS, label_data(60, generator), "false-negative-rate", 0.2)
        rates.append(sets.evaluate(label_data(100, generator))["false_negative_rate"])
    error = np.std(rates) / math.sqrt(200)
    assert 0.2 - 2.0 / 61 - 3.0 * error < np.mean(rates) < 0.2 + 3.0 * error


def test_the_threshold_of_false_negatives_is_the_largest_that_is_safe():
    logits, labels = label_data(60, torch.Generator().manual_seed(0))
    sets = fb.control_risk(LABELS, (logits, labels), "false-negative-rate", 0.2)
    probabilities = logits.double().sigmoid()

    def risk(threshold):
        missed = ((probabilities < threshold) & (labels == 1)).sum(1) / labels.sum(1).clamp(min=1)
        return (float(missed.sum()) + 1.0) / 61

    above = probabilities[probabilities > sets.threshold + 1e-6].min()
    assert risk(sets.threshold - 1e-6) <= 0.2 < risk(float(above) + 1e-6)
    assert torch.equal(sets.predict_set(logits), probabilities >= sets.threshold - 1e-7)


def test_masks_of_pixels_are_served():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 1, 3, 3, generator=generator)
    masks = torch.bernoulli(logits.sigmoid(), generator=generator)
    sets = fb.control_risk(LABELS, (logits, masks), "false-negative-rate", 0.1)
    assert sets.predict_set(logits).shape == (40, 3, 3)


@pytest.mark.parametrize("seed", range(5))
def test_all_predictions_are_accepted_if_their_error_is_small_enough(seed):
    """40 examples without an error bound the error rate by a tenth, but 20 do not."""
    logits = 4.0 * torch.randn(40, 3, generator=torch.Generator().manual_seed(seed))
    classifier = fb.control_risk(CLASSES, (logits, logits.argmax(1)), "selective-error", 0.1, seed=seed)
    assert classifier.evaluate((logits, logits.argmax(1))) == {"error": 0.0, "accepted": 1.0}


def test_errors_that_depend_on_no_uncertainty_are_rarely_accepted():
    """All errors have a rate above the level, so that every accepted threshold violates it."""
    generator, accepted = torch.Generator().manual_seed(0), 0
    for split in range(200):
        logits = torch.randn(100, 2, generator=generator)
        wrong = torch.rand(100, generator=generator) < 0.11
        labels = torch.where(wrong, logits.argmin(1), logits.argmax(1))
        try:
            fb.control_risk(CLASSES, (logits, labels), "selective-error", 0.1, confidence=0.8, seed=split)
        except FlowBNNError:
            continue
        accepted += 1
    assert accepted <= 40  # of 200, for a confidence of 0.8


def test_the_selective_error_is_controlled_with_the_confidence():
    """A refusal, because no threshold is certain enough, is allowed in few splits."""
    generator, violations, accepted, refusals = torch.Generator().manual_seed(0), [], [], []
    test = class_data(20_000, generator)
    for split in range(100):
        held_out = class_data(600, generator)
        try:
            classifier = fb.control_risk(
                CLASSES, held_out, "selective-error", 0.1, confidence=0.8, seed=split
            )
        except FlowBNNError as error:
            refusals.append(error.kind)
            continue
        result = classifier.evaluate(test)
        violations.append(result["error"] > 0.1)
        accepted.append(result["accepted"])
    assert len(accepted) > 90
    assert set(refusals) <= {"risk"}
    assert np.sum(violations) <= 100 * 0.2 + 3.0 * math.sqrt(100 * 0.2 * 0.8)
    assert np.mean(accepted) > 0.25
    decision = classifier.decide(test[0])
    assert torch.equal(decision.abstained, decision.values == fb.predictive.ABSTAIN)
    assert float(decision.abstained.double().mean()) == pytest.approx(1.0 - accepted[-1])


@pytest.mark.parametrize(
    ("posterior", "data", "risk", "kind", "argument"),
    [
        (LABELS, (torch.zeros(4, 3), torch.ones(4, 3)), "false-negative-rate", "examples", "held_out"),
        (CLASSES, (torch.zeros(40, 3), torch.ones(40).long()), "false-negative-rate", "unsupported", "risk"),
        (CLASSES, (torch.zeros(40, 3), torch.ones(40).long()), "selective-error", "risk", "level"),
        (LABELS, (torch.zeros(40, 3), torch.ones(40, 3)), "selective-error", "unsupported", "risk"),
        (
            PointPosterior(nn.Identity(), Gaussian(noise=1.0)),
            (torch.zeros(40, 1), torch.zeros(40, 1)),
            "selective-error",
            "unsupported",
            "risk",
        ),
    ],
)
def test_refusals(posterior, data, risk, kind, argument):
    with pytest.raises(FlowBNNError) as caught:
        fb.control_risk(posterior, data, risk)
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
