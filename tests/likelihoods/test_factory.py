"""Tests of the choice of a likelihood by its name or by the targets."""

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian, make_likelihood
from flowbnn.packing import pack_targets


def test_auto_chooses_by_the_targets():
    assert isinstance(make_likelihood("auto", torch.zeros(3, 4), torch.tensor([0, 1, 2])), Categorical)
    assert isinstance(make_likelihood("auto", torch.zeros(3, 1), torch.tensor([0, 1, 1])), Bernoulli)
    gaussian = make_likelihood("auto", torch.zeros(3, 2), torch.zeros(3, 2))
    assert isinstance(gaussian, Gaussian)
    assert gaussian.dim == 2


@pytest.mark.parametrize(
    "targets", [torch.tensor([0.0, 0.5, 1.0]), torch.ones(3, 2), torch.tensor([1.0, 2.0, 0.0])]
)
def test_real_numbers_are_a_regression(targets):
    outputs = torch.zeros(3, 1 if targets.ndim == 1 else 2)
    assert isinstance(make_likelihood("auto", outputs, targets), Gaussian)


def test_rows_of_probabilities_are_soft_labels():
    targets = torch.tensor([[0.8, 0.1, 0.1], [0.0, 1.0, 0.0]])
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert isinstance(make_likelihood("auto", torch.zeros(2, 3), targets.to(dtype)), Categorical)
    assert isinstance(make_likelihood("gaussian", torch.zeros(2, 3), targets), Gaussian)


ONE_HOT = torch.eye(3)[[0, 2, 1, 0]]
BINARY = torch.tensor([0.0, 1.0, 1.0, 0.0])
MULTI_LABEL = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(4, 3), ONE_HOT),
        (torch.zeros(4, 1), torch.zeros(4)),
        (torch.zeros(4, 2), BINARY),
        (torch.zeros(2, 4), MULTI_LABEL),
        (torch.zeros(2, 3, 4, 4), torch.eye(3)[torch.arange(32) % 3].reshape(2, 4, 4, 3).movedim(-1, 1)),
        (torch.zeros(4, 2), None),
    ],
)
def test_ambiguous_targets_are_refused(outputs, targets):
    with pytest.raises(FlowBNNError) as caught:
        make_likelihood("auto", outputs, targets)
    assert (caught.value.kind, caught.value.argument) == ("targets", "likelihood")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        ((4, 1), BINARY),
        ((4,), BINARY),
        ((2, 3), MULTI_LABEL),
        ((2, 3), MULTI_LABEL.long()),
        ((2, 3), MULTI_LABEL.bool()),
        ((2, 3), torch.tensor([[1.0, -100.0, 0.0], [0.0, 1.0, 1.0]])),
        ((2, 1, 2, 2), torch.tensor([0.0, 1.0, 1.0, 1.0]).repeat(2, 1).reshape(2, 1, 2, 2)),
        ((2, 1, 2, 2), torch.tensor([0, 1, 1, 1]).repeat(2, 1).reshape(2, 2, 2)),
    ],
)
def test_labels_with_one_output_each_are_bernoulli(outputs, targets):
    likelihood = make_likelihood("auto", torch.zeros(outputs), targets)
    assert isinstance(likelihood, Bernoulli)
    likelihood.check(torch.zeros(outputs), targets)


def test_labels_and_probabilities_at_positions_are_categorical():
    masks = torch.arange(32).reshape(2, 4, 4) % 3
    assert isinstance(make_likelihood("auto", torch.zeros(2, 3, 4, 4), masks), Categorical)
    soft = torch.rand(2, 3, 4, 4).softmax(1)
    assert isinstance(make_likelihood("auto", torch.zeros(2, 3, 4, 4), soft), Categorical)


def test_targets_of_several_heads_need_their_likelihoods():
    targets = pack_targets((torch.tensor([0, 1]), torch.zeros(2, 1)))
    with pytest.raises(FlowBNNError) as error:
        make_likelihood("auto", torch.zeros(2, 2), targets)
    assert (error.value.kind, error.value.argument) == ("targets", "likelihood")


def test_names_override_the_targets():
    assert isinstance(make_likelihood("gaussian", torch.zeros(4, 1), BINARY), Gaussian)
    assert isinstance(make_likelihood("bernoulli", torch.zeros(4, 1), BINARY), Bernoulli)
    assert isinstance(make_likelihood("gaussian", torch.zeros(2, 3), MULTI_LABEL), Gaussian)


def test_unknown_names_are_refused():
    with pytest.raises(FlowBNNError) as caught:
        make_likelihood("categorial")
    assert caught.value.argument == "likelihood"
    assert "'categorical'" in str(caught.value)
