"""Prediction sets and intervals of posteriors."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import betabinom
from torch import nn

import flowbnn as fb
from flowbnn import FlowBNNError
from flowbnn.conformal import APS, RAPS, AbsoluteResidual, conformal_quantile
from flowbnn.conformal.interval_scores import INTERVAL_SCORES
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian
from flowbnn.posterior import PointPosterior, Posterior

SPLITS, HELD_OUT, TEST = 200, 49, 80
CLASSES = PointPosterior(nn.Identity(), Categorical())


class SampledMeans(Posterior):
    """Posterior of two samples: the inputs plus and minus an offset."""

    offset = 1.0

    def outputs(self, inputs, samples, prediction):
        signs = torch.tensor([1.0 - 2.0 * (sample % 2) for sample in samples]).view(-1, 1, 1)
        return inputs + self.offset * signs


def class_data(number, generator, classes=5, scale=1.5):
    """Returns logits and labels. The network is overconfident by a factor of 1.5."""
    logits = scale * torch.randn(number, classes, generator=generator)
    labels = torch.multinomial((logits / 1.5).softmax(-1), 1, generator=generator).flatten()
    return logits, labels


def real_data(number, generator):
    inputs = torch.randn(number, 1, generator=generator)
    return inputs, inputs + (0.3 + inputs.abs()) * torch.randn(number, 1, generator=generator)


def check_law(counts, coverage):
    """Compares numbers of covered targets over splits with the beta-binomial distribution of split conformal prediction.

    The mean has to be within three standard errors. A chi-square statistic of ten bins has to be below its 99.9 % quantile.
    """
    rank = math.ceil(round((HELD_OUT + 1) * coverage, 9))
    law = betabinom(TEST, rank, HELD_OUT + 1 - rank)
    assert np.mean(counts) == pytest.approx(law.mean(), abs=3.0 * law.std() / math.sqrt(len(counts)))
    edges = np.unique(law.ppf(np.linspace(0.1, 0.9, 9)))
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]])) * len(counts)
    observed = np.bincount(np.searchsorted(edges, counts), minlength=len(expected))
    assert ((observed - expected) ** 2 / expected).sum() < 27.9


@pytest.mark.parametrize(
    "score",
    [
        pytest.param("nll", marks=pytest.mark.slow),
        pytest.param(APS(randomized=True), marks=pytest.mark.slow),
        RAPS(True, 0.05, 2),
    ],
    ids=["nll", "aps", "raps"],
)
def test_coverage_of_classes_over_splits_has_its_exact_law(score):
    generator, counts = torch.Generator().manual_seed(0), []
    for split in range(SPLITS):
        sets = fb.conformalize(CLASSES, class_data(HELD_OUT, generator), 0.9, score, seed=split)
        inputs, labels = class_data(TEST, generator)
        covered = sets.predict_set(inputs, seed=10_000 + split)[torch.arange(TEST), labels]
        counts.append(int(covered.sum()))
    check_law(counts, 0.9)


@pytest.mark.parametrize("score", ["nll", "cqr", "absolute", "normalized"])
def test_coverage_of_real_values_over_splits_has_its_exact_law(score):
    """All splits are predicted at once. A target is covered if its score is at most the threshold of its split."""
    posterior = PointPosterior(nn.Identity(), Gaussian(noise=0.5))
    inputs, targets = real_data(SPLITS * (HELD_OUT + TEST), torch.Generator().manual_seed(1))
    scores = INTERVAL_SCORES[score].scores(posterior.predict(inputs), targets, 0.8)
    held_out, test = scores.view(SPLITS, -1).split([HELD_OUT, TEST], 1)
    thresholds = torch.tensor([conformal_quantile(values, 0.8) for values in held_out])
    check_law((test <= thresholds.unsqueeze(1)).sum(1).tolist(), 0.8)


@pytest.mark.parametrize("score", ["nll", "cqr", "absolute", "normalized"])
def test_an_interval_has_the_targets_whose_score_is_at_most_the_threshold(score):
    posterior = PointPosterior(nn.Identity(), Gaussian(noise=0.5))
    generator = torch.Generator().manual_seed(0)
    intervals = fb.conformalize(posterior, real_data(99, generator), 0.8, score)
    inputs, targets = real_data(200, generator)
    low, high = intervals.predict_interval(inputs)
    scores = intervals.score.scores(intervals.predict(inputs), targets, 0.8)
    inside = (targets >= low) & (targets <= high)
    assert torch.equal(inside, scores <= intervals.thresholds)
    assert intervals.evaluate((inputs, targets)) == {
        "coverage": pytest.approx(float(inside.double().mean())),
        "width": pytest.approx(float((high - low).double().mean())),
    }


def test_class_conditional_sets_cover_every_class():
    """Class 4 is predicted worst. Its marginal coverage is low, and its own threshold restores it."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = class_data(6000, generator)
    logits[labels == 4, 4] -= 2.0
    held_out, test = (logits[:3000], labels[:3000]), (logits[3000:], labels[3000:])
    marginal = fb.conformalize(CLASSES, held_out, 0.9).evaluate(test)
    conditional = fb.conformalize(CLASSES, held_out, 0.9, class_conditional=True).evaluate(test)
    assert marginal["coverage"] == pytest.approx(0.9, abs=0.02)
    assert marginal["class_coverage"] < 0.75
    assert conditional["class_coverage"] > 0.87


def test_a_class_with_too_few_examples_is_in_every_set():
    generator = torch.Generator().manual_seed(0)
    logits, labels = class_data(300, generator)
    few = (labels != 3) | (torch.arange(300) < 10)
    with pytest.warns(fb.FlowBNNWarning) as caught:
        sets = fb.conformalize(CLASSES, (logits[few], labels[few]), 0.9, class_conditional=True)
    assert caught[0].message.fields["least"] == 9
    assert bool(sets.predict_set(logits)[:, 3].all())
    with pytest.raises(FlowBNNError) as error:
        fb.conformalize(CLASSES, (logits[:4], labels[:4]), 0.9, class_conditional=True)
    assert error.value.kind == "examples"


def test_sets_without_empty_ones_have_the_most_probable_class():
    logits, labels = torch.eye(3).repeat(40, 1) * 5.0, torch.arange(3).repeat(40)
    inputs = torch.tensor([[0.2, 0.1, 0.0]])
    assert fb.conformalize(CLASSES, (logits, labels)).predict_set(inputs).tolist() == [[False] * 3]
    sets = fb.conformalize(CLASSES, (logits, labels), allow_empty=False)
    assert sets.predict_set(inputs).tolist() == [[True, False, False]]


def test_the_penalty_is_chosen_on_data_that_the_threshold_does_not_use():
    logits, labels = class_data(50, torch.Generator().manual_seed(0))
    sets = fb.conformalize(CLASSES, (logits, labels), 0.9, "raps")
    assert isinstance(sets.score, RAPS)
    assert not sets.score.needs_tuning
    with pytest.raises(FlowBNNError) as error:
        fb.conformalize(CLASSES, (logits[:10], labels[:10]), 0.9, "raps")
    assert error.value.kind == "examples"
    assert "beside 2 examples" in str(error.value)


def test_randomized_sets_need_a_seed_to_repeat():
    generator = torch.Generator().manual_seed(0)
    sets = fb.conformalize(CLASSES, class_data(200, generator), 0.9, APS(randomized=True))
    inputs = class_data(200, generator)[0]
    assert torch.equal(sets.predict_set(inputs, seed=3), sets.predict_set(inputs, seed=3))
    assert not torch.equal(sets.predict_set(inputs), sets.predict_set(inputs))


@pytest.mark.parametrize("likelihood", [Categorical(class_axis=1), Bernoulli()], ids=["pixels", "labels"])
def test_positions_are_covered_on_average_over_images(likelihood):
    """The expected fraction of covered positions has the coverage, and ignored positions do not count."""
    generator = torch.Generator().manual_seed(0)
    posterior = PointPosterior(nn.Identity(), likelihood)
    shape = (3, 4) if isinstance(likelihood, Categorical) else (4,)
    coverages = []
    for _ in range(60):
        logits = 2.0 * torch.randn(60, *shape, generator=generator)
        if isinstance(likelihood, Categorical):
            probabilities = logits.softmax(1).movedim(1, -1).flatten(0, 1)
            labels = torch.multinomial(probabilities, 1, generator=generator).view(60, 4)
        else:
            labels = torch.bernoulli(logits.sigmoid(), generator=generator).long()
        labels[:, 0] = torch.where(torch.rand(60, generator=generator) < 0.5, -100, labels[:, 0])
        sets = fb.conformalize(posterior, (logits[:30], labels[:30]), 0.9)
        coverages.append(sets.evaluate((logits[30:], labels[30:]))["coverage"])
    assert sets.predict_set(logits).shape == (60, 4, 3 if isinstance(likelihood, Categorical) else 2)
    assert 0.9 - 3.0 * np.std(coverages) / math.sqrt(60) < np.mean(coverages) < 0.9 + 1.0 / 31 + 0.01


def test_regions_of_the_density_are_unions_of_intervals():
    """Two samples far apart give two intervals. Their ends have the density of the threshold."""
    posterior = SampledMeans(nn.Identity(), Gaussian(noise=0.2))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(199, 1, generator=generator)
    signs = torch.randint(2, (199, 1), generator=generator) * 2.0 - 1.0
    targets = inputs + signs + 0.3 * torch.randn(199, 1, generator=generator)
    density = fb.conformalize(posterior, (inputs, targets), 0.9, samples=2)
    region = density.predict_region(inputs[:5])
    assert region.low.shape == (2, 5, 1)
    for end in (*region.low, *region.high):
        nll = density.predict(inputs[:5]).nll(end)
        torch.testing.assert_close(nll, density.thresholds.float().expand(5), rtol=1e-3, atol=1e-3)
    hull = density.predict_interval(inputs[:5])
    assert torch.equal(hull.low, region.low[0])
    assert torch.equal(hull.high, region.high[1])
    central = fb.conformalize(posterior, (inputs, targets), 0.9, "cqr", samples=2)
    test = (inputs, targets)
    assert density.evaluate(test)["width"] < 0.8 * central.evaluate(test)["width"]


def test_targets_of_several_columns_have_thresholds_of_their_own():
    posterior = PointPosterior(nn.Identity(), Gaussian(noise=1.0))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.zeros(400, 2)
    targets = torch.randn(400, 2, generator=generator) * torch.tensor([1.0, 10.0])
    intervals = fb.conformalize(posterior, (inputs, targets), 0.9, AbsoluteResidual())
    expected = targets.abs().sort(0).values[-(-401 * 9 // 10) - 1]
    torch.testing.assert_close(intervals.thresholds.float(), expected)
    assert intervals.predict_interval(inputs[:3]).low.shape == (3, 2)


def test_intervals_have_the_shape_of_numbers():
    likelihood = Gaussian(noise=1.0)
    likelihood.shape = ()
    posterior = PointPosterior(nn.Identity(), likelihood)
    data = (torch.zeros(20, 1), torch.arange(20.0))
    for score in ("nll", "cqr", "absolute", "normalized"):
        low, high = fb.conformalize(posterior, data, 0.9, score).predict_interval(torch.zeros(3, 1))
        assert low.shape == high.shape == (3,)
        assert bool((low < high).all())


def test_arrays_and_loaders_give_the_same_thresholds():
    logits, labels = class_data(60, torch.Generator().manual_seed(0))
    whole = fb.conformalize(CLASSES, (logits.numpy(), labels.numpy()))
    loader = [(logits[:25], labels[:25]), (logits[25:], labels[25:])]
    torch.testing.assert_close(whole.thresholds, fb.conformalize(CLASSES, loader).thresholds)
    assert torch.equal(whole.predict_set(logits.numpy()), whole.predict_set([(logits,)]))


@pytest.mark.parametrize(
    ("posterior", "data", "options", "kind", "argument"),
    [
        (CLASSES, (torch.zeros(5, 3), torch.zeros(5).long()), {}, "examples", "held_out"),
        (CLASSES, (torch.zeros(20, 3), torch.zeros(20).long()), {"score": "cqr"}, "unsupported", "score"),
        (CLASSES, (torch.zeros(20, 3), torch.full((20, 3), 1 / 3)), {}, "targets", "held_out"),
        (CLASSES, [(torch.zeros(20, 3),)], {}, "loader", "held_out"),
        (CLASSES, (torch.zeros(20, 3), torch.zeros(20).long()), {"coverage": 1.0}, "value", "coverage"),
        (
            PointPosterior(nn.Identity(), Gaussian(noise=1.0)),
            (torch.zeros(20, 1), torch.zeros(20, 1)),
            {"score": "aps"},
            "unsupported",
            "score",
        ),
        (
            PointPosterior(nn.Identity(), Gaussian(noise=1.0)),
            (torch.zeros(20, 1), torch.zeros(20, 1)),
            {"class_conditional": True},
            "unsupported",
            "class_conditional",
        ),
    ],
)
def test_refusals(posterior, data, options, kind, argument):
    with pytest.raises(FlowBNNError) as caught:
        fb.conformalize(posterior, data, **options)
    assert (caught.value.kind, caught.value.argument) == (kind, argument)


def test_counts_have_intervals_and_no_density():
    posterior = PointPosterior(nn.Identity(), fb.likelihoods.Poisson())
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(99, 1, generator=generator)
    data = (inputs, torch.poisson(inputs.exp(), generator=generator))
    assert fb.conformalize(posterior, data, 0.9, "cqr").evaluate(data)["coverage"] >= 0.9
    with pytest.raises(FlowBNNError) as caught:
        fb.conformalize(posterior, data, 0.9)
    assert (caught.value.kind, caught.value.argument) == ("unsupported", "score")


def test_held_out_data_without_labels_are_refused():
    posterior = PointPosterior(nn.Conv1d(2, 3, 1), Categorical(class_axis=1))
    with pytest.raises(FlowBNNError) as caught:
        fb.conformalize(posterior, (torch.randn(20, 2, 4), torch.full((20, 4), -100)))
    assert caught.value.kind == "targets"
