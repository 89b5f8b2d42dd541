"""Tests of Temperature: its optimum, its effect on predictions, and its use with any posterior."""

import math
import warnings

import pytest
import torch
from problems import QUIET, blobs, lines, loader, small
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods import MemberPosterior, PointPosterior
from flowbnn.methods.loader_split import split_loader

TRAINED = {"epochs": 8, "lr": 0.03}


def linear(factor: float = 1.0) -> nn.Module:
    torch.manual_seed(1)
    layer = nn.Linear(4, 3).double()
    with torch.no_grad():
        layer.weight.mul_(factor)
        layer.bias.mul_(factor)
    return layer


def noisy_labels(count: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs, and labels drawn from the probabilities of the network at a temperature of 2."""
    generator = torch.Generator().manual_seed(3)
    inputs = 3 * torch.randn(count, 4, generator=generator).double()
    with torch.no_grad():
        return inputs, torch.multinomial((linear()(inputs) / 2).softmax(-1), 1, generator=generator).flatten()


def test_temperature_is_optimal_and_scales_with_the_logits():
    pair = noisy_labels()
    temperatures = [
        fb.Temperature(prior_scale=None)
        .fit(PointPosterior(linear(factor), fb.likelihoods.Categorical()), pair, progress=False)
        .temperature
        for factor in (1.0, 5.0)
    ]
    assert temperatures[1] == pytest.approx(5.0 * temperatures[0], rel=1e-8)
    logits = linear()(pair[0]).detach()
    optimum = torch.tensor(temperatures[0], dtype=torch.float64, requires_grad=True)
    loss = nn.functional.cross_entropy(logits / optimum, pair[1])
    (slope,) = torch.autograd.grad(loss, optimum)
    assert abs(slope.item()) < 1e-10
    scan = [nn.functional.cross_entropy(logits / t, pair[1]).item() for t in torch.linspace(0.2, 20, 400)]
    assert loss.item() <= min(scan)
    assert 1.4 < temperatures[0] < 2.8  # the labels were drawn at 2


def test_temperature_of_several_samples_is_fitted_to_their_mixture():
    inputs, labels = noisy_labels()
    networks = [linear(factor) for factor in (2.0, 3.0, 6.0)]
    members = {
        name: torch.stack([dict(network.named_parameters())[name].detach() for network in networks])
        for name in ("weight", "bias")
    }
    posterior = MemberPosterior(linear(), fb.likelihoods.Categorical(), members)
    tempered = fb.Temperature(prior_scale=None).fit(posterior, [(inputs, labels)], progress=False)

    def loss(temperature: torch.Tensor) -> torch.Tensor:
        samples = torch.stack([(network(inputs) / temperature).log_softmax(-1) for network in networks])
        return -(samples.logsumexp(0) - math.log(3))[torch.arange(len(labels)), labels].mean()

    optimum = torch.tensor(tempered.temperature, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(optimum), optimum)
    assert abs(slope.item()) < 1e-10
    assert tempered.predict(inputs).nll(labels).mean().item() == pytest.approx(
        loss(optimum).item(), rel=1e-10
    )
    assert (
        fb.Temperature(prior_scale=None).fit(tempered, [(inputs, labels)], progress=False).temperature
        == tempered.temperature
    )
    outputs = tempered.sample(0)(inputs)
    assert any(torch.allclose(outputs, network(inputs) / tempered.temperature) for network in networks)


def test_decisions_of_one_network_do_not_change():
    inputs, labels = noisy_labels()
    plain = PointPosterior(linear(4.0), fb.likelihoods.Categorical())
    tempered = fb.Temperature().fit(plain, (inputs, labels), progress=False)
    assert torch.equal(tempered.predict(inputs).labels, plain.predict(inputs).labels)
    before, after = (fb.evaluate(p, [(inputs, labels)], progress=False) for p in (plain, tempered))
    assert after["nll"] < before["nll"]
    assert after["ece"] < before["ece"]


def test_regression_scales_the_standard_deviation():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 4, generator=generator).double()
    layer = nn.Linear(4, 2).double()
    targets = layer(inputs).detach() + 0.7 * torch.randn(200, 2, generator=generator).double()
    plain = PointPosterior(layer, fb.likelihoods.Gaussian(0.2))
    tempered = fb.Temperature().fit(plain, [(inputs, targets)], progress=False)
    error = (targets - layer(inputs).detach()) / 0.2
    expected = error.square().mean().sqrt().item()  # in closed form
    assert tempered.temperature == pytest.approx(expected, rel=1e-8)
    ensemble = fb.DeepEnsemble(3, epochs=2).fit(small(2), loader(lines()), seed=0, **QUIET)
    tempered = fb.Temperature().fit(ensemble, loader(lines()), progress=False)
    before, after = (p.predict(lines(6).tensors[0]) for p in (ensemble, tempered))
    assert torch.allclose(after.std, tempered.temperature * before.std, rtol=1e-4)
    assert torch.allclose(after.mean, before.mean, atol=1e-6)


@pytest.mark.parametrize(
    "method", [fb.DeepEnsemble(2, **TRAINED), fb.MCDropout(**TRAINED), fb.SWAG(**TRAINED)]
)
def test_tempered_posterior_of_any_method_is_saved(method, tmp_path):
    posterior = fb.Temperature(method).fit(
        small(), loader(blobs()), validation=loader(blobs(60)), seed=0, **QUIET
    )
    assert posterior.temperature != 1.0
    loaded = fb.load_posterior(posterior.save(tmp_path / "a.safetensors"), small())
    assert type(loaded.posterior) is type(posterior.posterior)
    assert loaded.temperature == posterior.temperature
    inputs = blobs(9).tensors[0]
    assert torch.equal(
        loaded.predict(inputs, samples=2, seed=0).log_samples,
        posterior.predict(inputs, samples=2, seed=0).log_samples,
    )
    adaptive = posterior.predict(inputs, samples=8, seed=0, adaptive=0.5)
    assert torch.isfinite(adaptive.probabilities).all()


def test_prior_of_the_log_temperature():
    """The temperature minimizes the summed NLL plus the penalty, also if all examples are classified correctly."""
    inputs, labels = noisy_labels(20)
    logits = linear()(inputs).detach()
    grid = torch.linspace(-3, 3, 6001, dtype=torch.float64)
    for targets in (labels, logits.argmax(1)):
        for scale in (0.1, 0.5):
            nll = torch.stack(
                [nn.functional.cross_entropy(logits / u.exp(), targets, reduction="sum") for u in grid]
            )
            expected = grid[(nll + grid.square() / (2 * scale**2)).argmin()].exp()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                posterior = fb.Temperature(prior_scale=scale).fit(linear(), (inputs, targets), **QUIET)
            assert posterior.temperature == pytest.approx(float(expected), rel=2e-3)


def test_my_network_is_scaled_in_one_line_with_all_held_out_data():
    network, data = linear(4.0), noisy_labels()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    posterior = fb.Temperature().fit(network, data, **QUIET)
    assert all(torch.equal(value, before[name]) for name, value in posterior.model.state_dict().items())
    plain = PointPosterior(network, fb.likelihoods.Categorical())
    expected = fb.Temperature().fit(plain, data, progress=False).temperature
    assert posterior.temperature == expected
    shuffled = DataLoader(TensorDataset(*data), batch_size=7, shuffle=True)
    assert fb.Temperature().fit(network, shuffled, **QUIET).temperature == pytest.approx(expected, rel=1e-9)


def test_temperature_out_of_bounds_raises_a_warning():
    inputs = torch.eye(3).repeat(4, 1)
    layer = nn.Linear(3, 3)
    nn.init.eye_(layer.weight)
    plain = PointPosterior(layer, fb.likelihoods.Categorical())
    with pytest.warns(FlowBNNWarning) as caught:
        tempered = fb.Temperature(prior_scale=None).fit(plain, (inputs, torch.arange(12) % 3))
    assert caught[0].message.fields == {"kind": "validation", "temperature": 1.0}
    assert tempered.temperature == 1.0
    wrong = (inputs, (torch.arange(12) + 1) % 3)
    with pytest.warns(FlowBNNWarning) as caught:
        tempered = fb.Temperature(prior_scale=None).fit(plain, wrong)
    assert caught[0].message.fields == {"kind": "validation", "temperature": 100.0}
    assert tempered.temperature == 100.0


def test_a_fraction_is_held_out_without_validation_data():
    data = TensorDataset(torch.arange(40.0).unsqueeze(1), torch.arange(40))
    for source in (
        DataLoader(data, batch_size=8, shuffle=True),
        TensorLoader(*data.tensors, batch_size=8, shuffle=True),
        [(data.tensors[0][i : i + 4], data.tensors[1][i : i + 4]) for i in range(0, 40, 4)],
        [data.tensors],
    ):
        loaders = split_loader(source, 0.25, seed=0)
        train, validation = ([int(label) for _, labels in batches for label in labels] for batches in loaders)
        assert sorted(train + validation) == list(range(40))
        assert 8 <= len(validation) <= 10
    method = fb.Temperature(fb.MAP(**TRAINED), validation_fraction=0.25)
    posterior = method.fit(small(), loader(blobs()), seed=0, **QUIET)
    assert posterior.history.steps == 8 * 3  # 72 examples in batches of 32
    assert "validation_nll" in posterior.history


def test_invalid_arguments_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(4), 0), (torch.ones(4), 1)])

    with pytest.raises(FlowBNNError) as error:
        fb.Temperature(fb.MAP()).fit(small(), DataLoader(Stream(), batch_size=2), num_data=2, **QUIET)
    assert error.value.argument == "validation"
    with pytest.raises(FlowBNNError) as error:
        fb.Temperature(fb.MAP(), epochs=3)
    assert error.value.argument == "epochs"
    with pytest.raises(FlowBNNError) as error:
        fb.Temperature().calibrate(small(), loader(blobs()))
    assert error.value.argument == "posterior"
    with pytest.raises(FlowBNNError) as error:
        fb.Temperature().fit(
            PointPosterior(small(), fb.likelihoods.Categorical()), [torch.zeros(2, 4)], **QUIET
        )
    assert error.value.kind == "loader"


def test_tempered_posterior_of_another_network_is_refused(tmp_path):
    posterior = fb.Temperature(fb.MAP(**TRAINED)).fit(
        small(), loader(blobs()), validation=loader(blobs(60)), seed=0, **QUIET
    )
    path = posterior.save(tmp_path / "a.safetensors")
    with pytest.raises(FlowBNNError) as error:
        fb.load_posterior(path, nn.Linear(4, 3))
    assert error.value.kind == "architecture"
    assert str(path) in str(error.value)


@pytest.mark.parametrize("regression", [False, True])
def test_method_that_trains_nothing_leaves_all_data_to_the_calibration(regression):
    network, data = (small(2), lines(120).tensors) if regression else (linear(4.0), noisy_labels())
    expected = fb.Temperature().fit(network, data, **QUIET)
    for method in (fb.MLE(epochs=0), fb.MAP(epochs=0)):
        posterior = fb.Temperature(method).fit(network, [data], **QUIET)
        assert posterior.temperature == pytest.approx(expected.temperature, rel=1e-6)
        for before, after in zip(network.parameters(), posterior.model.parameters(), strict=True):
            assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("epochs", "Temperature(fb.MAP(epochs=2))"),
        ("epoch", "Temperature(fb.MAP(epochs=2))"),
        ("sample", "Temperature(samples=2)"),
    ],
)
def test_settings_of_a_training_are_explained(name, advice):
    with pytest.raises(FlowBNNError) as caught:
        fb.Temperature().fit(small(), blobs(30).tensors, **{name: 2}, **QUIET)
    assert caught.value.kind == "unknown setting"
    assert advice in str(caught.value)
    if name == "epochs":
        with pytest.raises(FlowBNNError) as caught:
            fb.Temperature(epochs=2)
        assert advice in str(caught.value)
