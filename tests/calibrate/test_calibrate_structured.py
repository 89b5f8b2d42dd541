"""Tests of the calibration of networks with outputs for pixels, tokens and several labels."""

import pytest
import torch

import flowbnn as fb
from flowbnn.calibrate.mixture import position_log_likelihood, stacking_weights
from flowbnn.methods.calibrators.folds import split_folds
from flowbnn.methods.calibrators.last_layer import LastLayerProblem
from flowbnn.methods.calibrators.scaling import flatten_positions
from flowbnn.posterior import PointPosterior
from slow_cases import mark_slow
from structured_problems import POSITIONS, make_structured

SCALINGS = ["temperature", "vector", "matrix", "refit", "mixture"]


def trained(problem, examples=30):
    """Returns a network that was trained on other examples, with inputs and targets."""
    network, inputs, targets = make_structured(problem, 2 * examples)
    loader = [(inputs[:examples], targets[:examples])]
    point = fb.MLE(epochs=60, lr=0.03).fit(network, loader, progress=False, seed=0)
    return point, inputs[examples:], targets[examples:]


@pytest.mark.parametrize("problem", mark_slow(POSITIONS, ["tokens"]))
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_calibrated_networks_are_not_worse(problem, tmp_path):
    point, inputs, targets = trained(problem)
    names = SCALINGS if problem != "labels" else [*SCALINGS, "noise", "noise+temperature"]
    posterior = fb.calibrate(point.model, (inputs, targets), candidates=names, samples=4, progress=False)
    report = posterior.calibration
    assert not report.excluded
    assert min(report.nll.values()) <= report.nll["plain"]
    plain = fb.evaluate(point, (inputs, targets), progress=False)
    assert report.nll["plain"] == pytest.approx(plain["nll"], rel=1e-4)
    assert report.ece["plain"] == pytest.approx(plain["ece"], abs=1e-4)
    prediction = posterior.predict(inputs[:3], 4, seed=0)
    assert prediction.entropy.shape == (3, *POSITIONS[problem])
    loaded = fb.load_posterior(posterior.save(tmp_path / "posterior"), point.model)
    torch.testing.assert_close(loaded.predict(inputs[:3], 4, seed=0).probabilities, prediction.probabilities)


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_noise_of_a_tagger_is_calibrated():
    point, inputs, targets = trained("tokens", 16)
    posterior = fb.calibrate(
        point.model, (inputs, targets), candidates=["noise"], folds=0, samples=4, progress=False
    )
    assert posterior.predict(inputs[:3], 4).entropy.shape == (3, *POSITIONS["tokens"])


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_scaled_networks_have_the_layout_of_the_network():
    for problem in POSITIONS:
        network, inputs, targets = make_structured(problem, 8)
        point = fb.MLE(epochs=1).fit(network, [(inputs, targets)], progress=False, seed=0)
        for calibrator in (fb.VectorScaling(), fb.Temperature()):
            posterior = calibrator.fit(point, (inputs, targets), progress=False)
            outputs = posterior.sample(seed=0)(inputs).detach()
            assert outputs.shape == point.model(inputs).shape
            expected = posterior.predict(inputs, 1).probabilities
            torch.testing.assert_close(point.likelihood.predictive(outputs[None]).probabilities, expected)


def test_positions_become_rows_of_their_examples():
    log_samples = torch.randn(2, 4, 3, 5, 6).double().log_softmax(-1)
    targets = torch.randint(6, (4, 3, 5))
    targets[:, 0] = -100
    rows, labels, (subset,) = flatten_positions(log_samples, targets, [torch.tensor([0, 2])])
    assert rows.shape == (2, 40, 6)
    assert torch.equal(labels, targets[:, 1:].flatten())
    assert torch.equal(labels[subset], targets[[0, 2], 1:].flatten())
    fewer, labels, _ = flatten_positions(log_samples, targets, [], max_numbers=12 * 12)
    assert fewer.shape[1] == len(labels) == 12


def test_examples_are_never_split_over_folds():
    targets = torch.randint(3, (20, 4, 4))
    folds = split_folds(targets, 5, seed=0)
    assert sorted(torch.cat(folds).tolist()) == list(range(20))
    assert [len(fold) for fold in folds] == [4] * 5


def test_mixtures_weigh_single_positions():
    probabilities = torch.rand(2, 5, 4, 3).double().softmax(-1)
    targets = torch.randint(3, (5, 4))
    targets[0, 0] = -100
    values, examples = position_log_likelihood(probabilities, targets)
    assert values.shape == (19, 2)
    assert examples.tolist() == [0] * 3 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    weights = stacking_weights(values, 2000)
    grid = torch.linspace(0.0, 1.0, 2001).double()
    mixtures = (
        grid[:, None, None] * values[:, 0].exp() + (1 - grid)[:, None, None] * values[:, 1].exp()
    ).log()
    assert float(weights[0]) == pytest.approx(float(grid[mixtures.sum((1, 2)).argmax()]), abs=2e-3)


@pytest.mark.parametrize("problem", ["pixels", "tokens", "mask"])
def test_a_refit_keeps_the_layout(problem):
    network, inputs, targets = make_structured(problem, 6)
    likelihood = fb.likelihoods.make_likelihood("auto", network(inputs), targets)
    likelihood.initialize(network(inputs), targets)
    problem_of = LastLayerProblem.read(PointPosterior(network, likelihood), (inputs, targets))
    outputs = problem_of.outputs(problem_of.weight[None])
    torch.testing.assert_close(problem_of.network_outputs(outputs[0]).float(), network(inputs))
    expected = likelihood.log_prob(network(inputs), targets)
    torch.testing.assert_close(problem_of.log_prob(outputs, torch.arange(6))[0].float(), expected)
