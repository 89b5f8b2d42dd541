"""The likelihood that ``"auto"`` chooses, and what it refuses to guess."""

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import make_likelihood


def test_labels_as_real_numbers_are_not_taken_for_regression():
    one_hot = torch.eye(3)[[0, 2, 1, 0]]
    with pytest.raises(
        FlowBNNError, match=r"look like one-hot labels; give integers \(targets.argmax\(1\)\)"
    ):
        make_likelihood("auto", torch.zeros(4, 3), one_hot)
    with pytest.raises(FlowBNNError, match="all 0 or 1; say likelihood='bernoulli'"):
        make_likelihood("auto", torch.zeros(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0]))
    for named in ("gaussian", "bernoulli"):
        assert (
            type(
                make_likelihood(named, torch.zeros(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0]))
            ).__name__.lower()
            == named
        )


def test_real_numbers_are_regression():
    for targets in (
        torch.tensor([0.0, 0.5, 1.0]),
        torch.ones(3, 2),
        torch.tensor([1.0, 2.0, 0.0]),
    ):
        outputs = torch.zeros(3, 1 if targets.ndim == 1 else 2)
        assert type(make_likelihood("auto", outputs, targets)).__name__ == "Gaussian"
