"""Continuous-time flows against closed forms, and flow matching against its known minimizer."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.transforms import Affine, Compose, NeuralODE, flow_matching_loss

MEAN, DEVIATION = 1.5, 0.4
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def gaussian_field(time: Tensor, z: Tensor) -> Tensor:
    """Returns the mean velocity of straight paths from N(0, 1) to N(1.5, 0.4^2), whose flow is z -> 1.5 + 0.4 z."""
    variance = (1 - time) ** 2 + (time * DEVIATION) ** 2
    return MEAN + (time * DEVIATION**2 - (1 - time)) / variance * (z - time * MEAN)


class Field(nn.Module):
    """The Gaussian field plus a multiple of the sine."""

    def __init__(self, extra: float = 0.0) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.tensor(extra))

    def forward(self, z: Tensor, tc: Tensor) -> Tensor:
        return gaussian_field(tc[..., :1], z) + self.extra * torch.sin(z)


class Linear(nn.Module):
    """Linear field, whose divergence is the trace of a matrix."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, z: Tensor, tc: Tensor) -> Tensor:
        return z @ self.matrix.mT


def perturbed(dim: int, hidden: tuple[int, ...], **options) -> NeuralODE:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        flow = NeuralODE(dim, hidden, **options).double()
        with torch.no_grad():
            for parameter in flow.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return flow


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_flow_of_a_gaussian_field_is_affine():
    flow, z = NeuralODE(1, net=Field(), **TIGHT).double(), points(7, 1)
    x, log_det = flow(z)
    torch.testing.assert_close(x, MEAN + DEVIATION * z, rtol=0, atol=1e-8)
    torch.testing.assert_close(
        log_det, torch.full((7,), math.log(DEVIATION), dtype=torch.float64), rtol=0, atol=1e-8
    )
    torch.testing.assert_close(flow.inverse(x)[0], z, rtol=0, atol=1e-8)


def test_flow_of_a_linear_field_is_the_matrix_exponential():
    matrix = 0.5 * points(3, 3)
    flow, z = NeuralODE(3, net=Linear(matrix), **TIGHT), points(2, 4, 3)
    x, log_det = flow(z)
    torch.testing.assert_close(x, z @ torch.linalg.matrix_exp(matrix).mT, rtol=0, atol=1e-8)
    torch.testing.assert_close(log_det, matrix.trace().expand(2, 4), rtol=0, atol=1e-8)


@pytest.mark.parametrize("hidden", [(6,), (6, 5), (6, 5, 4)], ids=str)
def test_closed_form_trace_equals_the_trace_of_the_jacobian(hidden: tuple[int, ...]):
    flow, z = perturbed(4, hidden, rtol=1e-7, atol=1e-7), points(4)
    net_at, tensors = flow._field(z, None)
    time = torch.tensor(0.3, dtype=torch.float64)
    expected = torch.func.jacrev(lambda point: flow.velocity(time, point))(z).trace()
    assert flow.closed_form == (len(hidden) < 3)
    if flow.closed_form:
        net = net_at(time, tensors)
        torch.testing.assert_close(net.trace(net.slopes(z)[1], net.trace_kernel()), expected)
    else:  # by the Jacobian of the whole solution
        jacobian = torch.autograd.functional.jacobian(lambda start: flow(start)[0], z)
        torch.testing.assert_close(flow(z)[1], torch.linalg.slogdet(jacobian).logabsdet, rtol=0, atol=1e-5)


def test_density_integrates_to_one_in_two_dimensions():
    flow = perturbed(2, (6, 5), rtol=1e-6, atol=1e-6)
    side = torch.linspace(-9, 9, 121, dtype=torch.float64)
    with torch.no_grad():
        z, log_det = flow.inverse(torch.cartesian_prod(side, side))
    mass = (standard(2).log_prob(z) + log_det).exp().sum() * (side[1] - side[0]) ** 2
    assert mass == pytest.approx(1, abs=1e-3)


def test_hutchinson_estimate_is_unbiased():
    torch.manual_seed(0)
    matrix = 0.5 * points(3, 3)
    flow = NeuralODE(3, net=Linear(matrix), trace="hutchinson")
    assert flow.log_det_kind == "estimate"
    with torch.no_grad():
        draws = flow(points(2000, 3))[1]
    error = draws.std() / math.sqrt(2000)
    assert error < 0.05
    assert (draws.mean() - matrix.trace()).abs() < 4 * error
    # One vector for the whole solution: the estimate is e'Ae for signs e, which has four different values.
    symmetric = (matrix + matrix.mT) / 2
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 3)
    values = torch.einsum("ni,ij,nj->n", signs, symmetric, signs)
    assert (draws[:, None] - values).abs().amin(1).max() < 1e-4


def gradients(flow: NeuralODE, z: Tensor, context: Tensor, inverse: bool) -> list[Tensor]:
    inputs = [z.clone().requires_grad_(), context.clone().requires_grad_(), *flow.parameters()]
    value, log_det = (flow.inverse if inverse else flow)(*inputs[:2])
    return list(torch.autograd.grad((value * value.detach().cos()).mean() - log_det.mean(), inputs))


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_adjoint_gradients_equal_those_through_the_solver(inverse: bool):
    z, context = points(5, 2), points(5, 3)
    flow = perturbed(2, (6, 5), context_dim=3, **TIGHT)
    adjoint = gradients(flow, z, context, inverse)
    assert flow.adjoint_evaluations > 10
    flow.adjoint = False
    for ours, direct in zip(adjoint, gradients(flow, z, context, inverse), strict=True):
        torch.testing.assert_close(ours, direct, rtol=1e-7, atol=1e-9)


def test_small_gradients_are_accurate():
    z, context = points(5, 2), points(5, 3)
    flow = perturbed(2, (6, 5), context_dim=3)

    def slopes(size: float, adjoint: bool) -> Tensor:
        flow.adjoint = adjoint
        value, log_det = flow(z, context)
        grads = torch.autograd.grad(size * (value.square().sum() - log_det.sum()), list(flow.parameters()))
        return torch.cat([grad.flatten() for grad in grads]) / size

    torch.testing.assert_close(slopes(1e-9, True), slopes(1.0, True))
    assert (slopes(1.0, True) - slopes(1.0, False)).norm() < 1e-3 * slopes(1.0, False).norm()


def test_every_row_keeps_to_the_tolerance():
    flow = NeuralODE(1, net=Field(), rtol=1e-6, atol=1e-6).double()
    distant = torch.tensor([[1e4]], dtype=torch.float64)
    with torch.no_grad():
        x = flow(torch.cat([distant, points(1000, 1)]))[0][0]
    assert (x - (MEAN + DEVIATION * 1e4)).abs() < 1e-4 * DEVIATION * 1e4


def test_evaluations_are_counted():
    flow, z = perturbed(2, (6,)), points(3, 2)
    flow(z)
    count = flow.evaluations
    assert count > 5
    flow.inverse(z)[0].sum().backward()
    assert flow.adjoint_evaluations > 5
    flow.rtol = flow.atol = 1e-10
    flow(z)
    assert flow.evaluations > 2 * count


class Blowup(nn.Module):
    def forward(self, z: Tensor, tc: Tensor) -> Tensor:
        return 10 * z**2


def test_solver_that_does_not_converge_raises():
    flow = Compose(Affine(1), NeuralODE(1, net=Blowup(), max_evaluations=300))
    with pytest.raises(FlowBNNError) as caught:
        flow(torch.ones(3, 1))
    assert (caught.value.kind, caught.value.fields["path"]) == ("convergence", (1,))
    few = perturbed(2, (6,), max_evaluations=40)
    value = few(points(3, 2))[0]
    few.max_evaluations = 5
    with pytest.raises(FlowBNNError) as caught:
        value.sum().backward()
    assert (caught.value.kind, caught.value.fields["evaluations"]) == ("convergence", 6)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: NeuralODE(2, context_dim=3)(torch.ones(2)), "shape", "context"),
        (lambda: NeuralODE(2, rtol=0.0), "value", "rtol"),
        (lambda: torch.func.vmap(NeuralODE(2))(torch.ones(3, 2)), "functorch", None),
        (lambda: flow_matching_loss(Affine(2), standard(2), torch.ones(3, 2)), "value", "transform"),
        (lambda: flow_matching_loss(NeuralODE(2), standard(2), torch.ones(3, 4)), "shape", None),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


def standard(dim: int) -> Independent:
    return Independent(Normal(torch.zeros(dim).double(), 1.0), 1)


def test_known_field_minimizes_the_flow_matching_loss():
    """The loss of another field exceeds that of the minimizer by the mean squared distance of the fields."""
    rows = 100_000
    data = MEAN + DEVIATION * points(rows, 1)

    def loss(extra: float) -> Tensor:
        torch.manual_seed(3)
        return flow_matching_loss(NeuralODE(1, net=Field(extra)).double(), standard(1), data, sigma_min=0.0)

    torch.manual_seed(3)
    z = standard(1).sample((rows,))
    time = torch.rand(rows, 1, dtype=torch.float64)
    point = (1 - time) * z + time * data
    distance = 0.3 * torch.sin(point)
    cross = 2 * distance * (gaussian_field(time, point) - (data - z))  # of mean zero
    error = (cross.std() / math.sqrt(rows)).item()
    assert error < 0.005
    increase = (loss(0.3) - loss(0.0)).item()
    assert abs(increase - distance.square().mean().item()) < 4 * error


def test_flow_matching_recovers_a_conditional_gaussian():
    """After a few hundred steps mean and standard deviation for each context are correct within 0.1."""
    torch.manual_seed(0)
    flow = NeuralODE(1, hidden=(32,), context_dim=1)
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.02)
    base = Independent(Normal(torch.zeros(1), 1.0), 1)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / 300)
        context = torch.randint(0, 2, (512, 1)).float()
        data = 2.0 * context + 0.5 * torch.randn(512, 1)
        optimizer.zero_grad()
        flow_matching_loss(flow, base, data, context).backward()
        optimizer.step()
    with torch.no_grad():
        for context in (0.0, 1.0):
            x = flow(torch.randn(2000, 1), torch.tensor([context]))[0]
            assert abs(x.mean() - 2.0 * context) < 0.1
            assert abs(x.std() - 0.5) < 0.1


def test_flow_matching_fits_two_clusters():
    """For these two clusters the best Gaussian has an NLL of 1.85, the true density 0.91."""
    torch.manual_seed(0)
    sign = torch.randint(0, 2, (2000, 1)) * 2.0 - 1.0
    data = 1.5 * sign + 0.3 * torch.randn(2000, 1)
    options = {"epochs": 25, "validation": 0.0, "lr": 0.02, "seed": 0, "progress": False}
    density = fb.fit_density(fb.flows.FFJORD(1, hidden=(32,)), data, objective="flow-matching", **options)
    assert -density.log_prob(data).mean() < 1.3


@pytest.mark.parametrize("trace", [None, "exact", "hutchinson"])
def test_fields_without_hidden_layers_are_linear(trace):
    torch.manual_seed(0)
    flow = NeuralODE(2, hidden=(), trace=trace).double()
    z = torch.randn(3, 2, dtype=torch.float64)
    x, log_det = flow(z)
    # one signed vector estimates the trace of a matrix with small entries off its diagonal
    expected = flow.net.layers[0].weight.diagonal().sum()
    torch.testing.assert_close(
        log_det, expected.expand(3), atol=0.2 if trace == "hutchinson" else 1e-6, rtol=0
    )
    torch.testing.assert_close(flow.inverse(x)[0], z, atol=1e-4, rtol=0.0)
