"""Tests of noise on the output of layers."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.noise import NormalAffine, NormalPlanar, noise_layers

LAYERS = {
    "linear": (nn.Linear(3, 5), torch.randn(4, 3)),
    "steps": (nn.Linear(3, 5), torch.randn(4, 7, 3)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), torch.randn(4, 4, 5, 5)),
    "grey": (nn.Conv2d(1, 6, 3), torch.randn(4, 1, 5, 5)),
    "transposed": (nn.ConvTranspose1d(4, 6, 3, groups=2), torch.randn(4, 4, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_output_noise_multiplies_the_output_including_the_bias(name):
    layer, inputs = LAYERS[name]
    noisy = fb.to_stochastic(layer, {"*": NormalAffine(side="output", base_scale=0.3)})
    features = 2 if name == "steps" else 1
    with torch.no_grad(), fb.noise_mode(noisy, "off"):
        assert torch.equal(noisy(inputs), layer(inputs))
    with torch.no_grad(), fb.noise_mode(noisy, "shared", samples=2, seed=1):
        given = noisy(torch.cat([inputs, inputs]))
    draws = fb.posterior.NoisePosterior(noisy, fb.likelihoods.Gaussian(1.0)).draws(2, seed=1)[""]
    shape = [1] * given.ndim
    shape[features] = -1
    for block, vector in zip(given.chunk(2), draws, strict=True):
        assert (vector - 1).abs().max() > 0.05
        torch.testing.assert_close(block, layer(inputs) * vector.view(shape))


@pytest.mark.parametrize("joint", [None, "full"])
def test_noise_between_two_layers_may_be_on_either(joint):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Identity(), nn.Conv2d(3, 4, 3), nn.Flatten())
    inputs = torch.randn(5, 2, 8, 8)
    before = fb.to_stochastic(network, {"0": NormalPlanar(side="output", joint=joint)})
    after = fb.to_stochastic(network, {"2": NormalPlanar(joint=joint)})
    values = {name.removeprefix("2.noise"): value for name, value in after.state_dict().items()}
    own = {
        name: values.get(name.removeprefix("0.noise"), value) for name, value in before.state_dict().items()
    }
    before.load_state_dict(own)
    likelihood = fb.likelihoods.make_likelihood("categorical")
    left, right = (fb.posterior.NoisePosterior(model, likelihood) for model in (before, after))
    given = [one.predict(inputs, 4, seed=3).log_samples for one in (left, right)]
    torch.testing.assert_close(*given)
    # a sampled network, and one at the mean, compute the same
    torch.testing.assert_close(left.sample(3)(inputs), right.sample(3)(inputs))
    torch.testing.assert_close(
        fb.to_deterministic(before, absorb=True)(inputs), fb.to_deterministic(after, absorb=True)(inputs)
    )


def test_output_noise_is_fitted_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.randn(60, 2)
    batches = [(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())]
    method = fb.NodeNoise(side="output", gamma=2.0, epochs=3)
    posterior = method.fit(network, batches, seed=0, progress=False)
    assert [layer.layout.dim for layer in noise_layers(posterior.model).values()] == [8, 3]
    again = fb.load_posterior(posterior.save(tmp_path / "noise"), network)
    assert torch.equal(
        posterior.predict(inputs, 8, seed=0).log_samples, again.predict(inputs, 8, seed=0).log_samples
    )


def test_layers_without_one_output_are_refused():
    for network in (nn.GRU(3, 4), nn.MultiheadAttention(4, 2)):
        with pytest.raises(FlowBNNError) as caught:
            fb.to_stochastic(network, {"*": NormalAffine(side="output")})
        assert (caught.value.kind, caught.value.argument) == ("layer", "side")
    embedding = fb.to_stochastic(nn.Embedding(5, 4), {"*": NormalAffine(side="output")})
    assert embedding(torch.arange(3)).shape == (3, 4)
