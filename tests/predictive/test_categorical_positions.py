"""Tests of predictives for pixels, tokens and several labels, against predictives of their positions one at a time."""

import pytest
import torch
from sklearn import metrics as sk

from flowbnn.errors import FlowBNNError
from flowbnn.predictive import CategoricalPredictive, SummaryCollector, summarize

SHAPE = (4, 5)
PER_POSITION = ("labels", "confidence", "confidence_error", "risk", "entropy", "aleatoric", "epistemic")
PER_CLASS = ("probabilities", "log_probabilities", "variance", "standard_error")


def make_logits(samples=6, inputs=3, classes=3):
    return torch.randn(samples, inputs, *SHAPE, classes, generator=torch.Generator().manual_seed(0)).double()


def make_targets(inputs=3, classes=3):
    targets = torch.randint(classes, (inputs, *SHAPE), generator=torch.Generator().manual_seed(1))
    targets[:, 1] = -100
    return targets


@pytest.mark.parametrize("counts", [None, torch.tensor([6, 3, 1])])
def test_positions_are_independent_inputs(counts):
    logits, targets = make_logits(), make_targets()
    prediction = CategoricalPredictive(logits, counts)
    repeated = None if counts is None else counts.repeat_interleave(20)
    flat = CategoricalPredictive(logits.flatten(1, 3), repeated)
    for name in (*PER_POSITION, "total_variance", "decision_strength", "energy"):
        value = getattr(prediction, name)
        assert value.shape == (3, *SHAPE)
        torch.testing.assert_close(value.flatten(), getattr(flat, name), msg=name)
    for name in PER_CLASS:
        torch.testing.assert_close(getattr(prediction, name).flatten(0, 2), getattr(flat, name), msg=name)
    torch.testing.assert_close(prediction.sampling_error, flat.sampling_error.reshape(3, -1).amax(1))
    torch.testing.assert_close(prediction.quantiles(0.3).flatten(1, 3), flat.quantiles(0.3))
    assert torch.equal(prediction.credible_set(0.8).flatten(0, 2), flat.credible_set(0.8))
    assert torch.equal(prediction.decide(0.8).values.flatten(), flat.decide(0.8).values)
    assert prediction.sample(5, seed=0).shape == (5, 3, *SHAPE)
    values = flat.nll(targets.clamp(min=0).flatten()).reshape(targets.shape)
    torch.testing.assert_close(prediction.nll(targets), values.masked_fill(targets < 0, 0.0).sum((1, 2)))


def test_scores_are_means_over_positions_with_a_target():
    prediction, targets = CategoricalPredictive(make_logits()), make_targets()
    valid = targets != -100
    flat = CategoricalPredictive.from_probabilities(prediction.probabilities[valid][None])
    scores = prediction.evaluate(targets)
    assert scores == pytest.approx(flat.evaluate(targets[valid]))
    rows, labels = prediction.probabilities[valid].numpy(), targets[valid].numpy()
    assert scores["nll"] == pytest.approx(sk.log_loss(labels, rows))
    assert scores["accuracy"] == pytest.approx(sk.accuracy_score(labels, rows.argmax(-1)))
    with pytest.raises(FlowBNNError) as caught:
        prediction.evaluate(torch.full_like(targets, -100))
    assert caught.value.argument == "targets"


def test_inputs_samples_and_devices_can_be_selected():
    prediction = CategoricalPredictive(make_logits(), torch.tensor([6, 3, 1]))
    torch.testing.assert_close(prediction[1].entropy, prediction.entropy[1:2])
    torch.testing.assert_close(prediction[[2, 0]].probabilities, prediction.probabilities[[2, 0]])
    assert prediction.to(torch.float32).probabilities.dtype == torch.float32
    assert CategoricalPredictive(make_logits()).select_samples(slice(2)).num_samples == 2
    assert "positions=4x5, classes=3" in repr(prediction)


def test_several_labels_have_two_classes_each():
    logits = torch.randn(5, 4, 3)
    prediction = CategoricalPredictive.from_bernoulli(logits)
    assert prediction.probabilities.shape == (4, 3, 2)
    torch.testing.assert_close(prediction.probabilities[..., 1], logits.sigmoid().mean(0))
    mask = CategoricalPredictive.from_bernoulli(torch.randn(5, 4, 1, 6, 6))
    assert mask.labels.shape == mask.entropy.shape == (4, 6, 6)


def test_summaries_of_positions_have_the_values_of_all_samples():
    prediction, targets = CategoricalPredictive(make_logits(), torch.tensor([6, 3, 1])), make_targets()
    summary = SummaryCollector([summarize(prediction[:2]), summarize(prediction[2:])]).result()
    for name in (*PER_POSITION, "probabilities", "sampling_error", "total_variance", "energy"):
        torch.testing.assert_close(getattr(summary, name), getattr(prediction, name), msg=name)
    for by in prediction.uncertainties:
        torch.testing.assert_close(summary.uncertainty(by), prediction.uncertainty(by))
        assert torch.equal(summary.decide(0.3, by).values, prediction.decide(0.3, by).values)
    torch.testing.assert_close(summary.nll(targets), prediction.nll(targets))
    assert summary.evaluate(targets) == pytest.approx(prediction.evaluate(targets))
    torch.testing.assert_close(summary[1:].entropy, prediction[1:].entropy)
    stored = sum(value[0].numel() for value in summary._values.values())
    # a few numbers for each position besides the classes, whatever the number of samples
    assert stored <= 20 * (3 + 6)
    with pytest.raises(FlowBNNError) as caught:
        summary.variance  # noqa: B018
    assert caught.value.argument == "keep_samples"


def test_labels_of_several_labels_may_be_floating_point_numbers():
    logits = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    prediction = CategoricalPredictive.from_bernoulli(logits)
    labels = torch.arange(15).reshape(5, 3) % 2
    assert torch.equal(prediction.nll(labels.double()), prediction.nll(labels))
    assert prediction.evaluate(labels.float()) == prediction.evaluate(labels)
    with pytest.raises(FlowBNNError):
        prediction.nll(labels + 0.5)


def test_masks_may_have_a_channel():
    logits = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    prediction = CategoricalPredictive.from_bernoulli(logits)
    mask = (torch.arange(18) % 2).reshape(2, 1, 3, 3)
    assert prediction.evaluate(mask.float()) == prediction.evaluate(mask.squeeze(1))


def test_ignored_targets_alone_have_no_risk():
    prediction = CategoricalPredictive(make_logits())
    with pytest.raises(FlowBNNError) as caught:
        prediction.risk_coverage(torch.full((3, *SHAPE), -100))
    assert caught.value.kind == "targets"
