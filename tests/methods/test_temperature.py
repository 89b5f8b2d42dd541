"""Temperature scaling: the optimum, what it changes and what not, on top of any posterior."""

import math

import pytest
import torch
from problems import QUIET, blobs, lines, loader, small
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods import MemberPosterior, PointPosterior
from flowbnn.methods.temperature import held_out, temper

TRAINED = {"epochs": 8, "lr": 0.03}


def linear(factor: float = 1.0) -> nn.Module:
    torch.manual_seed(1)
    layer = nn.Linear(4, 3).double()
    with torch.no_grad():
        layer.weight.mul_(factor)
        layer.bias.mul_(factor)
    return layer


def noisy_labels(count: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels drawn from the network's own probabilities at a temperature of 2."""
    generator = torch.Generator().manual_seed(3)
    inputs = 3 * torch.randn(count, 4, generator=generator).double()
    with torch.no_grad():
        return inputs, torch.multinomial((linear()(inputs) / 2).softmax(-1), 1, generator=generator).flatten()


def test_it_is_the_optimum_and_scales_with_the_logits():
    pair = noisy_labels()
    found = [
        temper(PointPosterior(linear(factor), fb.likelihoods.Categorical()), pair, progress=False).temperature
        for factor in (1.0, 5.0)
    ]
    assert found[1] == pytest.approx(5.0 * found[0], rel=1e-8)
    logits = linear()(pair[0]).detach()
    place = torch.tensor(found[0], dtype=torch.float64, requires_grad=True)
    loss = nn.functional.cross_entropy(logits / place, pair[1])
    (slope,) = torch.autograd.grad(loss, place)
    assert abs(slope.item()) < 1e-10
    scan = [nn.functional.cross_entropy(logits / t, pair[1]).item() for t in torch.linspace(0.2, 20, 400)]
    assert loss.item() <= min(scan)
    assert 1.4 < found[0] < 2.8  # the labels were drawn at 2


def test_of_many_samples_the_mixture_is_what_is_judged():
    inputs, labels = noisy_labels()
    networks = [linear(factor) for factor in (2.0, 3.0, 6.0)]
    members = {
        name: torch.stack([dict(one.named_parameters())[name].detach() for one in networks])
        for name in ("weight", "bias")
    }
    posterior = MemberPosterior(linear(), fb.likelihoods.Categorical(), members)
    tempered = temper(posterior, [(inputs, labels)], progress=False)

    def loss(temperature: torch.Tensor) -> torch.Tensor:
        each = torch.stack([(one(inputs) / temperature).log_softmax(-1) for one in networks])
        return -(each.logsumexp(0) - math.log(3))[torch.arange(len(labels)), labels].mean()

    place = torch.tensor(tempered.temperature, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(place), place)
    assert abs(slope.item()) < 1e-10
    assert tempered.predict(inputs).nll(labels).mean().item() == pytest.approx(loss(place).item(), rel=1e-10)
    assert temper(tempered, [(inputs, labels)], progress=False).temperature == tempered.temperature
    one = tempered.sample(0)(inputs)
    assert any(torch.allclose(one, each(inputs) / tempered.temperature) for each in networks)


def test_one_network_keeps_its_decisions():
    inputs, labels = noisy_labels()
    plain = PointPosterior(linear(4.0), fb.likelihoods.Categorical())
    tempered = temper(plain, (inputs, labels), progress=False)
    assert torch.equal(tempered.predict(inputs).labels, plain.predict(inputs).labels)
    before, after = (fb.evaluate(each, [(inputs, labels)], progress=False) for each in (plain, tempered))
    assert after["nll"] < before["nll"]
    assert after["ece"] < before["ece"]


def test_regression_scales_the_standard_deviation():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 4, generator=generator).double()
    layer = nn.Linear(4, 2).double()
    targets = layer(inputs).detach() + 0.7 * torch.randn(200, 2, generator=generator).double()
    tempered = temper(
        PointPosterior(layer, fb.likelihoods.Gaussian(0.2)), [(inputs, targets)], progress=False
    )
    error = (targets - layer(inputs).detach()) / 0.2
    assert tempered.temperature == pytest.approx(
        error.square().mean().sqrt().item(), rel=1e-8
    )  # in closed form
    ensemble = fb.DeepEnsemble(3, epochs=2).fit(small(2), loader(lines()), seed=0, **QUIET)
    tempered = temper(ensemble, loader(lines()), progress=False)
    before, after = (each.predict(lines(6).tensors[0]) for each in (ensemble, tempered))
    assert torch.allclose(after.std, tempered.temperature * before.std, rtol=1e-4)
    assert torch.allclose(after.mean, before.mean, atol=1e-6)


@pytest.mark.parametrize(
    "method", [fb.DeepEnsemble(2, **TRAINED), fb.MCDropout(**TRAINED), fb.SWAG(**TRAINED)]
)
def test_any_posterior_may_be_within_and_is_saved_with_it(method, tmp_path):
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


def test_validation_data_that_are_all_right_tell_nothing():
    inputs = torch.eye(3).repeat(4, 1)
    layer = nn.Linear(3, 3)
    nn.init.eye_(layer.weight)
    with pytest.warns(FlowBNNWarning, match="stays at 1"):
        tempered = temper(PointPosterior(layer, fb.likelihoods.Categorical()), (inputs, torch.arange(12) % 3))
    assert tempered.temperature == 1.0
    wrong = (inputs, (torch.arange(12) + 1) % 3)
    with pytest.warns(FlowBNNWarning, match="100 or beyond"):
        tempered = temper(PointPosterior(layer, fb.likelihoods.Categorical()), wrong)
    assert tempered.temperature == 100.0


def test_a_share_is_held_out_where_no_validation_is_given():
    data = TensorDataset(torch.arange(40.0).unsqueeze(1), torch.arange(40))
    for source in (
        DataLoader(data, batch_size=8, shuffle=True),
        TensorLoader(*data.tensors, batch_size=8, shuffle=True),
        [(data.tensors[0][i : i + 4], data.tensors[1][i : i + 4]) for i in range(0, 40, 4)],
        [data.tensors],
    ):
        train, out = held_out(source, 0.25, seed=0)
        kept, left = (sorted(int(label) for _, labels in part for label in labels) for part in (train, out))
        assert sorted(kept + left) == list(range(40))
        assert 8 <= len(left) <= 10
    seen = fb.Temperature(fb.MAP(**TRAINED), share=0.25).fit(small(), loader(blobs()), seed=0, **QUIET)
    assert seen.history.steps == 8 * 3  # 72 examples in batches of 32
    assert "validation_nll" in seen.history


def test_refusals(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(4), 0), (torch.ones(4), 1)])

    with pytest.raises(FlowBNNError, match="give validation="):
        fb.Temperature().fit(small(), DataLoader(Stream(), batch_size=2), num_data=2, **QUIET)
    with pytest.raises(FlowBNNError, match="epochs to the method within"):
        fb.Temperature(fb.MAP(), epochs=3)
    with pytest.raises(FlowBNNError, match="posterior"):
        temper(small(), loader(blobs()))
    with pytest.raises(FlowBNNError, match="inputs alone"):
        temper(PointPosterior(small(), fb.likelihoods.Categorical()), [torch.zeros(2, 4)], progress=False)
    within = fb.Temperature(fb.MAP(**TRAINED)).fit(
        small(), loader(blobs()), validation=loader(blobs(60)), seed=0, **QUIET
    )
    posterior = fb.Temperature(**TRAINED).fit(
        small(), loader(blobs()), validation=loader(blobs(60)), seed=0, **QUIET
    )
    assert posterior.temperature == within.temperature
    path = posterior.save(tmp_path / "a.safetensors")
    with pytest.raises(FlowBNNError, match="architecture") as refused:
        fb.load_posterior(path, nn.Linear(4, 3))
    assert str(path) in str(refused.value)
