"""Stochastic gradient Langevin dynamics: its chain against the stationary law of the discretised one, its schedule, its snapshots."""

import warnings

import pytest
import torch
from chain_problems import regression
from small_problem import QUIET, blobs, loader, network
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.diagnostics import standard_error
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.likelihoods import Gaussian
from flowbnn.methods.sgld import Langevin, Plan, Snapshots


def stationary(rate: float, number: int, covariance: torch.Tensor) -> torch.Tensor:
    """The covariance that steps of this size come to: S (1 - K / 2)^-1, K = rate / number S^-1."""
    step = rate / number * torch.linalg.inv(covariance)
    return covariance @ torch.linalg.inv(torch.eye(len(step), dtype=torch.float64) - 0.5 * step)


def test_a_conjugate_regression_with_the_bias_of_its_step_size():
    inputs, targets, mean, covariance = regression()
    method = fb.SGLD(
        lr=0.1, epochs=8, samples=750, cycles=0, exploration=0.06, preconditioned=False, prior_scale=2.0
    )
    known = {"likelihood": fb.likelihoods.Gaussian(noise=0.5), "num_data": len(inputs), "seed": 0}
    posterior = method.fit(nn.Linear(2, 1).double(), [(inputs, targets)] * 100, **known, **QUIET)
    draws = posterior.draws(750)
    draws = torch.cat([draws["weight"].flatten(1), draws["bias"]], 1)[None]
    expected = stationary(0.1, len(inputs), covariance)
    assert (expected.diagonal() / covariance.diagonal()).max() > 1.1  # a bias that is there to be seen
    assert ((draws.mean((0, 1)) - mean).abs() < 4 * standard_error(draws)).all()
    away = draws - mean
    products = away[..., :, None] * away[..., None, :]
    found, error = products.mean((0, 1)), standard_error(products)
    assert ((found - expected).abs() < 4 * error).all()
    assert ((found - 0.5 * expected).abs() > 6 * error).any()  # a variance that is half of it would be seen


def test_with_small_steps_the_preconditioned_chain_samples_the_posterior():
    """A Gaussian of scales 0.05 and 1 with exact gradients, where a preconditioner that follows the chain has 1.7 of the variance."""
    number, chains, rate = 50, 400, 0.01
    scales = torch.tensor([0.05, 1.0], dtype=torch.float64).expand(chains, 2)
    start = torch.randn(chains, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = nn.Parameter(scales * start)
    engine = Langevin([weights], lr=rate, num_data=number, damping=1e-8)
    torch.manual_seed(0)
    kept = []
    for step in range(3000):
        weights.grad = weights.detach() / scales**2 / number
        engine.adapts = step < 1000
        engine.step()
        if step >= 1500 and step % 10 == 0:
            kept.append(weights.detach().clone())
    metric = 1.0 / (1e-8 + engine.state[weights]["square"].sqrt())
    of_the_step = 1.0 / (
        1.0 - 0.5 * rate * metric / scales**2 / number
    )  # the variance that steps of this size come to
    ratio = torch.stack(kept).square().mean(0) / scales**2 / of_the_step
    error = ratio.std(0) / chains**0.5
    assert ((ratio.mean(0) - 1.0).abs() < 4 * error).all()
    assert (error < 0.05).all()


@pytest.mark.parametrize("preconditioned", [False, True])
def test_with_cycles_the_spread_is_that_of_the_posterior(preconditioned):
    """It was 0.34 to 0.58 of the exact standard deviation, when a descent without noise and steps that vanish came before."""
    inputs, targets, mean, covariance = regression()
    chains, number, plan = 200, len(inputs), Plan(2000, cycles=4, exploration=0.5, samples=40)
    design = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    weights = nn.Parameter(mean.repeat(chains, 1))  # without any spread
    rate, kept = (0.01 if preconditioned else 0.05), []
    engine = Langevin([weights], rate, number, 1.0 / (4.0 * number), preconditioned)
    torch.manual_seed(0)
    for step in range(2000):
        if step in plan.kept:
            kept.append(weights.detach().clone())
        engine.param_groups[0]["lr"], engine.adapts = rate * plan.rate(step), not plan.samples_at(step)
        weights.grad = (weights.detach() @ design.T - targets.flatten()) @ design / 0.5**2 / number
        engine.step()
    spread = (torch.stack(kept) - mean).square().mean((0, 1)).sqrt() / covariance.diagonal().sqrt()
    assert (spread > 0.93).all()
    assert (spread < 1.10).all()


def test_the_update_is_the_formula():
    weights = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    engine = Langevin([weights], lr=0.1, num_data=10, weight_decay=0.5, damping=0.2)
    weights.grad = torch.tensor([0.3, 0.0], dtype=torch.float64)
    torch.manual_seed(5)
    shake = torch.randn(2, dtype=torch.float64)
    torch.manual_seed(5)
    engine.step()
    metric = 1.0 / (0.2 + torch.tensor([0.3, 0.0], dtype=torch.float64))  # the first square has no memory
    drift = torch.tensor([0.3 + 0.5, -1.0], dtype=torch.float64)
    expected = (
        torch.tensor([1.0, -2.0]).double() - 0.1 * metric * drift + (2 * 0.1 * metric / 10).sqrt() * shake
    )
    assert torch.allclose(weights.detach(), expected, atol=1e-12)


def test_temperature_nought_only_descends():
    weights = nn.Parameter(torch.ones(3))
    engine = Langevin([weights], lr=0.1, num_data=10, preconditioned=False)
    engine.temperature, weights.grad = 0.0, torch.full((3,), 2.0)
    engine.step()
    assert torch.allclose(weights.detach(), torch.full((3,), 0.8))


@pytest.mark.parametrize("cycles", [0, 1, 4])
@pytest.mark.parametrize(("total", "samples"), [(120, 20), (101, 7), (40, 4)])
def test_plans_keep_as_many_as_asked_in_the_sampling_parts(cycles, total, samples):
    plan = Plan(total, cycles, exploration=0.5, samples=samples)
    assert len(plan.kept) == samples
    assert total in plan.kept
    for step in plan.kept:  # the state after so many steps; its last step had noise
        assert plan.samples_at(step - 1)
        assert step > total / 2 or cycles > 1
    rates = [plan.rate(step) for step in range(total)]
    assert max(rates) == rates[0] == 1.0
    assert sum(rate == 1.0 for rate in rates) == {0: total, 1: 1, 4: 4}[cycles]


def test_snapshots_come_from_several_cycles_and_predict():
    data = blobs()
    posterior = fb.SGLD(epochs=10, samples=8, cycles=2, prior_scale=0.5).fit(
        network(), loader(data), seed=0, **QUIET
    )
    assert len(posterior) == 8
    assert posterior.schedule["steps"][-1] == 60
    assert sum(step <= 30 for step in posterior.schedule["steps"]) == 4
    assert fb.evaluate(posterior, loader(data), progress=False)["accuracy"] > 0.9
    first = posterior.members["0.weight"]
    assert all(not torch.equal(first[i], first[i + 1]) for i in range(7))


@pytest.mark.parametrize("die_at", [31, 57])
def test_a_run_that_is_killed_keeps_its_snapshots(tmp_path, monkeypatch, die_at):
    method = fb.SGLD(epochs=10, samples=10, cycles=2, exploration=0.3, prior_scale=0.5)
    whole = method.fit(network(), loader(), seed=0, **QUIET)
    look = Snapshots.look

    def dying(self, step):
        if step == die_at:
            raise RuntimeError("killed")
        look(self, step)

    monkeypatch.setattr(Snapshots, "look", dying)
    kept = {"checkpoint": tmp_path, "checkpoint_every": 7, "resume": True}
    with pytest.raises(RuntimeError, match="killed"):
        method.fit(network(), loader(), seed=0, **kept, **QUIET)
    monkeypatch.setattr(Snapshots, "look", look)
    for _ in range(2):  # the second time all is done and only read
        resumed = method.fit(network(), loader(), seed=0, **kept, **QUIET)
        for name, value in whole.members.items():
            assert torch.equal(value, resumed.members[name])


def test_dropout_is_off_while_it_samples_and_back_afterwards():
    rates = []

    class Watched(nn.Dropout):
        def forward(self, x):
            rates.append(self.p)
            return super().forward(x)

    net = nn.Sequential(nn.Linear(4, 8), Watched(0.4), nn.Linear(8, 3))
    posterior = fb.SGLD(epochs=2, samples=2, cycles=1).fit(net, loader(), seed=0, **QUIET)
    assert set(rates[1:]) == {0.0}
    assert posterior.model[1].p == 0.4


def test_statistics_of_batch_norm_are_those_of_each_snapshot():
    data = blobs()
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    posterior = fb.SGLD(epochs=6, samples=4, cycles=2).fit(net, loader(data), seed=0, **QUIET)
    for index in range(4):
        one = posterior.member(index)
        with torch.no_grad():
            hidden = one[0](data.tensors[0])
        assert torch.allclose(one[1].running_mean, hidden.mean(0), atol=1e-4)


def test_the_noise_of_a_regression_is_sampled_with_the_weights(tmp_path):
    """The posterior of the log noise by quadrature, the weights integrated out in closed form."""
    inputs, targets, _, _ = regression()
    likelihood = fb.likelihoods.Gaussian()
    nn.init.constant_(likelihood.log_scale, center := -0.5)
    method = fb.SGLD(
        lr=0.03, epochs=20, samples=1500, cycles=0, exploration=0.25, preconditioned=False, prior_scale=2.0
    )
    known = {"likelihood": likelihood, "num_data": len(inputs), "seed": 0}
    posterior = method.fit(nn.Linear(2, 1).double(), [(inputs, targets)] * 100, **known, **QUIET)
    grid = center + torch.linspace(-3, 3, 2001, dtype=torch.float64)
    design = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    one = torch.eye(len(inputs), dtype=torch.float64)
    spread = grid.exp().square()[:, None, None] * one + 4.0 * design @ design.T
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(targets[:, 0]), spread)
    weight = (normal.log_prob(targets[:, 0]) - 0.5 * (grid - center).square()).softmax(0)
    mean = (weight * grid).sum()
    variance = (weight * (grid - mean).square()).sum()
    levels = posterior.log_noise.double()[None]
    assert ((levels.mean((0, 1)) - mean).abs() < 4 * standard_error(levels)).all()
    squares, expected = (levels - mean).square(), stationary(0.03, len(inputs), variance.reshape(1, 1))[0]
    assert ((squares.mean((0, 1)) - expected).abs() < 4 * standard_error(squares)).all()
    assert standard_error(squares).item() < 0.2 * variance
    predictive = posterior.predict(inputs[:3])
    assert torch.allclose(predictive.sample_variances[:, 0, 0], (2 * levels[0, :, 0]).exp(), rtol=1e-5)
    loaded = fb.load_posterior(posterior.save(tmp_path / "sgld.safetensors"), nn.Linear(2, 1).double())
    assert torch.equal(loaded.predict(inputs[:3]).sample_variances, predictive.sample_variances)


def test_a_walk_that_leaves_the_data_is_warned_of():
    """Steps of three times the stable size on a regression whose curvature is known: the log-likelihood falls without end."""
    inputs = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    loader = TensorLoader(inputs, 2.0 * inputs, batch_size=64)
    options = {"epochs": 12, "samples": 2, "cycles": 0, "preconditioned": False}
    stable = 2.0 / float(inputs.square().mean())
    for lr, left in ((3.0 * stable, True), (0.1 * stable, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FlowBNNWarning)
            torch.manual_seed(0)
            likelihood = Gaussian(noise=1.0)
            fb.SGLD(lr=lr, **options).fit(
                nn.Linear(1, 1), loader, likelihood=likelihood, seed=0, progress=False
            )
        kinds = [one.message.fields.get("kind") for one in caught if isinstance(one.message, FlowBNNWarning)]
        assert ("diverged" in kinds) is left


def test_bad_runs_are_refused():
    with pytest.raises(FlowBNNError, match="100 snapshots do not fit into the 12 steps"):
        fb.SGLD(epochs=2, samples=100).fit(network(), loader(), **QUIET)
    with pytest.raises(FlowBNNError, match="leave early_stop out"):
        fb.SGLD(epochs=2).fit(network(), loader(), early_stop=fb.training.EarlyStop("loss"), **QUIET)

    class Endless:
        num_data = 30

        def __iter__(self):
            yield blobs(30).tensors

    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*blobs(30).tensors, strict=True)

    for endless in (Endless(), DataLoader(Stream(), batch_size=10)):  # which has a length that raises
        with pytest.raises(FlowBNNError, match="needs a loader with a length"):
            fb.SGLD(epochs=2).fit(network(), endless, num_data=30, **QUIET)
    assert len(fb.SWAG(epochs=4).fit(network(), endless, num_data=30, **QUIET).history["loss"])
