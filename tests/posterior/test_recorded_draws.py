"""Tests of draws that a CUDA graph replays."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.noise.base import make_noise_modes, noise_layers
from flowbnn.noise.gaussians import SharedDraws
from flowbnn.posterior.prediction import PredictionCache
from flowbnn.posterior.recorded_draws import RecordedDraws, block_seeds_of, is_recordable, recorded_draws

RULES = {
    "gaussian": fb.noise.NormalAffine(),
    "planar": fb.noise.NormalPlanar(length=2),
    "invertible convolution": fb.noise.NormalInvConv(),
    "mixture": fb.noise.NormalAffine(components=3),
    "dropout": fb.noise.Dropout(0.2, site="channel"),
    "joint": fb.noise.NormalAffine(joint="full"),
}


def make_network(recipe):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    network = fb.to_stochastic(network, {"*": recipe}).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network


@pytest.mark.parametrize("name", RULES)
def test_generators_are_seeded_in_the_order_of_the_draws(name):
    network = make_network(RULES[name])
    layers, device = list(noise_layers(network).values()), torch.device("cpu")
    modes = make_noise_modes(network, "shared", 70, 5)
    expected = SharedDraws(layers, modes, device)
    generators = [torch.Generator(device).manual_seed(seed) for seed in block_seeds_of(expected)]
    sources = iter(generators)
    drawn = SharedDraws(layers, modes, device, lambda seed: next(sources))
    assert next(sources, None) is None
    for layer in layers:
        torch.testing.assert_close(drawn.vectors[layer.key], expected.vectors[layer.key], atol=0, rtol=0)


def test_only_own_noise_that_never_waits_for_the_device_is_recorded():
    class OwnTransform(fb.transforms.Planar):
        pass

    def layer(recipe):
        return next(iter(noise_layers(make_network(recipe)).values()))

    assert all(is_recordable(layer(recipe)) for recipe in RULES.values())
    assert not is_recordable(layer(fb.noise.FlowNoise(OwnTransform)))
    assert not is_recordable(layer(fb.noise.NormalAffine(base_df=4.0)))
    noise = layer(RULES["gaussian"])
    noise.uses_default_draw = False
    assert not is_recordable(noise)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_replayed_draws_are_those_of_the_seed(name, half):
    network, device = make_network(RULES[name]).cuda(), torch.device("cuda", 0)
    layers, cache = list(noise_layers(network).values()), PredictionCache()

    def check(seed):
        modes = make_noise_modes(network, "shared", 70, seed)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=half):
            drawn = recorded_draws(layers, modes, device, cache)
            expected = SharedDraws(layers, modes, device)
        for layer in layers:
            torch.testing.assert_close(drawn.vectors[layer.key], expected.vectors[layer.key], atol=0, rtol=0)

    for seed in (0, 1, 2, 1):
        check(seed)
    assert any(isinstance(value, RecordedDraws) for value in cache.values.values())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.5)
    check(3)  # the graph reads the new values
    network.double().float()  # other memory
    check(4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_predictions_with_one_seed_are_equal():
    posterior = fb.posterior.NoisePosterior(
        make_network(RULES["planar"]).cuda(), fb.likelihoods.Categorical()
    )
    x = torch.randn(5, 3, 8, 8, device="cuda")
    first, *others = (posterior.predict(x, 40, seed=3).samples for _ in range(4))
    for samples in others:
        torch.testing.assert_close(samples, first, atol=1e-6, rtol=1e-5)
    different = posterior.predict(x, 40, seed=4).samples
    assert (different - first).abs().max() > 1e-3
