"""Tests of the networks and of their conversion by layer names."""

import pytest
import torch

import flowbnn as fb
from flowbnn import models
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Categorical
from flowbnn.methods.variational.noisy_network import NoisyNetwork
from flowbnn.models import MLP, VGG16, LeNet, PeriodicEmbedding, ResNet18, SmallConv

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
    "PeriodicEmbedding": (PeriodicEmbedding(2, width=3), (4, 2), 8, ["linear"]),
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


def test_mlp_equals_its_formula():
    network = MLP(3, (5, 4), 2)
    x = torch.randn(6, 3)
    hidden = torch.relu(network.fc2(torch.relu(network.fc1(x))))
    assert torch.equal(network(x), network.fc3(hidden))
    assert torch.equal(network(x.view(6, 1, 3)), network(x))


def test_widths_of_zero_are_refused():
    for make, argument in ((lambda: MLP(2, (0,), 2), "hidden"), (lambda: VGG16(width=0), "width")):
        with pytest.raises(FlowBNNError) as caught:
            make()
        assert caught.value.argument == argument


def test_vgg16_has_the_convolutions_of_the_original():
    network = VGG16()
    weights = sum(p.numel() for name, p in network.named_parameters() if name.startswith("conv"))
    assert weights == 9 * (
        3 * 64 + 64 * 64 + 64 * 128 + 128 * 128 + 128 * 256 + 2 * 256 * 256 + 256 * 512 + 5 * 512 * 512
    )


def test_resnet18_has_the_weights_of_the_original():
    network = ResNet18()
    # He et al. (2016), table 1: 11,689,512 weights with a stem of 7x7 and 1,000 classes
    original = 11_689_512 - 64 * 3 * (49 - 9) - 513 * 990
    assert sum(p.numel() for p in network.parameters()) == original == 11_173_962
    # inputs of the first convolution, of eight blocks with three shortcuts, and of the linear layer
    noise = fb.describe(fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}))
    assert sum(line.dim for line in noise) == 4355


def test_residual_blocks_add_their_shortcut_and_both_are_noisy():
    network = ResNet18(width=0.125).eval()
    for norm in (module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        torch.nn.init.normal_(norm.bias)
    x = torch.randn(2, 8, 32, 32)
    identity, projection = network.block2, network.block3

    def inner(block, x):
        return block.norm2(block.conv2(torch.relu(block.norm1(block.conv1(x)))))

    assert torch.allclose(identity(x), torch.relu(inner(identity, x) + x), atol=1e-6)
    shortcut = projection.norm3(projection.shortcut(x))
    assert torch.allclose(projection(x), torch.relu(inner(projection, x) + shortcut), atol=1e-6)
    assert projection(x).shape == (2, 16, 16, 16)
    # one noise vector for each example and layer, on the inputs of both paths
    noisy = NoisyNetwork(fb.to_stochastic(projection, {"*": fb.noise.NormalAffine()}), Categorical())
    first, second, third = (0.5 + torch.rand(2, size, 1, 1) for size in (8, 16, 8))
    hidden = torch.relu(projection.norm1(projection.conv1(first * x)))
    outputs = projection.norm2(projection.conv2(second * hidden)) + projection.norm3(
        projection.shortcut(third * x)
    )
    vectors = torch.cat([vector.flatten(1) for vector in (first, second, third)], 1)
    assert torch.allclose(noisy.outputs(x, vectors), torch.relu(outputs), atol=1e-5)
