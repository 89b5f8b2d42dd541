"""Tests of layers with noise that are never called, or that no gradient reaches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers
from flowbnn.noise.inspection import layers_without_gradient
from flowbnn.noise.layout import layout_of

QUIET = {"progress": False, "seed": 0}


class Backbone(nn.Module):
    """Head on a backbone whose gradients are off: always, or in evaluation mode only."""

    def __init__(self, gradients=lambda training: False):
        super().__init__()
        self.body, self.out, self.gradients = nn.Linear(4, 8), nn.Linear(8, 3), gradients

    def forward(self, x):
        with torch.set_grad_enabled(self.gradients(self.training) and torch.is_grad_enabled()):
            features = torch.tanh(self.body(x))
        return self.out(features)


class Bypass(nn.Module):
    """Network that reads the weights of its layers and never calls them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(F.linear(x, self.first.weight, self.first.bias))
        return F.linear(hidden, self.last.weight, self.last.bias)


def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 4, generator=generator), torch.arange(16) % 3) for _ in range(3)]


def stochastic(network: nn.Module, **options) -> nn.Module:
    return fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}, **options)


def test_fit_leaves_layers_without_gradient_plain(tmp_path):
    torch.manual_seed(0)
    network = Backbone()
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        posterior = fb.fit(stochastic(network), batches(), epochs=1, report=False, **QUIET, validation=None)
    assert [(entry.message.kind, entry.message.fields["layers"]) for entry in caught] == [
        ("gradient", ["body"])
    ]
    assert list(noise_layers(posterior.model)) == ["out"]
    x = batches()[0][0]
    features = []
    with posterior.model.out.register_forward_pre_hook(
        lambda _, args: features.append(args[0]), prepend=True
    ):
        posterior.predict(x, 4, seed=0)
    assert all(len(each.unique(dim=0)) <= 16 for each in features)
    loaded = fb.load_posterior(posterior.save(tmp_path / "a.safetensors"), network)
    torch.testing.assert_close(loaded.predict(x, 4, seed=0).samples, posterior.predict(x, 4, seed=0).samples)


@pytest.mark.parametrize("gradients", [lambda training: True, lambda training: training])
def test_layers_with_gradients_in_training_keep_their_noise(gradients):
    model = stochastic(Backbone(gradients))
    assert layers_without_gradient(model, batches()[0][0]) == []


def test_frozen_noise_needs_no_gradient():
    model = stochastic(Backbone())
    fb.noise.freeze(model, "noise")
    assert layers_without_gradient(model, batches()[0][0]) == []


def test_joint_noise_of_a_layer_without_gradient_is_refused():
    with pytest.raises(FlowBNNError) as caught:
        fb.fit(stochastic(Backbone(), joint="full"), batches(), epochs=1, **QUIET, validation=None)
    assert (caught.value.kind, caught.value.fields["layers"]) == ("gradient", ["body"])


@pytest.mark.parametrize(
    "fit",
    [
        lambda network: fb.fit(stochastic(network), batches(), epochs=1, **QUIET, validation=None),
        lambda network: fb.NodeNoise(epochs=1).fit(network, batches(), **QUIET),
        lambda network: fb.ModeEnsemble(2, steps=2, epochs=0).fit(network, batches(), **QUIET),
    ],
    ids=["fit", "NodeNoise", "ModeEnsemble"],
)
def test_noise_of_layers_that_are_never_called_is_refused(fit):
    torch.manual_seed(0)
    with pytest.raises(FlowBNNError) as caught:
        fit(Bypass())
    assert (caught.value.kind, caught.value.argument) == ("idle", "network")
    assert caught.value.fields["layers"] == ["first", "last"]


def test_calibrate_excludes_noise_of_layers_that_are_never_called():
    torch.manual_seed(0)
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        posterior = fb.calibrate(Bypass(), batches(), progress=False)
    fields = [entry.message.fields for entry in caught if entry.message.kind == "excluded"]
    assert [(each["candidate"], each["layers"]) for each in fields] == [("noise", ["first", "last"])]
    assert not noise_layers(getattr(posterior, "posterior", posterior).model)


@pytest.mark.slow
def test_calibrate_leaves_layers_without_gradient_plain():
    torch.manual_seed(0)
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        posterior = fb.calibrate(Backbone(), batches(), progress=False)
    kinds = [entry.message.kind for entry in caught]
    assert kinds.count("gradient") == 1
    inner = getattr(posterior, "posterior", posterior)
    assert "body" not in noise_layers(inner.model)


class Expert(nn.Module):
    """Matrix that no registered layer holds."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.matrix


def test_conversion_warns_if_most_weights_cannot_have_noise():
    network = nn.Sequential(nn.Linear(4, 8), Expert(8, 16), nn.Linear(16, 3))
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        model = stochastic(network)
    assert [(entry.message.kind, entry.message.fields["classes"]) for entry in caught] == [
        ("share", ["Expert"])
    ]
    share = (4 * 8 + 16 * 3) / (4 * 8 + 8 * 16 + 16 * 3)
    assert caught[0].message.fields["share"] == pytest.approx(share)
    table = fb.describe(model)
    assert table.share == pytest.approx(share)
    assert str(table).splitlines()[0] == f"noise reaches {100 * share:.0f} % of the matrix weights"
    fb.to_stochastic(network, {"0": fb.noise.NormalAffine()})  # a choice of layers is no surprise
    assert fb.describe(stochastic(Bypass())).share == 1.0


@pytest.mark.parametrize(
    ("module", "name", "attributes", "width"),
    [
        ("transformers.pytorch_utils", "Conv1D", {"weight": torch.zeros(5, 7)}, 5),
        ("torch_geometric.nn.dense.linear", "Linear", {"in_channels": 6}, 6),
    ],
)
def test_linear_layers_of_other_libraries_can_have_noise(module, name, attributes, width):
    layer = type(name, (nn.Module,), {"__module__": module})()
    for key, value in attributes.items():
        setattr(layer, key, value)
    assert layout_of(layer).dim == width
