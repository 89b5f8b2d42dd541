"""Categorical predictives against values worked by hand; what all predictives share; bad input."""

import copy
import math
import pickle

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.predictive import ABSTAIN, CategoricalPredictive, GaussianPredictive

# two samples, three inputs, two classes: agreement, disagreement, both unsure
SAMPLES = torch.tensor(
    [[[0.8, 0.2], [1.0, 0.0], [0.5, 0.5]], [[0.8, 0.2], [0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64
)
LOG2 = math.log(2)
H80 = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(left: torch.Tensor, right: object, atol: float = 1e-12) -> None:
    right = torch.as_tensor(right, dtype=left.dtype)
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


class TestCategorical:
    def test_by_hand(self) -> None:
        prediction = CategoricalPredictive.from_probabilities(SAMPLES)
        close(prediction.samples, SAMPLES)
        close(prediction.probabilities, [[0.8, 0.2], [0.5, 0.5], [0.5, 0.5]])
        assert prediction.labels[0] == 0
        close(prediction.confidence, [0.8, 0.5, 0.5])
        close(prediction.risk, [0.2, 0.5, 0.5])
        close(prediction.variance, [[0, 0], [0.25, 0.25], [0, 0]])
        close(prediction.total_variance, [0, 0.5, 0])
        close(prediction.entropy, [H80, LOG2, LOG2])
        close(prediction.expected_entropy, [H80, 0, LOG2])
        close(prediction.mutual_information, [0, LOG2, 0])
        close(prediction.aleatoric, [H80, 0, LOG2])
        close(prediction.epistemic, [0, LOG2, 0])
        # unbiased variance of (1, 0) is 1/2; over two samples, sqrt(1/4)
        close(prediction.standard_error, [[0, 0], [0.5, 0.5], [0, 0]])

    def test_logits_are_normalised_per_sample_before_the_mean(self) -> None:
        logits = random_logits(5, 4, 3)
        close(CategoricalPredictive(logits).probabilities, logits.softmax(-1).mean(0))
        close(CategoricalPredictive(logits + 100).probabilities, logits.softmax(-1).mean(0))

    def test_mutual_information_is_the_mean_divergence_from_the_mean(self) -> None:
        prediction = CategoricalPredictive(random_logits(7, 20, 4))
        p, mean = prediction.samples, prediction.probabilities
        divergence = (p * (p / mean).log()).sum(-1).mean(0)
        close(prediction.mutual_information, divergence)
        close(prediction.mutual_information, prediction.entropy - prediction.expected_entropy)

    def test_mutual_information_keeps_its_digits_where_samples_nearly_agree(self) -> None:
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
    def test_extreme_logits_stay_finite(self, scale: float, dtype: torch.dtype) -> None:
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

    def test_a_class_ruled_out_by_minus_infinity(self) -> None:
        prediction = CategoricalPredictive(torch.tensor([[[0.0, 0.0, -math.inf]], [[0.0, 0.0, -math.inf]]]))
        close(prediction.probabilities, [[0.5, 0.5, 0.0]], atol=1e-7)
        close(prediction.entropy, [LOG2], atol=1e-6)
        close(prediction.epistemic, [0.0], atol=1e-7)

    def test_nll(self) -> None:
        prediction = CategoricalPredictive.from_probabilities(SAMPLES)
        targets = torch.tensor([1, 0, 1])
        close(prediction.nll(targets), [-math.log(0.2), LOG2, LOG2])
        close(prediction.nll(), [-math.log(0.8), LOG2, LOG2])
        # exp(-200) is nought in float32, yet its logarithm is not lost
        far = CategoricalPredictive(torch.tensor([[[0.0, -200.0]], [[0.0, -200.0]]]))
        close(far.nll(torch.tensor([1])), [200.0], atol=1e-4)

    def test_evaluate_by_hand(self) -> None:
        samples = torch.tensor([[[0.9, 0.1], [0.3, 0.7]], [[0.7, 0.3], [0.1, 0.9]]], dtype=torch.float64)
        scores = CategoricalPredictive.from_probabilities(samples).evaluate(torch.tensor([0, 0]))
        assert scores == {
            "accuracy": 0.5,
            "nll": pytest.approx(-(math.log(0.8) + math.log(0.2)) / 2),
            "brier": pytest.approx((2 * 0.04 + 2 * 0.64) / 2),
            "ece": pytest.approx(0.3),
        }

    def test_bernoulli(self) -> None:
        logits = random_logits(3, 4)
        prediction = CategoricalPredictive.from_bernoulli(logits)
        close(prediction.samples[..., 1], logits.sigmoid())
        close(CategoricalPredictive.from_bernoulli(logits.unsqueeze(-1)).samples, prediction.samples)
        far = CategoricalPredictive.from_bernoulli(torch.tensor([[200.0, -200.0]]))
        close(far.nll(torch.tensor([0, 1])), [200.0, 200.0], atol=1e-4)

    def test_quantiles_against_torch(self) -> None:
        prediction = CategoricalPredictive(random_logits(11, 3, 4))
        levels = [0.0, 0.05, 0.37, 0.5, 1.0]
        truth = torch.quantile(prediction.samples, torch.tensor(levels, dtype=torch.float64), dim=0)
        close(prediction.quantiles(levels), truth)
        assert prediction.quantiles(0.5).shape == (1, 3, 4)
        close(prediction.quantiles(torch.tensor(levels, dtype=torch.float64)), truth)

    def test_quantiles_of_one_sample(self) -> None:
        prediction = CategoricalPredictive(random_logits(1, 3, 4))
        close(prediction.quantiles([0.1, 0.9]), prediction.samples.expand(2, 3, 4))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_credible_set_by_hand(self, dtype: torch.dtype) -> None:
        probabilities = torch.tensor(
            [[[0.5, 0.4, 0.1], [0.05, 0.9, 0.05], [0.2, 0.3, 0.5], [1 / 3, 1 / 3, 1 / 3]]], dtype=dtype
        )
        prediction = CategoricalPredictive.from_probabilities(probabilities)
        assert prediction.credible_set(0.9).int().tolist() == [[1, 1, 0], [0, 1, 0], [1, 1, 1], [1, 1, 1]]
        assert prediction.credible_set(0.5).int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]

    def test_credible_set_is_the_smallest(self) -> None:
        prediction = CategoricalPredictive(random_logits(4, 40, 6))
        inside = prediction.credible_set(0.8)
        held = torch.where(inside, prediction.probabilities, 0.0)
        assert (held.sum(-1) >= 0.8 - 1e-12).all()
        least = torch.where(inside, prediction.probabilities, 2.0).amin(-1)
        assert (held.sum(-1) - least < 0.8).all()
        assert (torch.where(inside, 0.0, prediction.probabilities).amax(-1) <= least).all()

    def test_decide(self) -> None:
        prediction = CategoricalPredictive.from_probabilities(SAMPLES)
        assert ABSTAIN == -1
        assert prediction.decide(0.9).tolist() == [0, -1, -1]  # entropies H80 / log 2 = 0.72, 1, 1
        assert prediction.decide(0.7).tolist() == [-1, -1, -1]
        assert (prediction.decide(1.0) >= 0).all()
        assert prediction.decide(0.3, by="risk").tolist() == [0, -1, -1]
        by_epistemic = prediction.decide(0.1, by="epistemic").tolist()
        assert by_epistemic[1] == -1
        assert min(by_epistemic[0], by_epistemic[2]) >= 0
        assert (prediction.decide(0.4, by="total_variance") < 0).tolist() == [False, True, False]
        assert (prediction.decide(math.inf) >= 0).all()

    def test_full_uncertainty_never_exceeds_one(self) -> None:
        for classes in range(2, 40):
            uniform = CategoricalPredictive(torch.zeros(3, 1, classes))
            assert uniform.decide(1.0).item() >= 0

    def test_one_sample_has_no_known_error(self) -> None:
        assert torch.isinf(CategoricalPredictive(random_logits(1, 2, 3)).standard_error).all()

    def test_standard_error_predicts_the_spread_of_means(self) -> None:
        samples = 64
        logits = random_logits(samples * 400, 1, 3)
        means = torch.stack([CategoricalPredictive(part).probabilities[0] for part in logits.split(samples)])
        predicted = CategoricalPredictive(logits).standard_error[0] * math.sqrt(400)
        # the standard deviation of 400 means is itself known to 1 / sqrt(800) = 3.5 %: allow four of these
        assert ((means.std(0) / predicted - 1).abs() < 0.142).all()

    def test_gradients_reach_the_logits(self) -> None:
        logits = random_logits(3, 2, 4).requires_grad_()
        prediction = CategoricalPredictive(logits)
        (prediction.nll(torch.tensor([0, 1])).sum() + prediction.epistemic.sum()).backward()
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()
        assert logits.grad.abs().sum() > 0

    def test_half_precision_is_raised(self) -> None:
        prediction = CategoricalPredictive(
            torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).half()
        )
        assert prediction.probabilities.dtype == torch.float32


PREDICTIVES = [
    CategoricalPredictive(random_logits(3, 5, 4)),
    GaussianPredictive(random_logits(3, 5, 2), random_logits(3, 5, 2, seed=1).exp()),
]


@pytest.mark.parametrize("prediction", PREDICTIVES, ids=lambda p: type(p).__name__)
class TestShared:
    def test_cut(self, prediction) -> None:
        assert len(prediction) == 5
        assert prediction.num_samples == 3
        assert torch.equal(prediction[-1].samples, prediction.samples[:, 4:])
        assert torch.equal(prediction[torch.tensor([3, 0])].samples, prediction.samples[:, [3, 0]])
        assert torch.equal(prediction[prediction.samples[0, :, 0] > -9].samples, prediction.samples)
        assert len(list(prediction)) == 5
        with pytest.raises(IndexError, match="out of bounds"):
            prediction[5]
        with pytest.raises(IndexError):
            prediction[torch.ones(4, dtype=torch.bool)]

    def test_no_inputs(self, prediction) -> None:
        empty = prediction[:0]
        assert len(empty) == 0
        assert empty.epistemic.shape[0] == 0
        assert empty.variance.shape == empty.standard_error.shape == empty.samples.shape[1:]
        assert empty.quantiles(0.5).shape[1] == 0
        assert "inputs=0" in repr(empty)

    def test_move_copy_and_pickle(self, prediction) -> None:
        assert prediction.to(torch.float32).epistemic.dtype == torch.float32
        for other in (prediction.cpu(), copy.deepcopy(prediction), pickle.loads(pickle.dumps(prediction))):
            assert torch.equal(other.epistemic, prediction.epistemic)

    def test_repr_tells_the_split(self, prediction) -> None:
        assert "samples=3, inputs=5" in repr(prediction)
        assert "aleatoric" in repr(prediction)

    def test_every_uncertainty_has_a_value_for_each_input(self, prediction) -> None:
        for name in prediction.uncertainties:
            assert prediction.uncertainty(name).shape[0] == 5

    def test_bad_arguments(self, prediction) -> None:
        with pytest.raises(FlowBNNError, match="by must be .*, got 'epistemc'; did you mean 'epistemic'"):
            prediction.decide(0.5, by="epistemc")
        with pytest.raises(FlowBNNError, match="abstain_above must be a number"):
            prediction.decide(math.nan)
        with pytest.raises(FlowBNNError, match="quantiles must be"):
            prediction.quantiles(1.5)
        with pytest.raises(FlowBNNError, match="quantiles must be one or more"):
            prediction.quantiles([])


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: CategoricalPredictive(torch.zeros(0, 2, 3)), "at least one sample, not"),
        (
            lambda: CategoricalPredictive(torch.zeros(2, 3)),
            r"must be \[S, B, C\], samples first, .* not \[2, 3\]",
        ),
        (lambda: CategoricalPredictive(torch.zeros(2, 3, 1)), "from_bernoulli"),
        (
            lambda: CategoricalPredictive(torch.zeros(2, 3, 2, dtype=torch.long)),
            "logits must be a floating point tensor",
        ),
        (
            lambda: CategoricalPredictive([[[0.0]]]),
            r"logits=...\) must be a dense tensor of real numbers, got a list",
        ),
        (
            lambda: CategoricalPredictive(torch.tensor([[[math.nan, 0], [0, 0]]])),
            "not finite for 1 of 2 inputs",
        ),
        (
            lambda: CategoricalPredictive(torch.tensor([[[math.inf, 0], [0, 0]]])),
            "not finite for 1 of 2 inputs",
        ),
        (lambda: CategoricalPredictive.from_probabilities(torch.zeros(0, 1, 2)), "at least one sample"),
        (
            lambda: CategoricalPredictive.from_probabilities(torch.full((3, 1, 2), math.nan)),
            "for 1 of 1 inputs",
        ),
        (lambda: CategoricalPredictive.from_probabilities(torch.ones(3, 1, 2)), "apply softmax"),
        (lambda: CategoricalPredictive.from_bernoulli(torch.zeros(3)), r"must be \[S, B\]"),
        (lambda: CategoricalPredictive.from_bernoulli(torch.zeros(0, 3)), "at least one sample"),
        (lambda: CategoricalPredictive.from_bernoulli(torch.full((2, 3), math.nan)), "for 3 of 3 inputs"),
        (
            lambda: PREDICTIVES[0].nll(torch.tensor([0, 1, 2, 3, 4])),
            r"label 4 \(1 of 5 .* labels go from 0 to 3",
        ),
        (
            lambda: PREDICTIVES[0].nll(torch.tensor([0, 1])),
            r"targets must be \[5\] .* not torch.int64 \[2\]$",
        ),
        (
            lambda: PREDICTIVES[0].evaluate(torch.zeros(5)),
            r"one class for each input, .* use targets.long\(\)$",
        ),
        (lambda: PREDICTIVES[0].credible_set(1.0), "mass=.*above 0 and below 1, got 1.0"),
        (lambda: PREDICTIVES[1].interval(90), "mass=.*above 0 and below 1, got 90"),
        (lambda: PREDICTIVES[1].quantiles(0.0), "ends excluded"),
        (lambda: PREDICTIVES[1].nll(torch.zeros(5)), r"targets must be \[5, 2\], not \[5\]"),
        (
            lambda: PREDICTIVES[1].evaluate(torch.full((5, 2), math.nan)),
            "targets not finite in 5 of 5 rows",
        ),
        (lambda: GaussianPredictive(torch.zeros(0, 2, 1), 1.0), "at least one sample"),
        (lambda: GaussianPredictive(torch.zeros(2, 3), 1.0), r"\[S, B, D\], samples first"),
        (lambda: GaussianPredictive(torch.zeros(2, 3, 1), 0.0), "variance must be above 0"),
        (
            lambda: GaussianPredictive(torch.zeros(2, 3, 1), math.nan),
            r"variance=...\) must be .* or a number, got nan",
        ),
    ],
)
def test_bad_input_is_one_line(make, line: str) -> None:
    with pytest.raises(FlowBNNError, match=line) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_more_numbers_than_torch_quantile_takes() -> None:
    logs = torch.full((2, 1, 2), math.log(0.5)).expand(2, 4_200_000, 2)
    assert CategoricalPredictive._of(logs).quantiles(0.5)[0, -1].tolist() == [0.5, 0.5]


def test_a_variance_of_another_shape_is_told() -> None:
    with pytest.raises(FlowBNNError, match="does not broadcast to the mean"):
        GaussianPredictive(torch.zeros(2, 3, 1), torch.ones(4, 1))


def test_drawn_labels_are_those_of_the_mixture():
    prediction = CategoricalPredictive.from_probabilities(torch.tensor([[[0.9, 0.1]], [[0.3, 0.7]]]))
    drawn = prediction.sample(20000, seed=0)
    assert drawn.shape == (20000, 1)
    assert float(drawn.float().mean()) == pytest.approx(0.4, abs=0.015)
    assert torch.equal(prediction.log_prob(torch.tensor([1])), -prediction.nll(torch.tensor([1])))
