"""``fb.fit`` with no argument but the loader leaves a trained network no worse, and says so where it cannot."""

import math
import random
from functools import cache
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.variational.base import Pace, late_rise
from flowbnn.methods.variational.gain import bound_of_given, elbos
from flowbnn.models import MLP
from flowbnn.noise import NormalAffine, NormalPlanar
from flowbnn.training import History

QUIET = {"progress": False, "accelerator": "cpu"}


def rings(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two noisy rings that overlap: no network separates them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (number,), generator=generator)
    angle = 2 * math.pi * torch.rand(number, generator=generator)
    radius = 1.0 + labels + 0.4 * torch.randn(number, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1), labels


def curve(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(number, 1, generator=generator) - 2
    return x, (2 * x).sin() + 0.05 * torch.randn(number, 1, generator=generator)


@cache
def trained(data, outputs: int, epochs: int = 60) -> tuple[nn.Module, TensorLoader, object]:
    torch.manual_seed(0)
    loader = TensorLoader(*data(300, 1), batch_size=32, shuffle=True)
    width = 2 if data is rings else 1
    plain = fb.MLE(epochs=epochs, lr=0.01).fit(MLP(width, (32,), outputs), loader, seed=0, **QUIET)
    return plain.model, loader, plain


@pytest.mark.parametrize(
    ("data", "outputs", "recipe"),
    [(rings, 2, NormalPlanar()), (curve, 1, NormalAffine())],
    ids=["classes-planar", "curve-gaussian"],
)
def test_a_trained_network_is_no_worse_after_a_fit_with_defaults(data, outputs, recipe):
    network, loader, plain = trained(data, outputs)
    test = data(2000, 2)
    before = fb.evaluate(plain, test, progress=False)
    posterior = fb.fit(fb.to_stochastic(network, {"*": recipe}), loader, seed=0, **QUIET)
    after = fb.evaluate(posterior, test, progress=False)
    assert after["nll"] < before["nll"] + 0.02
    if outputs == 1:
        assert after["rmse"] < 1.1 * before["rmse"]
        assert 0.8 < after["coverage_90"] < 0.98


def test_the_gain_is_measured_example_by_example(tmp_path):
    """And a network that has not memorised the loader is not warned of, with validation data."""
    network, loader, plain = trained(rings, 2)
    held_out = rings(500, 3)
    expected = -plain.predict(held_out[0]).nll(held_out[1]).mean()
    posterior = fb.fit(fb.to_stochastic(network, {"*": NormalAffine()}), loader, validation=held_out, **QUIET)
    assert posterior.gain.before == pytest.approx(float(expected), abs=1e-5)
    after = -posterior.predict(held_out[0], 64, seed=0).nll(held_out[1]).mean()
    assert posterior.gain.after == pytest.approx(float(after), abs=1e-5)
    assert 0 < posterior.gain.error < 0.1
    assert posterior.gain.after > posterior.gain.before - 2 * posterior.gain.error
    assert posterior.bound.after > posterior.bound.before + 2 * posterior.bound.error
    again = fb.load_posterior(posterior.save(tmp_path / "one"), network)
    assert (again.gain, again.bound) == (posterior.gain, posterior.bound)
    assert str(again.gain) == str(posterior.gain)


@pytest.mark.filterwarnings("ignore:the predictive standard deviation")
def test_a_loss_is_warned_of():
    network, loader, _ = trained(curve, 1)
    model = fb.to_stochastic(network, {"*": NormalAffine(base_scale=0.5, prior_scale=0.3)})
    with pytest.warns(FlowBNNWarning, match="predicts worse") as caught:
        fb.fit(
            model,
            loader,
            epochs=1,
            weight_lr=0.0,
            noise_lr=1e-6,
            schedule=None,
            validation=curve(500, 3),
            **QUIET,
        )
    loss = next(w.message for w in caught if w.message.fields.get("kind") == "gain")
    assert loss.fields["after"] < loss.fields["before"]


def test_the_bound_before_and_after_is_that_of_the_same_draws_and_disturbs_nothing():
    model = fb.to_stochastic(MLP(2, (8,), 2), {"*": NormalPlanar()})
    loader = TensorLoader(*rings(64, 1), batch_size=32, shuffle=True)
    objective = fb.ELBO(fb.likelihoods.Categorical(), 64, beta=0.5, gamma=0.1)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    batches, before = bound_of_given(model, objective, loader, None)
    assert torch.equal(elbos(model, objective, batches), before)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state[1:]  # noqa: NPY002
    torch.manual_seed(0)
    expected = fb.ELBO(fb.likelihoods.Categorical(), 64, beta=0.5, gamma=0.1)(model.eval(), *batches[0]).elbo
    assert before[:32].mean().item() == pytest.approx(expected.item(), abs=1e-5)
    assert bound_of_given(model, objective, [(torch.ones(2, 3), torch.zeros(2).long())], None) is None


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # the other ailments of such a fit
def test_an_elbo_worse_than_that_of_the_given_network_is_warned_of():
    network, loader, _ = trained(rings, 2, epochs=5)
    with pytest.warns(FlowBNNWarning, match="made the ELBO worse") as caught:
        fb.fit(fb.to_stochastic(network, {"*": NormalAffine()}), loader, epochs=1, weight_lr=1.0, **QUIET)
    loss = next(w.message for w in caught if w.message.fields.get("kind") == "elbo")
    assert loss.fields["after"] < loss.fields["before"]


@pytest.mark.filterwarnings(
    "ignore::flowbnn.errors.FlowBNNWarning"
)  # of predictions that are wide, layers that have not moved
def test_the_bound_has_the_better_noise_level_not_always_that_of_the_predictive():
    """Which does not count the spread of the draws: at it, the ELBO of wide draws is low, and every such fit would be called a loss."""
    network, loader, _ = trained(curve, 1)
    model = fb.to_stochastic(network, {"*": NormalAffine(base_scale=0.2)})
    posterior = fb.fit(model, loader, epochs=1, weight_lr=0.0, noise_lr=1e-9, seed=0, **QUIET)
    assert posterior.bound.after == pytest.approx(posterior.bound.before, rel=0.05)  # nothing has moved


def test_weights_that_have_memorised_the_loader_are_warned_of():
    torch.manual_seed(0)
    inputs, labels = torch.randn(40, 5), torch.randint(2, (40,))  # nothing to learn
    loader = [(inputs, labels)]
    plain = fb.MLE(epochs=300, lr=0.02).fit(MLP(5, (64,), 2), loader, seed=0, **QUIET)
    fresh = torch.randn(200, 5), torch.randint(2, (200,))
    model = fb.to_stochastic(plain.model, {"*": NormalAffine()})
    with pytest.warns(FlowBNNWarning, match=r"memorised .* fb\.calibrate") as caught:
        fb.fit(model, loader, epochs=5, validation=fresh, **QUIET)
    assert any(w.message.fields.get("kind") == "memorised" for w in caught)


def test_without_a_length_the_rates_are_constant():
    class Stream:
        def __iter__(self):
            yield from TensorLoader(*rings(64, 1), batch_size=32)

    model = fb.to_stochastic(MLP(2, (8,), 2), {"*": NormalAffine()})
    posterior = fb.fit(model, Stream(), epochs=2, num_data=64, **QUIET)
    assert posterior.history["learning_rate"] == [2e-4, 2e-4]


def test_an_elbo_that_has_not_settled_is_warned_of():
    torch.manual_seed(0)
    model = fb.to_stochastic(MLP(2, (32,), 2), {"*": NormalAffine()})
    with pytest.warns(FlowBNNWarning, match="has not settled") as caught:
        fb.fit(model, [rings(300, 1)], schedule=None, weight_lr=1e-3, noise_lr=1e-3, **QUIET)
    assert next(w.message for w in caught if w.message.fields.get("kind") == "settled").fields["rise"] > 0.01


class Killed(list):
    """Batches of a process that dies at one of them."""

    def __init__(self, batches, at):
        super().__init__(batches)
        self.left = at

    def __iter__(self):
        for batch in super().__iter__():
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.filterwarnings(
    "ignore::flowbnn.errors.FlowBNNWarning"
)  # of layers back at their prior: so few examples
def test_a_fit_goes_on_until_the_elbo_has_settled_also_when_it_is_killed(tmp_path):
    torch.manual_seed(0)
    inputs, labels = rings(96, 1)
    batches = list(zip(inputs.split(8), labels.split(8), strict=True))
    network = MLP(2, (4,), 2)

    def fitted(loader, **more):
        model = fb.to_stochastic(network, {"*": NormalAffine()})
        return fb.fit(model, loader, seed=0, **more, **QUIET)

    whole = fitted(batches, checkpoint=tmp_path / "whole")
    epochs, rates = whole.history.epochs, whole.history["learning_rate"]
    turn = sum(rate == 2e-4 for rate in rates)  # the epochs with the full rate
    assert turn >= 8
    assert epochs == turn + turn // 2 < 84  # of 12 steps; 84 are the budget
    rises = [late_rise(whole.history["elbo"][:n], 4) for n in range(8, turn + 1)]
    assert rises[-1] <= 0.01 < min(rises[:-1])
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0
    for name, done in (("early", turn // 2), ("late", turn + 1)):
        with pytest.raises(KeyboardInterrupt):
            fitted(Killed(batches, at=12 * done + 7 + 2), checkpoint=tmp_path / name)
        resumed = fitted(batches, checkpoint=tmp_path / name, resume=True)
        assert resumed.history.records == whole.history.records
        for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(a, b)
    again = fitted(batches, checkpoint=tmp_path / "whole", resume=True)  # which is complete
    assert again.history.records == whole.history.records
    assert fb.training.checkpoint.unfinished(tmp_path / "whole" / "last.safetensors") is None


def test_a_schedule_is_planned_for_half_the_budget_and_given_epochs_are_all_of_a_cosine():
    batches = [rings(16, 1)] * 100  # 10 epochs are the budget
    model = fb.to_stochastic(MLP(2, (4,), 2), {"*": NormalAffine()})

    def schedule(optimizer, steps):
        raise FlowBNNError(f"{steps} steps")

    with pytest.raises(FlowBNNError, match="500 steps"):
        fb.fit(model, batches, schedule=schedule, **QUIET)
    rates = fb.fit(model, batches[:2], epochs=3, **QUIET).history["learning_rate"]
    assert rates == pytest.approx([2e-4 * (0.5 + 0.5 * math.cos(math.pi * t / 3)) for t in (1, 2, 3)])


def test_the_elbo_is_not_looked_at_while_the_weight_of_the_kl_grows():
    record = History([{"elbo": -1.0}] * 60)
    assert Pace(steps=10, budget=60)(record) == 12
    assert Pace(steps=10, budget=60, first=15)(record) == 23 + 11
    assert Pace(steps=10, budget=60, falls=False)(record) == 8
    rising = Pace(steps=10, budget=60)
    assert rising(History([{"elbo": 0.1 * epoch} for epoch in range(60)])) == 60
    assert (rising.turn, rising.rise) == (40, pytest.approx(0.4))


def test_rates_are_cut_where_the_elbo_falls_and_no_fall_counts_as_settled():
    def record(*values):
        return History([{"elbo": value} for value in values])

    pace = Pace(steps=20, budget=30)  # two epochs make 40 steps
    falls = (0.0, -1.3, 0.5, 0.4, 0.1, -2.5)  # a sorted loader's, at rates that are too large
    assert pace(record(*falls)) == 30
    assert (pace.cuts, pace.fall) == ([6], pytest.approx(1.65))
    assert [pace.rate(20 * epoch) for epoch in (5, 6, 19)] == [1.0, 0.25, 0.25]
    again = (*falls, -1.0, -3.0, -1.1, -3.1)  # not falling any more, and yet below what it was
    assert pace(record(*again)) == 30
    assert pace.cuts == [6, 10]
    assert pace.rate(200) == 1 / 16
    assert pace(record(*again, 0.6, 0.65, 0.7, 0.71, 0.7, 0.7)) == 16 + 8
    assert pace.rate(20 * 20) == pytest.approx(0.5 / 16)
    for quiet in ((0.0, 0.2, 0.3, 0.25, 0.2, 0.22), (0.0, 0.2, 0.5, 0.2, 0.4, 0.1)):  # a little, or by chance
        assert pace(record(*quiet)) < 30
        assert not pace.cuts


@pytest.mark.filterwarnings("ignore:the fit has made the ELBO worse")
@pytest.mark.filterwarnings("ignore:the predictive standard deviation")
def test_an_elbo_that_falls_is_warned_of():
    class Drifting(TensorLoader):  # falls on every machine; what a sorted loader does is chaotic
        def __iter__(self):
            self.tensors[1].add_(1.0)
            return super().__iter__()

    network, _, _ = trained(curve, 1)
    loader = Drifting(*curve(300, 1), batch_size=6)
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    with pytest.warns(FlowBNNWarning, match="shuffle=True") as caught:
        posterior = fb.fit(
            model, loader, epochs=6, schedule=None, seed=0, weight_lr=1e-5, noise_lr=1e-5, **QUIET
        )
    warning = next(w.message for w in caught if w.message.fields.get("kind") == "fall")
    elbo = posterior.history["elbo"]
    assert warning.fields["fall"] == pytest.approx(max(map(fmean, pairwise(elbo[:-2]))) - fmean(elbo[-2:]))
