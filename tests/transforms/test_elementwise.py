"""Monotone maps against the plain formulas in decimal arithmetic with six hundred digits."""

from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
import torch
from torch.distributions import Independent, Normal

from flowbnn.distributions import Flow
from flowbnn.errors import FlowBNNError
from flowbnn.transforms import Affine, Compose, Inverse
from flowbnn.transforms.base import Transform
from flowbnn.transforms.elementwise import Exp, Logit, Sigmoid, Softplus, Tanh

POINTS = [-300.0, -100.0, -40.0, -20.5, -9.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 9.0, 20.5, 40.0, 100.0, 300.0]
ONE = Decimal(1)


def tanh(z: Decimal) -> tuple[Decimal, Decimal]:
    value = ((2 * z).exp() - 1) / ((2 * z).exp() + 1)
    return value, (ONE - value * value).ln()


def sigmoid(z: Decimal) -> tuple[Decimal, Decimal]:
    value = ONE / (ONE + (-z).exp())
    return value, (value * (ONE - value)).ln()


def softplus(z: Decimal) -> tuple[Decimal, Decimal]:
    return (ONE + z.exp()).ln(), sigmoid(z)[0].ln()


def exponential(z: Decimal) -> tuple[Decimal, Decimal]:
    return z.exp(), z


FORMULAS: list[tuple[Transform, Callable[[Decimal], tuple[Decimal, Decimal]]]] = [
    (Tanh(), tanh),
    (Sigmoid(), sigmoid),
    (Softplus(), softplus),
    (Exp(), exponential),
]
EVERY_MAP = pytest.mark.parametrize(
    ("transform", "formula"), FORMULAS, ids=[type(t).__name__ for t, _ in FORMULAS]
)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@EVERY_DTYPE
def test_sigmoid_with_a_margin_reaches_zero_and_one(dtype: torch.dtype) -> None:
    transform = Sigmoid(margin=0.05).to(dtype)
    ends, middle = torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([0.5], dtype=dtype)
    z, log_det = transform.inverse(ends)  # logit(0.05) and logit(0.95), with a slope of 0.9 / (0.05 * 0.95)
    torch.testing.assert_close(z, torch.tensor([-2.94443897917, 2.94443897917], dtype=dtype))
    torch.testing.assert_close(log_det, torch.full_like(ends, 2.94166505228))
    torch.testing.assert_close(transform(z), (ends, -log_det), atol=1e-6, rtol=1e-6)
    # log 3.6
    torch.testing.assert_close(transform.inverse(middle)[1], torch.full_like(middle, 1.28093384546))


@EVERY_MAP
@EVERY_DTYPE
def test_values_and_log_dets_are_exact_up_to_rounding(
    transform: Transform, formula, dtype: torch.dtype
) -> None:
    limits = torch.finfo(dtype)
    z = torch.tensor(POINTS, dtype=dtype)
    values, log_dets = transform(z)
    with localcontext() as context:
        context.prec = 600
        expected = [formula(Decimal(point)) for point in z.tolist()]
    for point, value, log_det, (expected_value, expected_log_det) in zip(
        POINTS, values.tolist(), log_dets.tolist(), expected, strict=True
    ):
        if limits.tiny < abs(expected_value) < limits.max:
            assert value == pytest.approx(float(expected_value), rel=8 * limits.eps), point
            assert log_det == pytest.approx(
                float(expected_log_det), rel=8 * limits.eps, abs=8 * limits.eps
            ), point


@pytest.mark.parametrize("transform", [Tanh(), Sigmoid(), Softplus(), Exp()], ids=lambda t: type(t).__name__)
@EVERY_DTYPE
def test_results_on_the_border_are_finite(transform: Transform, dtype: torch.dtype) -> None:
    distant = torch.tensor([-1e30, -1000.0, 1000.0, 1e30], dtype=dtype, requires_grad=True)
    value, log_det = transform(distant)
    border = torch.tensor([0.0, 1.0], dtype=dtype)
    x = torch.cat([border, value.detach()]).requires_grad_()
    z, log_det_back = transform.inverse(x)
    for result in (value, log_det, z, log_det_back):
        assert result.isfinite().all()
    (value.sum() + log_det.sum()).backward()
    (z.sum() + log_det_back.sum()).backward()
    assert distant.grad is not None
    assert distant.grad.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@EVERY_DTYPE
def test_logit_is_finite_on_its_border_and_inverts_sigmoid(dtype: torch.dtype) -> None:
    value, log_det = Logit()(torch.tensor([0.0, 1.0], dtype=dtype))
    assert value.isfinite().all()
    assert log_det.isfinite().all()
    z = torch.tensor([1e-30, 0.25, 0.75], dtype=dtype)
    x, log_det = Logit()(z)
    z_again, log_det_back = Sigmoid()(x)
    torch.testing.assert_close(z_again, z)
    torch.testing.assert_close(log_det_back, -log_det)


@pytest.mark.parametrize(
    ("call", "number", "path"),
    [
        (lambda: Logit()(torch.tensor([0.5, 1.5])), 1.5, None),
        (lambda: Sigmoid().inverse(torch.tensor([-0.25])), -0.25, None),
        (lambda: Exp().inverse(torch.tensor([-2.0])), -2.0, None),
        (lambda: Tanh().inverse(torch.tensor([[1.0, -1.01]])), -1.01, None),
        (lambda: Compose(Affine(1), Softplus()).inverse(torch.tensor([-1.0])), -1.0, (1,)),
        (
            lambda: Compose(Affine(1), Inverse(Compose(Affine(1), Sigmoid())))(torch.tensor([3.0])),
            3.0,
            (1, 1),
        ),
    ],
)
def test_numbers_outside_the_codomain_raise_with_their_position_in_the_chain(
    call, number: float, path: tuple[int, ...] | None
) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert caught.value.kind == "range"
    assert caught.value.fields["value"] == pytest.approx(number)
    assert caught.value.fields.get("path") == path


def test_density_is_zero_outside_the_codomain_and_check_raises() -> None:
    flow = Flow(Independent(Normal(torch.zeros(2), 1.0), 1), Compose(Affine(2), Sigmoid()))
    x = torch.tensor([[0.5, 0.5], [0.5, 1.5], [-0.1, 0.5]])
    log_prob = flow.log_prob(x)
    assert log_prob.isinf().tolist() == [False, True, True]
    log_prob[0].backward()
    assert all(parameter.grad.isfinite().all() for parameter in flow.transform.parameters())
    flow.check(x[:1])
    with pytest.raises(FlowBNNError) as caught:
        flow.check(x)
    assert (caught.value.kind, caught.value.fields["path"], caught.value.fields["value"]) == (
        "range",
        (1,),
        1.5,
    )


def test_density_of_the_logit_of_a_uniform_base_integrates_to_one() -> None:
    x = torch.linspace(-30, 30, 20001, dtype=torch.float64)
    density = Logit().inverse(x)[1].exp()
    assert torch.trapezoid(density, x).item() == pytest.approx(1, abs=1e-10)


def test_round_trips_in_the_range_of_float32() -> None:
    limits = {Tanh(): 3.0, Sigmoid(): 5.0, Softplus(): 80.0, Exp(): 80.0}
    for transform, limit in limits.items():
        z = torch.linspace(-limit, limit, 401)
        torch.testing.assert_close(transform.inverse(transform(z)[0])[0], z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logit_of_a_uniform_number_has_both_tails_of_a_logistic(dtype: torch.dtype) -> None:
    """A sigmoid that rounds to one still lies in the support of the uniform base."""
    base = torch.distributions.Uniform(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    x = torch.tensor([-80.0, -20.0, 0.0, 20.0, 80.0], dtype=dtype)
    exact = -x.abs() - 2 * torch.log1p((-x.abs()).exp())
    torch.testing.assert_close(Flow(base, Logit()).log_prob(x), exact)
