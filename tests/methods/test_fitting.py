"""Preparation of a fit: one pass over the first batch."""

import warnings

import pytest
import torch
from problems import QUIET, of_kind
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNWarning


@pytest.mark.parametrize(
    ("last", "warns"),
    [
        (nn.Sigmoid(), True),
        (torch.sigmoid, True),
        (lambda outputs: outputs.squeeze(1).sigmoid(), True),
        (lambda outputs: 0.5 + 0.1 * outputs.tanh(), False),  # logits of one sign
        (lambda outputs: torch.sigmoid(outputs).logit(), False),
        (lambda outputs: torch.sigmoid(outputs).clamp(1e-6, 1 - 1e-6).double().float(), True),
        (lambda outputs: torch.func.vmap(lambda row: row * torch.sigmoid(row))(outputs), False),
    ],
    ids=["module", "function", "method", "logits", "undone", "clamped", "vmap"],
)
def test_warning_if_the_network_ends_in_a_sigmoid(last, warns):
    class Ended(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 1), last

        def forward(self, x):
            return self.last(self.layer(x))

    data = [(torch.randn(30, 4), torch.arange(30) % 2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlowBNNWarning)
        fb.MLE(epochs=1).fit(Ended(), data, **QUIET)
    assert len(of_kind(caught, "probabilities")) == warns
