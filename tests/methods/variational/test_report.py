"""Report of a fit: gain over the initial network, memorized data, convergence, collapsed layers."""

import random
import warnings
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from problems import QUIET, of_kind
from report_problems import curve, rings, trained
from small_problem import loader as blob_loader
from small_problem import network as blob_network
from torch import nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNWarning
from flowbnn.methods.variational.report import example_elbos, spread_batches
from flowbnn.models import MLP
from flowbnn.noise import NormalAffine, NormalPlanar


# the given network is returned with a warning if noise is no better, which is close on the rings
@pytest.mark.filterwarnings("ignore:the given network is returned:flowbnn.FlowBNNWarning")
@pytest.mark.parametrize(
    ("data", "outputs", "recipe"),
    [pytest.param(rings, 2, NormalPlanar(), marks=pytest.mark.slow), (curve, 1, NormalAffine())],
    ids=["classes-planar", "curve-gaussian"],
)
def test_a_fit_with_defaults_does_not_worsen_a_trained_network(data, outputs, recipe):
    network, loader, plain = trained(data, outputs)
    test = data(2000, 2)
    before = fb.evaluate(plain, test, progress=False)
    posterior = fb.fit(fb.to_stochastic(network, {"*": recipe}), loader, seed=0, **QUIET)
    after = fb.evaluate(posterior, test, progress=False)
    assert after["nll"] < before["nll"] + 0.02
    if outputs == 1:
        assert after["rmse"] < 1.1 * before["rmse"]
        assert 0.8 < after["coverage_90"] < 0.98
        assert posterior.report.noise_scale.residual < before["rmse"]


def test_gains_are_those_of_the_predictions_and_are_saved(tmp_path):
    network, loader, plain = trained(rings, 2)
    held_out = rings(500, 3)
    expected = -plain.predict(held_out[0]).nll(held_out[1]).mean()
    posterior = fb.fit(fb.to_stochastic(network, {"*": NormalAffine()}), loader, validation=held_out, **QUIET)
    report = posterior.report
    assert report.held_out_gain.before == pytest.approx(float(expected), abs=1e-5)
    after = -posterior.predict(held_out[0], 64, seed=0).nll(held_out[1]).mean()
    assert report.held_out_gain.after == pytest.approx(float(after), abs=1e-5)
    assert 0 < report.held_out_gain.standard_error < 0.1
    assert not report.held_out_gain.is_loss
    assert report.elbo.after > report.elbo.before + 2 * report.elbo.standard_error
    assert abs(report.memorization) < 0.2
    again = fb.load_posterior(posterior.save(tmp_path / "posterior"), network)
    assert again.report == report
    assert str(again.report) == str(report)


def test_the_report_is_optional():
    model = fb.to_stochastic(MLP(2, (8,), 2), {"*": NormalAffine()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = fb.fit(
            model, [rings(64, 1)], epochs=1, noise_lr=1e-7, report=False, **QUIET, validation=None
        )
    assert posterior.report is None


@pytest.mark.filterwarnings("ignore:the predictive standard deviation")
def test_warning_if_the_held_out_log_likelihood_decreases():
    network, loader, _ = trained(curve, 1)
    model = fb.to_stochastic(network, {"*": NormalAffine(base_scale=0.5, prior_scale=0.3)})
    options = {"epochs": 1, "weight_lr": 0.0, "noise_lr": 1e-6, "schedule": None}
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.fit(model, loader, validation=curve(500, 3), **options, **QUIET)
    loss = of_kind(caught, "gain")[0]
    assert loss.fields["after"] < loss.fields["before"]
    assert posterior.report.held_out_gain.is_loss


def test_the_elbo_of_examples_is_reproducible_and_restores_all_generators():
    model = fb.to_stochastic(MLP(2, (8,), 2), {"*": NormalPlanar()})
    loader = TensorLoader(*rings(64, 1), batch_size=32, shuffle=True)
    objective = fb.ELBO(fb.likelihoods.Categorical(), 64, beta=0.5, gamma=0.1)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    batches = spread_batches(loader, None)
    values = example_elbos(model, objective, batches)
    assert torch.equal(example_elbos(model, objective, batches), values)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state[1:]  # noqa: NPY002
    torch.manual_seed(0)
    expected = fb.ELBO(fb.likelihoods.Categorical(), 64, beta=0.5, gamma=0.1)(model.eval(), *batches[0]).elbo
    assert values[:32].mean().item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # such a fit has other problems, too
def test_warning_if_the_elbo_decreases():
    network, loader, _ = trained(rings, 2, epochs=5)
    with pytest.warns(FlowBNNWarning) as caught:
        fb.fit(
            fb.to_stochastic(network, {"*": NormalAffine()}),
            loader,
            epochs=1,
            weight_lr=1.0,
            **QUIET,
            validation=None,
        )
    loss = of_kind(caught, "elbo")[0]
    assert loss.fields["after"] < loss.fields["before"]


# wide predictions, layers that have not moved
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_the_elbo_is_compared_at_the_better_noise_scale():
    """The noise scale of the predictions leaves out the spread of the draws. There the ELBO of wide draws is low."""
    network, _, _ = trained(curve, 1)
    loader = [curve(300, 1)]  # in one batch, so that the noise scale starts at the residuals of all examples
    model = fb.to_stochastic(network, {"*": NormalAffine(base_scale=0.2)})
    posterior = fb.fit(
        model, loader, epochs=1, weight_lr=0.0, noise_lr=1e-9, seed=0, **QUIET, validation=None
    )
    assert posterior.report.elbo.after == pytest.approx(posterior.report.elbo.before, rel=0.05)


def test_warning_if_the_weights_have_memorized_the_data():
    torch.manual_seed(0)
    inputs, labels = torch.randn(40, 5), torch.randint(2, (40,))  # nothing to learn
    loader = [(inputs, labels)]
    plain = fb.MLE(epochs=300, lr=0.02).fit(MLP(5, (64,), 2), loader, seed=0, **QUIET)
    held_out = torch.randn(200, 5), torch.randint(2, (200,))
    model = fb.to_stochastic(plain.model, {"*": NormalAffine()})
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.fit(model, loader, epochs=5, validation=held_out, **QUIET)
    assert of_kind(caught, "memorized")
    assert posterior.report.memorization > 0.1


@pytest.mark.filterwarnings("ignore:the fit has lowered the ELBO")
@pytest.mark.filterwarnings("ignore:the predictive standard deviation")
def test_warning_if_the_elbo_drops_during_training():
    class Drifting(TensorLoader):
        """Targets that increase at every reading, so that the ELBO drops on every machine."""

        def __iter__(self):
            self.tensors[1].add_(1.0)
            return super().__iter__()

    network, _, _ = trained(curve, 1)
    loader = Drifting(*curve(300, 1), batch_size=6)
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    options = {"epochs": 6, "schedule": None, "seed": 0, "weight_lr": 1e-5, "noise_lr": 1e-5}
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.fit(model, loader, **options, **QUIET, validation=None)
    drop, elbo = of_kind(caught, "elbo_drop")[0].fields["drop"], posterior.history["elbo"]
    assert drop == pytest.approx(max(map(fmean, pairwise(elbo[:-2]))) - fmean(elbo[-2:]))
    assert posterior.report.elbo_drop == drop


def collapsed_layers(caught, kind: str) -> list[str]:
    return [layer for warning in of_kind(caught, kind) for layer in warning.fields["layers"]]


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # further layers of these short fits
def test_warnings_name_collapsed_and_idle_layers():
    warnings.resetwarnings()
    warnings.simplefilter("always", FlowBNNWarning)
    short = {"epochs": 1, "noise_lr": 1e-7, **QUIET}
    model = fb.to_stochastic(blob_network(), {"0": NormalAffine(base_scale=0.5)})
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.fit(model, blob_loader(), **short, validation=None)
    assert collapsed_layers(caught, "prior") == ["0"]
    assert posterior.report.collapsed == {"0": "prior"}
    model = fb.to_stochastic(blob_network(), {"2": NormalAffine()})
    with torch.no_grad():
        fb.noise.noise_layers(model)["2"].transform[0].raw_log_scale.fill_(-6.0)
    with pytest.warns(FlowBNNWarning) as caught:
        fb.fit(model, blob_loader(), **short, validation=None)
    assert collapsed_layers(caught, "point") == ["2"]
    assert {one.filename for one in caught} == {__file__}  # warnings point to the line of the caller


def test_one_warning_for_each_problem():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)), nn.Linear(4, 3))
            self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.deep(x) + nn.functional.linear(x, self.first.weight + self.second.weight)

    model = fb.to_stochastic(Deep(), {"*": NormalAffine(base_scale=0.5)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fb.fit(model, blob_loader(), epochs=1, noise_lr=1e-7, **QUIET, validation=None)
    assert [one.message.fields["kind"] for one in caught] == ["idle", "prior"]
    assert collapsed_layers(caught, "idle") == ["first", "second"]
    assert collapsed_layers(caught, "prior") == [f"deep.{number}" for number in range(8)]


# a short fit leaves the noise at its prior
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_networks_whose_buffers_are_resized_have_a_report():
    class Cached(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("cache", torch.zeros(0))

        def forward(self, x):
            self.cache = torch.cat([self.cache, x.new_ones(1)])
            return super().forward(x)

    model = fb.to_stochastic(Cached(2, 2), {"*": NormalAffine()})
    posterior = fb.fit(model, [rings(64, 1)], epochs=2, seed=0, **QUIET, validation=None)
    assert posterior.report.elbo is not None
