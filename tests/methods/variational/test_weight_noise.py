"""Tests of Gaussian weights: their KL divergences and gradient estimators, against closed forms and quadrature."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, vmap
from torch.nn import functional as F

from flowbnn.distributions.draws import standard_normal
from flowbnn.methods.variational.bayes_by_backprop import (
    GaussianNetwork,
    GaussianWeights,
    log_uniform_kl,
    mixture_kl,
)
from flowbnn.methods.variational.weight_noise import apply_weights, gaussian_kl, local_noise
from flowbnn.methods.variational.weight_selection import select_estimators, select_weights
from flowbnn.posterior.weights import named_parts


def normals(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian_network(
    network: nn.Module, x: torch.Tensor, estimator: str, std: float = 0.3
) -> GaussianNetwork:
    names = select_weights(network, None)
    estimators = select_estimators(network, names, estimator, x)
    parameters = dict(network.named_parameters())
    mean = {name: parameters[name].detach() for name in names}
    deviations = {name: std * (1.0 + value.abs()) for name, value in mean.items()}
    return GaussianNetwork(
        network, GaussianWeights(mean, deviations, estimators.parameters), estimators.layers
    )


def test_gaussian_kl_equals_torch():
    mean, log_std = normals(0, 50), normals(1, 50)
    truth = kl_divergence(Normal(mean, log_std.exp()), Normal(torch.zeros_like(mean), 0.7)).sum()
    torch.testing.assert_close(gaussian_kl(mean, log_std, 0.7), truth, rtol=1e-12, atol=0.0)


def log_mixture(w, pi, sigma1, sigma2):
    zero = torch.zeros((), dtype=torch.float64)
    first = math.log(pi) + Normal(zero, zero + sigma1).log_prob(w)
    return torch.logaddexp(first, math.log(1 - pi) + Normal(zero, zero + sigma2).log_prob(w))


@pytest.mark.parametrize("parameters", [(0.25, 1.0, 0.1), (0.5, 2.0, 0.5), (0.75, 1.0, 0.0025)])
def test_mixture_kl_against_quadrature(parameters):
    mean = torch.tensor([0.0, 0.4, -1.2], dtype=torch.float64)
    log_std = torch.tensor([-3.0, -0.5, -1.0], dtype=torch.float64)
    grid = torch.linspace(-9.0, 9.0, 400_001, dtype=torch.float64)  # in standard deviations
    truth = torch.zeros((), dtype=torch.float64)
    for m, s in zip(mean, log_std, strict=True):
        q, w = Normal(m, s.exp()), m + s.exp() * grid
        bracket = q.log_prob(w).exp() * (q.log_prob(w) - log_mixture(w, *parameters))
        truth = truth + torch.trapezoid(bracket, w)
    estimates = torch.stack(
        [mixture_kl(mean, log_std, normals(seed, 500, 3), *parameters) for seed in range(100)]
    )
    error = estimates.std() / 10.0
    assert abs(estimates.mean() - truth) < 4.0 * error
    assert error < 0.05 * truth  # the comparison is accurate


def test_log_uniform_kl_against_quadrature():
    # an even number, so that no point is at the pole
    grid = torch.linspace(-9.0, 9.0, 400_000, dtype=torch.float64)
    density = Normal(torch.zeros((), dtype=torch.float64), 1.0).log_prob(grid).exp()

    def exact(alpha: float) -> float:  # minus its limit for alpha to infinity
        absolute, noise = ((1.0 + alpha**0.5 * grid).abs().log(), grid.abs().log())
        return float(torch.trapezoid(density * (absolute - noise), grid)) - 0.5 * math.log(alpha)

    for alpha in (1e-4, 0.01, 0.3, 1.0, 3.0, 30.0):
        for mean in (-0.02, 5.0):  # the KL does not depend on the scale
            log_std = torch.tensor([0.5 * math.log(alpha) + math.log(abs(mean))], dtype=torch.float64)
            kl = log_uniform_kl(torch.tensor([mean], dtype=torch.float64), log_std)
            assert float(kl) == pytest.approx(exact(alpha), abs=0.01)


def test_gradients_of_mixture_kl():
    mean, log_std, normal = (
        normals(0, 20).requires_grad_(),
        normals(1, 20).requires_grad_(),
        normals(2, 5, 20),
    )
    parameters = (0.3, 1.5, 0.05)
    draws = mean + log_std.exp() * normal
    entropy = log_std.sum() + 10.0 * (1.0 + math.log(2.0 * math.pi))
    reference = -entropy - log_mixture(draws, *parameters).sum(1).mean()
    kl = mixture_kl(mean, log_std, normal, *parameters)
    torch.testing.assert_close(kl, reference, rtol=1e-12, atol=1e-12)
    for gradient, expected in zip(
        torch.autograd.grad(kl, [mean, log_std]),
        torch.autograd.grad(reference, [mean, log_std]),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


def test_mixture_kl_is_accurate_in_float32():
    mean, log_std, normal = normals(0, 200), normals(1, 200) - 3.0, normals(2, 1, 200)
    parameters = (0.5, 1.0, 0.0025)
    gradients = []
    for dtype in (torch.float64, torch.float32):
        m, s = mean.to(dtype).requires_grad_(), log_std.to(dtype).requires_grad_()
        gradients.append(
            torch.cat(torch.autograd.grad(mixture_kl(m, s, normal.to(dtype), *parameters), [m, s])).double()
        )
    scale = gradients[0].abs().clamp_min(1.0)
    assert ((gradients[0] - gradients[1]).abs() / scale).max() < 1e-3


@pytest.mark.parametrize("out", [1, 4])
def test_gradients_of_local_noise(out):
    layer = nn.Linear(5, out).double()
    x, std, bias = (normals(0, 7, 5), normals(1, out, 5).abs() + 0.1, normals(2, out).abs() + 0.1)
    x, std, bias = (value.requires_grad_() for value in (x, std, bias))
    torch.manual_seed(0)
    noise = local_noise(layer, x, std, bias)
    torch.manual_seed(0)
    normal = standard_normal(noise.shape, x.dtype, x.device)
    reference = F.linear(x.square(), std.square(), bias.square()).sqrt() * normal
    torch.testing.assert_close(noise, reference)
    weight = normals(3, 7, out)
    for gradient, expected in zip(
        torch.autograd.grad((noise * weight).sum(), [x, std, bias]),
        torch.autograd.grad((reference * weight).sum(), [x, std, bias]),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected)


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
        ("linear", "reparameterization"),
        ("convolution", "reparameterization"),
    ],
)
def test_outputs_have_the_moments_of_random_weights(kind, estimator):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer = nn.Sequential(make()).double()
    x = normals(1, *shape)
    model = gaussian_network(layer, x, estimator)
    std = {
        name.removeprefix("0."): value
        for name, value in named_parts(model.weights.log_std.exp(), model.weights.shapes).items()
    }
    mean = layer(x)
    bias = std["bias"].square() if "bias" in std else None
    variance = apply_weights(layer[0], x.square(), std["weight"].square(), bias)
    count = 800
    with torch.no_grad():
        if estimator == "local":  # every example has its own noise
            outputs = model(x.repeat(count, *[1] * (x.ndim - 1))).unflatten(0, (count, -1))
        elif estimator == "reparameterization":
            outputs = vmap(lambda _: model(x), randomness="different")(torch.arange(count))
        else:  # vmap does not support the random signs of Flipout
            outputs = torch.stack([model(x) for _ in range(count)])
    # outputs are Gaussian, so the standard errors of mean and variance are known
    assert ((outputs.mean(0) - mean).abs() < 5.0 * (variance / count).sqrt()).all()
    assert ((outputs.var(0) / variance - 1.0).abs() < 5.0 * math.sqrt(2.0 / count)).all()
    model.remove_hooks()
    assert torch.equal(layer(x), mean)  # the network is unchanged


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def estimate_gradients(estimator: str, count: int, rows: int = 8) -> torch.Tensor:
    network, x, y = perceptron(), normals(1, rows, 3), normals(2, rows, 2)
    model = gaussian_network(network, x, estimator, 0.2)
    parameters = {name: getattr(model.weights, name) for name in ("mean", "log_std")}
    # one row of parameters for each estimate
    rows_of = {f"weights.{name}": value.detach().repeat(count, 1) for name, value in parameters.items()}
    leaves = [value.requires_grad_() for value in rows_of.values()]

    def loss(values):
        return (functional_call(model, values, (x,)) - y).square().mean()

    torch.manual_seed(1)
    if estimator == "flipout":  # vmap does not support its random signs
        losses = [loss({name: value[row] for name, value in rows_of.items()}) for row in range(count)]
        return by_name(torch.autograd.grad(sum(losses), leaves), model.weights.shapes)
    losses = vmap(loss, randomness="different")(rows_of)
    return by_name(torch.autograd.grad(losses.sum(), leaves), model.weights.shapes)


def by_name(gradients: tuple[torch.Tensor, ...], shapes: dict[str, torch.Size]) -> torch.Tensor:
    """Returns gradients ``[S, D]`` with their columns in the order of the names, which estimators do not share."""

    def columns(row):
        parts = named_parts(row, shapes)
        return torch.cat([parts[name].flatten() for name in sorted(shapes)])

    return torch.cat([vmap(columns)(gradient) for gradient in gradients], 1)


def test_estimators_agree_and_reduce_the_variance():
    estimates = {name: estimate_gradients(name, 500) for name in ("reparameterization", "local", "flipout")}
    plain = estimates["reparameterization"]
    for name in ("local", "flipout"):
        error = ((plain.var(0) + estimates[name].var(0)) / 500).sqrt()
        assert ((plain.mean(0) - estimates[name].mean(0)).abs() < 5.0 * error).all(), name
        assert estimates[name].var(0).sum() < 0.6 * plain.var(0).sum(), name
