"""Flows as torch.distributions, and their divergence against closed forms and quadrature."""

import pytest
import torch
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from flowbnn.distributions import DiagonalNormal, Flow, MixtureBase, NormalBase, divergence
from flowbnn.errors import FlowBNNError
from flowbnn.transforms import (
    Affine,
    AffineCoupling,
    Compose,
    Exp,
    Inverse,
    LULinear,
    Planar,
    Radial,
    Transform,
)

DOUBLE = torch.float64


def perturbed(transform: Transform, size: float = 0.4) -> Transform:
    generator = torch.Generator().manual_seed(3)
    transform.double()
    with torch.no_grad():
        for parameter in transform.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=DOUBLE))
    return transform.eval()


def normal(dim: int, loc: float = 1.0, scale: float = 0.5) -> DiagonalNormal:
    return DiagonalNormal(torch.full((dim,), loc, dtype=DOUBLE), torch.full((dim,), scale, dtype=DOUBLE))


@pytest.mark.parametrize(
    "transform", [Affine(3), Planar(3), Radial(3), Compose(Affine(3), LULinear(3), AffineCoupling(3))]
)
def test_density_of_the_forward_pass_equals_that_of_the_inverse(transform):
    flow = Flow(normal(3), perturbed(transform))
    x, log_prob = flow.rsample_and_log_prob((5, 2))
    assert x.shape == (5, 2, 3)
    assert log_prob.shape == (5, 2)
    torch.testing.assert_close(flow.log_prob(x), log_prob, rtol=0, atol=1e-8)


def test_lognormal_equals_torch():
    flow = Flow(Independent(Normal(torch.zeros(2), torch.ones(2)), 1), Exp())
    x = torch.tensor([[0.5, 2.0]])
    expected = torch.distributions.LogNormal(0.0, 1.0).log_prob(x).sum(-1)
    torch.testing.assert_close(flow.log_prob(x), expected)
    scalar = Flow(Normal(torch.zeros(()), torch.ones(())), Exp())
    torch.testing.assert_close(
        scalar.log_prob(torch.tensor(2.0)),
        torch.distributions.LogNormal(0.0, 1.0).log_prob(torch.tensor(2.0)),
    )


def test_samples_gradients_and_expansion():
    flow = Flow(normal(3), perturbed(Planar(3)))
    assert flow.sample((4,)).requires_grad is False
    assert flow.rsample((4,)).requires_grad
    expanded = flow.expand((2,))
    assert expanded.batch_shape == (2,)
    assert expanded.rsample((4,)).shape == (4, 2, 3)
    assert expanded.log_prob(torch.ones(4, 2, 3, dtype=DOUBLE)).shape == (4, 2)
    assert (
        Flow(normal(3), Affine(3).double(), validate_args=True).log_prob(torch.ones(3, dtype=DOUBLE)).ndim
        == 0
    )


class OneWay(Transform):
    inverse_kind = "none"


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: Flow(NormalBase(2, 0.0, 1.0), Affine(2)), "value", "base"),
        (lambda: Flow(Normal(torch.zeros(()), torch.ones(())), Planar(3)), "shape", "base"),
        (
            lambda: Flow(Normal(torch.zeros(2), torch.ones(2)), Affine(2)).rsample(
                generator=torch.Generator()
            ),
            "unsupported",
            "generator",
        ),
        (lambda: Inverse(OneWay()), "value", "transform"),
    ],
)
def test_bad_input_raises(call, kind, argument):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


def test_density_without_inverse_raises():
    with pytest.raises(NotImplementedError):
        Flow(normal(2), OneWay()).log_prob(torch.zeros(2))


# --- divergence ------------------------------------------------------------------------------------------------------


def test_kl_of_a_diagonal_map_equals_torch():
    q = Flow(normal(3), perturbed(Affine(3)))
    log_scale, shift = q.transform.log_scale, q.transform.shift
    plain = Independent(Normal(log_scale.exp() + shift, 0.5 * log_scale.exp()), 1)
    prior = normal(3, 0.7, 0.9)
    expected = kl_divergence(plain, Independent(Normal(prior.loc, prior.scale), 1))
    result = divergence(q, prior)
    torch.testing.assert_close(result.kl, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.entropy, plain.entropy(), rtol=0, atol=1e-12)
    torch.testing.assert_close(kl_divergence(q, prior), expected, rtol=0, atol=1e-12)


def test_kl_of_a_full_matrix_equals_torch():
    q = Flow(normal(4), perturbed(Compose(Affine(4), LULinear(4), Affine(4), LULinear(4))))
    assert q.transform.linearity == "affine"
    offset = q.transform(torch.zeros(4, dtype=DOUBLE))[0]
    matrix = (q.transform(torch.eye(4, dtype=DOUBLE))[0] - offset).T
    covariance = 0.25 * matrix @ matrix.T
    plain = MultivariateNormal(matrix.sum(1) + offset, covariance)
    prior = normal(4)
    expected = kl_divergence(plain, MultivariateNormal(prior.loc, torch.diag(prior.variance)))
    torch.testing.assert_close(divergence(q, prior).kl, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(divergence(q, prior).entropy, plain.entropy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "make", [lambda: Planar(2), lambda: Radial(2), lambda: AffineCoupling(2, hidden=(4,))]
)
def test_sampled_kl_equals_the_integral(make):
    """Compares draws with quadrature of q log(q/p) on a grid, within four standard errors."""
    torch.manual_seed(0)
    q, prior = Flow(normal(2), perturbed(make())), normal(2)
    axis = torch.linspace(-6, 8, 900, dtype=DOUBLE)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        log_q = q.log_prob(grid)
        cell = (axis[1] - axis[0]) ** 2
        assert (log_q.exp().sum() * cell - 1.0).abs() < 1e-3, "the grid must contain the mass of q"
        integral = (log_q.exp() * (log_q - prior.log_prob(grid))).sum() * cell
        estimates = torch.stack([divergence(q, prior, samples=500).kl for _ in range(40)])
    assert (estimates.mean() - integral).abs() < 4 * estimates.std() / 40**0.5 + 1e-3
    with pytest.raises(NotImplementedError):
        kl_divergence(q, prior)


def test_sampled_kl_of_a_mixture_equals_the_integral():
    torch.manual_seed(0)
    base = MixtureBase(1, 2, init_std=1.0).double()
    q, prior = Flow(base(), Affine(1).double()), normal(1)
    grid = torch.linspace(-8, 10, 20_000, dtype=DOUBLE)[:, None]
    with torch.no_grad():
        log_q = q.log_prob(grid)
        integral = (log_q.exp() * (log_q - prior.log_prob(grid))).sum() * (grid[1, 0] - grid[0, 0])
        estimates = torch.stack([divergence(q, prior, samples=500).kl for _ in range(40)])
    assert (estimates.mean() - integral).abs() < 4 * estimates.std() / 40**0.5


def test_exact_kl_is_zero_at_the_prior_and_positive_elsewhere():
    prior = normal(5)
    assert divergence(Flow(prior, Affine(5).double()), prior).kl.abs() < 1e-14
    for seed in range(20):
        torch.manual_seed(seed)
        transform = Compose(Affine(5), LULinear(5)).double()
        with torch.no_grad():
            for parameter in transform.parameters():
                parameter.add_(torch.randn_like(parameter))
        assert divergence(Flow(prior, transform), prior).kl > 0


@pytest.mark.parametrize("transform", [Compose(), Exp(), Affine(3)], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("length", [1, 2])
def test_values_of_another_length_than_the_base_raise(length: int, transform: Transform) -> None:
    """A base of length one would broadcast to vectors of any length."""
    flow = Flow(DiagonalNormal(torch.zeros(length), torch.ones(length)), transform)
    with pytest.raises(FlowBNNError) as caught:
        flow.log_prob(torch.ones(4, 3))
    assert (caught.value.kind, caught.value.fields["path"]) == ("shape", (0,))
