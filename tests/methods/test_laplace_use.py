"""Laplace in use: any network, saved and loaded, what it costs, and what it refuses."""

import laplace_truth as truth
import pytest
import torch
from laplace_problems import QUIET, SCALE, STRUCTURES, Branches, classes, regression, small_conv
from torch import nn

import flowbnn as fb
from flowbnn.likelihoods import Gaussian, Likelihood
from flowbnn.methods import LaplacePosterior, load_posterior
from flowbnn.methods.laplace.derivatives import output_hessian
from flowbnn.posterior import PredictOptions


def test_the_last_layer_is_the_one_called_last():
    inputs, labels = classes()
    posterior = fb.Laplace("kron", epochs=0).fit(Branches().double(), truth.batches(inputs, labels), **QUIET)
    assert posterior.names == ["head.weight", "head.bias"]
    assert posterior.direct == "head"
    chosen = fb.Laplace("kron", layers="*t", epochs=0).fit(
        Branches().double(), truth.batches(inputs, labels), **QUIET
    )
    assert chosen.names == ["left.weight", "left.bias", "right.weight", "right.bias"]


class Reader(nn.Module):
    """An embedding, attention and a recurrent layer: what torch can and cannot map over examples."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.mix: nn.Module = (
            nn.LSTM(4, 4, batch_first=True)
            if recurrent
            else nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        )
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        mixed = self.mix(self.words(x))
        return self.out((mixed[0] if isinstance(mixed, tuple) else mixed).mean(1))


@pytest.mark.parametrize("recurrent", [False, True])
def test_any_layer_under_diag(recurrent):
    tokens, labels = torch.randint(6, (4, 3)), torch.randint(3, (4,))
    network = Reader(recurrent).double().eval()
    posterior = fb.Laplace("diag", layers="all", prior_scale=SCALE, predictive="sampled", epochs=0).fit(
        network, [(tokens, labels)], **QUIET
    )
    p, total = network(tokens).softmax(1).detach(), 0.0
    for n in range(4):
        for k in range(3):
            column = p[n, k].sqrt() * (torch.eye(3, dtype=torch.float64)[k] - p[n])
            parts = torch.autograd.grad(network(tokens[n : n + 1])[0], list(network.parameters()), column)
            total = total + torch.cat([part.flatten() for part in parts]).square()
    assert torch.allclose(truth.covariance(posterior).diagonal(), 1 / (total + SCALE**-2), atol=1e-9)
    assert torch.isfinite(posterior.predict(tokens, samples=3, seed=0).probabilities).all()
    with pytest.raises(
        fb.FlowBNNError, match=r"layer 'words' \(Embedding\), only Linear .* Laplace\('diag'\)"
    ):
        fb.Laplace("kron", layers="all", epochs=0).fit(network, [(tokens, labels)], **QUIET)


def test_sequences_under_kron():
    """A linear layer that runs over words: its inputs and gradients are those of all words."""
    words, labels = torch.randn(6, 3, 4, dtype=torch.float64), torch.randint(3, (6,))

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.Linear(4, 3)

        def forward(self, x):
            return self.each(x).mean(1)

    network = Mean().double()
    posterior = fb.Laplace("kron", layers="all", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(words, labels, 4), **QUIET
    )
    p = network(words).softmax(1).detach()
    outer = (p.sum(0).diag() - p.T @ p) / 3**2 * 3  # a third of each gradient, at three words
    flat = torch.cat([words.flatten(0, 1), torch.ones(18, 1, dtype=torch.float64)], 1)
    expected = torch.linalg.eigvalsh(torch.kron(outer, flat.T @ flat / 18)).clamp_min(0.0)
    assert torch.allclose(posterior.blocks[0].eigenvalues.flatten().sort().values, expected, atol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("layers", ["last", "all"])
def test_saved_and_loaded_it_predicts_the_same(structure, layers, tmp_path):
    inputs, labels = torch.randn(12, 1, 6, 6), torch.randint(3, (12,))
    network = small_conv().float()
    posterior = fb.Laplace(structure, layers=layers, per_layer=True, epochs=1).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    path = posterior.save(tmp_path / "laplace.safetensors")
    again = load_posterior(path, small_conv().float())
    assert isinstance(again, LaplacePosterior)
    first, second = (one.predict(inputs, samples=5, seed=1).samples for one in (posterior, again))
    assert torch.equal(first, second)
    assert again.log_evidence == posterior.log_evidence
    assert again.prior_scale == posterior.prior_scale
    other = nn.Sequential(nn.Linear(36, 3))
    before = other[0].weight.clone()
    with pytest.raises(fb.FlowBNNError):
        load_posterior(path, other)
    assert torch.equal(other[0].weight, before)


def test_many_images_cost_what_one_pass_shows():
    """Half precision at prediction, batches of any size and more samples than are kept, all with the same draws."""
    inputs, labels = torch.randn(30, 4), torch.randint(3, (30,))
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    posterior = fb.Laplace("kron", epochs=2).fit(network, truth.batches(inputs, labels), **QUIET)
    whole = posterior.predict(inputs, samples=8, seed=3).samples
    parts = posterior.predict(
        truth.batches(inputs, labels), samples=8, seed=3, max_batch=4, progress=False
    ).samples
    assert torch.allclose(whole, parts, atol=1e-6)
    half = posterior.predict(inputs, samples=8, seed=3, precision="bf16-mixed").samples
    assert torch.allclose(whole, half, atol=0.1)
    adaptive = posterior.predict(inputs, samples=64, seed=3, adaptive=0.05)
    assert int(adaptive.sample_counts.max()) <= 64


def test_noise_that_nothing_trained_is_that_of_all_residuals_and_degrees_of_freedom():
    """MacKay's estimate: the sum of squares over the number of targets less the effective number of weights."""
    inputs, targets = regression(count=30)
    network = nn.Linear(3, 1).double()
    posterior = fb.Laplace("kron", epochs=0).fit(network, truth.batches(inputs, targets), **QUIET)
    block = posterior.blocks[0]
    effective = (block.eigenvalues / block.precision).sum()
    assert effective > 0.5
    size = ((posterior.model(inputs) - targets).square().sum() / (30 - effective)).sqrt()
    assert torch.allclose(posterior.likelihood.log_scale.exp(), size.float(), atol=1e-5)


def test_part_of_the_data_can_stand_for_all():
    inputs, labels = classes()
    network = nn.Linear(4, 3).double()
    method = fb.Laplace("kron", prior_scale=SCALE, epochs=0)
    double = method.fit(network, truth.batches(inputs.repeat(2, 1), labels.repeat(2)), **QUIET)
    stands = method.fit(network, truth.batches(inputs, labels), num_data=40, **QUIET)
    assert torch.allclose(truth.covariance(double), truth.covariance(stands), atol=1e-10)
    assert double.log_evidence == pytest.approx(stands.log_evidence, abs=1e-8)


def test_too_much_memory_is_refused_before_it_is_taken(monkeypatch):
    network = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 3))
    inputs, labels = torch.randn(8, 4), torch.randint(3, (8,))
    monkeypatch.setattr("flowbnn.methods.laplace.layer_choice.available_bytes", lambda device: 10_000_000)
    with pytest.raises(
        fb.FlowBNNError,
        match=r"of 803 weights needs 0.0288 GiB of memory, and 0.00931 GiB are free: take 'kron'",
    ):
        fb.Laplace("full", layers="all", epochs=0).fit(network, [(inputs, labels)], **QUIET)
    fb.Laplace("kron", epochs=0).fit(network, [(inputs, labels)], **QUIET)
    needed = 8 * (6 * 101**2 + 2 * 3**2)
    monkeypatch.setattr("flowbnn.methods.laplace.layer_choice.available_bytes", lambda device: 2 * needed - 1)
    with pytest.raises(fb.FlowBNNError, match="take 'diag', or fewer layers"):
        fb.Laplace("kron", epochs=0).fit(network, [(inputs, labels)], **QUIET)


def test_what_cannot_be_served_is_named():
    inputs, labels = torch.randn(8, 2, 5), torch.randint(3, (8,))
    grouped = nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(12, 3))
    data = [(inputs, labels)]
    with pytest.raises(fb.FlowBNNError, match=r"'0' \(Conv1d\), which has 2 groups; Laplace\('diag'\)"):
        fb.Laplace("kron", layers="all", epochs=0).fit(grouped, data, **QUIET)
    with pytest.raises(fb.FlowBNNError, match=r"layers='fc\*' matches no layer"):
        fb.Laplace("kron", layers="fc*", epochs=0).fit(grouped, data, **QUIET)
    with pytest.raises(fb.FlowBNNError, match="noise='predicted'"):
        fb.Laplace(epochs=0).fit(
            nn.Linear(2, 2),
            [(inputs[..., 0], inputs[:, :1, 1])],
            likelihood=fb.likelihoods.Gaussian("predicted"),
            **QUIET,
        )
    with pytest.raises(fb.FlowBNNError, match="'probit' is for classes"):
        fb.Laplace(epochs=0, predictive="probit").fit(
            nn.Linear(2, 1), [(inputs[..., 0], inputs[:, :1, 1])], **QUIET
        )
    with pytest.raises(fb.FlowBNNError, match="labels run from"):
        fb.Laplace(epochs=0).fit(grouped, [*data, (inputs, labels + 3)], **QUIET)
    with pytest.raises(fb.FlowBNNError, match="did you mean .seed"):
        fb.Laplace(epochs=0).fit(grouped, data, sed=1)
    twice = nn.Linear(4, 4)
    again = nn.Sequential(twice, nn.ReLU(), twice, nn.Linear(4, 3))
    with pytest.raises(fb.FlowBNNError, match=r"'0' \(Linear\), which is called 2 times"):
        fb.Laplace("kron", layers="all", epochs=0).fit(again, [(torch.randn(8, 4), labels)], **QUIET)


class Named(nn.Module):
    """Takes two inputs by name, has a parameter of its own, a weight behind a parametrization and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, image, mask):
        return self.head(torch.tanh(self.frozen(torch.tanh(self.first(image + self.shift)))) * mask)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_networks_as_people_write_them(structure):
    inputs = {"image": torch.randn(6, 4).double(), "mask": torch.rand(6, 4).double()}
    labels, network = torch.randint(3, (6,)), Named().double()
    posterior = fb.Laplace(structure, layers="all", prior_scale=SCALE, epochs=0).fit(
        network, [(inputs, labels)], **QUIET
    )
    assert set(posterior.names) == {name for name, p in network.named_parameters() if p.requires_grad}
    p, total = network(**inputs).softmax(1).detach(), 0.0
    values = [dict(network.named_parameters())[name] for name in posterior.names]
    for n in range(6):
        outputs = network(**{name: value[n : n + 1] for name, value in inputs.items()})[0]
        for k in range(3):
            column = p[n, k].sqrt() * (torch.eye(3).double()[k] - p[n])
            parts = torch.autograd.grad(outputs, values, column, retain_graph=True)
            row = torch.cat([part.flatten() for part in parts])
            total = total + (row.square().diag() if structure == "diag" else torch.outer(row, row))
    spread = (total + torch.eye(len(total)).double() / SCALE**2).inverse()
    assert torch.allclose(truth.covariance(posterior), spread, atol=1e-8)
    found = posterior.collect(inputs, PredictOptions(2, seed=0))[
        0
    ]  # torch has no forward mode for weight norm
    moved = truth.flat(posterior.draws(2, seed=0), posterior.names) - torch.cat([v.flatten() for v in values])
    for n in range(6):
        outputs = network(**{name: value[n : n + 1] for name, value in inputs.items()})[0]
        for k in range(3):
            row = torch.cat(
                [part.flatten() for part in torch.autograd.grad(outputs[k], values, retain_graph=True)]
            )
            assert torch.allclose(found[:, n, k], outputs[k] + moved @ row, atol=1e-9)
    last = fb.Laplace("kron", epochs=0).fit(network, [(inputs, labels)], **QUIET)
    assert last.direct == "head"
    with pytest.raises(fb.FlowBNNError, match=r"layer 'first' \(ParametrizedLinear\), only Linear"):
        fb.Laplace("kron", layers="f*", epochs=0).fit(network, [(inputs, labels)], **QUIET)


class Padded(nn.Module):
    """Words of different number, padded by 0, which attention leaves out."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.words, self.body, self.head = (
            nn.Embedding(20, 8),
            nn.TransformerEncoder(layer, 1),
            nn.Linear(8, 2),
        )

    def forward(self, x):
        return self.head(self.body(self.words(x), src_key_padding_mask=x == 0).mean(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of the training before
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_transformer_with_padding(structure, tmp_path):
    torch.manual_seed(0)
    words = torch.randint(1, 20, (12, 6))
    words[1:, -2:] = 0
    network = Padded()
    posterior = fb.Laplace(structure, epochs=1).fit(network, [(words, words[:, 0] % 2)], **QUIET)
    found = posterior.predict(words, 8, seed=0).probabilities
    assert bool(torch.isfinite(found).all())
    posterior.save(tmp_path / "laplace")
    again = load_posterior(tmp_path / "laplace", Padded()).predict(words, 8, seed=0).probabilities
    torch.testing.assert_close(again, found)
    assert network.body.use_nested_tensor, "the user's own network is left alone"


def test_the_curvature_of_a_predicted_noise_is_its_fisher_information():
    """Targets one standard deviation to either side have the mean and the variance that the Hessian's expectation needs."""
    outputs = torch.tensor([[0.3, -1.0], [2.0, 0.7]], dtype=torch.float64)
    likelihood, spread = Gaussian("predicted"), (0.5 * outputs[:, 1:]).exp()

    def loss(targets):
        return lambda flat: -likelihood.log_prob(flat.reshape(2, 2), targets).sum()

    sides = [outputs[:, :1] + side * spread for side in (-1.0, 1.0)]
    hessians = [torch.autograd.functional.hessian(loss(targets), outputs.flatten()) for targets in sides]
    exact = output_hessian(likelihood, outputs, sides[0], "ggn", torch.Generator())
    columns = exact.columns(0, 2)
    fisher = torch.block_diag(*(columns.mT @ columns))
    torch.testing.assert_close(fisher, sum(hessians) / 2)
    gradient = output_hessian(likelihood, outputs, sides[1], "fisher", torch.Generator()).columns(0, 1)[:, 0]
    (slope,) = torch.autograd.functional.jacobian(loss(sides[1]), (outputs.flatten(),))
    torch.testing.assert_close(gradient.flatten(), slope)


def test_noise_of_a_network_that_predicts_its_own_level_is_calibrated():
    torch.manual_seed(0)
    inputs = torch.randn(60, 3)
    data = [(inputs, inputs[:, :1] + torch.randn(60, 1))]
    given = {"folds": 2, "progress": False, "accelerator": "cpu"}
    posterior = fb.calibrate(nn.Linear(3, 2), data, likelihood=Gaussian("predicted"), **given)
    assert posterior.calibration.nll["calibrated"] < posterior.calibration.nll["plain"]

    class Own(Likelihood):
        log_prob = predictive = None

    with pytest.raises(fb.FlowBNNError, match="the curvature of Own"):
        output_hessian(Own(), inputs, inputs, "ggn", torch.Generator())
