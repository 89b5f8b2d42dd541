"""Tests of the contract of all methods, see :mod:`flowbnn.methods.base`."""

import math

import pytest
import torch
from method_cases import CASES, INVALID_SETTINGS, NAMES, PROBLEMS, case_of, fitted, fitted_line
from problems import QUIET, Tied, blobs, conjugate, lines, loader, normalized, small, weights_from
from torch import nn
from torch.utils.data import TensorDataset

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.methods import METHODS
from flowbnn.metrics.convergence import effective_sample_size
from flowbnn.noise import noise_layers
from slow_cases import mark_slow

# the warm-up of these short chains is too short to avoid divergences
pytestmark = pytest.mark.filterwarnings("ignore:.*transitions diverged:flowbnn.errors.FlowBNNWarning")
every_method = pytest.mark.parametrize("name", NAMES)
# the others are fitted by the code of these
distinct_methods = pytest.mark.parametrize(
    "name",
    mark_slow(NAMES, [name for name in NAMES if name not in ("mle", "damp", "temperature", "nuts", "mnf")]),
)


def copy_state(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def equal_states(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def effective_size(draws: torch.Tensor, chains: int) -> float:
    """Returns the smallest effective sample size of means and variances."""
    values = draws.view(chains, -1, draws.shape[-1])
    squares = (values - draws.mean(0)).square()
    return min(effective_sample_size(group, "mean").min().item() for group in (values, squares))


def test_every_method_has_a_case():
    assert set(CASES) == set(METHODS)


@every_method
def test_conjugate_regression(name):
    case = case_of(name)
    (problem, _, _, probes), posterior = conjugate(bias=True), fitted_line(name)
    seed = None if case.chains else 1  # without a seed, the states of chains keep their order
    samples = posterior.predict(probes, samples=case.samples, seed=seed).samples.double()
    draws = weights_from(samples, bias=True)
    std = problem.covariance.diagonal().sqrt()
    size = effective_size(draws, case.chains) if case.chains else case.samples
    expected_mean = problem.least_squares if case.represents == "likelihood" else problem.mean
    error = (draws.mean(0) - expected_mean) / std
    if case.represents in ("point", "likelihood"):
        assert error.abs().max() < case.mean_tolerance
        assert draws.std(0, correction=0).max() < 1e-6
        return
    if case.represents == "near":
        assert error.abs().max() < 3.0
        return
    relative_std = draws.std(0) / std
    assert (error.abs() < case.mean_tolerance + 5.0 * relative_std / math.sqrt(size)).all()
    if case.represents == "mean":
        return
    if case.represents == "mean-field":
        expected = torch.diag(1.0 / problem.precision.diagonal())
    else:
        assert case.represents == "exact"
        expected = problem.covariance
    root = torch.linalg.cholesky(torch.linalg.inv(expected))
    white = root.T @ torch.cov(draws.T) @ root
    # entries of the covariance of n white draws have standard errors of sqrt(2 / n) and sqrt(1 / n)
    tolerance = case.variance_tolerance + 5.0 * math.sqrt(2.0 / size)
    assert (white - torch.eye(len(white))).abs().max() < tolerance


@distinct_methods
def test_same_seed_gives_the_same_result(name):
    first, network = fitted(name, "regression"), small(2)
    torch.rand(torch.randint(5, 50, ()))  # changes the state of the global generator
    second = case_of(name).make().fit(network, loader(lines()), seed=0, **QUIET)
    predictions = [p.predict(lines(8).tensors[0], samples=4, seed=5) for p in (first, second)]
    assert torch.equal(predictions[0].samples, predictions[1].samples)
    assert torch.equal(predictions[0].sample_variances, predictions[1].sample_variances)


@every_method
def test_loaded_posterior_predicts_the_same(name, tmp_path):
    inputs, posterior = blobs(16).tensors[0], fitted(name, "classification")
    path = posterior.save(tmp_path / "posterior.safetensors")
    network = small()
    with torch.no_grad():
        network[0].weight.mul_(3.0)
    loaded = fb.load_posterior(path, network)
    assert type(loaded) is type(posterior)
    assert loaded.history.epochs == posterior.history.epochs
    samples = min(posterior.default_samples, 8)
    before, after = (p.predict(inputs, samples=samples, seed=2) for p in (posterior, loaded))
    assert torch.equal(before.log_samples, after.log_samples)
    # names are in the order of the network, not of the alphabet
    assert list(loaded.tensors()) == list(posterior.tensors())
    other = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    state = copy_state(other)
    with pytest.raises(FlowBNNError) as error:
        fb.load_posterior(path, other)
    assert error.value.kind in ("architecture", "file")
    assert "\n" not in str(error.value)
    assert equal_states(state, other.state_dict())


@distinct_methods
def test_batch_norm_is_supported(name):
    case = case_of(name)
    network, data = normalized().train(), blobs()
    state = copy_state(network)
    posterior = case.make().fit(network, loader(data), seed=0, **QUIET)
    assert equal_states(state, network.state_dict())
    assert all(module.training for module in network.modules())
    assert fb.evaluate(posterior, loader(data), progress=False)["accuracy"] > 0.85
    if type(posterior).sample is fb.methods.Posterior.sample:
        return
    mean_errors, log_ratios = [], []
    for seed in range(24):  # with noise before it, BatchNorm has the statistics of all draws together
        sample = posterior.sample(seed)
        norm = next(module for module in sample.modules() if isinstance(module, nn.BatchNorm1d))
        assert not norm.training
        calls = []
        norm.register_forward_pre_hook(lambda module, inputs, calls=calls: calls.append(inputs[0]))
        with torch.no_grad():
            sample(data.tensors[0])
        mean_errors.append((norm.running_mean - calls[0].mean(0)) / calls[0].std(0))
        log_ratios.append((norm.running_var.sqrt() / calls[0].std(0)).log())
    if isinstance(posterior, fb.methods.ChainPosterior):  # chains sample the network with fixed statistics
        assert "1.running_mean" not in posterior.names
        return
    assert torch.stack(mean_errors).mean(0).abs().max() < 0.5
    assert torch.stack(log_ratios).mean(0).abs().max() < math.log(2.0)


@distinct_methods
def test_tied_weights_stay_tied_and_count_once(name):
    case = case_of(name)
    network = Tied()
    posterior = case.make().fit(network, loader(blobs()), seed=0, **QUIET)
    assert fb.evaluate(posterior, loader(blobs()), progress=False)["accuracy"] > 0.85
    assert network.first.weight is network.second.weight
    state = posterior.model.state_dict(keep_vars=True)
    square = [value for key, value in state.items() if key.endswith("weight") and value.shape == (4, 4)]
    assert len(square) == 2
    assert square[0] is square[1]
    if hasattr(posterior, "draws"):
        draws = posterior.draws(3, seed=0)
        assert sum(key in ("first.weight", "second.weight") for key in draws) <= 1
        sample = posterior.sample(0)
        sample = getattr(sample, "network", sample)  # temperature scaling wraps the network
        assert sample.first.weight is sample.second.weight
        if "first.weight" in draws:
            assert len(draws["first.weight"]) == 3


@pytest.mark.parametrize("kind", PROBLEMS)
@every_method
def test_evaluation(name, kind):
    posterior, make = fitted(name, kind), PROBLEMS[kind][0]
    report = fb.evaluate(
        posterior, loader(make()), novel=loader(make(48, far=6.0)), samples=8, progress=False
    )
    metrics = {"accuracy", "nll", "brier", "ece"}
    if kind == "regression":
        metrics = {"rmse", "nll", "crps", "coverage_90"}
    scores = {"auroc_entropy", "auroc_energy", "auroc_mutual_information"}
    if kind == "regression":
        scores = {"auroc_std", "auroc_epistemic"}
    assert set(report) == metrics | scores
    assert all(math.isfinite(value) for value in report.values())
    assert report["accuracy"] > 0.85 if kind == "classification" else report["rmse"] < 0.8


@every_method
def test_invalid_settings_are_refused(name):
    for settings in (*INVALID_SETTINGS, *case_of(name).invalid):
        with pytest.raises(FlowBNNError) as error:
            METHODS[name](**settings)
        assert error.value.argument in settings, settings
        assert next(iter(settings)) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(FlowBNNError) as error:
        METHODS[name](epoch=3)
    assert (error.value.kind, error.value.argument) == ("unknown setting", "epoch")


@every_method
def test_invalid_labels_are_refused(name):
    inputs, labels = blobs().tensors
    for invalid in (labels + 1, labels.view(-1, 1), labels - 1):
        batches = loader(TensorDataset(inputs, invalid))
        with pytest.raises(FlowBNNError) as error:
            case_of(name).make().fit(small(), batches, likelihood="categorical", seed=0, **QUIET)
        assert (error.value.kind, error.value.argument) == ("targets", "targets")
        assert "\n" not in str(error.value)


@every_method
def test_invalid_networks_are_refused(name):
    noisy = fb.to_stochastic(small(), {"*": fb.noise.NormalAffine()})
    assert noise_layers(noisy)
    for network in (noisy, small().requires_grad_(False), "a network"):
        with pytest.raises(FlowBNNError) as error:
            case_of(name).make().fit(network, loader(blobs()), **QUIET)
        assert (error.value.kind, error.value.argument) == ("network", "network")
        assert "\n" not in str(error.value)
