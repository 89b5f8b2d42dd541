"""Tests of all kinds of methods on networks with outputs for pixels, tokens and several labels."""

import pytest
import torch

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical
from slow_cases import mark_slow
from structured_problems import POSITIONS, make_structured

METHODS = {
    "MLE": fb.MLE(epochs=1),
    "dropout": fb.MCDropout(epochs=1),
    "ensemble": fb.DeepEnsemble(members=2, epochs=1),
    "SWAG": fb.SWAG(epochs=4),
    "SGLD": fb.SGLD(epochs=6, samples=3, cycles=1),
    "BBB": fb.BayesByBackprop(epochs=1),
    "noise": fb.NodeNoise(epochs=1),
    "Laplace": fb.Laplace(epochs=1),
    "Laplace diag": fb.Laplace("diag", layers="all", curvature="sampled", epochs=1),
    "probit": fb.Laplace(predictive="probit", epochs=1),
    "temperature": fb.Temperature(fb.MAP(epochs=1)),
    "vector": fb.VectorScaling(fb.MAP(epochs=1)),
}


PAIRS = [f"{method}, {problem}" for method in METHODS for problem in POSITIONS]
SIZE = len(POSITIONS)
# every method, every problem
DIAGONAL = [pair for i, pair in enumerate(PAIRS) if i // SIZE % SIZE == i % SIZE]


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("pair", mark_slow(PAIRS, DIAGONAL))
def test_methods_fit_predict_save_and_load(pair, tmp_path):
    method, problem = pair.split(", ")
    network, inputs, targets = make_structured(problem)
    loader = fb.data.TensorLoader(inputs, targets, batch_size=12)
    posterior = METHODS[method].fit(network, loader, progress=False, seed=0)
    kind = Categorical if problem in ("pixels", "tokens") else Bernoulli
    assert isinstance(posterior.likelihood, kind)
    prediction = posterior.predict(inputs, 3, seed=0)
    assert prediction.labels.shape == prediction.mutual_information.shape == (24, *POSITIONS[problem])
    loaded = fb.load_posterior(posterior.save(tmp_path / "posterior"), network)
    torch.testing.assert_close(loaded.predict(inputs, 3, seed=0).probabilities, prediction.probabilities)
    scores = fb.evaluate(posterior, loader, samples=3, progress=False)
    canonical = posterior.likelihood.canonical_targets(targets)
    assert scores == pytest.approx(prediction.evaluate(canonical), rel=1e-4)
    adaptive = posterior.predict(inputs[:4], 16, seed=0, adaptive=0.05)
    assert adaptive.sample_counts.shape == (4,)


@pytest.mark.parametrize("problem", POSITIONS)
def test_predictions_are_those_of_single_networks(problem):
    network, inputs, targets = make_structured(problem)
    model = fb.to_stochastic(network, {"*": fb.noise.NormalAffine(base_scale=0.3)})
    posterior = fb.fit(
        model, [(inputs, targets)], epochs=1, progress=False, validation=None, likelihood="auto"
    )
    prediction = posterior.predict(inputs, 3, seed=1)
    outputs = torch.stack([single(inputs) for single in posterior.networks(3, seed=1)]).detach()
    expected = posterior.likelihood.predictive(outputs).probabilities
    torch.testing.assert_close(prediction.probabilities, expected, rtol=0.0, atol=1e-6)
    views = posterior.predict(inputs, 3, seed=1, views=[lambda x: x, lambda x: x])
    torch.testing.assert_close(views.probabilities, expected, rtol=0.0, atol=1e-6)


def test_a_mask_that_ignores_everything_is_one_line():
    network, inputs, targets = make_structured("pixels")
    loader = [(inputs, torch.full_like(targets, -100))]
    for call in (
        lambda: fb.MLE(epochs=1).fit(network, loader, progress=False),
        lambda: fb.calibrate(network, loader, progress=False),
    ):
        with pytest.raises(FlowBNNError) as caught:
            call()
        assert (caught.value.kind, caught.value.argument) == ("targets", "targets")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("problem", mark_slow(["pixels", "labels"], ["labels"]))
def test_compare_has_a_row_for_each_method(problem):
    network, inputs, targets = make_structured(problem)
    loader = fb.data.TensorLoader(inputs, targets, batch_size=12)
    table = fb.compare(
        network, loader, loader, methods=[fb.MLE(epochs=1), fb.NodeNoise(epochs=1)], samples=2, progress=False
    )
    assert "nll" in str(table).lower()
