"""PlateauSchedule: length and learning rates of a fit follow the ELBO."""

import math

import pytest
import torch
from problems import QUIET, of_kind
from report_problems import rings

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.schedule import PlateauRun, PlateauSchedule, elbo_drop, elbo_gain
from flowbnn.models import MLP
from flowbnn.noise import NormalAffine
from flowbnn.training import History


def history_of(*values: float) -> History:
    return History([{"elbo": value} for value in values])


def plateau_run(steps_per_epoch: int = 10, max_epochs: int = 60, **options) -> PlateauRun:
    return PlateauRun(PlateauSchedule(), steps_per_epoch, max_epochs, **options)


def test_epochs_of_the_warmup_are_skipped():
    constant = history_of(*[-1.0] * 60)
    assert plateau_run().update(constant) == 12
    assert plateau_run(skip_epochs=15).update(constant) == 23 + 11
    assert plateau_run(decay=False).update(constant) == 8
    rising = plateau_run()
    assert rising.update(history_of(*[0.1 * epoch for epoch in range(60)])) == 60
    assert (rising.plateau_epoch, rising.elbo_gain) == (40, pytest.approx(0.4))


def test_a_drop_of_the_elbo_lowers_the_rates_and_is_no_plateau():
    run = plateau_run(steps_per_epoch=20, max_epochs=30)  # two epochs make a window of 40 steps
    drop = (0.0, -1.3, 0.5, 0.4, 0.1, -2.5)
    assert run.update(history_of(*drop)) == 30
    assert (run.cut_epochs, run.elbo_drop) == ([6], pytest.approx(1.65))
    assert [run.rate(20 * epoch) for epoch in (5, 6, 19)] == [1.0, 0.25, 0.25]
    second_drop = (*drop, -1.0, -3.0, -1.1, -3.1)  # constant, but below the best epochs
    assert run.update(history_of(*second_drop)) == 30
    assert run.cut_epochs == [6, 10]
    assert run.rate(200) == 1 / 16
    assert run.update(history_of(*second_drop, 0.6, 0.65, 0.7, 0.71, 0.7, 0.7)) == 16 + 8
    assert run.rate(20 * 20) == pytest.approx(0.5 / 16)
    for small_drop in ((0.0, 0.2, 0.3, 0.25, 0.2, 0.22), (0.0, 0.2, 0.5, 0.2, 0.4, 0.1)):
        assert run.update(history_of(*small_drop)) < 30
        assert not run.cut_epochs


def test_constant_rates_for_a_loader_without_length():
    class Stream:
        def __iter__(self):
            yield from TensorLoader(*rings(64, 1), batch_size=32)

    model = fb.to_stochastic(MLP(2, (8,), 2), {"*": NormalAffine()})
    posterior = fb.fit(model, Stream(), epochs=2, num_data=64, **QUIET, validation=None)
    assert posterior.history["learning_rate"] == [2e-4, 2e-4]


def test_warning_if_the_elbo_has_not_converged():
    torch.manual_seed(0)
    model = fb.to_stochastic(MLP(2, (32,), 2), {"*": NormalAffine()})
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.fit(
            model, [rings(300, 1)], schedule=None, weight_lr=1e-3, noise_lr=1e-3, **QUIET, validation=None
        )
    assert of_kind(caught, "convergence")[0].fields["gain"] > 0.01
    assert posterior.report.elbo_gain > 0.01


class Killed(list):
    """List of batches that raises KeyboardInterrupt at the batch of a given number."""

    def __init__(self, batches, at):
        super().__init__(batches)
        self.remaining = at

    def __iter__(self):
        for batch in super().__iter__():
            self.remaining -= 1
            if self.remaining == 0:
                raise KeyboardInterrupt
            yield batch


# so few examples leave the noise at its prior
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_a_fit_ends_at_the_plateau_also_after_an_interruption(tmp_path):
    torch.manual_seed(0)
    inputs, labels = rings(96, 1)
    batches = list(zip(inputs.split(8), labels.split(8), strict=True))
    network = MLP(2, (4,), 2)

    def fit(loader, **options):
        model = fb.to_stochastic(network, {"*": NormalAffine()})
        return fb.fit(model, loader, seed=0, **options, **QUIET, validation=None)

    complete = fit(batches, checkpoint=tmp_path / "complete")
    epochs, rates = complete.history.epochs, complete.history["learning_rate"]
    plateau = sum(rate == 2e-4 for rate in rates)  # epochs with the full rate
    assert plateau >= 8
    assert epochs == plateau + plateau // 2 < 84  # 84 epochs of 12 steps are the largest number
    gains = [elbo_gain(complete.history["elbo"][:n], 4) for n in range(8, plateau + 1)]
    assert gains[-1] <= 0.01 < min(gains[:-1])
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0
    for name, done in (("early", plateau // 2), ("late", plateau + 1)):
        with pytest.raises(KeyboardInterrupt):
            # one reading precedes training
            fit(Killed(batches, at=12 * (1 + done) + 7), checkpoint=tmp_path / name)
        resumed = fit(batches, checkpoint=tmp_path / name, resume=True)
        assert resumed.history.records == complete.history.records
        for a, b in zip(complete.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(a, b)
    again = fit(batches, checkpoint=tmp_path / "complete", resume=True)
    assert again.history.records == complete.history.records
    assert fb.training.checkpoint.unfinished(tmp_path / "complete" / "last.safetensors") is None


def test_the_length_of_other_schedules():
    batches = [rings(16, 1)] * 100  # at most 10 epochs
    model = fb.to_stochastic(MLP(2, (4,), 2), {"*": NormalAffine()})
    steps_of_schedule = []

    def schedule(optimizer, steps):
        steps_of_schedule.append(steps)
        raise FlowBNNError("stop")

    with pytest.raises(FlowBNNError):
        fb.fit(model, batches, schedule=schedule, **QUIET, validation=None)
    assert steps_of_schedule == [500]
    rates = fb.fit(model, batches[:2], epochs=3, **QUIET, validation=None).history["learning_rate"]
    assert rates == pytest.approx([2e-4 * (0.5 + 0.5 * math.cos(math.pi * t / 3)) for t in (1, 2, 3)])
    schedule = PlateauSchedule(window=1, tolerance=10.0)
    short = fb.fit(model, batches[:10], schedule=schedule, **QUIET, validation=None)
    assert short.history.epochs == 6  # a plateau after two windows of two epochs


@pytest.mark.parametrize("window", [1, 2, 5])
def test_elbo_drop_is_the_largest_of_all_windows(window):
    """Every earlier window is compared with the last one. Its values must all exceed those of the last window."""
    walks = torch.randn(40, 60, generator=torch.Generator().manual_seed(0)).cumsum(1)
    for count, values in zip(range(21, 61), walks.tolist(), strict=True):
        values = values[:count]
        width = max(window, count // 10)
        last = values[-width:]
        earlier = [values[start : start + width] for start in range(count - 2 * width + 1)]
        drops = [(sum(group) - sum(last)) / width for group in earlier if min(group) > max(last)]
        assert elbo_drop(values, window) == pytest.approx(max(drops, default=0.0))


@pytest.mark.parametrize("max_epochs", [1, 2, 10])
@pytest.mark.parametrize("decay", [True, False])
def test_a_run_shorter_than_two_windows_has_no_plateau(max_epochs, decay):
    run = PlateauRun(PlateauSchedule(window=400), steps_per_epoch=2, max_epochs=max_epochs, decay=decay)
    for epochs in range(max_epochs + 1):
        assert run.update(history_of(*[-1.0] * epochs)) == max_epochs


def test_a_short_schedule_ends_a_fit():
    data = torch.randn(60, 2), torch.arange(60) % 2
    schedule = PlateauSchedule(max_steps=30)
    point = fb.MLE(schedule=schedule).fit(torch.nn.Linear(2, 2), data, seed=0, progress=False)
    assert 1 <= point.history.epochs <= schedule.max_epochs(1) == 10
