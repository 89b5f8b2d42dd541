"""Interface of torch.distributions for flows: moments, support, validation and shapes."""

import math

import pytest
import torch
from torch.distributions import (
    Categorical,
    Exponential,
    HalfNormal,
    Independent,
    Laplace,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
    Uniform,
    VonMises,
    constraints,
)
from torch.distributions import transforms as torch_transforms

from flowbnn.distributions import CircularBase, DiagonalNormal, Flow, NormalMixture
from flowbnn.errors import FlowBNNError
from flowbnn.numerics import tanh_root
from flowbnn.transforms import (
    Affine,
    AffineCoupling,
    CircularSplineMap,
    Compose,
    Coupling,
    Exp,
    Inverse,
    Logit,
    LULinear,
    Planar,
    Reshape,
    Reverse,
    Sigmoid,
    Softplus,
    Squeeze,
    Tanh,
    Transform,
)

DOUBLE = torch.float64
LOC = torch.tensor([0.3, -1.0, 2.0], dtype=DOUBLE)
SCALE = torch.tensor([0.5, 1.5, 0.2], dtype=DOUBLE)


def perturbed(transform: Transform, size: float = 0.4) -> Transform:
    generator = torch.Generator().manual_seed(3)
    transform.double()
    with torch.no_grad():
        for parameter in transform.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=DOUBLE))
    return transform.eval().requires_grad_(False)


with torch.random.fork_rng():
    torch.manual_seed(0)
    CIRCLE = perturbed(Coupling(2, CircularSplineMap(4), hidden=(8,)))


def matrix_of(transform: Transform, dim: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    offset = transform(torch.zeros(dim, dtype=DOUBLE))[0]
    return (transform(torch.eye(dim, dtype=DOUBLE))[0] - offset).T, offset


# --- moments ------------------------------------------------------------------------------------------------------------

FULL = MultivariateNormal(
    LOC, torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 0.7]], dtype=DOUBLE)
)


@pytest.mark.parametrize(
    "base",
    [DiagonalNormal(LOC, SCALE), Independent(Normal(LOC, SCALE), 1), Normal(LOC, SCALE), FULL],
    ids=["diagonal", "independent", "batch", "full"],
)
@pytest.mark.parametrize("make", [lambda: Affine(3), lambda: Compose(LULinear(3), Affine(3), Reverse(3))])
def test_affine_image_of_a_normal_equals_torch(base, make):
    flow = Flow(base, perturbed(make()))
    matrix, offset = matrix_of(flow.transform)
    covariance = base.covariance_matrix if base is FULL else torch.diag(SCALE**2)
    expected = MultivariateNormal(matrix @ LOC + offset, matrix @ covariance @ matrix.T)
    for name in ("mean", "variance", "stddev"):
        torch.testing.assert_close(getattr(flow, name), getattr(expected, name), rtol=0, atol=1e-12)
    torch.testing.assert_close(flow.entropy(), expected.entropy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: Affine(3), lambda: Compose(Affine(3), LULinear(3))])
def test_moments_of_an_affine_image_of_a_mixture(make):
    """The covariance of a mixture is not diagonal."""
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(2, 4, 3, generator=generator, dtype=DOUBLE)
    scale = torch.rand(2, 4, 3, generator=generator, dtype=DOUBLE) + 0.1
    flow = Flow(NormalMixture(loc, scale), perturbed(make()))
    matrix, offset = matrix_of(flow.transform)
    second = torch.diag_embed(scale**2).mean(1) + loc.mT @ loc / 4
    mean = loc.mean(1)
    covariance = second - mean[:, :, None] * mean[:, None, :]
    torch.testing.assert_close(flow.mean, mean @ matrix.T + offset, rtol=0, atol=1e-12)
    expected = (matrix @ covariance @ matrix.T).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(flow.variance, expected, rtol=0, atol=1e-12)
    with pytest.raises(NotImplementedError) as caught:
        flow.entropy()
    assert "NormalMixture" in str(caught.value)


def test_moments_on_a_laplace_base():
    base = Laplace(LOC, SCALE)
    flow = Flow(base, perturbed(Compose(Affine(3), LULinear(3))))
    matrix, offset = matrix_of(flow.transform)
    torch.testing.assert_close(flow.mean, matrix @ LOC + offset, rtol=0, atol=1e-12)
    torch.testing.assert_close(flow.variance, matrix.square() @ base.variance, rtol=0, atol=1e-12)
    expected = base.entropy().sum() + torch.linalg.slogdet(matrix)[1]
    torch.testing.assert_close(flow.entropy(), expected, rtol=0, atol=1e-12)


def test_moments_depend_on_the_context():
    class Shifted(Transform):
        linearity = "affine"

        def forward(self, z, context=None):
            return z.flip(-1) * 2.0 + context, z.new_full(z.shape[:-1], 3 * 0.6931471805599453)

    context = torch.arange(15.0, dtype=DOUBLE).view(5, 3)
    flow = Flow(DiagonalNormal(LOC, SCALE), Shifted(), context)
    torch.testing.assert_close(flow.mean, 2.0 * LOC.flip(0) + context)
    torch.testing.assert_close(flow.stddev, (2.0 * SCALE.flip(0)).expand(5, 3))
    torch.testing.assert_close(
        flow.entropy(), Normal(LOC, 2.0 * SCALE).entropy().sum().expand(5), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", ["mean", "variance", "stddev", "entropy"])
def test_moments_without_closed_form_raise_and_name_an_estimate(name):
    flow = Flow(DiagonalNormal(LOC, SCALE), perturbed(Planar(3)))
    with pytest.raises(NotImplementedError) as caught:
        flow.entropy() if name == "entropy" else getattr(flow, name)
    assert "flow." in str(caught.value)


# --- support ------------------------------------------------------------------------------------------------------------


def assert_torch_rejects(call, words: str) -> None:
    """Checks that the validation of torch raises an error with these words."""
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)


def standard(dim: int = 2, **options) -> Independent:
    return Independent(Normal(torch.zeros(dim), torch.ones(dim)), 1, **options)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Exp(), constraints.positive),
        (Softplus(), constraints.positive),
        (Sigmoid(), constraints.unit_interval),
        (Tanh(), constraints.interval(-1.0, 1.0)),
        (Inverse(Logit()), constraints.unit_interval),
        (Compose(Affine(2), Exp()), constraints.positive),
        (Compose(Exp(), Reverse(2)), constraints.positive),
        (Compose(Exp(), Inverse(Exp())), constraints.real),
        (Compose(Sigmoid(), Logit(), Planar(2)), constraints.real),
        (Inverse(Compose(Inverse(Tanh()), Affine(2))), constraints.interval(-1.0, 1.0)),
    ],
)
def test_support_is_the_declared_codomain(transform, expected):
    support = Flow(standard(), transform).support
    assert (support.event_dim, repr(support.base_constraint)) == (1, repr(expected))


def test_support_of_numbers_and_of_other_bases():
    assert Flow(Normal(0.0, 1.0), Exp()).support is constraints.positive
    assert Flow(Uniform(torch.zeros(2), torch.ones(2)), Logit()).support is constraints.real
    assert Flow(Exponential(torch.ones(2)), Reverse(2)).support.base_constraint is constraints.nonnegative


@pytest.mark.parametrize(
    ("transform", "inside", "outside"),
    [
        (Exp(), [0.5, 3.0], [[-0.5, 3.0], [0.5, -3.0], [0.0, 1.0], [float("inf"), 1.0]]),
        (Softplus(), [0.5, 3.0], [[-0.5, 3.0]]),
        (Sigmoid(), [0.2, 0.7], [[-0.1, 0.5], [0.5, 1.1]]),
        (Tanh(), [-0.2, 0.7], [[-1.1, 0.5], [0.5, 3.0]]),
        (Inverse(Logit()), [0.2, 0.7], [[-0.1, 0.5]]),
        (Compose(Exp(), Tanh()), [0.2, 0.7], [[-0.2, 0.5], [0.5, 1.5]]),
        (Compose(Sigmoid(), Reverse(2), perturbed(Affine(2)).float()), [0.9, 0.2], [[9.0, 0.2], [0.9, -9.0]]),
    ],
)
@pytest.mark.parametrize("base", [standard(), standard(validate_args=False)], ids=["checked", "unchecked"])
def test_density_outside_the_support_is_zero(transform, inside, outside, base):
    """Holds for bases that validate their arguments, as torch does by default, and for others."""
    flow = Flow(base, transform)
    strict = Flow(base, transform, validate_args=True)
    inner, outer = torch.tensor(inside), torch.tensor(outside)
    z, log_det = transform.inverse(inner)
    expected = base.log_prob(z) + (log_det.sum(-1) if log_det.ndim else log_det)
    torch.testing.assert_close(flow.log_prob(inner), expected)
    assert strict.log_prob(inner) == flow.log_prob(inner)
    assert flow.log_prob(outer).tolist() == [-torch.inf] * len(outside)
    assert flow.log_prob(torch.cat([outer, inner[None]])).isfinite().tolist() == [False] * len(outside) + [
        True
    ]
    finite = outer[outer.isfinite().all(-1)]
    assert strict.support.check(inner)
    assert not strict.support.check(finite).any()
    for row in finite:
        assert_torch_rejects(lambda row=row: strict.log_prob(row), "within the support")


def test_support_of_a_flow_on_a_bounded_base():
    shift = Affine(1)
    with torch.no_grad():
        shift.shift.fill_(5.0)
    value = torch.tensor([[4.5], [5.5], [6.5]])
    flow = Flow(Uniform(torch.zeros(1), torch.ones(1)), shift)
    assert flow.log_prob(value).exp().tolist() == [0.0, 1.0, 0.0]
    assert flow.support.check(value).tolist() == [False, True, False]
    lazy = Flow(HalfNormal(torch.ones(1), validate_args=False), shift)
    assert lazy.log_prob(value).isfinite().tolist() == [False, True, True]


def test_lognormal_density_equals_torch_and_is_zero_for_negative_numbers():
    flow, theirs = Flow(Normal(0.0, 1.0), Exp()), LogNormal(0.0, 1.0)
    x = torch.tensor([0.01, 1.0, 50.0])
    torch.testing.assert_close(flow.log_prob(x), theirs.log_prob(x))
    assert flow.log_prob(torch.tensor(-1.0)) == -torch.inf
    unchecked = Flow(DiagonalNormal(torch.zeros(1), torch.ones(1)), Exp())
    assert unchecked.log_prob(torch.tensor([torch.nan])).isnan(), "the density of NaN must be NaN"


@pytest.mark.parametrize("transform", [Affine(2), Planar(2), AffineCoupling(2, hidden=(4,)), Exp()])
def test_density_at_infinity_is_zero(transform):
    value = torch.tensor([[torch.inf, 0.5], [0.5, torch.inf], [0.5, 0.5]])
    log_prob = Flow(standard(), transform).log_prob(value)
    assert torch.equal(log_prob == -torch.inf, standard().log_prob(value) == -torch.inf)
    assert log_prob[2].isfinite()


@pytest.mark.parametrize(
    ("transform", "path"),
    [(Logit(), (0,)), (Compose(Affine(2), Inverse(Exp())), (1,))],
    ids=["logit", "log"],
)
def test_base_with_mass_outside_the_domain_raises(transform, path):
    flow = Flow(standard(), transform)  # its density would integrate to less than one
    with pytest.raises(FlowBNNError) as caught:
        flow.log_prob(torch.ones(2))
    assert (caught.value.kind, caught.value.fields["path"]) == ("range", path)


def test_circular_map_on_a_real_base_raises():
    base = DiagonalNormal(torch.zeros(2, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE))
    for circular in (CIRCLE, Inverse(CIRCLE)):  # the density would integrate to less than one
        with pytest.raises(FlowBNNError) as caught:
            Flow(base, Compose(Affine(2).double(), circular)).log_prob(torch.ones(2, dtype=DOUBLE))
        assert (caught.value.kind, caught.value.fields["path"]) == ("range", (1,))
    onto_an_arc = Flow(base, Compose(Tanh(), CIRCLE))
    x, log_prob = onto_an_arc.rsample_and_log_prob((50,))
    torch.testing.assert_close(onto_an_arc.log_prob(x), log_prob)


@pytest.mark.parametrize(
    "base",
    [
        CircularBase(2)(),
        Independent(VonMises(torch.zeros(2), torch.ones(2)), 1),
        Uniform(torch.full((2,), -math.pi), torch.full((2,), math.pi)),
        Uniform(-torch.ones(2), torch.ones(2)),
        MixtureSameFamily(
            Categorical(torch.ones(2)),
            Independent(VonMises(torch.tensor([[-1.0, 0.0], [1.0, 2.0]]), torch.ones(2, 2)), 1),
        ),
        # torch declares real support for every affine map
        TransformedDistribution(
            VonMises(torch.zeros(2), torch.ones(2)), torch_transforms.AffineTransform(1.0, 1.0)
        ),
        TransformedDistribution(
            Uniform(torch.zeros(2), torch.ones(2), validate_args=False),
            torch_transforms.AffineTransform(-1.0, 2.0),
        ),
    ],
    ids=["uniform", "von-mises", "interval", "arc", "mixture", "rotated", "scaled"],
)
def test_circular_map_on_a_periodic_base_integrates_to_one(base):
    flow = Flow(base, Compose(Reverse(2), CIRCLE))
    side = torch.linspace(-math.pi, math.pi, 401, dtype=DOUBLE)
    density = flow.log_prob(torch.cartesian_prod(side, side)).exp().view(401, 401)
    assert torch.trapezoid(torch.trapezoid(density, side), side).item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "transform", [Reverse(4), Reshape((4,), (2, 2)), Compose(Reshape((4,), (1, 1, 4)), Inverse(Squeeze()))]
)
def test_bounds_are_permuted_with_the_numbers(transform):
    low = torch.tensor([0.0, 10.0, 20.0, 30.0])
    flow = Flow(Independent(Uniform(low, low + 1), 1), transform, validate_args=True)
    x = flow.sample((3,))
    assert flow.log_prob(x).tolist() == [0.0] * 3
    assert_torch_rejects(lambda: flow.log_prob(x + 5), "within the support")


def test_validation_is_off_by_default():
    bad = torch.full((3,), float("nan"))
    for kind in (DiagonalNormal(LOC, SCALE), NormalMixture(LOC[None], SCALE[None])):
        assert kind.log_prob(bad).isnan()
        assert Flow(kind, Affine(3).double()).log_prob(bad).isnan()
        strict = type(kind)(kind.loc, kind.scale, validate_args=True)
        flow = Flow(kind, Affine(3).double(), validate_args=True).expand((2,))
        for distribution in (strict, flow):
            assert_torch_rejects(lambda d=distribution: d.log_prob(bad), "within the support")
        negative = lambda kind=kind: type(kind)(kind.loc, -kind.scale, validate_args=True)  # noqa: E731
        assert_torch_rejects(negative, "to satisfy the constraint")


# --- shapes, draws, names -----------------------------------------------------------------------------------------------


def test_context_makes_a_batch_of_distributions():
    coupling = perturbed(AffineCoupling(3, hidden=(8,), context_dim=2))
    context = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    flow = Flow(DiagonalNormal(LOC, SCALE), coupling, context)
    assert (flow.batch_shape, flow.event_shape) == ((5,), (3,))
    x, log_prob = flow.rsample_and_log_prob((4,))
    assert (x.shape, log_prob.shape) == ((4, 5, 3), (4, 5))
    torch.testing.assert_close(flow.log_prob(x), log_prob, rtol=0, atol=1e-10)
    singles = [Flow(DiagonalNormal(LOC, SCALE), coupling, row) for row in context]
    assert singles[0].batch_shape == ()
    expected = torch.stack([single.log_prob(LOC) for single in singles])
    torch.testing.assert_close(flow.log_prob(LOC), expected, rtol=1e-12, atol=0)
    assert expected.std() > 1e-3
    expanded = flow.expand((7, 5))
    torch.testing.assert_close(expanded.log_prob(LOC), expected.expand(7, 5), rtol=1e-12, atol=0)
    assert Flow(Normal(LOC, SCALE), coupling, context).rsample((4,)).shape == (4, 5, 3)
    with pytest.raises(FlowBNNError) as caught:
        Flow(DiagonalNormal(LOC, SCALE).expand((4,)), coupling, context)
    assert (caught.value.kind, caught.value.argument) == ("shape", "context")


def test_scales_broadcast_as_in_torch():
    for ours, theirs in (
        (DiagonalNormal(LOC, torch.tensor(0.5, dtype=DOUBLE)), Normal(LOC, 0.5)),
        (DiagonalNormal(LOC, 0.5), Normal(LOC, 0.5)),
        (DiagonalNormal(LOC, SCALE.expand(4, 3)), Normal(LOC, SCALE.expand(4, 3))),
    ):
        expected = Independent(theirs, 1)
        assert ours.batch_shape == expected.batch_shape
        torch.testing.assert_close(ours.entropy(), expected.entropy(), rtol=0, atol=1e-12)
        torch.testing.assert_close(ours.log_prob(LOC + 1), expected.log_prob(LOC + 1), rtol=0, atol=1e-12)
        assert ours.rsample((2,)).shape == expected.rsample((2,)).shape
        assert torch.equal(ours.stddev, expected.stddev)
        assert torch.equal(ours.mode, expected.mode)
    mixture = NormalMixture(LOC.expand(2, 3), torch.tensor(0.5, dtype=DOUBLE))
    torch.testing.assert_close(mixture.log_prob(LOC), DiagonalNormal(LOC, 0.5).log_prob(LOC))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: DiagonalNormal(torch.tensor(0.0), torch.tensor(1.0)), "loc"),
        (lambda: DiagonalNormal(0.0, 1.0), "loc"),
        (lambda: NormalMixture(LOC, SCALE), "loc"),
        (lambda: DiagonalNormal(LOC, SCALE[:2]), "scale"),
    ],
)
def test_parameters_of_another_shape_raise(call, argument):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == ("shape", argument)


def test_flow_on_a_base_without_rsample():
    base = MixtureSameFamily(
        Categorical(torch.ones(2)), Independent(Normal(torch.randn(2, 3), torch.ones(2, 3)), 1)
    )
    flow = Flow(base, Affine(3))
    assert not flow.has_rsample
    assert flow.sample((4,)).shape == (4, 3)
    torch.testing.assert_close(flow.log_prob(torch.ones(3)), base.log_prob(torch.ones(3)))
    for method in (flow.rsample, flow.rsample_and_log_prob):
        with pytest.raises(NotImplementedError) as caught:
            method((4,))
        assert "MixtureSameFamily" in str(caught.value)
    with pytest.raises(TypeError) as refused:
        flow.sample((4,), torch.Generator())
    assert "generator" in str(refused.value)
    assert Flow(DiagonalNormal(LOC, SCALE), Affine(3)).has_rsample


def test_generator_determines_the_samples():
    loc = LOC.clone().requires_grad_()
    for kind in (DiagonalNormal(loc, SCALE), NormalMixture(loc[None], SCALE[None])):
        first, second = (kind.sample((4,), generator=torch.Generator().manual_seed(1)) for _ in range(2))
        assert torch.equal(first, second)
        assert not first.requires_grad
        assert not torch.equal(first, kind.sample((4,), generator=torch.Generator().manual_seed(2)))


def test_repr_lists_the_transforms():
    flow = Flow(standard(), Compose(Affine(2), Inverse(Exp())))
    assert repr(flow) == (
        "Flow(Independent(Normal(loc: torch.Size([2]), scale: torch.Size([2])), 1), Compose(Affine, Inverse(Exp)))"
    )


def test_torch_distributions_of_a_flow():
    flow = Flow(standard(3), Affine(3))
    outer = TransformedDistribution(flow, [torch_transforms.ExpTransform()])
    x = outer.sample((2,))
    expected = LogNormal(torch.zeros(3), torch.ones(3)).log_prob(x).sum(-1)
    torch.testing.assert_close(outer.log_prob(x), expected)
    assert Independent(flow.expand((4,)), 1).log_prob(torch.ones(4, 3)).ndim == 0


@pytest.mark.parametrize(
    "transform",
    [pytest.param(Planar(3), marks=pytest.mark.slow), Compose(Affine(3), Sigmoid())],
    ids=["planar", "sigmoid"],
)
def test_density_and_draws_compile(transform, monkeypatch):
    monkeypatch.setattr(tanh_root, "__defaults__", (2,))  # all steps of the iteration compile alike
    base = DiagonalNormal(torch.zeros(3), torch.ones(3))
    x = torch.tensor([[0.2, 0.5, 0.7], [-0.2, 0.5, 0.7]])
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda value: Flow(base, transform).log_prob(value), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(x), Flow(base, transform).log_prob(x))


@pytest.mark.parametrize("dim", [None, 3])
def test_mixture_of_uniforms_as_base(dim):
    """The density is the mean of those components whose interval contains the value. Torch demands all intervals."""
    shape = () if dim is None else (dim,)
    low, high = torch.tensor([0.0, 0.5]), torch.tensor([1.0, 2.5])
    component = Uniform(*(ends.reshape(2, *(1,) * len(shape)).expand(2, *shape) for ends in (low, high)))
    component = component if dim is None else Independent(component, 1)
    flow = Flow(
        MixtureSameFamily(Categorical(torch.tensor([0.25, 0.75])), component),
        Exp() if dim is None else Affine(dim),
    )
    z = torch.tensor([-0.5, 0.25, 0.75, 2.0, 3.0])
    expected = 0.25 * ((z > 0) & (z < 1)) + 0.75 * ((z > 0.5) & (z < 2.5)) / 2.0 ** (dim or 1)
    x = z.exp() if dim is None else z[:, None].expand(-1, dim)
    expected = expected / z.exp() if dim is None else expected
    torch.testing.assert_close(flow.log_prob(x).exp(), expected)
    assert flow.support.check(x).tolist() == (expected > 0).tolist()
    assert bool(flow.log_prob(flow.sample((20,))).isfinite().all())


@pytest.mark.parametrize("sample_shape", [2.5, ("a",), [(1, 2)]])
def test_invalid_sample_shape_is_refused(sample_shape):
    flow = Flow(DiagonalNormal(torch.zeros(2), torch.ones(2)), Planar(2))
    for draw in (flow.sample, flow.rsample, flow.rsample_and_log_prob):
        with pytest.raises(FlowBNNError) as error:
            draw(sample_shape)
        assert error.value.argument == "sample_shape"
