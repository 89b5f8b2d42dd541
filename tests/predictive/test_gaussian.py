"""Tests of the predictive distribution of real values, against closed forms and quadrature."""

import math

import pytest
import torch

from flowbnn.predictive import GaussianPredictive


def random_numbers(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """Returns normal random numbers in float64."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(left: torch.Tensor, right: object, atol: float = 1e-12) -> None:
    """Checks that two tensors agree up to an absolute tolerance."""
    right = torch.as_tensor(right, dtype=left.dtype)
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


def test_moments_agree_with_quadrature() -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)
    variances = torch.rand(4, 3, 2, generator=generator, dtype=torch.float64) + 0.1
    prediction = GaussianPredictive(means, variances)
    # E[y] and E[y^2] of the mixture on a fine grid
    grid = torch.linspace(-15, 15, 6001, dtype=torch.float64)
    normal = torch.distributions.Normal(means[..., None], variances.sqrt()[..., None])
    density = normal.log_prob(grid).exp().mean(0)
    first = torch.trapezoid(density * grid, grid)
    second = torch.trapezoid(density * grid**2, grid)
    assert_close(prediction.mean, first, atol=1e-10)
    assert_close(prediction.variance, second - first**2, atol=1e-10)
    assert_close(prediction.aleatoric, variances.mean(0))
    assert_close(prediction.epistemic, ((means - means.mean(0)) ** 2).mean(0))
    assert_close(prediction.std, prediction.variance.sqrt())


@pytest.mark.parametrize("shape", [(), (2,), (3, 1), (4, 1, 1), (4, 3, 2)])
def test_variance_is_broadcast(shape: tuple[int, ...]) -> None:
    prediction = GaussianPredictive(torch.zeros(4, 3, 2), torch.full(shape, 0.5))
    assert_close(prediction.variance, torch.full((3, 2), 0.5))
    assert_close(GaussianPredictive(torch.zeros(4, 3, 2), 0.5).variance, torch.full((3, 2), 0.5))


def test_quantiles_of_one_gaussian() -> None:
    prediction = GaussianPredictive(torch.tensor([[[3.0]]], dtype=torch.float64), 4.0)
    levels = [1e-9, 0.025, 0.5, 0.9, 1 - 1e-9]
    truth = torch.distributions.Normal(3.0, 2.0).icdf(torch.tensor(levels, dtype=torch.float64))
    assert_close(prediction.quantiles(levels).flatten(), truth, atol=1e-6)
    assert_close(prediction.quantiles(levels[1:4]).flatten(), truth[1:4])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("noise", [1e-4, 1.0, 25.0])
def test_quantiles_invert_the_cdf(noise: float, dtype: torch.dtype, tolerance: float) -> None:
    means = (5 * random_numbers(6, 4, 2)).to(dtype)
    stretch = (0.5 * random_numbers(6, 4, 2, seed=1)).exp().to(dtype)
    prediction = GaussianPredictive(means, noise * stretch)
    exact = GaussianPredictive(means.double(), (noise * stretch).double())
    levels = [0.001, 0.05, 0.3, 0.6, 0.95, 0.999]
    for level, value in zip(levels, prediction.quantiles(levels), strict=True):
        # the spacing of float32 limits the accuracy where the cdf is steep
        spacing = (
            torch.finfo(dtype).eps * value.abs().max().item() / math.sqrt((noise * stretch).min().item())
        )
        assert_close(
            exact.cdf(value.double()),
            torch.full((4, 2), level, dtype=torch.float64),
            atol=tolerance + spacing,
        )


def test_quantiles_of_distant_modes() -> None:
    means = torch.tensor([-1e3, 0.0, 0.0, 1e3], dtype=torch.float64).reshape(4, 1, 1)
    prediction = GaussianPredictive(means, 1e-6)
    # 1/8 and 7/8 are the medians of the outer modes, 1/2 that of the middle one
    assert_close(prediction.quantiles([0.125, 0.5, 0.875]).flatten(), [-1e3, 0.0, 1e3], atol=1e-9)


def test_interval_has_equal_tails() -> None:
    prediction = GaussianPredictive(random_numbers(5, 3, 2), 0.3)
    low, high = prediction.interval(0.8)
    assert_close(prediction.cdf(low), [[0.1, 0.1]] * 3)
    assert_close(prediction.cdf(high), [[0.9, 0.9]] * 3)


def test_nll_is_a_normalized_joint_density() -> None:
    means = torch.tensor([[[0.0, 0.0]], [[2.0, 2.0]]], dtype=torch.float64)
    prediction = GaussianPredictive(means, 1.0)
    joint = 0.5 * (1 + math.exp(-4)) / (2 * math.pi)
    assert_close(prediction.nll(torch.zeros(1, 2, dtype=torch.float64)), [-math.log(joint)])
    grid = torch.linspace(-8, 10, 181, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid)
    predictive_on_grid = GaussianPredictive(means.expand(2, len(points), 2), 1.0)
    mass = torch.exp(-predictive_on_grid.nll(points)).sum() * (grid[1] - grid[0]) ** 2
    assert_close(mass, 1.0, atol=1e-10)


def test_nll_of_distant_targets_is_finite() -> None:
    prediction = GaussianPredictive(torch.zeros(3, 1, 1), 1e-4)
    assert_close(prediction.nll(torch.tensor([10.0])), [5e5 + 0.5 * math.log(2 * math.pi * 1e-4)], atol=0.1)


def test_scores_of_targets_from_the_predictive() -> None:
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(8, 4000, 1, generator=generator, dtype=torch.float64)
    prediction = GaussianPredictive(means, 0.5)
    components = means[torch.randint(8, (4000,), generator=generator), torch.arange(4000)]
    targets = components + math.sqrt(0.5) * torch.randn(4000, 1, generator=generator, dtype=torch.float64)
    scores = prediction.evaluate(targets.squeeze(-1))
    assert scores["rmse"] == pytest.approx((prediction.mean - targets).square().mean().sqrt().item())
    assert scores["nll"] == pytest.approx(prediction.nll(targets).mean().item())
    # the coverage is 0.9 within four standard errors
    assert abs(scores["coverage_90"] - 0.9) < 4 * math.sqrt(0.09 / 4000)
    low, high = prediction.interval(0.9)
    assert scores["coverage_90"] == ((low <= targets) & (targets <= high)).double().mean().item()


def test_decide_abstains_above_the_threshold() -> None:
    prediction = GaussianPredictive(
        torch.tensor([[[1.0], [0.0]], [[1.0], [4.0]]]), torch.tensor([[9.0], [1.0]])
    )
    values, abstained = prediction.decide(2.5)  # stds 3 and sqrt 5
    assert values.isnan().tolist() == [[True], [False]]
    assert values[1].tolist() == [2.0]
    assert abstained.tolist() == [[True], [False]]
    assert prediction.decide(2.0, by="epistemic").abstained.tolist() == [[False], [True]]


@pytest.mark.parametrize("sample_counts", [None, torch.tensor([1, 3, 5, 2])])
def test_crps_agrees_with_quadrature(sample_counts):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(5, 4, 1, generator=generator).double()
    variance = 0.05 + torch.rand(5, 4, 1, generator=generator).double()
    prediction = GaussianPredictive(mean, variance, sample_counts)
    targets = torch.tensor([[-2.0], [0.1], [0.5], [3.0]]).double()
    axis = torch.linspace(-12, 12, 48001).double()
    cdf = torch.stack([prediction.cdf(value.expand(4, 1)) for value in axis[::40]])[:, :, 0]
    squares = (cdf - (targets[:, 0] <= axis[::40, None]).double()).square()
    expected = torch.trapezoid(squares, axis[::40], dim=0)
    torch.testing.assert_close(prediction.crps(targets)[:, 0], expected, rtol=0.02, atol=0.01)
    single = GaussianPredictive(mean[:1], variance[:1])
    scaled = (targets - mean[0]) / variance[0].sqrt()
    normal = torch.distributions.Normal(0.0, 1.0)
    closed_form = scaled * (2 * normal.cdf(scaled) - 1) + 2 * normal.log_prob(scaled).exp() - math.pi**-0.5
    torch.testing.assert_close(single.crps(targets), variance[0].sqrt() * closed_form)
    assert prediction.evaluate(targets)["crps"] == pytest.approx(float(prediction.crps(targets).mean()))


def test_sample_draws_from_the_mixture():
    prediction = GaussianPredictive(
        torch.tensor([[[-2.0], [0.0]], [[2.0], [1.0]]]).double(), 0.25, torch.tensor([2, 1])
    )
    draws = prediction.sample(20000, seed=0)
    assert draws.shape == (20000, 2, 1)
    assert torch.equal(draws, prediction.sample(20000, seed=0))
    torch.testing.assert_close(draws.mean(0), prediction.mean, rtol=0, atol=0.06)
    torch.testing.assert_close(draws.var(0), prediction.variance, rtol=0.03, atol=0)
    torch.testing.assert_close(prediction.log_prob(draws[0]), -prediction.nll(draws[0]))


def test_predictions_have_the_shape_of_the_targets():
    samples = torch.randn(6, 4, 1, generator=torch.Generator().manual_seed(0))
    flat, column = (GaussianPredictive(samples, 0.5, shape=shape) for shape in ((), (1,)))
    targets = torch.zeros(4)
    for name in ("mean", "variance", "std", "epistemic", "aleatoric", "standard_error"):
        assert getattr(flat, name).shape == (4,)
        assert torch.equal(getattr(flat, name), getattr(column, name)[:, 0])
    assert flat.interval().low.shape == flat.cdf(targets).shape == flat.crps(targets).shape == (4,)
    assert flat.sample(3).shape == flat.quantiles([0.1, 0.5, 0.9]).shape == (3, 4)
    assert flat[:2].cpu().mean.shape == flat[:2].decide(1.0).abstained.shape == (2,)
    assert flat.evaluate(targets) == column.evaluate(targets.unsqueeze(1))
    assert torch.equal(flat.sampling_error, column.sampling_error)
    cube = GaussianPredictive(torch.randn(6, 4, 6), 0.5, shape=(2, 3))
    assert cube.mean.shape == (4, 2, 3)
    assert cube.nll(torch.zeros(4, 2, 3)).shape == (4,)
