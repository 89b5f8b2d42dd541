"""Tests of the predictive distribution of class labels, on hand-computed values."""

import math

import pytest
import torch

from flowbnn import metrics
from flowbnn.errors import FlowBNNError
from flowbnn.predictive import ABSTAIN, CategoricalPredictive, Decision, summarize

# two samples, three inputs, two classes: the samples agree, disagree, and are both uncertain
SAMPLES = torch.tensor(
    [[[0.8, 0.2], [1.0, 0.0], [0.5, 0.5]], [[0.8, 0.2], [0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64
)
LOG2 = math.log(2)
H80 = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """Returns normal random numbers in float64."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(left: torch.Tensor, right: object, atol: float = 1e-12) -> None:
    """Checks that two tensors agree up to an absolute tolerance."""
    right = torch.as_tensor(right, dtype=left.dtype)
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


def test_properties_by_hand() -> None:
    prediction = CategoricalPredictive.from_probabilities(SAMPLES)
    assert_close(prediction.samples, SAMPLES)
    assert_close(prediction.probabilities, [[0.8, 0.2], [0.5, 0.5], [0.5, 0.5]])
    assert prediction.labels[0] == 0
    assert_close(prediction.confidence, [0.8, 0.5, 0.5])
    assert_close(prediction.risk, [0.2, 0.5, 0.5])
    assert_close(prediction.variance, [[0, 0], [0.25, 0.25], [0, 0]])
    assert_close(prediction.total_variance, [0, 0.5, 0])
    assert_close(prediction.entropy, [H80, LOG2, LOG2])
    assert_close(prediction.expected_entropy, [H80, 0, LOG2])
    assert_close(prediction.mutual_information, [0, LOG2, 0])
    assert_close(prediction.aleatoric, [H80, 0, LOG2])
    assert_close(prediction.epistemic, [0, LOG2, 0])
    # unbiased variance of (1, 0) is 1/2; over two samples, sqrt(1/4)
    assert_close(prediction.standard_error, [[0, 0], [0.5, 0.5], [0, 0]])


def test_logits_are_normalized_before_they_are_averaged() -> None:
    logits = random_logits(5, 4, 3)
    assert_close(CategoricalPredictive(logits).probabilities, logits.softmax(-1).mean(0))
    assert_close(CategoricalPredictive(logits + 100).probabilities, logits.softmax(-1).mean(0))


def test_mutual_information_is_the_mean_kl_divergence_to_the_mean() -> None:
    prediction = CategoricalPredictive(random_logits(7, 20, 4))
    p, mean = prediction.samples, prediction.probabilities
    divergence = (p * (p / mean).log()).sum(-1).mean(0)
    assert_close(prediction.mutual_information, divergence)
    assert_close(prediction.mutual_information, prediction.entropy - prediction.expected_entropy)


def test_mutual_information_is_precise_if_samples_nearly_agree() -> None:
    base, noise = random_logits(1, 50, 10), random_logits(32, 50, 10, seed=1, scale=1e-3)
    exact = CategoricalPredictive(base + noise)
    truth = exact.entropy - exact.expected_entropy
    single = CategoricalPredictive((base + noise).float())
    assert (single.mutual_information >= 0).all()
    ours = (single.mutual_information.double() / truth - 1).abs().max()
    naive = ((single.entropy - single.expected_entropy).double() / truth - 1).abs().max()
    assert ours < 0.01 < naive


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_extreme_logits_stay_finite(scale: float, dtype: torch.dtype) -> None:
    logits = random_logits(6, 30, 5, scale=scale).to(dtype)
    prediction = CategoricalPredictive(logits)
    targets = torch.arange(30) % 5
    for value in (
        prediction.entropy,
        prediction.aleatoric,
        prediction.epistemic,
        prediction.nll(targets),
    ):
        assert torch.isfinite(value).all()
    assert (prediction.epistemic >= 0).all()
    assert (prediction.epistemic <= math.log(5) + 1e-5).all()
    assert all(math.isfinite(value) for value in prediction.evaluate(targets).values())


def test_minus_infinity_excludes_a_class() -> None:
    prediction = CategoricalPredictive(torch.tensor([[[0.0, 0.0, -math.inf]], [[0.0, 0.0, -math.inf]]]))
    assert_close(prediction.probabilities, [[0.5, 0.5, 0.0]], atol=1e-7)
    assert_close(prediction.entropy, [LOG2], atol=1e-6)
    assert_close(prediction.epistemic, [0.0], atol=1e-7)


def test_nll_by_hand() -> None:
    prediction = CategoricalPredictive.from_probabilities(SAMPLES)
    targets = torch.tensor([1, 0, 1])
    assert_close(prediction.nll(targets), [-math.log(0.2), LOG2, LOG2])
    assert_close(prediction.nll(), [-math.log(0.8), LOG2, LOG2])
    # exp(-200) underflows in float32, its logarithm does not
    far = CategoricalPredictive(torch.tensor([[[0.0, -200.0]], [[0.0, -200.0]]]))
    assert_close(far.nll(torch.tensor([1])), [200.0], atol=1e-4)


def test_evaluate_by_hand() -> None:
    samples = torch.tensor([[[0.9, 0.1], [0.3, 0.7]], [[0.7, 0.3], [0.1, 0.9]]], dtype=torch.float64)
    scores = CategoricalPredictive.from_probabilities(samples).evaluate(torch.tensor([0, 0]))
    assert scores == {
        "accuracy": 0.5,
        "nll": pytest.approx(-(math.log(0.8) + math.log(0.2)) / 2),
        "brier": pytest.approx((2 * 0.04 + 2 * 0.64) / 2),
        "ece": pytest.approx(0.3),
    }


def test_bernoulli_logits() -> None:
    logits = random_logits(3, 4)
    prediction = CategoricalPredictive.from_bernoulli(logits)
    assert_close(prediction.samples[..., 1], logits.sigmoid())
    assert_close(CategoricalPredictive.from_bernoulli(logits.unsqueeze(-1)).samples, prediction.samples)
    far = CategoricalPredictive.from_bernoulli(torch.tensor([[200.0, -200.0]]))
    assert_close(far.nll(torch.tensor([0, 1])), [200.0, 200.0], atol=1e-4)


def test_quantiles_agree_with_torch() -> None:
    prediction = CategoricalPredictive(random_logits(11, 3, 4))
    levels = [0.0, 0.05, 0.37, 0.5, 1.0]
    truth = torch.quantile(prediction.samples, torch.tensor(levels, dtype=torch.float64), dim=0)
    assert_close(prediction.quantiles(levels), truth)
    assert prediction.quantiles(0.5).shape == (1, 3, 4)
    assert_close(prediction.quantiles(torch.tensor(levels, dtype=torch.float64)), truth)


def test_quantiles_of_one_sample() -> None:
    prediction = CategoricalPredictive(random_logits(1, 3, 4))
    assert_close(prediction.quantiles([0.1, 0.9]), prediction.samples.expand(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_credible_set_by_hand(dtype: torch.dtype) -> None:
    probabilities = torch.tensor(
        [[[0.5, 0.4, 0.1], [0.05, 0.9, 0.05], [0.2, 0.3, 0.5], [1 / 3, 1 / 3, 1 / 3]]], dtype=dtype
    )
    prediction = CategoricalPredictive.from_probabilities(probabilities)
    assert prediction.credible_set(0.9).int().tolist() == [[1, 1, 0], [0, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert prediction.credible_set(0.5).int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]


def test_credible_set_is_the_smallest_set() -> None:
    prediction = CategoricalPredictive(random_logits(4, 40, 6))
    inside = prediction.credible_set(0.8)
    held = torch.where(inside, prediction.probabilities, 0.0)
    assert (held.sum(-1) >= 0.8 - 1e-12).all()
    least = torch.where(inside, prediction.probabilities, 2.0).amin(-1)
    assert (held.sum(-1) - least < 0.8).all()
    assert (torch.where(inside, 0.0, prediction.probabilities).amax(-1) <= least).all()


def test_decide_abstains_above_the_threshold() -> None:
    prediction = CategoricalPredictive.from_probabilities(SAMPLES)
    assert ABSTAIN == -1
    assert prediction.decide(0.9).values.tolist() == [0, -1, -1]  # entropies H80 / log 2 = 0.72, 1, 1
    assert prediction.decide(0.7).values.tolist() == [-1, -1, -1]
    assert (prediction.decide(1.0).values >= 0).all()
    assert prediction.decide(0.3, by="risk").values.tolist() == [0, -1, -1]
    by_epistemic = prediction.decide(0.1, by="epistemic").values.tolist()
    assert by_epistemic[1] == -1
    assert min(by_epistemic[0], by_epistemic[2]) >= 0
    assert (prediction.decide(0.4, by="total_variance").values < 0).tolist() == [False, True, False]
    assert (prediction.decide(math.inf).values >= 0).all()


def test_decisions_of_classes_and_values_have_one_type() -> None:
    classes = CategoricalPredictive.from_probabilities(SAMPLES)
    for prediction in (classes, summarize(classes)):
        decision = prediction.decide(0.9)
        assert isinstance(decision, Decision)
        assert torch.equal(decision.abstained, decision.values == ABSTAIN)


def test_reliability_and_risk_coverage_take_targets_and_an_option() -> None:
    prediction = CategoricalPredictive(random_logits(4, 40, 6))
    targets = torch.arange(40) % 6
    for each in (prediction, summarize(prediction)):
        assert each.reliability(targets, 5) == metrics.reliability(prediction.probabilities, targets, 5)
        curve = each.risk_coverage(targets, "epistemic")
        expected = metrics.risk_coverage(prediction.epistemic, prediction.labels == targets)
        assert torch.equal(curve.risk, expected.risk)
        assert curve.area == expected.area
        with pytest.raises(FlowBNNError) as error:
            each.risk_coverage(prediction.probabilities)
        assert (error.value.kind, error.value.argument) == ("targets", "targets")


def test_risk_coverage_ignores_positions_without_a_target() -> None:
    prediction = CategoricalPredictive(random_logits(4, 12, 6).unflatten(1, (3, 4)))
    targets = torch.arange(12).reshape(3, 4) % 6
    targets[0] = -100
    expected = metrics.risk_coverage(
        prediction.entropy[1:].flatten(), (prediction.labels == targets)[1:].flatten()
    )
    assert torch.equal(prediction.risk_coverage(targets).risk, expected.risk)


def test_normalized_entropy_is_at_most_one() -> None:
    for classes in range(2, 40):
        uniform = CategoricalPredictive(torch.zeros(3, 1, classes))
        assert uniform.decide(1.0).values.item() >= 0


def test_one_sample_has_an_infinite_standard_error() -> None:
    assert torch.isinf(CategoricalPredictive(random_logits(1, 2, 3)).standard_error).all()


def test_standard_error_is_the_standard_deviation_of_means() -> None:
    samples = 64
    logits = random_logits(samples * 400, 1, 3)
    means = torch.stack([CategoricalPredictive(chunk).probabilities[0] for chunk in logits.split(samples)])
    predicted = CategoricalPredictive(logits).standard_error[0] * math.sqrt(400)
    # the standard deviation of 400 means has a relative error of 1 / sqrt(800) = 3.5 %; allow four of these
    assert ((means.std(0) / predicted - 1).abs() < 0.142).all()


def test_gradients_reach_the_logits() -> None:
    logits = random_logits(3, 2, 4).requires_grad_()
    prediction = CategoricalPredictive(logits)
    (prediction.nll(torch.tensor([0, 1])).sum() + prediction.epistemic.sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad.abs().sum() > 0


def test_half_precision_is_converted_to_single_precision() -> None:
    prediction = CategoricalPredictive(
        torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).half()
    )
    assert prediction.probabilities.dtype == torch.float32


def test_quantiles_of_more_numbers_than_torch_supports() -> None:
    logs = torch.full((2, 1, 2), math.log(0.5)).expand(2, 4_200_000, 2)
    assert CategoricalPredictive._from_tensors(logs).quantiles(0.5)[0, -1].tolist() == [0.5, 0.5]


def test_sample_draws_labels_from_the_mixture():
    prediction = CategoricalPredictive.from_probabilities(torch.tensor([[[0.9, 0.1]], [[0.3, 0.7]]]))
    labels = prediction.sample(20000, seed=0)
    assert labels.shape == (20000, 1)
    assert float(labels.float().mean()) == pytest.approx(0.4, abs=0.015)
    assert torch.equal(prediction.log_prob(torch.tensor([1])), -prediction.nll(torch.tensor([1])))


def test_energy_is_minus_the_log_sum_of_exponentials():
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    prediction = CategoricalPredictive(logits)
    torch.testing.assert_close(prediction.energy, -logits.logsumexp(-1).mean(0))
    torch.testing.assert_close(prediction.logits, logits)
    assert torch.allclose(
        CategoricalPredictive.from_probabilities(logits.softmax(-1)).energy, torch.zeros(5), atol=1e-6
    )
    one = torch.tensor([[[-2.0], [2.0], [0.0]]])
    energy = CategoricalPredictive.from_bernoulli(one).energy
    assert energy[0] == energy[1] < energy[2]


@pytest.mark.parametrize("samples", [1, 3, 64])
def test_fallback_has_its_probabilities_exactly(samples):
    fallback = torch.tensor([0.1, 0.65, 0.25])
    prediction = CategoricalPredictive(torch.randn(samples, 2, 3))
    replaced = prediction.with_fallback(torch.tensor([True, False]), fallback)
    torch.testing.assert_close(replaced.probabilities[0], fallback)
    torch.testing.assert_close(replaced.probabilities[1], prediction.probabilities[1])
    assert bool(torch.isfinite(replaced.mutual_information).all())
