"""Cross-validation of fits to data that are too few to hold out a part."""

import pytest
import torch
from problems import QUIET, of_kind
from report_problems import curve, rings, trained

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.variational.held_out import cross_validation, verification
from flowbnn.methods.variational.held_out.cross_validation import cross_validate_noise
from flowbnn.methods.variational.initial_state import InitialState
from flowbnn.methods.variational.noise_fit import NoiseFitOptions, maximize_elbo
from flowbnn.noise import NormalAffine
from flowbnn.posterior.report import Gain

pytestmark = pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
SHORT = {"epochs": 1, "seed": 0, **QUIET}


def noisy(data=rings, outputs: int = 2):
    return fb.to_stochastic(trained(data, outputs)[0], {"*": NormalAffine()})


@pytest.mark.parametrize(("data", "outputs", "number"), [(rings, 2, 19), (curve, 1, 7)])
def test_every_row_is_compared_once(data, outputs, number):
    network, rows = trained(data, outputs)[0], data(number, 5)
    model = noisy(data, outputs)
    options = NoiseFitOptions(**SHORT)
    loader = options.training_loader(rows)
    fit = maximize_elbo(model, loader, NoiseFitOptions(validation=None, **SHORT), InitialState.of(model))
    state, weights = torch.get_rng_state(), [weight.clone() for weight in model.parameters()]
    comparison = cross_validate_noise(fit, loader, options)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, weights, model.parameters()))
    assert len(comparison.before) == len(comparison.after) == number
    assert not torch.equal(comparison.before, comparison.after)
    if data is rings:
        expected = -torch.nn.functional.cross_entropy(network(rows[0]), rows[1], reduction="none")
        assert torch.allclose(comparison.before.sort().values, expected.double().sort().values, atol=1e-5)


@pytest.mark.parametrize("gain", [-0.1, 0.1])
def test_few_rows_are_cross_validated(gain, monkeypatch, recwarn):
    fractions = []

    def compare_retrained(network, initial, loader, options):
        fractions.append(options.validation)
        return Gain(-0.5, -0.5 + gain, 0.01)

    monkeypatch.setattr(verification, "compare_retrained", compare_retrained)
    posterior = fb.fit(noisy(), rings(12, 1), **SHORT)
    assert fractions == [cross_validation.FOLD_FRACTION]
    assert posterior.report.accepted == (gain > 0)
    assert posterior.report.held_out_gain == Gain(-0.5, -0.5 + gain, 0.01)
    assert len(of_kind(recwarn, "gain")) == (gain < 0)
    if gain > 0:
        expected = fb.fit(noisy(), rings(12, 1), validation=None, **SHORT)
        for a, b in zip(posterior.model.parameters(), expected.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_the_given_network_is_returned_if_retrained_networks_cannot_decide(monkeypatch):
    monkeypatch.setattr(verification, "compare_retrained", lambda *_: None)
    options = {**SHORT, "epochs": 3, "weight_lr": 1.0, "schedule": None}
    posterior = fb.fit(noisy(), rings(12, 1), **options)
    assert not posterior.report.accepted
    for before, after in zip(
        fb.noise.weight_parameters(noisy()), fb.noise.weight_parameters(posterior.model), strict=True
    ):
        assert torch.equal(before, after)


def test_rows_that_cannot_be_compared_raise_one_warning(monkeypatch):
    with pytest.warns(FlowBNNWarning, match="1 example cannot be split") as caught:
        fb.fit(noisy(curve, 1), curve(1, 1), **SHORT)
    assert len(of_kind(caught, "split")) == 1

    def fail(*_):
        raise FlowBNNError("the loss is not finite", kind="not finite")

    monkeypatch.setattr(cross_validation, "maximize_elbo", fail)
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.fit(noisy(), rings(12, 1), **SHORT)
    assert len(of_kind(caught, "split")) == 1
    assert posterior.report.held_out_gain is None
