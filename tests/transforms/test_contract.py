"""The contract of a transform, over every public transform. ``case.py`` says what a case is."""

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
from test_stochastic import CASES as STOCHASTIC
from torch import Tensor

import flowbnn.transforms as transforms
from flowbnn.numerics import monotone_root, tanh_root
from flowbnn.transforms.base import Transform

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
FRESH_OR_TRAINED = pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
PRECISION = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
ROUND_TRIP = {torch.float32: 1e-5, torch.float64: 1e-10}
LOG_DET = {torch.float32: 1e-4, torch.float64: 1e-9}
# through roots with derivatives of their own, triangular systems and look-ups; the others are made of these and of plain arithmetic
GRADIENTS_TRACED = ("planar", "lu-linear-permuted", "spline-coupling")
MADE_OF_OTHERS = (  # what is traced of them is traced in other cases too
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
    """The case's transform, fresh or with noise on every parameter to stand for training."""
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
    case: Case, transform: Transform, batch: tuple[int, ...], scale: float = 1.0, backwards: bool = False
) -> Tensor:
    """Scaled standard normal events of the base, or of the sample, in float64."""
    shape = torch.Size(batch + (case.dim,) * transform.event_dim)
    shape = transform.forward_shape(shape) if backwards else shape
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def accuracy(case: Case, dtype: torch.dtype, usual: dict[torch.dtype, float]) -> float:
    """The usual one, or that of the case's solver."""
    return case.solver_error[dtype == torch.float64] or usual[dtype]


def directions(case: Case, transform: Transform, dtype: torch.dtype, scale: float = 1.0, count: int = 64):
    """Both maps of a transform, each with points of its own domain."""
    for function, carry in ((transform.forward, case.to_domain), (transform.inverse, case.to_range)):
        start = noise(case, transform, (count,), scale, backwards=function == transform.inverse)
        yield function.__name__, function, carry(start).to(dtype, copy=True)


def test_every_public_transform_has_a_case() -> None:
    public = {getattr(transforms, name) for name in transforms.__all__}
    classes = {item for item in public if isinstance(item, type) and issubclass(item, Transform)} - {
        Transform
    }
    assert classes - {case.covers for case in (*CASES, *STOCHASTIC)} == set(DISCRETE)
    built = [build(case) for case in CASES]
    assert all(isinstance(one, case.covers) for one, case in zip(built, CASES, strict=True))
    maps = {item for item in public if isinstance(item, type) and issubclass(item, transforms.Univariate)}
    used = {type(part.univariate) for one in built for part in one.modules() if hasattr(part, "univariate")}
    assert maps - used == {transforms.Univariate, transforms.IntegerShiftMap, transforms.ModularMap}


@EVERY_CASE
@FRESH_OR_TRAINED
@PRECISION
def test_round_trip(case: Case, trained: bool, dtype: torch.dtype) -> None:
    transform = build(case, dtype, trained)
    back = {"forward": transform.inverse, "inverse": transform.forward}
    for name, function, start in directions(case, transform, dtype):
        end, log_det = function(start)
        again, log_det_back = back[name](end)
        close(again, start, accuracy(case, dtype, ROUND_TRIP))
        close(log_det_back, -log_det, accuracy(case, dtype, LOG_DET))


@EVERY_CASE
@FRESH_OR_TRAINED
@PRECISION
def test_log_det_is_that_of_the_jacobian(case: Case, trained: bool, dtype: torch.dtype) -> None:
    transform = build(case, dtype, trained)
    for _, function, start in directions(case, transform, dtype, count=4):
        log_det = function(start)[1]
        rows, size = len(start), start[0].numel()
        # of the sum over rows, which do not touch each other (test_any_batch_shape)
        jacobian = torch.autograd.functional.jacobian(lambda points: function(points)[0].sum(0), start)  # noqa: B023
        matrices = jacobian.reshape(size, rows, size).transpose(0, 1)
        close(log_det, torch.linalg.slogdet(matrices).logabsdet, accuracy(case, dtype, LOG_DET))


def standard_normal(z: Tensor) -> Tensor:
    rows = z.reshape(len(z), -1)
    return torch.exp(-0.5 * rows.square().sum(-1)) / (2 * math.pi) ** (rows.shape[-1] / 2)


def integrated(dim: int) -> pytest.MarkDecorator:
    """The cases with a density in so many dimensions; a map of numbers is a product in the plane."""
    cases = [case for case in CASES if dim in case.quadrature and (dim == 1 or case.covers.event_dim != 0)]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@integrated(1)
@FRESH_OR_TRAINED
def test_density_integrates_to_one_on_a_line(case: Case, trained: bool) -> None:
    transform = build(case, trained=trained, dim=1)
    nodes = torch.linspace(-7, 7, 8001, dtype=torch.float64)
    with torch.no_grad():
        x = transform(nodes.reshape(-1, *(1,) * transform.event_dim))[0]
        z, log_det = transform.inverse(x)
    density = standard_normal(z) * log_det.exp()
    mass = (0.5 * (density[1:] + density[:-1]) * x.flatten().diff().abs()).sum().item()
    assert mass == pytest.approx(1, abs=1e-3)


@integrated(2)
@FRESH_OR_TRAINED
def test_density_integrates_to_one_in_the_plane(case: Case, trained: bool) -> None:
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
    """A number that depends on every output, with weights that no symmetry cancels."""
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    return (value * weights).sum() + (
        log_det * torch.linspace(1, 2, log_det.numel()).reshape(log_det.shape)
    ).sum()


@EVERY_CASE
@FRESH_OR_TRAINED
def test_gradients_reach_every_parameter(case: Case, trained: bool) -> None:
    transform = build(case, trained=trained)
    waiting = () if trained else case.wakes_later
    for direction, function, start in directions(case, transform, torch.float64):
        transform.zero_grad()
        start.requires_grad_()
        total(*function(start)).backward()
        assert start.grad is not None
        assert (start.grad != 0).any()
        for name, parameter in transform.named_parameters():
            assert parameter.grad is not None, f"{direction}: no gradient reaches {name}"
            if not any(part in name for part in waiting):
                assert (parameter.grad != 0).any(), f"{direction}: the gradient of {name} is zero"


@EVERY_CASE
@FRESH_OR_TRAINED
def test_gradients_are_those_of_finite_differences(case: Case, trained: bool) -> None:
    transform = build(case, trained=trained)
    parameters = dict(transform.named_parameters())
    if not parameters:
        pytest.skip("no parameters")
    generator = torch.Generator().manual_seed(3)
    moves = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in parameters.items()}
    for name, function, start in directions(case, transform, torch.float64, count=8):
        slopes = torch.autograd.grad(total(*function(start)), list(parameters.values()))
        slope = sum((slope * move).sum() for slope, move in zip(slopes, moves.values(), strict=True))
        ends = []
        for step in (-1e-6, 1e-6):
            shifted = copy.deepcopy(transform)
            with torch.no_grad():
                for key, parameter in shifted.named_parameters():
                    parameter += step * moves[key]
                ends.append(total(*getattr(shifted, name)(start)))
        torch.testing.assert_close(slope, (ends[1] - ends[0]) / 2e-6, rtol=1e-4, atol=1e-4)


@EVERY_CASE
def test_second_derivatives_are_those_of_finite_differences(case: Case) -> None:
    """Of the density, both ways: a Hessian through a numerical inverse is that of the implicit function."""
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
@FRESH_OR_TRAINED
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
    for (_, ours, start), (_, theirs, _) in zip(
        directions(case, transform, torch.float64), directions(case, other, torch.float64), strict=True
    ):
        for saved, loaded in zip(ours(start), theirs(start), strict=True):
            assert torch.equal(saved, loaded)


@EVERY_CASE
def test_copies_are_equal_and_apart(case: Case) -> None:
    transform = build(case)
    twin = copy.deepcopy(transform)
    start = case.to_domain(noise(case, transform, (5,)))
    value, log_det = transform(start)
    assert torch.equal(twin(start)[0], value)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += 1
    assert torch.equal(transform(start)[0], value)
    assert torch.equal(transform(start)[1], log_det)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in MADE_OF_OTHERS], ids=lambda case: case.name
)
def test_compiles_without_a_graph_break(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (tanh_root, monotone_root):
        monkeypatch.setattr(iteration, "__defaults__", (2,))  # the other steps compile alike
    case = (
        replace(case, dim=2) if 2 in case.quadrature else case
    )  # loops over the dimensions take fewer rounds
    transform = build(case)
    ways = [
        (function, start)
        for name, function, start in directions(case, transform, torch.float64)
        if transform.solver not in (name, "both")
    ]
    if not ways:
        pytest.skip("a solver stops when it has settled")

    def run() -> list[Tensor]:
        return [part for function, start in ways for part in function(start)]

    torch._dynamo.reset()
    # tracing is what can break; generating code as well would take minutes
    backend = "aot_eager" if case.name in GRADIENTS_TRACED else "eager"
    for ours, theirs in zip(torch.compile(run, fullgraph=True, backend=backend)(), run(), strict=True):
        close(ours, theirs, 1e-12)


@EVERY_CASE
@PRECISION
def test_any_batch_shape(case: Case, dtype: torch.dtype) -> None:
    transform = build(case, dtype)
    state = torch.random.get_rng_state()
    for batch, (function, carry) in itertools.product(
        [(), (0,), (1,), (2, 3)],
        [(transform.forward, case.to_domain), (transform.inverse, case.to_range)],
    ):
        backwards = function == transform.inverse
        points = carry(noise(case, transform, batch, backwards=backwards)).to(dtype)
        before = points.clone()
        value, log_det = function(points, context=None)
        after = (transform.inverse_shape if backwards else transform.forward_shape)(points.shape)
        assert value.shape == after
        assert log_det.shape == batch
        assert value.dtype == log_det.dtype == dtype
        assert torch.equal(points, before)
        assert not points.requires_grad
        for index in itertools.product(*map(range, batch)):
            one, one_log_det = function(points[index])
            close(value[index], one, accuracy(case, dtype, ROUND_TRIP))
            close(log_det[index], one_log_det, accuracy(case, dtype, LOG_DET))
    assert torch.equal(torch.random.get_rng_state(), state)


@EVERY_CASE
def test_vmap(case: Case) -> None:
    transform = build(case)
    if transform.solver == "both":
        pytest.skip("the number of steps depends on the values")
    for _, function, start in directions(case, transform, torch.float64, count=6):
        for mapped, plain in zip(torch.func.vmap(function)(start), function(start), strict=True):
            close(mapped, plain, 1e-12)
