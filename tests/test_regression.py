"""Regression: noise scale, units of the targets and coverage of the intervals."""

import math
import warnings
from copy import deepcopy

import pytest
import torch
from problems import QUIET, of_kind
from regression_problems import batches, best_nll, curve, network, residual, solved
from torch import nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNWarning
from flowbnn.likelihoods import Gaussian
from flowbnn.methods.ensemble import EnsemblePosterior
from flowbnn.predictive import GaussianPredictive
from flowbnn.regression import (
    MAX_RATIO,
    draw_variance_term,
    fit_noise_scale,
    mixture_variance_factor,
    set_output_scale,
    with_fitted_noise,
)
from flowbnn.training import EarlyStop


def noisy_curve():
    """Returns 50 examples of the curve whose noise has ten times the usual size."""
    x, y = curve(50, 3)
    return x, y + 0.5 * torch.randn(50, 1, generator=torch.Generator().manual_seed(4))


def test_the_noise_scale_of_a_point_fit_is_optimal():
    plain = fb.MLE(epochs=100).fit(network(), batches(), seed=0, **QUIET)
    report = fb.evaluate(plain, curve(2000, 1), progress=False)
    assert report["nll"] < best_nll(report["rmse"]) + 0.05
    assert 0.87 < report["coverage_90"] < 0.93


@pytest.mark.parametrize("method", [fb.MLE, fb.MAP, fb.DeepEnsemble])
def test_the_noise_scale_of_a_point_fit_is_the_size_of_its_residuals(method):
    settings = {"members": 2} if method is fb.DeepEnsemble else {}
    posterior = method(epochs=2, **settings).fit(network(), batches(), seed=0, **QUIET)
    networks = [posterior.member(m) for m in range(2)] if settings else [posterior.model]
    scales = posterior.log_noise if settings else [posterior.likelihood.log_scale]
    for model, log_scale in zip(networks, scales, strict=True):
        assert log_scale.exp().item() == pytest.approx(residual(model, curve(500, 0)), rel=1e-5)


def test_the_noise_scale_is_at_least_the_residuals_of_held_out_data():
    """A network that fits 20 rows exactly has residuals of zero there, but not on other rows."""
    x, y = curve(20, 0)
    others = curve(500, 1)
    posterior = fb.MLE(epochs=300, lr=1e-2).fit(network(), [(x, y)], validation=[others], seed=0, **QUIET)
    scale = posterior.likelihood.log_scale.exp().item()
    assert scale == pytest.approx(residual(posterior.model, others), rel=1e-5)
    assert scale > 1.2 * residual(posterior.model, (x, y))


def has_best_scale(posterior, x, y):
    """Returns True if a noise scale of 2 % more or less has a lower predictive likelihood."""
    values, log_scale = [], posterior.likelihood.log_scale
    for change in (-0.02, 0.0, 0.02):
        with torch.no_grad():
            log_scale += change
            values.append(float(posterior.predict(x, 32, seed=0).nll(y).double().mean()))
            log_scale -= change
    return values[1] < min(values[0], values[2])


@pytest.mark.parametrize("method", [fb.BayesByBackprop, fb.MNF, fb.NodeNoise, fb.MCDropout])
@pytest.mark.filterwarnings("ignore:the predictive standard deviation")
def test_the_noise_scale_of_a_posterior_maximizes_the_predictive_likelihood(method):
    """The likelihood is that of the draws to which the scale is fitted."""
    posterior = method(epochs=2).fit(solved(*curve(500, 0)), batches(), seed=0, **QUIET)
    assert has_best_scale(posterior, *curve(500, 0))


def test_mixture_variance_factor_maximizes_the_likelihood():
    generator = torch.Generator().manual_seed(0)
    squares = torch.randn(5, 40, 1, generator=generator).square()
    variances = torch.rand(5, 1, 1, generator=generator).add(0.1).expand(5, 40, 1)
    grid = torch.linspace(-3, 3, 6001).exp()[:, None, None]
    scaled = variances[..., 0] * grid
    mixture = torch.logsumexp(-0.5 * (squares[..., 0] / scaled + scaled.log()), 1).sum(-1)
    expected = grid[mixture.argmax()].item()
    assert mixture_variance_factor(squares, variances).item() == pytest.approx(expected, rel=2e-3)


def test_fitted_noise_maximizes_the_likelihood_of_the_targets():
    generator = torch.Generator().manual_seed(0)
    means, targets = torch.randn(4, 30, 2, generator=generator), torch.randn(30, 2, generator=generator)
    predictive = GaussianPredictive(means, torch.tensor([0.04, 9.0]))
    fitted = with_fitted_noise(predictive, targets)
    assert torch.equal(fitted.samples, means)
    for output in range(2):
        nlls = []
        for change in (0.98, 1.0, 1.02):
            variances = fitted.sample_variances.clone()
            variances[..., output] *= change
            nlls.append(float(GaussianPredictive(means, variances).nll(targets).mean()))
        assert nlls[1] < min(nlls[0], nlls[2])


@pytest.mark.parametrize("method", [fb.MLE, fb.NodeNoise])
def test_the_validation_nll_is_that_of_the_noise_that_fits_the_validation_data(method):
    """The noise scale shrinks with the training residuals, so that the NLL at this scale rises while the error still falls."""
    data = noisy_curve()
    posterior = method(epochs=3).fit(network(), batches(), validation=data, seed=0, **QUIET)
    nll, rmse = (posterior.history[f"validation_{name}"][-1] for name in ("nll", "rmse"))
    assert nll == pytest.approx(best_nll(rmse), abs=1e-5 if method is fb.MLE else 0.05)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # the validation data are noisier
def test_the_validation_nll_of_fit_is_that_of_the_noise_of_the_training_data():
    noisy = fb.to_stochastic(solved(*curve(500, 0)), {"*": fb.noise.NormalAffine()})
    posterior = fb.fit(noisy, batches(), validation=noisy_curve(), epochs=1, seed=0, **QUIET)
    nll, rmse = (posterior.history[f"validation_{name}"][-1] for name in ("nll", "rmse"))
    assert nll > best_nll(rmse) + 0.5


@pytest.mark.parametrize("method", [fb.BayesByBackprop, fb.MCDropout, fb.NodeNoise, fb.IVON, fb.VBLL])
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # the held-out data are noisier
def test_noise_that_is_larger_on_held_out_data_is_used(method):
    settings = {"lr": 1e-3} if method is fb.IVON else {}
    data = noisy_curve()
    posterior = method(epochs=2, **settings).fit(
        solved(*curve(500, 0)), batches(), validation=data, seed=0, **QUIET
    )
    assert has_best_scale(posterior, *data)
    assert not has_best_scale(posterior, *curve(500, 0))


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # the held-out data are noisier
def test_the_report_does_not_compare_noise_that_was_fitted_to_its_data():
    posterior = fb.NodeNoise(epochs=1).fit(
        solved(*curve(500, 0)), batches(), validation=noisy_curve(), seed=0, **QUIET
    )
    nll = fb.evaluate(posterior, noisy_curve(), seed=0, progress=False)["nll"]
    assert posterior.report.held_out_gain.after < -nll - 0.5


def test_draw_variance_term_lets_the_noise_follow_the_residuals_of_the_mean():
    """At the size of these residuals the gradient of the loss of single draws, without their spread, is zero."""
    generator = torch.Generator().manual_seed(0)
    residuals, *draws = torch.randn(3, 200_000, 1, generator=generator)
    likelihood = Gaussian()
    nn.init.constant_(likelihood.log_scale, math.log(0.5))
    first, second = (2.0 * draw for draw in draws)
    loss = -likelihood.log_prob(first, 0.5 * residuals).mean()
    total = loss + draw_variance_term(likelihood.log_scale, first, second)
    assert total.item() == loss.item()
    gradient_of_draws, gradient_of_mean = (
        torch.autograd.grad(each, likelihood.log_scale, retain_graph=True)[0].item() for each in (loss, total)
    )
    assert gradient_of_draws == pytest.approx(-16.0, rel=0.02)  # 1 - (0.25 + 4) / 0.25
    assert abs(gradient_of_mean) < 0.2


def test_the_noise_of_members_is_lowered_only_if_their_predictions_are_too_wide():
    x, y = curve(500, 0)
    net = solved(x, y)
    moved = deepcopy(net)
    with torch.no_grad():
        moved[2].bias.add_(0.04)
    for level, changes in ((math.log(residual(net, (x, y))), False), (0.0, True)):
        points = [fb.posterior.PointPosterior(one, Gaussian()) for one in (net, moved)]
        for point in points:
            nn.init.constant_(point.likelihood.log_scale, level)
        posterior = EnsemblePosterior.from_points(points)
        fit_noise_scale(posterior, batches(), 0, MAX_RATIO)
        assert bool((posterior.log_noise != level).all()) == changes
    assert posterior.log_noise.exp().max() < 1.2 * residual(net, (x, y))
    torch.testing.assert_close(posterior.likelihood.log_scale, posterior.log_noise[0])


def test_the_noise_scale_belongs_to_the_weights_that_early_stopping_restores():
    stop = EarlyStop("validation_rmse", patience=2)
    options = {"validation": curve(50, 3), "early_stop": stop, "seed": 0, **QUIET}
    posterior = fb.MLE(epochs=40, lr=0.3).fit(network(), batches(), **options)
    assert posterior.history.best_epoch < posterior.history.epochs
    expected = max(residual(posterior.model, data) for data in (curve(500, 0), curve(50, 3)))
    assert posterior.likelihood.log_scale.exp().item() == pytest.approx(expected, rel=1e-5)


def test_frozen_noise_stays():
    held = fb.likelihoods.Gaussian()
    nn.init.constant_(held.log_scale, -1.0)
    held.log_scale.requires_grad_(False)
    with pytest.warns(FlowBNNWarning) as caught:
        fitted = fb.MLE(epochs=1).fit(network(), batches(), likelihood=held, seed=0, **QUIET).likelihood
    assert of_kind(caught, "noise_level")[0].fields["level"] == pytest.approx(math.exp(-1.0))
    assert torch.equal(fitted.log_scale, held.log_scale)


@pytest.mark.parametrize("seed", [0, None])
def test_a_resumed_fit_equals_an_uninterrupted_one(tmp_path, seed):
    def run(epochs, **more):
        torch.manual_seed(3)
        loader = batches(size=60, drop_last=True, generator=torch.Generator().manual_seed(5))
        return fb.MAP(epochs=epochs).fit(network(), loader, seed=seed, **more, **QUIET).tensors()

    whole = run(3)
    run(2, checkpoint=tmp_path)
    for _ in range(2):  # the second run has nothing left to do
        again = run(3, checkpoint=tmp_path, resume=True)
        assert all(torch.equal(again[name], value) for name, value in whole.items())


@pytest.mark.slow
def test_a_fit_of_noise_to_a_trained_network_keeps_its_noise_scale():
    """The coverage varies between data sets, so its mean is tested."""
    coverages = []
    for seed in range(2):
        loader = TensorLoader(*curve(500, seed), batch_size=100, shuffle=True)
        model = fb.to_stochastic(solved(*curve(500, seed)), {"*": fb.noise.NormalAffine()})
        posterior = fb.fit(model, loader, epochs=50, seed=seed, **QUIET, validation=None)
        assert has_best_scale(posterior, *curve(500, seed))
        report = fb.evaluate(posterior, curve(2000, 1000 + seed), progress=False)
        assert report["nll"] < best_nll(report["rmse"]) + 0.05
        coverages.append(report["coverage_90"])
    assert 0.87 < sum(coverages) / len(coverages) < 0.93


@pytest.mark.parametrize(("unit", "center"), [(1e3, 0.0), (1e3, 5e3), (1e-3, 0.0)])
def test_targets_in_any_unit_are_learned_like_standardized_ones(unit, center):
    method, test = fb.MLE(epochs=8, lr=0.02), curve(200, 1, unit, center)
    (x, y), (_, seen) = test, curve(500, 0)
    loc, scale = seen.mean(), seen.std(correction=0)
    plain = TensorLoader(curve(500, 0)[0], (seen - loc) / scale, batch_size=50, shuffle=True)
    standardized = method.fit(network(), plain, seed=0, **QUIET)
    scaled = method.fit(network(), batches(unit, center), seed=0, **QUIET)
    expected, predicted = standardized.predict(x), scaled.predict(x)
    in_units = center + unit * (loc + scale * expected.mean)
    torch.testing.assert_close(predicted.mean, in_units, rtol=1e-3, atol=0.02 * unit)
    torch.testing.assert_close(predicted.std, unit * scale * expected.std, rtol=1e-2, atol=0)
    # the network returns the units of the targets
    torch.testing.assert_close(scaled.model(x), predicted.mean)
    low, high = predicted.interval(0.9)
    assert 0.8 < float(((low < y) & (y < high)).float().mean()) < 0.99


def test_no_standardization_without_need():
    fitted = fb.MLE(epochs=1).fit(network(), batches(), seed=0, **QUIET)
    assert list(fitted.model.state_dict()) == list(network().state_dict())
    trained = network()
    nn.init.constant_(trained[2].bias, 5e3)
    again = fb.MLE(epochs=1).fit(trained, batches(1e3, 5e3), seed=0, **QUIET)
    assert list(again.model.state_dict()) == list(network().state_dict())


def test_the_scale_of_the_outputs_is_saved_and_resumed(tmp_path):
    def run(epochs, **more):
        return fb.MAP(epochs=epochs).fit(network(), batches(1e3, 5e3), seed=0, **more, **QUIET)

    x, whole = curve(20, 1)[0], run(3)
    run(2, checkpoint=tmp_path)
    again = run(3, checkpoint=tmp_path, resume=True)
    assert all(torch.equal(again.tensors()[name], value) for name, value in whole.tensors().items())
    loaded = fb.load_posterior(whole.save(tmp_path / "point.safetensors"), network())
    assert torch.equal(loaded.predict(x).mean, whole.predict(x).mean)
    noisy = fb.fit(
        fb.to_stochastic(whole.model, {"*": fb.noise.NormalAffine()}),
        batches(1e3, 5e3),
        epochs=1,
        seed=0,
        **QUIET,
        validation=None,
    )
    assert torch.equal(noisy.model.flowbnn_loc, whole.model.flowbnn_loc)
    loaded = fb.load_posterior(noisy.save(tmp_path / "noise.safetensors"), network())
    assert torch.equal(loaded.predict(x, 4, seed=0).mean, noisy.predict(x, 4, seed=0).mean)
    assert fb.evaluate(noisy, curve(200, 1, 1e3, 5e3), progress=False)["rmse"] < 900


def test_standardization_with_predicted_noise():
    predicted = fb.likelihoods.Gaussian("predicted")
    fits = [
        fb.MLE(epochs=3, lr=0.02).fit(network(2), loader, likelihood=predicted, seed=0, **QUIET)
        for loader in (batches(), batches(1024.0))
    ]
    one, other = (fit.predict(curve(50, 1)[0]) for fit in fits)
    assert other.mean.std() > 500
    assert float((other.std / one.std).log2().median()) == pytest.approx(10.0, abs=0.5)


@pytest.mark.parametrize(
    "method",
    [
        fb.Laplace(structure="kron", layers="all", epochs=8, lr=0.1),
        pytest.param(fb.Laplace(structure="full", layers="last", epochs=8, lr=0.1), marks=pytest.mark.slow),
        fb.BayesByBackprop(epochs=3),
        fb.MNF(epochs=3),
        fb.SWAG(epochs=6),
    ],
    ids=lambda method: f"{method.name}-{getattr(method, 'structure', '')}",
)
def test_the_posterior_of_a_linear_model_scales_with_the_targets(method):
    """The units differ by a power of two, which scales all predictions exactly."""
    x = curve(200, 0)[0]
    y = 1.5 * x - 0.5 + 0.3 * torch.randn(200, 1, generator=torch.Generator().manual_seed(2))
    found = []
    for unit in (64.0, 4096.0):
        torch.manual_seed(0)
        layer = nn.Linear(1, 1)
        loader = TensorLoader(x, unit * y, batch_size=50, shuffle=True)
        posterior = method.fit(layer, loader, seed=0, **QUIET)
        found.append(posterior.predict(x, 32, seed=0))
    torch.testing.assert_close(found[1].mean, 64.0 * found[0].mean, rtol=1e-3, atol=4.0)
    torch.testing.assert_close(
        found[1].epistemic.sqrt(), 64.0 * found[0].epistemic.sqrt(), rtol=2e-2, atol=4.0
    )


@pytest.mark.parametrize("method", [fb.MLE(epochs=1), fb.DeepEnsemble(2, epochs=1)], ids=["mle", "ensemble"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_mean_has_the_shape_of_the_targets(method, shape, tmp_path):
    x, y = curve(40, 0)
    y = y.reshape(40, *shape)
    posterior = method.fit(network(), [(x, y)], seed=0, **QUIET)
    assert posterior.predict(x).mean.shape == y.shape
    loaded = fb.load_posterior(posterior.save(tmp_path / "posterior.safetensors"), network())
    assert loaded.predict(x).mean.shape == loaded.predict(x).interval().low.shape == y.shape
    assert fb.evaluate(posterior, (x, y), progress=False) == fb.evaluate(
        posterior, (x, y.reshape(40, 1)), progress=False
    )


@pytest.mark.parametrize("size", [1, 5])
def test_standardization_with_small_batches(size):
    x, y = curve(60, 0, 1e3, 5e3)
    fitted = fb.MLE(epochs=1, lr=0.02).fit(network(), TensorLoader(x, y, batch_size=size), seed=0, **QUIET)
    assert fitted.model.flowbnn_loc.item() == pytest.approx(y.mean().item())
    assert fitted.model.flowbnn_scale.item() == pytest.approx(y.std(correction=0).item(), rel=1e-4)
    few = [(x[None], y[None]) for x, y in zip(*curve(5, 0, 1e3, 5e3), strict=True)]
    assert fb.MLE(epochs=1).fit(network(), few, seed=0, **QUIET).model.flowbnn_scale.item() > 100


def with_noise(noise):
    return {"likelihood": Gaussian(noise=noise), "seed": 0, **QUIET}


METHODS = [
    fb.MLE(epochs=5, lr=0.02),
    fb.BayesByBackprop(epochs=5, lr=0.02),
    fb.NodeNoise(epochs=5, lr=0.02),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_warning_if_the_noise_scale_differs_from_the_residuals(method):
    """The residuals of such a short fit are 0.1 to 0.6."""
    for noise in (1.0, 0.005):
        with pytest.warns(FlowBNNWarning) as caught:
            method.fit(network(), batches(), **with_noise(noise))
        named = of_kind(caught, "noise_level")[0]
        assert named.fields["level"] == pytest.approx(noise)
        assert not 1 / 1.5 < named.fields["residuals"] / noise < 1.5


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_warning_if_the_noise_scale_agrees_with_the_residuals(method):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = method.fit(network(), batches(), seed=0, **QUIET)
        size = residual(fitted.sample(0), curve(500, 0))
        for factor in (0.8, 1.25):
            fb.MLE(epochs=0).fit(fitted.sample(0), batches(), **with_noise(factor * size))
    assert not of_kind(caught, "noise_level")


def test_members_with_and_without_standardization_make_one_ensemble():
    """Standardization is decided for each member, so that members may differ."""
    torch.manual_seed(0)
    inputs = torch.randn(16, 2)
    points = [fb.posterior.PointPosterior(torch.nn.Linear(2, 1), Gaussian(dim=1)) for _ in range(2)]
    set_output_scale(points[1].model, torch.tensor([5.0]), torch.tensor([2.0]))
    expected = torch.stack([point.model(inputs) for point in points]).mean(0)
    posterior = EnsemblePosterior.from_points(points)
    assert torch.allclose(posterior.predict(inputs).mean.reshape(-1, 1), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the predictive standard deviation")
def test_a_likelihood_object_is_fitted_like_its_name():
    net = solved(*curve(500, 0))
    level = fb.MLE(epochs=0).fit(net, batches(), seed=0, **QUIET).likelihood
    found = []
    for likelihood in ("gaussian", Gaussian(), level):
        noisy = fb.to_stochastic(net, {"*": fb.noise.NormalAffine()})
        posterior = fb.fit(
            noisy, batches(), epochs=2, likelihood=likelihood, seed=0, **QUIET, validation=None
        )
        found.append(torch.cat([value.flatten() for value in posterior.tensors().values()]))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


@pytest.mark.parametrize(
    "method",
    [
        fb.MLE(epochs=1),
        fb.Laplace(epochs=1),
        fb.Laplace(epochs=0),
        fb.HMC(epochs=1, samples=2, warmup=2, chains=2, steps=2),
        fb.SGLD(epochs=2, samples=2),
        fb.BayesByBackprop(epochs=1),
        fb.DeepEnsemble(2, epochs=1),
        fb.SWAG(epochs=4),
        fb.NodeNoise(epochs=1),
        fb.ModeEnsemble(2, steps=2, epochs=1),
    ],
    ids=lambda method: f"{method.name}-{method.epochs}",
)
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_frozen_noise_stays_in_every_method(method):
    held = Gaussian()
    nn.init.constant_(held.log_scale, -0.5)
    held.log_scale.requires_grad_(False)
    posterior = method.fit(network(), batches(), likelihood=held, seed=0, **QUIET)
    aleatoric = posterior.predict(curve(3, 1)[0], 2, seed=0).aleatoric
    torch.testing.assert_close(aleatoric, torch.full_like(aleatoric, math.exp(-1.0)))


@pytest.mark.parametrize("center", [1e6, 1e9])
def test_the_noise_scale_of_targets_far_from_zero(center):
    """The mean is at least a million standard deviations, which double precision resolves."""
    x, y = (tensor.double() for tensor in curve(500, 0))
    loader = TensorLoader(x, y + center, batch_size=50, shuffle=True)
    near = fb.MLE(epochs=3, lr=0.02).fit(
        network().double(), TensorLoader(x, y, batch_size=50), seed=0, **QUIET
    )
    far = fb.MLE(epochs=3, lr=0.02).fit(network().double(), loader, seed=0, **QUIET)
    size = float((y + center - far.model(x)).detach().square().mean().sqrt())
    assert far.likelihood.log_scale.exp().item() == pytest.approx(size, rel=1e-5)
    assert size < 2 * near.likelihood.log_scale.exp().item()
    exact = solved(x.float(), y.float()).double()
    with torch.no_grad():
        exact[2].bias.add_(center)
    level = fb.MLE(epochs=0).fit(exact, loader, seed=0, **QUIET).likelihood.log_scale.exp()
    assert level.item() == pytest.approx(residual(exact, (x, y + center)), rel=1e-5)
