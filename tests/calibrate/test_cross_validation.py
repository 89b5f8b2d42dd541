"""Tests of the cross-validation of a calibrated network."""

import math

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.calibrate.cross_validation import (
    Folds,
    Predictions,
    choose_candidate,
    choose_per_fold,
    predict_noise,
    predict_refit,
    predict_scaled,
)
from flowbnn.calibrate.mixture import MixtureProblem, predict_mixture, stacking_weights
from flowbnn.calibrate.problem import CalibrationProblem, HeldOutData
from flowbnn.methods.calibrators.last_layer import LastLayerProblem, LastLayerRefit
from flowbnn.methods.variational import natural_gradient


@pytest.mark.parametrize("name", ["temperature", "vector", "matrix", "refit", "noise"])
def test_held_out_examples_do_not_affect_their_predictions(name, memorized, monkeypatch):
    """If the labels of a fold are flipped, the likelihoods of its examples become their complements, to the last bit."""
    monkeypatch.setattr(natural_gradient._GaussianProblem, "min_draws", 1)  # saves time
    inputs, targets = memorized.inputs[:60], memorized.targets[:60]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    groups = [order[fold::3] for fold in range(3)]
    likelihoods = []
    for labels in (targets, targets.index_copy(0, groups[0], 1 - targets[groups[0]])):
        data = HeldOutData(memorized.network, inputs, labels, fb.likelihoods.Categorical())
        folds = Folds(data, groups)
        if name == "noise":
            predictions, _ = predict_noise(CalibrationProblem(data), folds, ["fixed"], 8, False, None)
            nll = predictions.nll
        elif name == "refit":  # for every penalty
            problem = LastLayerProblem.read(data.point_posterior(order), data.batches(torch.arange(60)))
            nll = LastLayerRefit().score_folds(problem, groups).nll
        else:
            nll = predict_scaled(folds, name).nll
        likelihoods.append(nll[..., groups[0]].neg().exp())
    total = likelihoods[0] + likelihoods[1]
    torch.testing.assert_close(total, torch.ones_like(total))


def test_settings_are_chosen_on_other_folds():
    nll = torch.tensor([[0.0, 0.0, 5.0, 5.0, 1.0, 1.0], [3.0, 3.0, 1.0, 1.0, 2.0, 2.0]])
    groups = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4, 5])]
    assert choose_per_fold(nll, groups) == [1, 0, 1]


def test_choice_prefers_the_plain_network_within_one_standard_error():
    generator = torch.Generator().manual_seed(0)
    plain = torch.rand(400, generator=generator).double()
    noise = torch.randn(400, generator=generator).double()
    noise = (noise - noise.mean()) / noise.std()
    for gain, expected in ((0.04, "plain"), (0.06, "temperature")):  # the standard error is 0.05
        choice = choose_candidate({"plain": plain, "temperature": plain - gain + noise})
        assert choice.name == expected
        assert choice.difference["temperature"].mean == pytest.approx(-gain)
        assert choice.difference["temperature"].error == pytest.approx(0.05)


def test_choice_has_the_lowest_nll_of_all_calibrators():
    plain = torch.rand(400, generator=torch.Generator().manual_seed(0)).double()
    names = {"plain": plain, "temperature": plain - 0.5, "noise": plain - 0.501}
    assert choose_candidate(names).name == "noise"


@pytest.mark.parametrize(
    ("temperature", "mixture", "expected"),
    [
        (-0.5, -0.001, "mixture"),
        (-0.001, 0.001, "temperature"),
        (0.09, 0.001, "temperature"),
        (0.11, 0.001, "plain"),
        (None, 0.001, "plain"),
    ],
)
def test_mixture_is_chosen_unless_the_plain_network_is_better(temperature, mixture, expected):
    noise = torch.randn(400, generator=torch.Generator().manual_seed(1)).double()
    noise = (noise - noise.mean()) / noise.std()  # the standard error of the temperature is 0.05
    plain = torch.rand(400, generator=torch.Generator().manual_seed(0)).double()
    nll = {"plain": plain, "noise": plain - 0.5, "mixture": plain + mixture}
    if temperature is not None:
        nll["temperature"] = plain + temperature + noise
    assert choose_candidate(nll).name == expected


def test_stacking_weights_maximize_the_log_likelihood():
    """The truth is the best point of a fine grid over the simplex of three weights."""
    generator = torch.Generator().manual_seed(0)
    log_likelihood = -torch.rand(40, 3, generator=generator).double() * torch.tensor([1.0, 1.5, 2.0])
    weights = stacking_weights(log_likelihood, iterations=20_000)
    steps = torch.linspace(0.0, 1.0, 201, dtype=torch.float64)
    grid = torch.cartesian_prod(steps, steps)
    grid = torch.cat([grid, 1.0 - grid.sum(1, keepdim=True)], 1)
    grid = grid[grid[:, 2] >= -1e-12].clamp_min(0.0)
    values = (log_likelihood.exp() @ grid.T).log().sum(0)
    assert float((log_likelihood.exp() @ weights).log().sum()) >= float(values.max()) - 1e-9
    assert (weights - grid[int(values.argmax())]).abs().max() < 0.01
    assert float(weights.sum()) == pytest.approx(1.0)


class Labels:
    """Held-out data of which only the targets matter."""

    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)


@pytest.mark.parametrize("soft", [False, True])
def test_mixture_of_a_fold_is_scored_by_a_fit_to_the_other_folds(soft):
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.rand(2, 20, 3, generator=generator).double().softmax(-1)
    targets = torch.randint(3, (20,), generator=generator)
    labels = nn.functional.one_hot(targets, 3).double()
    if soft:
        labels = 0.9 * labels + 0.1 / 3
    groups = list(torch.arange(20).split(5))
    nll = -(labels * probabilities.log()).sum(-1)
    data = Labels(labels if soft else targets)

    def predict(values):
        each = {str(k): Predictions(nll[k], values[k], None) for k in range(2)}
        return predict_mixture(Folds(data, groups), each)

    result = predict(probabilities)
    candidates = [Predictions(nll[k], probabilities[k], None) for k in range(2)]
    mixture = MixtureProblem(candidates, data.targets).fit(torch.arange(5, 20))
    torch.testing.assert_close(mixture.weights, stacking_weights(-nll[:, 5:].T, prior=1.0))
    counts = (64 * mixture.weights).round()
    sharpened = (probabilities[:, :5].log() / mixture.temperature).softmax(-1)
    mixed = torch.einsum("k,knc->nc", counts / 64, sharpened)
    torch.testing.assert_close(result.probabilities[:5], mixed)
    torch.testing.assert_close(result.nll[:5], -(labels[:5] * mixed.log()).sum(-1))
    nll[:, 1:5] = 9.0  # other examples of the first fold do not matter
    assert torch.equal(predict(probabilities).nll[:1], result.nll[:1])


def test_mixture_of_calibrated_networks_gets_a_temperature():
    """Labels follow the product of two predictions, of which each alone is calibrated and their mean is underconfident."""
    generator = torch.Generator().manual_seed(0)
    evidence = torch.randn(2, 4000, 2, generator=generator).double()
    labels = torch.multinomial(evidence.sum(0).softmax(-1), 1, generator=generator)[:, 0]
    probabilities = evidence.softmax(-1)
    rows = torch.arange(4000)
    nll = -probabilities[:, rows, labels].log()
    candidates = [Predictions(nll[k], probabilities[k], None) for k in range(2)]
    problem = MixtureProblem(candidates, labels)
    mixture = problem.fit(rows)
    mean = -probabilities.mean(0)[rows, labels].log().mean()
    assert mixture.temperature < 0.9
    assert float(problem.predict(mixture, rows).nll(labels).mean()) < float(mean)


def test_prior_of_the_weights_prefers_equal_ones():
    log_likelihood = torch.tensor([[-1.0, -2.0]]).expand(10, 2)
    weights = [float(stacking_weights(log_likelihood, prior=prior)[0]) for prior in (0.0, 1.0, 1e6)]
    assert weights[0] > weights[1] > weights[2]
    assert weights[2] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("noise_scale", [None, 0.5])
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
def test_regression_scores_by_hand(noise_scale, monkeypatch):
    """Two folds with residuals 0.1, -0.2 and 0.3, -0.4. An unknown noise scale comes from the other fold."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.ones_(network.weight)
    inputs = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    data = [(inputs, inputs + torch.tensor([[0.1], [0.3], [-0.2], [-0.4]]))]
    likelihood = "auto"
    if noise_scale is not None:
        likelihood = fb.likelihoods.Gaussian()
        nn.init.constant_(likelihood.log_scale, math.log(noise_scale))
    monkeypatch.setattr(torch, "randperm", lambda count, generator: torch.arange(count))
    options = {
        "folds": 2,
        "likelihood": likelihood,
        "candidates": ["temperature"],
        "progress": False,
        "accelerator": "cpu",
    }
    report = fb.calibrate(network, data, **options).calibration
    folds = (0.1**2, 0.2**2), (0.3**2, 0.4**2)  # squared residuals
    nll = {"plain": 0.0, "temperature": 0.0}
    for held_out, training in (folds, folds[::-1]):
        mean_square = sum(training) / 2
        plain_variance = mean_square if noise_scale is None else noise_scale**2
        for name, variance in (("plain", plain_variance), ("temperature", mean_square)):
            nll[name] += sum(0.5 * (math.log(2 * math.pi * variance) + s / variance) for s in held_out) / 4
    for name, value in nll.items():
        assert report.nll[name] == pytest.approx(value, rel=1e-5)
    temperature = 1.0 if noise_scale is None else 0.075**0.5 / noise_scale
    assert report.temperature == pytest.approx(temperature, rel=1e-5)


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize(("count", "folds"), [(1, 0), (3, 0), (5, 2)])
def test_few_examples_have_fewer_folds(count, folds):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    data = [(x, torch.arange(count) % 2)]
    report = fb.calibrate(nn.Linear(2, 2), data, candidates=["temperature"], progress=False).calibration
    assert (report.folds, bool(report.nll)) == (folds, folds > 0)


def test_refit_of_a_regression_is_scored_with_its_own_noise_scale():
    """A last layer that is off by a factor of five has a large noise scale, which the refit must not inherit."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(90, 2, generator=generator)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(90, 1, generator=generator)
    network = nn.Sequential(nn.Identity(), nn.Linear(2, 1))
    with torch.no_grad():
        network[1].weight.fill_(5.0)
        network[1].bias.zero_()
    likelihood = fb.likelihoods.Gaussian()
    data = HeldOutData(network, inputs, targets, likelihood, scale_is_known=False)
    groups = [torch.arange(fold, 90, 3) for fold in range(3)]
    nll = predict_refit(Folds(data, groups)).nll
    expected = 0.5 * math.log(2.0 * math.pi * math.e * 0.1**2)  # entropy of the noise
    assert nll.mean().item() == pytest.approx(expected, abs=0.15)
