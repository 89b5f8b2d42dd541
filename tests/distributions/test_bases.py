"""Bases against the distributions of torch and scipy."""

import pytest
import scipy.stats
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

import flowbnn as fb
from flowbnn.distributions import (
    CircularBase,
    CircularUniform,
    DiagonalLaplace,
    DiagonalLogistic,
    DiagonalNormal,
    LaplaceBase,
    LogisticBase,
    MixtureBase,
    NormalBase,
    NormalMixture,
)
from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError


def test_diagonal_normal_equals_torch():
    loc, scale = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64) + 0.1
    ours, theirs = DiagonalNormal(loc, scale), Independent(Normal(loc, scale), 1)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(ours.log_prob(x), theirs.log_prob(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.entropy(), theirs.entropy(), rtol=0, atol=1e-12)
    assert (ours.batch_shape, ours.event_shape) == (theirs.batch_shape, theirs.event_shape)
    torch.testing.assert_close(ours.variance, theirs.variance)
    assert ours.expand((2, 4)).rsample((5,)).shape == (5, 2, 4, 3)


@pytest.mark.parametrize("kind", [DiagonalNormal, DiagonalLaplace, DiagonalLogistic])
def test_integer_locations_keep_scales_that_are_not_integers(kind):
    loc = torch.tensor([0, 1, 7])
    ours, x = kind(loc, 0.5, validate_args=True), torch.tensor([0.3, 2.0, 6.5])
    torch.testing.assert_close(ours.log_prob(x), kind(loc.float(), torch.full((3,), 0.5)).log_prob(x))
    assert ours.rsample().dtype == torch.float32


def test_mixture_equals_torch():
    loc, scale = torch.randn(3, 2, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64) + 0.1
    ours = NormalMixture(loc, scale)
    theirs = MixtureSameFamily(Categorical(torch.ones(3)), Independent(Normal(loc, scale), 1))
    x = torch.randn(7, 2, dtype=torch.float64)
    # torch's mixture has float32 weights
    torch.testing.assert_close(ours.log_prob(x), theirs.log_prob(x), rtol=0, atol=1e-7)
    torch.testing.assert_close(ours.mean, theirs.mean.double(), rtol=0, atol=1e-7)
    torch.testing.assert_close(ours.variance, theirs.variance.double(), rtol=0, atol=1e-7)
    assert ours.rsample((4, 2)).shape == (4, 2, 2)
    assert ours.expand((6,)).rsample((4,)).shape == (4, 6, 2)
    assert ours.expand((6,)).log_prob(torch.zeros(4, 6, 2, dtype=torch.float64)).shape == (4, 6)


def test_mixture_draws_have_the_exact_moments():
    mixture = NormalMixture(torch.tensor([[-2.0], [2.0]]), torch.tensor([[0.5], [1.0]]))
    count = 200_000
    draws = mixture.rsample((count,), generator=torch.Generator().manual_seed(0))
    spread = mixture.variance.sqrt() / count**0.5
    assert (draws.mean(0) - mixture.mean).abs() < 4 * spread
    fourth = ((draws - mixture.mean) ** 4).mean(0)
    assert (draws.var(0) - mixture.variance).abs() < 4 * ((fourth - mixture.variance**2) / count).sqrt()


def test_mixture_gradient_equals_that_of_the_expectation():
    """The pathwise gradient must be d/dmu_k E[x^2] = 2 mu_k / K."""
    loc = torch.tensor([[-1.0], [3.0]], requires_grad=True)
    draws = NormalMixture(loc, torch.ones(2, 1)).rsample((200_000,), torch.Generator().manual_seed(0))
    (draws**2).mean().backward()
    torch.testing.assert_close(loc.grad, loc.detach(), rtol=0, atol=0.03)


def test_generator_determines_the_draws():
    for base in (NormalBase(3), MixtureBase(3, 2)):
        first, second = (base().rsample((4,), generator=torch.Generator().manual_seed(1)) for _ in range(2))
        assert torch.equal(first, second)


def test_bases_can_be_cast_and_saved():
    base = MixtureBase(3, 2).double()
    assert base.distribution().rsample((2,)).dtype == torch.float64
    other = MixtureBase(3, 2).double()
    other.load_state_dict(base.state_dict())
    assert torch.equal(other.loc, base.loc)
    assert set(NormalBase(2).state_dict()) == {"loc", "scale"}


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: NormalBase(0), "dim"),
        (lambda: NormalBase(2, scale=0.0), "scale"),
        (lambda: NormalBase(2, scale=-1.0), "scale"),
        (lambda: MixtureBase(2, components=0), "components"),
    ],
)
def test_bad_arguments_raise(call, argument):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == ("value", argument)


def test_large_draws_are_standard_normal_for_both_generators(monkeypatch):
    """Checks moments up to the fourth and the tails within four standard errors."""
    for scalar_fill in (True, False):
        monkeypatch.setattr("flowbnn.distributions.draws._SCALAR_FILL", scalar_fill)
        x = standard_normal(
            torch.Size((1000, 400)), torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)
        ).double()
        count = x.numel()
        for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
            assert abs(float((x**power).mean()) - moment) < 4 * (variance / count) ** 0.5, power
        tail = 0.0026998
        assert abs(float((x.abs() > 3).double().mean()) - tail) < 4 * (tail / count) ** 0.5
        assert abs(float((x[:-1] * x[1:]).mean())) < 4 / count**0.5


def test_draws_depend_on_the_global_seed_and_differ_between_calls():
    size, cpu = torch.Size((5000,)), torch.device("cpu")
    torch.manual_seed(3)
    first, second = (standard_normal(size, torch.float32, cpu) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(standard_normal(size, torch.float32, cpu), first)
    assert not torch.equal(first, second)
    draw = torch.func.vmap(
        lambda loc: DiagonalNormal(loc, torch.ones(5000)).rsample(), randomness="different"
    )
    rows = draw(torch.zeros(2, 5000))
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (DiagonalLaplace, scipy.stats.laplace),
        (DiagonalLogistic, scipy.stats.logistic),
        (CircularUniform, scipy.stats.uniform(-1, 2)),
    ],
    ids=["laplace", "logistic", "circle"],
)
def test_density_moments_entropy_and_draws_equal_scipy(ours, theirs):
    loc, scale = torch.tensor([0.5, -1.0]).double(), torch.tensor([2.0, 0.3]).double()
    distribution = ours(loc, scale)
    standardized = torch.linspace(-0.9, 0.9, 7).double()[:, None].expand(7, 2)
    expected = torch.from_numpy(theirs.logpdf(standardized.numpy())) - scale.log()
    torch.testing.assert_close(distribution.log_prob(loc + scale * standardized), expected.sum(-1))
    torch.testing.assert_close(distribution.variance, scale.square() * float(theirs.var()))
    assert distribution.entropy().item() == pytest.approx(
        2 * float(theirs.entropy()) + scale.log().sum().item()
    )
    draws = (distribution.rsample((4000,), torch.Generator().manual_seed(0)) - loc) / scale
    for column in draws.T:
        assert scipy.stats.kstest(column.numpy(), theirs.cdf).pvalue > 1e-3
    assert distribution.expand((3,)).rsample().shape == (3, 2)


@pytest.mark.parametrize("kind", [LaplaceBase, LogisticBase, CircularBase])
def test_flows_on_fixed_bases(kind):
    flow = fb.flows.FlowModel(kind(2), fb.transforms.Affine(2))
    x, log_prob = flow().rsample_and_log_prob((5,))
    torch.testing.assert_close(flow().log_prob(x), log_prob)
    torch.testing.assert_close(flow().entropy(), kind(2).distribution().entropy())


def test_messages_name_the_subclass():
    with pytest.raises(FlowBNNError) as caught:
        NormalBase(0)
    assert str(caught.value).startswith("NormalBase(dim=...)")
    with pytest.raises(FlowBNNError) as caught:
        LaplaceBase(2, width=1.0)
    assert str(caught.value).startswith("LaplaceBase ")
    assert (caught.value.kind, caught.value.argument) == ("unknown setting", "width")
