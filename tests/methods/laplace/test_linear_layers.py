"""Tests of the covariance of outputs by linear layers."""

import laplace_truth as truth
import pytest
import torch
from laplace_problems import Branches, Tied, classes, small_conv
from torch import nn
from torch.nn import functional as F

import flowbnn as fb
from flowbnn.methods.laplace.linear_layers import LinearLayers
from flowbnn.posterior.prediction import clone_sharing_tensors


class TiedAutoencoder(nn.Module):
    """Network that uses the weight of a linear layer again, outside of this layer."""

    def __init__(self):
        super().__init__()
        self.encode, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.linear(torch.tanh(self.encode(x)), self.encode.weight.T))


class Recurrence(nn.Module):
    """Network that calls a layer twice."""

    def __init__(self):
        super().__init__()
        self.step, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.step(torch.tanh(self.step(x))))


class Unused(nn.Module):
    """Network with a layer that does not change the outputs."""

    def __init__(self):
        super().__init__()
        self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        self.unused(x)
        return self.head(x)


class Positions(nn.Module):
    """Network with a linear layer at three positions."""

    def __init__(self):
        super().__init__()
        self.each, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.each(x.unsqueeze(1) * torch.arange(1, 4).view(3, 1))).sum(1))


def fit(network, structure, layers="all", inputs=None):
    default_inputs, labels = classes()
    inputs = default_inputs if inputs is None else inputs
    method = fb.Laplace(structure, layers=layers, prior_scale=0.7, predictive="probit", epochs=0)
    data = truth.batches(inputs, labels)
    return method.fit(network.double().eval(), data, progress=False, seed=0), inputs


NETWORKS = {
    "in-place": lambda: nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)
    ),
    "branches": Branches,
    "unused": Unused,
}


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_covariance_is_that_of_the_jacobian(name, structure):
    posterior, inputs = fit(NETWORKS[name](), structure)
    layers = LinearLayers(clone_sharing_tensors(posterior.model), posterior.blocks)
    jacobian = truth.explicit_jacobian(posterior.model, posterior.names, inputs)
    expected = jacobian @ truth.covariance(posterior) @ jacobian.mT
    torch.testing.assert_close(layers.variance(inputs, 3, diagonal=False), expected)
    layers.max_bytes = 8 * 10 * 3 * 100  # several chunks
    variance = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(layers.variance(inputs, 3, diagonal=True), variance)
    torch.testing.assert_close(posterior.functional_variance(inputs), expected)
    expected = posterior.model(inputs) * (1.0 + torch.pi / 8.0 * variance).rsqrt()
    probabilities = posterior.predict(inputs).probabilities
    torch.testing.assert_close(probabilities, expected.softmax(1).detach())


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_selected_layers_of_a_convolutional_network(structure):
    posterior, inputs = fit(small_conv(), structure, "[47]", torch.randn(20, 1, 6, 6, dtype=torch.float64))
    layers = LinearLayers(clone_sharing_tensors(posterior.model), posterior.blocks)
    jacobian = truth.explicit_jacobian(posterior.model, posterior.names, inputs)
    expected = jacobian @ truth.covariance(posterior) @ jacobian.mT
    torch.testing.assert_close(layers.variance(inputs, 3, diagonal=False), expected)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("network_cls", [TiedAutoencoder, Tied, Recurrence, Positions])
def test_other_uses_of_weights_take_the_jacobian(network_cls):
    posterior, inputs = fit(network_cls(), "diag")
    network = clone_sharing_tensors(posterior.model)
    assert LinearLayers(network, posterior.blocks).variance(inputs, 3, diagonal=False) is None
    assert not any(module._forward_hooks for module in network.modules())
    jacobian = truth.explicit_jacobian(posterior.model, posterior.names, inputs)
    expected = jacobian @ truth.covariance(posterior) @ jacobian.mT
    torch.testing.assert_close(posterior.functional_variance(inputs), expected)
    torch.testing.assert_close(
        posterior.functional_variance(inputs, diagonal=True), expected.diagonal(dim1=1, dim2=2)
    )


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_half_precision():
    inputs, labels = classes()
    inputs = inputs.float()
    method = fb.Laplace("kron", layers="all", predictive="probit", prior_scale=0.7, epochs=0)
    data = truth.batches(inputs, labels)
    posterior = method.fit(NETWORKS["in-place"](), data, progress=False, seed=0)
    half = posterior.predict(inputs, precision="bf16-mixed").probabilities
    torch.testing.assert_close(half, posterior.predict(inputs).probabilities, rtol=0.0, atol=0.02)
