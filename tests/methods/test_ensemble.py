"""Deep ensembles: members of their own, the same whether trained together or apart, and resumable."""

import math
from itertools import islice

import pytest
import torch
from problems import QUIET, blobs, lines, loader, small
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods import FitOptions
from flowbnn.methods.ensemble import initialize_anew
from flowbnn.methods.ensemble_vmap import why_apart


def double(data: TensorDataset) -> TensorDataset:
    return TensorDataset(
        *(tensor.double() if tensor.is_floating_point() else tensor for tensor in data.tensors)
    )


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 2)).double()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(7)], ids=["global", "own"])
def test_training_together_and_apart_gives_the_same_members(norm, generator):
    data = DataLoader(double(lines()), batch_size=32, shuffle=True, generator=generator)
    validation = DataLoader(double(lines(32)), batch_size=16)
    found = [
        fb.DeepEnsemble(3, epochs=3, lr=0.01, together=together).fit(
            network(norm), data, validation=validation, seed=1, **QUIET
        )
        for together in (True, False)
    ]
    assert found[0].names == found[1].names
    for name in found[0].names:
        assert torch.allclose(found[0].members[name], found[1].members[name], rtol=0, atol=1e-12), name
    assert torch.allclose(found[0].log_scales, found[1].log_scales, rtol=0, atol=1e-12)
    assert [sorted(record) for record in found[0].history.records] == [
        sorted(record) for record in found[1].history.records
    ]
    for name, value in found[0].history.last.items():
        assert value == pytest.approx(found[1].history.last[name], abs=1e-9), name


def test_members_begin_apart_and_see_the_data_in_their_own_order():
    seen = []

    class Spy(nn.Linear):
        def forward(self, inputs):
            if self.training:
                seen.append((self.weight.detach().clone(), inputs[:, 0].clone()))
            return super().forward(inputs)

    fb.DeepEnsemble(2, epochs=1, together=False).fit(Spy(4, 3), loader(blobs()), seed=0, **QUIET)
    first, second = seen[0], seen[3]
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    passes = [torch.cat([inputs for _, inputs in seen[at : at + 3]]).sort().values for at in (0, 3)]
    assert torch.equal(passes[0], passes[1])


class Stopped:
    """A loader that is interrupted after so many batches in all."""

    def __init__(self, within: DataLoader, after: int) -> None:
        self.within, self.left = within, after

    def __len__(self) -> int:
        return len(self.within)

    def __iter__(self):
        for batch in self.within:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch

    num_data = 96


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
def test_an_interrupted_ensemble_goes_on_where_it_was(together, tmp_path, capsys):
    method = fb.DeepEnsemble(3, epochs=3, together=together)
    whole = method.fit(small(), loader(blobs()), seed=2, **QUIET)
    # looks at the first batch count too: the interruption comes in the second epoch, of the second member where they are apart
    options = {"seed": 2, "checkpoint": tmp_path, "checkpoint_every": 1, **QUIET}
    with pytest.raises(KeyboardInterrupt):
        method.fit(small(), Stopped(loader(blobs()), 22 if together else 19), **options)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == (
        ["members-0-2.safetensors"] if together else ["member-0.safetensors", "member-1.safetensors"]
    )
    counted = Stopped(loader(blobs()), -1)
    resumed = method.fit(small(), counted, resume=True, **options)
    assert all(torch.equal(whole.members[name], resumed.members[name]) for name in whole.names)
    assert -1 - counted.left < 3 * 9  # not all of it was done again
    capsys.readouterr()


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
def test_members_that_are_done_are_not_trained_again_and_more_may_be_asked_for(together, tmp_path):
    options = {"checkpoint": tmp_path, "resume": True, **QUIET}
    two = fb.DeepEnsemble(2, epochs=2, together=together).fit(small(), loader(blobs()), seed=5, **options)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    four = fb.DeepEnsemble(4, epochs=2, together=together).fit(small(), loader(blobs()), seed=5, **options)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert all(torch.equal(two.members[name], four.members[name][:2]) for name in two.names)
    assert len(four) == 4
    if together:
        with pytest.raises(FlowBNNError, match="ask for 2"):
            fb.DeepEnsemble(1, epochs=2).fit(small(), loader(blobs()), seed=5, **options)


def test_each_member_keeps_its_own_noise(tmp_path):
    posterior = fb.DeepEnsemble(3, epochs=6, lr=0.02).fit(small(2), loader(lines()), seed=0, **QUIET)
    assert posterior.log_scales.shape == (3, 2)
    assert not torch.equal(posterior.log_scales[0], posterior.log_scales[1])
    inputs, targets = lines(5).tensors
    prediction = posterior.predict(inputs)
    densities = []
    for index in range(3):
        mean, scale = posterior.member(index)(inputs), posterior.log_scales[index].exp()
        assert torch.allclose(prediction.samples[index], mean, atol=1e-6)
        assert torch.allclose(prediction.sample_variances[index], scale.square().expand(5, 2), rtol=1e-5)
        assert torch.equal(posterior.likelihood_of(index).log_scale, posterior.log_scales[index])
        densities.append(torch.distributions.Normal(mean, scale).log_prob(targets).sum(-1))
    by_hand = math.log(3) - torch.stack(densities).logsumexp(0)
    assert torch.allclose(prediction.nll(targets), by_hand, atol=1e-5)
    pooled = posterior.log_scales.mul(2).exp().mean(0)
    assert torch.allclose(posterior.likelihood.log_scale.mul(2).exp(), pooled, rtol=1e-5)
    two = posterior.predict(inputs, samples=2)
    assert torch.equal(two.samples, prediction.samples[[0, 1]])
    loaded = fb.load_posterior(posterior.save(tmp_path / "a.safetensors"), small(2))
    assert torch.equal(loaded.predict(inputs).sample_variances, prediction.sample_variances)
    adaptive = posterior.predict(inputs, adaptive=1e-9)
    assert torch.allclose(adaptive.mean, prediction.mean, atol=1e-6)


def test_what_cannot_be_started_anew_is_named_and_may_be_started_by_hand():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.ones = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.ones(3))

        def forward(self, inputs):
            return inputs @ self.table * self.ones

    method = fb.DeepEnsemble(2, epochs=1)
    with pytest.warns(FlowBNNWarning, match="'table' a new start"):
        method.fit(Own(), loader(blobs()), seed=0, **QUIET)
    given = Own()
    assert initialize_anew(given) == ["table"]
    assert torch.equal(given.ones, torch.ones(3))
    by_hand = fb.DeepEnsemble(2, epochs=1, initialize=lambda model: nn.init.normal_(model.table))
    posterior = by_hand.fit(Own(), loader(blobs()), seed=0, **QUIET)
    assert (posterior.members["table"][0] - posterior.members["table"][1]).abs().max() > 0.1
    assert initialize_anew(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))) == []


def test_dropout_of_members_that_are_trained_together_is_their_own():
    dropping = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    posterior = fb.DeepEnsemble(2, epochs=2, together=True, initialize=lambda model: None).fit(
        dropping, list(islice(loader(blobs()), 3)), seed=0, **QUIET
    )
    assert not torch.equal(posterior.members["0.weight"][0], posterior.members["0.weight"][1])


def test_what_keeps_members_apart_is_told():
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, inputs):
            return self.layer(inputs if inputs.sum() > 0 else -inputs)

    method = fb.DeepEnsemble(2, epochs=1, together=True)
    for change, told in (
        ({"network": Deciding()}, "does not stack"),
        ({"clip_gradient": 1.0}, "clipped"),
        ({"loader": DataLoader(blobs(), batch_size=32, num_workers=1)}, "worker"),
    ):
        arguments = {"network": small(), "loader": loader(blobs()), **QUIET} | change
        with pytest.raises(FlowBNNError, match=told) as refused:
            method.fit(arguments.pop("network"), arguments.pop("loader"), **arguments)
        assert "together=False" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert len(fb.DeepEnsemble(2, epochs=1).fit(Deciding(), loader(blobs()), seed=0, **QUIET)) == 2
    inputs, targets = blobs(8).tensors

    class Whole(torch.optim.Optimizer):
        """Looks at all weights together."""

        def __init__(self, groups):
            super().__init__(groups, {})

    assert "Whole" in why_apart(
        small(), fb.likelihoods.Categorical(), inputs, targets, [], Whole, FitOptions()
    )
    assert (
        why_apart(small(), fb.likelihoods.Categorical(), inputs, targets, [], torch.optim.SGD, FitOptions())
        is None
    )


def test_other_refusals(tmp_path):
    with pytest.raises(FlowBNNError, match="is a folder"):
        fb.DeepEnsemble(2).fit(small(), loader(blobs()), checkpoint=tmp_path / "a.safetensors", **QUIET)
    posterior = fb.DeepEnsemble(1, epochs=1).fit(small(), loader(blobs()), seed=0, **QUIET)
    with pytest.raises(FlowBNNError, match="none of number 1"):
        posterior.member(1)
    assert len(posterior) == 1
