"""Tests of data that a network cannot be calibrated on: one warning names the reason, and nothing worse is returned."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.calibrate import CANDIDATES
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.calibrators.label_problems import find_missing_class
from flowbnn.posterior import PointPosterior
from flowbnn.predictive import CategoricalPredictive

QUIET = {"progress": False, "accelerator": "cpu"}
AUTOMATIC = set(CANDIDATES) - {"noise+matrix"}  # names that "auto" compares


def make_network() -> nn.Module:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        network[2].weight.mul_(4.0)
    return network


def make_data(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 4, generator=generator)
    probabilities = make_network()(inputs).detach().softmax(-1)
    return inputs, torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def calibrate(network: nn.Module, data: tuple[Tensor, Tensor], **options) -> tuple[fb.Posterior, list[str]]:
    """Returns the posterior and the kinds of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = fb.calibrate(network, data, **QUIET, **options)
    messages = [entry.message for entry in caught if isinstance(entry.message, FlowBNNWarning)]
    assert not any("\n" in str(message) for message in messages)
    return posterior, [message.kind for message in messages]


def assert_unchanged(posterior: fb.Posterior, network: nn.Module, inputs: Tensor) -> None:
    assert isinstance(posterior, PointPosterior)
    assert posterior.calibration.choice == "plain"
    torch.testing.assert_close(posterior.predict(inputs).probabilities, network(inputs).softmax(-1).detach())


def test_one_class_returns_the_plain_network():
    network, (inputs, _) = make_network(), make_data()
    data = inputs, torch.ones(60, dtype=torch.long)
    posterior, kinds = calibrate(network, data)
    assert kinds == ["classes"]
    assert set(posterior.calibration.excluded) == AUTOMATIC - {"plain"}
    assert_unchanged(posterior, network, inputs)


@pytest.mark.parametrize("candidate", ["temperature", "noise"])
def test_one_class_returns_the_plain_network_without_a_comparison(candidate):
    network, (inputs, labels) = make_network(), make_data()
    posterior, kinds = calibrate(network, (inputs, torch.ones_like(labels)), candidates=[candidate], folds=0)
    assert kinds == ["classes"]
    assert list(posterior.calibration.excluded) == [candidate]
    assert_unchanged(posterior, network, inputs)


@pytest.mark.parametrize("options", [{}, {"folds": 0}], ids=["compared", "not compared"])
def test_equal_targets_return_the_plain_network(options):
    torch.manual_seed(0)
    network, inputs = nn.Linear(4, 1), torch.randn(60, 4)
    posterior, kinds = calibrate(network, (inputs, torch.full((60, 1), 2.0)), **options)
    assert kinds == ["targets"]
    assert posterior.calibration.choice == "plain"
    assert list(posterior.calibration.nll) == ([] if options else ["plain"])
    torch.testing.assert_close(posterior.predict(inputs).mean, network(inputs).detach())


def test_labels_that_contradict_the_network_return_it():
    network, (inputs, labels) = make_network(), make_data(200)
    posterior, kinds = calibrate(network, (inputs, (labels + 1) % 3))
    assert kinds == ["labels"]
    assert_unchanged(posterior, network, inputs)
    _, kinds = calibrate(network, (inputs, labels), candidates=["temperature"])
    assert kinds == []
    for candidate in ("matrix", "refit"):  # fitted as requested without a comparison
        posterior, kinds = calibrate(network, (inputs, (labels + 1) % 3), candidates=[candidate], folds=0)
        assert (posterior.calibration.choice, kinds) == (candidate, ["labels"])


def test_a_missing_class_that_the_network_predicts_leaves_only_the_temperature():
    network, (inputs, labels) = make_network(), make_data(200)
    present = labels != 2
    posterior, kinds = calibrate(network, (inputs[present], labels[present]))
    assert kinds == ["missing class"]
    assert set(posterior.calibration.nll) == {"plain", "temperature"}
    # with ten examples chance explains the missing class
    few = present.nonzero()[:10, 0]
    _, kinds = calibrate(network, (inputs[few], labels[few]), candidates=["temperature"])
    assert "missing class" not in kinds


def test_ignored_positions_and_soft_labels_are_not_missing_classes():
    torch.manual_seed(0)
    logits = torch.randn(100, 4, 3)
    logits[:, 2:, 2] += 9.0  # class 2 is predicted at the ignored positions only
    logits[:, :2, 2] -= 9.0
    labels = torch.full((100, 4), -100)
    labels[:, :2] = logits[:, :2].argmax(-1)
    predictive = CategoricalPredictive(logits[None])
    assert find_missing_class(predictive, labels) is None
    labels[:, 2:] = 0
    assert find_missing_class(predictive, labels).kind == "missing class"
    unlikely = CategoricalPredictive(torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 600, 3))
    assert find_missing_class(unlikely, unlikely.probabilities) is None


def test_wrong_class_frequencies_do_not_contradict_the_network():
    network, (inputs, labels) = make_network(), make_data(200)
    with torch.no_grad():
        network[2].bias.add_(torch.tensor([4.0, -4.0, 0.0]))
    posterior, kinds = calibrate(network, (inputs, labels), candidates=["vector"])
    assert kinds == []
    assert posterior.calibration.choice == "vector"


@pytest.mark.parametrize(
    "targets", [torch.tensor([0, 1, 2]), torch.randn(3, 1)], ids=["classes", "regression"]
)
def test_too_few_examples_to_compare_return_the_plain_network(targets):
    network = make_network() if not targets.is_floating_point() else nn.Linear(4, 1)
    posterior, kinds = calibrate(network, (make_data(3)[0], targets))
    assert kinds == ["examples"]
    assert posterior.calibration.choice == "plain"


def test_fewer_examples_than_classes_determine_a_temperature_only():
    torch.manual_seed(0)
    network, inputs = nn.Linear(4, 30), torch.randn(20, 4)
    labels = torch.multinomial(network(inputs).detach().softmax(-1), 1)[:, 0]
    posterior, kinds = calibrate(network, (inputs, labels))
    assert kinds == ["examples"]
    assert list(posterior.calibration.nll) == ["plain", "temperature"]
    assert set(posterior.calibration.excluded) == AUTOMATIC - {"plain", "temperature"}


def test_a_fold_with_one_class_is_named():
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    inputs = torch.randn(30, 4)
    labels = torch.zeros(30, dtype=torch.long)
    labels[network(inputs).diff().argmax()] = 1
    posterior, kinds = calibrate(network, (inputs, labels))
    assert kinds[0] == "folds"
    assert list(posterior.calibration.nll) == ["plain", "temperature"]


class NanOnSome(nn.Linear):
    """Returns NaN for inputs whose first feature is large."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 1.5, float("nan"), super().forward(x))


@pytest.mark.parametrize("folds", [0, 4])
def test_nan_on_some_examples_is_an_error(folds):
    inputs, labels = make_data()
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(NanOnSome(4, 3), (inputs, labels), folds=folds, **QUIET)
    assert (caught.value.kind, caught.value.argument) == ("not finite", "network")
    assert "\n" not in str(caught.value)


class Backbone(nn.Module):
    """Network whose first layer runs without gradients, and whose third layer is never called."""

    def __init__(self, uses_head: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.idle = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.uses_head = uses_head

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.body(x).tanh()
        if not self.uses_head:
            return features[:, :3]
        return self.head(features)


def test_layers_without_gradient_or_calls_get_no_noise():
    torch.manual_seed(0)
    posterior, kinds = calibrate(Backbone(), make_data(), candidates=["noise"], folds=0)
    assert {"idle", "gradient"} <= set(kinds)
    assert list(fb.noise.noise_layers(posterior.model)) == ["head"]


def test_a_network_without_layers_for_noise_is_calibrated_otherwise():
    torch.manual_seed(0)
    posterior, kinds = calibrate(Backbone(uses_head=False), make_data(80))
    assert "excluded" in kinds
    assert {"noise", "noise+temperature"} <= set(posterior.calibration.excluded)
    assert {*posterior.calibration.nll, *posterior.calibration.excluded} == AUTOMATIC
    assert "temperature" in posterior.calibration.nll
    with pytest.raises(FlowBNNError) as caught:
        calibrate(Backbone(uses_head=False), make_data(80), candidates=["noise"], folds=0)
    assert caught.value.kind == "gradient"
