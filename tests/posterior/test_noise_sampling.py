"""Tests of sampled outputs: chunks, seeds, and networks with unusual axes."""

import pytest
import torch
from sampling_helpers import one_at_a_time, sample_outputs
from torch import nn

import flowbnn as fb
from conversion_networks import Residual
from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers
from flowbnn.noise.contexts import context_of
from flowbnn.noise.modes import align_batch_axes
from flowbnn.posterior.prediction import Prediction, PredictionCache, PredictOptions
from flowbnn.posterior.trace import trace_forward


class Counting(nn.Module):
    """Counts the rows that pass through it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, x):
        self.rows.append(len(x))
        return x


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), Counting(), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("site", ["channel", "position"])
@pytest.mark.parametrize(
    "rules", [{"*": fb.noise.NormalPlanar(1)}, {"3": fb.noise.NormalAffine()}], ids=["all", "last"]
)
def test_samples_are_networks(rules, site):
    """Each sample is one network, the same for every input, however the work is cut."""
    model = fb.to_stochastic(network(), rules).eval()
    x = torch.randn(5, 4)
    outputs = sample_outputs(model, x, 6, seed=3)
    assert outputs.shape == (6, 5, 3)
    for max_batch in (1, 2, 7, 12, 1000):
        torch.testing.assert_close(
            sample_outputs(model, x, 6, seed=3, max_batch=max_batch), outputs, rtol=1e-5, atol=1e-6
        )
    torch.testing.assert_close(
        sample_outputs(model, x[2:3], 6, seed=3), outputs[:, 2:3], rtol=1e-5, atol=1e-6
    )
    assert not torch.allclose(sample_outputs(model, x, 6, seed=4), outputs)
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    single = posterior.sample(seed=9)
    with torch.no_grad():
        torch.testing.assert_close(
            single(x), torch.cat([single(row[None]) for row in x]), rtol=1e-5, atol=1e-6
        )


def test_what_comes_before_the_noise_is_computed_once():
    model = fb.to_stochastic(network(), {"3": fb.noise.NormalAffine()}).eval()
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    posterior.predict(torch.randn(5, 4), 16)  # measures the network once
    model[1].rows.clear()
    posterior.predict(torch.randn(5, 4), 16)
    assert sum(model[1].rows) == 5


def test_shared_mode_holds_one_block_of_the_batch_per_sample():
    torch.manual_seed(0)
    model = fb.to_stochastic(
        Residual(), {"conv1": fb.noise.NormalAffine(), "head": fb.noise.NormalPlanar(2)}
    ).eval()
    x = torch.randn(4, 3, 8, 8)
    outputs = sample_outputs(model, x, 5, seed=1)
    with torch.no_grad(), fb.noise_mode(model, "shared", samples=5, seed=1):
        torch.testing.assert_close(model(x.repeat(5, 1, 1, 1)).view(5, 4, 5), outputs, rtol=1e-5, atol=1e-5)


class Positions(nn.Module):
    """As in a language model: the embedding of positions sees no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(10, 8), nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head((self.tokens(x) + self.places(torch.arange(x.shape[1]))).mean(1))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm, self.head = nn.Embedding(10, 8), nn.LSTM(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.lstm(self.tokens(x.t()))[0])[-1]


@pytest.mark.parametrize("network", [Positions, TimeFirst])
@pytest.mark.parametrize("length", [7, 12])
@pytest.mark.filterwarnings("ignore:the input of layer 'places'")
def test_noise_where_the_first_axis_is_not_the_batch(network, length):
    """Samples equal those taken one at a time, before and after the axes are found."""
    torch.manual_seed(0)
    model = fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()}).eval()
    tokens = torch.randint(10, (6, length))
    for aligned in (False, True):
        if aligned:
            align_batch_axes(model, tokens)
        outputs = sample_outputs(model, tokens, 6, seed=1)
        torch.testing.assert_close(one_at_a_time(model, tokens, 6, 1), outputs, rtol=1e-4, atol=1e-5)
    axes = {name: layer.layout.batch_axis for name, layer in noise_layers(model).items()}
    if network is Positions:
        assert axes == {"tokens": 0, "places": None, "head": 0}
    else:
        assert axes == {"tokens": 1, "lstm": 1, "head": 1}
        same = model(tokens[:1].expand(4, -1))
        assert (same[0] - same[1]).abs().max() > 1e-4, "different draws for different examples"


def test_maps_are_drawn_for_the_samples_of_a_pass_only(monkeypatch):
    model = fb.to_stochastic(nn.Conv2d(3, 2, 1), {"*": fb.noise.NormalAffine(site="position")})
    x, counts = torch.randn(2, 3, 16, 16), []
    expected = sample_outputs(model, x, 8, seed=0)
    (layer,) = noise_layers(model).values()
    shared_maps = type(layer).shared_maps
    monkeypatch.setattr(
        type(layer),
        "shared_maps",
        lambda self, at, start, stop, *args: (
            counts.append(stop - start) or shared_maps(self, at, start, stop, *args)
        ),
    )
    found = sample_outputs(model, x, 8, seed=0, max_batch=4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert max(counts) <= 2


def test_independent_draws_differ_between_equal_inputs_and_shared_ones_do_not():
    model = fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})
    x = torch.randn(1, 4).expand(3, 4)
    shared = sample_outputs(model, x, 4, seed=0)
    torch.testing.assert_close(shared[:, 0], shared[:, 1])
    own = sample_outputs(model, x, 4, seed=0, shared=False)
    assert (own[:, 0] - own[:, 1]).abs().max() > 1e-3
    assert torch.equal(own, sample_outputs(model, x, 4, seed=0, shared=False))


def test_both_kinds_of_draws_have_the_same_distribution():
    torch.manual_seed(0)
    model = fb.to_stochastic(nn.Linear(3, 1), {"*": fb.noise.NormalAffine(base_scale=0.5)})
    x = torch.randn(1, 3)
    weight = model.weight.detach()[0]
    mean = float(model(x.new_zeros(1, 3)).detach()) + float((weight * x).sum())
    deviation = float((0.25 * (weight * x) ** 2).sum().sqrt())
    for shared in (True, False):
        outputs = sample_outputs(model, x, 20_000, seed=0, shared=shared)
        assert abs(float(outputs.mean()) - mean) < 4 * deviation / 20_000**0.5
        assert abs(float(outputs.std()) / deviation - 1) < 4 / (2 * 20_000) ** 0.5


def test_training_flags_and_modes_are_unchanged():
    model = fb.to_stochastic(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)), {"*": fb.noise.NormalAffine()}
    )
    model.train()
    model[1].eval()
    sample_outputs(model, torch.randn(3, 4), 4)
    assert (model.training, model[1].training) == (True, False)
    for layer in noise_layers(model).values():
        assert layer.default_mode == ("sample", 1, 0, None)
        assert context_of(layer).modes == {layer.key: layer.default_mode}  # no context is left


def test_call_order_is_the_order_of_the_forward_pass():
    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.late, self.early, self.never = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.late(self.early(x))

    model = fb.to_stochastic(Crossed(), {"*": fb.noise.NormalAffine()})
    layers = noise_layers(model)
    keys = [key for key, _, _ in trace_forward(model, torch.ones(3, 2)).noise_shapes]
    assert keys == [layers["early"].key, layers["late"].key]
    assert align_batch_axes(model, torch.ones(6, 2)).idle == ["never"]


def test_the_row_limit_depends_on_the_width_of_the_network():
    narrow = fb.to_stochastic(nn.Linear(8, 8), {"*": fb.noise.NormalAffine()})
    wide = fb.to_stochastic(
        nn.Sequential(nn.Linear(8, 200_000), nn.Linear(200_000, 1)), {"*": fb.noise.NormalAffine()}
    )
    limits = []
    for model in (wide, narrow):
        with Prediction(model, PredictOptions(), 1, PredictionCache()) as prediction:
            prediction.measure(torch.ones(3, 8))
            limits.append(prediction.row_limit)
    few, many = limits
    assert 16 <= few < many


def noise_posterior(model):
    """Returns the posterior of a stochastic classifier."""
    return fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())


@pytest.mark.parametrize(
    ("act", "kind", "argument"),
    [
        (lambda m: noise_posterior(m).predict(torch.ones(2, 4), 0), "value", "samples"),
        (lambda m: noise_posterior(m).predict(torch.ones(2, 4), 2.5), "value", "samples"),
        (lambda m: noise_posterior(m).predict(torch.ones(2, 4), 1, max_batch=0), "value", "max_batch"),
        (lambda m: noise_posterior(m).predict(torch.ones(2, 4), sed=0), "unknown setting", "sed"),
        (lambda m: sample_outputs(m, torch.ones(0, 4), 1), "empty", None),
        (lambda m: sample_outputs(m, "images", 1), "value", "inputs"),
        (lambda m: fb.noise_mode(m, "loud"), "value", "mode"),
        (lambda m: fb.noise_mode(m, "shared", samples=0), "value", "samples"),
        (lambda m: fb.noise.freeze(m, "bias"), "value", "kind"),
        (lambda m: fb.noise_mode(nn.Linear(2, 2), "off").__enter__(), "network", None),
    ],
)
def test_bad_input(act, kind, argument):
    with pytest.raises(FlowBNNError) as caught:
        act(fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()}))
    assert (caught.value.kind, caught.value.argument) == (kind, argument)


class Repeating(nn.Module):
    """Calls one layer four times."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        for _ in range(4):
            x = x + 0.3 * torch.tanh(self.cell(x))
        return self.out(x)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(fb.noise.Dropout(0.3), marks=pytest.mark.slow),
        pytest.param(fb.noise.NormalAffine(site="position"), marks=pytest.mark.slow),
        fb.noise.NormalAffine(),
    ],
    ids=["dropout", "position", "channel"],
)
@pytest.mark.filterwarnings("ignore:the network does not compile in one graph:flowbnn.errors.FlowBNNWarning")
def test_a_layer_called_several_times_has_the_same_noise_in_training_and_prediction(recipe, traced):
    torch.manual_seed(0)
    model, x = fb.to_stochastic(Repeating(), {"cell": recipe}), torch.randn(1, 8)
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Gaussian())
    with torch.no_grad():
        spread = model.train()(x.repeat(20_000, 1)).std().item()
    for options in ({}, {"shared": False}, {"max_batch": 100}, {"compile": True}):
        samples = 300 if "compile" in options else 2000  # a standard error of 4 % or 1.6 %
        found = posterior.predict(x, samples, seed=0, **options)
        assert found.samples.std().item() == pytest.approx(spread, rel=0.08 if samples == 2000 else 0.25), (
            options
        )
    folded, alone = posterior.predict(x, 12, seed=3), posterior.predict(x, 12, seed=3, max_batch=1)
    torch.testing.assert_close(folded.samples, alone.samples, rtol=1e-4, atol=1e-5)


def test_two_calls_at_positions_do_not_cancel():
    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3, padding=1)

        def forward(self, x):
            return (self.conv(x) - self.conv(x)).mean((2, 3))

    model = fb.to_stochastic(Difference(), {"*": fb.noise.NormalAffine(site="position", base_scale=0.5)})
    found = fb.posterior.NoisePosterior(model, fb.likelihoods.Gaussian(dim=3)).predict(
        torch.ones(2, 2, 5, 5), 64, seed=0
    )
    assert found.samples.std(0).min() > 0.01
    one = fb.posterior.NoisePosterior(model, fb.likelihoods.Gaussian(dim=3)).sample(0)
    assert torch.equal(one(torch.ones(1, 2, 5, 5)), one(torch.ones(1, 2, 5, 5)))
