"""AUROC against counting every pair, average precision against its definition."""

import math

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import novelty_aupr, novelty_auroc


def pluralize(known: Tensor, novel: Tensor) -> float:
    pairs = [(n > k) + 0.5 * (n == k) for k in known.tolist() for n in novel.tolist()]
    return sum(pairs) / len(pairs)


def average_precision(negative: Tensor, positive: Tensor) -> float:
    """Sum over thresholds, from the highest, of the gain in recall times the precision there."""
    area, before = 0.0, 0.0
    for threshold in sorted({*negative.tolist(), *positive.tolist()}, reverse=True):
        found = int((positive >= threshold).sum())
        recall = found / len(positive)
        area += (recall - before) * found / (found + int((negative >= threshold).sum()))
        before = recall
    return area


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_against_counting(decimals: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(decimals)
    known = torch.randn(40, generator=generator, dtype=torch.float64).round(decimals=decimals) * scale
    novel = (torch.randn(25, generator=generator, dtype=torch.float64) + 0.7).round(decimals=decimals) * scale
    assert novelty_auroc(known, novel) == pytest.approx(pluralize(known, novel), abs=1e-6)
    assert novelty_aupr(known, novel) == pytest.approx(average_precision(known, novel), abs=1e-6)
    other_way = novelty_aupr(known, novel, positive="known")
    assert other_way == pytest.approx(average_precision(-novel, -known), abs=1e-6)


def test_against_sklearn_with_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    known, novel = (torch.randint(0, 12, (n,), generator=generator).double() for n in (80, 50))
    truth, scores = [0] * 80 + [1] * 50, torch.cat([known, novel])
    assert novelty_auroc(known, novel) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    assert novelty_aupr(known, novel) == pytest.approx(average_precision_score(truth, scores), abs=1e-12)
    flipped = average_precision_score([1 - t for t in truth], -scores)
    assert novelty_aupr(known, novel, positive="known") == pytest.approx(flipped, abs=1e-12)


def test_ends() -> None:
    low, high = torch.tensor([100.0, 101.0]), torch.tensor([102.0, 103.0])
    assert novelty_auroc(low, high) == 1.0
    assert novelty_auroc(high, low) == 0.0
    assert novelty_aupr(low, high) == 1.0


def test_all_scores_equal_is_guessing() -> None:
    known, novel = torch.zeros(3), torch.zeros(1)
    assert novelty_auroc(known, novel) == 0.5
    assert novelty_aupr(known, novel) == 0.25


def test_infinite_scores_have_an_order() -> None:
    assert novelty_auroc(torch.tensor([-math.inf, 0.0]), torch.tensor([math.inf])) == 1.0


@pytest.mark.parametrize("metric", [novelty_auroc, novelty_aupr])
def test_bad_input(metric) -> None:
    good = torch.tensor([0.1, 0.2])
    with pytest.raises(FlowBNNError, match="novel_scores .*without NaN.* 1 NaN"):
        metric(good, torch.tensor([float("nan"), 1.0]))
    with pytest.raises(FlowBNNError, match="known_scores must be a vector with at least one score"):
        metric(torch.zeros(0), good)
    with pytest.raises(FlowBNNError, match=r"not \[1, 2\]"):
        metric(good, good[None])


def test_unknown_positive() -> None:
    with pytest.raises(FlowBNNError, match="did you mean 'novel'"):
        novelty_aupr(torch.zeros(1), torch.ones(1), positive="novell")  # type: ignore[arg-type]
