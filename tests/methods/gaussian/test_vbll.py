"""Tests of VBLL: its bound against quadrature, its samples, refused networks, and resumed fits."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian
from flowbnn.methods.gaussian.vbll import LastLayerNetwork, RowCovariance, find_output_layer, variance_penalty

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=GENERATOR)
Y = (X.sum(1) > 0).long()
OPTIONS = {"progress": False, "seed": 0, "accelerator": "cpu"}


def make_network(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def random_covariance(structure, rows=2, columns=5):
    covariance = RowCovariance(rows, columns, 0.4, structure)
    torch.manual_seed(1)
    for value in covariance.parameters():
        nn.init.normal_(value, std=0.3)
    return covariance


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_variance_and_divergence_are_exact(structure):
    covariance = random_covariance(structure).double()
    roots, mean = covariance.root.detach(), torch.randn(2, 5, dtype=torch.float64, generator=GENERATOR)
    features = torch.randn(7, 5, dtype=torch.float64, generator=GENERATOR)
    matrices = roots @ roots.transpose(1, 2)
    expected = torch.einsum("bd,kde,be->bk", features, matrices, features)
    torch.testing.assert_close(covariance.variance(features).detach(), expected)
    torch.testing.assert_close(covariance.multiply(mean).detach(), torch.einsum("kde,ke->kd", roots, mean))
    posterior = torch.distributions.MultivariateNormal(mean, scale_tril=roots)
    prior = torch.distributions.MultivariateNormal(torch.zeros(5).double(), 0.49 * torch.eye(5).double())
    kl = torch.distributions.kl_divergence(posterior, prior.expand((2,))).sum()
    divergence = covariance.divergence(mean, 0.7)
    torch.testing.assert_close(divergence.kl.detach(), kl)
    torch.testing.assert_close(divergence.entropy.detach(), posterior.entropy().sum())


def expected_log_prob(likelihood, mean, variance, targets):
    """Returns the expectation of the log-likelihood over independent Gaussian outputs, by Monte Carlo with many draws."""
    draws = torch.randn(200_000, *mean.shape, dtype=mean.dtype, generator=GENERATOR)
    outputs = (mean + variance.sqrt() * draws).flatten(0, 1)
    values = likelihood.log_prob(outputs, targets.repeat(len(draws), *(1,) * (targets.ndim - 1)))
    values = values.view(len(draws), -1)
    return values.mean(0), values.std(0) / len(draws) ** 0.5


def test_bound_is_exact_for_a_gaussian_and_below_for_classes():
    mean = torch.tensor([[0.3, -1.0], [2.0, 0.1]], dtype=torch.float64)
    variance = torch.tensor([[0.2, 0.5], [0.1, 0.05]], dtype=torch.float64)
    gaussian, targets = Gaussian(0.6), torch.tensor([[0.0, -1.5], [2.2, 0.0]], dtype=torch.float64)
    exact, error = expected_log_prob(gaussian, mean, variance, targets)
    bound = gaussian.log_prob(mean, targets) - variance_penalty(gaussian, mean, variance)
    assert ((bound - exact).abs() < 5.0 * error).all()
    for likelihood, labels in (
        (Categorical(), torch.tensor([0, 1])),
        (Bernoulli(), torch.tensor([[0, 1], [1, 1]])),
    ):
        exact, error = expected_log_prob(likelihood, mean, variance, labels)
        bound = likelihood.log_prob(mean, labels) - variance_penalty(likelihood, mean, variance)
        assert (bound < exact + 5.0 * error).all()
        assert (exact - bound < 0.5 * variance.sum(1)).all()


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("targets", [Y, 3.0 * X[:, :2] + 7.0], ids=["classes", "regression"])
def test_predictions_are_those_of_single_networks(structure, targets, tmp_path):
    posterior = fb.VBLL(structure, epochs=3).fit(make_network(), (X, targets), **OPTIONS)
    outputs = posterior.collect(X, fb.posterior.PredictOptions(5, seed=1))[0]
    with torch.no_grad():
        single = torch.stack([network(X) for network in posterior.networks(5, seed=1)])
    torch.testing.assert_close(outputs, single, atol=1e-5, rtol=1e-5)
    assert outputs.std(0).max() > 1e-4
    draws = posterior.draws(4, seed=0)
    mean, roots = posterior.mean.detach(), posterior.covariance.root.detach()
    columns = torch.cat([draws["2.weight"], draws["2.bias"].unsqueeze(-1)], -1)
    exact = torch.distributions.MultivariateNormal(mean, scale_tril=roots).log_prob(columns).sum(1)
    torch.testing.assert_close(posterior.log_prob(draws), exact, atol=1e-3, rtol=1e-4)
    loaded = fb.load_posterior(posterior.save(tmp_path / "p.safetensors"), make_network())
    assert torch.equal(loaded.collect(X, fb.posterior.PredictOptions(5, seed=1))[0], outputs)


def test_variance_of_a_scaled_network_has_the_units_of_the_targets():
    network, covariance = make_network(), random_covariance("full")
    fb.regression.set_output_scale(network, torch.zeros(2), torch.tensor([2.0, 3.0]))
    assert find_output_layer(network, X) == "2"
    module = LastLayerNetwork(network, "2", covariance)
    scaled = module(X)[:, 2:]
    features = torch.cat([network[:2](X), torch.ones(40, 1)], 1)
    torch.testing.assert_close(scaled, covariance.variance(features) * torch.tensor([4.0, 9.0]))


def test_resumed_fits_are_equal(tmp_path):
    whole = fb.VBLL(epochs=4).fit(make_network(), [(X, Y)], **OPTIONS)
    fb.VBLL(epochs=2).fit(make_network(), [(X, Y)], checkpoint=tmp_path, **OPTIONS)
    resumed = fb.VBLL(epochs=4).fit(make_network(), [(X, Y)], checkpoint=tmp_path, resume=True, **OPTIONS)
    assert resumed.history.epochs == 4
    assert torch.equal(whole.covariance.root, resumed.covariance.root)
    assert torch.equal(whole.mean, resumed.mean)


class NotLast(nn.Module):
    """Network that changes the output of its linear layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return 2.0 * self.layer(x)


class OtherLinear(nn.Linear):
    """Linear layer with a forward of its own, as that of timm."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class HalvedLinear(nn.Linear):
    """Linear layer that computes something else."""

    def forward(self, x):
        return 0.5 * super().forward(x)


def test_subclasses_of_linear_are_served_if_they_compute_the_same():
    predictions = []
    for layer in (nn.Linear(4, 2), OtherLinear(4, 2)):
        network = nn.Sequential(*make_network()[:2], layer)
        network.load_state_dict(make_network().state_dict())
        posterior = fb.VBLL(epochs=2).fit(network, (X, Y), **OPTIONS)
        predictions.append(posterior.predict(X, 4, seed=0).probabilities)
    torch.testing.assert_close(*predictions)
    with pytest.raises(FlowBNNError) as caught:
        fb.VBLL(epochs=1).fit(nn.Sequential(*make_network()[:2], HalvedLinear(4, 2)), (X, Y), **OPTIONS)
    assert caught.value.kind == "layer"
    assert "'2' with a forward of its own" in str(caught.value)


def test_unsupported_networks_and_likelihoods_are_refused():
    cases = [
        (NotLast(), "auto", "layer"),
        (make_network(4), Gaussian("predicted"), "likelihood"),
        (make_network(), Categorical(class_weights=[1.0, 2.0]), "likelihood"),
        (make_network(1), "poisson", "likelihood"),
    ]
    for network, likelihood, kind in cases:
        targets = X[:, :2] if isinstance(likelihood, Gaussian) else Y
        with pytest.raises(FlowBNNError) as caught:
            fb.VBLL(epochs=1).fit(network, (X, targets), likelihood=likelihood, **OPTIONS)
        assert caught.value.kind == kind
    with pytest.raises(FlowBNNError) as caught:
        fb.VBLL(epochs=1).fit(nn.Linear(20_000, 2), (torch.zeros(4, 20_000), torch.arange(4) % 2), **OPTIONS)
    assert caught.value.kind == "memory"
