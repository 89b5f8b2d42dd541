"""The Gaussian predictive against closed forms, quadrature and brute force."""

import math

import pytest
import torch

from flowbnn.predictive import GaussianPredictive


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(left: torch.Tensor, right: object, atol: float = 1e-12) -> None:
    right = torch.as_tensor(right, dtype=left.dtype)
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


def test_law_of_total_variance_against_brute_force() -> None:
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
    close(prediction.mean, first, atol=1e-10)
    close(prediction.variance, second - first**2, atol=1e-10)
    close(prediction.aleatoric, variances.mean(0))
    close(prediction.epistemic, ((means - means.mean(0)) ** 2).mean(0))
    close(prediction.std, prediction.variance.sqrt())


@pytest.mark.parametrize("shape", [(), (2,), (3, 1), (4, 1, 1), (4, 3, 2)])
def test_variance_broadcasts(shape: tuple[int, ...]) -> None:
    prediction = GaussianPredictive(torch.zeros(4, 3, 2), torch.full(shape, 0.5))
    close(prediction.variance, torch.full((3, 2), 0.5))
    close(GaussianPredictive(torch.zeros(4, 3, 2), 0.5).variance, torch.full((3, 2), 0.5))


def test_quantiles_of_one_gaussian_are_closed_form() -> None:
    prediction = GaussianPredictive(torch.tensor([[[3.0]]], dtype=torch.float64), 4.0)
    levels = [1e-9, 0.025, 0.5, 0.9, 1 - 1e-9]
    truth = torch.distributions.Normal(3.0, 2.0).icdf(torch.tensor(levels, dtype=torch.float64))
    close(prediction.quantiles(levels).flatten(), truth, atol=1e-6)
    close(prediction.quantiles(levels[1:4]).flatten(), truth[1:4])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("noise", [1e-4, 1.0, 25.0])
def test_quantiles_invert_the_mixture(noise: float, dtype: torch.dtype, tolerance: float) -> None:
    means = (5 * random_logits(6, 4, 2)).to(dtype)
    stretch = (0.5 * random_logits(6, 4, 2, seed=1)).exp().to(dtype)
    prediction = GaussianPredictive(means, noise * stretch)
    exact = GaussianPredictive(means.double(), (noise * stretch).double())
    levels = [0.001, 0.05, 0.3, 0.6, 0.95, 0.999]
    for level, value in zip(levels, prediction.quantiles(levels), strict=True):
        # a float32 value cannot meet a steep cdf better than its own spacing allows
        spacing = (
            torch.finfo(dtype).eps * value.abs().max().item() / math.sqrt((noise * stretch).min().item())
        )
        close(
            exact.cdf(value.double()),
            torch.full((4, 2), level, dtype=torch.float64),
            atol=tolerance + spacing,
        )


def test_quantiles_far_apart_modes() -> None:
    means = torch.tensor([-1e3, 0.0, 0.0, 1e3], dtype=torch.float64).reshape(4, 1, 1)
    prediction = GaussianPredictive(means, 1e-6)
    # 1/8 and 7/8 are the medians of the outer modes, 1/2 that of the middle one
    close(prediction.quantiles([0.125, 0.5, 0.875]).flatten(), [-1e3, 0.0, 1e3], atol=1e-9)


def test_interval_holds_its_mass_with_equal_tails() -> None:
    prediction = GaussianPredictive(random_logits(5, 3, 2), 0.3)
    low, high = prediction.interval(0.8)
    close(prediction.cdf(low), [[0.1, 0.1]] * 3)
    close(prediction.cdf(high), [[0.9, 0.9]] * 3)


def test_nll_by_hand_and_as_a_joint_density() -> None:
    means = torch.tensor([[[0.0, 0.0]], [[2.0, 2.0]]], dtype=torch.float64)
    prediction = GaussianPredictive(means, 1.0)
    joint = 0.5 * (1 + math.exp(-4)) / (2 * math.pi)
    close(prediction.nll(torch.zeros(1, 2, dtype=torch.float64)), [-math.log(joint)])
    grid = torch.linspace(-8, 10, 181, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid)
    everywhere = GaussianPredictive(means.expand(2, len(points), 2), 1.0)
    mass = torch.exp(-everywhere.nll(points)).sum() * (grid[1] - grid[0]) ** 2
    close(mass, 1.0, atol=1e-10)


def test_nll_far_away_is_finite() -> None:
    prediction = GaussianPredictive(torch.zeros(3, 1, 1), 1e-4)
    close(prediction.nll(torch.tensor([10.0])), [5e5 + 0.5 * math.log(2 * math.pi * 1e-4)], atol=0.1)


def test_evaluate() -> None:
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(8, 4000, 1, generator=generator, dtype=torch.float64)
    prediction = GaussianPredictive(means, 0.5)
    picked = means[torch.randint(8, (4000,), generator=generator), torch.arange(4000)]
    targets = picked + math.sqrt(0.5) * torch.randn(4000, 1, generator=generator, dtype=torch.float64)
    scores = prediction.evaluate(targets.squeeze(-1))
    assert scores["rmse"] == pytest.approx((prediction.mean - targets).square().mean().sqrt().item())
    assert scores["nll"] == pytest.approx(prediction.nll(targets).mean().item())
    # drawn from the predictive itself: 0.9 within four standard errors
    assert abs(scores["coverage_90"] - 0.9) < 4 * math.sqrt(0.09 / 4000)
    low, high = prediction.interval(0.9)
    assert scores["coverage_90"] == ((low <= targets) & (targets <= high)).double().mean().item()


def test_decide() -> None:
    prediction = GaussianPredictive(
        torch.tensor([[[1.0], [0.0]], [[1.0], [4.0]]]), torch.tensor([[9.0], [1.0]])
    )
    values, abstained = prediction.decide(2.5)  # stds 3 and sqrt 5
    assert values.tolist() == [[1.0], [2.0]]
    assert abstained.tolist() == [[True], [False]]
    assert prediction.decide(2.0, by="epistemic").abstained.tolist() == [[False], [True]]


@pytest.mark.parametrize("sample_counts", [None, torch.tensor([1, 3, 5, 2])])
def test_crps_is_the_integral_of_the_squared_distance_of_the_cdfs(sample_counts):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(5, 4, 1, generator=generator).double()
    variance = 0.05 + torch.rand(5, 4, 1, generator=generator).double()
    prediction = GaussianPredictive(mean, variance, sample_counts)
    targets = torch.tensor([[-2.0], [0.1], [0.5], [3.0]]).double()
    axis = torch.linspace(-12, 12, 48001).double()
    below = torch.stack([prediction.cdf(at.expand(4, 1)) for at in axis[::40]])[:, :, 0]
    gaps = (below - (targets[:, 0] <= axis[::40, None]).double()).square()
    expected = torch.trapezoid(gaps, axis[::40], dim=0)
    torch.testing.assert_close(prediction.crps(targets)[:, 0], expected, rtol=0.02, atol=0.01)
    one = GaussianPredictive(mean[:1], variance[:1])
    scaled = (targets - mean[0]) / variance[0].sqrt()
    normal = torch.distributions.Normal(0.0, 1.0)
    known = scaled * (2 * normal.cdf(scaled) - 1) + 2 * normal.log_prob(scaled).exp() - math.pi**-0.5
    torch.testing.assert_close(one.crps(targets), variance[0].sqrt() * known)
    assert prediction.evaluate(targets)["crps"] == pytest.approx(float(prediction.crps(targets).mean()))


def test_draws_are_those_of_the_mixture():
    prediction = GaussianPredictive(
        torch.tensor([[[-2.0], [0.0]], [[2.0], [1.0]]]).double(), 0.25, torch.tensor([2, 1])
    )
    drawn = prediction.sample(20000, seed=0)
    assert drawn.shape == (20000, 2, 1)
    assert torch.equal(drawn, prediction.sample(20000, seed=0))
    torch.testing.assert_close(drawn.mean(0), prediction.mean, rtol=0, atol=0.06)
    torch.testing.assert_close(drawn.var(0), prediction.variance, rtol=0.03, atol=0)
    torch.testing.assert_close(prediction.log_prob(drawn[0]), -prediction.nll(drawn[0]))


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
