"""Tests of density gates: predictions fall back to a fixed distribution for unfamiliar inputs."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Categorical, Flow, Gaussian, Likelihood, Mixture
from flowbnn.methods.calibrators.temperature import TemperedPosterior
from flowbnn.posterior import PointPosterior
from flowbnn.predictive import GaussianPredictive

QUIET = {"progress": False, "seed": 0}


def clusters(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns points around the corners of a square, and two classes of opposite corners."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.randint(4, (rows,), generator=generator)
    centers = torch.tensor([[-3.0, -3.0], [3.0, 3.0], [-3.0, 3.0], [3.0, -3.0]])
    points = centers[corner] + 0.6 * torch.randn(rows, 2, generator=generator)
    return points, corner // 2


def ring(rows: int) -> torch.Tensor:
    angle = 2.0 * math.pi * torch.arange(rows) / rows
    return 12.0 * torch.stack([angle.cos(), angle.sin()], 1)


def hole(rows: int) -> torch.Tensor:
    """Returns points between the clusters, closer to the mean of all data than any cluster is."""
    return 0.6 * torch.randn(rows, 2, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    loader = fb.data.TensorLoader(*clusters(600, 0), batch_size=100)
    return network, fb.DeepEnsemble(2, epochs=20, lr=0.01).fit(network, loader, **QUIET)


@pytest.fixture(scope="module")
def gate(fitted):
    return fb.gated(fitted[1], clusters(800, 1), false_alarm=0.05, epochs=40)


@pytest.mark.parametrize("novel", [ring, hole])
def test_gate_detects_the_ring_and_the_hole_between_clusters(fitted, gate, novel):
    test = clusters(500, 2)
    plain, safe = (fb.evaluate(p, test, novel=novel(200), progress=False) for p in (fitted[1], gate))
    assert "auroc_density" not in plain
    assert safe["auroc_density"] > 0.97
    assert safe["auroc_entropy"] > 0.95
    assert safe["auroc_energy"] == plain["auroc_energy"]
    prediction = gate.predict(novel(200))
    fallen = gate.is_unfamiliar(novel(200))
    assert fallen.double().mean() > 0.9
    torch.testing.assert_close(
        prediction.probabilities[fallen], gate.gate.fallback.expand(int(fallen.sum()), -1)
    )


def test_false_alarm_rate_holds_on_fresh_data_and_other_predictions_do_not_change(fitted, gate):
    inputs, targets = clusters(2000, 3)
    unfamiliar = gate.is_unfamiliar(inputs)
    assert 0.02 < unfamiliar.double().mean() < 0.09
    plain, safe = fitted[1].predict(inputs), gate.predict(inputs)
    torch.testing.assert_close(safe.probabilities[~unfamiliar], plain.probabilities[~unfamiliar])
    assert safe.log_density.shape == (2000,)
    assert safe.nll(targets).mean() < plain.nll(targets).mean() + 0.05 * math.log(2) + 0.02


def test_uncertainty_of_unfamiliar_inputs_is_epistemic(gate):
    prediction = gate.predict(ring(20))
    assert bool((prediction.mutual_information > 0.5).all())


def test_gate_is_saved_and_loaded(fitted, gate, tmp_path):
    inputs = torch.cat([clusters(20, 4)[0], ring(10)])
    loaded = fb.load_posterior(gate.save(tmp_path / "gate"), fitted[0])
    assert torch.equal(loaded.predict(inputs).probabilities, gate.predict(inputs).probabilities)
    assert torch.equal(loaded.is_unfamiliar(inputs), gate.is_unfamiliar(inputs))


def test_loaders_and_adaptive_samples_and_indices_keep_the_densities(gate):
    inputs, targets = clusters(50, 6)
    expected = gate.predict(inputs)
    prediction = gate.predict(fb.data.TensorLoader(inputs, targets, batch_size=8), progress=False)
    torch.testing.assert_close(prediction.log_density, expected.log_density)
    assert torch.equal(expected[10:20].log_density, expected.log_density[10:20])
    assert gate.predict(inputs, adaptive=0.1).log_density.shape == (50,)


@pytest.mark.slow
def test_features_of_a_layer_and_principal_components(fitted):
    for options in ({"features": "0", "components": 3}, {"features": "2"}, {"components": 1}):
        posterior = fb.gated(fitted[1], clusters(300, 1), epochs=12, flow="realnvp", **options)
        dim = posterior.gate.density.flow.dim
        assert dim == {"0": 4, "2": 2, None: 2}[options.get("features")]
        assert posterior.is_unfamiliar(ring(100)).double().mean() > 0.5


def test_calibrators_keep_the_gate(fitted, gate):
    inputs, targets = clusters(200, 7)
    data = inputs, torch.where(torch.arange(200) % 5 == 0, 1 - targets, targets)
    calibrated, plain = (fb.Temperature().fit(each, data, **QUIET) for each in (gate, fitted[1]))
    assert calibrated.gate is gate.gate
    assert calibrated.posterior.temperature == plain.temperature
    assert bool(calibrated.is_unfamiliar(torch.full((1, 2), 100.0)).all())
    with pytest.raises(FlowBNNError) as caught:
        fb.Temperature().calibrate(gate, data, progress=False)
    assert (caught.value.kind, caught.value.argument) == ("unsupported", "posterior")
    safe = fb.gated(TemperedPosterior(fitted[1], 2.0), data, epochs=2)
    assert safe.predict(data[0]).log_density.shape == (200,)


def test_other_densities_of_inputs_can_be_evaluated(fitted):
    inputs, targets = clusters(300, 1)
    density = fb.fit_density(fb.flows.RealNVP(2), inputs, epochs=5, **QUIET)
    report = fb.evaluate(fitted[1], (inputs, targets), novel=ring(50), density=density, progress=False)
    assert report["auroc_density"] > 0.95


@pytest.mark.parametrize(
    "likelihood", [Gaussian(0.1), Flow(), Mixture(3)], ids=["gaussian", "flow", "mixture"]
)
def test_regression_falls_back_to_the_distribution_of_the_targets(likelihood):
    inputs = torch.randn(300, 1, generator=torch.Generator().manual_seed(0))
    targets = 5.0 + 2.0 * inputs[:, 0]
    likelihood.initialize(torch.zeros(1, 1), targets[:1])
    network = nn.Linear(1, getattr(likelihood, "num_outputs", 1))
    posterior = fb.gated(PointPosterior(network, likelihood), (inputs, targets), epochs=2)
    prediction = posterior.predict(torch.tensor([[0.0], [50.0]]), samples=8)
    assert prediction.mean[1].item() == pytest.approx(targets.mean().item(), abs=1e-4)
    assert prediction.std[1].item() == pytest.approx(targets.std(correction=0).item(), rel=1e-3)
    assert prediction.epistemic[1] > 0.4 * prediction.variance[1]
    single = posterior.predict(torch.tensor([[50.0]]), samples=1)
    assert single.std[0].item() == pytest.approx(targets.std(correction=0).item(), rel=1e-3)


class UnitGaussian(Likelihood):
    """Likelihood with the two methods that a user has to define."""

    def log_prob(self, outputs, targets):
        return -0.5 * (targets.reshape(outputs.shape) - outputs).square().flatten(1).sum(1)

    def predictive(self, outputs, sample_counts=None):
        return GaussianPredictive(outputs, 1.0, sample_counts)


@pytest.mark.parametrize("width", [1, 2])
def test_real_targets_of_a_user_defined_likelihood(width):
    inputs = torch.randn(300, width, generator=torch.Generator().manual_seed(0))
    targets = 5.0 + 2.0 * inputs
    posterior = fb.gated(
        PointPosterior(nn.Linear(width, width), UnitGaussian()), (inputs, targets), epochs=2, progress=False
    )
    prediction = posterior.predict(torch.full((1, width), 50.0))
    torch.testing.assert_close(prediction.mean[0], targets.mean(0), atol=1e-4, rtol=0.0)
    torch.testing.assert_close(prediction.std[0], targets.std(0, correction=0), atol=0.0, rtol=1e-3)


@pytest.mark.parametrize(
    ("loader", "options", "argument"),
    [
        ([torch.zeros(10, 2)], {}, "loader"),
        ([], {}, "loader"),
        ((torch.zeros(2, 2), torch.zeros(2).long()), {}, "loader"),
        ((torch.zeros(10, 2), torch.zeros(10).long()), {"features": "fc"}, "features"),
        ((torch.zeros(10, 2), torch.zeros(10).long()), {"false_alarm": 0.0}, "false_alarm"),
    ],
)
def test_bad_arguments_are_refused(loader, options, argument):
    posterior = PointPosterior(nn.Linear(2, 2), Categorical())
    with pytest.raises(FlowBNNError) as caught:
        fb.gated(posterior, loader, **options)
    assert caught.value.argument == argument


def test_seed_determines_the_gate_in_any_thread():
    """The initial weights of the flow do not depend on the state of the generator of torch, which other gates use at the same time."""
    posterior, pair = PointPosterior(nn.Linear(2, 2), Categorical()), clusters(120, 1)

    def scores(_: int) -> torch.Tensor:
        gate = fb.gated(posterior, pair, epochs=2, seed=0)
        return gate.predict(pair[0], 2, seed=0).log_density

    torch.manual_seed(0)
    expected = scores(0)
    torch.manual_seed(1)
    with ThreadPoolExecutor(4) as pool:
        for value in pool.map(scores, range(4)):
            assert torch.equal(value, expected)


def test_several_labels_of_an_input_are_refused():
    posterior = PointPosterior(nn.Linear(2, 6), Categorical())
    with pytest.raises(FlowBNNError) as caught:
        fb.gated(posterior, (torch.randn(20, 2), torch.zeros(20, 3).long()), progress=False)
    assert (caught.value.kind, caught.value.argument) == ("targets", "loader")
    assert "fb.fit_density" in str(caught.value)
