"""Tests of AUROC, AUPR and risk-coverage curves against their definitions."""

import math
from itertools import permutations

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import novelty_aupr, novelty_auroc, risk_coverage


def fraction_of_pairs(known: Tensor, novel: Tensor) -> float:
    """Returns the fraction of pairs in which the novel input has the higher score."""
    pairs = [(n > k) + 0.5 * (n == k) for k in known.tolist() for n in novel.tolist()]
    return sum(pairs) / len(pairs)


def average_precision(negative: Tensor, positive: Tensor) -> float:
    """Returns the sum over descending thresholds of the gain in recall times the precision."""
    area, previous = 0.0, 0.0
    for threshold in sorted({*negative.tolist(), *positive.tolist()}, reverse=True):
        detected = int((positive >= threshold).sum())
        recall = detected / len(positive)
        area += (recall - previous) * detected / (detected + int((negative >= threshold).sum()))
        previous = recall
    return area


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_novelty_metrics_agree_with_their_definitions(decimals: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(decimals)
    known = torch.randn(40, generator=generator, dtype=torch.float64).round(decimals=decimals) * scale
    novel = (torch.randn(25, generator=generator, dtype=torch.float64) + 0.7).round(decimals=decimals) * scale
    assert novelty_auroc(known, novel) == pytest.approx(fraction_of_pairs(known, novel), abs=1e-6)
    assert novelty_aupr(known, novel) == pytest.approx(average_precision(known, novel), abs=1e-6)
    of_known = novelty_aupr(known, novel, positive="known")
    assert of_known == pytest.approx(average_precision(-novel, -known), abs=1e-6)


def test_novelty_metrics_agree_with_sklearn_for_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    known, novel = (torch.randint(0, 12, (n,), generator=generator).double() for n in (80, 50))
    truth, scores = [0] * 80 + [1] * 50, torch.cat([known, novel])
    assert novelty_auroc(known, novel) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    assert novelty_aupr(known, novel) == pytest.approx(average_precision_score(truth, scores), abs=1e-12)
    flipped = average_precision_score([1 - t for t in truth], -scores)
    assert novelty_aupr(known, novel, positive="known") == pytest.approx(flipped, abs=1e-12)


def test_separated_scores() -> None:
    low, high = torch.tensor([100.0, 101.0]), torch.tensor([102.0, 103.0])
    assert novelty_auroc(low, high) == 1.0
    assert novelty_auroc(high, low) == 0.0
    assert novelty_aupr(low, high) == 1.0


def test_equal_scores_are_at_chance_level() -> None:
    known, novel = torch.zeros(3), torch.zeros(1)
    assert novelty_auroc(known, novel) == 0.5
    assert novelty_aupr(known, novel) == 0.25


def test_infinite_scores_are_accepted() -> None:
    assert novelty_auroc(torch.tensor([-math.inf, 0.0]), torch.tensor([math.inf])) == 1.0


GOOD = torch.tensor([0.1, 0.2])


@pytest.mark.parametrize("metric", [novelty_auroc, novelty_aupr])
@pytest.mark.parametrize(
    ("known", "novel", "kind", "argument"),
    [
        (GOOD, torch.tensor([math.nan, 1.0]), "not finite", "novel_scores"),
        (torch.zeros(0), GOOD, "shape", "known_scores"),
        (GOOD, GOOD[None], "shape", "novel_scores"),
    ],
)
def test_bad_scores_are_refused(metric, known, novel, kind, argument) -> None:
    with pytest.raises(FlowBNNError) as caught:
        metric(known, novel)
    assert (caught.value.kind, caught.value.argument) == (kind, argument)


def test_unknown_positive_class_is_refused() -> None:
    with pytest.raises(FlowBNNError) as caught:
        novelty_aupr(torch.zeros(1), torch.ones(1), positive="novell")  # type: ignore[arg-type]
    assert caught.value.argument == "positive"


# -------------------- selective prediction


def test_risk_coverage_by_hand() -> None:
    curve = risk_coverage(
        torch.tensor([0.4, 0.1, 0.3, 0.2, 0.5]), torch.tensor([True, True, False, True, False])
    )
    assert curve.coverage.tolist() == [0.2, 0.4, 0.6, 0.8, 1.0]
    by_hand = [0, 0, 1 / 3, 1 / 4, 2 / 5]
    assert curve.risk.tolist() == pytest.approx(by_hand, abs=1e-15)
    assert curve.area == pytest.approx(sum(by_hand) / 5, abs=1e-15)
    assert curve.risk_at(0.6) == pytest.approx(1 / 3)
    assert curve.risk_at(0.61) == pytest.approx(1 / 4)


def test_ties_have_the_mean_risk_of_all_orders() -> None:
    uncertainty = [0.1, 0.2, 0.2, 0.2, 0.3]
    wrong = [0.0, 1.0, 0.0, 0.0, 1.0]
    areas = []
    for middle in permutations(wrong[1:4]):
        ordered = [wrong[0], *middle, wrong[4]]
        areas.append(sum(sum(ordered[:k]) / k for k in range(1, 6)) / 5)
    curve = risk_coverage(torch.tensor(uncertainty), torch.tensor(wrong) == 0)
    assert curve.area == pytest.approx(sum(areas) / len(areas), abs=1e-15)


def test_constant_uncertainty_has_the_error_rate_as_its_area() -> None:
    curve = risk_coverage(torch.ones(4), torch.tensor([True, False, True, True]))
    assert curve.area == 0.25
    assert curve.risk.tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("uncertainty", "correct", "argument"),
    [
        (torch.tensor([math.nan]), torch.tensor([True]), "uncertainty"),
        (torch.zeros(2), torch.tensor([1, 0]), "correct"),
        (torch.zeros(2), torch.tensor([True]), "correct"),
        (torch.zeros(2), [True, False], "correct"),
    ],
)
def test_bad_arguments_of_risk_coverage_are_refused(uncertainty, correct, argument) -> None:
    with pytest.raises(FlowBNNError) as caught:
        risk_coverage(uncertainty, correct)
    assert caught.value.argument == argument


def test_coverage_of_zero_is_refused() -> None:
    with pytest.raises(FlowBNNError) as caught:
        risk_coverage(torch.zeros(1), torch.tensor([True])).risk_at(0.0)
    assert caught.value.argument == "coverage"
