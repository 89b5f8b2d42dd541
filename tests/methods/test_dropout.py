"""MC dropout of networks with dropout layers: all rows of a batch share the masks of a sample."""

import threading
import warnings

import pytest
import torch
from problems import QUIET
from torch import nn

import flowbnn as fb
from flowbnn.methods.dropout import DropoutPosterior, MaskedDropout, example_axes
from flowbnn.methods.network_layers import disable_dropout


@pytest.fixture(autouse=True)
def _attention():
    """Ignores the warning about dropout of attention weights, which all transformers here have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dropout of .*self_attn.* is not sampled")
        yield


class Twice(nn.Module):
    """Network that calls one dropout layer twice: on rows that are time steps, and with the examples on the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.first, self.last = nn.Dropout(0.4), nn.Linear(6, 6), nn.Linear(6, 3)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3)

    def forward(self, x):  # [B, T, 6]
        rows = self.drop(self.first(x.flatten(0, 1))).view(x.shape)
        return self.last(self.drop(self.encoder(rows.transpose(0, 1)).mean(0)))


def posterior_of(network: nn.Module, inputs: torch.Tensor) -> DropoutPosterior:
    batches = [(inputs, torch.arange(len(inputs)) % 3)]
    return fb.MCDropout(epochs=0).fit(network, batches, **QUIET)


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)), (9, 4)),
    "maps": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.Dropout2d(0.3),
            nn.SELU(),
            nn.AlphaDropout(0.2),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        (9, 1, 6, 6),
    ),
    "twice": (Twice, (9, 5, 6)),
    "fast path": (
        lambda: nn.Sequential(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True), 2),
            nn.Flatten(),
            nn.Linear(30, 3),
        ),
        (9, 5, 6),
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    make, shape = CASES[request.param]
    inputs = torch.randn(shape)
    return posterior_of(make(), inputs), inputs


def test_a_row_does_not_depend_on_other_rows_or_on_the_batch_size(case):
    posterior, x = case
    full = posterior.predict(x, 12, seed=1).log_samples
    assert full.std(0).max() > 0.01
    close = {"rtol": 1e-5, "atol": 1e-6}
    for some in (x[4:5], x[2:7], x.flip(0)[3:4]):
        index = [int((x == row).flatten(1).all(1).nonzero()) for row in some]
        torch.testing.assert_close(posterior.predict(some, 12, seed=1).log_samples, full[:, index], **close)
    for size in (1, 2, 4):
        torch.testing.assert_close(
            posterior.predict(x, 12, seed=1, max_batch=size).log_samples, full, **close
        )
        batches = list(x.split(size))
        torch.testing.assert_close(posterior.predict(batches, 12, seed=1).log_samples, full, **close)
    torch.testing.assert_close(posterior.predict(x, 5, seed=1).log_samples, full[:5], **close)


def test_adaptive_predictions_use_the_first_samples(case):
    posterior, x = case
    full = posterior.predict(x, 64, seed=2)
    found = posterior.predict(x, 64, seed=2, adaptive=fb.posterior.Adaptive(0.05, growth=2))
    sample_counts = found.sample_counts.tolist()
    assert min(sample_counts) < 64
    for row, count in enumerate(sample_counts):
        wanted = full.samples[:count, row].mean(0)
        torch.testing.assert_close(found.probabilities[row], wanted, rtol=1e-4, atol=1e-5)


def test_sample_returns_the_first_network_of_a_prediction(case):
    posterior, x = case
    first = posterior.predict(x, 4, seed=5).log_samples[0]
    one = posterior.sample(5)
    torch.testing.assert_close(one(x).log_softmax(-1), first, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(one(x).log_softmax(-1), first, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one(x[:1]).log_softmax(-1), first[:1], rtol=1e-5, atol=1e-6)
        exported = torch.export.export(posterior.sample(5), (x,)).module()
        for _ in range(2):
            torch.testing.assert_close(exported(x).log_softmax(-1), first, rtol=1e-5, atol=1e-6)


def test_the_generator_of_torch_is_not_used(case):
    posterior, x = case
    before = torch.get_rng_state()
    seen = []
    posterior.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_rng_state()))
    posterior.predict(x, 4, seed=5)
    posterior.sample(5)(x)
    assert seen
    assert all(torch.equal(state, before) for state in [*seen, torch.get_rng_state()])


def test_axes_are_saved(case, tmp_path):
    posterior, x = case
    path = posterior.save(tmp_path / "dropout.safetensors")
    again = fb.load_posterior(path, posterior.model)
    assert again.axes == posterior.axes
    with torch.no_grad():
        assert torch.equal(again.sample(1)(x), posterior.sample(1)(x))


def test_masks_have_the_moments_of_dropout():
    x = torch.ones(3, 2000)
    for layer in (nn.Dropout(0.3), nn.AlphaDropout(0.3)):
        masked = MaskedDropout(layer, [0])
        masked.seed = 1
        output, truth = masked(layer, (x,), x), layer(torch.ones(200, 2000))
        assert torch.equal(output[0], output[1])
        assert set(output.unique().mul(1e4).round().tolist()) == set(truth.unique().mul(1e4).round().tolist())
        assert abs(float(output[0].mean() - truth.mean())) < 4 * float(truth.std()) / 2000**0.5
    maps = MaskedDropout(nn.Dropout2d(0.5), [0])(None, (), torch.ones(2, 50, 4, 4))
    assert torch.equal(maps, maps[:1, :, :1, :1].expand_as(maps))


def test_example_axes():
    axes = example_axes(Twice().eval(), torch.randn(4, 5, 6))
    assert axes["drop"] == [0, 0]
    assert set(map(tuple, (axes["encoder.dropout1"], axes["encoder.dropout2"]))) == {(1,)}


def test_every_example_can_have_its_own_masks(case):
    posterior, x = case
    same = x[:1].expand(6, *x.shape[1:])
    found = posterior.predict(same, 4, seed=0, shared=False).log_samples
    assert found.std(1).max() > 0.01
    assert torch.equal(found, posterior.predict(same, 4, seed=0, shared=False).log_samples)
    assert posterior.predict(same, 4, seed=0).log_samples.std(1).max() < 1e-5


def test_a_sampled_network_is_thread_safe():
    torch.manual_seed(0)
    x = torch.randn(9, 5, 6)
    one = posterior_of(Twice(), x).sample(0)
    with torch.no_grad():
        wanted = one(x)
    found = []

    def work():
        with torch.no_grad():
            found.extend(one(x) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, wanted) for each in found)


class Inside(nn.Module):
    """Network with dropout inside a recurrent layer and attention, and with a dropout layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True)
        self.drop, self.idle, self.last = nn.Dropout(0.3), nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x):
        h = self.recurrent(x)[0]
        h = self.drop(self.attention(h, h, h)[0].mean(1))
        return self.last(nn.functional.dropout(h, self.idle.p, self.training))


def test_warning_about_dropout_that_is_not_sampled():
    x = torch.randn(6, 5, 6)
    with pytest.warns(fb.FlowBNNWarning) as caught:
        posterior = posterior_of(Inside(), x)
    assert [each.message.fields["layers"] for each in caught] == [["recurrent", "attention", "idle"]]
    assert posterior.predict(x, 4, seed=0).log_samples.std(0).max() > 0
    with disable_dropout(network := Inside().train()):
        assert torch.equal(network(x), network(x))
    assert (network.recurrent.dropout, network.attention.dropout, network.drop.p) == (0.5, 0.4, 0.3)


def test_padding_does_not_bypass_the_masks():
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)
            self.encoder, self.last = nn.TransformerEncoder(layer, 1), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.encoder(x, src_key_padding_mask=x[..., 0] > 1.5)[:, 0])

    torch.manual_seed(0)
    x = torch.rand(6, 4, 6)
    x[:, 3, 0] = 2.0
    posterior = posterior_of(Padded(), x)
    assert posterior.predict(x, 4, seed=0).log_samples.std(0).max() > 0.01


@pytest.mark.parametrize("rate", [None, 0.3], ids=["own layers", "added"])
def test_repeats_put_copies_of_each_example_into_a_batch(rate):
    rows: list[int] = []
    network = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    network[0].register_forward_hook(lambda module, args, outputs: rows.append(len(outputs)))
    batches = [(torch.randn(6, 2), torch.arange(6) % 3)] * 2
    fb.MCDropout(rate, epochs=1, repeats=3).fit(network, batches, **QUIET)
    assert rows.count(18) == 2
