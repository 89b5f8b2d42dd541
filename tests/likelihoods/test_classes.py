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


def test_soft_labels_are_expectations_over_labels():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    soft = torch.rand(5, 3, generator=generator).softmax(-1)
    likelihood, labels = Categorical(), torch.arange(3)
    values = torch.stack([likelihood.log_prob(logits, label.expand(5)) for label in labels], -1)
    expected = (soft * values).sum(-1)
    torch.testing.assert_close(likelihood.log_prob(logits, soft), expected)
    one_hot = torch.eye(3)[[0, 2, 1, 1, 0]]
    torch.testing.assert_close(
        likelihood.log_prob(logits, one_hot), likelihood.log_prob(logits, one_hot.argmax(1))
    )
    predictive = likelihood.predictive(logits[None])
    for name, value in predictive.evaluate(soft).items():
        if (
            name != "ece"
        ):  # the other scores are sums over examples, so that their expectation is a sum over labels
            single = [
                [
                    likelihood.predictive(logits[None, i : i + 1]).evaluate(label[None])[name]
                    for label in labels
                ]
                for i in range(5)
            ]
            assert value == pytest.approx(float((soft * torch.tensor(single)).sum(-1).mean()), abs=1e-6)
    assert predictive.evaluate(one_hot) == pytest.approx(predictive.evaluate(one_hot.argmax(1)))


@pytest.mark.parametrize("targets", [torch.tensor([[0.5, 0.6]]), torch.tensor([[1.5, -0.5]])])
def test_rows_that_are_no_probabilities_are_refused(targets):
    with pytest.raises(FlowBNNError) as caught:
        Categorical().check(torch.zeros(1, 2), targets)
    assert (caught.value.kind, caught.value.argument) == ("targets", "targets")


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_labels_with_fractions_are_refused(likelihood):
    with pytest.raises(FlowBNNError) as caught:
        likelihood.canonical_targets(torch.tensor([0.0, 0.9]))
    assert (caught.value.kind, caught.value.argument) == ("targets", "targets")
