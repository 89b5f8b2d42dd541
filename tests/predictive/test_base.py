"""Tests that all predictive distributions share, and of errors for bad input."""

import copy
import math
import pickle

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive


def random_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Returns normal random numbers in float64."""
    return 2.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CATEGORICAL = CategoricalPredictive(random_numbers(3, 5, 4))
GAUSSIAN = GaussianPredictive(random_numbers(3, 5, 2), random_numbers(3, 5, 2, seed=1).exp())
each_predictive = pytest.mark.parametrize(
    "prediction", [CATEGORICAL, GAUSSIAN], ids=lambda predictive: type(predictive).__name__
)


@each_predictive
def test_indexing_selects_inputs(prediction) -> None:
    assert len(prediction) == 5
    assert prediction.num_samples == 3
    assert torch.equal(prediction[-1].samples, prediction.samples[:, 4:])
    assert torch.equal(prediction[torch.tensor([3, 0])].samples, prediction.samples[:, [3, 0]])
    assert torch.equal(prediction[prediction.samples[0, :, 0] > -9].samples, prediction.samples)
    assert len(list(prediction)) == 5
    for index in (5, torch.ones(4, dtype=torch.bool)):
        with pytest.raises(IndexError):
            prediction[index]


@each_predictive
def test_predictive_of_no_inputs(prediction) -> None:
    empty = prediction[:0]
    assert len(empty) == 0
    assert empty.epistemic.shape[0] == 0
    assert empty.variance.shape == empty.standard_error.shape == empty.samples.shape[1:]
    assert empty.quantiles(0.5).shape[1] == 0
    assert "inputs=0" in repr(empty)


@each_predictive
def test_predictive_can_be_moved_copied_and_pickled(prediction) -> None:
    assert prediction.to(torch.float32).epistemic.dtype == torch.float32
    for other in (prediction.cpu(), copy.deepcopy(prediction), pickle.loads(pickle.dumps(prediction))):
        assert torch.equal(other.epistemic, prediction.epistemic)


@each_predictive
def test_repr_has_the_parts_of_the_uncertainty(prediction) -> None:
    assert "samples=3, inputs=5" in repr(prediction)
    assert "aleatoric" in repr(prediction)


@each_predictive
def test_every_uncertainty_has_a_value_for_each_input(prediction) -> None:
    for name in prediction.uncertainties:
        assert prediction.uncertainty(name).shape[0] == 5


@each_predictive
@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda prediction: prediction.decide(0.5, by="epistemc"), "by"),
        (lambda prediction: prediction.decide(math.nan), "abstain_above"),
        (lambda prediction: prediction.quantiles(1.5), "q"),
        (lambda prediction: prediction.quantiles([]), "q"),
    ],
)
def test_bad_arguments_are_refused(prediction, call, argument) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call(prediction)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: CategoricalPredictive(torch.zeros(0, 2, 3)), "shape", "logits"),
        (lambda: CategoricalPredictive(torch.zeros(2, 3)), "shape", "logits"),
        (lambda: CategoricalPredictive(torch.zeros(2, 3, 1)), "shape", "logits"),
        (lambda: CategoricalPredictive(torch.zeros(2, 3, 2, dtype=torch.long)), "dtype", "logits"),
        (lambda: CategoricalPredictive([[[0.0]]]), "value", "logits"),
        (lambda: CategoricalPredictive(torch.tensor([[[math.nan, 0], [0, 0]]])), "not finite", None),
        (lambda: CategoricalPredictive(torch.tensor([[[math.inf, 0], [0, 0]]])), "not finite", None),
        (lambda: CategoricalPredictive.from_probabilities(torch.zeros(0, 1, 2)), "shape", "probabilities"),
        (
            lambda: CategoricalPredictive.from_probabilities(torch.full((3, 1, 2), math.nan)),
            "not finite",
            None,
        ),
        (lambda: CategoricalPredictive.from_probabilities(torch.ones(3, 1, 2)), "range", "probabilities"),
        (lambda: CategoricalPredictive.from_bernoulli(torch.zeros(3)), "shape", "logits"),
        (lambda: CategoricalPredictive.from_bernoulli(torch.zeros(0, 3)), "shape", "logits"),
        (lambda: CategoricalPredictive.from_bernoulli(torch.full((2, 3), math.nan)), "not finite", None),
        (lambda: CATEGORICAL.nll(torch.tensor([0, 1, 2, 3, 4])), "range", "targets"),
        (lambda: CATEGORICAL.nll(torch.tensor([0, 1])), "shape", "targets"),
        (lambda: CATEGORICAL.evaluate(torch.zeros(5)), "shape", "targets"),
        (lambda: CATEGORICAL.credible_set(1.0), "value", "mass"),
        (lambda: GAUSSIAN.interval(90), "value", "mass"),
        (lambda: GAUSSIAN.quantiles(0.0), "range", "q"),
        (lambda: GAUSSIAN.nll(torch.zeros(5)), "shape", "targets"),
        (lambda: GAUSSIAN.evaluate(torch.full((5, 2), math.nan)), "not finite", "targets"),
        (lambda: GaussianPredictive(torch.zeros(0, 2, 1), 1.0), "shape", "mean"),
        (lambda: GaussianPredictive(torch.zeros(2, 3), 1.0), "shape", "mean"),
        (lambda: GaussianPredictive(torch.zeros(2, 3, 1), 0.0), "range", "variance"),
        (lambda: GaussianPredictive(torch.zeros(2, 3, 1), math.nan), "value", "variance"),
        (lambda: GaussianPredictive(torch.zeros(2, 3, 1), torch.ones(4, 1)), "shape", "variance"),
    ],
)
def test_bad_tensors_are_refused(call, kind, argument) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


def test_errors_count_the_inputs_that_are_not_finite() -> None:
    with pytest.raises(FlowBNNError) as caught:
        CategoricalPredictive(torch.tensor([[[math.nan, 0], [0, 0]]]))
    assert (caught.value.fields["inputs"], caught.value.fields["total"]) == (1, 2)
