"""Tests of a flow on top of a Gaussian posterior of the noise."""

import math

import pytest
import torch
from tests.calibrate.problems import LinearRegression
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.calibrate.flow import FlowFit, fit_flow, score
from flowbnn.calibrate.problem import CalibrationProblem, HeldOutData
from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.errors import FlowBNNError
from flowbnn.noise import Dropout, NormalAffine, NormalCoupling, NormalPlanar, Recipe
from flowbnn.noise.joint import independent_vectors

OPTIONS = {"folds": 0, "progress": False, "accelerator": "cpu"}


def fit_flow_to_few_examples(
    seed: int, prior_scale: float, recipe: Recipe, precise: bool = True, **training: float
) -> tuple[FlowFit, fb.posterior.NoisePosterior, list[tuple[Tensor, Tensor]]]:
    """Fits a flow to so few examples that the posterior of the noise is not Gaussian if the prior is wide.

    Returns:
        The fit, the Gaussian posterior it started from, and the data.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 2, generator=generator)
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
    torch.manual_seed(seed)
    network = fb.models.MLP(2, (3,), 2).requires_grad_(False)
    data = HeldOutData(network, inputs, targets, fb.likelihoods.Categorical())
    problem = CalibrationProblem(data, flow=recipe, prior_scale=prior_scale, structure="full", seed=seed)
    gaussian_fit = problem.fit_gaussian(torch.arange(len(targets)), "fixed", precise=precise)
    gaussian, start = (
        problem.gaussian_posterior(gaussian_fit, model) for model in (problem.network, problem.flow_network)
    )
    fit = fit_flow(gaussian, start, inputs, targets, seed=seed, **training)  # type: ignore[arg-type]
    return fit, gaussian, [(inputs, targets)]


def test_flow_is_never_worse_than_its_gaussian():
    """Short training with a large learning rate makes some flows worse. They are dropped."""
    num_better = 0
    for seed in range(4):
        recipe = NormalPlanar(4) if seed % 2 else NormalCoupling()
        training = {"steps": 6, "draws": 8, "lr": 0.05}
        fit, gaussian, data = fit_flow_to_few_examples(seed, 0.5, recipe, precise=False, **training)
        num_better += fit.better
        assert (fit.posterior is gaussian) != fit.better
        ours, theirs = (fb.diagnostics.pareto_k(q, data, 400, seed=99) for q in (fit.posterior, gaussian))
        assert ours.elbo > theirs.elbo - 3 * math.hypot(ours.elbo_error, theirs.elbo_error)
    assert num_better < 4  # otherwise the test checks nothing


@pytest.mark.slow
def test_flow_gains_if_the_posterior_is_not_gaussian():
    fit, gaussian, data = fit_flow_to_few_examples(1, 2.0, NormalCoupling(), steps=80, draws=32, lr=0.02)
    assert fit.better
    ours, theirs = (fb.diagnostics.pareto_k(q, data, 2000, seed=99) for q in (fit.posterior, gaussian))
    assert ours.elbo > theirs.elbo + 2 * math.hypot(ours.elbo_error, theirs.elbo_error)
    # half of the gap of the best Gaussian
    assert ours.evidence - ours.elbo < 0.5 * (ours.evidence - theirs.elbo)


def test_gradient_has_no_variance_at_the_exact_posterior():
    """For a linear network with an identity flow, the gradients of target and approximation cancel for every draw."""
    problem = LinearRegression()
    model = fb.to_stochastic(problem.network.requires_grad_(False), {"*": NormalCoupling()}, joint="full")
    posterior = fb.posterior.NoisePosterior(model.double(), problem.likelihood)
    ((vector, _),) = independent_vectors(posterior.model)
    vector.set_gaussian(problem.mean, [torch.linalg.cholesky(problem.precision.inverse())])
    target = NoiseTarget(posterior, [(problem.inputs.double(), problem.targets.double())])
    draws, _ = vector.posterior().rsample_and_log_prob((5,))
    _, slopes = target.gradient(draws.detach())
    assert slopes.abs().max() > 1.0
    torch.testing.assert_close(slopes, score(vector, draws), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("unrefined")
@pytest.mark.parametrize("name", ["radial", "nsf"])
def test_calibrate_takes_a_flow_by_name(name, memorized, monkeypatch):
    monkeypatch.setitem(fit_flow.__kwdefaults__, "steps", 2)
    data = [(memorized.inputs[:40], memorized.targets[:40])]
    report = fb.calibrate(memorized.network, data, flow=name, **OPTIONS).calibration
    assert math.isfinite(report.flow_gain)
    assert (report.flow is not None) == (report.flow_gain > 2 * report.flow_error)
    if report.flow is not None:
        assert report.flow in str(report)


@pytest.mark.parametrize("structure", ["full", "factorized"])
@pytest.mark.parametrize(
    "flow", ["river", Dropout(), Dropout(site="channel"), NormalAffine(), "gaussian"], ids=str
)
def test_noise_without_a_flow_is_refused(flow, structure):
    data = [(torch.randn(30, 2), torch.arange(30) % 2)]
    with pytest.raises(FlowBNNError) as caught:
        fb.calibrate(nn.Linear(2, 2), data, flow=flow, structure=structure, **OPTIONS)
    assert caught.value.argument == "flow"


@pytest.mark.usefixtures("unrefined")
@pytest.mark.parametrize("flow", ["nsf", "planar"])
def test_flow_of_each_layer_starts_at_its_gaussian(flow, monkeypatch):
    monkeypatch.setitem(fit_flow.__kwdefaults__, "steps", 0)
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).requires_grad_(False)
    data = [(x, network(x) + 0.3 * torch.randn(40, 1))]
    options = {**OPTIONS, "structure": "factorized", "prior": "fixed"}
    report = fb.calibrate(network, data, flow=flow, **options).calibration
    assert abs(report.flow_gain) < 0.2 + 3 * report.flow_error
