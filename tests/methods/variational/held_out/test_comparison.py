"""Comparison of a fit with its initial network on held-out data. The result is never worse than the given network."""

from dataclasses import replace

import pytest
import torch
from problems import QUIET, of_kind
from report_problems import curve, rings, trained
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNWarning
from flowbnn.methods.variational.held_out import verification
from flowbnn.methods.variational.held_out.comparison import HeldOutComparison
from flowbnn.methods.variational.report import example_elbos, spread_batches
from flowbnn.models import MLP
from flowbnn.noise import Dropout, NormalAffine, NormalFlow, NormalPlanar
from flowbnn.posterior.report import Gain
from slow_cases import mark_slow

HARMFUL = {"epochs": 2, "weight_lr": 1.0, "schedule": None, "seed": 0}
RECIPES = {
    "affine": NormalAffine(),
    "planar": NormalPlanar(2),
    "spline": NormalFlow("nsf"),
    "mixture": NormalAffine(components=3),
    "full": NormalAffine(joint="full"),
    "chain": NormalAffine(joint="chain"),
    "low-rank": NormalAffine(joint="low-rank"),
    "joint flow": NormalPlanar(2, joint="layers"),
}


def nll(posterior: fb.Posterior, data) -> float:
    return fb.evaluate(posterior, data, progress=False)["nll"]


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in fb.noise.weight_parameters(model)]


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # such a fit has other problems, too
@pytest.mark.parametrize("name", mark_slow(RECIPES, ["affine", "planar", "mixture", "full"]))
def test_the_given_network_is_returned_if_the_fit_is_worse(name, tmp_path):
    network, loader, plain = trained(rings, 2)
    held_out = rings(300, 3)
    model = fb.to_stochastic(network, {"*": RECIPES[name]})
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.fit(model, loader, validation=held_out, **HARMFUL, **QUIET)
    warning = of_kind(caught, "gain")
    assert len(warning) == 1
    assert warning[0].fields["after"] < warning[0].fields["before"]
    assert not posterior.report.accepted
    assert posterior.history.epochs == 0  # the given network was not trained here
    assert not posterior.report.collapsed
    assert posterior.report.elbo is None
    assert posterior.report.elbo_drop == 0
    assert not of_kind(caught, "elbo")
    assert nll(posterior, held_out) == pytest.approx(nll(plain, held_out), abs=2e-3)
    for before, after in zip(weights_of(model), weights_of(posterior.model), strict=True):
        assert torch.equal(before, after)
    again = fb.load_posterior(posterior.save(tmp_path / "posterior"), network)
    assert again.report == posterior.report
    assert nll(again, held_out) == nll(posterior, held_out)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_a_regression_returns_to_the_noise_scale_of_the_given_network():
    network, loader, plain = trained(curve, 1)
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    posterior = fb.fit(model, loader, validation=curve(300, 3), **HARMFUL, **QUIET)
    assert not posterior.report.accepted
    assert posterior.report.noise_scale.noise == pytest.approx(posterior.likelihood.log_scale.exp().item())
    assert nll(posterior, curve(300, 4)) == pytest.approx(nll(plain, curve(300, 4)), abs=0.02)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_noise_that_was_fitted_before_is_restored():
    network, loader, _ = trained(rings, 2)
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    first = fb.fit(model, loader, epochs=2, validation=None, seed=0, **QUIET)
    second = fb.fit(first.model, loader, validation=rings(300, 3), **HARMFUL, **QUIET)
    assert not second.report.accepted
    for before, after in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # ten epochs do not converge
def test_a_better_fit_is_returned():
    torch.manual_seed(0)
    model = fb.to_stochastic(MLP(2, (16,), 2), {"*": NormalAffine()})
    loader = TensorLoader(*rings(300, 1), batch_size=32, shuffle=True)
    posterior = fb.fit(model, loader, epochs=10, weight_lr=0.01, seed=0, **QUIET)
    assert posterior.report.accepted
    assert posterior.report.held_out_gain.after > posterior.report.held_out_gain.before
    assert posterior.history.best_epoch is None  # the last epoch is better than the given network


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("repeated_gain", [0.1, -0.1])
def test_a_worse_fit_is_repeated_with_early_stopping(repeated_gain, monkeypatch):
    before = torch.linspace(-1.0, -0.5, 50)
    comparisons = iter([HeldOutComparison(before, before + gain, before) for gain in (-0.2, repeated_gain)])
    monkeypatch.setattr(verification, "compare_held_out", lambda fit: next(comparisons))
    network, loader, _ = trained(rings, 2)
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    posterior = fb.fit(model, loader, epochs=4, weight_lr=0.02, validation=rings(50, 3), seed=0, **QUIET)
    assert posterior.report.accepted == (repeated_gain > 0)
    gain = posterior.report.held_out_gain
    assert gain.after - gain.before == pytest.approx(0.1 if repeated_gain > 0 else -0.2)
    if repeated_gain > 0:
        values = posterior.history["validation_nll"]
        assert posterior.history.best_epoch == values.index(min(values))
        objective = fb.ELBO(posterior.likelihood, loader.num_data)
        elbos = example_elbos(posterior.model, objective, spread_batches(loader, 0))
        assert posterior.report.elbo.after == pytest.approx(float(elbos.mean()), abs=1e-5)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("gain", [-0.1, 0.1])
def test_retrained_networks_decide_if_the_weights_may_have_seen_the_held_out_rows(gain, monkeypatch):
    network, loader, _ = trained(rings, 2)
    monkeypatch.setattr(verification, "compare_retrained", lambda *_: Gain(-0.5, -0.5 + gain, 0.01))
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    posterior = fb.fit(model, loader, **HARMFUL, **QUIET)
    assert posterior.report.accepted == (gain > 0)
    assert posterior.report.held_out_gain == Gain(-0.5, -0.5 + gain, 0.01)
    if gain > 0:
        expected = fb.fit(model, loader, **HARMFUL, validation=None, **QUIET)
        compared = {"held_out_gain": None, "memorization": None}
        assert replace(posterior.report, **compared) == replace(expected.report, **compared)
        assert posterior.history.records == expected.history.records
        for a, b in zip(posterior.model.parameters(), expected.model.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_a_resumed_fit_makes_the_same_decision(tmp_path):
    torch.manual_seed(0)
    network, data = MLP(2, (8,), 2), rings(96, 1)

    class Killed(TensorLoader):
        remaining = 6

        def __iter__(self):
            type(self).remaining -= 1
            if self.remaining < 0:
                raise KeyboardInterrupt
            return super().__iter__()

    def fit(loader_cls, **options):
        model = fb.to_stochastic(network, {"*": NormalAffine()})
        loader = loader_cls(*data, batch_size=16, shuffle=True)
        return fb.fit(model, loader, epochs=8, weight_lr=0.01, seed=0, **options, **QUIET)

    complete = fit(TensorLoader)
    with pytest.raises(KeyboardInterrupt):
        fit(Killed, checkpoint=tmp_path)
    resumed = fit(TensorLoader, checkpoint=tmp_path, resume=True)
    assert resumed.history.records == complete.history.records
    assert resumed.report == complete.report
    for a, b in zip(complete.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_fits_that_cannot_be_verified():
    network, loader, _ = trained(rings, 2)

    class Stream:
        def __iter__(self):
            return iter(loader)

    short = {"epochs": 1, "seed": 0, **QUIET}
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.fit(fb.to_stochastic(network, {"*": NormalAffine()}), Stream(), num_data=300, **short)
    assert of_kind(caught, "split")
    assert posterior.report.held_out_gain is None
    dropout = fb.to_stochastic(network, {"*": Dropout(0.5)})
    posterior = fb.fit(dropout, loader, validation=rings(300, 3), **HARMFUL, **QUIET)
    assert posterior.report.accepted  # dropout has no width that could vanish
    assert posterior.report.held_out_gain.is_loss


def test_methods_find_their_number_of_epochs_on_held_out_data():
    data = TensorDataset(*rings(200, 1))
    loader = DataLoader(data, batch_size=40, shuffle=True)
    schedule = fb.methods.schedule.PlateauSchedule(max_steps=200, window=10, tolerance=0.05)
    for method in (
        fb.MLE(lr=0.01, schedule=schedule),
        fb.BayesByBackprop(lr=0.01, schedule=schedule),
        fb.DeepEnsemble(2, lr=0.01, schedule=schedule),
        fb.SWAG(lr=0.01, schedule=schedule),
    ):
        torch.manual_seed(0)
        history = method.fit(MLP(2, (8,), 2), loader, seed=0, **QUIET).history
        assert "validation_nll" in history, method
        assert 4 <= history.epochs <= 24 + 24, method
        unseen = method.fit(MLP(2, (8,), 2), loader, seed=0, validation=None, **QUIET).history
        assert "validation_nll" not in unseen, method
