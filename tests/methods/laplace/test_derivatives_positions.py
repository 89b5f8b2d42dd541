"""Tests of the curvature of outputs for pixels, tokens and several labels, against automatic differentiation."""

import pytest
import torch
from laplace_truth import batches, covariance
from torch.func import functional_call, jacrev

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical
from flowbnn.methods.laplace import accumulators
from flowbnn.methods.laplace.derivatives import output_hessian
from structured_problems import make_structured

LIKELIHOODS = {
    "pixels": Categorical(class_weights=[1.0, 2.0, 0.5], label_smoothing=0.1),
    "tokens": Categorical(class_weights=[1.0, 2.0, 0.5, 1.5]),
    "mask": Bernoulli(pos_weight=3.0, label_smoothing=0.2),
    "labels": Bernoulli(pos_weight=[3.0, 1.0, 0.5]),
}


def make_problem(name):
    network, inputs, targets = make_structured(name, examples=5)
    targets = targets.clone()
    targets[0, 0] = -100
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return network.double().eval(), inputs, targets, LIKELIHOODS[name]


def explicit_curvature(network, names, likelihood, inputs, targets, kind):
    """Returns the matrix ``[P, P]`` from Jacobians and Hessians of single examples."""
    values = {name: dict(network.named_parameters())[name].detach() for name in names}
    total = 0.0
    for x, y in zip(inputs, targets, strict=True):

        def outputs(weights, x=x):
            return functional_call(network, weights, (x[None],))

        def nll(f, y=y):
            return -likelihood.log_prob(f, y[None])[0]

        f = outputs(values).detach()
        jacobian = jacrev(lambda weights: outputs(weights).flatten())(values)
        matrix = torch.cat([jacobian[name].flatten(1) for name in names], 1)
        if kind == "ggn":
            hessian = jacrev(jacrev(nll))(f).reshape(f.numel(), f.numel())
            total = total + matrix.T @ hessian @ matrix
        else:
            gradient = matrix.T @ torch.func.grad(nll)(f).flatten()
            total = total + gradient[:, None] * gradient
    return total


@pytest.mark.parametrize("kind", ["ggn", pytest.param("fisher", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("structure", "layers"), [("full", "last"), ("diag", "last"), ("diag", "all")])
@pytest.mark.parametrize("problem", LIKELIHOODS)
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_curvature_agrees_with_automatic_differentiation(problem, structure, layers, kind):
    network, inputs, targets, likelihood = make_problem(problem)
    method = fb.Laplace(structure, layers=layers, prior_scale=1.0, curvature=kind, epochs=0)
    posterior = method.fit(network, batches(inputs, targets, 3), likelihood=likelihood, progress=False)
    names = posterior.names
    curvature = explicit_curvature(network, names, posterior.likelihood, inputs, targets, kind)
    precision = curvature + torch.eye(len(curvature), dtype=torch.float64)
    expected = precision.inverse() if structure == "full" else precision.diagonal().reciprocal().diag()
    torch.testing.assert_close(covariance(posterior), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("problem", ["pixels", "tokens", "mask"])
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_functional_variance_and_samples_of_the_output_layer(problem):
    network, inputs, targets, likelihood = make_problem(problem)
    for structure in ("kron", "diag"):
        posterior = fb.Laplace(structure, prior_scale=1.0, epochs=0).fit(
            network, [(inputs, targets)], likelihood=likelihood, progress=False
        )
        assert posterior.output_layer == "last"
        names = posterior.names
        values = {name: dict(network.named_parameters())[name].detach() for name in names}
        jacobian = jacrev(lambda weights: functional_call(network, weights, (inputs,)).flatten(1))(values)
        matrix = torch.cat([jacobian[name].flatten(2) for name in names], 2)
        expected = matrix @ covariance(posterior) @ matrix.mT
        torch.testing.assert_close(posterior.functional_variance(inputs), expected)
        variance = posterior.functional_variance(inputs, diagonal=True)
        torch.testing.assert_close(variance, expected.diagonal(dim1=1, dim2=2))
        sampled = torch.stack([single(inputs) for single in posterior.networks(3, seed=0)]).detach()
        fast = posterior.predict(inputs, 3, seed=0).probabilities
        torch.testing.assert_close(fast, posterior.likelihood.predictive(sampled).probabilities)


def test_drawn_targets_estimate_the_curvature_without_bias():
    network, inputs, targets, likelihood = make_problem("pixels")
    likelihood = Categorical(1, class_weights=likelihood.class_weights)
    outputs = network(inputs).detach()
    exact = output_hessian(likelihood, outputs, targets, "ggn", torch.Generator())
    generator = torch.Generator().manual_seed(0)
    draws = [output_hessian(likelihood, outputs, targets, "sampled", generator) for _ in range(4000)]
    values = torch.stack([draw.diagonal() for draw in draws])
    error = values.std(0) / len(draws) ** 0.5
    gap = (values.mean(0) - exact.diagonal()).abs()
    assert bool((gap <= 6.0 * error + 1e-12).all())
    assert exact.diagonal()[0].unflatten(0, (3, 6, 6))[:, 0].abs().max() == 0.0  # ignored pixels


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_too_many_exact_columns_are_refused(monkeypatch):
    monkeypatch.setattr(accumulators.CurvatureAccumulator, "max_columns", 50)
    network, inputs, targets, likelihood = make_problem("pixels")
    options = {"likelihood": likelihood, "progress": False}
    with pytest.raises(FlowBNNError) as caught:
        fb.Laplace("diag", layers="all", epochs=0).fit(network, [(inputs, targets)], **options)
    assert (caught.value.kind, caught.value.argument) == ("outputs", "curvature")
    fb.Laplace("diag", layers="all", curvature="sampled", epochs=0).fit(
        network, [(inputs, targets)], **options
    )
