"""Splines: numerical stability, values computed by hand, and splines on the circle."""

import math

import pytest
import torch
from torch import Tensor

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.transforms import Autoregressive, CircularSplineMap, Coupling, SigmoidalMap, SplineMap


def usual_inverse(y: Tensor, x0: Tensor, w: Tensor, y0: Tensor, h: Tensor, d0: Tensor, d1: Tensor) -> Tensor:
    """Computes the inverse by equations 6 to 8 of Durkan et al. 2019, as most packages do."""
    s, rise = h / w, y - y0
    a = h * (s - d0) + rise * (d1 + d0 - 2 * s)
    b = h * d0 - rise * (d1 + d0 - 2 * s)
    c = -s * rise
    return x0 + w * 2 * c / (-b - torch.sqrt(b * b - 4 * a * c))


def steep(count: int = 20_000, dtype: torch.dtype = torch.float32) -> tuple[SplineMap, Tensor, Tensor]:
    """Returns a spline with extreme bins and slopes, its parameters, and points in the bins and near their upper ends."""
    spline = SplineMap(bins=4, bound=3.0)
    parameters = 12 * torch.randn(count, spline.params_per_entry, dtype=dtype)
    y0, h = spline._bin(6 * torch.rand(count, 1, dtype=dtype) - 3, parameters, 1)[2:4]
    return spline, parameters, y0 + h * (1 - torch.rand(count, 1, dtype=dtype).pow(8))


def test_inverse_is_finite_where_the_usual_discriminant_is_negative() -> None:
    spline, parameters, y = steep()
    x0, w, y0, h, d0, d1 = spline._bin(y, parameters, 1)
    assert usual_inverse(y, x0, w, y0, h, d0 * h / w, d1 * h / w).isnan().any()
    parameters.requires_grad_()
    y.requires_grad_()
    x, log_slope = spline.inverse(y, parameters)
    (x + log_slope).sum().backward()
    for value in (x, log_slope, y.grad, parameters.grad):
        assert value.isfinite().all()
    assert (x.abs() < 3.001).all()


def test_inverse_equals_the_usual_formula() -> None:
    spline, parameters, y = steep(500, torch.float64)
    parameters = parameters / 12
    x0, w, y0, h, d0, d1 = spline._bin(y, parameters, 1)
    x, log_slope = spline.inverse(y, parameters)
    torch.testing.assert_close(x, usual_inverse(y, x0, w, y0, h, d0 * h / w, d1 * h / w))
    y_again, back = spline.forward(x, parameters)
    torch.testing.assert_close(y_again, y)
    torch.testing.assert_close(back, -log_slope)


def test_gradients_outside_the_interval_are_one() -> None:
    spline = SplineMap(bins=4, bound=3.0)
    parameters = torch.randn(6, spline.params_per_entry)
    distant = torch.tensor([[-1e30], [-50.0], [-3.0], [3.0], [50.0], [1e30]])
    y = distant.clone().requires_grad_()
    x0, w, y0, h, d0, d1 = spline._bin(y, parameters, 1)
    usual = torch.where(y.abs() < 3, usual_inverse(y, x0, w, y0, h, d0 * h / w, d1 * h / w), y)
    assert torch.autograd.grad(usual.sum(), y)[0].isnan().any()
    for direction in (spline.forward, spline.inverse):
        value, log_slope = direction(y, parameters)
        torch.testing.assert_close(value, distant)
        torch.testing.assert_close(log_slope, torch.zeros_like(distant), rtol=0, atol=2e-6)
        slope = torch.autograd.grad((value + log_slope).sum(), y)[0]
        assert slope.isfinite().all()
        assert torch.equal(slope[[0, 1, 4, 5]], torch.ones(4, 1))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_empty_batches_and_batches_outside_the_interval(count: int) -> None:
    spline = SplineMap(bins=3, bound=1.0)
    value = torch.full((count, 2), 7.0)
    for direction in (spline.forward, spline.inverse):
        image, log_slope = direction(value, torch.randn(count, 2 * spline.params_per_entry))
        torch.testing.assert_close(image, value)
        assert log_slope.shape == (count, 2)


def test_spline_equals_values_computed_by_hand() -> None:
    """Two bins of width 1 with heights 1/2 and 3/2 and slope one at every knot."""
    spline = SplineMap(bins=2, bound=1.0, min_size=1e-9)
    parameters = torch.tensor([0.0, 0.0, 0.0, math.log(3.0), 0.0], dtype=torch.float64)
    x, log_slope = spline.forward(torch.tensor([-0.5], dtype=torch.float64), parameters)
    # In the first bin s = 1/2 and xi = 1/2: h (s / 4 + 1 / 4) / (s + (2 - 2 s) / 4) = 1/4, slope s^2 (1/4 + 1/4 + s/2) / (3/4)^2 = 1/3
    torch.testing.assert_close(x, torch.tensor([-0.75], dtype=torch.float64))
    torch.testing.assert_close(log_slope.exp(), torch.tensor([1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("recipe", [fb.flows.NSF, fb.flows.MAF, fb.flows.IAF])
def test_density_of_angles_is_continuous_and_integrates_to_one(recipe) -> None:
    torch.manual_seed(0)
    kind = {"bins": 4, "circular": True} if recipe is fb.flows.NSF else {"univariate": CircularSplineMap(4)}
    flow = recipe(1, length=2, hidden=(8,), **kind).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    angle = torch.linspace(-math.pi, math.pi, 20_001, dtype=torch.float64)[:, None]
    density = flow().log_prob(angle).exp()
    assert torch.trapezoid(density, angle[:, 0]).item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(density[0], density[-1])
    torch.testing.assert_close(flow().log_prob(angle + 2 * math.pi).exp(), density)
    assert density.max() > 1.2 * density.min()


def test_density_of_two_angles_is_periodic() -> None:
    torch.manual_seed(0)
    flow = fb.flows.NSF(2, length=2, hidden=(8,), bins=4, circular=True).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    angles = torch.tensor(
        [[math.pi, 1.0], [-math.pi, 1.0], [0.3, math.pi], [0.3, -math.pi]], dtype=torch.float64
    )
    log_prob = flow().log_prob(angles)
    torch.testing.assert_close(log_prob[::2], log_prob[1::2])
    assert flow().sample((50,)).abs().max() <= math.pi


def test_bad_bins_raise() -> None:
    with pytest.raises(FlowBNNError) as caught:
        SplineMap(bins=8, min_size=0.2)
    assert caught.value.argument == "min_size"
    with pytest.raises(FlowBNNError) as caught:
        CircularSplineMap(bins=1)
    assert caught.value.argument == "bins"


@pytest.mark.parametrize("kind", [Coupling, Autoregressive])
def test_sigmoidal_maps_of_distant_components_are_finite(kind):
    """Nets that read values of 1000 as they are place components far apart, and the slope between them underflows."""
    torch.manual_seed(0)
    transform = kind(4, SigmoidalMap(8), compress=False)
    with torch.no_grad():
        for parameter in transform.parameters():
            parameter.normal_(0.0, 0.5)
    z = 1e3 * torch.randn(32, 4)
    x, log_det = transform(z)
    found, inverse_log_det = transform.inverse(x)
    for tensor in (x, log_det, found, inverse_log_det):
        assert tensor.isfinite().all()
    again = transform(found)[0]
    torch.testing.assert_close(again, x, rtol=1e-4, atol=1e-2)
    gradients = torch.autograd.grad(
        inverse_log_det.sum() + found.sum(), list(transform.parameters()), allow_unused=True
    )
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)
