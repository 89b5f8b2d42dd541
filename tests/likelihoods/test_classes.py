"""Tests of the likelihoods of class labels."""

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical


def test_log_prob_agrees_with_torch():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = torch.distributions.Categorical(logits=logits).log_prob(labels)
    torch.testing.assert_close(Categorical().log_prob(logits, labels), expected)
    logits, labels = torch.randn(6, 1), torch.tensor([0, 1, 1, 0, 1, 1])
    expected = torch.distributions.Bernoulli(logits=logits[:, 0]).log_prob(labels.float())
    torch.testing.assert_close(Bernoulli().log_prob(logits, labels), expected)
    assert Bernoulli().predictive(logits[None]).probabilities.shape == (6, 2)


def test_floating_point_labels_can_be_compiled_and_vectorized():
    outputs, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = Categorical().log_prob(outputs, labels)
    compiled = torch.compile(Categorical().log_prob, fullgraph=True, backend="eager")
    assert torch.equal(compiled(outputs, labels.float()), expected)
    vectorized = torch.func.vmap(lambda row, label: Categorical().log_prob(row[None], label[None])[0])
    assert torch.equal(vectorized(outputs, labels.float()), expected)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "argument"),
    [
        (Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([-1, 2]), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(2), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(5).long(), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(2, 1).long(), "targets"),
        (Categorical(), torch.zeros(2, 3), torch.eye(3).long()[:2], "targets"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]]), "targets"),
        (Categorical(), torch.zeros(2, 3, 4), torch.zeros(2), "outputs"),
        (Categorical(), torch.zeros(2, 3, 4), torch.zeros(2, 4).long(), "outputs"),
        (Bernoulli(), torch.zeros(2, 1), torch.tensor([0, 2]), "targets"),
        (Bernoulli(), torch.zeros(2, 3), torch.tensor([0, 1]), "outputs"),
    ],
)
def test_outputs_and_targets_that_do_not_fit_are_refused(likelihood, outputs, targets, argument):
    with pytest.raises(FlowBNNError) as caught:
        likelihood.check(outputs, targets)
    assert (caught.value.kind, caught.value.argument) == (argument, argument)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_labels_with_fractions_are_refused(likelihood):
    with pytest.raises(FlowBNNError) as caught:
        likelihood.canonical_targets(torch.tensor([0.0, 0.9]))
    assert (caught.value.kind, caught.value.argument) == ("targets", "targets")
