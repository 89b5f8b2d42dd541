"""Short runs of every stress suite. ``make stress`` runs them for 15 minutes."""

import math
import os

import pytest
from tests.stress import (
    Budget,
    StressResult,
    checkpoints,
    files,
    fuzz,
    interruptions,
    loaders,
    memory,
    networks,
    processes,
    soak,
    threads,
)

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


@pytest.mark.parametrize(
    ("name", "argument", "label"),
    [
        ("flowbnn.data.TensorLoader", "*", "numpy objects"),
        ("flowbnn.noise.NormalAffine", "components", "2.5"),
        ("mle.posterior.predict", "inputs", "[1, 2]"),
        ("mle.posterior.predict_with_targets", "inputs", "a scalar"),
        ("mle.posterior.save", "path", "None"),
        ("mle.posterior.save", "path", "a nul in a path"),
        ("mle.posterior.load", "network", "'x'"),
        ("laplace.posterior.log_prob", "values", "0"),
        ("GaussianPredictive.interval", "mass", "'0.9'"),
        ("GaussianPredictive.nll", "targets", "numpy array"),
        ("CategoricalPredictive.evaluate", "targets", "a list of lists"),
        ("mle.fit", "loader", "a scalar"),
        ("Exp.forward", "z", "'x'"),
        ("flowbnn.diagnostics.split_rhat", "draws", "[]"),
        ("flowbnn.diagnostics.marginal", "dimension", "-1"),
        ("flowbnn.compare", "test_loader", "a scalar"),
        ("flowbnn.fit", "optimizer", "int"),
        ("flowbnn.fit", "schedule", "a Linear"),
        ("flowbnn.transforms.Autoregressive", "activation", "int"),
        ("flowbnn.predictive.GaussianPredictive", "variance", "4 axes"),
        ("flowbnn.metrics.calibration_floor", "predictions", "no columns"),
        ("flowbnn.data.true_curve", "inputs", "huge tensor"),
        ("CategoricalPredictive.log_prob", "targets", "None"),
        ("Gaussian.predictive", "outputs", "a scalar"),
        ("Bernoulli.predictive", "outputs", "no rows"),
        ("laplace.posterior.functional_variance", "inputs", "meta tensor"),
        ("map.fit", "loader", "empty batches"),
        ("fit_density.result.score", "data", "meta tensor"),
        ("fit_density.result.bits_per_dimension", "data", "empty batches"),
        ("fit_autoencoder.result.decode", "z", "a list of lists"),
        ("flowbnn.training.cosine", "steps", "'x'"),
        ("flowbnn.gated", "loader", "object()"),
        ("flowbnn.gated", "loader", "labels too large"),
        ("flowbnn.compare", "train_loader", "object()"),
        ("VAE.log_likelihood", "x", "a scalar"),
        ("VAE.log_likelihood", "context", "a scalar"),
        ("flowbnn.fit", "inplace", "[]"),
        ("flowbnn.conformal.risk_threshold", "thresholds", "no columns"),
    ],
)
def test_invalid_arguments_are_rejected(name, argument, label, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    point = next(point for point in fuzz.entry_points() if point.name == name)
    assert fuzz.try_call(point, {argument: label}) == ("rejected", "")


def test_fuzz():
    result = fuzz.stress(seed=0, budget=Budget(math.inf, trials=100), valid_first=False)
    assert result.failures == []
    assert result.trials == 100


def test_suite_without_time_runs_one_trial():
    assert fuzz.stress(seed=0, budget=Budget(0.0), valid_first=False).trials == 1


def test_counts_of_a_running_suite_are_reported(monkeypatch):
    reports = []
    monkeypatch.setattr("tests.stress.REPORT_INTERVAL", 0.0)
    budget = Budget(math.inf, 3, lambda result: reports.append((result.trials, result.complete)))
    result = StressResult("x", 0)
    while budget.allows(result):
        result.add("held")
    assert reports == [(0, False), (1, False), (2, False), (3, False)]


def test_damaged_files():
    result = files.stress(seed=0, budget=Budget(math.inf, trials=50), names=("map", "fit_density"))
    assert result.failures == []
    assert result.trials == 50


@needs_fork
def test_interruptions_and_concurrent_processes():
    assert interruptions.stress(seed=0, budget=Budget(math.inf, trials=1), names=("map",)).failures == []
    assert processes.stress(seed=0, budget=Budget(math.inf, trials=1), names=("map",)).failures == []


def test_threads_and_soak():
    budget = Budget(math.inf, trials=33)
    assert threads.stress(seed=0, budget=budget, names=("mle", "swag"), calls=4).failures == []
    assert soak.stress(seed=0, budget=Budget(math.inf, trials=10), names=("mle", "node-noise")).failures == []


def test_networks_agree_with_those_built_by_hand():
    names = ("resnet", "raw_parameter", "old_weight_norm", "dictionary_inputs")
    budget = Budget(math.inf, trials=16)
    result = networks.stress(
        seed=0, budget=budget, names=names, methods=("node noise", "dropout", "map", "bayes by backprop")
    )
    assert result.failures == []
    assert result.counts["right"] >= 12


@needs_fork
def test_forged_tensors_are_refused():
    result = checkpoints.stress(seed=0, budget=Budget(math.inf, trials=20), names=("map", "fit_density"))
    assert result.failures == []


@needs_fork
def test_loaders_that_change():
    names = ("shrinks", "grows", "raises later", "claims too much")
    result = loaders.stress(
        seed=0, budget=Budget(math.inf, trials=6), actions=("predict", "map"), names=names
    )
    assert result.failures == []


@needs_fork
@pytest.mark.slow
def test_memory_of_predictions_is_bounded():
    result = memory.stress(seed=0, budget=Budget(math.inf, trials=1), names=("node-noise",), num_rows=160_000)
    assert result.failures == []
