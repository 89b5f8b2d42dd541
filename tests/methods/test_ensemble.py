"""Deep ensembles: members of their own, and resumable."""

import math

import pytest
import torch
from problems import QUIET, blobs, lines, loader, small
from torch import nn
from torch.utils.data import DataLoader

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.ensemble import initialize_anew


def test_members_begin_apart_and_see_the_data_in_their_own_order():
    seen = []

    class Spy(nn.Linear):
        def forward(self, inputs):
            if self.training:
                seen.append((self.weight.detach().clone(), inputs[:, 0].clone()))
            return super().forward(inputs)

    fb.DeepEnsemble(2, epochs=1).fit(Spy(4, 3), loader(blobs()), seed=0, **QUIET)
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


def test_an_interrupted_ensemble_goes_on_where_it_was(tmp_path, capsys):
    method = fb.DeepEnsemble(3, epochs=3)
    whole = method.fit(small(), loader(blobs()), seed=2, **QUIET)
    # looks at the first batch count too: the interruption comes in the second epoch of the second member
    options = {"seed": 2, "checkpoint": tmp_path, "checkpoint_every": 1, **QUIET}
    with pytest.raises(KeyboardInterrupt):
        method.fit(small(), Stopped(loader(blobs()), 17), **options)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == ["member-0.safetensors", "member-1.safetensors"]
    counted = Stopped(loader(blobs()), -1)
    resumed = method.fit(small(), counted, resume=True, **options)
    assert all(torch.equal(whole.members[name], resumed.members[name]) for name in whole.names)
    assert -1 - counted.left < 3 * 9  # not all of it was done again
    capsys.readouterr()


def test_members_that_are_done_are_not_trained_again_and_more_may_be_asked_for(tmp_path):
    options = {"checkpoint": tmp_path, "resume": True, **QUIET}
    two = fb.DeepEnsemble(2, epochs=2).fit(small(), loader(blobs()), seed=5, **options)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    four = fb.DeepEnsemble(4, epochs=2).fit(small(), loader(blobs()), seed=5, **options)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert all(torch.equal(two.members[name], four.members[name][:2]) for name in two.names)
    assert len(four) == 4


def test_each_member_keeps_its_own_noise(tmp_path):
    posterior = fb.DeepEnsemble(3, epochs=6, lr=0.02).fit(small(2), loader(lines()), seed=0, **QUIET)
    assert posterior.log_noise.shape == (3, 2)
    assert not torch.equal(posterior.log_noise[0], posterior.log_noise[1])
    inputs, targets = lines(5).tensors
    prediction = posterior.predict(inputs)
    densities = []
    for index in range(3):
        mean, scale = posterior.member(index)(inputs), posterior.log_noise[index].exp()
        assert torch.allclose(prediction.samples[index], mean, atol=1e-6)
        assert torch.allclose(prediction.sample_variances[index], scale.square().expand(5, 2), rtol=1e-5)
        densities.append(torch.distributions.Normal(mean, scale).log_prob(targets).sum(-1))
    by_hand = math.log(3) - torch.stack(densities).logsumexp(0)
    assert torch.allclose(prediction.nll(targets), by_hand, atol=1e-5)
    pooled = posterior.log_noise.mul(2).exp().mean(0)
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


def test_there_is_no_member_beyond_the_last():
    posterior = fb.DeepEnsemble(1, epochs=1).fit(small(), loader(blobs()), seed=0, **QUIET)
    with pytest.raises(FlowBNNError, match="index must be an integer of at least 0 and below 1, got 1"):
        posterior.member(1)
    assert len(posterior) == 1
