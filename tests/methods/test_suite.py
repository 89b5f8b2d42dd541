"""What every method must do, whatever it is: the contract of :mod:`flowbnn.methods.base`."""

import math

import pytest
import torch
from method_cases import CASES, NAMES, PROBLEMS, WRONG, case_of, fitted, fitted_line
from problems import QUIET, Tied, blobs, conjugate, lines, loader, normalized, small, weights_from
from torch import nn
from torch.utils.data import TensorDataset

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.methods import METHODS
from flowbnn.metrics.convergence import effective_sample_size
from flowbnn.noise import noise_layers

# chains that are given a moment for their warm-up say so
pytestmark = pytest.mark.filterwarnings("ignore:.*transitions diverged:flowbnn.errors.FlowBNNWarning")
every_method = pytest.mark.parametrize("name", NAMES)


def copied(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def effective(drawn: torch.Tensor, chains: int) -> float:
    """Independent draws that tell as much about means and variances."""
    walks = drawn.view(chains, -1, drawn.shape[-1])
    squares = (walks - drawn.mean(0)).square()
    return min(effective_sample_size(part, "mean").min().item() for part in (walks, squares))


def test_every_method_has_a_case():
    assert set(CASES) == set(METHODS)


@every_method
def test_a_conjugate_regression_is_recovered(name):
    case = case_of(name)
    (problem, _, _, probes), posterior = conjugate(bias=True), fitted_line(name)
    seed = None if case.chains else 1  # without a seed, the states of chains come in their order
    drawn = weights_from(
        posterior.predict(probes, samples=case.samples, seed=seed).samples.double(), bias=True
    )
    std = problem.covariance.diagonal().sqrt()
    worth = effective(drawn, case.chains) if case.chains else case.samples
    truth = problem.least_squares if case.represents == "likelihood" else problem.mean
    error = (drawn.mean(0) - truth) / std
    if case.represents in ("point", "likelihood"):
        assert error.abs().max() < case.within
        assert drawn.std(0, correction=0).max() < 1e-6
        return
    if case.represents == "near":
        assert error.abs().max() < 3.0
        return
    spread = drawn.std(0) / std
    assert (error.abs() < case.within + 5.0 * spread / math.sqrt(worth)).all()
    if case.represents == "mean":
        return
    if case.represents == "mean-field":
        expected = torch.diag(1.0 / problem.precision.diagonal())
    else:
        assert case.represents == "exact"
        expected = problem.covariance
    root = torch.linalg.cholesky(torch.linalg.inv(expected))
    white = root.T @ torch.cov(drawn.T) @ root
    # entries of the covariance of n white draws have standard errors of sqrt(2 / n) and sqrt(1 / n)
    assert (white - torch.eye(len(white))).abs().max() < case.variance_within + 5.0 * math.sqrt(2.0 / worth)


@every_method
def test_the_same_seed_gives_the_same_result(name):
    first, network = fitted(name, "numbers"), small(2)
    torch.rand(torch.randint(5, 50, ()))  # wherever torch's own generator is
    second = case_of(name).make().fit(network, loader(lines()), seed=0, **QUIET)
    found = [each.predict(lines(8).tensors[0], samples=4, seed=5) for each in (first, second)]
    assert torch.equal(found[0].samples, found[1].samples)
    assert torch.equal(found[0].sample_variances, found[1].sample_variances)


@every_method
def test_saving_and_loading_changes_no_prediction(name, tmp_path):
    inputs, posterior = blobs(16).tensors[0], fitted(name, "classes")
    path = posterior.save(tmp_path / "posterior.safetensors")
    network = small()
    with torch.no_grad():
        network[0].weight.mul_(3.0)
    loaded = fb.load_posterior(path, network)
    assert type(loaded) is type(posterior)
    assert loaded.history.epochs == posterior.history.epochs
    samples = posterior.default_samples if posterior.default_samples < 8 else 8
    before, after = (each.predict(inputs, samples=samples, seed=2) for each in (posterior, loaded))
    assert torch.equal(before.log_samples, after.log_samples)
    # names in the network's order, not by the alphabet
    assert list(loaded.tensors()) == list(posterior.tensors())
    other = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    kept = copied(other)
    with pytest.raises(FlowBNNError) as refused:
        fb.load_posterior(path, other)
    assert refused.value.kind in ("architecture", "file")
    assert "\n" not in str(refused.value)
    assert equal(kept, other.state_dict())


@every_method
def test_batch_norm_survives(name):
    case = case_of(name)
    network, data = normalized().train(), blobs()
    kept = copied(network)
    posterior = case.make().fit(network, loader(data), seed=0, **QUIET)
    assert equal(kept, network.state_dict())
    assert all(module.training for module in network.modules())
    assert fb.evaluate(posterior, loader(data), progress=False)["accuracy"] > 0.85
    if type(posterior).sample is fb.methods.Posterior.sample:
        return
    gaps, ratios = [], []
    for seed in range(24):  # with noise before it, BatchNorm keeps the statistics of all draws together
        one = posterior.sample(seed)
        norm = next(module for module in one.modules() if isinstance(module, nn.BatchNorm1d))
        assert not norm.training
        seen = []
        norm.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0]))
        with torch.no_grad():
            one(data.tensors[0])
        gaps.append((norm.running_mean - seen[0].mean(0)) / seen[0].std(0))
        ratios.append((norm.running_var.sqrt() / seen[0].std(0)).log())
    if isinstance(
        posterior, fb.methods.ChainPosterior
    ):  # what it samples is the network with its statistics held
        assert "1.running_mean" not in posterior.names
        return
    assert torch.stack(gaps).mean(0).abs().max() < 0.5
    assert torch.stack(ratios).mean(0).abs().max() < math.log(2.0)


@every_method
def test_tied_weights_stay_tied_and_count_once(name):
    case = case_of(name)
    network = Tied()
    posterior = case.make().fit(network, loader(blobs()), seed=0, **QUIET)
    assert fb.evaluate(posterior, loader(blobs()), progress=False)["accuracy"] > 0.85
    assert network.first.weight is network.second.weight
    trained = posterior.model
    shared = [value for key, value in trained.state_dict(keep_vars=True).items() if key.endswith("weight")]
    square = [value for value in shared if value.shape == (4, 4)]
    assert len(square) == 2
    assert square[0] is square[1]
    if hasattr(posterior, "draws"):
        drawn = posterior.draws(3, seed=0)
        assert sum(key in ("first.weight", "second.weight") for key in drawn) <= 1
        one = posterior.sample(0)
        one = getattr(one, "network", one)  # what temperature scaling divides
        assert one.first.weight is one.second.weight
        if "first.weight" in drawn:
            assert len(drawn["first.weight"]) == 3


@pytest.mark.parametrize("kind", PROBLEMS)
@every_method
def test_it_is_judged_by_the_same_code(name, kind):
    posterior, make = fitted(name, kind), PROBLEMS[kind][0]
    report = fb.evaluate(
        posterior, loader(make()), novel=loader(make(48, far=6.0)), samples=8, progress=False
    )
    known = (
        {"accuracy", "nll", "brier", "ece"} if kind == "classes" else {"rmse", "nll", "crps", "coverage_90"}
    )
    assert set(report) == known | {"novelty_auroc", "novelty_aupr"}
    assert all(math.isfinite(value) for value in report.values())
    assert report["accuracy"] > 0.85 if kind == "classes" else report["rmse"] < 0.8


@every_method
def test_bad_settings_are_refused_in_one_line(name):
    for wrong in (*WRONG, *case_of(name).refuses):
        with pytest.raises(FlowBNNError) as refused:
            METHODS[name](**wrong)
        assert refused.value.argument in wrong, wrong
        assert next(iter(wrong)) in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(FlowBNNError, match="did you mean 'epochs'"):
        METHODS[name](epoch=3)


@every_method
def test_labels_that_do_not_fit_are_refused_in_one_line(name):
    inputs, labels = blobs().tensors
    for bad, match in (
        (labels + 1, "labels run from 1 to 3"),
        (labels.view(-1, 1), "labels.squeeze"),
        (labels - 1, "-1"),
    ):
        with pytest.raises(FlowBNNError, match=match) as refused:
            case_of(name).make().fit(
                small(), loader(TensorDataset(inputs, bad)), likelihood="categorical", seed=0, **QUIET
            )
        assert "\n" not in str(refused.value)


@every_method
def test_a_network_with_noise_is_refused_in_one_line(name):
    noisy = fb.to_stochastic(small(), {"*": fb.noise.NormalAffine()})
    assert noise_layers(noisy)
    with pytest.raises(FlowBNNError, match="to_deterministic") as refused:
        case_of(name).make().fit(noisy, loader(blobs()), **QUIET)
    assert "\n" not in str(refused.value)
    with pytest.raises(FlowBNNError, match="no weights to learn"):
        case_of(name).make().fit(small().requires_grad_(False), loader(blobs()), **QUIET)
    with pytest.raises(FlowBNNError, match="network"):
        case_of(name).make().fit("a network", loader(blobs()), **QUIET)
