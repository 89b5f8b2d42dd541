"""Tests of SGLD: the stationary distribution of its discretized dynamics, its schedule and its snapshots."""

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
from flowbnn.methods.mcmc.sgld import Langevin, Snapshots, StepSchedule


def stationary_covariance(rate: float, number: int, covariance: torch.Tensor) -> torch.Tensor:
    """Returns the covariance S (1 - K / 2)^-1, K = rate / number S^-1, of the chain with steps of this size."""
    step = rate / number * torch.linalg.inv(covariance)
    return covariance @ torch.linalg.inv(torch.eye(len(step), dtype=torch.float64) - 0.5 * step)


def test_conjugate_regression_has_the_bias_of_the_step_size():
    inputs, targets, mean, covariance = regression()
    method = fb.SGLD(
        lr=0.1, epochs=8, samples=750, cycles=0, exploration=0.06, preconditioned=False, prior_scale=2.0
    )
    options = {"likelihood": fb.likelihoods.Gaussian(noise=0.5), "num_data": len(inputs), "seed": 0}
    posterior = method.fit(nn.Linear(2, 1).double(), [(inputs, targets)] * 100, **options, **QUIET)
    draws = posterior.draws(750)
    draws = torch.cat([draws["weight"].flatten(1), draws["bias"]], 1)[None]
    expected = stationary_covariance(0.1, len(inputs), covariance)
    assert (expected.diagonal() / covariance.diagonal()).max() > 1.1  # a visible bias
    assert ((draws.mean((0, 1)) - mean).abs() < 4 * standard_error(draws)).all()
    deviations = draws - mean
    products = deviations[..., :, None] * deviations[..., None, :]
    second_moments, error = products.mean((0, 1)), standard_error(products)
    assert ((second_moments - expected).abs() < 4 * error).all()
    assert ((second_moments - 0.5 * expected).abs() > 6 * error).any()  # half the variance would be detected


def test_preconditioned_chain_with_small_steps_is_exact():
    """The target is a Gaussian of scales 0.05 and 1. An adapting preconditioner would have 1.7 times its variance."""
    number, chains, rate = 50, 400, 0.01
    scales = torch.tensor([0.05, 1.0], dtype=torch.float64).expand(chains, 2)
    start = torch.randn(chains, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = nn.Parameter(scales * start)
    optimizer = Langevin([weights], lr=rate, num_data=number, damping=1e-8)
    torch.manual_seed(0)
    snapshots = []
    for step in range(3000):
        weights.grad = weights.detach() / scales**2 / number
        optimizer.adapting = step < 1000
        optimizer.step()
        if step >= 1500 and step % 10 == 0:
            snapshots.append(weights.detach().clone())
    metric = 1.0 / (1e-8 + optimizer.state[weights]["square"].sqrt())
    # stationary variance of steps of this size
    inflation = 1.0 / (1.0 - 0.5 * rate * metric / scales**2 / number)
    ratio = torch.stack(snapshots).square().mean(0) / scales**2 / inflation
    error = ratio.std(0) / chains**0.5
    assert ((ratio.mean(0) - 1.0).abs() < 4 * error).all()
    assert (error < 0.05).all()


@pytest.mark.parametrize("preconditioned", [False, True])
def test_cyclical_chain_has_the_posterior_standard_deviation(preconditioned):
    """Descent without noise and vanishing steps would give 0.34 to 0.58 of the exact standard deviation."""
    inputs, targets, mean, covariance = regression()
    chains, number = 200, len(inputs)
    schedule = StepSchedule(2000, cycles=4, exploration=0.5, samples=40)
    design = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    weights = nn.Parameter(mean.repeat(chains, 1))  # all chains start at the mean
    rate, snapshots = (0.01 if preconditioned else 0.05), []
    optimizer = Langevin([weights], rate, number, 1.0 / (4.0 * number), preconditioned)
    torch.manual_seed(0)
    for step in range(2000):
        if step in schedule.snapshot_steps:
            snapshots.append(weights.detach().clone())
        optimizer.param_groups[0]["lr"] = rate * schedule.factor(step)
        optimizer.adapting = not schedule.is_sampling(step)
        weights.grad = (weights.detach() @ design.T - targets.flatten()) @ design / 0.5**2 / number
        optimizer.step()
    ratio = (torch.stack(snapshots) - mean).square().mean((0, 1)).sqrt() / covariance.diagonal().sqrt()
    assert (ratio > 0.93).all()
    assert (ratio < 1.10).all()


def test_step_follows_the_formula():
    weights = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = Langevin([weights], lr=0.1, num_data=10, weight_decay=0.5, damping=0.2)
    weights.grad = torch.tensor([0.3, 0.0], dtype=torch.float64)
    torch.manual_seed(5)
    noise = torch.randn(2, dtype=torch.float64)
    torch.manual_seed(5)
    optimizer.step()
    # the first step replaces the mean square
    metric = 1.0 / (0.2 + torch.tensor([0.3, 0.0], dtype=torch.float64))
    drift = torch.tensor([0.3 + 0.5, -1.0], dtype=torch.float64)
    expected = (
        torch.tensor([1.0, -2.0]).double() - 0.1 * metric * drift + (2 * 0.1 * metric / 10).sqrt() * noise
    )
    assert torch.allclose(weights.detach(), expected, atol=1e-12)


def test_temperature_zero_only_descends():
    weights = nn.Parameter(torch.ones(3))
    optimizer = Langevin([weights], lr=0.1, num_data=10, preconditioned=False)
    optimizer.temperature, weights.grad = 0.0, torch.full((3,), 2.0)
    optimizer.step()
    assert torch.allclose(weights.detach(), torch.full((3,), 0.8))


@pytest.mark.parametrize("cycles", [0, 1, 4])
@pytest.mark.parametrize(("total", "samples"), [(120, 20), (101, 7), (40, 4)])
def test_snapshots_are_in_the_sampling_phases(cycles, total, samples):
    schedule = StepSchedule(total, cycles, exploration=0.5, samples=samples)
    assert len(schedule.snapshot_steps) == samples
    assert total in schedule.snapshot_steps
    for step in schedule.snapshot_steps:  # a snapshot is the state after this many steps
        assert schedule.is_sampling(step - 1)
        assert step > total / 2 or cycles > 1
    rates = [schedule.factor(step) for step in range(total)]
    assert max(rates) == rates[0] == 1.0
    assert sum(rate == 1.0 for rate in rates) == {0: total, 1: 1, 4: 4}[cycles]


def test_snapshots_of_several_cycles_predict():
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


@pytest.mark.parametrize("last_step", [31, 57])
def test_interrupted_run_resumes_with_its_snapshots(tmp_path, monkeypatch, last_step):
    method = fb.SGLD(epochs=10, samples=10, cycles=2, exploration=0.3, prior_scale=0.5)
    expected = method.fit(network(), loader(), seed=0, **QUIET)
    record = Snapshots.record

    def interrupt(self, step):
        if step == last_step:
            raise RuntimeError("interrupted")
        record(self, step)

    monkeypatch.setattr(Snapshots, "record", interrupt)
    checkpoint = {"checkpoint": tmp_path, "checkpoint_every": 7, "resume": True}
    with pytest.raises(RuntimeError, match="interrupted"):
        method.fit(network(), loader(), seed=0, **checkpoint, **QUIET)
    monkeypatch.setattr(Snapshots, "record", record)
    for _ in range(2):  # the second run only reads the finished checkpoint
        resumed = method.fit(network(), loader(), seed=0, **checkpoint, **QUIET)
        for name, value in expected.members.items():
            assert torch.equal(value, resumed.members[name])


def test_dropout_is_disabled_while_sampling():
    rates = []

    class RecordingDropout(nn.Dropout):
        def forward(self, x):
            rates.append(self.p)
            return super().forward(x)

    net = nn.Sequential(nn.Linear(4, 8), RecordingDropout(0.4), nn.Linear(8, 3))
    posterior = fb.SGLD(epochs=2, samples=2, cycles=1).fit(net, loader(), seed=0, **QUIET)
    assert set(rates[1:]) == {0.0}
    assert posterior.model[1].p == 0.4


def test_each_snapshot_has_its_own_batch_norm_statistics():
    data = blobs()
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    posterior = fb.SGLD(epochs=6, samples=4, cycles=2).fit(net, loader(data), seed=0, **QUIET)
    for index in range(4):
        member = posterior.member(index)
        with torch.no_grad():
            hidden = member[0](data.tensors[0])
        assert torch.allclose(member[1].running_mean, hidden.mean(0), atol=1e-4)


@pytest.mark.slow
def test_learned_noise_is_sampled_with_the_weights(tmp_path):
    """Compares with quadrature over the log noise, with the weights integrated in closed form."""
    inputs, targets, _, _ = regression()
    likelihood = fb.likelihoods.Gaussian()
    nn.init.constant_(likelihood.log_scale, center := -0.5)
    method = fb.SGLD(
        lr=0.03, epochs=20, samples=1500, cycles=0, exploration=0.25, preconditioned=False, prior_scale=2.0
    )
    options = {"likelihood": likelihood, "num_data": len(inputs), "seed": 0}
    posterior = method.fit(nn.Linear(2, 1).double(), [(inputs, targets)] * 100, **options, **QUIET)
    grid = center + torch.linspace(-3, 3, 2001, dtype=torch.float64)
    design = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    identity = torch.eye(len(inputs), dtype=torch.float64)
    covariance = grid.exp().square()[:, None, None] * identity + 4.0 * design @ design.T
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(targets[:, 0]), covariance)
    weight = (normal.log_prob(targets[:, 0]) - 0.5 * (grid - center).square()).softmax(0)
    mean = (weight * grid).sum()
    variance = (weight * (grid - mean).square()).sum()
    levels = posterior.log_noise.double()[None]
    assert ((levels.mean((0, 1)) - mean).abs() < 4 * standard_error(levels)).all()
    squares, expected = (
        (levels - mean).square(),
        stationary_covariance(0.03, len(inputs), variance.reshape(1, 1))[0],
    )
    assert ((squares.mean((0, 1)) - expected).abs() < 4 * standard_error(squares)).all()
    assert standard_error(squares).item() < 0.2 * variance
    predictive = posterior.predict(inputs[:3])
    assert torch.allclose(predictive.sample_variances[:, 0, 0], (2 * levels[0, :, 0]).exp(), rtol=1e-5)
    loaded = fb.load_posterior(posterior.save(tmp_path / "sgld.safetensors"), nn.Linear(2, 1).double())
    assert torch.equal(loaded.predict(inputs[:3]).sample_variances, predictive.sample_variances)


def test_divergence_raises_a_warning():
    """Steps of three times the stable size diverge on a regression with known curvature."""
    inputs = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    loader = TensorLoader(inputs, 2.0 * inputs, batch_size=64)
    options = {"epochs": 12, "samples": 2, "cycles": 0, "preconditioned": False}
    stable = 2.0 / float(inputs.square().mean())
    for lr, diverges in ((3.0 * stable, True), (0.1 * stable, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FlowBNNWarning)
            torch.manual_seed(0)
            likelihood = Gaussian(noise=1.0)
            fb.SGLD(lr=lr, **options).fit(
                nn.Linear(1, 1), loader, likelihood=likelihood, seed=0, progress=False
            )
        messages = [warning.message for warning in caught if isinstance(warning.message, FlowBNNWarning)]
        assert ("diverged" in [message.fields.get("kind") for message in messages]) is diverges


def test_invalid_runs_are_refused():
    with pytest.raises(FlowBNNError) as error:
        fb.SGLD(epochs=2, samples=100).fit(network(), loader(), **QUIET)
    assert error.value.argument == "samples"
    with pytest.raises(FlowBNNError) as error:
        fb.SGLD(epochs=2).fit(network(), loader(), early_stop=fb.training.EarlyStop("loss"), **QUIET)
    assert error.value.argument == "early_stop"

    class UnsizedLoader:
        num_data = 30

        def __iter__(self):
            yield blobs(30).tensors

    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*blobs(30).tensors, strict=True)

    for unsized in (UnsizedLoader(), DataLoader(Stream(), batch_size=10)):  # len() of the latter raises
        with pytest.raises(FlowBNNError) as error:
            fb.SGLD(epochs=2).fit(network(), unsized, num_data=30, **QUIET)
        assert (error.value.kind, error.value.argument) == ("loader", "loader")
    assert len(fb.SWAG(epochs=4).fit(network(), unsized, num_data=30, **QUIET).history["loss"])
