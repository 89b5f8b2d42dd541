"""Tests of the paths that make a prediction of few inputs cheap. They give the numbers of the longer paths."""

import torch
from torch import nn
from torch.nn import functional as F

import flowbnn as fb
from flowbnn.models import LeNet
from flowbnn.noise import noise_layers
from flowbnn.noise.base import make_noise_modes
from flowbnn.noise.gaussians import SharedDraws
from flowbnn.posterior import NoisePosterior
from flowbnn.posterior.compiled import CompiledSampler
from flowbnn.posterior.operation_rules import RuleFinder
from flowbnn.posterior.prediction import Prediction, PredictOptions, is_training
from flowbnn.posterior.trace import trace_forward


class FunctionalPool(nn.Module):
    def forward(self, x):
        return F.adaptive_avg_pool2d(x, output_size=1).flatten(1)


def test_rules_are_used_only_where_they_change_an_operation():
    x, norm = torch.zeros(2, 3, 8, 8), nn.BatchNorm2d(3)
    cases = {
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(4), nn.MaxPool2d(2, padding=1)): False,
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)): True,
        nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 3), nn.AdaptiveAvgPool1d((31,))): True,
        nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 3), nn.AdaptiveAvgPool1d(4)): False,
        nn.Sequential(nn.Conv2d(3, 4, 3), FunctionalPool()): True,
        nn.Sequential(norm, nn.Conv2d(3, 4, 3)): True,
    }
    for network, expected in cases.items():
        assert trace_forward(network.eval(), x).operation_rules is expected
        with RuleFinder() as finder, torch.no_grad():
            network(x)
        assert finder.needs_rules is expected


def test_normal_numbers_are_kept_for_one_seed_and_never_wrong():
    torch.manual_seed(0)
    model, device = fb.to_stochastic(LeNet(), {"*": fb.noise.NormalAffine()}), torch.device("cpu")
    layers, cache = list(noise_layers(model).values()), {}

    def draws(seed, samples, cache=None):
        modes = make_noise_modes(model, "shared", samples, seed)
        return SharedDraws(layers, modes, device, cache=cache).vectors

    for seed, samples in ((1, 8), (1, 8), (2, 8), (2, 40), (1, 8)):
        kept, expected = draws(seed, samples, cache), draws(seed, samples)
        assert all(torch.equal(kept[key], expected[key]) for key in expected)
    numbers = cache["normal numbers"][1]
    with torch.no_grad():  # the parameters change, the numbers stay
        for parameter in layers[0].parameters():
            parameter.data.add_(1.0)
    kept, expected = draws(1, 8, cache), draws(1, 8)
    assert cache["normal numbers"][1] is numbers
    assert all(torch.equal(kept[key], expected[key]) for key in expected)


def test_a_compiled_pass_on_a_cpu_holds_all_samples_of_one_image():
    torch.manual_seed(0)
    posterior = NoisePosterior(
        fb.to_stochastic(LeNet().eval(), {"*": fb.noise.NormalAffine()}), fb.likelihoods.Categorical()
    )
    image = torch.randn(1, 1, 28, 28)
    options = PredictOptions(32, compile=True, seed=0)
    with Prediction(posterior.model, options, 128, posterior.cache) as prediction:
        trace = prediction.measure(image)
        draws = SharedDraws(
            list(noise_layers(posterior.model).values()),
            make_noise_modes(posterior.model, "shared", 32, 0),
            prediction.device,
        )
        samples, _, chunks = CompiledSampler(prediction, draws, trace).plan_passes(image, 32)
    assert samples == 32
    assert [size for size, _ in chunks] == [1]


def test_training_mode_is_found_in_any_module():
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout()))
    assert is_training(network)
    assert not is_training(network.eval())
    network[1][0].train()
    assert is_training(network)
