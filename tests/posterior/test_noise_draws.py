"""Tests of the draws and the density of NoisePosterior."""

import pytest
import torch
from small_problem import QUIET, blobs, loader, network
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.posterior import PredictOptions


@pytest.fixture
def posterior():
    converted = fb.to_stochastic(network(), {"0": fb.noise.NormalPlanar(2), "*": fb.noise.NormalAffine()})
    return fb.posterior.NoisePosterior(converted, fb.likelihoods.Categorical())


def test_draws_are_those_of_a_prediction(posterior):
    draws = posterior.draws(3, seed=5)
    assert {name: tuple(value.shape) for name, value in draws.items()} == {"0": (3, 4), "2": (3, 16)}
    inputs = blobs().tensors[0][:6]
    outputs = posterior.collect(inputs, PredictOptions(3, seed=5))[0]
    first, last = posterior.model[0], posterior.model[2]
    by_hand = torch.stack(
        [
            nn.functional.linear(
                torch.relu(nn.functional.linear(inputs * draws["0"][i], first.weight, first.bias))
                * draws["2"][i],
                last.weight,
                last.bias,
            )
            for i in range(3)
        ]
    )
    assert torch.allclose(outputs, by_hand, atol=1e-5)


def test_the_density_is_that_of_the_layers(posterior):
    draws = posterior.draws(4, seed=1)
    layer = posterior.model[2]
    base = torch.distributions.Normal(1.0, 0.1)  # a fresh NormalAffine is its base
    gaussian = base.log_prob(draws["2"]).sum(-1)
    planar = posterior.log_prob(draws) - gaussian
    noise = next(module for module in posterior.model[0].modules() if isinstance(module, InputNoise))
    assert torch.allclose(planar, noise.posterior().log_prob(draws["0"]).detach(), atol=1e-4)
    assert layer.in_features == draws["2"].shape[-1]


def test_what_has_no_density_is_refused(posterior):
    dropout = fb.MCDropout(0.2, epochs=1).fit(network(), loader(), **QUIET)
    for act in (
        lambda: posterior.log_prob({"0": torch.ones(1, 4)}),
        lambda: dropout.log_prob(dropout.draws(2, seed=0)),
    ):
        with pytest.raises(FlowBNNError) as caught:
            act()
        assert caught.value.kind == "unsupported"
    with pytest.raises(FlowBNNError) as caught:
        posterior.draws(0)
    assert caught.value.argument == "samples"
