"""Planar, radial and Sylvester flows against the formulas of their papers, and in cases that break other packages."""

import pytest
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.kernels.reference import constrain
from flowbnn.numerics import monotone_root, tanh_root, tanh_slope
from flowbnn.transforms import (
    Affine,
    Compose,
    Inverse,
    Planar,
    Radial,
    Sylvester,
    Transform,
)

FLOWS = {
    "planar": lambda: Planar(3),
    "radial": lambda: Radial(3),
    "orthogonal": lambda: Sylvester(3, "orthogonal", 2),
    "householder": lambda: Sylvester(3, "householder", 2),
    "triangular": lambda: Sylvester(3, "identity"),
}
EVERY_FLOW = pytest.mark.parametrize("make", FLOWS.values(), ids=FLOWS.keys())


def set_to(parameter: Tensor, value: float | list[float]) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(value))


def planar_with(product: float, dtype: torch.dtype = torch.float32) -> Planar:
    """Returns a planar flow in three dimensions with ``w.u`` equal to ``product``."""
    planar = Planar(3).to(dtype)
    set_to(planar.w, [2.0, -1.0, 0.5])
    set_to(planar.u, [product / 2 + 0.5, 1.0, 0.0])
    set_to(planar.b, 0.0)
    return planar


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def assert_all_finite(transform: Transform, start: Tensor) -> None:
    for function in (transform.forward, transform.inverse):
        transform.zero_grad()
        point = start.clone().requires_grad_()
        value, log_det = function(point)
        (value.sum() + log_det.sum()).backward()
        results = [value, log_det, point.grad, *(parameter.grad for parameter in transform.parameters())]
        assert all(result is not None and result.isfinite().all() for result in results)


@pytest.mark.parametrize("product", [128.0, -32.0, 1e4, -1e4, 0.0])
def test_planar_is_finite_for_any_product(product: float) -> None:
    planar = planar_with(product)
    start = torch.cat([torch.zeros(1, 3), normal(32, 3), 100 * normal(32, 3), 1e6 * normal(32, 3)])
    assert_all_finite(planar, start)


@pytest.mark.parametrize("product", [128.0, -32.0, 1e4, -1e4])
def test_planar_inverts_for_any_product(product: float) -> None:
    planar = planar_with(product, torch.float64)
    z = normal(64, 3, dtype=torch.float64)
    x, log_det = planar(z)
    z_again, log_det_back = planar.inverse(x)
    # float64 rounds the longest u_hat, 5e3, by 1e-12; the strongest contraction, 1e-3, makes this 1e-9.
    torch.testing.assert_close(z_again, z, rtol=0, atol=1e-8)
    # d log_det / da is at most 1 / sqrt(1e-3) = 32, so an error of 1e-8 in three dimensions makes 6e-7 for |w| = 1.
    torch.testing.assert_close(
        log_det_back, -log_det, rtol=0, atol=6e-7 * max(1.0, float(planar.w.detach().norm()))
    )


def test_planar_contraction_is_limited_by_the_margin() -> None:
    for product in (-32.0, -1e4):
        planar = planar_with(product)
        log_det = planar(torch.zeros(3))[1]
        assert log_det.item() == pytest.approx(torch.tensor(planar.chain_shape.margin).log().item(), abs=1e-4)


@pytest.mark.parametrize("product", [-3.0, 0.0, 0.5, 7.0, 128.0])
def test_planar_constraint_equals_the_paper(product: float) -> None:
    planar = planar_with(product, torch.float64)
    w, u = planar.w.detach()[0], planar.u.detach()[0]
    m = -1 + torch.log1p(torch.exp(w @ u))
    expected = u + (m - w @ u) * w / (w @ w)
    u_hat, squeeze = constrain(w[None], u[None], planar.chain_shape.margin)
    torch.testing.assert_close(u_hat[0], expected, rtol=1e-8, atol=1e-8)
    assert squeeze.item() == pytest.approx((1 + m).item(), abs=1e-8)
    z = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64)
    a = w @ z
    x, log_det = planar(z)
    torch.testing.assert_close(x.detach(), z + expected * torch.tanh(a), rtol=1e-8, atol=1e-8)
    assert log_det.item() == pytest.approx(torch.log1p(m / torch.cosh(a) ** 2).item(), abs=1e-8)


def test_planar_equals_values_computed_by_hand() -> None:
    planar = Planar(1).double()
    set_to(planar.w, [1.0])
    set_to(planar.u, [0.0])
    set_to(planar.b, 0.0)
    x, log_det = planar(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    # u_hat = m(0) = ln 2 - 1, tanh(1) = 0.76159, tanh'(1) = 0.41997
    assert x.flatten().tolist() == pytest.approx([0.0, 1 - 0.306852819440 * 0.761594155956])
    assert log_det.tolist() == pytest.approx([-0.366512920582, -0.137964416333])


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-19, 1e-8, 1e-3, 0.03, 0.04])
def test_planar_is_finite_and_invertible_for_a_small_w(size: float) -> None:
    planar = Planar(3)
    set_to(planar.w, [size, 0.0, 0.0])
    set_to(planar.u, [0.3, -0.4, 0.5])
    set_to(planar.b, 0.7)
    start = torch.cat([torch.zeros(1, 3), normal(64, 3)])
    assert_all_finite(planar, start)
    x, _ = planar(start)
    torch.testing.assert_close(planar.inverse(x)[0], start, rtol=1e-5, atol=1e-5)
    if size == 0:
        shift = torch.tensor([0.3, -0.4, 0.5]) * torch.tanh(torch.tensor(0.7))
        torch.testing.assert_close(x.detach(), start + shift)


def test_planar_gradient_is_finite_far_out() -> None:
    for size in (30.0, 100.0, 1e4, 1e30):
        planar = planar_with(1.0)
        z = torch.full((3,), size, requires_grad=True)
        x, log_det = planar(z)
        gradient = torch.autograd.grad(x.sum() + log_det, z)[0]
        torch.testing.assert_close(gradient, torch.ones(3))


def test_radial_equals_the_paper() -> None:
    radial = Radial(3).double()
    set_to(radial.raw_alpha, 0.3)
    set_to(radial.raw_beta, -1.2)
    z = 2 * normal(16, 3, dtype=torch.float64)
    alpha = torch.log1p(torch.exp(radial.raw_alpha))
    beta = -alpha + torch.log1p(torch.exp(radial.raw_beta))
    assert -alpha < beta < 0
    r = (z - radial.center).norm(dim=-1)
    x, log_det = radial(z)
    torch.testing.assert_close(x, z + (beta / (alpha + r)).unsqueeze(-1) * (z - radial.center))
    torch.testing.assert_close(
        log_det, torch.log1p(alpha * beta / (alpha + r) ** 2) + 2 * torch.log1p(beta / (alpha + r))
    )


@pytest.mark.parametrize("raw_alpha", [-1e4, -5.0, 0.0, 50.0, 1e4])
@pytest.mark.parametrize("raw_beta", [-1e4, -5.0, 0.0, 50.0, 1e4])
def test_radial_is_finite_for_any_parameter(raw_alpha: float, raw_beta: float) -> None:
    radial = Radial(3)
    set_to(radial.raw_alpha, raw_alpha)
    set_to(radial.raw_beta, raw_beta)
    center = radial.center.detach().clone()
    start = torch.cat([center.unsqueeze(0), center + normal(32, 3), 1e4 * normal(32, 3)])
    assert_all_finite(radial, start)
    assert torch.equal(radial(center)[0], center)
    radial, start = radial.double(), start.double()
    torch.testing.assert_close(radial.inverse(radial(start)[0])[0], start, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e18, 1e20, 1e30])
def test_radial_is_finite_and_invertible_at_any_distance(size: float) -> None:
    radial = Radial(3)
    z = size * torch.tensor([[1.0, -0.3, 0.2], [0.0, 1.0, 0.0]])
    assert_all_finite(radial, z)
    torch.testing.assert_close(radial.inverse(radial(z)[0])[0], z, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda: Sylvester(6, "orthogonal", 4), lambda: Sylvester(6, "householder", 3)]
)
def test_sylvester_bases_are_orthonormal(make) -> None:
    flow = make().double()
    rotate, rotate_back = flow._rotations()
    identity = torch.eye(flow.hidden, dtype=torch.float64)
    torch.testing.assert_close(rotate(rotate_back(identity)), identity, rtol=0, atol=1e-14)


@pytest.mark.parametrize("raw", [-30.0, 30.0])
def test_sylvester_is_invertible_with_saturated_diagonals(raw: float) -> None:
    flow = Sylvester(3, "identity").double()
    set_to(flow.triangles, [[raw, 3.0, -2.0], [1.0, raw, 4.0], [-2.0, 0.5, raw]])
    set_to(flow.raw_diagonal, [30.0, 30.0, 30.0])
    start = torch.cat([torch.zeros(1, 3), normal(64, 3), 100 * normal(64, 3)]).double()
    assert_all_finite(flow, start)
    torch.testing.assert_close(flow.inverse(flow(start)[0])[0], start, rtol=0, atol=1e-8)
    assert_all_finite(flow.float(), start.float())


def test_sylvester_equals_the_paper() -> None:
    for make in (FLOWS["orthogonal"], FLOWS["householder"], FLOWS["triangular"]):
        flow = make().double()
        r, r_tilde, _ = flow._factors()
        basis = flow._rotations()[0](torch.eye(3, dtype=torch.float64))
        assert torch.equal(r, r.triu())
        assert torch.equal(r_tilde, r_tilde.triu())
        z = normal(3, dtype=torch.float64)
        expected = z + basis @ r @ torch.tanh(r_tilde @ basis.T @ z + flow.bias)
        torch.testing.assert_close(flow(z)[0], expected)


def test_householder_ignores_a_zero_vector() -> None:
    flow = Sylvester(3, "householder", 2)
    set_to(flow.reflections, [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert_all_finite(flow, normal(8, 3))
    assert torch.equal(
        flow._rotations()[0](torch.eye(3)).detach(), torch.diag(torch.tensor([-1.0, 1.0, 1.0]))
    )


@EVERY_FLOW
def test_starts_near_the_identity_and_depends_on_the_generator_only(make) -> None:
    torch.manual_seed(0)
    first = make()
    z = normal(256, 3)
    x, log_det = first(z)
    assert (x - z).abs().max() < 0.5
    assert log_det.abs().max() < 0.5
    first_copy, second_copy = (
        type(first)(*arguments, generator=torch.Generator().manual_seed(5))
        for arguments in [options(first)] * 2
    )
    assert torch.equal(first_copy(z)[0], second_copy(z)[0])


def options(transform: Transform) -> tuple:
    return (3, transform.basis, 2) if isinstance(transform, Sylvester) else (3,)


@EVERY_FLOW
def test_vectors_of_another_length_raise(make) -> None:
    transform = make()
    for function in (transform.forward, transform.inverse):
        with pytest.raises(FlowBNNError) as caught:
            function(torch.zeros(5, 4))
        assert caught.value.kind == "shape"
        assert "\n" not in str(caught.value)
    with pytest.raises(FlowBNNError) as caught:
        type(transform)(0, *options(transform)[1:])
    assert caught.value.argument == "dim"


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: Sylvester(3, "orthogonal", 4), "value", "size"),
        (lambda: Sylvester(3, size=0), "value", "size"),
        (lambda: Planar(3)(torch.zeros(3, dtype=torch.float64)), "dtype", None),
        (lambda: Sylvester(3, "identity")(torch.zeros(3, dtype=torch.float64)), "dtype", None),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


def test_tanh_root_equals_a_bracketing_search() -> None:
    slope = torch.cat([torch.logspace(-3, 0, 12), torch.logspace(0, 5, 12)]).double().unsqueeze(-1)
    target = torch.cat([torch.zeros(1), torch.logspace(-12, 5, 300), -torch.logspace(-12, 5, 300)]).double()
    target = target.expand(24, -1)
    m = slope - 1

    def residual(a: Tensor) -> tuple[Tensor, Tensor]:
        return a + m * torch.tanh(a) - target, 1 + m * tanh_slope(a)

    expected = monotone_root(residual, target - m.abs(), target + m.abs(), iterations=240)
    torch.testing.assert_close(tanh_root(target, slope), expected, rtol=1e-9, atol=1e-11)


def test_tanh_root_has_the_gradients_of_the_implicit_function() -> None:
    target = torch.tensor([-2.0, 0.1, 3.0], dtype=torch.float64, requires_grad=True)
    slope = torch.tensor([0.2, 1.5, 40.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(tanh_root, (target, slope))


def test_radial_maps_have_second_derivatives_at_their_center() -> None:
    radial = Radial(3).double()
    center = radial.center.detach().clone()
    hessian = torch.autograd.functional.hessian(lambda z: radial(z[None])[1].sum(), center)
    assert hessian.isfinite().all()


def test_compose_and_inverse_sum_log_dets() -> None:
    transforms = [Affine(3), Planar(3), Radial(3)]
    z = normal(4, 3)
    x, expected = z, torch.zeros(4)
    for transform in transforms:
        x, log_det = transform(x)
        expected = expected + log_det
    value, log_det = Compose(*transforms)(z)
    torch.testing.assert_close(value, x)
    torch.testing.assert_close(log_det, expected)
    torch.testing.assert_close(Inverse(Compose(*transforms))(x)[1], -expected, rtol=1e-4, atol=1e-5)
    assert Compose(*transforms).inverse_kind == "numerical"
    assert Compose(Affine(3), Radial(3)).inverse_kind == "exact"
