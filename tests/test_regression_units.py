"""Standardization of the targets: decided on all of them, and only if the weights are trained."""

import math
import warnings

import pytest
import torch
from method_cases import CASES
from problems import QUIET
from regression_problems import batches, best_nll, curve, network, residual, solved
from torch import nn

import flowbnn as fb
from flowbnn.data import TensorLoader


def weak_signal():
    """Returns the least-squares network of targets in a small unit that depend little on the inputs, and the data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 5, generator=generator)
    y = 1e-3 * x @ torch.randn(5, 1, generator=generator) + 0.01 * torch.randn(2000, 1, generator=generator)
    net, solution = nn.Linear(5, 1), torch.linalg.lstsq(torch.cat([x, torch.ones(2000, 1)], 1), y).solution
    with torch.no_grad():
        net.weight.copy_(solution[:5].T)
        net.bias.copy_(solution[5])
    return net, x, y


@pytest.mark.parametrize("method", [fb.MLE, fb.Laplace])
def test_a_network_that_is_not_trained_keeps_its_units(method):
    net, x, y = weak_signal()
    for seed in range(3):
        torch.manual_seed(10 + seed)
        loader = TensorLoader(x, y, batch_size=64, shuffle=True)
        posterior = method(epochs=0).fit(net, loader, seed=seed, **QUIET)
        assert list(posterior.model.state_dict()) == ["weight", "bias"]
        assert torch.equal(posterior.model(x), net(x))
    fresh = fb.MLE(epochs=0).fit(network(), batches(1e3), seed=0, **QUIET).model
    assert torch.equal(fresh(x[:, :1]), network()(x[:, :1]))


def test_a_trained_network_keeps_its_units_in_further_training():
    net, x, y = weak_signal()
    posterior = fb.MLE(epochs=1, lr=1e-5).fit(net, TensorLoader(x, y, batch_size=16), seed=0, **QUIET)
    torch.testing.assert_close(posterior.predict(x).mean, net(x).detach(), atol=3e-3, rtol=0)


def test_a_sorted_loader_leads_to_no_standardization_of_a_trained_network():
    """The first batches of sorted data do not represent all targets."""
    x, y = curve(500, 0)
    x, order = x.sort(0)
    y = 3 * y[order[:, 0]]
    loader = TensorLoader(x, y, batch_size=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = fb.MLE(epochs=0).fit(solved(x, y), loader, seed=0, **QUIET)
    assert residual(posterior.model, (x, y)) < 0.25
    noisy = fb.to_stochastic(solved(x, y), {"*": fb.noise.NormalAffine()})
    posterior = fb.fit(noisy, loader, epochs=1, weight_lr=0.0, seed=0, **QUIET, validation=None)
    assert not hasattr(posterior.model, "flowbnn_loc")


def test_the_report_uses_the_initial_units():
    loader = batches(1e3, 5e3)
    posterior = fb.fit(
        fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()}),
        loader,
        epochs=1,
        seed=0,
        **QUIET,
        validation=None,
    )
    size = residual(network(), curve(500, 0, 1e3, 5e3))
    # KL of 51 normals of width 0.1 to priors of width 0.5
    divergence = 51 * (math.log(5.0) + 0.5 / 5.0**2 - 0.5)
    assert posterior.report.elbo.before == pytest.approx(-best_nll(size) - divergence / 500, abs=0.01)
    assert posterior.report.elbo.after > posterior.report.elbo.before + 0.5


@pytest.mark.filterwarnings("ignore:precision=")
@pytest.mark.parametrize(
    "method", [fb.MAP(epochs=1), fb.NodeNoise(epochs=1), fb.NodeNoise(epochs=1, joint="full")]
)
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_regression_in_another_precision_can_be_saved(method, precision, tmp_path):
    data = [(torch.rand(8, 3), torch.rand(8, 1))]
    posterior = method.fit(
        nn.Linear(3, 1), data, precision=precision, seed=0, progress=False, accelerator="cpu"
    )
    path = posterior.save(tmp_path / "saved.safetensors")
    loaded = fb.load_posterior(path, nn.Linear(3, 1).to(posterior.model.weight.dtype))
    assert all(torch.equal(value, posterior.tensors()[name]) for name, value in loaded.tensors().items())


@pytest.mark.parametrize("unit", [1e-3, 0.05])
def test_a_trained_network_in_small_units_keeps_them_if_the_first_batch_is_flat(unit):
    """The first batch of a long sorted loader tells little of slope and spread, but its error is small."""
    x = torch.linspace(-2, 2, 20_000).unsqueeze(1)
    y = unit * (x.sin() + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))

    class Sine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.amplitude = nn.Parameter(torch.tensor([unit]))

        def forward(self, x):
            return self.amplitude * x.sin()

    posterior = fb.MLE(epochs=1, lr=1e-7).fit(Sine(), TensorLoader(x, y, batch_size=2000), seed=0, **QUIET)
    assert list(posterior.model.state_dict()) == ["amplitude"]


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("name", list(CASES))
def test_targets_in_double_precision_far_from_zero_keep_their_digits(name):
    """In single precision the targets would be multiples of 8."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 4, generator=generator)
    y = 1e8 + x.double() @ torch.tensor([[0.5], [-0.5], [0.5], [-0.5]], dtype=torch.float64)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    posterior = CASES[name].make().fit(net, TensorLoader(x, y, batch_size=32), seed=0, **QUIET)
    scores = posterior.predict(x, 16, seed=0).evaluate(y)
    assert scores["rmse"] < 0.5
    assert scores["coverage_90"] > 0.7


def test_integer_targets_of_a_regression_keep_their_digits():
    targets = torch.tensor([1_763_471_101, 1_763_471_102])
    assert fb.likelihoods.Gaussian(1.0).canonical_targets(targets).diff().item() == 1.0
