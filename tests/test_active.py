"""Active learning, Thompson sampling, and the interface of BoTorch."""

import itertools
import math

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn import FlowBNNError
from flowbnn.active import (
    FunctionModel,
    FunctionPosterior,
    acquisition_scores,
    select_batchbald,
    select_logdet,
)
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian
from flowbnn.posterior import PointPosterior, Posterior
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive


class SampledLogits(Posterior):
    """Posterior whose sample s multiplies the inputs by a random matrix of its own."""

    size = 3

    def outputs(self, inputs, samples, prediction):
        matrices = [
            torch.randn(inputs.shape[-1], self.size, generator=torch.Generator().manual_seed(sample))
            for sample in samples
        ]
        return torch.stack([inputs @ matrix for matrix in matrices])


class SampledValues(SampledLogits):
    size = 1


def joint_information(probabilities, indices):
    """Returns the mutual information of the labels of some inputs and the sample, by a sum over all configurations."""
    samples, _, classes = probabilities.shape
    entropy = conditional = 0.0
    for labels in itertools.product(range(classes), repeat=len(indices)):
        joint = torch.ones(samples, dtype=torch.float64)
        for index, label in zip(indices, labels, strict=True):
            joint = joint * probabilities[:, index, label]
        mean = float(joint.mean())
        entropy -= mean * math.log(mean)
        conditional -= float((joint * joint.log()).mean())
    return entropy - conditional


def sampled_probabilities(samples=5, inputs=7, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(samples, inputs, classes, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize("seed", range(3))
def test_batchbald_equals_the_joint_mutual_information_of_all_configurations(seed):
    probabilities = sampled_probabilities(seed=seed)
    indices, gains = select_batchbald(probabilities, 4)
    chosen = []
    for step in range(4):
        values = {
            index: joint_information(probabilities, [*chosen, index]) for index in set(range(7)) - set(chosen)
        }
        best = max(values, key=values.get)
        assert int(indices[step]) == best
        chosen.append(best)
        assert float(gains[: step + 1].sum()) == pytest.approx(values[best], abs=1e-10)


def test_sampled_configurations_approach_the_exact_information():
    """The fifth input has 256 configurations before it, of which 255 are sampled."""
    probabilities = sampled_probabilities(samples=20, inputs=6, classes=4)
    exact = select_batchbald(probabilities, 5)
    sampled = [select_batchbald(probabilities, 5, configurations=255, seed=seed).gains for seed in range(20)]
    for gains in sampled:
        torch.testing.assert_close(gains[:4], exact.gains[:4])
    last = torch.stack(sampled)[:, 4]
    error = float(last.std()) / math.sqrt(20)
    assert error > 0.0
    assert float(last.mean()) == pytest.approx(float(exact.gains[4]), abs=3.0 * error)


def test_a_batch_has_no_duplicates_and_bald_has_them():
    probabilities = sampled_probabilities(inputs=4).repeat_interleave(3, dim=1)
    predictive = CategoricalPredictive.from_probabilities(probabilities)
    top = acquisition_scores(predictive, "bald").topk(3).indices
    assert len(set((top // 3).tolist())) == 1
    assert len(set((select_batchbald(probabilities, 3).indices // 3).tolist())) > 1


def test_the_first_input_of_batchbald_is_that_of_bald():
    posterior = SampledLogits(nn.Identity(), Categorical())
    pool = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    bald = fb.acquire(posterior, pool, 5, "bald", samples=20)
    batch = fb.acquire(posterior, pool, 5, samples=20)
    assert batch[0] == bald[0]
    assert len(set(batch.tolist())) == 5
    predictive = posterior.predict(pool, 20, seed=0)
    assert torch.equal(bald, predictive.mutual_information.topk(5).indices)
    assert torch.equal(
        fb.acquire(posterior, pool, 5, "entropy", samples=20), predictive.entropy.topk(5).indices
    )
    top = predictive.probabilities.topk(2).values
    margins = fb.acquire(posterior, pool, 5, "margin", samples=20)
    assert torch.equal(margins, (top[:, 0] - top[:, 1]).topk(5, largest=False).indices)


def test_information_of_real_values_equals_the_determinant():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 9, 2, generator=generator, dtype=torch.float64)
    noise = 0.1 + torch.rand(9, 2, generator=generator, dtype=torch.float64)
    indices, gains = select_logdet(values, noise.expand(6, 9, 2), 4)
    centered = values - values.mean(0)

    def information(rows):
        total = 0.0
        for target in range(2):
            f = centered[:, rows, target]
            ratio = (f.T @ f / 6) / noise[rows, target]
            total += 0.5 * float(torch.logdet(torch.eye(len(rows)) + ratio))
        return total

    chosen = []
    for step in range(4):
        scores = {index: information([*chosen, index]) for index in set(range(9)) - set(chosen)}
        chosen.append(max(scores, key=scores.get))
        assert int(indices[step]) == chosen[-1]
        assert float(gains[: step + 1].sum()) == pytest.approx(scores[chosen[-1]], abs=1e-10)
    predictive = GaussianPredictive(values, noise.expand(6, 9, 2))
    bald = acquisition_scores(predictive, "bald")
    assert float(bald[2]) == pytest.approx(information([2]))


def test_thompson_sampling_takes_the_best_input_of_each_network():
    posterior = SampledValues(nn.Identity(), Gaussian(noise=0.1))
    pool = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    values = posterior.predict(pool, 6, seed=0).samples[..., 0]
    chosen = fb.acquire(posterior, pool, 6, "thompson")
    remaining = values.clone()
    for place, index in enumerate(chosen.tolist()):
        assert index == int(remaining[place].argmax())
        remaining[:, index] = -math.inf
    assert fb.acquire(posterior, pool, 1, "thompson", maximize=False) == values[0].argmin()


def test_scores_of_positions_are_summed():
    posterior = SampledLogits(nn.Identity(), Bernoulli())
    pool = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    chosen = fb.acquire(posterior, pool, 4, "bald", samples=8)
    expected = posterior.predict(pool, 8, seed=0).mutual_information.sum(-1).topk(4).indices
    assert torch.equal(chosen, expected)
    loader = [(pool[:5], torch.zeros(5)), (pool[5:], torch.zeros(7))]
    assert torch.equal(fb.acquire(posterior, loader, 4, "bald", samples=8), expected)


@pytest.mark.parametrize(
    ("likelihood", "score", "argument", "kind"),
    [
        (Categorical(), "variance", "score", "unsupported"),
        (Categorical(), "thompson", "score", "unsupported"),
        (Bernoulli(), "batchbald", "score", "unsupported"),
        (Gaussian(noise=1.0), "entropy", "score", "unsupported"),
        (Gaussian(noise=1.0), "thompson", "score", "unsupported"),
        (Categorical(), "entrpy", "score", "value"),
    ],
)
def test_refusals(likelihood, score, argument, kind):
    posterior = PointPosterior(nn.Identity(), likelihood)
    with pytest.raises(FlowBNNError) as caught:
        fb.acquire(posterior, torch.zeros(20, 3), 2, score)
    assert (caught.value.kind, caught.value.argument) == (kind, argument)


def test_a_pool_must_have_a_batch():
    posterior = PointPosterior(nn.Identity(), Categorical())
    with pytest.raises(FlowBNNError) as caught:
        fb.acquire(posterior, torch.zeros(5, 3))
    assert (caught.value.kind, caught.value.argument) == ("pool", "batch_size")


def test_function_values_have_moments_draws_and_gradients():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    noisy = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
    posterior = fb.posterior.NoisePosterior(noisy, Gaussian(noise=0.1))
    model = FunctionModel(posterior, samples=12, seed=4)
    X = torch.randn(5, 2, 3, requires_grad=True)
    values = model.posterior(X)
    assert isinstance(values, FunctionPosterior)
    samples = posterior.predict(X.detach().reshape(10, 3), 12, seed=4).samples.reshape(12, 5, 2, 1)
    torch.testing.assert_close(values.values, samples, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(values.mean, samples.mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(values.variance, samples.var(0, correction=0), atol=1e-6, rtol=1e-4)
    draws = values.rsample(torch.Size([7, 2]))
    assert draws.shape == (7, 2, 5, 2, 1)
    assert values.event_shape == (5, 2, 1)
    draws.sum().backward()
    assert float(X.grad.abs().sum()) > 0
    # a draw is one function at all inputs
    same = (draws.detach().flatten(0, 1).unsqueeze(1) == values.values.detach()).flatten(2).all(-1)
    assert bool(same.any(1).all())


def test_a_function_model_needs_real_values():
    with pytest.raises(FlowBNNError) as caught:
        FunctionModel(PointPosterior(nn.Identity(), Categorical()))
    assert (caught.value.kind, caught.value.argument) == ("unsupported", "posterior")
