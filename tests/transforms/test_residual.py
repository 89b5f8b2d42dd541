"""Residual blocks: estimates of the log-determinant and its gradient against exact ones, and the Lipschitz bound."""

import math

import pytest
import torch
from torch import Tensor, nn

from flowbnn.distributions import Flow, NormalBase
from flowbnn.errors import FlowBNNError
from flowbnn.nets import ConditionerMLP
from flowbnn.nets.smooth import LipschitzMLP, apply_linear
from flowbnn.transforms import Inverse, Residual, residual
from flowbnn.transforms.base import Transform

POINT = torch.tensor([0.3, -0.5, 1.2], dtype=torch.float64)


def make_block(log_det: str, terms: int = 2) -> Residual:
    """Returns a block of three dimensions with a large Jacobian at POINT (spectral radius 0.6)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = Residual(3, hidden=(8,), lipschitz=0.7, log_det=log_det, terms=terms).double().eval()
    with torch.no_grad():
        for layer in block.net.layers:
            layer.weight.copy_(3 * torch.eye(*layer.weight.shape) + 0.5 * layer.weight)
            layer.bias.fill_(3.0)
        block.net.raw_rate.fill_(0.5)
    return block


def step_jacobian() -> Tensor:
    return torch.func.jacrev(make_block("exact").net)(POINT)


def draw_log_dets(block: Residual, calls: int, rows: int = 100) -> Tensor:
    """Returns one independent number for each call: the mean over rows, which share the number of terms."""
    points = POINT.expand(rows, 3)
    with torch.no_grad():
        return torch.stack([block(points)[1].mean() for _ in range(calls)])


def deviations(draws: Tensor, exact: Tensor) -> float:
    """Returns the distance of the mean of draws from a value in standard errors."""
    return ((draws.mean(0) - exact).abs() / (draws.std(0) / math.sqrt(len(draws)))).item()


def test_roulette_is_unbiased():
    torch.manual_seed(1)
    exact = make_block("exact")(POINT)[1].detach()
    assert step_jacobian().abs().max() > 0.5
    draws = draw_log_dets(make_block("roulette"), 500)
    assert deviations(draws, exact) < 4
    assert draws.std() / math.sqrt(500) < 0.03 * exact.abs()


def test_bias_of_truncation_equals_the_missing_terms():
    torch.manual_seed(1)
    step, exact = step_jacobian(), make_block("exact")(POINT)[1].detach()
    powers = [step, step @ step]
    series = powers[0].trace() - powers[1].trace() / 2
    draws = draw_log_dets(make_block("truncated"), 200)
    assert deviations(draws, series) < 4
    assert deviations(draws, exact) > 10
    bound = 3 * 0.7**3 / (3 * (1 - 0.7))
    assert 0.1 < abs(series - exact) < bound


def test_gradient_of_the_roulette_is_unbiased():
    torch.manual_seed(2)
    exact, estimate = make_block("exact"), make_block("roulette")
    points = POINT.expand(100, 3)

    def slope(block: Residual) -> Tensor:
        """Returns the slope along one direction in the space of parameters and inputs."""
        start = points.clone().requires_grad_()
        inputs = [
            start,
            *list(block.parameters())[:-1],
        ]  # the last is a shift, on which no log-determinant depends
        grads = torch.autograd.grad(block(start)[1].mean(), inputs)
        return sum((grad * torch.linspace(1, 2, grad.numel()).view(grad.shape)).sum() for grad in grads)

    draws = torch.stack([slope(estimate) for _ in range(300)])
    assert deviations(draws, slope(exact)) < 4
    assert draws.std() / math.sqrt(300) < 0.1 * slope(exact).abs()


def test_memory_does_not_grow_with_the_number_of_terms():
    def saved(terms: int) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            make_block("truncated", terms)(POINT.expand(10, 3))
        return sum(sizes)

    assert saved(2) == saved(30)


def test_lipschitz_bound_holds_in_eval_for_any_weights():
    net = LipschitzMLP(3, 3, (16, 16), lipschitz=0.8).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 2.0 * torch.randn_like(parameter)
    sizes = torch.stack([torch.linalg.matrix_norm(weight, 2) for weight in net.weights()])
    torch.testing.assert_close(sizes * torch.tensor([1, 1.1, 1.1]), torch.full((3,), 0.8 ** (1 / 3)).double())
    slopes = net.at_context().slopes(3 * torch.randn(1000, 3, dtype=torch.float64))[1]
    assert max(slope.max() for slope in slopes) <= 1.1
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net(torch.ones(3, dtype=torch.float64))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in net.named_buffers())


def test_power_iteration_converges_and_is_saved():
    net = LipschitzMLP(3, 3, (16,)).double()
    with torch.no_grad():
        for layer in net.layers:
            layer.weight += torch.randn_like(layer.weight)
    for _ in range(200):
        rough = net.weights()
    for power, exact in zip(rough, net.eval().weights(), strict=True):
        torch.testing.assert_close(power, exact, rtol=1e-6, atol=1e-9)
    assert {"left_0", "left_1"} <= set(net.state_dict())
    # One step from vectors of other weights underestimates the value, so eval() does not use it.
    (slope,) = torch.autograd.grad(net.weights()[0].sum(), net.layers[0].weight)
    (rough_slope,) = torch.autograd.grad(net.train().weights()[0].sum(), net.layers[0].weight)
    torch.testing.assert_close(slope, rough_slope, rtol=1e-5, atol=1e-8)


def test_iterative_inverse_equals_the_inverse_by_matrices(monkeypatch: pytest.MonkeyPatch):
    block = make_block("exact")
    points = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def density(x: Tensor) -> Tensor:
        z, log_det = block.inverse(x)
        return log_det.sum() - 0.5 * z.square().sum()

    def results() -> list[Tensor]:
        block.zero_grad()
        density(points).backward()
        slopes = [p.grad for p in block.parameters()]
        return [block.inverse(points)[0], torch.autograd.functional.hessian(density, points), *slopes]

    by_matrix = results()
    monkeypatch.setattr(residual, "EXACT_IN_TRAINING", 0)
    for matrix, iteration in zip(by_matrix, results(), strict=True):
        torch.testing.assert_close(iteration, matrix, rtol=1e-9, atol=1e-9)


class Convolution(nn.Module):
    """Custom contraction of images."""

    def __init__(self, size: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)
        nn.init.constant_(self.layer.weight, size)

    def forward(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        rows = z.reshape(-1, *z.shape[-3:])
        return 0.4 * torch.tanh(self.layer(rows)).view(z.shape)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_custom_net_of_images(batch: tuple[int, ...]):
    block = Residual((2, 3, 3), net=Convolution(), log_det="exact").double()
    z = torch.randn(*batch, 2, 3, 3, dtype=torch.float64)
    x, log_det = block(z)
    assert log_det.shape == batch
    first = z.reshape(-1, 2, 3, 3)[0]
    jacobian = torch.func.jacrev(lambda value: block(value)[0])(first).reshape(18, 18)
    torch.testing.assert_close(log_det.flatten()[0], torch.linalg.slogdet(jacobian).logabsdet)
    back, log_det_back = block.inverse(x)
    torch.testing.assert_close(back, z)
    torch.testing.assert_close(log_det_back, -log_det)


def test_convolutions_keep_the_bound_and_have_an_exact_log_det():
    torch.manual_seed(0)
    block = Residual((4, 3, 2), hidden=(5, 4), context_dim=3, lipschitz=0.8).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    z, context = torch.randn(2, 4, 3, 2, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    for _ in range(200):
        block.net.weights()
    block.eval()
    for index, weight in enumerate(block.net.weights()):
        start = torch.zeros(4, 3, weight.shape[1], dtype=torch.float64)
        matrix = (
            torch.func.jacrev(lambda x, weight=weight: apply_linear(x, weight))(start)
            .flatten(3)
            .flatten(0, 2)
        )
        size = torch.linalg.matrix_norm(matrix, 2).item() * (1.1 if index else 1.0)
        assert size == pytest.approx(0.8 ** (1 / 3), rel=1e-3)
    x, log_det = block(z, context)
    for row in range(2):
        jacobian = torch.func.jacrev(lambda value, row=row: block(value, context[row])[0])(z[row]).reshape(
            24, 24
        )
        torch.testing.assert_close(log_det[row], torch.linalg.slogdet(jacobian).logabsdet)
    torch.testing.assert_close(block.inverse(x, context)[0], z)


def test_conditional_density_equals_that_of_each_context():
    flow = Inverse(Residual(2, hidden=(8,), context_dim=3)).double().eval()
    context, x = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 5, 2, dtype=torch.float64)
    base = NormalBase(2, 0.0, 1.0).double().distribution()
    batch = Flow(base, flow, context)
    log_prob = batch.log_prob(x)
    assert log_prob.shape == (7, 5)
    for index in range(5):
        torch.testing.assert_close(Flow(base, flow, context[index]).log_prob(x[:, index]), log_prob[:, index])
    assert not torch.allclose(log_prob[:, 0], Flow(base, flow, context[1]).log_prob(x[:, 0]))
    draws, draws_log_prob = batch.rsample_and_log_prob((3,))
    torch.testing.assert_close(batch.log_prob(draws), draws_log_prob)


@pytest.mark.parametrize(
    ("dim", "log_det", "kind"),
    [(8, None, "exact"), (9, None, "estimate"), (2, "roulette", "estimate"), (99, "exact", "exact")],
)
def test_log_det_kind_declares_estimates(dim: int, log_det: str | None, kind: str):
    block: Transform = Residual(dim, hidden=(4,), log_det=log_det)
    assert block.log_det_kind == Inverse(block).log_det_kind == kind
    points = torch.randn(3, dim)
    assert torch.equal(block(points)[1], block(points)[1]) == (kind == "exact")
    if log_det is None:
        block.eval()
        assert torch.equal(block(points)[1], block(points)[1])


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: Residual((2, 3, 3), net=Expansion()).inverse(torch.ones(2, 3, 3)), "convergence", None),
        (lambda: Residual((2, 3, 3), net=Convolution())(torch.ones(3, 3)), "shape", None),
        (lambda: Residual((2, 3)), "value", "net"),
        (lambda: Residual(2, context_dim=3)(torch.ones(2)), "shape", "context"),
        (lambda: Residual(2, lipschitz=1.0), "value", "lipschitz"),
        (lambda: Residual(2, net=ConditionerMLP(2, 3))(torch.ones(4, 2)), "shape", "net"),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("seed", "size"), [(28, 1e8), (6, 1e10), (9, 1e18), (6, 1e20)])
def test_inverse_converges_at_distant_points(seed: int, size: float):
    torch.manual_seed(seed)
    block = Residual(2, hidden=(8,)).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    x = torch.tensor([[size, size], [size, -size], [size, 0.3], [0.0, size]])
    assert ((block(block.inverse(x)[0])[0] - x).abs().amax(-1) / size).max() < 1e-6


def test_net_with_coarse_rounding_is_inverted_to_its_precision():
    class Coarse(nn.Module):  # 11 bits, as convolutions in TF32
        def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
            rounding = 2**-11 * torch.sin(1e6 * value.detach())
            return 0.3 * torch.sin(3.0 * value.roll(1, -1)) + rounding

    torch.manual_seed(0)
    block, z = Residual((2, 3, 3), net=Coarse()), torch.randn(4, 2, 3, 3)
    assert (block.inverse(block(z)[0])[0] - z).abs().max() < 0.01


class Expansion(nn.Module):
    def forward(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return 2 * z


@pytest.mark.parametrize("dim", [256, 257])
def test_inverses_have_all_digits_in_any_dimension(dim):
    """Above 256 dimensions the matrix of the Newton step is not formed."""
    torch.manual_seed(0)
    block = Residual(dim, hidden=(16,), log_det="truncated").double().eval()
    x = torch.randn(3, dim, dtype=torch.float64)
    with torch.no_grad():
        z, _ = block.inverse(x)
        error = (z + block.net(z) - x).abs().max()
    assert error < 1e-12


def test_net_without_hidden_layers_has_the_same_log_det_everywhere():
    torch.manual_seed(0)
    block = Residual(2, hidden=()).double().eval()
    z = torch.randn(3, 2, dtype=torch.float64)
    x, log_det = block(z)
    jacobian = torch.autograd.functional.jacobian(lambda point: block(point)[0], z[0])
    torch.testing.assert_close(log_det, torch.linalg.slogdet(jacobian).logabsdet.expand(3))
    torch.testing.assert_close(block.inverse(x)[0], z)
