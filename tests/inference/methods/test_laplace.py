"""Laplace: exact where it can be, and else what its structure says, against curvatures written out."""

import math

import laplace_truth as truth
import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.inference import LaplacePosterior, load_posterior
from flowbnn.inference.laplace_evidence import best_precision, best_precisions

QUIET = {"progress": False, "seed": 0}
SCALE, NOISE = 0.7, 0.3
STRUCTURES = ("kron", "diag", "full")


def regression(count: int = 40, width: int = 3, outputs: int = 1):
    inputs = torch.randn(count, width, dtype=torch.float64)
    slope = torch.randn(width, outputs, dtype=torch.float64)
    targets = inputs @ slope + 0.5 + NOISE * torch.randn(count, outputs, dtype=torch.float64)
    return inputs, targets


def conjugate(inputs, targets, scale=SCALE):
    """Mean, covariance and log evidence of a Bayesian linear regression with one output and a bias."""
    features = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    one = torch.eye(features.shape[1], dtype=torch.float64)
    spread = (features.T @ features / NOISE**2 + one / scale**2).inverse()
    total = NOISE**2 * torch.eye(len(inputs), dtype=torch.float64) + scale**2 * features @ features.T
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(targets[:, 0]), total)
    return spread @ features.T @ targets[:, 0] / NOISE**2, spread, float(evidence.log_prob(targets[:, 0]))


def classes(count: int = 20, width: int = 4, number: int = 3):
    return torch.randn(count, width, dtype=torch.float64), torch.randint(number, (count,))


def small_conv() -> nn.Sequential:
    """With BatchNorm whose statistics and scales are no longer those of the beginning."""
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, stride=2),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(18, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Linear(4, 3),
    ).double()
    network(torch.randn(30, 1, 6, 6, dtype=torch.float64))
    with torch.no_grad():
        for part in network.modules():
            if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                part.weight.normal_(1.0, 0.3)
                part.bias.normal_()
    return network.eval()


class Branches(nn.Module):
    """Not a Sequential: the layer that is called last stands first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.left(x)) * self.right(x))


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_linear_regression_is_exact(structure):
    """Kronecker factors are exact for one linear layer too: the curvature in the outputs is the same for all examples."""
    inputs, targets = regression()
    network = nn.Linear(3, 1).double()
    before = network.weight.clone()
    posterior = fb.Laplace(structure, prior_scale=SCALE, epochs=0, newton=1).fit(
        network, truth.batches(inputs, targets), likelihood=fb.Gaussian(noise=NOISE), **QUIET
    )
    mean, spread, evidence = conjugate(inputs, targets)
    found = torch.cat([posterior.model.weight.flatten(), posterior.model.bias])
    assert torch.allclose(found, mean, atol=1e-9)
    assert torch.allclose(truth.covariance(posterior), spread, atol=1e-9)
    assert posterior.log_evidence == pytest.approx(evidence, abs=1e-8)
    assert torch.equal(network.weight, before)
    new = torch.randn(5, 3, dtype=torch.float64)
    features = torch.cat([new, torch.ones(5, 1, dtype=torch.float64)], 1)
    variance = torch.einsum("nd,de,ne->n", features, spread, features)
    assert torch.allclose(posterior.functional_variance(new)[:, 0, 0], variance, atol=1e-9)


def test_several_outputs_with_noise_of_their_own_are_exact_under_kron():
    inputs, targets = regression(outputs=2)
    likelihood = fb.Gaussian("learned", dim=2)
    with torch.no_grad():
        likelihood.log_scale.copy_(torch.tensor([-1.0, 0.5]))
    network = nn.Linear(3, 2).double()
    found = fb.Laplace("kron", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, targets), likelihood=likelihood, **QUIET
    )
    curvature = truth.explicit_ggn(network, found.names, likelihood, inputs, targets)
    spread = (curvature + torch.eye(8, dtype=torch.float64) / SCALE**2).inverse()
    assert torch.allclose(truth.covariance(found), spread, rtol=1e-5, atol=1e-9)


def test_diag_is_the_inverse_of_the_precisions_diagonal():
    inputs, targets = regression()
    posterior = fb.Laplace("diag", prior_scale=SCALE, epochs=0).fit(
        nn.Linear(3, 1).double(), truth.batches(inputs, targets), likelihood=fb.Gaussian(noise=NOISE), **QUIET
    )
    _, spread, _ = conjugate(inputs, targets)
    assert torch.allclose(
        truth.covariance(posterior), spread.inverse().diagonal().reciprocal().diag(), atol=1e-9
    )


def test_marginal_likelihood_finds_the_conjugate_optimum():
    """With the mode moving along, the exact evidence of the regression is what is maximised."""
    inputs, targets = regression()
    posterior = fb.Laplace("full", epochs=0, newton=30).fit(
        nn.Linear(3, 1).double(), truth.batches(inputs, targets), likelihood=fb.Gaussian(noise=NOISE), **QUIET
    )
    scale = posterior.prior_scale
    best = conjugate(inputs, targets, scale)[2]
    assert posterior.log_evidence == pytest.approx(best, abs=1e-6)
    grid = [conjugate(inputs, targets, scale * factor)[2] for factor in (0.3, 0.8, 0.98, 1.02, 1.2, 3.0)]
    assert max(grid) < best
    assert grid[2] == pytest.approx(best, abs=0.01)


def test_logistic_regression_has_the_hessian():
    """For a model linear in its weights the generalized Gauss-Newton matrix is the Hessian."""
    inputs, labels = classes()
    network = nn.Linear(4, 3).double()
    posterior = fb.Laplace("full", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )

    def loss(values):
        outputs = inputs @ values[:12].view(3, 4).T + values[12:]
        return nn.functional.cross_entropy(outputs, labels, reduction="sum")

    at = torch.cat([network.weight.detach().flatten(), network.bias.detach()])
    hessian = torch.func.jacrev(torch.func.jacrev(loss))(at)
    spread = (hessian + torch.eye(15, dtype=torch.float64) / SCALE**2).inverse()
    assert torch.allclose(truth.covariance(posterior), spread, atol=1e-10)
    evidence = -loss(at) - at.square().sum() / (2 * SCALE**2) + 0.5 * spread.logdet() - 15 * math.log(SCALE)
    assert posterior.log_evidence == pytest.approx(float(evidence), abs=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_the_last_layer_by_its_features_is_the_last_layer_by_differentiation(structure, outputs):
    """The shortcut for a layer that gives the outputs, against the same layer behind a reshape, which hides that."""

    class Behind(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network(x) * 1.0

    inputs, labels = classes(number=max(2, outputs))
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    method = fb.Laplace(structure, prior_scale=SCALE, epochs=0)
    short = method.fit(network, truth.batches(inputs, labels), **QUIET)
    long = method.fit(Behind(network), truth.batches(inputs, labels), **QUIET)
    assert short.told["direct"] == "2"
    assert long.told["direct"] is None
    assert torch.allclose(truth.covariance(short), truth.covariance(long), atol=1e-10)
    assert short.log_evidence == pytest.approx(long.log_evidence, abs=1e-9)
    new = torch.randn(3, 4, dtype=torch.float64)
    assert torch.allclose(short.functional_variance(new), long.functional_variance(new), atol=1e-10)
    many = {"samples": 4, "seed": 1, "shared": True, "max_batch": None}
    for predictive in ("linearized", "sampled", "probit"):
        a, b = short.use(predictive).outputs(new, **many), long.use(predictive).outputs(new, **many)
        assert torch.allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_conv_and_batch_norm_against_the_explicit_curvature(structure):
    inputs, labels = torch.randn(12, 1, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    network = small_conv()
    posterior = fb.Laplace(structure, layers="all", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    assert posterior.names == [name for name, _ in network.named_parameters()]
    precision = truth.explicit_ggn(network, posterior.names, fb.Categorical(), inputs, labels)
    precision += torch.eye(len(precision), dtype=torch.float64) / SCALE**2
    spread = precision.diagonal().reciprocal().diag() if structure == "diag" else precision.inverse()
    assert torch.allclose(truth.covariance(posterior), spread, atol=1e-9)
    new = torch.randn(4, 1, 6, 6, dtype=torch.float64)
    jacobian = truth.explicit_jacobian(network, posterior.names, new)
    variance = jacobian @ spread @ jacobian.transpose(1, 2)
    assert torch.allclose(posterior.functional_variance(new), variance, atol=1e-9)
    assert torch.allclose(
        posterior.functional_variance(new, diagonal=True), variance.diagonal(dim1=1, dim2=2), atol=1e-9
    )


def test_kronecker_factors_against_gradients_layer_by_layer():
    """``B (x) A`` per layer, from inputs and output gradients written out, for a convolution and a linear layer with their biases."""
    inputs, labels = torch.randn(12, 1, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    network = small_conv()
    posterior = fb.Laplace("kron", layers="all", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    assert posterior.names == [f"{n}.{k}" for n in (0, 4, 7) for k in ("weight", "bias")]  # norms as trained
    hidden = network[0](inputs)
    offset = torch.zeros_like(hidden, requires_grad=True)
    outputs = network[1:]((hidden + offset).clone())
    p = outputs.softmax(1).detach()
    outer = torch.zeros(2, 2, dtype=torch.float64)
    for k in range(3):
        column = p[:, k : k + 1].sqrt() * (torch.eye(3, dtype=torch.float64)[k] - p)
        gradient = torch.autograd.grad(outputs, offset, column, retain_graph=True)[0]
        outer += torch.einsum("bohw,bphw->op", gradient, gradient)
    windows = nn.functional.unfold(inputs, 3, padding=1, stride=2).transpose(1, 2).flatten(0, 1)
    windows = torch.cat([windows, torch.ones_like(windows[:, :1])], 1)
    curvature = torch.kron(outer, windows.T @ windows / len(windows))
    precision = curvature + torch.eye(len(curvature), dtype=torch.float64) / SCALE**2
    block = posterior.blocks[0]
    rows = block.unpack(torch.eye(20, dtype=torch.float64).view(20, 2, 10))
    roots = block.roots({name: value.unsqueeze(1) for name, value in rows.items()})[:, 0]
    assert torch.allclose(roots @ roots.T, precision.inverse(), atol=1e-9)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 3, padding="same", dilation=2, padding_mode="circular"), (2, 9)),
        (nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), bias=False), (2, 6, 5)),
        (nn.Conv3d(1, 2, 2, padding_mode="replicate", padding=1), (1, 3, 3, 3)),
    ],
)
def test_every_convolution_multiplies_its_patches(layer, shape):
    from flowbnn.inference.laplace_sums import patches

    x = torch.randn(2, *shape)
    found = patches(layer, x) @ layer.weight.flatten(1).T
    if layer.bias is not None:
        found = found + layer.bias
    assert torch.allclose(found.transpose(1, 2).reshape(layer(x).shape), layer(x), atol=1e-5)


def test_grouped_convolutions_under_diag_and_full():
    inputs, labels = torch.randn(6, 2, 5, dtype=torch.float64), torch.randint(3, (6,))
    network = nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    for structure in ("diag", "full"):
        found = fb.Laplace(structure, layers="0", prior_scale=SCALE, epochs=0).fit(
            network, truth.batches(inputs, labels), **QUIET
        )
        precision = truth.explicit_ggn(network, found.names, fb.Categorical(), inputs, labels)
        precision += torch.eye(len(precision), dtype=torch.float64) / SCALE**2
        spread = precision.diagonal().reciprocal().diag() if structure == "diag" else precision.inverse()
        assert torch.allclose(truth.covariance(found), spread, atol=1e-9)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_tied_weights_are_counted_once_with_all_their_uses(structure):
    inputs, labels = classes(count=9)
    network = Tied().double()
    posterior = fb.Laplace(structure, layers="all", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    assert "second.weight" not in posterior.names
    precision = truth.explicit_ggn(network, posterior.names, fb.Categorical(), inputs, labels)
    precision += torch.eye(len(precision), dtype=torch.float64) / SCALE**2
    spread = precision.diagonal().reciprocal().diag() if structure == "diag" else precision.inverse()
    assert torch.allclose(truth.covariance(posterior), spread, atol=1e-9)
    drawn = posterior.sample(seed=3)
    assert drawn.first.weight is drawn.second.weight
    with pytest.raises(fb.FlowBNNError, match=r"'first'.*shares its weights with 'second'.*'diag'"):
        fb.Laplace("kron", layers="all", epochs=0).fit(network, truth.batches(inputs, labels), **QUIET)


@pytest.mark.parametrize("kind", ["ggn", "fisher", "sampled"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_each_curvature_is_its_definition(kind, likelihood):
    """The empirical Fisher from gradients written out; the sampled one has the exact one as its mean."""
    count, outputs = (40, 3) if likelihood == "categorical" else (40, 1)
    inputs = torch.randn(count, 2, dtype=torch.float64)
    targets = {
        "categorical": torch.randint(3, (count,)),
        "bernoulli": torch.randint(2, (count,)),
        "gaussian": torch.randn(count, 1, dtype=torch.float64),
    }[likelihood]
    speaks = {"categorical": fb.Categorical(), "bernoulli": fb.Bernoulli(), "gaussian": fb.Gaussian(NOISE)}[
        likelihood
    ]
    network = nn.Linear(2, outputs).double()

    def matrix(kind: str, seed: int = 0) -> torch.Tensor:
        found = fb.Laplace("full", curvature=kind, prior_scale=1.0, epochs=0).fit(
            network, [(inputs, targets)], likelihood=speaks, progress=False, seed=seed
        )
        return truth.covariance(found).inverse() - torch.eye(3 * outputs, dtype=torch.float64)

    exact = truth.explicit_ggn(network, ["weight", "bias"], speaks, inputs, targets)
    if kind == "ggn":
        assert torch.allclose(matrix("ggn"), exact, atol=1e-7)
    elif kind == "fisher":
        total = torch.zeros_like(exact)
        for x, y in zip(inputs, targets, strict=True):
            parts = torch.autograd.grad(
                speaks.log_prob(network(x[None]), y[None]).sum(), list(network.parameters())
            )
            gradient = torch.cat([part.flatten() for part in parts])
            total += torch.outer(gradient, gradient)
        assert torch.allclose(matrix("fisher"), total, rtol=1e-6, atol=1e-6)
    else:
        draws = torch.stack([matrix("sampled", seed) for seed in range(60)])
        error = (draws.mean(0) - exact) / (draws.std(0) / math.sqrt(60)).clamp_min(1e-9)
        assert float(error.abs().max()) < 5.0
        assert torch.equal(matrix("sampled", 1), matrix("sampled", 1))


def test_the_best_precision_is_the_best():
    """Against a grid over the evidence written out, for one precision and for one per group of a full curvature."""
    root = torch.randn(6, 4, dtype=torch.float64)
    curvature = root @ root.T
    weights = torch.randn(6, dtype=torch.float64)

    def evidence(*deltas: float) -> float:
        prior = torch.tensor(deltas, dtype=torch.float64).repeat_interleave(6 // len(deltas))
        return float(
            0.5 * (prior.log().sum() - (prior * weights.square()).sum() - (curvature + prior.diag()).logdet())
        )

    values = torch.linalg.eigvalsh(curvature).clamp_min(0.0)
    best = best_precision([values[:2], values[2:]], float(weights.square().sum()))
    grid = [evidence(best * math.exp(step / 10)) for step in range(-50, 51) if step]
    assert evidence(best) > max(grid)
    squares = [float(part.square().sum()) for part in weights.split(3)]
    two = best_precisions(curvature, [3, 3], squares, best)
    beside = [
        evidence(two[0] * a, two[1] * b) for a in (0.9, 1.0, 1.1) for b in (0.9, 1.0, 1.1) if (a, b) != (1, 1)
    ]
    assert evidence(*two) > max(beside)
    assert evidence(*two) > evidence(best)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_prior_for_each_layer_has_the_higher_evidence(structure):
    inputs, labels = classes()
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        network[0].weight.mul_(10.0)
    one = fb.Laplace(structure, layers="all", epochs=0).fit(network, truth.batches(inputs, labels), **QUIET)
    each = fb.Laplace(structure, layers="all", per_layer=True, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    assert isinstance(one.prior_scale, float)
    assert set(each.prior_scale) == {"0", "2"}
    assert each.prior_scale["0"] > each.prior_scale["2"]
    assert each.log_evidence > one.log_evidence
    fixed = fb.Laplace(structure, layers="all", prior_scale=one.prior_scale * 1.1, epochs=0)
    assert fixed.fit(network, truth.batches(inputs, labels), **QUIET).log_evidence < one.log_evidence


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_covariance_and_the_density(structure):
    inputs, labels = classes()
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    posterior = fb.Laplace(structure, layers="all", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    draws, count = posterior.draws(2000, seed=0), 2000
    flat, spread = truth.flat(draws, posterior.names), truth.covariance(posterior)
    centre = truth.flat({name: value[None] for name, value in posterior.centre.items()}, posterior.names)[0]
    found = (flat - centre).T @ (flat - centre) / count
    deviation = ((spread.diagonal().outer(spread.diagonal()) + spread.square()) / count).sqrt()
    assert float(((found - spread) / deviation).abs().max()) < 5.0
    some = {name: value[:3] for name, value in draws.items()}
    exact = torch.distributions.MultivariateNormal(centre, spread).log_prob(flat[:3])
    assert torch.allclose(posterior.log_prob(some), exact, atol=1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_linearized_outputs_are_outputs_plus_jacobian_times_draw(structure):
    inputs, labels = torch.randn(12, 1, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    network = small_conv()
    posterior = fb.Laplace(structure, layers="all", epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    new = torch.randn(5, 1, 6, 6, dtype=torch.float64)
    found = posterior.outputs(new, 4, shared=True, seed=2, max_batch=2)
    draws = truth.flat(posterior.draws(4, seed=2), posterior.names)
    centre = truth.flat({name: value[None] for name, value in posterior.centre.items()}, posterior.names)
    jacobian = truth.explicit_jacobian(network, posterior.names, new)
    expected = network(new) + torch.einsum("bcp,sp->sbc", jacobian, draws - centre)
    assert torch.allclose(found, expected, atol=1e-9)
    sampled = posterior.use("sampled").outputs(new, 2, shared=True, seed=2, max_batch=None)
    own = posterior.sample(seed=2)
    assert torch.allclose(sampled[0], own(new), atol=1e-12)
    assert not torch.allclose(sampled[0], found[0], atol=1e-3)


def test_probit_shrinks_by_the_variance_and_needs_no_draws():
    inputs, labels = classes()
    posterior = fb.Laplace("kron", predictive="probit", epochs=0).fit(
        nn.Linear(4, 3).double(), truth.batches(inputs, labels), **QUIET
    )
    variance = posterior.functional_variance(inputs, diagonal=True)
    expected = (posterior.model(inputs) / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    prediction = posterior.predict(inputs)
    assert prediction.num_samples == 1
    assert torch.allclose(prediction.probabilities, expected, atol=1e-10)


def test_the_last_layer_is_the_one_called_last():
    inputs, labels = classes()
    posterior = fb.Laplace("kron", epochs=0).fit(Branches().double(), truth.batches(inputs, labels), **QUIET)
    assert posterior.names == ["head.weight", "head.bias"]
    assert posterior.told["direct"] == "head"
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
    with pytest.raises(fb.FlowBNNError, match=r"layer 'words' \(Embedding\) is not; Laplace\('diag'\)"):
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
    half = posterior.predict(inputs, samples=8, seed=3, precision="bf16").samples
    assert torch.allclose(whole, half, atol=0.1)
    adaptive = posterior.predict(inputs, samples=64, seed=3, adaptive=0.05)
    assert int(adaptive.samples_spent.max()) <= 64


def test_noise_that_nothing_trained_is_that_of_all_residuals():
    inputs, targets = regression(count=30)
    network = nn.Linear(3, 1).double()
    posterior = fb.Laplace("kron", epochs=0).fit(network, truth.batches(inputs, targets), **QUIET)
    size = (network(inputs) - targets).square().mean().sqrt()
    assert torch.allclose(posterior.likelihood.log_scale.exp(), size.float(), atol=1e-5)


def test_part_of_the_data_can_stand_for_all():
    inputs, labels = classes()
    network = nn.Linear(4, 3).double()
    method = fb.Laplace("kron", prior_scale=SCALE, epochs=0)
    double = method.fit(network, truth.batches(inputs.repeat(2, 1), labels.repeat(2)), **QUIET)
    stands = method.fit(network, truth.batches(inputs, labels), num_data=40, **QUIET)
    assert torch.allclose(truth.covariance(double), truth.covariance(stands), atol=1e-10)
    assert double.log_evidence == pytest.approx(stands.log_evidence, abs=1e-8)


def test_memory_is_told_and_refused_before_it_is_taken(monkeypatch):
    network = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 3))
    inputs, labels = torch.randn(8, 4), torch.randint(3, (8,))
    weights = sum(p.numel() for p in network.parameters())
    assert fb.Laplace("full", layers="all").memory(network, inputs) >= 8 * 6 * weights**2
    assert fb.Laplace("kron").memory(network) == 8 * (6 * 101**2 + 2 * 3**2)
    monkeypatch.setattr("flowbnn.inference.laplace_memory.available_bytes", lambda device: 10_000_000)
    with pytest.raises(
        fb.FlowBNNError, match=r"of 803 weights needs 29.7 MB of memory, and 9.54 MB are free: take 'kron'"
    ):
        fb.Laplace("full", layers="all", epochs=0).fit(network, [(inputs, labels)], **QUIET)
    posterior = fb.Laplace("kron", epochs=0).fit(network, [(inputs, labels)], **QUIET)
    assert posterior.memory == fb.Laplace("kron").memory(network)
    monkeypatch.setattr("flowbnn.inference.laplace_memory.available_bytes", lambda device: 2_000_000)
    with pytest.warns(fb.FlowBNNWarning, match="needs 478 kB of memory"):
        fb.Laplace("kron", epochs=0).fit(network, [(inputs, labels)], **QUIET)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"structure": "krone"}, "did you mean 'kron'"),
        ({"prior_scale": 0.0}, "prior_scale must be a number above 0"),
        ({"prior_scale": "evidence"}, "'marginal likelihood'"),
        ({"predictive": "probits"}, "did you mean 'probit'"),
        ({"curvature": "hessian"}, "there is no curvature 'hessian'"),
        ({"damping": -1.0}, "damping must be a number above 0"),
        ({"epochs": -1}, "epochs must be"),
    ],
)
def test_bad_settings_are_one_line(settings, told):
    with pytest.raises(fb.FlowBNNError, match=told):
        fb.Laplace(**settings)


def test_what_cannot_be_served_is_named():
    inputs, labels = torch.randn(8, 2, 5), torch.randint(3, (8,))
    grouped = nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(12, 3))
    data = [(inputs, labels)]
    with pytest.raises(fb.FlowBNNError, match=r"'0' \(Conv1d\) with 2 groups; Laplace\('diag'\)"):
        fb.Laplace("kron", layers="all", epochs=0).fit(grouped, data, **QUIET)
    with pytest.raises(fb.FlowBNNError, match=r"layers='fc\*' matches no layer"):
        fb.Laplace("kron", layers="fc*", epochs=0).fit(grouped, data, **QUIET)
    with pytest.raises(fb.FlowBNNError, match="noise='predicted'"):
        fb.Laplace(epochs=0).fit(
            nn.Linear(2, 2),
            [(inputs[..., 0], inputs[:, :1, 1])],
            likelihood=fb.Gaussian("predicted"),
            **QUIET,
        )
    with pytest.raises(fb.FlowBNNError, match="'probit' is for classes"):
        fb.Laplace(epochs=0, predictive="probit").fit(
            nn.Linear(2, 1), [(inputs[..., 0], inputs[:, :1, 1])], **QUIET
        )
    with pytest.raises(fb.FlowBNNError, match="labels run from"):
        fb.Laplace(epochs=0).fit(grouped, [*data, (inputs, labels + 3)], **QUIET)
    with pytest.raises(fb.FlowBNNError, match="the options of a run are"):
        fb.Laplace(epochs=0).fit(grouped, data, sed=1)
    twice = nn.Linear(4, 4)
    again = nn.Sequential(twice, nn.ReLU(), twice, nn.Linear(4, 3))
    with pytest.raises(fb.FlowBNNError, match=r"'0' \(Linear\), which is called 2 times"):
        fb.Laplace("kron", layers="all", epochs=0).fit(again, [(torch.randn(8, 4), labels)], **QUIET)


def test_damping_shrinks_the_posterior_and_leaves_the_evidence():
    inputs, labels = classes()
    network = nn.Linear(4, 3).double()
    plain, damped = (
        fb.Laplace("full", prior_scale=SCALE, damping=value, epochs=0).fit(
            network, truth.batches(inputs, labels), **QUIET
        )
        for value in (0.0, 2.0)
    )
    assert plain.log_evidence == damped.log_evidence
    more = truth.covariance(plain).inverse() + 2.0 * torch.eye(15, dtype=torch.float64)
    assert torch.allclose(truth.covariance(damped), more.inverse(), atol=1e-9)


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
    found = posterior.outputs(
        inputs, 2, shared=True, seed=0, max_batch=None
    )  # torch has no forward mode for weight norm
    moved = truth.flat(posterior.draws(2, seed=0), posterior.names) - torch.cat([v.flatten() for v in values])
    for n in range(6):
        outputs = network(**{name: value[n : n + 1] for name, value in inputs.items()})[0]
        for k in range(3):
            row = torch.cat(
                [part.flatten() for part in torch.autograd.grad(outputs[k], values, retain_graph=True)]
            )
            assert torch.allclose(found[:, n, k], outputs[k] + moved @ row, atol=1e-9)
    last = fb.Laplace("kron", epochs=0).fit(network, [(inputs, labels)], **QUIET)
    assert last.told["direct"] == "head"
    with pytest.raises(fb.FlowBNNError, match=r"layer 'first' \(ParametrizedLinear\) is not"):
        fb.Laplace("kron", layers="f*", epochs=0).fit(network, [(inputs, labels)], **QUIET)
