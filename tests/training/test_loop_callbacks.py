"""Tests of callbacks: what they get, how they stop a run, and that they change neither the run nor its checkpoint."""

import numpy as np
import pytest
import torch
from objectives import train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.training import EarlyStop, TrainingOptions


def run(callbacks=(), validate=None, **options):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 1))
    inputs = torch.randn(12, 2, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=3, shuffle=True)

    def step(model, batch, clock):
        loss = (model(batch[0]) - batch[1]).square().mean()
        return loss, {"log_likelihood": -loss}

    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    settings = TrainingOptions(
        **{"epochs": 4, "accelerator": "cpu", "seed": 4, "callbacks": callbacks} | options
    )
    return network, train(network, step, optimizer, loader, settings, validate=validate)


def weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def test_callbacks_get_every_epoch():
    epochs, modes = [], []

    def callback(epoch):
        epochs.append(epoch)
        modes.append(epoch.model.training)

    validate = {"validate": lambda model: {"nll": 1.5}}
    network, history = run([callback], epochs=3, description="first", **validate)
    assert [(epoch.number, epoch.epochs, epoch.description) for epoch in epochs] == [
        (number, 3, "first") for number in (1, 2, 3)
    ]
    assert [epoch.metrics for epoch in epochs] == history.records
    assert epochs[-1].metrics["validation_nll"] == 1.5
    assert all(epoch.model is network for epoch in epochs)
    assert modes == [False] * 3
    assert 0 < epochs[0].seconds < epochs[2].seconds <= history.seconds
    assert network.training


def test_callbacks_do_not_change_the_run():
    def draw(epoch):
        torch.rand(5)
        np.random.rand(5)  # noqa: NPY002
        epoch.metrics.clear()
        epoch.model[1].train()

    (plain, expected), (observed, history) = run(), run([draw])
    assert torch.equal(weights(plain), weights(observed))
    assert expected.records == history.records


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True)], ids=["bool", "numpy", "torch"])
def test_a_run_ends_if_a_callback_returns_true(value):
    calls = []
    callbacks = [lambda epoch: epoch.number == 2 and value, lambda epoch: calls.append(epoch.number)]
    _, history = run(callbacks)
    assert history.epochs == 2
    assert history.stopped_early
    assert calls == [1, 2]


@pytest.mark.parametrize("value", [None, False, 1, "True", torch.ones(2), np.float64(1.0)], ids=repr)
def test_other_results_do_not_end_a_run(value):
    assert run([lambda epoch: value])[1].epochs == 4


def test_a_run_that_a_callback_ended_keeps_the_best_weights():
    scores = iter([1.0, 0.5, 2.0, 3.0])
    rule = EarlyStop("validation_nll", patience=10)
    snapshots = []

    def callback(epoch):
        snapshots.append(weights(epoch.model))
        return epoch.number == 3

    network, history = run([callback], validate=lambda model: {"nll": next(scores)}, early_stop=rule)
    assert history.best_epoch == 1
    assert torch.equal(weights(network), snapshots[1])


@pytest.mark.parametrize("validate", [None, lambda model: {"nll": 1.0}], ids=["plain", "validated"])
def test_a_run_resumes_at_the_epoch_whose_callback_failed(tmp_path, validate):
    expected, expected_history = run(validate=validate)
    numbers = []

    def failing(epoch):
        numbers.append(epoch.number)
        if numbers == [1, 2]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run([failing], validate=validate, checkpoint=tmp_path)
    network, history = run([failing], validate=validate, checkpoint=tmp_path, resume=True)
    assert numbers == [1, 2, 2, 3, 4]
    assert torch.equal(weights(network), weights(expected))
    assert history.records == expected_history.records


def test_a_run_that_a_callback_ended_stays_so_unless_it_is_removed(tmp_path):
    expected, _ = run()
    stop = [lambda epoch: epoch.number == 2]
    stopped, _ = run(stop, checkpoint=tmp_path)
    again, history = run(stop, checkpoint=tmp_path, resume=True)
    assert torch.equal(weights(again), weights(stopped))
    assert (history.epochs, history.stopped_early) == (2, True)
    network, history = run(checkpoint=tmp_path, resume=True)
    assert torch.equal(weights(network), weights(expected))
    assert (history.epochs, history.stopped_early) == (4, False)


DATA = torch.randn(16, 2, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
QUIET = {"accelerator": "cpu", "seed": 0}


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # two epochs are too few
def test_every_fit_calls_callbacks():
    calls = []

    def callback(epoch):
        calls.append((epoch.description, epoch.number, type(epoch.model).__name__))
        return epoch.number == 2

    options = {"callbacks": [callback], **QUIET}
    fb.DeepEnsemble(2, epochs=3).fit(nn.Linear(2, 2), DATA, validation=None, **options)
    assert calls == [(f"member {member}/2", number, "Linear") for member in (1, 2) for number in (1, 2)]
    fits = [
        lambda: fb.fit(
            fb.to_stochastic(nn.Linear(2, 2), {"*": fb.noise.NormalAffine()}),
            DATA,
            epochs=3,
            validation=None,
            **options,
        ),
        lambda: fb.Laplace(epochs=3).fit(nn.Linear(2, 2), DATA, **options),
        lambda: fb.SWAG(epochs=6).fit(nn.Linear(2, 2), DATA, **options),
        lambda: fb.fit_density(fb.flows.RealNVP(2, length=1), DATA[0], epochs=3, validation=None, **options),
        lambda: fb.fit_target(
            fb.flows.RealNVP(2, length=1), lambda x: -x.square().sum(-1), epochs=3, samples=2, **options
        ),
        lambda: fb.vae.fit_autoencoder(
            fb.vae.VAE((2,), 1, hidden=(2,), decoder="gaussian"), DATA[0], epochs=3, **options
        ),
    ]
    models = []
    for fit in fits:
        calls.clear()
        fit()
        assert [number for _, number, _ in calls][:2] == [1, 2]
        assert max(number for _, number, _ in calls) == 2
        models.append(calls[0][2])
    assert models == ["Linear", "Linear", "Linear", "RealNVP", "RealNVP", "VAE"]


@pytest.mark.parametrize("method", [fb.SWAG(epochs=6), fb.SGLD(epochs=4, samples=2, cycles=1)], ids=repr)
def test_runs_that_end_before_their_snapshots_are_refused(method):
    with pytest.raises(FlowBNNError) as caught:
        method.fit(nn.Linear(2, 2), DATA, callbacks=[lambda epoch: True], **QUIET)
    assert (caught.value.kind, caught.value.argument) == ("stopped", "callbacks")
