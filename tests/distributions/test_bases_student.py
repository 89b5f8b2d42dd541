"""Student-t distributions as base and prior of noise."""

import pytest
import torch
from scipy import stats
from torch import nn
from torch.distributions import Independent, StudentT

import flowbnn as fb
from flowbnn.diagnostics import marginal
from flowbnn.distributions import DiagonalNormal, DiagonalStudent, StudentBase, divergence
from flowbnn.errors import FlowBNNError
from flowbnn.noise import NormalAffine, NormalPlanar

LOC, SCALE = torch.tensor([0.5, -1.0]).double(), torch.tensor([2.0, 0.3]).double()


@pytest.mark.parametrize("df", [2.5, 4.0, 30.0])
def test_density_moments_and_samplesequal_torch_and_scipy(df):
    ours, theirs = DiagonalStudent(LOC, SCALE, df), Independent(StudentT(df, LOC, SCALE), 1)
    points = 3.0 * torch.randn(7, 2).double()
    torch.testing.assert_close(ours.log_prob(points), theirs.log_prob(points))
    torch.testing.assert_close(ours.variance, theirs.variance)
    torch.testing.assert_close(ours.expand((3,)).log_prob(points[:3]), theirs.log_prob(points[:3]))
    samples = (ours.rsample((4000,), torch.Generator().manual_seed(0)) - LOC) / SCALE
    for column in samples.T:
        assert stats.kstest(column.numpy(), stats.t(df).cdf).pvalue > 1e-3
    assert abs(stats.spearmanr(samples.numpy()).statistic) < 0.06


@pytest.mark.parametrize(
    ("loc", "scale", "df", "argument"),
    [
        (LOC, SCALE, "x", "df"),
        (LOC, SCALE, 0.0, "df"),
        (LOC, SCALE, float("nan"), "df"),
        (LOC, "wide", 3.0, "scale"),
        (LOC, -1.0, 3.0, "scale"),
        (LOC, torch.ones(3), 3.0, "scale"),
        (0.5, SCALE, 3.0, "loc"),
    ],
)
def test_bad_arguments_raise(loc, scale, df, argument):
    with pytest.raises(FlowBNNError) as caught:
        DiagonalStudent(loc, scale, df)
    assert caught.value.fields["argument"] == argument
    assert "\n" not in str(caught.value)


def test_gradients_reach_location_and_scale():
    loc, scale = LOC.clone().requires_grad_(), SCALE.clone().requires_grad_()
    samples = DiagonalStudent(loc, scale, 3.0).rsample((50,), torch.Generator().manual_seed(0))
    loc_grad, scale_grad = torch.autograd.grad(samples.sum(), (loc, scale))
    torch.testing.assert_close(loc_grad, torch.full_like(LOC, 50.0))
    torch.testing.assert_close(scale_grad, ((samples - LOC) / SCALE).sum(0).detach())


def test_kl_to_a_student_prior_equals_quadrature():
    q, p = DiagonalNormal(LOC[:1], SCALE[:1]), DiagonalStudent(LOC[1:], SCALE[1:], 4.0)
    grid = torch.linspace(-25, 25, 20_001).double()[:, None]
    density = q.log_prob(grid).exp()
    exact = torch.trapezoid(density * (q.log_prob(grid) - p.log_prob(grid)), grid[:, 0])
    estimate = divergence(q, p, 200_000, torch.Generator().manual_seed(0)).kl
    assert abs(float(estimate - exact)) < 0.02


@pytest.mark.parametrize(
    "recipe",
    [
        NormalAffine(prior_df=3.0, base_df=3.0),
        NormalPlanar(prior_df=4.0),
        NormalAffine(prior_df=3.0, base_df=5.0, joint="full"),
    ],
    ids=str,
)
def test_network_with_student_noise_is_fitted_saved_and_loaded(recipe, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.randn(60, 2)
    batches = [(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())]
    posterior = fb.NodeNoise(recipe, epochs=5).fit(network, batches, seed=0, progress=False)
    loaded = fb.load_posterior(posterior.save(tmp_path / "noise"), network)
    predictions = [p.predict(inputs, 8, seed=0).log_samples for p in (posterior, loaded)]
    assert torch.equal(*predictions)
    draws = posterior.draws(5, seed=0)
    torch.testing.assert_close(posterior.log_prob(draws), loaded.log_prob(draws))
    if recipe.joint is None:
        curve, prior = marginal(posterior.model, "0", 0), StudentT(recipe.prior_df, 1.0, 0.5)
        torch.testing.assert_close(curve.prior, prior.log_prob(curve.grid).exp(), rtol=1e-5, atol=1e-7)


def test_entropy_term_widens_the_noise():
    torch.manual_seed(0)
    inputs = torch.randn(60, 2)
    batches, network = [(inputs, (inputs[:, 0] > 0).long())], nn.Linear(2, 2)
    spread = [
        fb.NodeNoise(gamma=gamma, epochs=150)
        .fit(network, batches, seed=0, progress=False)
        .draws(400, seed=0)[""]
        .std()
        for gamma in (0.0, 5.0)
    ]
    assert spread[1] > 1.3 * spread[0]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: NormalAffine(prior_df=2.0), "prior_df"),
        (lambda: StudentBase(3, df=1.0), "df"),
        (
            lambda: fb.to_stochastic(nn.Linear(2, 2), {"*": NormalAffine(base_df=3.0, components=2)}),
            "base_df",
        ),
    ],
)
def test_bad_degrees_of_freedom_raise(call, argument):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    "recipe", [NormalAffine(prior_df=3.0), NormalPlanar(), NormalAffine(components=2)], ids=str
)
def test_calibrate_accepts_only_gaussian_noise(recipe):
    inputs = torch.randn(40, 2)
    batches = [(inputs, torch.arange(40) % 2)]
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(nn.Linear(2, 2), batches, rules={"*": recipe}, folds=0, progress=False)
    assert caught.value.argument == "rules"
    assert "\n" not in str(caught.value)
