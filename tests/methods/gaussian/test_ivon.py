"""Tests of IVON: its steps against the formulas of the paper, and resumed fits."""

import math

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.data import TensorLoader, clusters
from flowbnn.methods.gaussian.ivon import OnlineNewton
from flowbnn.models import MLP

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
DATA = [(X[:20], Y[:20]), (X[20:], Y[20:])]


def test_steps_follow_the_paper():
    settings = {
        "ess": 20.0,
        "weight_decay": 0.1,
        "momentum": 0.8,
        "hessian_momentum": 0.7,
        "hessian_init": 2.0,
    }
    mean = nn.Parameter(torch.tensor([0.5, -1.0]).double())
    log_std = nn.Parameter(torch.full((2,), -0.5 * math.log(20.0 * 2.1)).double())
    optimizer = OnlineNewton([{"params": [mean, log_std], "lr": 0.3}], **settings)
    m, h, g = mean.detach().clone(), torch.full((2,), 2.0).double(), torch.zeros(2).double()
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        noise = torch.randn(4, 2, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        draws = mean + log_std.exp() * noise
        (draws.cosh().sum() / len(noise)).backward()
        optimizer.step()
        std = (20.0 * (h + 0.1)) ** -0.5
        gradients = (m + std * noise).sinh()
        estimate = (gradients * noise / std).mean(0)
        g = 0.8 * g + 0.2 * gradients.mean(0)
        h = 0.7 * h + 0.3 * estimate + 0.5 * 0.3**2 * (h - estimate) ** 2 / (h + 0.1)
        m = m - 0.3 * 2.1 * (g / (1 - 0.8**step) + 0.1 * m) / (h + 0.1)
        torch.testing.assert_close(mean.detach(), m)
        torch.testing.assert_close(log_std.detach().exp(), (20.0 * (h + 0.1)) ** -0.5)


def test_groups_of_point_estimates_follow_adam():
    values = [nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)]
    settings = {
        "ess": 1.0,
        "weight_decay": 0.0,
        "momentum": 0.9,
        "hessian_momentum": 0.9,
        "hessian_init": 1.0,
    }
    optimizers = [
        OnlineNewton([{"params": [values[0]], "lr": 0.01, "adam": True}], **settings),
        torch.optim.Adam([values[1]], 0.01),
    ]
    for _ in range(5):
        for value, optimizer in zip(values, optimizers, strict=True):
            optimizer.zero_grad()
            value.exp().sum().backward()
            optimizer.step()
    torch.testing.assert_close(values[0], values[1])


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_all_weights_have_a_posterior_unless_layers_are_selected():
    posterior = fb.IVON(epochs=1).fit(make_network(), DATA, progress=False)
    assert len(posterior.names) == 6
    selected = fb.IVON(epochs=1, layers="2").fit(make_network(), DATA, progress=False)
    assert selected.names == ["2.weight", "2.bias"]


def test_colder_posteriors_are_narrower():
    wide, narrow = (
        fb.IVON(epochs=1, beta=beta).fit(make_network(), DATA, progress=False, seed=0) for beta in (1.0, 0.01)
    )
    ratio = narrow.std["0.weight"] / wide.std["0.weight"]
    assert ratio.max() < 0.3


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_resumed_fits_are_equal(tmp_path, precision):
    options = {"progress": False, "seed": 0, "accelerator": "cpu", "precision": precision}
    method = fb.IVON(epochs=4, hessian_momentum=0.9)
    whole = method.fit(make_network(), DATA, **options)
    fb.IVON(epochs=2, hessian_momentum=0.9).fit(make_network(), DATA, checkpoint=tmp_path, **options)
    resumed = method.fit(make_network(), DATA, checkpoint=tmp_path, resume=True, **options)
    assert resumed.history.epochs == 4
    for name in whole.names:
        torch.testing.assert_close(resumed.mean[name], whole.mean[name], atol=0, rtol=0)
        torch.testing.assert_close(resumed.std[name], whole.std[name], atol=0, rtol=0)


def test_noise_of_a_regression_is_learned():
    targets = X[:, :1] + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    method = fb.IVON(epochs=400, lr=0.3)
    posterior = method.fit(nn.Linear(3, 1), [(X, targets)], progress=False, seed=0)
    assert fb.evaluate(posterior, (X, targets), samples=16)["rmse"] == pytest.approx(0.1, abs=0.05)


def test_weights_do_not_diverge_on_small_data():
    train, test = (clusters(n, 1.2, torch.Generator().manual_seed(seed)) for n, seed in ((200, 0), (1000, 1)))
    torch.manual_seed(0)
    loader = TensorLoader(*train, batch_size=50, shuffle=True)
    posterior = fb.IVON(epochs=100).fit(MLP(2, (16, 16), 2), loader, progress=False, seed=0)
    assert fb.evaluate(posterior, test, samples=32)["nll"] < 0.05
