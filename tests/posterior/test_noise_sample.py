"""Tests of NoisePosterior.sample: a plain network, the first one of a prediction with the same seed."""

import copy
import io

import pytest
import torch
from test_noise_strategies import ExamplesFirst
from torch import nn

import flowbnn as fb
from conversion_networks import NETWORKS, first
from flowbnn.noise import noise_layers

# which networks keep no factor beside their weights, at site channel
IN_WEIGHTS = {
    "mlp", "conv-batchnorm-without-bias", "non-square-kernel", "grouped", "depthwise", "padding-same", "padding-reflect",
    "grey-image", "one-feature", "depthwise-transposed", "conv1d", "conv3d", "transposed", "bare-linear",
}  # fmt: skip


def examples_first(case) -> nn.Module:
    """Returns the network of a case, wrapped only if its examples are not on the first axis of its inputs and output."""
    return ExamplesFirst(case) if case.batch_axis or case.output is first else case.network()


def posterior_of(network: nn.Module, recipe) -> fb.posterior.NoisePosterior:
    model = fb.to_stochastic(network, {"*": recipe}).double().eval()
    for layer in noise_layers(model).values():
        layer.fitted = True
    return fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())


def logits(posterior, inputs, samples, **options):
    return posterior.collect(inputs, fb.posterior.PredictOptions(samples, **options))[0]


def double(inputs):
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


@pytest.mark.parametrize("site", ["channel", pytest.param("position", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", NETWORKS, ids=lambda case: case.name)
def test_sample_is_the_first_network_of_a_prediction(case, site):
    torch.manual_seed(0)
    posterior = posterior_of(examples_first(case), fb.noise.NormalAffine(site=site))
    inputs = double(x.movedim(case.batch_axis, 0) for x in case.inputs())
    outputs = logits(posterior, inputs, 5, seed=3)
    first, one, third = outputs[0], posterior.sample(3), posterior.networks(5, 3)[2]
    posterior.cache.values.clear()
    fresh = posterior.sample(3)  # of a posterior that has not predicted
    with torch.no_grad():
        found = one(*inputs)
        assert (found - first).abs().max() <= 1e-6 * first.abs().max()
        assert (fresh(*inputs) - first).abs().max() <= 1e-6 * first.abs().max()
        assert (third(*inputs) - outputs[2]).abs().max() <= 1e-6 * outputs[2].abs().max()
        for again in (one, fb.to_deterministic(one), copy.deepcopy(one)):
            assert torch.equal(again(*inputs), found)
    assert not noise_layers(one)
    assert not set(dict(one.named_parameters())) - set(dict(examples_first(case).named_parameters()))
    beside = [name for name, _ in one.named_buffers() if "noise" in name]
    assert bool(beside) == (site == "position" or case.name not in IN_WEIGHTS)


# torch's own recurrent layers, noise or not
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("site", ["channel", "position"])
@pytest.mark.parametrize(
    "name", ["conv-batchnorm-without-bias", "cross-attention", "gru-cell", "tied-weights"]
)
def test_an_exported_sample_draws_nothing(name, site):
    torch.manual_seed(0)
    case = next(case for case in NETWORKS if case.name == name)
    posterior = posterior_of(examples_first(case), fb.noise.NormalPlanar(1, site=site))
    inputs = double(x.movedim(case.batch_axis, 0) for x in case.inputs())
    one = posterior.sample(0)
    with torch.no_grad():
        exported = torch.export.export(one, inputs).module()
        wanted = one(*inputs)
        for _ in range(2):
            torch.testing.assert_close(exported(*inputs), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "recipe",
    [
        fb.noise.NormalAffine(),
        fb.noise.NormalAffine(components=3),
        fb.noise.NormalPlanar(2),
        fb.noise.NormalCoupling(2),
        fb.noise.Dropout(0.3),
        fb.noise.Dropout(0.3, site="position"),
    ],
    ids=str,
)
def test_a_sample_does_not_depend_on_the_number_of_samples(recipe):
    torch.manual_seed(0)
    posterior = posterior_of(nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)), recipe)
    x = torch.randn(5, 4).double()
    many = logits(posterior, x, 70, seed=3)
    for samples in (1, 2, 33, 64):
        torch.testing.assert_close(
            logits(posterior, x, samples, seed=3), many[:samples], rtol=1e-6, atol=1e-6
        )
    draws, few = posterior.draws(70, 3), posterior.draws(2, 3)
    for name, value in few.items():
        torch.testing.assert_close(value, draws[name][:2], rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(posterior.sample(3)(x), many[0], rtol=1e-6, atol=1e-6)


def test_a_sample_can_be_saved_and_converted_again():
    torch.manual_seed(0)
    one = posterior_of(nn.LSTM(3, 2, batch_first=True), fb.noise.NormalAffine()).sample(0)
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    x = torch.randn(2, 4, 3).double()
    assert torch.equal(torch.load(file, weights_only=False)(x)[0], one(x)[0])
    noisy = fb.to_stochastic(one, {"*": fb.noise.NormalAffine()})
    with fb.noise.noise_mode(noisy, "off"):
        torch.testing.assert_close(noisy(x)[0], one(x)[0])
    torch.testing.assert_close(fb.to_deterministic(noisy)(x)[0], one(x)[0])


@pytest.mark.parametrize("kind", ["attention", "tied", "read by the network"])
def test_means_that_weights_cannot_hold_are_buffers(kind):
    torch.manual_seed(0)
    name = {
        "attention": "cross-attention",
        "tied": "tied-weights",
        "read by the network": "reads-anothers-weight",
    }
    case = next(case for case in NETWORKS if case.name == name[kind])
    model = fb.to_stochastic(case.network(), {"*": fb.noise.NormalAffine()}).double().eval()
    with torch.no_grad():
        for parameter in fb.noise.noise_parameters(model):
            parameter.add_(0.3 * torch.randn_like(parameter))
        inputs = double(case.inputs())
        with fb.noise.noise_mode(model, "mean"):
            wanted = model(*inputs)
        plain = fb.to_deterministic(model, absorb=True)
        torch.testing.assert_close(plain(*inputs), wanted)
    assert not noise_layers(plain)
