"""Contract of transforms, checked for every public transform. ``case.py`` defines a case."""

import copy
import io
import itertools
import math
from dataclasses import replace

import pytest
import torch
from case import Case
from cases import CASES
from test_discrete import COVERED as DISCRETE
from test_surjective import CASES as STOCHASTIC
from torch import Tensor

import flowbnn.transforms as transforms
from flowbnn.numerics import monotone_root, tanh_root
from flowbnn.transforms.base import Transform

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
FRESH_OR_TRAINED = pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
PRECISION = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
# single precision and untrained maps have tests of their own in the default run
DOUBLE_PRECISION = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64], ids=["float32", "float64"]
)
TRAINED = pytest.mark.parametrize(
    "trained", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fresh", "trained"]
)
ROUND_TRIP = {torch.float32: 1e-5, torch.float64: 1e-10}
LOG_DET = {torch.float32: 1e-4, torch.float64: 1e-9}
# Roots with implicit derivatives, triangular systems and look-ups; other transforms consist of these and of plain arithmetic.
TRACE_GRADIENTS = ("planar", "lu-linear-permuted", "spline-coupling")
COVERED_BY_OTHERS = (  # other cases trace the same code
    "affine-coupling-custom",
    "autoregressive-spline",
    "block-triangular-none",
    "compose",
    "compose-empty",
    "inverse-planar",
    "lu-linear",
    "planar-lu-empty",
    "planar-lu-linear",
    "planar-lu-planar",
    "sylvester-reversed",
)


def build(
    case: Case,
    dtype: torch.dtype = torch.float64,
    trained: bool = True,
    dim: int | None = None,
    seed: int = 0,
) -> Transform:
    """Returns the transform of a case, with noise on every parameter to imitate training if ``trained`` is true."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transform = case.build(dim or case.dim).to(dtype)
    if trained:
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in transform.parameters():
                parameter += case.spread * torch.randn(parameter.shape, generator=generator)
    return transform.eval()


def noise(
    case: Case, transform: Transform, batch: tuple[int, ...], scale: float = 1.0, inverse: bool = False
) -> Tensor:
    """Returns scaled standard normal events of the base, or of the sample if ``inverse`` is true, in float64."""
    shape = torch.Size(batch + (case.dim,) * transform.event_dim)
    shape = transform.forward_shape(shape) if inverse else shape
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def accuracy(case: Case, dtype: torch.dtype, usual: dict[torch.dtype, float]) -> float:
    """Returns the usual accuracy, or that of the solver of the case."""
    return case.solver_error[dtype == torch.float64] or usual[dtype]


def directions(case: Case, transform: Transform, dtype: torch.dtype, scale: float = 1.0, count: int = 64):
    """Yields both directions of a transform, each with points of its domain."""
    for function, carry in ((transform.forward, case.to_domain), (transform.inverse, case.to_range)):
        start = noise(case, transform, (count,), scale, inverse=function == transform.inverse)
        yield function.__name__, function, carry(start).to(dtype, copy=True)


def test_every_public_transform_has_a_case() -> None:
    public = {getattr(transforms, name) for name in transforms.__all__}
    classes = {item for item in public if isinstance(item, type) and issubclass(item, Transform)} - {
        Transform
    }
    assert classes - {case.covers for case in (*CASES, *STOCHASTIC)} == set(DISCRETE)
    built = [build(case) for case in CASES]
    assert all(isinstance(each, case.covers) for each, case in zip(built, CASES, strict=True))
    maps = {item for item in public if isinstance(item, type) and issubclass(item, transforms.Univariate)}
    modules = [module for each in built for module in each.modules()]
    used = {type(module.univariate) for module in modules if hasattr(module, "univariate")}
    assert maps - used == {transforms.Univariate, transforms.IntegerShiftMap, transforms.ModularMap}


@EVERY_CASE
@FRESH_OR_TRAINED
@PRECISION
def test_round_trip(case: Case, trained: bool, dtype: torch.dtype) -> None:
    transform = build(case, dtype, trained)
    back = {"forward": transform.inverse, "inverse": transform.forward}
    for name, function, start in directions(case, transform, dtype):
        end, log_det = function(start)
        restored, log_det_back = back[name](end)
        close(restored, start, accuracy(case, dtype, ROUND_TRIP))
        close(log_det_back, -log_det, accuracy(case, dtype, LOG_DET))


@EVERY_CASE
@FRESH_OR_TRAINED
@DOUBLE_PRECISION
def test_log_det_equals_that_of_the_jacobian(case: Case, trained: bool, dtype: torch.dtype) -> None:
    transform = build(case, dtype, trained)
    for _, function, start in directions(case, transform, dtype, count=4):
        log_det = function(start)[1]
        rows, size = len(start), start[0].numel()
        # Jacobian of the sum over rows, which are independent (test_any_batch_shape).
        jacobian = torch.autograd.functional.jacobian(lambda points: function(points)[0].sum(0), start)  # noqa: B023
        matrices = jacobian.reshape(size, rows, size).transpose(0, 1)
        close(log_det, torch.linalg.slogdet(matrices).logabsdet, accuracy(case, dtype, LOG_DET))


def standard_normal(z: Tensor) -> Tensor:
    rows = z.reshape(len(z), -1)
    return torch.exp(-0.5 * rows.square().sum(-1)) / (2 * math.pi) ** (rows.shape[-1] / 2)


def cases_with_quadrature(dim: int) -> pytest.MarkDecorator:
    """Returns the cases with a density in this many dimensions, in two without maps of single numbers."""
    cases = [case for case in CASES if dim in case.quadrature and (dim == 1 or case.covers.event_dim != 0)]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@cases_with_quadrature(1)
@FRESH_OR_TRAINED
def test_density_integrates_to_one_in_one_dimension(case: Case, trained: bool) -> None:
    transform = build(case, trained=trained, dim=1)
    nodes = torch.linspace(-7, 7, 8001, dtype=torch.float64)
    with torch.no_grad():
        x = transform(nodes.reshape(-1, *(1,) * transform.event_dim))[0]
        z, log_det = transform.inverse(x)
    density = standard_normal(z) * log_det.exp()
    mass = (0.5 * (density[1:] + density[:-1]) * x.flatten().diff().abs()).sum().item()
    assert mass == pytest.approx(1, abs=1e-3)


@cases_with_quadrature(2)
@TRAINED
def test_density_integrates_to_one_in_two_dimensions(case: Case, trained: bool) -> None:
    transform = build(case, trained=trained, dim=2)
    side = torch.linspace(-6, 6, 61, dtype=torch.float64)
    with torch.no_grad():
        image = transform(torch.cartesian_prod(side, side))[0]
        low, high = image.amin(0), image.amax(0)
        middles = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
        x = low + (high - low) * torch.cartesian_prod(middles, middles)
        z, log_det = transform.inverse(x)
    mass = ((standard_normal(z) * log_det.exp()).mean() * (high - low).prod()).item()
    assert mass == pytest.approx(1, abs=1e-3)


def total(value: Tensor, log_det: Tensor) -> Tensor:
    """Returns a number that depends on every output, with weights that no symmetry cancels."""
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    return (value * weights).sum() + (
        log_det * torch.linspace(1, 2, log_det.numel()).reshape(log_det.shape)
    ).sum()


@EVERY_CASE
@FRESH_OR_TRAINED
def test_gradients_reach_every_parameter(case: Case, trained: bool) -> None:
    transform = build(case, trained=trained)
    without_gradient = () if trained else case.zero_gradient_at_start
    for direction, function, start in directions(case, transform, torch.float64):
        transform.zero_grad()
        start.requires_grad_()
        total(*function(start)).backward()
        assert start.grad is not None
        assert (start.grad != 0).any()
        for name, parameter in transform.named_parameters():
            assert parameter.grad is not None, f"{direction}: no gradient reaches {name}"
            if not any(fragment in name for fragment in without_gradient):
                assert (parameter.grad != 0).any(), f"{direction}: the gradient of {name} is zero"


@EVERY_CASE
@TRAINED
def test_gradients_equal_finite_differences(case: Case, trained: bool) -> None:
    transform = build(case, trained=trained)
    parameters = dict(transform.named_parameters())
    if not parameters:
        pytest.skip("no parameters")
    generator = torch.Generator().manual_seed(3)
    moves = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in parameters.items()}
    for name, function, start in directions(case, transform, torch.float64, count=8):
        slopes = torch.autograd.grad(total(*function(start)), list(parameters.values()))
        slope = sum((slope * move).sum() for slope, move in zip(slopes, moves.values(), strict=True))
        totals = []
        for step in (-1e-6, 1e-6):
            shifted = copy.deepcopy(transform)
            with torch.no_grad():
                for key, parameter in shifted.named_parameters():
                    parameter += step * moves[key]
                totals.append(total(*getattr(shifted, name)(start)))
        torch.testing.assert_close(slope, (totals[1] - totals[0]) / 2e-6, rtol=1e-4, atol=1e-4)


@EVERY_CASE
def test_second_derivatives_equal_finite_differences(case: Case) -> None:
    """Checks the density in both directions. Through a numerical inverse the Hessian is that of the implicit function."""
    transform = build(case)
    for _, function, point in directions(case, transform, torch.float64, count=2):

        def density(value: Tensor, function=function) -> Tensor:
            image, log_det = function(value)
            return log_det.sum() - 0.5 * image.square().sum()

        def gradient(value: Tensor, density=density) -> Tensor:
            value = value.detach().requires_grad_()
            return torch.autograd.grad(density(value), value)[0]

        along = torch.randn(point.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        step = 1e-5
        expected = (gradient(point + step * along) - gradient(point - step * along)) / (2 * step)
        close(torch.autograd.functional.hvp(density, point, along)[1], expected, 1e-5)


@EVERY_CASE
@TRAINED
def test_float32_stays_finite(case: Case, trained: bool) -> None:
    transform = build(case, torch.float32, trained)
    points = (directions(case, transform, torch.float32, scale) for scale in (1, 10, 100))
    for direction, function, start in itertools.chain(*points):
        transform.zero_grad()
        start.requires_grad_()
        value, log_det = function(start)
        assert value.isfinite().all(), f"{direction}: value"
        assert log_det.isfinite().all(), f"{direction}: log-det"
        total(value, log_det).backward()
        assert start.grad is not None
        assert start.grad.isfinite().all(), f"{direction}: gradient of the input"
        for name, parameter in transform.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), (
                f"{direction}: gradient of {name}"
            )


@EVERY_CASE
def test_save_and_load(case: Case) -> None:
    transform, other = build(case), build(case, trained=False, seed=7)
    file = io.BytesIO()
    torch.save(transform.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for (_, original, start), (_, copied, _) in zip(
        directions(case, transform, torch.float64), directions(case, other, torch.float64), strict=True
    ):
        for saved, loaded in zip(original(start), copied(start), strict=True):
            assert torch.equal(saved, loaded)


@EVERY_CASE
def test_copies_are_equal_and_independent(case: Case) -> None:
    transform = build(case)
    copied = copy.deepcopy(transform)
    start = case.to_domain(noise(case, transform, (5,)))
    value, log_det = transform(start)
    assert torch.equal(copied(start)[0], value)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter += 1
    assert torch.equal(transform(start)[0], value)
    assert torch.equal(transform(start)[1], log_det)


TRACED = [case for case in CASES if case.name not in (*TRACE_GRADIENTS, *COVERED_BY_OTHERS)]
# Several transforms in one graph, because a start of the compiler takes as long as a transform.
GROUPS = [[case for case in CASES if case.name in TRACE_GRADIENTS], *(TRACED[i::6] for i in range(6))]
SHORT_GROUPS = ("radial", "inverse")  # first cases of groups that are compiled quickly


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(cases, marks=() if cases[0].name in SHORT_GROUPS else pytest.mark.slow)
        for cases in GROUPS
    ],
    ids=lambda cases: f"{cases[0].name} and others",
)
def test_compiles_without_a_graph_break(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (tanh_root, monotone_root):
        monkeypatch.setattr(iteration, "__defaults__", (2,))  # all steps compile alike
    calls = []
    for case in cases:
        case = replace(case, dim=2) if 2 in case.quadrature else case  # shorter loops over the dimensions
        transform = build(case)
        calls += [
            (f"{case.name}, {name}", function, start)
            for name, function, start in directions(case, transform, torch.float64)
            if transform.solver not in (name, "both")  # solvers do not compile
        ]

    def evaluate() -> list[tuple[Tensor, Tensor]]:
        return [function(start) for _, function, start in calls]

    torch._dynamo.reset()
    # Only tracing can break the graph; generating code would take minutes.
    backend = "aot_eager" if cases[0].name in TRACE_GRADIENTS else "eager"
    compiled = torch.compile(evaluate, fullgraph=True, backend=backend)()
    for (name, _, _), actual, expected in zip(calls, compiled, evaluate(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=name)


@EVERY_CASE
@DOUBLE_PRECISION
def test_any_batch_shape(case: Case, dtype: torch.dtype) -> None:
    transform = build(case, dtype)
    state = torch.random.get_rng_state()
    for batch, (function, carry) in itertools.product(
        [(), (0,), (1,), (2, 3)],
        [(transform.forward, case.to_domain), (transform.inverse, case.to_range)],
    ):
        inverse = function == transform.inverse
        points = carry(noise(case, transform, batch, inverse=inverse)).to(dtype)
        original = points.clone()
        value, log_det = function(points, context=None)
        expected_shape = (transform.inverse_shape if inverse else transform.forward_shape)(points.shape)
        assert value.shape == expected_shape
        assert log_det.shape == batch
        assert value.dtype == log_det.dtype == dtype
        assert torch.equal(points, original)
        assert not points.requires_grad
        for index in itertools.product(*map(range, batch)):
            event, event_log_det = function(points[index])
            close(value[index], event, accuracy(case, dtype, ROUND_TRIP))
            close(log_det[index], event_log_det, accuracy(case, dtype, LOG_DET))
    assert torch.equal(torch.random.get_rng_state(), state)


@EVERY_CASE
def test_vmap(case: Case) -> None:
    transform = build(case)
    if transform.solver == "both":
        pytest.skip("the number of steps depends on the values")
    for _, function, start in directions(case, transform, torch.float64, count=6):
        for mapped, plain in zip(torch.func.vmap(function)(start), function(start), strict=True):
            close(mapped, plain, 1e-12)
