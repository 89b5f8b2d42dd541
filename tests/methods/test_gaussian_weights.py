"""The Gaussian over weights by itself: its KL, and the ways of drawing it, against closed forms."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from flowbnn.distributions.draws import standard_normal
from flowbnn.methods.variational.bayes_by_backprop import (
    DrawnWeights,
    GaussianWeights,
    log_uniform_kl,
    mixture_kl,
)
from flowbnn.methods.variational.random_weights import (
    apply_weights,
    base_scales,
    chosen_weights,
    gaussian_kl,
    local_noise,
    ways_of,
)
from flowbnn.posterior.weights import named_parts


def normals(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(network: nn.Module, x: torch.Tensor, estimator: str, std: float = 0.3) -> DrawnWeights:
    names = chosen_weights(network, None)
    ways = ways_of(network, names, estimator, x)
    own = dict(network.named_parameters())
    mean = {name: own[name].detach() for name in names}
    deviations = {name: std * (1.0 + value.abs()) for name, value in mean.items()}
    return DrawnWeights(network, GaussianWeights(mean, deviations, ways.parameters), ways.layers)


def test_gaussian_kl_is_torchs():
    mean, log_std = normals(0, 50), normals(1, 50)
    truth = kl_divergence(Normal(mean, log_std.exp()), Normal(torch.zeros_like(mean), 0.7)).sum()
    torch.testing.assert_close(gaussian_kl(mean, log_std, 0.7), truth, rtol=1e-12, atol=0.0)


def log_mixture(w, pi, sigma1, sigma2):
    zero = torch.zeros((), dtype=torch.float64)
    first = math.log(pi) + Normal(zero, zero + sigma1).log_prob(w)
    return torch.logaddexp(first, math.log(1 - pi) + Normal(zero, zero + sigma2).log_prob(w))


@pytest.mark.parametrize("numbers", [(0.25, 1.0, 0.1), (0.5, 2.0, 0.5), (0.75, 1.0, 0.0025)])
def test_mixture_kl_against_quadrature(numbers):
    mean = torch.tensor([0.0, 0.4, -1.2], dtype=torch.float64)
    log_std = torch.tensor([-3.0, -0.5, -1.0], dtype=torch.float64)
    grid = torch.linspace(-9.0, 9.0, 400_001, dtype=torch.float64)  # in units of each one's deviation
    truth = torch.zeros((), dtype=torch.float64)
    for m, s in zip(mean, log_std, strict=True):
        q, w = Normal(m, s.exp()), m + s.exp() * grid
        bracket = q.log_prob(w).exp() * (q.log_prob(w) - log_mixture(w, *numbers))
        truth = truth + torch.trapezoid(bracket, w)
    each = torch.stack([mixture_kl(mean, log_std, normals(seed, 500, 3), *numbers) for seed in range(100)])
    error = each.std() / 10.0
    assert abs(each.mean() - truth) < 4.0 * error
    assert error < 0.05 * truth  # so that the comparison says something


def test_log_uniform_kl_against_quadrature():
    grid = torch.linspace(-9.0, 9.0, 400_000, dtype=torch.float64)  # an even number: no point at the pole
    density = Normal(torch.zeros((), dtype=torch.float64), 1.0).log_prob(grid).exp()

    def exact(
        alpha: float,
    ) -> float:  # less its limit for alpha to infinity, where the weight is nothing but noise
        absolute, noise = ((1.0 + alpha**0.5 * grid).abs().log(), grid.abs().log())
        return float(torch.trapezoid(density * (absolute - noise), grid)) - 0.5 * math.log(alpha)

    for alpha in (1e-4, 0.01, 0.3, 1.0, 3.0, 30.0):
        for mean in (-0.02, 5.0):  # the scale of the weights is of no account
            log_std = torch.tensor([0.5 * math.log(alpha) + math.log(abs(mean))], dtype=torch.float64)
            found = log_uniform_kl(torch.tensor([mean], dtype=torch.float64), log_std)
            assert float(found) == pytest.approx(exact(alpha), abs=0.01)


def test_mixture_kl_has_the_gradients_of_its_formula():
    mean, log_std, normal = (
        normals(0, 20).requires_grad_(),
        normals(1, 20).requires_grad_(),
        normals(2, 5, 20),
    )
    numbers = (0.3, 1.5, 0.05)
    draws = mean + log_std.exp() * normal
    entropy = log_std.sum() + 10.0 * (1.0 + math.log(2.0 * math.pi))
    reference = -entropy - log_mixture(draws, *numbers).sum(1).mean()
    found = mixture_kl(mean, log_std, normal, *numbers)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(found, [mean, log_std]),
        torch.autograd.grad(reference, [mean, log_std]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_mixture_kl_keeps_its_digits_in_float32():
    mean, log_std, normal = normals(0, 200), normals(1, 200) - 3.0, normals(2, 1, 200)
    numbers = (0.5, 1.0, 0.0025)
    grads = []
    for dtype in (torch.float64, torch.float32):
        m, s = mean.to(dtype).requires_grad_(), log_std.to(dtype).requires_grad_()
        grads.append(
            torch.cat(torch.autograd.grad(mixture_kl(m, s, normal.to(dtype), *numbers), [m, s])).double()
        )
    scale = grads[0].abs().clamp_min(1.0)
    assert ((grads[0] - grads[1]).abs() / scale).max() < 1e-3


@pytest.mark.parametrize("out", [1, 4])
def test_local_noise_of_a_linear_layer_has_the_gradients_of_its_formula(out):
    layer = nn.Linear(5, out).double()
    x, std, bias = (normals(0, 7, 5), normals(1, out, 5).abs() + 0.1, normals(2, out).abs() + 0.1)
    x, std, bias = (value.requires_grad_() for value in (x, std, bias))
    torch.manual_seed(0)
    found = local_noise(layer, x, std, bias)
    torch.manual_seed(0)
    normal = standard_normal(found.shape, x.dtype, x.device)
    reference = F.linear(x.square(), std.square(), bias.square()).sqrt() * normal
    torch.testing.assert_close(found, reference)
    weight = normals(3, 7, out)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), [x, std, bias]),
        torch.autograd.grad((reference * weight).sum(), [x, std, bias]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), (3, 6)),
    "linear on sequences": (lambda: nn.Linear(6, 4), (3, 2, 6)),
    "convolution": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), (3, 2, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 4, 3, groups=2), (2, 4, 4, 4)),
    "circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 6)),
    "of volumes": (lambda: nn.Conv3d(1, 2, 2, dilation=1), (2, 1, 3, 3, 3)),
}


@pytest.mark.parametrize(
    ("kind", "estimator"),
    [
        *itertools.product(LAYERS, ["local", "flipout"]),
        ("linear", "reparameterization"),  # the same code for every layer
        ("convolution", "reparameterization"),
    ],
)
def test_outputs_have_the_moments_of_random_weights(kind, estimator):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer = nn.Sequential(make()).double()
    x = normals(1, *shape)
    model = drawn(layer, x, estimator)
    own = {
        name.removeprefix("0."): value
        for name, value in named_parts(model.weights.log_std.exp(), model.weights.shapes).items()
    }
    mean = layer(x)
    bias = own["bias"].square() if "bias" in own else None
    variance = apply_weights(layer[0], x.square(), own["weight"].square(), bias)
    count = 800
    with torch.no_grad():
        if estimator == "local":  # every example has noise of its own
            outputs = model(x.repeat(count, *[1] * (x.ndim - 1))).unflatten(0, (count, -1))
        else:
            outputs = torch.stack([model(x) for _ in range(count)])
    # every output is Gaussian: errors of mean and variance are known, and 5 of them are never met among so few numbers
    assert ((outputs.mean(0) - mean).abs() < 5.0 * (variance / count).sqrt()).all()
    assert ((outputs.var(0) / variance - 1.0).abs() < 5.0 * math.sqrt(2.0 / count)).all()
    model.release()
    assert torch.equal(layer(x), mean)  # the network is left as it was


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def gradients(estimator: str, count: int, rows: int = 8) -> torch.Tensor:
    network, x, y = perceptron(), normals(1, rows, 3), normals(2, rows, 2)
    model = drawn(network, x, estimator, 0.2)
    found = []
    torch.manual_seed(1)
    shapes = model.weights.shapes
    for _ in range(count):
        loss = (model(x) - y).square().mean()
        both = torch.autograd.grad(loss, [model.weights.mean, model.weights.log_std])
        parts = [named_parts(g, shapes) for g in both]
        found.append(torch.cat([part[name].flatten() for part in parts for name in sorted(shapes)]))
    return torch.stack(found)


def test_gradients_agree_and_others_vary_less():
    found = {name: gradients(name, 500) for name in ("reparameterization", "local", "flipout")}
    plain = found["reparameterization"]
    for name in ("local", "flipout"):
        error = ((plain.var(0) + found[name].var(0)) / 500).sqrt()
        assert ((plain.mean(0) - found[name].mean(0)).abs() < 5.0 * error).all(), name
        assert found[name].var(0).sum() < 0.6 * plain.var(0).sum(), name


def test_auto_is_exact_and_cheap_in_its_choice():
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.Flatten(),
        nn.Linear(18, 6),
        nn.Unflatten(1, (2, 3)),
        nn.Linear(3, 3),
        nn.Flatten(),
        nn.Linear(6, 2),
    )
    ways = ways_of(network, chosen_weights(network, None), "auto", torch.zeros(4, 1, 5, 5))
    assert ways.layers == {
        "2": "local",
        "6": "local",
    }  # not the convolution, nor the layer that sees several positions
    twice = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    network = nn.Sequential(twice, twice, nn.Linear(3, 2))
    ways = ways_of(network, chosen_weights(network, None), "auto", torch.zeros(4, 3))
    assert ways.layers == {"2": "local"}


def test_scales_follow_the_size_of_the_weights():
    mean = {"a": torch.full((4,), 2.0), "b": torch.zeros(4)}
    found = base_scales(mean, 0.1, 1.0)
    assert found["a"].tolist() == pytest.approx([0.2] * 4)
    assert found["b"].tolist() == pytest.approx([0.1 * math.sqrt(2.0)] * 4)
    assert base_scales({"b": torch.zeros(2)}, 0.1, 3.0)["b"].tolist() == pytest.approx([0.3, 0.3])
