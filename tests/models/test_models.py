"""The plain architectures, and that each becomes stochastic by its layers' names."""

import pytest
import torch

import flowbnn as fb
from flowbnn import models
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Categorical
from flowbnn.methods.variational.noisy_network import NoisyNetwork
from flowbnn.models import MLP, VGG16, LeNet, ResNet18, SmallConv

CASES = {
    "MLP": (MLP(2, (8,), 3), (4, 2), 3, ["fc1", "fc2"]),
    "LeNet": (LeNet(), (2, 1, 28, 28), 10, ["conv1", "conv2", "fc1", "fc2", "fc3"]),
    "VGG16": (
        VGG16(width=0.125, hidden=16).eval(),
        (2, 3, 32, 32),
        10,
        [f"conv{i}" for i in range(1, 14)] + ["fc1", "fc2", "fc3"],
    ),
    "ResNet18": (
        ResNet18(width=0.125).eval(),
        (2, 3, 32, 32),
        10,
        ["conv1"]
        + [
            f"block{i}.{name}"
            for i in range(1, 9)
            for name in ("conv1", "conv2", *(["shortcut"] if i in (3, 5, 7) else []))
        ]
        + ["fc"],
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


def test_resnet18_has_the_weights_of_the_original_with_the_stem_for_small_images():
    network = ResNet18()
    # He et al. (2016), table 1: 11,689,512 weights with a stem of 7x7 and 1,000 classes
    original = 11_689_512 - 64 * 3 * (49 - 9) - 513 * 990
    assert sum(p.numel() for p in network.parameters()) == original == 11_173_962
    # inputs of the stem, of eight blocks with three shortcuts, and of the classes
    noise = fb.describe(fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}))
    assert sum(line.dim for line in noise) == 4355


def test_a_block_adds_its_shortcut_and_noise_enters_both():
    network = ResNet18(width=0.125).eval()
    for norm in (module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        torch.nn.init.normal_(norm.bias)
    x = torch.randn(2, 8, 32, 32)
    same, other = network.block2, network.block3

    def inner(block, x):
        return block.norm2(block.conv2(torch.relu(block.norm1(block.conv1(x)))))

    assert torch.allclose(same(x), torch.relu(inner(same, x) + x), atol=1e-6)
    shortcut = other.norm3(other.shortcut(x))
    assert torch.allclose(other(x), torch.relu(inner(other, x) + shortcut), atol=1e-6)
    assert other(x).shape == (2, 16, 16, 16)
    # one noise vector for each example and layer, on the inputs of both paths
    noisy = NoisyNetwork(fb.to_stochastic(other, {"*": fb.noise.NormalAffine()}), Categorical())
    first, second, third = (0.5 + torch.rand(2, size, 1, 1) for size in (8, 16, 8))
    hidden = torch.relu(other.norm1(other.conv1(first * x)))
    added = other.norm2(other.conv2(second * hidden)) + other.norm3(other.shortcut(third * x))
    vectors = torch.cat([one.flatten(1) for one in (first, second, third)], 1)
    assert torch.allclose(noisy.outputs(x, vectors), torch.relu(added), atol=1e-5)
