"""Tests of BayesByBackprop: its optimum on a conjugate model, supported networks and refused arguments."""

import math
from types import SimpleNamespace

import pytest
import torch
from problems import NOISE, PRIOR, QUIET, blobs, conjugate, loader, small
from torch import nn
from torch.distributions import Normal
from variational_problems import Reader, cosine, evidence, mean_field_bound, repeat_rows

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.methods import GaussianWeightPosterior


def test_optimum_of_a_conjugate_regression():
    problem, network, batches, _ = conjugate(bias=False)
    method = fb.BayesByBackprop(epochs=600, lr=0.05, noise_lr=0.05, schedule=cosine, prior_scale=PRIOR)
    posterior = method.fit(
        network, repeat_rows(batches), num_data=24, likelihood=fb.likelihoods.Gaussian(NOISE), seed=0, **QUIET
    )
    mean, std = posterior.mean["weight"][0], posterior.std["weight"][0]
    precision = problem.precision.diagonal()
    assert ((mean - problem.mean).abs() * precision.sqrt()).max() < 0.02
    assert (std.square() * precision - 1.0).abs().max() < 0.02
    residual = problem.targets - problem.design @ mean
    variance = (problem.design.square() @ std.square()).sum()
    log_likelihood = -0.5 * (residual.square().sum() + variance) / NOISE**2
    log_likelihood -= len(residual) * (math.log(NOISE) + 0.5 * math.log(2.0 * math.pi))
    kl = torch.distributions.kl_divergence(Normal(mean, std), Normal(torch.zeros_like(mean), PRIOR)).sum()
    elbo = log_likelihood - kl
    assert elbo < evidence(problem)
    assert mean_field_bound(problem) - 1e-3 < elbo <= mean_field_bound(problem) + 1e-9
    last = posterior.history.last
    assert last["kl"] == pytest.approx(kl.item(), abs=1e-3)
    count = len(residual)
    # the KL is divided by N once
    assert last["elbo"] == pytest.approx(last["log_likelihood"] - last["kl"] / count, abs=1e-9)


def mixture_kl(std: float, wide: float, narrow: float) -> float:
    """Returns the KL of N(0, std^2) from an equal mixture of two zero-mean normals, by quadrature."""
    x = torch.linspace(-10 * std, 10 * std, 4001, dtype=torch.float64)
    q = Normal(torch.zeros((), dtype=torch.float64), std)
    components = torch.stack([Normal(torch.zeros_like(q.loc), scale).log_prob(x) for scale in (wide, narrow)])
    log_p = components.logsumexp(0) - math.log(2.0)
    return float(torch.trapezoid(q.log_prob(x).exp() * (q.log_prob(x) - log_p), x))


def test_weights_without_data_have_the_prior():
    inputs, labels = blobs().tensors
    batch = (torch.cat([inputs, torch.zeros(len(inputs), 1)], 1), labels)  # the fifth feature is always zero
    network = nn.Sequential(nn.Linear(5, 3, bias=False))
    with torch.no_grad():
        network[0].weight.mul_(0.1)
    posteriors = {
        prior: fb.BayesByBackprop(
            prior, epochs=10, lr=0.02, noise_lr=0.05, sigma1=1.0, sigma2=0.02, kl_samples=64
        ).fit(network, [batch] * 20, num_data=len(inputs), seed=0, **QUIET)
        for prior in ("gaussian", "scale-mixture")
    }
    unused = {prior: posterior.std["0.weight"][:, 4] for prior, posterior in posteriors.items()}
    torch.testing.assert_close(unused["gaussian"], torch.ones(3), rtol=0.05, atol=0.0)
    # narrow initial weights stay in the narrow component of the mixture, at the optimum by quadrature
    grid = torch.linspace(0.01, 0.05, 81).tolist()
    best = min(grid, key=lambda std: mixture_kl(std, 1.0, 0.02))
    torch.testing.assert_close(unused["scale-mixture"], torch.full((3,), best), rtol=0.15, atol=0.0)


def test_log_prob_is_exact():
    layer = nn.Linear(3, 2).double()
    std = {name: torch.rand_like(value) + 0.1 for name, value in layer.named_parameters()}
    posterior = GaussianWeightPosterior(layer, fb.likelihoods.Gaussian(1.0), std)
    draws = posterior.draws(6, seed=3)
    mean = dict(layer.named_parameters())
    truth = sum(Normal(mean[n].detach(), std[n]).log_prob(draws[n]).flatten(1).sum(1) for n in std)
    torch.testing.assert_close(posterior.log_prob(draws), truth)
    with pytest.raises(FlowBNNError) as error:
        posterior.log_prob({"weight": draws["weight"]})
    assert (error.value.argument, error.value.fields["missing"]) == ("values", ["bias"])


def test_samples_do_not_depend_on_the_number_of_samples():
    posterior = fb.BayesByBackprop(epochs=1).fit(small(), loader(blobs()), seed=0, **QUIET)
    draws = posterior.draws(5, seed=7)
    streamed = [
        {name: value.clone() for name, value in weights.items()}
        for weights in posterior.stream(range(2, 5), SimpleNamespace(seed=7))
    ]
    for offset, weights in enumerate(streamed):
        assert all(torch.equal(weights[name], draws[name][2 + offset]) for name in weights)
    x = blobs()[:5][0]
    samples = posterior.predict(x, 3, seed=7).samples
    assert torch.equal(samples, posterior.predict(x, 5, seed=7).samples[:3])


@pytest.fixture
def sentences():
    return [(torch.randint(7, (12, 5)), torch.arange(12) % 7)]


def test_any_layer_and_tied_weights_are_supported(sentences, tmp_path):
    network = Reader()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    posterior = fb.BayesByBackprop(epochs=3, lr=0.01).fit(network, sentences, seed=0, **QUIET)
    assert "head.weight" not in posterior.names
    assert posterior.names.count("words.weight") == 1
    assert not any(name.startswith("norm") for name in posterior.names)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert posterior.model.head.weight is posterior.model.words.weight
    count = sum(p.numel() for n, p in network.named_parameters() if not n.startswith("norm"))
    assert len(posterior.flat_std) == count  # tied weights are counted once
    std = posterior.std["recurrent.weight_hh_l0"]
    assert (std != std[0, 0]).any()  # the standard deviations are trained
    sample = posterior.sample(seed=3)
    assert sample.head.weight is sample.words.weight
    assert sample.state_dict().keys() == network.state_dict().keys()
    x = sentences[0][0]
    with torch.no_grad():
        torch.testing.assert_close(posterior.predict(x, 1, seed=3).probabilities, sample(x).softmax(-1))
    posterior.save(tmp_path / "reader.safetensors")
    loaded = fb.load_posterior(tmp_path / "reader.safetensors", Reader())
    assert torch.equal(
        loaded.predict(x, 4, seed=1).probabilities, posterior.predict(x, 4, seed=1).probabilities
    )
    assert torch.equal(loaded.log_prob(loaded.draws(2, 0)), posterior.log_prob(posterior.draws(2, 0)))


def test_normalization_layers_are_deterministic_unless_selected():
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    posterior = fb.BayesByBackprop(epochs=2).fit(network, loader(blobs()), seed=0, **QUIET)
    assert sorted(posterior.names) == ["0.bias", "0.weight", "3.bias", "3.weight"]
    assert not torch.equal(posterior.model[1].weight, network[1].weight)  # but trained
    assert posterior.model[1].num_batches_tracked == 6
    selected = fb.BayesByBackprop(epochs=1, layers="1").fit(network, loader(blobs()), seed=0, **QUIET)
    assert selected.names == ["1.weight", "1.bias"]
    linear = fb.BayesByBackprop(epochs=1, layers=nn.Linear).fit(network, loader(blobs()), seed=0, **QUIET)
    assert set(linear.names) == set(posterior.names)
    network[0].weight.requires_grad_(False)
    frozen = fb.BayesByBackprop(epochs=1).fit(network, loader(blobs()), seed=0, **QUIET)
    assert "0.weight" not in frozen.names
    assert torch.equal(frozen.model[0].weight, network[0].weight)


def test_parametrized_layers_are_supported():
    network = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)
    )
    posterior = fb.BayesByBackprop(epochs=2).fit(network, loader(blobs()), seed=0, **QUIET)
    assert any("original1" in name for name in posterior.names)
    assert posterior.predict(blobs()[:4][0], 3, seed=0).samples.std(0).min() > 0


def test_interrupted_run_resumes(tmp_path):
    def fit(epochs, **options):
        method = fb.BayesByBackprop(epochs=epochs, lr=0.01)
        return method.fit(small(), loader(blobs()), seed=3, **QUIET, **options)

    expected = fit(4)
    fit(2, checkpoint=tmp_path)
    resumed = fit(4, checkpoint=tmp_path, resume=True)
    assert torch.equal(expected.flat_mean, resumed.flat_mean)
    assert torch.equal(expected.flat_std, resumed.flat_std)


def test_validation_uses_the_current_weights():
    posterior = fb.BayesByBackprop(epochs=20, lr=0.02).fit(
        small(), loader(blobs()), validation=loader(blobs()), seed=0, **QUIET
    )
    assert posterior.history["validation_nll"][-1] < 0.5 * posterior.history["validation_nll"][0]


class Doubled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


@pytest.mark.parametrize(
    ("network", "estimator", "layer"),
    [(Reader, "local", "recurrent"), (lambda: nn.Sequential(Doubled(4, 3)), "flipout", "0")],
)
def test_unsupported_layers_of_an_estimator_are_refused(network, estimator, layer, sentences):
    data = sentences if estimator == "local" else loader(blobs())
    with pytest.raises(FlowBNNError) as error:
        fb.BayesByBackprop(estimator=estimator, epochs=1).fit(network(), data, **QUIET)
    assert (error.value.kind, error.value.argument, error.value.layer) == ("layer", "estimator", layer)


@pytest.mark.parametrize("layers", ["fc1", nn.Conv2d])
def test_layers_without_a_match_are_refused(layers):
    with pytest.raises(FlowBNNError) as error:
        fb.BayesByBackprop(layers=layers, epochs=1).fit(small(), loader(blobs()), **QUIET)
    assert (error.value.kind, error.value.argument) == ("layer", "layers")


def test_loading_into_another_network_is_refused(tmp_path):
    posterior = fb.BayesByBackprop(epochs=1).fit(small(), loader(blobs()), **QUIET)
    path = posterior.save(tmp_path / "one.safetensors")
    with pytest.raises(FlowBNNError) as error:
        fb.load_posterior(path, nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("std", "kind"),
    [
        ({}, "value"),
        ({"nothing": torch.ones(1)}, "name"),
        ({"weight": torch.ones(3)}, "shape"),
        ({"weight": -torch.ones(1, 2)}, "value"),
    ],
)
def test_invalid_standard_deviations_are_refused(std, kind):
    with pytest.raises(FlowBNNError) as error:
        GaussianWeightPosterior(nn.Linear(2, 1), fb.likelihoods.Gaussian(1.0), std)
    assert (error.value.kind, error.value.argument) == (kind, "std")


@pytest.mark.parametrize("estimator", ["local", "flipout", "reparameterization"])
def test_half_precision_is_supported(estimator):
    data = [(torch.ones(4, 3), torch.arange(4) % 2)]
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    method = fb.BayesByBackprop(epochs=1, estimator=estimator)
    posterior = method.fit(network, data, seed=0, precision="bf16-true", progress=False, accelerator="cpu")
    assert posterior.predict(data[0][0], 4, seed=0).probabilities.isfinite().all()
