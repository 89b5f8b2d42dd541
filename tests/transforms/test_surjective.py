"""Contract of surjective and stochastic transforms, with the SurVAE identity against exact marginals."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import HalfNormal, MultivariateNormal, Normal, Poisson

from flowbnn.distributions import DiagonalNormal, Flow
from flowbnn.errors import FlowBNNError
from flowbnn.nets import ConditionalNormal, ConditionerMLP, GatedConvNet
from flowbnn.transforms import (
    AbsoluteValue,
    Argmax,
    Augment,
    Compose,
    Dequantization,
    Inverse,
    MaxPool,
    Sigmoid,
    Slice,
    Squeeze,
    Transform,
    VAELayer,
)
from slow_cases import mark_slow

NORMAL = Normal(torch.tensor(0.3, dtype=torch.float64), 1.5)
GRID = torch.linspace(-12, 12, 20001, dtype=torch.float64)


def phi(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)


def cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def normals(*loc: float) -> DiagonalNormal:
    center = torch.tensor(loc, dtype=torch.float64)
    return DiagonalNormal(center, torch.ones_like(center))


class Counts(Poisson):
    """Poisson distribution of integers instead of floats."""

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        return super().sample(sample_shape).long()

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value.double())


@dataclass(frozen=True)
class Stochastic:
    """A transform, a base, and points at which ``density(transform, x)`` is known."""

    name: str
    covers: type[Transform]
    build: Callable[[], Transform]
    base: Any
    points: Tensor
    density: Callable[[Any, Tensor], Tensor]
    # added to the log-scales of the noise, because weights of narrow noise have infinite variance
    log_scale: float = 0.5


def integers(transform: Transform, x: Tensor) -> Tensor:
    return NORMAL.cdf(x + 1.0) - NORMAL.cdf(x.double())


def levels(transform: Transform, x: Tensor) -> Tensor:
    return NORMAL.cdf(torch.logit((x + 1.0) / 4)) - NORMAL.cdf(torch.logit(x.double() / 4))


def largest(transform: Transform, x: Tensor) -> Tensor:
    means = torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64)
    each = [
        torch.trapezoid(phi(GRID - means[k]) * cdf(GRID - means[k - 1]) * cdf(GRID - means[k - 2]), GRID)
        for k in range(3)
    ]
    return torch.stack(each)[x.squeeze(-1)]


def pooled(transform: Any, x: Tensor) -> Tensor:
    """Returns the density of three numbers with a drawn maximum: that of the base, of the position and of the gaps."""
    rate = transform.transform.log_rate.detach().exp()
    top = x.amax(-1)
    return phi(top - 0.3) / 3 * rate**2 * torch.exp(-rate * (3 * top - x.sum(-1)))


def decoded(transform: Any, x: Tensor) -> Tensor:
    """Returns the marginal of a linear decoder of a normal, a normal with a full covariance."""
    layer = transform.decoder.net.layers[0]
    loadings = layer.weight[:2] @ torch.ones(1, 1).double()
    scale = (4.0 * torch.tanh(layer.bias[2:] / 4.0)).exp()
    covariance = loadings @ loadings.mT + torch.diag(scale**2)
    mean = layer.bias[:2] + layer.weight[:2].squeeze(-1) * 0.3
    return MultivariateNormal(mean, covariance).log_prob(x).exp()


def augmented(transform: Any, x: Tensor) -> Tensor:
    layer = transform.noise.net.layers[0]
    loc, raw = (x[:, :1] @ layer.weight.mT + layer.bias).unbind(-1)
    scale = (4.0 * torch.tanh(raw / 4.0)).exp()
    return phi(x[:, 0] - 0.3) * phi((x[:, 1] - loc) / scale) / scale


PAIR = MultivariateNormal(torch.tensor([0.3, -0.2]).double(), torch.tensor([[1.5, 0.8], [0.8, 1.0]]).double())
NUMBERS = torch.tensor([[-1.2], [0.1], [2.0]], dtype=torch.float64)
PAIRS = torch.tensor([[-1.2, 0.3], [0.1, 0.2], [2.0, -0.5]], dtype=torch.float64)
CASES = [
    Stochastic(
        "dequantization", Dequantization, Dequantization, NORMAL, torch.tensor([-2, 0, 1, 3]), integers
    ),
    Stochastic(
        "dequantization-levels",
        Dequantization,
        lambda: Compose(Sigmoid(), Dequantization(4)),
        NORMAL,
        torch.arange(4),
        levels,
    ),
    Stochastic(
        "dequantization-variational",
        Dequantization,
        lambda: Compose(Sigmoid(), Dequantization(4, ConditionalNormal(ConditionerMLP(1, 2, (8,))))),
        NORMAL.expand((1,)),
        torch.arange(4).unsqueeze(-1),
        lambda transform, x: levels(transform, x).squeeze(-1),
        log_scale=1.0,
    ),
    Stochastic(
        "rounding",
        Inverse,
        lambda: Inverse(Dequantization()),
        Counts(torch.tensor(2.0).double()),
        torch.tensor([0.2, 1.9, 3.5], dtype=torch.float64),
        lambda transform, x: Poisson(torch.tensor(2.0).double()).log_prob(x.floor().abs()).exp() * (x >= 0),
    ),
    Stochastic(
        "slice",
        Slice,
        lambda: Slice(1, 1, hidden=(8,)),
        PAIR,
        NUMBERS,
        lambda transform, x: Normal(0.3, 1.5**0.5).log_prob(x.squeeze(-1)).exp(),
    ),
    Stochastic("augment", Augment, lambda: Augment(1, 1, hidden=()), normals(0.3), PAIRS, augmented),
    Stochastic(
        "absolute-value",
        AbsoluteValue,
        AbsoluteValue,
        Normal(torch.tensor(0.4).double(), 1.0),
        torch.tensor([0.1, 1.0, 2.5], dtype=torch.float64),
        lambda transform, x: phi(x - 0.4) + phi(x + 0.4),
    ),
    Stochastic(
        "absolute-value-net",
        AbsoluteValue,
        lambda: AbsoluteValue(ConditionerMLP(1, 1, (8,))),
        normals(0.4),
        NUMBERS.abs(),
        lambda transform, x: (phi(x - 0.4) + phi(x + 0.4)).squeeze(-1),
    ),
    Stochastic(
        "signed",
        Inverse,
        lambda: Inverse(AbsoluteValue()),
        HalfNormal(torch.tensor(1.0).double()),
        torch.tensor([-1.3, 0.2, 2.0], dtype=torch.float64),
        lambda transform, x: phi(x),
    ),
    Stochastic(
        "max-pool",
        MaxPool,
        lambda: MaxPool(1, 3),
        normals(0.0, 0.0, 0.0),
        NUMBERS,
        lambda transform, x: (3 * phi(x) * cdf(x) ** 2).squeeze(-1),
    ),
    Stochastic(
        "below-the-maximum",
        Inverse,
        lambda: Inverse(MaxPool(1, 3)),
        normals(0.3),
        torch.tensor([[0.1, 0.9, -0.3], [2.0, 1.0, 0.5]], dtype=torch.float64),
        pooled,
    ),
    Stochastic(
        "argmax",
        Argmax,
        lambda: Argmax(1, 3, hidden=(8,)),
        normals(0.5, 0.0, -0.5),
        torch.arange(3).unsqueeze(-1),
        largest,
    ),
    Stochastic("vae-layer", VAELayer, lambda: VAELayer(2, 1, hidden=()), normals(0.3), PAIRS, decoded),
]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def build(case: Stochastic, seed: int = 0) -> Any:
    """Returns the transform of a case in float64, with perturbed parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transform = case.build().double()
        with torch.no_grad():
            for parameter in transform.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
            for module in transform.modules():
                if isinstance(module, ConditionalNormal):
                    half = len(module.net.layers[-1].bias) // 2
                    module.net.layers[-1].bias[half:] += case.log_scale
            if isinstance(transform, VAELayer):  # its marginal is known if the noise is the same everywhere
                transform.decoder.net.layers[0].weight[2:] = 0.0
    return transform


def seeded(function: Callable[..., Any], *args: Any, seed: int = 3) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return function(*args)


@EVERY_CASE
def test_inverse_estimates_the_exact_marginal(case: Stochastic) -> None:
    transform = build(case)
    flow, draws = Flow(case.base, transform), 20_000
    with torch.no_grad():
        density = case.density(transform, case.points)
        if not transform.lower_bound:
            torch.testing.assert_close(flow.log_prob(case.points), density.log(), rtol=1e-10, atol=1e-10)
            return
        points = case.points.expand(draws, *case.points.shape)
        log_prob = seeded(flow.log_prob, points)
    weights = log_prob.exp()
    error = weights.std(0) / draws**0.5
    assert ((weights.mean(0) - density).abs() < 5 * error + 1e-12).all()
    assert (log_prob.mean(0) < density.log() + 1e-12).all()


@EVERY_CASE
def test_draws_have_the_exact_marginal(case: Stochastic) -> None:
    """Compares means, in one dimension only; other tests cover more dimensions."""
    transform = build(case)
    with torch.no_grad():
        x = seeded(Flow(case.base, transform).sample, (40_000,))
        if len(x[0].flatten()) > 1:
            x = x[..., 0]
            assert x.isfinite().all()
            return
        points = torch.arange(-9, 10) if transform.discrete else GRID
        points = points[(points >= x.min() - 3) & (points <= x.max() + 3)]
        if case.name in ("dequantization-levels", "dequantization-variational", "argmax"):
            points = x.unique()
        p = case.density(transform, points.reshape(-1, *case.points.shape[1:])).nan_to_num(0.0)
        if case.name.startswith("absolute"):
            p = p * (points >= 0)
        step = 1.0 if transform.discrete else (GRID[1] - GRID[0]).item()
    assert p.sum() * step == pytest.approx(1, abs=2e-3)
    h = torch.tanh(x.flatten().double() / 2)
    assert abs(h.mean() - (torch.tanh(points / 2) * p).sum() * step) < 5 * h.std() / 200 + 2e-3


@EVERY_CASE
def test_both_directions_give_the_same_contribution(case: Stochastic) -> None:
    transform = build(case)
    if transform.draws == "both":
        z, contribution = seeded(transform.inverse, case.points)
        expected = transform.decoder(z).log_prob(case.points).sum(-1)
        expected = expected - transform.encoder(case.points).log_prob(z).sum(-1)
        torch.testing.assert_close(contribution, expected, rtol=1e-10, atol=1e-10)
        x, log_det = seeded(transform.forward, z)
        expected = transform.encoder(x).log_prob(z).sum(-1) - transform.decoder(z).log_prob(x).sum(-1)
        torch.testing.assert_close(log_det, expected, rtol=1e-10, atol=1e-10)
        return
    # The direction that draws is the first one.
    first_direction, second_direction = transform.inverse, transform.forward
    start = case.points
    if transform.draws == "forward":
        first_direction, second_direction = second_direction, first_direction
        start = case.base.sample((5,))
    middle, log_det = seeded(first_direction, start)
    end, log_det_back = second_direction(middle)
    assert torch.equal(end, start.to(end.dtype))
    torch.testing.assert_close(log_det_back, -log_det, rtol=1e-9, atol=1e-9)


@EVERY_CASE
def test_shapes(case: Stochastic) -> None:
    for dtype in (torch.float32, torch.float64):
        transform = build(case).to(dtype)
        event = case.points.shape[1:]
        for batch in ((), (0,), (2, 3)):
            x = case.points[0].expand(torch.Size(batch) + event)
            x = x if transform.discrete else x.to(dtype)
            z, contribution = transform.inverse(x)
            assert z.shape == transform.inverse_shape(x.shape)
            assert transform.forward_shape(z.shape) == x.shape
            restored, log_det = transform.forward(z)
            assert restored.shape == x.shape
            assert contribution.shape == log_det.shape == z.shape[: z.ndim - transform.event_dim]
            assert contribution.dtype == dtype
            assert z.dtype == dtype or case.name == "rounding"
    assert Flow(case.base, build(case)).event_shape == (case.points.shape[1:] if transform.event_dim else ())


@EVERY_CASE
def test_save_and_load(case: Stochastic) -> None:
    transform, other = build(case), build(case, seed=7)
    file = io.BytesIO()
    torch.save(transform.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for saved, loaded in zip(
        seeded(transform.inverse, case.points), seeded(other.inverse, case.points), strict=True
    ):
        assert torch.equal(saved, loaded)


@EVERY_CASE
def test_gradients_equal_finite_differences(case: Stochastic) -> None:
    """Uses the same draws. Signs have no gradient and do not change with so small a step."""
    transform = build(case)
    parameters = list(transform.parameters())
    if not parameters:
        pytest.skip("no parameters")

    def value() -> Tensor:
        z, contribution = seeded(transform.inverse, case.points)
        return contribution.sum() + z.cos().sum()

    slopes = torch.autograd.grad(value(), parameters)
    assert all((slope != 0).any() for slope in slopes)
    for parameter, slope in zip(parameters, slopes, strict=True):
        index = slope.abs().argmax()
        with torch.no_grad():
            values = []
            for step in (1e-6, -2e-6):
                parameter.view(-1)[index] += step
                values.append(value())
            parameter.view(-1)[index] += 1e-6
        torch.testing.assert_close(
            (values[0] - values[1]) / 2e-6, slope.view(-1)[index], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "case", mark_slow(CASES, ["dequantization", "slice", "max-pool", "argmax", "vae-layer"])
)
def test_compiles_without_a_graph_break(case: Stochastic) -> None:
    transform = build(case)
    torch._dynamo.reset()
    compiled = torch.compile(transform.inverse, fullgraph=True, backend="eager")
    for actual, expected in zip(
        seeded(compiled, case.points), seeded(transform.inverse, case.points), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_generator_determines_all_draws() -> None:
    flow = Flow(normals(0.3), build(next(case for case in CASES if case.name == "augment")))
    first, second = (flow.sample((4,), generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, flow.sample((4,), generator=torch.Generator().manual_seed(6)))


def test_compositions_declare_draws_and_bounds() -> None:
    chain = Compose(Slice(1, 1), Augment(1, 2), Dequantization())
    assert chain.discrete
    assert not Flow(normals(0.0, 0.0), chain).has_rsample
    assert chain.forward_shape((5, 2)) == (5, 3)
    assert chain.inverse_shape((5, 3)) == (5, 2)
    for draws in ("none", "forward", "inverse", "both"):
        kinds = {"forward": [Augment(1, 1)], "inverse": [Slice(1, 1)], "both": [Slice(1, 1), Augment(1, 1)]}
        chain = Compose(*kinds.get(draws, []))
        assert chain.draws == draws
        assert chain.stochastic == (draws != "none")
        assert chain.lower_bound == (draws in ("inverse", "both"))


def test_images_are_split_by_channels_with_a_context() -> None:
    """The contribution of a multi-scale split is the log-density of the channels that are split off, for each image."""
    torch.manual_seed(0)
    noise = ConditionalNormal(GatedConvNet(2 + 3, 4, hidden=4, blocks=1))
    nn.init.normal_(noise.net.last.weight, std=0.1)
    split = Augment(2, 2, noise, context_dim=3)
    z, context = torch.randn(5, 4, 4, 2), torch.randn(5, 3)
    x, log_det = split(z, context)
    restored, contribution = split.inverse(x, context)
    assert torch.equal(restored, z)
    torch.testing.assert_close(contribution, -log_det)
    expanded = context[:, None, None, :].expand(5, 4, 4, 3)
    expected = noise(torch.cat([z, expanded], -1)).log_prob(x[..., 2:]).sum((1, 2, 3))
    torch.testing.assert_close(contribution, expected)
    assert not torch.allclose(split.inverse(x, context + 1.0)[1], contribution)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: Dequantization(256).inverse(torch.rand(3)), "dtype", None),
        (lambda: Augment(2, 1)(torch.ones(2, dtype=torch.long)), "dtype", None),
        (lambda: Squeeze()(torch.ones(3, 4, 1)), "shape", None),
        (lambda: Squeeze().inverse(torch.ones(4, 4, 3)), "shape", None),
        (lambda: VAELayer((3, 4), 2), "value", "dim"),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


def test_errors_give_the_position_of_the_transform() -> None:
    flow = Flow(normals(0.0, 0.0), Compose(Augment(2, 2), MaxPool(2, 3)).double())
    with pytest.raises(FlowBNNError) as caught:
        flow.sample()
    assert (caught.value.kind, caught.value.fields["path"]) == ("shape", (1,))


@pytest.mark.parametrize(
    "call",
    [
        lambda net: Augment(2, 3, net)(torch.ones(5, 2)),
        lambda net: Augment(2, 3, net).inverse(torch.ones(5, 5)),
        lambda net: VAELayer(3, 2, decoder=net).inverse(torch.ones(5, 3)),
    ],
)
def test_noise_of_another_length_raises(call) -> None:
    """One number would broadcast to three."""
    with pytest.raises(FlowBNNError) as caught:
        call(ConditionalNormal(nn.Linear(2, 2)))
    assert (caught.value.kind, caught.value.argument) == ("shape", "noise")


def test_noise_that_is_no_distribution_raises() -> None:
    with pytest.raises(FlowBNNError) as caught:
        Augment(2, 3, nn.Linear(2, 3))(torch.ones(5, 2))
    assert (caught.value.kind, caught.value.argument) == ("shape", "noise")


def test_integers_outside_the_levels_have_probability_zero() -> None:
    flow = Flow(Normal(0.0, 1.0), Compose(Sigmoid(), Dequantization(4)))
    assert flow.log_prob(torch.tensor([-1, 4])).tolist() == [-torch.inf, -torch.inf]
    assert flow.log_prob(torch.tensor([0, 3])).isfinite().all()


def test_absolute_value_has_nonnegative_support() -> None:
    flow = Flow(Normal(0.0, 1.0), AbsoluteValue())
    assert flow.log_prob(torch.tensor([-1.0, 1.0])).isfinite().tolist() == [False, True]
    with pytest.raises(FlowBNNError) as caught:
        Flow(Normal(-1.0, 1e-9), Inverse(AbsoluteValue())).sample()
    assert (caught.value.kind, caught.value.fields["value"]) == ("range", pytest.approx(-1.0))
    with pytest.raises(FlowBNNError) as caught:
        Flow(Normal(0.0, 1.0), Inverse(AbsoluteValue())).log_prob(torch.tensor(1.0))
    assert (caught.value.kind, caught.value.fields["path"]) == ("range", (0,))
