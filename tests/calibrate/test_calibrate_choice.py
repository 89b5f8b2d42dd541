"""Tests of ``fb.calibrate``: choice of a calibrator by cross-validation."""

import warnings

import pytest
import torch
from tests.calibrate.problems import LinearRegression
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flowbnn as fb
from flowbnn.calibrate.problem import CalibrationProblem
from flowbnn.errors import FlowBNNError, FlowBNNWarning

QUICK = {"folds": 0, "progress": False, "accelerator": "cpu"}


def warning_kinds(caught: list[warnings.WarningMessage]) -> list[str]:
    """Returns the kinds of the library's own warnings."""
    return [entry.message.kind for entry in caught if isinstance(entry.message, FlowBNNWarning)]


def labels_of(network: nn.Module, inputs: Tensor, seed: int = 0) -> Tensor:
    """Draws labels from the probabilities of a network, which is thus perfectly calibrated."""
    probabilities = network(inputs).detach().softmax(-1)
    return torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def make_network(factor: float = 3.0) -> nn.Module:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        network[2].weight.mul_(factor)
    return network


def make_inputs(count: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(5))


FAST = {
    "candidates": ["plain", "temperature", "vector", "matrix", "refit"],
    "progress": False,
    "accelerator": "cpu",
}


def test_the_plain_network_is_returned_if_it_is_calibrated():
    network, inputs = make_network(), make_inputs(300)
    posterior = fb.calibrate(network, (inputs, labels_of(network, inputs)), **FAST)
    assert posterior.calibration.choice == "plain"
    assert isinstance(posterior, fb.posterior.PointPosterior)
    assert "the plain network is returned" in str(posterior.calibration)
    assert posterior.calibration.gain == 0.0
    assert not posterior.calibration.better


def test_candidates_of_a_mixture_are_fitted_to_all_examples_once(monkeypatch):
    fits = []
    fit_gaussian = CalibrationProblem.fit_gaussian

    def count(self, indices, *args, **kwargs):
        fits.append(len(indices))
        return fit_gaussian(self, indices, *args, **kwargs)

    monkeypatch.setattr(CalibrationProblem, "fit_gaussian", count)
    names = ["noise", "noise+temperature", "mixture"]
    network, inputs = make_network(), make_inputs(60)
    data = inputs, labels_of(network, inputs)
    overconfident = nn.Sequential(network, Scale(4.0))
    options = {**FAST, "candidates": names, "folds": 2, "samples": 4}
    assert fb.calibrate(overconfident, data, **options).calibration.choice == "mixture"
    assert fits.count(60) == 1


def test_temperature_is_chosen_if_the_network_is_overconfident():
    network, inputs = make_network(), make_inputs(400)
    labels = labels_of(network, inputs)
    options = {**FAST, "candidates": ["temperature"]}
    posterior = fb.calibrate(nn.Sequential(network, Scale(4.0)), (inputs, labels), **options)
    assert posterior.calibration.choice == "temperature"
    assert posterior.temperature == pytest.approx(4.0, rel=0.2)
    assert posterior.calibration.better
    assert list(posterior.calibration.nll) == ["plain", "temperature"]


def test_mixture_of_candidates_is_returned_with_its_temperature(tmp_path):
    network, inputs = make_network(), make_inputs(400)
    labels = labels_of(network, inputs)
    broken = nn.Sequential(make_network(), Scale(3.0))
    with torch.no_grad():
        broken[0][2].weight.add_(torch.randn(3, 8, generator=torch.Generator().manual_seed(2)))
    names = ["temperature", "vector", "matrix", "mixture"]
    posterior = fb.calibrate(broken, (inputs, labels), **{**FAST, "candidates": names})
    assert list(posterior.calibration.nll) == ["plain", *names]
    assert posterior.calibration.choice == "mixture"
    assert posterior.posterior.kind == "mixture"
    assert min(posterior.posterior.weights) >= 0.02
    assert "energy" not in fb.posterior.novelty_scores(posterior.predict(inputs[:5], seed=0))
    loaded = fb.load_posterior(posterior.save(tmp_path / "posterior"), broken)
    assert loaded.calibration == posterior.calibration
    expected = posterior.predict(inputs[:5], seed=0).probabilities
    assert torch.equal(loaded.predict(inputs[:5], seed=0).probabilities, expected)


def test_mixture_needs_two_other_candidates():
    network, inputs = make_network(), make_inputs(60)
    options = {**FAST, "candidates": ["temperature", "mixture"]}
    posterior = fb.calibrate(network, (inputs, labels_of(network, inputs)), **options)
    assert list(posterior.calibration.excluded) == ["mixture"]


class Scale(nn.Module):
    """Multiplies logits by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_a_shifted_class_needs_vector_scaling():
    network, inputs = make_network(), make_inputs(400)
    biased = make_network()
    with torch.no_grad():
        biased[2].bias.add_(torch.tensor([2.0, -2.0, 0.0]))
    options = {**FAST, "candidates": ["temperature", "vector"]}
    posterior = fb.calibrate(biased, (inputs, labels_of(network, inputs)), **options)
    assert posterior.calibration.choice == "vector"
    assert posterior.calibration.nll["vector"] < posterior.calibration.nll["temperature"] - 0.1


def test_a_wrong_last_layer_needs_a_refit():
    network, inputs = make_network(), make_inputs(600)
    labels, broken = labels_of(network, inputs), make_network()
    with torch.no_grad():
        broken[2].weight.add_(2.0 * torch.randn(3, 8, generator=torch.Generator().manual_seed(2)))
    posterior = fb.calibrate(broken, (inputs, labels), **{**FAST, "candidates": ["temperature", "refit"]})
    assert posterior.calibration.choice == "refit"
    test = torch.randn(500, 4, generator=torch.Generator().manual_seed(6))
    point = fb.posterior.PointPosterior(broken, posterior.likelihood)
    data = [(test, labels_of(network, test, 1))]
    nll, plain = (fb.evaluate(each, data, progress=False)["nll"] for each in (posterior, point))
    assert nll < plain - 0.2


@pytest.mark.parametrize("name", ["plain", "temperature", "vector", "matrix", "refit", "noise"])
def test_one_candidate_needs_no_folds(name):
    network, inputs = make_network(), make_inputs(60)
    data = inputs, labels_of(network, inputs)
    posterior = fb.calibrate(network, data, candidates=[name], **QUICK)
    assert posterior.calibration.choice == name
    assert not posterior.calibration.nll
    assert posterior.predict(inputs, 4).probabilities.isfinite().all()


@pytest.mark.parametrize("regression", [False, True])
def test_refit_without_folds_is_that_of_last_layer_refit(regression):
    network, inputs = make_network(), make_inputs(40)
    labels = labels_of(network, inputs)
    data = inputs, labels
    if regression:
        network, data = nn.Sequential(network, nn.Linear(3, 1)), (inputs, labels[:, None].float())
    options = {"seed": 3, "progress": False, "accelerator": "cpu"}
    posterior = fb.calibrate(network, data, candidates=["refit"], folds=0, **options)
    expected = fb.LastLayerRefit().fit(network, data, **options)
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(posterior.model.state_dict()[name], value)


def test_noise_is_followed_by_a_scaling(tmp_path):
    network, inputs = make_network(), make_inputs(80)
    data = inputs, labels_of(network, inputs)
    names = ["noise", "noise+temperature", "noise+matrix"]
    posterior = fb.calibrate(network, data, candidates=names, **{**QUICK, "folds": 2}, samples=8)
    assert list(posterior.calibration.nll) == ["plain", *names]
    loaded = fb.load_posterior(posterior.save(tmp_path / "posterior"), network)
    assert loaded.calibration == posterior.calibration


@pytest.mark.parametrize(
    ("candidates", "folds", "argument"),
    [
        (["plain", "noise"], 0, "candidates"),
        (["noise+temperature"], 0, "folds"),
        (["nois"], 4, "candidates"),
    ],
)
def test_bad_candidates_are_refused(candidates, folds, argument, memorized):
    data = memorized.inputs[:40], memorized.targets[:40]
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(memorized.network, data, candidates=candidates, folds=folds, progress=False)
    assert caught.value.argument == argument


def test_class_candidates_of_a_regression_are_refused():
    problem = LinearRegression()
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(
            problem.network, (problem.inputs, problem.targets), candidates=["matrix"], progress=False
        )
    assert (caught.value.kind, caught.value.argument) == ("likelihood", "candidates")


class CheckpointedNetwork(nn.Sequential):
    """Network whose second layer runs again in the backward pass."""

    def forward(self, inputs):
        return self[2](checkpoint(self[1], self[0](inputs).tanh(), use_reentrant=False).tanh())


def test_activation_checkpointing_excludes_the_noise_only():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 4, generator=generator)
    scores = inputs[:, :2].sum(1) + torch.randn(200, generator=generator)
    data = inputs, (scores > 0).long()
    torch.manual_seed(0)
    network = CheckpointedNetwork(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    network = fb.MLE(epochs=30).fit(network, (inputs[:100], data[1][:100]), seed=0, progress=False).model
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.calibrate(network, data, folds=2, progress=False)
    excluded = [warning.message for warning in caught if warning.message.kind == "excluded"]
    assert [(warning.fields["candidate"], warning.fields["layer"]) for warning in excluded] == [
        ("noise", "1")
    ]
    assert "activation checkpointing" in str(excluded[0])
    assert set(posterior.calibration.excluded) == {"noise", "noise+temperature"}
    assert set(posterior.calibration.nll) == {"plain", "temperature", "vector", "matrix", "refit", "mixture"}
    for options in ({"candidates": ["noise"]}, {"rules": {"*": fb.noise.NormalAffine()}}):
        with pytest.raises(FlowBNNError, match="set its rule to None"):
            fb.calibrate(network, data, folds=2, progress=False, **options)
