"""Units of a regression's targets: decided on all of them, and only where weights are trained."""

import math
import warnings

import pytest
import torch
from problems import QUIET
from regression_problems import batches, best_nll, curve, network, residual, solved
from torch import nn

import flowbnn as fb
from flowbnn.data import TensorLoader


def weak():
    """Targets in a small unit that inputs tell little of, and the network of least squares."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 5, generator=generator)
    y = 1e-3 * x @ torch.randn(5, 1, generator=generator) + 0.01 * torch.randn(2000, 1, generator=generator)
    net, found = nn.Linear(5, 1), torch.linalg.lstsq(torch.cat([x, torch.ones(2000, 1)], 1), y).solution
    with torch.no_grad():
        net.weight.copy_(found[:5].T)
        net.bias.copy_(found[5])
    return net, x, y


@pytest.mark.parametrize("method", [fb.MLE, fb.Laplace])
def test_a_network_that_is_not_trained_keeps_its_units(method):
    net, x, y = weak()
    for seed in range(3):
        torch.manual_seed(10 + seed)
        loader = TensorLoader(x, y, batch_size=64, shuffle=True)
        posterior = method(epochs=0).fit(net, loader, seed=seed, **QUIET)
        assert list(posterior.model.state_dict()) == ["weight", "bias"]
        assert torch.equal(posterior.model(x), net(x))
    fresh = fb.MLE(epochs=0).fit(network(), batches(1e3), seed=0, **QUIET).model
    assert torch.equal(fresh(x[:, :1]), network()(x[:, :1]))


def test_a_trained_network_keeps_its_units_in_training_too():
    net, x, y = weak()
    posterior = fb.MLE(epochs=1, lr=1e-5).fit(net, TensorLoader(x, y, batch_size=16), seed=0, **QUIET)
    torch.testing.assert_close(posterior.predict(x).mean, net(x).detach(), atol=3e-3, rtol=0)


def test_units_are_those_of_all_targets_not_of_the_first_batches():
    """Of data in the order of time the first batches lie anywhere."""
    x, y = curve(500, 0)
    x, order = x.sort(0)
    y = 3 * y[order[:, 0]]
    loader = TensorLoader(x, y, batch_size=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = fb.MLE(epochs=0).fit(solved(x, y), loader, seed=0, **QUIET)
    assert residual(posterior.model, (x, y)) < 0.25
    noisy = fb.to_stochastic(solved(x, y), {"*": fb.noise.NormalAffine()})
    posterior = fb.fit(noisy, loader, epochs=1, weight_lr=0.0, seed=0, **QUIET)
    assert not hasattr(posterior.model, "flowbnn_loc")


def test_a_fit_is_compared_with_the_network_in_the_units_it_was_given():
    loader = batches(1e3, 5e3)
    posterior = fb.fit(
        fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()}), loader, epochs=1, seed=0, **QUIET
    )
    size = residual(network(), curve(500, 0, 1e3, 5e3))
    divergence = 51 * (math.log(5.0) + 0.5 / 5.0**2 - 0.5)  # of 51 normals, 0.1 wide, from priors of 0.5
    assert posterior.report.elbo.before == pytest.approx(-best_nll(size) - divergence / 500, abs=0.01)
    assert posterior.report.elbo.after > posterior.report.elbo.before + 0.5


@pytest.mark.filterwarnings("ignore:.*half precision, which is too coarse")
@pytest.mark.parametrize(
    "method", [fb.MAP(epochs=1), fb.NodeNoise(epochs=1), fb.NodeNoise(epochs=1, joint="full")]
)
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_regression_in_another_precision_is_saved_and_loaded(method, precision, tmp_path):
    data = [(torch.rand(8, 3), torch.rand(8, 1))]
    posterior = method.fit(
        nn.Linear(3, 1), data, precision=precision, seed=0, progress=False, accelerator="cpu"
    )
    path = posterior.save(tmp_path / "saved.safetensors")
    loaded = fb.load_posterior(path, nn.Linear(3, 1).to(posterior.model.weight.dtype))
    assert all(torch.equal(value, posterior.tensors()[name]) for name, value in loaded.tensors().items())
