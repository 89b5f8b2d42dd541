"""Tests of the figures: the plotted numbers are those of the library, axes are used, and no figure is left open."""

import math

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn import metrics, plots
from flowbnn.compare.candidates import CANDIDATES
from flowbnn.compare.comparison import Comparison
from flowbnn.compare.results import SeedResults
from flowbnn.density.target import TargetFit
from flowbnn.errors import FlowBNNError
from flowbnn.plots.style import binomial_band
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive, summarize
from flowbnn.sklearn import BayesianRegressor

matplotlib.use("Agg")
from matplotlib import pyplot as plt

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 1.5 * torch.randn(8, 200, 3, generator=GENERATOR, dtype=torch.float64)
TARGETS = CategoricalPredictive(LOGITS).sample(1, seed=0)[0]
CLASSES = CategoricalPredictive(LOGITS)
ADAPTIVE = CategoricalPredictive(LOGITS, 1 + torch.arange(200) % 8)
X = torch.linspace(-2.0, 2.0, 60, dtype=torch.float64)
SLOPES = 1.0 + 0.2 * torch.randn(10, 1, 1, generator=GENERATOR, dtype=torch.float64)
VALUES = GaussianPredictive(SLOPES * X[:, None], 0.1 + 0.05 * X[:, None].square())
Y = VALUES.sample(1, seed=0)[0]


@pytest.fixture(autouse=True)
def no_open_figures():
    """Closes all figures after a test, which must not leave more than the one it asked for."""
    plt.close("all")
    yield
    assert len(plt.get_fignums()) <= 1
    plt.close("all")


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


class Posterior(fb.Posterior):
    """Posterior of two networks of two inputs and three classes."""

    def outputs(self, inputs, samples, prediction):
        outputs = prediction.run(inputs)
        return torch.cat([outputs * (1 + index % 2) for index in samples])


def class_posterior() -> Posterior:
    torch.manual_seed(0)
    return Posterior(nn.Linear(2, 3), fb.likelihoods.Categorical())


def noise_posterior() -> fb.posterior.NoisePosterior:
    network = fb.to_stochastic(nn.Linear(4, 2), {"*": fb.noise.NormalAffine()})
    return fb.posterior.NoisePosterior(network, fb.likelihoods.Categorical())


def comparison() -> Comparison:
    values = {0: (0.5, 0.7, 0.6), 1: (0.3, 0.4, 0.2)}
    content = {
        (CANDIDATES[row].key, seed): {"values": {"nll": value, "accuracy": 1.0 - value}}
        for row, column in values.items()
        for seed, value in enumerate(column)
    }
    return Comparison(CANDIDATES[:2], SeedResults([0, 1, 2], content))


HISTORY = fb.training.History(
    [
        {"elbo": -3.0 + e, "kl": 6.0, "kl/a": 1.0, "kl/b": 2.0 + e, "kl/c": 3.0, "validation_elbo": -4.0}
        for e in range(3)
    ],
    best_epoch=1,
)
VAE = fb.vae.VAE((1, 4, 4), latent_dim=2, hidden=(8,))
IMAGES = torch.rand(5, 1, 4, 4, generator=GENERATOR)
CHAINS = torch.randn(3, 80, generator=GENERATOR)
FLOW = fb.flows.RealNVP(2)

FIGURES = {  # every public function, called as a user calls it
    "plot_class_map": lambda ax: class_posterior().plot_class_map(
        X.float().reshape(30, 2), samples=2, resolution=9, ax=ax
    ),
    "plot_comparison": lambda ax: comparison().plot(ax=ax),
    "plot_coverage": lambda ax: VALUES.plot_coverage(Y, ax=ax),
    "plot_density": lambda ax: fb.density.Density(FLOW).plot(samples=100, resolution=12, ax=ax),
    "plot_functions": lambda ax: VALUES.plot_functions(X, ax=ax),
    "plot_history": lambda ax: HISTORY.plot(ax=ax),
    "plot_intervals": lambda ax: VALUES.plot_intervals(X, data=(X, Y), ax=ax),
    "plot_kl": lambda ax: plots.plot_kl(HISTORY, ax=ax),
    "plot_novelty": lambda ax: CLASSES[:50].plot_novelty(CLASSES[50:], ax=ax),
    "plot_pairs": lambda ax: noise_posterior().plot_pairs(samples=30, ax=ax),
    "plot_pit": lambda ax: VALUES.plot_pit(Y, ax=ax),
    "plot_ranks": lambda ax: plots.plot_ranks(CHAINS, ax=ax),
    "plot_reconstructions": lambda ax: VAE.plot_reconstructions(IMAGES, ax=ax),
    "plot_reliability": lambda ax: CLASSES.plot_reliability(TARGETS, ax=ax),
    "plot_risk_coverage": lambda ax: CLASSES.plot_risk_coverage(TARGETS, ax=ax),
    "plot_samples": lambda ax: VAE.plot_samples(number=5, ax=ax),
    "plot_trace": lambda ax: plots.plot_trace(CHAINS, ax=ax),
}


def test_every_function_has_a_case():
    assert sorted(FIGURES) == [name for name in plots.__all__ if name.startswith("plot_")]


@pytest.mark.parametrize("name", FIGURES)
def test_figures_use_the_axes_and_both_styles(name):
    with plots.style(dark=True):
        figure, given = plt.subplots()
        before = dict(matplotlib.rcParams)
        assert FIGURES[name](given) is given
        assert dict(matplotlib.rcParams) == before
        assert plt.get_fignums() == [figure.number]
        figure.canvas.draw()
    plt.close("all")
    ax = FIGURES[name](None)  # a figure of its own, in the light style
    assert plt.get_fignums() == [ax.figure.number]
    assert plots.palette_of(ax) is plots.LIGHT
    assert ax.get_xlabel() or ax.get_title(loc="left") or ax.get_yticklabels()


def test_failures_leave_no_figure_and_no_style():
    before = dict(matplotlib.rcParams)
    for call in (
        lambda: VALUES.plot_intervals(X[:5]),
        lambda: VALUES.plot_functions(X, output=3),
        lambda: CLASSES.plot_risk_coverage(TARGETS, by="std"),
    ):
        with pytest.raises((FlowBNNError, IndexError)):
            call()
    assert plt.get_fignums() == []
    assert dict(matplotlib.rcParams) == before


# -------------------- classes


@pytest.mark.parametrize(
    "predictive", [CLASSES, ADAPTIVE, summarize(CLASSES)], ids=["all", "adaptive", "summary"]
)
def test_reliability_shows_the_bins_of_the_metric(predictive):
    ax = predictive.plot_reliability(TARGETS, bins=10, level=0.9)
    bars = [bar for bar in metrics.reliability(predictive.probabilities, TARGETS, 10) if bar["fraction"]]
    points = np.array([[bar["confidence"], bar["accuracy"]] for bar in bars])
    np.testing.assert_allclose(ax.collections[-1].get_offsets(), points, rtol=1e-12)
    error = metrics.calibration_error(predictive.probabilities, TARGETS, 10)
    assert texts(ax) == [f"accuracy, ECE {error:.3f}", "90 % of calibrated networks"]
    for patch, bar in zip(ax.patches, bars, strict=True):
        low, high = patch.get_y(), patch.get_y() + patch.get_height()
        number = round(200 * bar["fraction"])
        chances = [
            math.comb(number, k) * bar["confidence"] ** k * (1 - bar["confidence"]) ** (number - k)
            for k in range(number + 1)
        ]
        assert (patch.get_x(), patch.get_width()) == pytest.approx((bar["low"], 0.1))
        for end, tail in (
            (low, 0.05),
            (high, 0.95),
        ):  # the smallest k whose distribution function reaches the level
            expected = int((np.cumsum(chances) < tail - 1e-12).sum())
            assert end == pytest.approx(expected / number)


def test_reliability_of_positions_counts_those_with_a_target():
    prediction = CategoricalPredictive(LOGITS.unflatten(1, (50, 4)))
    targets = TARGETS.unflatten(0, (50, 4)).clone()
    targets[:, 0] = -100
    ax = prediction.plot_reliability(targets, bins=1)
    low, high = binomial_band(0.95, 150, float(prediction.confidence[:, 1:].mean()))
    (patch,) = ax.patches
    assert (patch.get_y(), patch.get_y() + patch.get_height()) == pytest.approx((float(low), float(high)))
    plots.close(ax)
    ax = prediction.plot_reliability(prediction.probabilities, bins=1)  # soft labels
    low, high = binomial_band(0.95, 200, float(prediction.confidence.mean()))
    (patch,) = ax.patches
    assert (patch.get_y(), patch.get_y() + patch.get_height()) == pytest.approx((float(low), float(high)))


@pytest.mark.parametrize(
    "predictive", [CLASSES, ADAPTIVE, summarize(CLASSES)], ids=["all", "adaptive", "summary"]
)
def test_risk_coverage_is_the_curve_of_the_metric(predictive):
    ax = predictive.plot_risk_coverage(TARGETS, by="epistemic")
    curve = metrics.risk_coverage(predictive.epistemic, predictive.labels == TARGETS)
    wrong, ideal, line = ax.lines
    np.testing.assert_allclose(line.get_ydata(), 100 * curve.risk)
    assert texts(ax)[-1] == f"epistemic: AURC {100 * curve.area:.2f} %"
    correct = predictive.labels == TARGETS
    assert wrong.get_ydata()[0] == pytest.approx(
        100 * (1 - metrics.accuracy(predictive.probabilities, TARGETS))
    )
    best = metrics.risk_coverage((~correct).double() + 1e-6 * torch.arange(200), correct)
    np.testing.assert_allclose(ideal.get_ydata(), 100 * best.risk, atol=1e-9)
    assert predictive.plot_risk_coverage(TARGETS, ax=ax, label="other") is ax
    assert len(ax.lines) == 4  # one more line, without further references


@pytest.mark.parametrize(("known", "novel"), [(CLASSES, ADAPTIVE), (summarize(CLASSES), summarize(ADAPTIVE))])
def test_novelty_shows_all_inputs_and_the_auroc(known, novel):
    ax = known.plot_novelty(novel, by="epistemic", bins=7)
    area = metrics.novelty_auroc(known.epistemic, novel.epistemic)
    assert ax.get_title(loc="left") == f"AUROC {area:.3f}"
    shares = [patch.get_data().values for patch in ax.patches[::2]]
    edges = ax.patches[0].get_data().edges
    for share, values in zip(shares, (known.epistemic, novel.epistemic), strict=True):
        expected = torch.histogram(values, torch.as_tensor(edges)).hist / 2.0
        np.testing.assert_allclose(share, expected)


def test_class_map_shows_the_predictions_on_a_grid():
    posterior, points = class_posterior(), torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    ax = posterior.plot_class_map(points, targets=torch.tensor([0, 2]), samples=2, margin=0.5, resolution=5)
    assert tuple(ax.images[0].get_extent()) == (-0.5, 1.5, -1.0, 3.0)
    picture = ax.images[0].get_array()
    corner = posterior.predict(torch.tensor([[1.5, -1.0]]), 2, seed=0)  # right and below
    strength = (float(corner.confidence) - 1 / 3) / (2 / 3)
    colour = np.array(matplotlib.colors.to_rgb(plots.LIGHT.colour(int(corner.labels))))
    np.testing.assert_allclose(picture[0, -1], 1.0 - strength * 0.85 * (1.0 - colour), atol=1e-6)
    assert texts(ax) == ["class 0", "class 2"]
    with pytest.raises(FlowBNNError) as error:
        posterior.plot_class_map(torch.zeros(4, 3))
    assert (error.value.kind, error.value.argument) == ("shape", "inputs")


# -------------------- real values


def test_intervals_are_those_of_the_predictive_in_the_order_of_the_inputs():
    order = torch.randperm(60, generator=GENERATOR)
    ax = VALUES[order].plot_intervals(X[order], masses=[0.5, 0.8])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), VALUES.mean[:, 0])
    assert texts(ax) == ["mean", "80 % interval", "50 % interval"]
    for band, mass in zip(ax.collections, (0.8, 0.5), strict=True):
        vertices = band.get_paths()[0].vertices[1:61]
        np.testing.assert_allclose(vertices[:, 1], VALUES.interval(mass).low[:, 0], rtol=1e-9)


def test_functions_are_the_samples_that_all_inputs_have():
    ax = VALUES.plot_functions(X, number=4)
    for line, values in zip(ax.lines, VALUES.samples[:4, :, 0], strict=False):
        np.testing.assert_allclose(line.get_ydata(), values)
    plots.close(ax)
    adaptive = GaussianPredictive(SLOPES * X[:, None], 0.1, 3 + torch.arange(60) % 8)
    assert len(adaptive.plot_functions(X).lines) == 4  # three samples and the mean
    plt.close("all")
    ax = CLASSES[:60].plot_functions(X, output=1, number=2)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), CLASSES.samples[1, :60, 1])


def test_figures_of_the_other_kind_are_refused():
    posterior = fb.posterior.PointPosterior(nn.Linear(2, 1), fb.likelihoods.Gaussian(0.1))
    for call in (
        lambda: plots.plot_reliability(VALUES, TARGETS),
        lambda: plots.plot_risk_coverage(VALUES, TARGETS),
        lambda: plots.plot_intervals(CLASSES, X),
        lambda: plots.plot_pit(CLASSES, TARGETS),
        lambda: posterior.plot_class_map(torch.zeros(3, 2), resolution=3),
    ):
        with pytest.raises(FlowBNNError) as error:
            call()
        assert (error.value.kind, error.value.argument) == ("unsupported", "predictive")


@pytest.mark.parametrize("predictive", [VALUES, summarize(VALUES, Y)], ids=["samples", "summary"])
def test_pit_and_coverage_are_those_of_the_distribution_function(predictive):
    ax = predictive.plot_pit(Y, bins=5, level=0.8)
    counts = torch.histc(VALUES.cdf(Y), 5, 0.0, 1.0)
    heights = [patch.get_height() for patch in ax.patches[:5]]
    np.testing.assert_allclose(heights, 100 * counts / 60)
    low, high = binomial_band(0.8, 60, 0.2)
    band = ax.patches[5]
    assert (band.get_y(), band.get_height()) == pytest.approx((100 * float(low), 100 * float(high - low)))
    plots.close(ax)
    ax = predictive.plot_coverage(Y)
    observed = dict(zip(np.round(ax.lines[-1].get_xdata(), 6), ax.lines[-1].get_ydata(), strict=True))
    assert observed[90.0] == pytest.approx(100 * VALUES.evaluate(Y)["coverage_90"])
    interval = VALUES.interval(0.5)
    assert observed[50.0] == pytest.approx(100 * metrics.interval_coverage(*interval, Y))


def test_long_loaders_without_samples_are_plotted():
    posterior, loader = class_posterior(), [(torch.randn(20, 2), torch.arange(20) % 3)] * 3
    prediction, targets = posterior.predict_with_targets(loader, 2, keep_samples=False, progress=False)
    ax = prediction.plot_reliability(targets)
    assert isinstance(prediction, fb.predictive.PredictionSummary)
    plots.close(ax)
    with pytest.raises(FlowBNNError) as error:
        summarize(VALUES).plot_functions(X)
    assert error.value.argument == "keep_samples"


# -------------------- densities and posteriors


def test_density_of_one_number_is_a_line():
    normal = torch.distributions.Normal(torch.tensor(2.0), torch.tensor(0.5))
    ax = plots.plot_density(normal, samples=500, resolution=50)
    x, y = ax.lines[0].get_data()
    np.testing.assert_allclose(y, normal.log_prob(torch.as_tensor(x)).exp(), rtol=1e-5)
    histogram = ax.patches[0].get_data()
    assert float((histogram.values * np.diff(histogram.edges)).sum()) == pytest.approx(1.0, abs=0.01)


def test_density_of_two_numbers_has_regions_of_given_mass():
    normal = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1)
    ax = plots.plot_density(normal, torch.zeros(5, 2), samples=4000, masses=(0.5, 0.9), resolution=30)
    levels = ax.collections[0].levels[:2]
    radii = [-2.0 * math.log(1 - mass) for mass in (0.9, 0.5)]  # squared radii of the regions, in closed form
    expected = [-0.5 * radius - math.log(2 * math.pi) for radius in radii]
    # four standard errors of the quantile of 4,000 draws
    np.testing.assert_allclose(levels, expected, atol=0.12)
    assert texts(ax) == ["data", "samples"]
    plots.close(ax)
    with pytest.raises(FlowBNNError) as error:
        plots.plot_density(fb.flows.RealNVP(3), samples=4)
    assert (error.value.kind, error.value.argument) == ("shape", "density")


def test_density_takes_fits_and_contexts():
    conditional = fb.density.Density(fb.flows.MAF(1, context_dim=2), torch.tensor([5.0]), torch.tensor([2.0]))
    context = torch.tensor([[0.3, -0.2]])
    ax = conditional.plot(context=context, samples=50, resolution=10)
    x, y = ax.lines[0].get_data()
    expected = conditional.log_prob(torch.as_tensor(x[:, None]).float(), context.expand(10, 2)).exp()
    np.testing.assert_allclose(y, expected.detach(), rtol=1e-4)
    plots.close(ax)
    fit = TargetFit(FLOW, lambda x: -x.square().sum(-1), HISTORY)
    assert fit.plot(samples=20, resolution=5).get_xlabel() == "x₁"


def test_pairs_are_draws_of_the_posterior():
    posterior = noise_posterior()
    ax = posterior.plot_pairs(units=(0, 3), samples=25, seed=4)
    draws = posterior.draws(25, 4)[""]
    np.testing.assert_allclose(
        ax.child_axes[1].collections[0].get_offsets(), draws[:, [0, 3]].detach(), rtol=1e-6
    )
    plots.close(ax)
    network = fb.to_stochastic(torch.nn.Linear(2, 2), {"*": fb.noise.NormalAffine()})
    ax = plots.plot_pairs(fb.posterior.NoisePosterior(network, fb.likelihoods.Categorical()), samples=25)
    assert len(ax.child_axes) == 3  # both units, where the default of three is too many
    plots.close(ax)
    for options, argument in (
        ({"layer": "fc"}, "layer"),
        ({"units": (0, 9)}, "units"),
        ({"units": (0,)}, "units"),
    ):
        with pytest.raises(FlowBNNError) as error:
            posterior.plot_pairs(**options)
        assert error.value.argument == argument


def test_traces_and_ranks_of_chains():
    x = torch.linspace(-1, 1, 12)[:, None]
    method = fb.HMC(samples=20, warmup=10, chains=2, steps=3, epochs=0)
    posterior = method.fit(
        nn.Linear(1, 1), [(x, 2 * x)], likelihood=fb.likelihoods.Gaussian(0.1), seed=0, progress=False
    )
    ax = posterior.plot_trace(name="weight")
    for line, values in zip(ax.lines, posterior.chains["weight"][..., 0, 0], strict=True):
        np.testing.assert_allclose(line.get_ydata(), values)
    assert ax.get_ylabel() == "weight[0]"
    plots.close(ax)
    ax = posterior.plot_trace()
    np.testing.assert_allclose(ax.lines[1].get_ydata(), -posterior.record["energy"][1])
    plots.close(ax)
    ax = posterior.plot_ranks(bins=4)
    order = posterior.record["energy"].neg().flatten().argsort().argsort().reshape(2, 20)
    counts = [torch.histc(chain.double(), 4, 0, 40) / 5 for chain in order]
    heights = [patch.get_height() for patch in ax.patches if isinstance(patch.get_x(), float)]
    np.testing.assert_allclose(heights[:4], counts[0])
    with pytest.raises(FlowBNNError) as error:
        posterior.plot_trace(name="wieght")
    assert (error.value.kind, error.value.argument) == ("name", "name")


def test_history_shows_the_objective_and_the_kl_of_layers():
    ax = HISTORY.plot()
    assert ax.lines[0].get_ydata().tolist() == HISTORY["elbo"]
    assert ax.lines[2].get_xdata()[0] == 2  # epochs are counted from one
    assert texts(ax) == ["training", "validation", "best epoch"]
    plots.close(ax)
    posterior = Posterior(nn.Linear(2, 3), fb.likelihoods.Categorical(), HISTORY)
    ax = posterior.plot_kl(max_layers=1)
    lines = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert lines == {"total": [6.0] * 3, "b": [2.0, 3.0, 4.0], "2 other layers": [4.0] * 3}
    plots.close(ax)
    for call in (class_posterior().plot_history, fb.training.History([{"loss": 1.0}]).plot_kl):
        with pytest.raises(FlowBNNError) as error:
            call()
        assert error.value.kind == "history"


def test_comparison_shows_means_and_deviations_with_the_best_on_top():
    ax = comparison().plot()
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == [CANDIDATES[1].label, CANDIDATES[0].label]
    line, _, (bars,) = ax.containers[0]
    np.testing.assert_allclose(line.get_xdata(), [0.3, 0.6])
    assert line.get_ydata()[0] > line.get_ydata()[1]
    np.testing.assert_allclose([segment[1, 0] - segment[0, 0] for segment in bars.get_segments()], [0.2, 0.2])
    plots.close(ax)
    equal = SeedResults([0, 1], {(CANDIDATES[0].key, seed): {"values": {"nll": 0.5}} for seed in (0, 1)})
    ax = Comparison(CANDIDATES[:1], equal).plot()  # seeds that agree are still several seeds
    assert texts(ax) == ["one seed", "mean ± 1 standard deviation"]
    plots.close(ax)
    ax = comparison().plot("accuracy")
    np.testing.assert_allclose(ax.containers[0][0].get_xdata(), [0.7, 0.4])
    plots.close(ax)
    with pytest.raises(FlowBNNError) as error:
        comparison().plot("rmse")
    assert error.value.argument == "metric"


def test_reconstructions_and_samples_of_a_vae():
    ax = VAE.plot_reconstructions(IMAGES, number=3)
    picture = ax.images[0].get_array()
    np.testing.assert_allclose(picture[:4, 4:8], IMAGES[1, 0], rtol=1e-6)
    np.testing.assert_allclose(picture[4:, 8:], VAE.reconstruct(IMAGES)[2, 0], rtol=1e-5)
    plots.close(ax)
    ax = VAE.plot_samples(number=5, seed=3)
    assert ax.images[0].get_array().shape == (8, 12)
    np.testing.assert_allclose(
        ax.images[0].get_array()[:4, :4], VAE.sample(5, seed=3, mean=True)[0, 0].detach(), rtol=1e-6
    )
    plots.close(ax)
    vectors = fb.vae.VAE((6,), latent_dim=2, hidden=(8,))
    assert len(vectors.plot_reconstructions(torch.rand(2, 6)).lines) == 4


def test_estimators_and_posteriors_in_place_of_predictions_are_explained():
    estimator = BayesianRegressor(epochs=1).fit(X.numpy()[:, None], Y.numpy().ravel())
    posterior = estimator.posterior_
    for call, advice in (
        (lambda: plots.plot_coverage(estimator, Y), "predict_dist"),
        (lambda: plots.plot_intervals(posterior, X), "predict(inputs)"),
        (lambda: plots.plot_functions(estimator, X), "predict_dist"),
        (lambda: plots.plot_class_map(estimator, torch.zeros(3, 2)), "posterior_"),
    ):
        with pytest.raises(FlowBNNError) as error:
            call()
        assert advice in str(error.value)
