"""Tests of predictions that run out of memory, and of the grouping of batches."""

import warnings

import pytest
import torch
from sampling_helpers import sample_outputs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.memory import is_out_of_memory
from flowbnn.posterior.loaders import OutputCollector, expected_rows, group_batches
from flowbnn.posterior.prediction import KEPT_BYTES

KINDS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes"
    ),
    "windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes"),
    "numpy": MemoryError(),
}


SIZES: list[int] = []  # rows of the passes, also of clones


@pytest.fixture(autouse=True)
def clear_sizes():
    SIZES.clear()


class Small(nn.Module):
    """A network on a device whose memory is full with ``room`` rows."""

    def __init__(self, room: int, error: BaseException) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.room, self.error = room, error

    def forward(self, x):
        x = torch.tanh(self.first(x))
        SIZES.append(len(x))
        if len(x) > self.room:
            raise self.error
        return self.last(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["sequential", "vmap"])
def test_passes_are_halved_until_they_fit(strategy, kind):
    torch.manual_seed(0)
    model = fb.to_stochastic(Small(10**6, KINDS[kind]), {"*": fb.noise.NormalAffine()}).eval()
    x = torch.randn(50, 4)
    expected = sample_outputs(model, x, 6, seed=0, strategy=strategy)
    model.room = 11
    SIZES.clear()
    with pytest.warns(fb.errors.FlowBNNWarning) as raised:
        found = sample_outputs(model, x, 6, seed=0, strategy=strategy, max_batch=100)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert [warning.message.kind for warning in raised] == ["memory"]
    fitting = [size for size in SIZES if size <= 11]
    assert max(fitting) > 11 // 2, "no smaller than need be"


def test_later_batches_use_the_smaller_pass():
    model = fb.to_stochastic(Small(10, KINDS["cuda"]), {"*": fb.noise.NormalAffine()}).eval()
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    with pytest.warns(fb.errors.FlowBNNWarning):
        prediction = posterior.predict(list(torch.randn(90, 4).split(30)), 4, seed=0)
    assert len(prediction) == 90
    assert sum(size > 10 for size in SIZES) <= 6


def test_a_point_posterior_halves_its_passes():
    network = Small(10, KINDS["cpu"])
    with pytest.warns(fb.errors.FlowBNNWarning) as raised:
        prediction = fb.posterior.PointPosterior(network, fb.likelihoods.Categorical()).predict(
            torch.randn(30, 4)
        )
    assert raised[0].message.kind == "memory"
    assert len(prediction) == 30


@pytest.mark.parametrize("strategy", ["sequential", "vmap"])
@pytest.mark.filterwarnings("ignore:memory ran out")
def test_a_single_row_that_does_not_fit_is_refused(strategy):
    model = fb.to_stochastic(Small(10**6, KINDS["cuda"]), {"*": fb.noise.NormalAffine()}).eval()
    sample_outputs(model, torch.randn(4, 4), 2)  # measures the network while there is memory
    model.room = 0
    with pytest.raises(fb.FlowBNNError) as caught:
        sample_outputs(model, torch.randn(4, 4), 4, strategy=strategy, max_batch=64)
    assert caught.value.kind == "memory"
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_other_errors_are_not_out_of_memory_errors():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x3)"))
    assert not is_out_of_memory(ValueError("out of memory"))
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    with pytest.raises(RuntimeError, match="must match the size|cannot be multiplied"):
        sample_outputs(model, torch.randn(2, 5), 3)


class Sizes(nn.Linear):
    def forward(self, x):
        SIZES.append(len(x))
        return super().forward(x)


def test_small_batches_are_predicted_together_in_order():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), Sizes(64, 3))
    model = fb.to_stochastic(network, {"0": fb.noise.NormalAffine()}).eval()
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    x, y = torch.randn(300, 4), torch.arange(300) % 3
    together = posterior.predict(x, 4, seed=0).samples
    SIZES.clear()
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    prediction, targets = posterior.predict_with_targets(loader, 4, seed=0)
    torch.testing.assert_close(prediction.samples, together, rtol=1e-5, atol=1e-6)
    assert torch.equal(targets, y)
    assert SIZES == [300], "one pass for the whole loader and all samples"
    SIZES.clear()
    limited = posterior.predict(loader, 4, seed=0, max_batch=100)
    torch.testing.assert_close(limited.samples, together, rtol=1e-5, atol=1e-6)
    assert 50 < max(SIZES) <= 100


def test_batches_of_different_shapes_are_not_joined():
    batches = [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 5), (torch.zeros(2, 5), torch.ones(2))]
    found = [(tuple(some.shape), len(truth)) for some, truth in group_batches(batches, lambda some: 100)]
    assert found == [((4, 3), 0), ((4, 5), 1)]
    pairs = [((torch.zeros(2, 3), {"mask": torch.ones(2, 1)}), torch.ones(2))] * 3
    ((both, truth),) = group_batches(pairs, lambda some: 100)
    assert both[0].shape == (6, 3)
    assert both[1]["mask"].shape == (6, 1)
    assert len(truth) == 3


class Counted:
    """A loader that says how many rows it has."""

    def __init__(self, number):
        self.num_data = number


def test_output_collector_accepts_more_or_fewer_rows_than_expected():
    parts = [torch.randn(3, count, 2) for count in (4, 1, 5, 2)]
    for expected in (0, 4, 12, 40):
        store = OutputCollector(Counted(expected))
        for chunk in parts:
            store.add(chunk)
        assert torch.equal(store.result()[0], torch.cat(parts, 1))
    store = OutputCollector(Counted(12))
    store.add(parts[0])
    base = store.tensor
    for chunk in parts[1:]:
        store.add(chunk)
    assert store.tensor is base, "allocated once"
    assert expected_rows(DataLoader(TensorDataset(torch.zeros(9, 2)), batch_size=2)) == 9
    assert expected_rows(iter([])) == 0
    with pytest.raises(fb.FlowBNNError) as caught:
        OutputCollector([]).result()
    assert caught.value.kind == "empty"


def test_many_equal_samples_of_a_point():
    posterior = fb.posterior.PointPosterior(nn.Linear(4, 3), fb.likelihoods.Categorical())
    x = torch.randn(9, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prediction = posterior.predict(list(x.split(2)), 3, max_batch=4)
    one = posterior.predict(x).samples
    torch.testing.assert_close(prediction.samples, one.expand(3, 9, 3))


@pytest.mark.parametrize("max_batch", [None, 1])
@pytest.mark.parametrize("noisy", [True, False])
def test_rows_are_predicted_one_at_a_time_if_two_do_not_fit(max_batch, noisy):
    model = Small(1, KINDS["cpu"])
    stochastic = fb.to_stochastic(model, {"*": fb.noise.NormalAffine()})
    posterior = (
        fb.posterior.NoisePosterior(stochastic, fb.likelihoods.Categorical())
        if noisy
        else fb.posterior.PointPosterior(model, fb.likelihoods.Categorical())
    )
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        found = posterior.predict(torch.randn(5, 4), 6 if noisy else 1, seed=0, max_batch=max_batch)
    assert found.probabilities.shape[0] == 5
    assert all((one.message.kind, one.message.fields["rows"]) == ("memory", 2) for one in raised)


def test_one_batch_of_pixels_is_reduced_some_rows_at_a_time(monkeypatch):
    torch.manual_seed(0)
    network = fb.to_stochastic(nn.Conv2d(2, 3, 1), {"*": fb.noise.NormalAffine(base_scale=0.5)}).eval()
    posterior = fb.posterior.NoisePosterior(network, fb.likelihoods.Categorical(class_axis=1))
    images, rows = torch.randn(12, 2, 16, 16), []
    expected = posterior.predict(images, 8, seed=0)
    original = posterior.outputs
    monkeypatch.setattr(posterior, "outputs", lambda *args: rows.append(len(args[0])) or original(*args))
    monkeypatch.setattr("flowbnn.posterior.prediction.Prediction.rows_per_group", lambda *_: 5)
    monkeypatch.setitem(KEPT_BYTES, False, 1000)
    monkeypatch.setitem(KEPT_BYTES, "auto", 1000)
    for keep_samples in ("auto", False):
        summary = posterior.predict(images, 8, seed=0, keep_samples=keep_samples)
        assert isinstance(summary, fb.predictive.PredictionSummary)
        for name in ("probabilities", "entropy", "mutual_information"):
            torch.testing.assert_close(getattr(summary, name), getattr(expected, name))
    assert rows == [5, 5, 2] * 2
    kept = posterior.predict(images, 8, seed=0, keep_samples=True)
    torch.testing.assert_close(kept.samples, expected.samples)
    assert rows[6:] == [12]


def test_predictions_without_summaries_keep_the_samples_of_one_batch(monkeypatch):
    torch.manual_seed(0)
    network = fb.to_stochastic(nn.Linear(2, 3), {"*": fb.noise.NormalAffine()}).eval()
    posterior = fb.posterior.NoisePosterior(network, fb.likelihoods.Categorical())
    inputs = torch.randn(40, 2)
    expected = posterior.predict(inputs, 8, seed=0)
    monkeypatch.setitem(KEPT_BYTES, "auto", 100)
    monkeypatch.setattr("flowbnn.posterior.base.summarize", lambda *_: None)
    monkeypatch.setattr("flowbnn.posterior.prediction.Prediction.rows_per_group", lambda *_: 7)
    result = posterior.predict(inputs, 8, seed=0)
    assert type(result) is type(expected)
    torch.testing.assert_close(result.samples, expected.samples)
