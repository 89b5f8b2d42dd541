"""Tests of DeepEnsemble: independent members, resuming, and noise of each member."""

import math

import pytest
import torch
from problems import QUIET, blobs, lines, loader, small
from torch import nn
from torch.utils.data import DataLoader

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.network_layers import reset_parameters


def test_members_differ_in_initialization_and_order_of_the_data():
    calls = []

    class RecordingLinear(nn.Linear):
        def forward(self, inputs):
            if self.training:
                calls.append((self.weight.detach().clone(), inputs[:, 0].clone()))
            return super().forward(inputs)

    fb.DeepEnsemble(2, epochs=1).fit(RecordingLinear(4, 3), loader(blobs()), seed=0, **QUIET)
    first, second = calls[0], calls[3]
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    passes = [torch.cat([inputs for _, inputs in calls[start : start + 3]]).sort().values for start in (0, 3)]
    assert torch.equal(passes[0], passes[1])


class InterruptedLoader:
    """Loader that raises KeyboardInterrupt after this many batches in total."""

    def __init__(self, loader: DataLoader, remaining: int) -> None:
        self.loader, self.remaining = loader, remaining

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            if self.remaining == 0:
                raise KeyboardInterrupt
            self.remaining -= 1
            yield batch

    num_data = 96


def test_interrupted_ensemble_resumes(tmp_path, capsys):
    method = fb.DeepEnsemble(3, epochs=3)
    expected = method.fit(small(), loader(blobs()), seed=2, **QUIET)
    # reads of the first batch count, too: the interruption is in the second epoch of the second member
    options = {"seed": 2, "checkpoint": tmp_path, "checkpoint_every": 1, **QUIET}
    with pytest.raises(KeyboardInterrupt):
        method.fit(small(), InterruptedLoader(loader(blobs()), 17), **options)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == ["member-0.safetensors", "member-1.safetensors"]
    counted = InterruptedLoader(loader(blobs()), -1)
    resumed = method.fit(small(), counted, resume=True, **options)
    assert all(torch.equal(expected.members[name], resumed.members[name]) for name in expected.names)
    assert -1 - counted.remaining < 3 * 9  # finished members are not repeated
    capsys.readouterr()


def test_larger_ensemble_resumes_from_a_smaller_one(tmp_path):
    options = {"checkpoint": tmp_path, "resume": True, **QUIET}
    two = fb.DeepEnsemble(2, epochs=2).fit(small(), loader(blobs()), seed=5, **options)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    four = fb.DeepEnsemble(4, epochs=2).fit(small(), loader(blobs()), seed=5, **options)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert all(torch.equal(two.members[name], four.members[name][:2]) for name in two.names)
    assert len(four) == 4


def test_each_member_has_its_own_noise(tmp_path):
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
    expected = math.log(3) - torch.stack(densities).logsumexp(0)
    assert torch.allclose(prediction.nll(targets), expected, atol=1e-5)
    pooled = posterior.log_noise.mul(2).exp().mean(0)
    assert torch.allclose(posterior.likelihood.log_scale.mul(2).exp(), pooled, rtol=1e-5)
    two = posterior.predict(inputs, samples=2)
    assert torch.equal(two.samples, prediction.samples[[0, 1]])
    loaded = fb.load_posterior(posterior.save(tmp_path / "a.safetensors"), small(2))
    assert torch.equal(loaded.predict(inputs).sample_variances, prediction.sample_variances)
    adaptive = posterior.predict(inputs, adaptive=1e-9)
    assert torch.allclose(adaptive.mean, prediction.mean, atol=1e-6)


def test_parameters_without_reset_raise_a_warning():
    class CustomNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.ones = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.ones(3))

        def forward(self, inputs):
            return inputs @ self.table * self.ones

    method = fb.DeepEnsemble(2, epochs=1)
    with pytest.warns(FlowBNNWarning) as caught:
        method.fit(CustomNetwork(), loader(blobs()), seed=0, **QUIET)
    assert caught[0].message.fields["kind"] == "start"
    assert caught[0].message.fields["layers"] == ["table"]
    network = CustomNetwork()
    assert reset_parameters(network) == ["table"]
    assert torch.equal(network.ones, torch.ones(3))
    method = fb.DeepEnsemble(2, epochs=1, initialize=lambda model: nn.init.normal_(model.table))
    posterior = method.fit(CustomNetwork(), loader(blobs()), seed=0, **QUIET)
    assert (posterior.members["table"][0] - posterior.members["table"][1]).abs().max() > 0.1
    assert reset_parameters(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))) == []


def test_member_index_out_of_range_is_refused():
    posterior = fb.DeepEnsemble(1, epochs=1).fit(small(), loader(blobs()), seed=0, **QUIET)
    with pytest.raises(FlowBNNError) as error:
        posterior.member(1)
    assert error.value.argument == "index"
    assert len(posterior) == 1
