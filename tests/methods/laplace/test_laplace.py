"""Tests of Laplace against conjugate models and reference curvatures."""

import math
import warnings

import laplace_truth as truth
import pytest
import torch
from laplace_problems import (
    NOISE,
    QUIET,
    SCALE,
    STRUCTURES,
    classes,
    conjugate,
    regression,
    small_conv,
)
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNWarning
from flowbnn.methods.laplace.prior import QuadraticModel
from flowbnn.posterior import PredictOptions


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_linear_regression_is_exact(structure):
    """Kronecker factors are exact for one linear layer, because all examples have the same curvature in the outputs."""
    inputs, targets = regression()
    network = nn.Linear(3, 1).double()
    before = network.weight.clone()
    posterior = fb.Laplace(structure, prior_scale=SCALE, epochs=0, newton_steps=1).fit(
        network, truth.batches(inputs, targets), likelihood=fb.likelihoods.Gaussian(noise=NOISE), **QUIET
    )
    mean, covariance, evidence = conjugate(inputs, targets)
    weights = torch.cat([posterior.model.weight.flatten(), posterior.model.bias])
    assert torch.allclose(weights, mean, atol=1e-9)
    assert torch.allclose(truth.covariance(posterior), covariance, atol=1e-9)
    assert posterior.log_evidence == pytest.approx(evidence, abs=1e-8)
    assert torch.equal(network.weight, before)
    new = torch.randn(5, 3, dtype=torch.float64)
    features = torch.cat([new, torch.ones(5, 1, dtype=torch.float64)], 1)
    variance = torch.einsum("nd,de,ne->n", features, covariance, features)
    assert torch.allclose(posterior.functional_variance(new)[:, 0, 0], variance, atol=1e-9)


def test_kron_is_exact_for_outputs_with_different_noise():
    inputs, targets = regression(outputs=2)
    likelihood = fb.likelihoods.Gaussian("learned", dim=2).requires_grad_(False)
    likelihood.log_scale.copy_(torch.tensor([-1.0, 0.5]))
    network = nn.Linear(3, 2).double()
    posterior = fb.Laplace("kron", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, targets), likelihood=likelihood, **QUIET
    )
    curvature = truth.explicit_ggn(network, posterior.names, likelihood, inputs, targets)
    covariance = (curvature + torch.eye(8, dtype=torch.float64) / SCALE**2).inverse()
    assert torch.allclose(truth.covariance(posterior), covariance, rtol=1e-5, atol=1e-9)


def test_diag_is_the_inverse_of_the_diagonal_precision():
    inputs, targets = regression()
    posterior = fb.Laplace("diag", prior_scale=SCALE, epochs=0).fit(
        nn.Linear(3, 1).double(),
        truth.batches(inputs, targets),
        likelihood=fb.likelihoods.Gaussian(noise=NOISE),
        **QUIET,
    )
    _, covariance, _ = conjugate(inputs, targets)
    assert torch.allclose(
        truth.covariance(posterior), covariance.inverse().diagonal().reciprocal().diag(), atol=1e-9
    )


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_one_newton_step_with_a_fitted_prior_is_exact(structure):
    """The mode is that of the prior with the highest exact evidence, for any initial weights."""
    inputs, targets = regression(count=12)
    posterior = fb.Laplace(structure, epochs=0, newton_steps=1).fit(
        nn.Linear(3, 1).double(),
        truth.batches(inputs, targets),
        likelihood=fb.likelihoods.Gaussian(noise=NOISE),
        **QUIET,
    )
    scale = posterior.prior_scale
    mean, covariance, best = conjugate(inputs, targets, scale)
    assert torch.allclose(
        torch.cat([posterior.model.weight.flatten(), posterior.model.bias]), mean, atol=1e-9
    )
    assert torch.allclose(truth.covariance(posterior), covariance, atol=1e-9)
    assert posterior.log_evidence == pytest.approx(best, abs=1e-8)
    assert (
        max(conjugate(inputs, targets, scale * factor)[2] for factor in (0.3, 0.8, 0.999, 1.001, 1.2, 3.0))
        < best
    )


class TwoLayerLinear(nn.Module):
    """Linear function computed by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(1, 1, bias=False), nn.Linear(2, 1)

    def forward(self, x):
        return self.left(x[:, :1]) + self.right(x[:, 1:])


def test_a_fitted_prior_per_layer_is_exact():
    inputs, targets = regression()
    inputs = inputs * torch.tensor([0.02, 1.0, 1.0])  # the weights of the two layers differ in size
    posterior = fb.Laplace("full", layers="all", per_layer=True, epochs=0, newton_steps=1).fit(
        TwoLayerLinear().double(),
        truth.batches(inputs, targets),
        likelihood=fb.likelihoods.Gaussian(NOISE),
        **QUIET,
    )
    scales = posterior.prior_scale

    def exact(left: float = 1.0, right: float = 1.0):
        scale = torch.tensor([scales["left"] * left, *[scales["right"] * right] * 3], dtype=torch.float64)
        return conjugate(inputs, targets, scale)

    mean, covariance, best = exact()
    weights = torch.cat([value.flatten() for value in posterior.model.parameters()])
    assert torch.allclose(weights, mean, atol=1e-8)
    assert torch.allclose(truth.covariance(posterior), covariance, atol=1e-8)
    assert posterior.log_evidence == pytest.approx(best, abs=1e-7)
    assert scales["left"] > 3 * scales["right"]
    assert max(exact(*factors)[2] for factors in ((0.99, 1), (1.01, 1), (1, 0.99), (1, 1.01))) < best


@pytest.mark.parametrize("prior_scale", ["marginal likelihood", SCALE])
def test_learned_noise_maximizes_the_evidence(prior_scale):
    """The size of the residuals would be too small by the degrees of freedom of the weights."""
    inputs, targets = regression(count=12)
    posterior = fb.Laplace("full", epochs=0, newton_steps=1, prior_scale=prior_scale).fit(
        nn.Linear(3, 1).double(), truth.batches(inputs, targets), **QUIET
    )
    scale, noise = posterior.prior_scale, posterior.likelihood.log_scale.detach().exp().item()
    mean, covariance, best = conjugate(inputs, targets, scale, noise)
    weights = torch.cat([posterior.model.weight.flatten(), posterior.model.bias])
    assert torch.allclose(weights, mean, atol=1e-6)
    assert torch.allclose(truth.covariance(posterior), covariance, rtol=1e-6)
    assert posterior.log_evidence == pytest.approx(best, abs=1e-5)
    others = [conjugate(inputs, targets, scale, noise * factor)[2] for factor in (0.5, 0.95, 1.05, 2.0)]
    assert max(others) < best
    if prior_scale != SCALE:
        assert max(conjugate(inputs, targets, scale * factor, noise)[2] for factor in (0.9, 1.1)) < best


# an untrained network is far from the mode, and its factors are a poor approximation
@pytest.mark.filterwarnings("ignore:the weights are not at the mode")
@pytest.mark.filterwarnings("ignore:the NLL on")
@pytest.mark.parametrize(
    ("structure", "per_layer"),
    [
        ("full", False),
        ("kron", True),
        pytest.param("full", True, marks=pytest.mark.slow),
        pytest.param("kron", False, marks=pytest.mark.slow),
    ],
)
def test_noise_is_finite_with_directions_of_zero_curvature(structure, per_layer):
    """Inactive units leave gradients of rounding error, which must not be explained by an infinite prior and zero noise."""
    torch.manual_seed(0)
    inputs = 4.0 * torch.rand(400, 1) - 2.0
    targets = (2.0 * inputs).sin() + 0.05 * torch.randn(400, 1)
    network = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
    method = fb.Laplace(structure, epochs=0, newton_steps=4, layers="all", per_layer=per_layer)
    posterior = method.fit(network, [(inputs, targets)], **QUIET)
    residuals = (posterior.model(inputs) - targets).square().mean().sqrt().item()
    assert posterior.likelihood.log_scale.exp().item() == pytest.approx(residuals, rel=0.1)


@pytest.mark.filterwarnings(
    "ignore:the NLL on training data"
)  # of the wide prior that maximizes the evidence
def test_newton_steps_converge_to_the_mode():
    """For a nonlinear network, the gradient of the log posterior is zero and the prior maximizes the evidence."""
    inputs, _ = classes(80)
    # labels that depend on the inputs: for random ones the zero network has the largest evidence
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = truth.batches(inputs, labels, 40)
    posterior = fb.Laplace("full", layers="all", epochs=50, lr=0.02, newton_steps=100).fit(
        network, data, **QUIET
    )
    model = posterior.model.requires_grad_()
    assert (model(inputs).argmax(1) == labels).double().mean() > 0.8
    loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
    loss = loss + sum(p.square().sum() for p in model.parameters()) / (2 * posterior.prior_scale**2)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert float(gradient @ truth.covariance(posterior) @ gradient) < 1e-6  # in standard deviations, squared
    refit = fb.Laplace("full", layers="all", epochs=0).fit(model, data, **QUIET)
    assert refit.prior_scale == pytest.approx(posterior.prior_scale, rel=1e-3)


def test_missing_the_mode_raises_a_warning():
    """A diagonal does not represent the curvature of correlated inputs. The warning reports the log-density left to gain."""
    inputs, targets = regression()
    inputs[:, 1] = inputs[:, 0] + 0.1 * inputs[:, 1]
    options = {"likelihood": fb.likelihoods.Gaussian(noise=NOISE), **QUIET}
    method = fb.Laplace("diag", prior_scale=SCALE, epochs=0, newton_steps=1)
    with pytest.warns(FlowBNNWarning) as caught:
        model = method.fit(nn.Linear(3, 1).double(), truth.batches(inputs, targets), **options).model
    design = torch.cat([inputs, torch.ones(len(inputs), 1).double()], 1)
    weights = torch.cat([model.weight[0], model.bias]).detach()
    gradient = design.T @ (targets.flatten() - design @ weights) / NOISE**2 - weights / SCALE**2
    gain = 0.5 * (gradient.square() / (design.square().sum(0) / NOISE**2 + SCALE**-2)).sum()
    fields = caught[0].message.fields
    assert fields["kind"] == "mode"
    assert fields["gain"] == pytest.approx(float(gain))


def test_best_precisions_maximize_the_evidence():
    """Compares with a grid over the exact evidence, for one precision and for one per group of a full curvature."""
    root = torch.randn(6, 4, dtype=torch.float64)
    curvature = root @ root.T
    weights = torch.randn(6, dtype=torch.float64)

    def evidence(*deltas: float) -> float:
        prior = torch.tensor(deltas, dtype=torch.float64).repeat_interleave(6 // len(deltas))
        return float(
            0.5 * (prior.log().sum() - (prior * weights.square()).sum() - (curvature + prior.diag()).logdet())
        )

    values = torch.linalg.eigvalsh(curvature).clamp_min(0.0)
    (best,) = QuadraticModel(values, weights, None, [6]).best_precisions()
    grid = [evidence(best * math.exp(step / 10)) for step in range(-50, 51) if step]
    assert evidence(best) > max(grid)
    two = QuadraticModel(curvature, weights, None, [3, 3]).best_precisions(start=[best, best])
    neighbors = [
        evidence(two[0] * a, two[1] * b) for a in (0.9, 1.0, 1.1) for b in (0.9, 1.0, 1.1) if (a, b) != (1, 1)
    ]
    assert evidence(*two) > max(neighbors)
    assert evidence(*two) > evidence(best)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_prior_per_layer_has_higher_evidence(structure):
    inputs, labels = classes()
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        network[0].weight.mul_(10.0)
    shared = fb.Laplace(structure, layers="all", epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    separate = fb.Laplace(structure, layers="all", per_layer=True, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    assert isinstance(shared.prior_scale, float)
    assert set(separate.prior_scale) == {"0", "2"}
    assert separate.prior_scale["0"] > separate.prior_scale["2"]
    assert separate.log_evidence > shared.log_evidence
    method = fb.Laplace(structure, layers="all", prior_scale=shared.prior_scale * 1.1, epochs=0)
    assert method.fit(network, truth.batches(inputs, labels), **QUIET).log_evidence < shared.log_evidence


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_covariance_and_the_density(structure):
    inputs, labels = classes()
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    posterior = fb.Laplace(structure, layers="all", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    draws, count = posterior.draws(2000, seed=0), 2000
    flat, covariance = truth.flat(draws, posterior.names), truth.covariance(posterior)
    mode = truth.flat({name: value[None] for name, value in posterior.mode.items()}, posterior.names)[0]
    sample_covariance = (flat - mode).T @ (flat - mode) / count
    deviation = ((covariance.diagonal().outer(covariance.diagonal()) + covariance.square()) / count).sqrt()
    assert float(((sample_covariance - covariance) / deviation).abs().max()) < 5.0
    first = {name: value[:3] for name, value in draws.items()}
    exact = torch.distributions.MultivariateNormal(mode, covariance).log_prob(flat[:3])
    assert torch.allclose(posterior.log_prob(first), exact, atol=1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_linearized_outputs_are_outputs_plus_jacobian_times_draw(structure):
    inputs, labels = torch.randn(12, 1, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    network = small_conv()
    posterior = fb.Laplace(structure, layers="all", epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    new = torch.randn(5, 1, 6, 6, dtype=torch.float64)
    outputs = posterior.collect(new, PredictOptions(4, seed=2, max_batch=2))[0]
    draws = truth.flat(posterior.draws(4, seed=2), posterior.names)
    mode = truth.flat({name: value[None] for name, value in posterior.mode.items()}, posterior.names)
    jacobian = truth.explicit_jacobian(network, posterior.names, new)
    expected = network(new) + torch.einsum("bcp,sp->sbc", jacobian, draws - mode)
    assert torch.allclose(outputs, expected, atol=1e-9)
    sampled = posterior.use("sampled").collect(new, PredictOptions(2, seed=2))[0]
    network = posterior.sample(seed=2)
    assert torch.allclose(sampled[0], network(new), atol=1e-12)
    assert not torch.allclose(sampled[0], outputs[0], atol=1e-3)


def test_probit_scales_logits_without_sampling():
    inputs, labels = classes()
    posterior = fb.Laplace("kron", predictive="probit", epochs=0).fit(
        nn.Linear(4, 3).double(), truth.batches(inputs, labels), **QUIET
    )
    variance = posterior.functional_variance(inputs, diagonal=True)
    expected = (posterior.model(inputs) / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    prediction = posterior.predict(inputs)
    assert prediction.num_samples == 1
    assert torch.allclose(prediction.probabilities, expected, atol=1e-10)


def trained_classifier():
    """Returns a classifier that separates two classes, its training data and validation data."""
    torch.manual_seed(0)
    inputs = torch.randn(60, 2)
    targets = (inputs.sum(1) > 0).long()
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs[:40]), targets[:40]).backward()
        optimizer.step()
    return network, [(inputs[:40], targets[:40])], [(inputs[40:], targets[40:])]


def test_priors_at_their_bound_keep_the_network(monkeypatch):
    network, loader, _ = trained_classifier()
    monkeypatch.setattr(
        QuadraticModel, "best_precisions", lambda self, *_: [1e10] if self.gradient is not None else [1.0]
    )
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.Laplace("diag", layers="all", epochs=0, newton_steps=2).fit(network, loader, **QUIET)
    assert "prior" in [warning.message.kind for warning in caught]
    for before, after in zip(network.parameters(), posterior.model.parameters(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("layers", ["last", "all"])
def test_priors_are_chosen_on_validation_data(layers):
    network, loader, validation = trained_classifier()
    posterior = fb.Laplace(layers=layers, epochs=0).fit(network, loader, validation=validation, **QUIET)
    nlls = posterior.validation_nll
    assert len(nlls) == 5
    found = posterior.predict_with_targets(validation, 32, seed=0, progress=False)
    assert found[0].nll(found[1]).mean().item() == pytest.approx(min(nlls.values()), rel=1e-5)


def test_predictions_worse_than_the_network_are_warned_about():
    network, loader, _ = trained_classifier()
    with pytest.warns(FlowBNNWarning) as caught:
        fb.Laplace("full", layers="all", predictive="sampled", prior_scale=100.0, epochs=0).fit(
            network, loader, **QUIET
        )
    warning = next(warning.message for warning in caught if warning.message.kind == "worse")
    assert warning.fields["nll"] > warning.fields["network_nll"] + 0.3


@pytest.mark.parametrize(("structure", "prior_scale"), [("diag", 3.0), ("full", 1.0)])
def test_comparison_on_training_data_has_the_tolerance_of_validation_data(structure, prior_scale):
    """The network is right and sure here. The diagonal loses a tenth of a nat, the full covariance does not."""
    network, data, _ = trained_classifier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method = fb.Laplace(structure, layers="all", prior_scale=prior_scale, epochs=0)
        posterior = method.fit(network, data, **QUIET)
    inputs, targets = data[0]
    nll = posterior.predict(inputs, 32, seed=0).nll(targets).mean()
    loss = (nll - nn.functional.cross_entropy(network(inputs), targets)).item()
    assert (0.1 < loss < 0.3) if structure == "diag" else loss < 0.1
    assert [warning.message.kind for warning in caught] == (["worse"] if structure == "diag" else [])


def test_comparison_with_the_network_uses_more_than_one_batch():
    """The first batch alone would not show that the network has memorized it and not the others."""
    network, loader, _ = trained_classifier()
    batches = [(x, y) for x, y in zip(loader[0][0].split(4), loader[0][1].split(4), strict=True)]
    with pytest.warns(FlowBNNWarning) as caught:
        fb.Laplace("full", layers="all", predictive="sampled", prior_scale=100.0, epochs=0).fit(
            network, batches, **QUIET
        )
    warning = next(warning.message for warning in caught if warning.message.kind == "worse")
    with torch.no_grad():
        expected = nn.functional.cross_entropy(network(loader[0][0]), loader[0][1])
    assert warning.fields["network_nll"] == pytest.approx(expected.item(), rel=1e-5)


def test_prior_on_validation_data_is_not_worse_than_the_network():
    network, loader, validation = trained_classifier()
    repeated = [(x, y) for x, y in loader * 2]
    posterior = fb.Laplace("full", layers="all", predictive="sampled", epochs=0).fit(
        network, repeated, validation=validation, **QUIET
    )
    with torch.no_grad():
        plain = nn.functional.cross_entropy(network(validation[0][0]), validation[0][1]).item()
    assert min(posterior.validation_nll.values()) <= plain + 2e-3


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_networks_in_half_precision_have_counts_as_targets(structure, layers):
    torch.manual_seed(0)
    network, inputs = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(40, 3)
    data, options = (
        [(inputs, torch.poisson(torch.ones(40, 1)))],
        {"precision": "bf16-true", "progress": False},
    )
    method = fb.Laplace(structure, layers=layers, epochs=1)
    posterior = method.fit(network, data, likelihood="negative_binomial", **options)
    assert posterior.predict(inputs, progress=False).mean.isfinite().all()
