"""Tests of LaplacePosterior: predictions, saving and loading, and supported networks."""

import laplace_truth as truth
import pytest
import torch
from laplace_problems import QUIET, SCALE, STRUCTURES, Branches, classes, regression, small_conv
from torch import nn

import flowbnn as fb
from flowbnn.likelihoods import Gaussian, Likelihood
from flowbnn.methods import LaplacePosterior, load_posterior
from flowbnn.methods.laplace.derivatives import check_likelihood, output_hessian
from flowbnn.posterior import PredictOptions


def test_last_layer_is_the_layer_called_last():
    inputs, labels = classes()
    posterior = fb.Laplace("kron", epochs=0).fit(Branches().double(), truth.batches(inputs, labels), **QUIET)
    assert posterior.names == ["head.weight", "head.bias"]
    assert posterior.output_layer == "head"
    selected = fb.Laplace("kron", layers="*t", epochs=0).fit(
        Branches().double(), truth.batches(inputs, labels), **QUIET
    )
    assert selected.names == ["left.weight", "left.bias", "right.weight", "right.bias"]


class Reader(nn.Module):
    """Network with an embedding and attention, or a recurrent layer that vmap does not support."""

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
        hidden = self.mix(self.words(x))
        return self.out((hidden[0] if isinstance(hidden, tuple) else hidden).mean(1))


@pytest.mark.parametrize("recurrent", [False, True])
def test_diag_supports_any_layer(recurrent):
    tokens, labels = torch.randint(6, (4, 3)), torch.randint(3, (4,))
    network = Reader(recurrent).double().eval()
    posterior = fb.Laplace("diag", layers="all", prior_scale=SCALE, predictive="sampled", epochs=0).fit(
        network, [(tokens, labels)], **QUIET
    )
    p, total = network(tokens).softmax(1).detach(), 0.0
    for n in range(4):
        for k in range(3):
            column = p[n, k].sqrt() * (torch.eye(3, dtype=torch.float64)[k] - p[n])
            gradients = torch.autograd.grad(network(tokens[n : n + 1])[0], list(network.parameters()), column)
            total = total + torch.cat([gradient.flatten() for gradient in gradients]).square()
    assert torch.allclose(truth.covariance(posterior).diagonal(), 1 / (total + SCALE**-2), atol=1e-9)
    assert torch.isfinite(posterior.predict(tokens, samples=3, seed=0).probabilities).all()
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace("kron", layers="all", epochs=0).fit(network, [(tokens, labels)], **QUIET)
    assert (error.value.kind, error.value.layer) == ("layer", "words")


def test_kron_supports_sequences():
    """A linear layer over words accumulates the inputs and gradients of all words."""
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
def test_loaded_posterior_predicts_the_same(structure, layers, tmp_path):
    inputs, labels = torch.randn(12, 1, 6, 6), torch.randint(3, (12,))
    network = small_conv().float()
    posterior = fb.Laplace(structure, layers=layers, per_layer=True, epochs=1).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    path = posterior.save(tmp_path / "laplace.safetensors")
    loaded = load_posterior(path, small_conv().float())
    assert isinstance(loaded, LaplacePosterior)
    first, second = (p.predict(inputs, samples=5, seed=1).samples for p in (posterior, loaded))
    assert torch.equal(first, second)
    assert loaded.log_evidence == posterior.log_evidence
    assert loaded.prior_scale == posterior.prior_scale
    other = nn.Sequential(nn.Linear(36, 3))
    before = other[0].weight.clone()
    with pytest.raises(fb.FlowBNNError):
        load_posterior(path, other)
    assert torch.equal(other[0].weight, before)


def test_output_layer_predictions_do_not_depend_on_batches():
    """Predictions in batches, in half precision and with adaptive sampling use the same draws."""
    inputs, labels = torch.randn(30, 4), torch.randint(3, (30,))
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    posterior = fb.Laplace("kron", epochs=2).fit(network, truth.batches(inputs, labels), **QUIET)
    expected = posterior.predict(inputs, samples=8, seed=3).samples
    batched = posterior.predict(
        truth.batches(inputs, labels), samples=8, seed=3, max_batch=4, progress=False
    ).samples
    assert torch.allclose(expected, batched, atol=1e-6)
    half = posterior.predict(inputs, samples=8, seed=3, precision="bf16-mixed").samples
    assert torch.allclose(expected, half, atol=0.1)
    adaptive = posterior.predict(inputs, samples=64, seed=3, adaptive=0.05)
    assert int(adaptive.sample_counts.max()) <= 64


def test_noise_of_an_untrained_network_is_mackays_estimate():
    """The variance is the sum of squares over the number of targets minus the effective number of weights."""
    inputs, targets = regression(count=30)
    network = nn.Linear(3, 1).double()
    posterior = fb.Laplace("kron", epochs=0).fit(network, truth.batches(inputs, targets), **QUIET)
    block = posterior.blocks[0]
    effective = (block.eigenvalues / block.precision).sum()
    assert effective > 0.5
    size = ((posterior.model(inputs) - targets).square().sum() / (30 - effective)).sqrt()
    assert torch.allclose(posterior.likelihood.log_scale.exp(), size.float(), atol=1e-5)


def test_num_data_scales_the_curvature():
    inputs, labels = classes()
    network = nn.Linear(4, 3).double()
    method = fb.Laplace("kron", prior_scale=SCALE, epochs=0)
    double = method.fit(network, truth.batches(inputs.repeat(2, 1), labels.repeat(2)), **QUIET)
    scaled = method.fit(network, truth.batches(inputs, labels), num_data=40, **QUIET)
    assert torch.allclose(truth.covariance(double), truth.covariance(scaled), atol=1e-10)
    assert double.log_evidence == pytest.approx(scaled.log_evidence, abs=1e-8)


class NamedInputs(nn.Module):
    """Network with two named inputs, a free parameter, a parametrized weight and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, image, mask):
        return self.head(torch.tanh(self.frozen(torch.tanh(self.first(image + self.shift)))) * mask)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_named_inputs_and_parametrized_weights(structure):
    inputs = {"image": torch.randn(6, 4).double(), "mask": torch.rand(6, 4).double()}
    labels, network = torch.randint(3, (6,)), NamedInputs().double()
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
            gradients = torch.autograd.grad(outputs, values, column, retain_graph=True)
            row = torch.cat([gradient.flatten() for gradient in gradients])
            total = total + (row.square().diag() if structure == "diag" else torch.outer(row, row))
    covariance = (total + torch.eye(len(total)).double() / SCALE**2).inverse()
    assert torch.allclose(truth.covariance(posterior), covariance, atol=1e-8)
    # torch has no forward mode for weight norm
    predicted = posterior.collect(inputs, PredictOptions(2, seed=0))[0]
    deviations = truth.flat(posterior.draws(2, seed=0), posterior.names) - torch.cat(
        [v.flatten() for v in values]
    )
    for n in range(6):
        outputs = network(**{name: value[n : n + 1] for name, value in inputs.items()})[0]
        for k in range(3):
            gradients = torch.autograd.grad(outputs[k], values, retain_graph=True)
            row = torch.cat([gradient.flatten() for gradient in gradients])
            assert torch.allclose(predicted[:, n, k], outputs[k] + deviations @ row, atol=1e-9)
    last = fb.Laplace("kron", epochs=0).fit(network, [(inputs, labels)], **QUIET)
    assert last.output_layer == "head"
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace("kron", layers="f*", epochs=0).fit(network, [(inputs, labels)], **QUIET)
    assert (error.value.kind, error.value.layer) == ("layer", "first")


class Padded(nn.Module):
    """Transformer over word sequences padded with 0, which attention masks."""

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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # from training
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_transformer_with_padding(structure, tmp_path):
    torch.manual_seed(0)
    words = torch.randint(1, 20, (12, 6))
    words[1:, -2:] = 0
    network = Padded()
    posterior = fb.Laplace(structure, epochs=1).fit(network, [(words, words[:, 0] % 2)], **QUIET)
    expected = posterior.predict(words, 8, seed=0).probabilities
    assert bool(torch.isfinite(expected).all())
    posterior.save(tmp_path / "laplace")
    probabilities = load_posterior(tmp_path / "laplace", Padded()).predict(words, 8, seed=0).probabilities
    torch.testing.assert_close(probabilities, expected)
    assert network.body.use_nested_tensor, "the network of the caller must not change"


def test_curvature_of_predicted_noise_is_the_fisher_information():
    """Targets one standard deviation to either side reproduce the expectation of the Hessian."""
    outputs = torch.tensor([[0.3, -1.0], [2.0, 0.7]], dtype=torch.float64)
    likelihood, std = Gaussian("predicted"), (0.5 * outputs[:, 1:]).exp()

    def loss(targets):
        return lambda flat: -likelihood.log_prob(flat.reshape(2, 2), targets).sum()

    sides = [outputs[:, :1] + side * std for side in (-1.0, 1.0)]
    hessians = [torch.autograd.functional.hessian(loss(targets), outputs.flatten()) for targets in sides]
    exact = output_hessian(likelihood, outputs, sides[0], "ggn", torch.Generator())
    columns = exact.columns(0, 2)
    fisher = torch.block_diag(*(columns.mT @ columns))
    torch.testing.assert_close(fisher, sum(hessians) / 2)
    gradient = output_hessian(likelihood, outputs, sides[1], "fisher", torch.Generator()).columns(0, 1)[:, 0]
    (expected,) = torch.autograd.functional.jacobian(loss(sides[1]), (outputs.flatten(),))
    torch.testing.assert_close(gradient.flatten(), expected)


def explicit_fisher(network, names, likelihood, inputs):
    """Returns the Fisher matrix ``[P, P]`` of one predicted mean and log-variance, with the expectation by Gauss-Hermite quadrature.

    Scores are quadratic in the target, so three nodes integrate their products exactly.
    """
    jacobian = truth.explicit_jacobian(network, names, inputs)
    fisher = torch.zeros(jacobian.shape[2], jacobian.shape[2], dtype=torch.float64)
    for node, weight in ((-(3.0**0.5), 1 / 6), (0.0, 2 / 3), (3.0**0.5, 1 / 6)):
        outputs = network(inputs).detach().requires_grad_()
        targets = (outputs[:, :1] + node * (0.5 * outputs[:, 1:]).exp()).detach()
        (scores,) = torch.autograd.grad(likelihood.log_prob(outputs, targets).sum(), outputs)
        gradients = torch.einsum("nc,ncp->np", scores, jacobian)
        fisher += weight * gradients.T @ gradients
    return fisher


@pytest.mark.filterwarnings("ignore:the NLL on training data")  # of one example
@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_posterior_of_predicted_noise_has_the_fisher_matrix(structure, layers, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs, targets = torch.randn(6, 3).double(), torch.randn(6, 1).double()
    rows = 1 if structure == "kron" else 6  # Kronecker products are exact for one example
    posterior = fb.Laplace(structure, layers=layers, prior_scale=0.3, epochs=0).fit(
        network, [(inputs[:rows], targets[:rows])], likelihood=Gaussian("predicted"), **QUIET
    )
    fisher = explicit_fisher(network, posterior.names, Gaussian("predicted"), inputs[:rows])
    if structure != "full":  # layers are independent
        sizes = [network.get_parameter(name).numel() for name in posterior.names]
        layer = torch.repeat_interleave(torch.arange(len(sizes)) // 2, torch.tensor(sizes))
        fisher = fisher * (layer[:, None] == layer)
    fisher = fisher.diag().diag() if structure == "diag" else fisher
    covariance = (fisher + torch.eye(len(fisher)).double() / 0.3**2).inverse()
    assert torch.allclose(truth.covariance(posterior), covariance, atol=1e-9)
    prediction = posterior.predict(inputs, samples=5, seed=0)
    posterior.save(tmp_path / "laplace")
    loaded = load_posterior(tmp_path / "laplace", network).predict(inputs, samples=5, seed=0)
    assert torch.equal(loaded.mean, prediction.mean)
    assert prediction.mean.shape == (6, 1)


def test_network_with_predicted_noise_is_calibrated():
    torch.manual_seed(0)
    inputs = torch.randn(60, 3)
    data = [(inputs, inputs[:, :1] + torch.randn(60, 1))]
    options = {"folds": 2, "progress": False, "accelerator": "cpu"}
    posterior = fb.calibrate(nn.Linear(3, 2), data, likelihood=Gaussian("predicted"), **options)
    assert posterior.calibration.nll["noise"] < posterior.calibration.nll["plain"]


def test_a_likelihood_without_curvature_is_refused():
    class CustomLikelihood(Likelihood):
        log_prob = predictive = None

    with pytest.raises(fb.FlowBNNError) as error:
        check_likelihood(CustomLikelihood(), "linearized")
    assert (error.value.kind, error.value.argument) == ("likelihood", "likelihood")
