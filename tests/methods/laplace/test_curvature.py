"""Tests of the curvatures of Laplace against automatic differentiation."""

import math

import laplace_truth as truth
import pytest
import torch
from laplace_problems import NOISE, QUIET, SCALE, STRUCTURES, Tied, classes, small_conv
from torch import nn

import flowbnn as fb
from flowbnn.methods.laplace.accumulators import input_patches
from flowbnn.posterior import PredictOptions
from slow_cases import mark_slow


def test_curvature_of_logistic_regression_is_the_hessian():
    """For a model linear in its weights the generalized Gauss-Newton matrix is the Hessian."""
    inputs, labels = classes()
    network = nn.Linear(4, 3).double()
    posterior = fb.Laplace("full", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )

    def loss(values):
        outputs = inputs @ values[:12].view(3, 4).T + values[12:]
        return nn.functional.cross_entropy(outputs, labels, reduction="sum")

    weights = torch.cat([network.weight.detach().flatten(), network.bias.detach()])
    hessian = torch.func.jacrev(torch.func.jacrev(loss))(weights)
    covariance = (hessian + torch.eye(15, dtype=torch.float64) / SCALE**2).inverse()
    assert torch.allclose(truth.covariance(posterior), covariance, atol=1e-10)
    evidence = (
        -loss(weights)
        - weights.square().sum() / (2 * SCALE**2)
        + 0.5 * covariance.logdet()
        - 15 * math.log(SCALE)
    )
    assert posterior.log_evidence == pytest.approx(float(evidence), abs=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_output_layer_shortcut_equals_differentiation(structure, outputs):
    """Compares the shortcut for an output layer with the same layer before a multiplication, for which it does not apply."""

    class Wrapper(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network(x) * 1.0

    inputs, labels = classes(number=max(2, outputs))
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    method = fb.Laplace(structure, prior_scale=SCALE, epochs=0)
    shortcut = method.fit(network, truth.batches(inputs, labels), **QUIET)
    general = method.fit(Wrapper(network), truth.batches(inputs, labels), **QUIET)
    assert shortcut.output_layer == "2"
    assert general.output_layer is None
    assert torch.allclose(truth.covariance(shortcut), truth.covariance(general), atol=1e-10)
    assert shortcut.log_evidence == pytest.approx(general.log_evidence, abs=1e-9)
    new = torch.randn(3, 4, dtype=torch.float64)
    assert torch.allclose(shortcut.functional_variance(new), general.functional_variance(new), atol=1e-10)
    options = PredictOptions(4, seed=1)
    for predictive in ("linearized", "sampled", "probit"):
        outputs, expected = (p.use(predictive).collect(new, options)[0] for p in (shortcut, general))
        assert torch.allclose(outputs, expected, atol=1e-10)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_curvature_of_convolution_and_batch_norm(structure):
    inputs, labels = torch.randn(12, 1, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    network = small_conv()
    posterior = fb.Laplace(structure, layers="all", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    assert posterior.names == [name for name, _ in network.named_parameters()]
    precision = truth.explicit_ggn(network, posterior.names, fb.likelihoods.Categorical(), inputs, labels)
    precision += torch.eye(len(precision), dtype=torch.float64) / SCALE**2
    covariance = precision.diagonal().reciprocal().diag() if structure == "diag" else precision.inverse()
    assert torch.allclose(truth.covariance(posterior), covariance, atol=1e-9)
    new = torch.randn(4, 1, 6, 6, dtype=torch.float64)
    jacobian = truth.explicit_jacobian(network, posterior.names, new)
    variance = jacobian @ covariance @ jacobian.transpose(1, 2)
    assert torch.allclose(posterior.functional_variance(new), variance, atol=1e-9)
    assert torch.allclose(
        posterior.functional_variance(new, diagonal=True), variance.diagonal(dim1=1, dim2=2), atol=1e-9
    )


def test_kronecker_factors_of_convolution_and_linear_layers():
    """Compares with ``B (x) A`` of each layer, bias included, from explicit inputs and output gradients."""
    inputs, labels = torch.randn(12, 1, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    network = small_conv()
    posterior = fb.Laplace("kron", layers="all", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    # normalization layers are excluded
    assert posterior.names == [f"{n}.{k}" for n in (0, 4, 7) for k in ("weight", "bias")]
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
    roots = block.whiten({name: value.unsqueeze(1) for name, value in rows.items()})[:, 0]
    assert torch.allclose(roots @ roots.T, precision.inverse(), atol=1e-9)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 3, padding="same", dilation=2, padding_mode="circular"), (2, 9)),
        (nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), bias=False), (2, 6, 5)),
        (nn.Conv3d(1, 2, 2, padding_mode="replicate", padding=1), (1, 3, 3, 3)),
    ],
)
def test_convolution_is_a_product_with_input_patches(layer, shape):
    x = torch.randn(2, *shape)
    outputs = input_patches(layer, x) @ layer.weight.flatten(1).T
    if layer.bias is not None:
        outputs = outputs + layer.bias
    assert torch.allclose(outputs.transpose(1, 2).reshape(layer(x).shape), layer(x), atol=1e-5)


def test_curvature_of_grouped_convolutions():
    inputs, labels = torch.randn(6, 2, 5, dtype=torch.float64), torch.randint(3, (6,))
    network = nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    for structure in ("diag", "full"):
        posterior = fb.Laplace(structure, layers="0", prior_scale=SCALE, epochs=0).fit(
            network, truth.batches(inputs, labels), **QUIET
        )
        precision = truth.explicit_ggn(network, posterior.names, fb.likelihoods.Categorical(), inputs, labels)
        precision += torch.eye(len(precision), dtype=torch.float64) / SCALE**2
        covariance = precision.diagonal().reciprocal().diag() if structure == "diag" else precision.inverse()
        assert torch.allclose(truth.covariance(posterior), covariance, atol=1e-9)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_tied_weights_are_counted_once(structure):
    inputs, labels = classes(count=9)
    network = Tied().double()
    posterior = fb.Laplace(structure, layers="all", prior_scale=SCALE, epochs=0).fit(
        network, truth.batches(inputs, labels), **QUIET
    )
    assert "second.weight" not in posterior.names
    precision = truth.explicit_ggn(network, posterior.names, fb.likelihoods.Categorical(), inputs, labels)
    precision += torch.eye(len(precision), dtype=torch.float64) / SCALE**2
    covariance = precision.diagonal().reciprocal().diag() if structure == "diag" else precision.inverse()
    assert torch.allclose(truth.covariance(posterior), covariance, atol=1e-9)
    network = posterior.sample(seed=3)
    assert network.first.weight is network.second.weight
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace("kron", layers="all", epochs=0).fit(network, truth.batches(inputs, labels), **QUIET)
    assert (error.value.kind, error.value.layer) == ("layer", "first")


CURVATURES = [
    f"{kind} {likelihood}"
    for kind in ("ggn", "fisher", "sampled")
    for likelihood in ("categorical", "bernoulli", "gaussian")
]


@pytest.mark.parametrize("case", mark_slow(CURVATURES, [*CURVATURES[:6], "sampled categorical"]))
def test_curvature_kinds(case):
    """The empirical Fisher equals explicit gradients. The mean of the sampled curvature is the exact curvature."""
    kind, likelihood = case.split()
    count, outputs = (40, 3) if likelihood == "categorical" else (40, 1)
    inputs = torch.randn(count, 2, dtype=torch.float64)
    targets = {
        "categorical": torch.randint(3, (count,)),
        "bernoulli": torch.randint(2, (count,)),
        "gaussian": torch.randn(count, 1, dtype=torch.float64),
    }[likelihood]
    observation = {
        "categorical": fb.likelihoods.Categorical(),
        "bernoulli": fb.likelihoods.Bernoulli(),
        "gaussian": fb.likelihoods.Gaussian(NOISE),
    }[likelihood]
    network = nn.Linear(2, outputs).double()

    def matrix(kind: str, seed: int = 0, times: int = 1) -> torch.Tensor:
        data = [(inputs.repeat(times, 1), targets.repeat(times, *[1] * (targets.ndim - 1)))]
        posterior = fb.Laplace("full", curvature=kind, prior_scale=1.0, epochs=0).fit(
            network, data, likelihood=observation, progress=False, seed=seed
        )
        return truth.covariance(posterior).inverse() - torch.eye(3 * outputs, dtype=torch.float64)

    exact = truth.explicit_ggn(network, ["weight", "bias"], observation, inputs, targets)
    if kind == "ggn":
        assert torch.allclose(matrix("ggn"), exact, atol=1e-7)
    elif kind == "fisher":
        total = torch.zeros_like(exact)
        for x, y in zip(inputs, targets, strict=True):
            gradients = torch.autograd.grad(
                observation.log_prob(network(x[None]), y[None]).sum(), list(network.parameters())
            )
            gradient = torch.cat([value.flatten() for value in gradients])
            total += torch.outer(gradient, gradient)
        assert torch.allclose(matrix("fisher"), total, rtol=1e-6, atol=1e-6)
    else:
        draws = torch.stack([matrix("sampled", seed, times=4) / 4 for seed in range(25)])
        error = (draws.mean(0) - exact) / (draws.std(0) / 5.0).clamp_min(1e-9)
        assert float(error.abs().max()) < 5.0
        assert torch.equal(matrix("sampled", 1), matrix("sampled", 1))
