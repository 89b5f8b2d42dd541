"""The plain architectures, and that each becomes stochastic by its layers' names."""

import pytest
import torch

import flowbnn as fb
from flowbnn import models
from flowbnn.errors import FlowBNNError
from flowbnn.models import MLP, VGG16, LeNet, SmallConv

CASES = {
    "MLP": (MLP(2, (8,), 3), (4, 2), 3, ["fc1", "fc2"]),
    "LeNet": (LeNet(), (2, 1, 28, 28), 10, ["conv1", "conv2", "fc1", "fc2", "fc3"]),
    "VGG16": (
        VGG16(width=0.125, hidden=16).eval(),
        (2, 3, 32, 32),
        10,
        [f"conv{i}" for i in range(1, 14)] + ["fc1", "fc2", "fc3"],
    ),
    "SmallConv": (SmallConv(classes=9, width=4), (5, 1, 8, 8), 9, ["conv1", "conv2", "fc1", "fc2"]),
}


def test_every_public_model_has_a_case():
    assert set(models.__all__) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_shapes_and_conversion(name):
    network, shape, classes, layers = CASES[name]
    inputs = torch.randn(shape)
    outputs = network(inputs)
    assert outputs.shape == (shape[0], classes)
    bayesian = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
    assert [line.layer for line in fb.describe(bayesian)] == layers
    with fb.noise_mode(bayesian, "off"):
        assert torch.allclose(bayesian(inputs), outputs, atol=1e-6)
    assert not torch.allclose(bayesian(inputs), outputs, atol=1e-3)


def test_an_mlp_is_what_its_formula_says():
    network = MLP(3, (5, 4), 2)
    x = torch.randn(6, 3)
    hidden = torch.relu(network.fc2(torch.relu(network.fc1(x))))
    assert torch.equal(network(x), network.fc3(hidden))
    assert torch.equal(network(x.view(6, 1, 3)), network(x))


def test_a_width_of_nought_is_refused():
    with pytest.raises(FlowBNNError, match="at least 1"):
        MLP(2, (0,), 2)


def test_vgg16_has_the_thirteen_convolutions_and_fifteen_million_weights_of_the_original():
    network = VGG16()
    weights = sum(p.numel() for name, p in network.named_parameters() if name.startswith("conv"))
    assert weights == 9 * (
        3 * 64 + 64 * 64 + 64 * 128 + 128 * 128 + 128 * 256 + 2 * 256 * 256 + 256 * 512 + 5 * 512 * 512
    )
    with pytest.raises(FlowBNNError, match="width"):
        VGG16(width=0)
