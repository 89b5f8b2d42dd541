"""Tests of scores from the confusion matrix, against scikit-learn on the positions that have a target."""

import pytest
import torch
from sklearn import metrics as sk

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import (
    accuracy,
    brier_score,
    confusion_matrix,
    f1_score,
    intersection_over_union,
    negative_log_likelihood,
)


def segmentation(seed=0, classes=4):
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(3, 5, 6, classes, generator=generator, dtype=torch.float64).softmax(-1)
    targets = torch.randint(classes, (3, 5, 6), generator=generator)
    targets[:, 0] = -100
    return probabilities, targets


def test_segmentations_agree_with_scikit_learn():
    probabilities, targets = segmentation()
    labels, valid = probabilities.argmax(-1), targets != -100
    flat = targets[valid].numpy(), labels[valid].numpy()
    assert torch.equal(confusion_matrix(labels, targets), torch.from_numpy(sk.confusion_matrix(*flat)))
    iou = intersection_over_union(labels, targets)
    assert iou.tolist() == pytest.approx(sk.jaccard_score(*flat, average=None).tolist())
    for average in ("micro", "macro"):
        assert f1_score(labels, targets, average) == pytest.approx(sk.f1_score(*flat, average=average))
    rows = probabilities[valid].numpy()
    assert accuracy(probabilities, targets) == pytest.approx(sk.accuracy_score(*flat))
    assert negative_log_likelihood(probabilities, targets) == pytest.approx(sk.log_loss(flat[0], rows))
    expected = sk.brier_score_loss(flat[0], rows, scale_by_half=False)
    assert brier_score(probabilities, targets) == pytest.approx(expected)


def test_several_labels_agree_with_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    labels, targets = (torch.randint(2, (20, 5), generator=generator) for _ in range(2))
    labels[:, 4], targets[:, 4] = 0, 0  # a label that never occurs
    for average in ("micro", "macro"):
        expected = sk.f1_score(targets.numpy(), labels.numpy(), average=average, zero_division=0)
        assert f1_score(labels, targets, average, multilabel=True) == pytest.approx(expected)
    known = targets.clone()
    known[:10, 0] = -100
    columns = [(known[:, c] != -100, c) for c in range(5)]
    scores = [sk.f1_score(targets[v, c].numpy(), labels[v, c].numpy(), zero_division=0) for v, c in columns]
    assert f1_score(labels, known, multilabel=True) == pytest.approx(sum(scores) / 5)


def test_absent_classes():
    labels, targets = torch.tensor([0, 2, 2]), torch.tensor([0, 2, 0])
    iou = intersection_over_union(labels, targets, classes=4)
    assert iou.isnan().tolist() == [False, True, False, True]
    assert float(iou.nanmean()) == pytest.approx(0.5)
    assert f1_score(labels, targets) == pytest.approx(sk.f1_score(targets, labels, average="macro"))


@pytest.mark.parametrize(
    ("labels", "targets", "argument"),
    [
        (torch.zeros(3).long(), torch.zeros(4).long(), "targets"),
        (torch.zeros(3).long(), torch.full((3,), -100), "targets"),
        (torch.zeros(3), torch.zeros(3).long(), "labels"),
        (torch.full((3,), -1), torch.zeros(3).long(), "labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, targets, argument):
    for function in (confusion_matrix, intersection_over_union, f1_score):
        with pytest.raises(FlowBNNError) as caught:
            function(labels, targets)
        assert caught.value.argument == argument


def test_all_ignored_is_one_line():
    probabilities, targets = segmentation()
    with pytest.raises(FlowBNNError) as caught:
        accuracy(probabilities, torch.full_like(targets, -100))
    assert (caught.value.kind, caught.value.argument) == ("targets", "targets")
