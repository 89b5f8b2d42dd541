"""Tests of the layers and structures that Laplace supports, and of its memory check."""

import pytest
import torch
from laplace_problems import QUIET
from torch import nn

import flowbnn as fb


def test_insufficient_memory_is_refused(monkeypatch):
    network = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 3))
    data = [(torch.randn(8, 4), torch.randint(3, (8,)))]
    free_memory = "flowbnn.memory.free_memory"
    monkeypatch.setattr("flowbnn.memory.SMALL_BYTES", 0)
    monkeypatch.setattr(free_memory, lambda device: 10_000_000)
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace("full", layers="all", epochs=0).fit(network, data, **QUIET)
    assert (error.value.kind, error.value.argument) == ("memory", "structure")
    assert error.value.fields["needed"] == 8 * 6 * 803**2
    fb.Laplace("kron", epochs=0).fit(network, data, **QUIET)
    needed = 8 * (6 * 101**2 + 2 * 3**2)
    monkeypatch.setattr(free_memory, lambda device: 2 * needed - 1)
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace("kron", epochs=0).fit(network, data, **QUIET)
    assert error.value.kind == "memory"
    assert error.value.fields["needed"] == needed


def test_kron_refuses_unsupported_layers():
    inputs, labels = torch.randn(8, 2, 5), torch.randint(3, (8,))
    method = fb.Laplace("kron", layers="all", epochs=0)
    grouped = nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(fb.FlowBNNError) as error:
        method.fit(grouped, [(inputs, labels)], **QUIET)
    assert (error.value.kind, error.value.layer, error.value.fields["reason"]) == ("layer", "0", "2 groups")
    layer = nn.Linear(4, 4)
    network = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 3))
    with pytest.raises(fb.FlowBNNError) as error:
        method.fit(network, [(torch.randn(8, 4), labels)], **QUIET)
    assert (error.value.kind, error.value.layer, error.value.fields["reason"]) == (
        "layer",
        "0",
        "called 2 times",
    )


def test_invalid_arguments_are_refused():
    inputs, labels = torch.randn(8, 2, 5), torch.randint(3, (8,))
    network = nn.Sequential(nn.Flatten(), nn.Linear(10, 3))
    data, regression_data = [(inputs, labels)], [(inputs[..., 0], inputs[:, :1, 1])]
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace("kron", layers="fc*", epochs=0).fit(network, data, **QUIET)
    assert (error.value.kind, error.value.argument) == ("layer", "layers")
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace(epochs=0, predictive="probit").fit(nn.Linear(2, 1), regression_data, **QUIET)
    assert (error.value.kind, error.value.argument) == ("likelihood", "predictive")
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace(epochs=0).fit(network, [*data, (inputs, labels + 3)], **QUIET)
    assert (error.value.kind, error.value.argument) == ("targets", "targets")
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace(epochs=0).fit(network, data, sed=1)
    assert (error.value.kind, error.value.argument) == ("unknown setting", "sed")


class OtherLinear(nn.Linear):
    """Linear layer with a forward of its own, as that of timm."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class HalvedLinear(nn.Linear):
    """Linear layer that computes something else."""

    def forward(self, x):
        return 0.5 * super().forward(x)


@pytest.mark.parametrize("layers", ["last", "all"])
def test_subclasses_that_compute_a_linear_layer_are_supported(layers):
    inputs, labels = torch.randn(12, 4), torch.arange(12) % 3
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    other = nn.Sequential(OtherLinear(4, 5), nn.Tanh(), OtherLinear(5, 3))
    other.load_state_dict(plain.state_dict())
    method = fb.Laplace("kron", layers=layers, prior_scale=1.0, epochs=0)
    expected, found = (
        method.fit(network, [(inputs, labels)], **QUIET).predict(inputs, 4, seed=0)
        for network in (plain, other)
    )
    torch.testing.assert_close(found.probabilities, expected.probabilities)


def test_subclass_that_computes_something_else_is_refused():
    network = nn.Sequential(HalvedLinear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace("kron", layers="all", epochs=0).fit(
            network, [(torch.randn(6, 4), torch.arange(6) % 3)], **QUIET
        )
    assert (error.value.kind, error.value.layer) == ("layer", "0")
    assert "nn.Linear" in str(error.value)


def test_name_of_a_parameter_instead_of_its_layer():
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace("diag", layers="2.weight", epochs=0).fit(
            network, [(torch.randn(6, 4), torch.arange(6) % 3)], **QUIET
        )
    assert (error.value.kind, error.value.argument) == ("layer", "layers")
    assert "layers='2'" in str(error.value)
