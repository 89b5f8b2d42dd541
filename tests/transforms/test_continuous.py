"""Flows in continuous time: solutions, traces and gradients against closed forms; flow matching against its known minimizer."""

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
    """Mean velocity of the straight paths from N(0, 1) to N(1.5, 0.4^2): its flow is z -> 1.5 + 0.4 z."""
    variance = (1 - time) ** 2 + (time * DEVIATION) ** 2
    return MEAN + (time * DEVIATION**2 - (1 - time)) / variance * (z - time * MEAN)


class Field(nn.Module):
    """That field, and something on top."""

    def __init__(self, extra: float = 0.0) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.tensor(extra))

    def forward(self, z: Tensor, tc: Tensor) -> Tensor:
        return gaussian_field(tc[..., :1], z) + self.extra * torch.sin(z)


class Linear(nn.Module):
    """A field whose divergence is known: the trace of a matrix."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, z: Tensor, tc: Tensor) -> Tensor:
        return z @ self.matrix.mT


def trained(dim: int, hidden: tuple[int, ...], **given) -> NeuralODE:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        flow = NeuralODE(dim, hidden, **given).double()
        with torch.no_grad():
            for parameter in flow.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return flow


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_gaussian_field_has_the_affine_flow():
    flow, z = NeuralODE(1, net=Field(), **TIGHT).double(), points(7, 1)
    x, log_det = flow(z)
    torch.testing.assert_close(x, MEAN + DEVIATION * z, rtol=0, atol=1e-8)
    torch.testing.assert_close(
        log_det, torch.full((7,), math.log(DEVIATION), dtype=torch.float64), rtol=0, atol=1e-8
    )
    torch.testing.assert_close(flow.inverse(x)[0], z, rtol=0, atol=1e-8)


def test_a_linear_field_has_the_matrix_exponential():
    matrix = 0.5 * points(3, 3)
    flow, z = NeuralODE(3, net=Linear(matrix), **TIGHT), points(2, 4, 3)
    x, log_det = flow(z)
    torch.testing.assert_close(x, z @ torch.linalg.matrix_exp(matrix).mT, rtol=0, atol=1e-8)
    torch.testing.assert_close(log_det, matrix.trace().expand(2, 4), rtol=0, atol=1e-8)


@pytest.mark.parametrize("hidden", [(6,), (6, 5), (6, 5, 4)], ids=str)
def test_the_trace_in_closed_form_is_that_of_the_jacobian(hidden: tuple[int, ...]):
    flow, z = trained(4, hidden, rtol=1e-7, atol=1e-7), points(4)
    at, tensors = flow._field(z, None)
    time = torch.tensor(0.3, dtype=torch.float64)
    truth = torch.func.jacrev(lambda place: flow.velocity(time, place))(z).trace()
    assert flow.closed_form == (len(hidden) < 3)
    if flow.closed_form:
        net = at(time, tensors)
        torch.testing.assert_close(net.trace(net.slopes(z)[1], net.trace_kernel()), truth)
    else:  # by rows of the Jacobian, along the path
        whole = torch.autograd.functional.jacobian(lambda start: flow(start)[0], z)
        torch.testing.assert_close(flow(z)[1], torch.linalg.slogdet(whole).logabsdet, rtol=0, atol=1e-5)


def test_the_density_integrates_to_one_in_the_plane():
    flow = trained(2, (6, 5), rtol=1e-6, atol=1e-6)
    side = torch.linspace(-9, 9, 121, dtype=torch.float64)
    with torch.no_grad():
        z, log_det = flow.inverse(torch.cartesian_prod(side, side))
    mass = (standard(2).log_prob(z) + log_det).exp().sum() * (side[1] - side[0]) ** 2
    assert mass == pytest.approx(1, abs=1e-3)


def test_mean_of_hutchinsons_estimate_is_the_trace():
    torch.manual_seed(0)
    matrix = 0.5 * points(3, 3)
    flow = NeuralODE(3, net=Linear(matrix), trace="hutchinson")
    assert flow.log_det_kind == "estimate"
    with torch.no_grad():
        draws = flow(points(2000, 3))[1]
    error = draws.std() / math.sqrt(2000)
    assert error < 0.05
    assert (draws.mean() - matrix.trace()).abs() < 4 * error
    # one vector for the whole solve: the estimate is e'Ae for signs e, eight values of which four differ
    symmetric = (matrix + matrix.mT) / 2
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 3)
    values = torch.einsum("ni,ij,nj->n", signs, symmetric, signs)
    assert (draws[:, None] - values).abs().amin(1).max() < 1e-4


def gradients(flow: NeuralODE, z: Tensor, context: Tensor, backwards: bool) -> list[Tensor]:
    sources = [z.clone().requires_grad_(), context.clone().requires_grad_(), *flow.parameters()]
    value, log_det = (flow.inverse if backwards else flow)(*sources[:2])
    return list(torch.autograd.grad((value * value.detach().cos()).mean() - log_det.mean(), sources))


@pytest.mark.parametrize("backwards", [False, True], ids=["forward", "inverse"])
def test_adjoint_gradients_are_those_through_the_solver(backwards: bool):
    z, context = points(5, 2), points(5, 3)
    flow = trained(2, (6, 5), context_dim=3, **TIGHT)
    adjoint = gradients(flow, z, context, backwards)
    assert flow.adjoint_evaluations > 10
    flow.adjoint = False
    for ours, direct in zip(adjoint, gradients(flow, z, context, backwards), strict=True):
        torch.testing.assert_close(ours, direct, rtol=1e-7, atol=1e-9)


def test_gradients_keep_their_accuracy_when_they_are_small():
    z, context = points(5, 2), points(5, 3)
    flow = trained(2, (6, 5), context_dim=3)

    def slopes(size: float, adjoint: bool) -> Tensor:
        flow.adjoint = adjoint
        value, log_det = flow(z, context)
        found = torch.autograd.grad(size * (value.square().sum() - log_det.sum()), list(flow.parameters()))
        return torch.cat([one.flatten() for one in found]) / size

    torch.testing.assert_close(slopes(1e-9, True), slopes(1.0, True))
    assert (slopes(1.0, True) - slopes(1.0, False)).norm() < 1e-3 * slopes(1.0, False).norm()


def test_every_row_keeps_to_the_tolerance_whatever_is_beside_it():
    flow = NeuralODE(1, net=Field(), rtol=1e-6, atol=1e-6).double()
    far = torch.tensor([[1e4]], dtype=torch.float64)
    with torch.no_grad():
        together = flow(torch.cat([far, points(1000, 1)]))[0][0]
    assert (together - (MEAN + DEVIATION * 1e4)).abs() < 1e-4 * DEVIATION * 1e4


def test_evaluations_are_counted():
    flow, z = trained(2, (6,)), points(3, 2)
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


def test_a_solver_that_does_not_converge_says_so_and_where():
    flow = Compose(Affine(1), NeuralODE(1, net=Blowup(), max_evaluations=300))
    with pytest.raises(
        FlowBNNError, match="part 1 of the flow: NeuralODE: the solver did not converge"
    ) as caught:
        flow(torch.ones(3, 1))
    assert (caught.value.kind, caught.value.fields["place"]) == ("convergence", 1)
    few = trained(2, (6,), max_evaluations=40)
    value = few(points(3, 2))[0]
    few.max_evaluations = 5
    with pytest.raises(FlowBNNError, match="in 6 evaluations"):
        value.sum().backward()


def test_bad_input_ends_in_one_line():
    with pytest.raises(FlowBNNError, match="context_dim=3, and is given"):
        NeuralODE(2, context_dim=3)(torch.ones(2))
    with pytest.raises(FlowBNNError, match="rtol"):
        NeuralODE(2, rtol=0.0)
    with pytest.raises(FlowBNNError, match="torch.func"):
        torch.func.vmap(NeuralODE(2))(torch.ones(3, 2))
    with pytest.raises(FlowBNNError, match="trains the vector field of one NeuralODE, not Affine"):
        flow_matching_loss(Affine(2), standard(2), torch.ones(3, 2))
    with pytest.raises(FlowBNNError, match="vectors of length 2"):
        flow_matching_loss(NeuralODE(2), standard(2), torch.ones(3, 4))


def standard(dim: int) -> Independent:
    return Independent(Normal(torch.zeros(dim).double(), 1.0), 1)


def test_the_known_field_minimizes_the_loss_of_flow_matching():
    """Away from a conditional mean, the loss grows by the mean square of the distance: by nothing else, if it is the minimizer."""
    rows = 100_000
    data = MEAN + DEVIATION * points(rows, 1)

    def loss(extra: float) -> Tensor:
        torch.manual_seed(3)
        return flow_matching_loss(NeuralODE(1, net=Field(extra)).double(), standard(1), data, sigma_min=0.0)

    torch.manual_seed(3)
    z = standard(1).sample((rows,))
    time = torch.rand(rows, 1, dtype=torch.float64)
    place = (1 - time) * z + time * data
    distance = 0.3 * torch.sin(place)
    cross = 2 * distance * (gaussian_field(time, place) - (data - z))  # of mean zero
    error = (cross.std() / math.sqrt(rows)).item()
    assert error < 0.005
    grown = (loss(0.3) - loss(0.0)).item()
    assert abs(grown - distance.square().mean().item()) < 4 * error


def test_flow_matching_recovers_a_conditional_gaussian():
    """A few hundred steps bring the flow of each context to its Gaussian: mean and deviation within 0.1."""
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


def test_flow_matching_fits_a_density_that_no_gaussian_has():
    """Two clusters: the best Gaussian has a mean of -log p of 1.85, the truth 0.91."""
    torch.manual_seed(0)
    sign = torch.randint(0, 2, (2000, 1)) * 2.0 - 1.0
    data = 1.5 * sign + 0.3 * torch.randn(2000, 1)
    run = {"epochs": 25, "validation": 0.0, "lr": 0.02, "seed": 0, "progress": False}
    density = fb.fit_density(fb.flows.FFJORD(1, hidden=(32,)), data, objective="flow-matching", **run)
    assert -density.log_prob(data).mean() < 1.3
