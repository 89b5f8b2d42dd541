"""Variance of the KL estimate, and closed forms for torch's kl_divergence."""

import math

import pytest
import torch
from torch import distributions as D
from torch.distributions import Categorical, Independent, Laplace, MultivariateNormal, Normal, kl_divergence

from flowbnn.distributions import DiagonalNormal, Flow, MixtureBase, NormalMixture, divergence
from flowbnn.errors import FlowBNNError
from flowbnn.transforms import Affine, AffineCoupling, Compose, LULinear, Planar, Reverse

DOUBLE = torch.float64


def normal(dim: int, loc: float = 1.0, scale: float = 0.5) -> DiagonalNormal:
    return DiagonalNormal(torch.full((dim,), loc, dtype=DOUBLE), torch.full((dim,), scale, dtype=DOUBLE))


def near_identity(dim: int) -> Planar:
    planar = Planar(dim, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():  # closer to u = log(e - 1) w, at which the map is the identity along w
        planar.u.lerp_(math.log(math.e - 1.0) * planar.w, 0.8)
    return planar.requires_grad_(False)


def test_terms_of_the_kl_cancel_for_each_draw_near_the_prior():
    """An exact entropy with a sampled cross-entropy has a standard deviation of 1.41 here for any flow."""
    dim, draws = 64, 16
    q, prior = Flow(normal(dim), near_identity(dim)), normal(dim)
    generator = torch.Generator().manual_seed(1)
    paired, unpaired = [], []
    for _ in range(200):
        state = generator.get_state()
        paired.append(divergence(q, prior, draws, generator).kl)
        x, log_det = q.transform(q.base.rsample((draws,), generator.set_state(state)))
        unpaired.append((-prior.log_prob(x) - log_det).mean(0) - q.base.entropy())
    paired, unpaired = torch.stack(paired), torch.stack(unpaired)
    assert unpaired.std() == pytest.approx((dim / 2 / draws) ** 0.5, rel=0.2)
    assert paired.std() < 0.15 * unpaired.std()
    error = (unpaired - paired).mean() / (unpaired - paired).std() * 200**0.5
    assert error.abs() < 4, "both must estimate the same number"


@pytest.mark.parametrize("base", [normal(8), Independent(Normal(normal(8).loc, normal(8).scale), 1)])
def test_kl_of_the_identity_is_zero_without_noise(base):
    """A coupling starts at the identity, where one draw is exact. The entropy equals that of the base."""
    coupling = AffineCoupling(8).double()
    assert coupling.linearity == "none"
    result = divergence(Flow(base, coupling), normal(8), samples=1)
    assert result.kl.abs() < 1e-12
    torch.testing.assert_close(result.entropy, normal(8).entropy(), rtol=0, atol=1e-12)


def test_terms_cancel_for_a_prior_without_closed_form():
    mixture = NormalMixture(torch.ones(2, 64, dtype=DOUBLE), torch.full((2, 64), 0.5, dtype=DOUBLE))
    q = Flow(normal(64), Affine(64).double())
    result = divergence(q, mixture, samples=4)
    assert result.kl.abs() < 1e-10
    torch.testing.assert_close(result.entropy, normal(64).entropy(), rtol=0, atol=1e-12)
    assert divergence(normal(64), mixture, samples=4).kl.abs() < 1e-10


def test_gradients_equal_those_of_the_mixed_estimate():
    """The log-density of a fixed base at its own draws has no gradient."""
    q, prior = Flow(normal(5), Planar(5).double()), normal(5, 0.5, 0.8)
    parameters = list(q.transform.parameters())
    result = divergence(q, prior, 8, torch.Generator().manual_seed(0)).kl
    x, log_det = q.transform(q.base.rsample((8,), torch.Generator().manual_seed(0)))
    unpaired = (-prior.log_prob(x) - log_det).mean(0)
    for first, second in zip(
        torch.autograd.grad(result, parameters), torch.autograd.grad(unpaired, parameters), strict=True
    ):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


# --- closed forms -------------------------------------------------------------------------------------------------------

GENERATOR = torch.Generator().manual_seed(5)
Q_LOC, P_LOC = (torch.randn(2, 3, generator=GENERATOR, dtype=DOUBLE) for _ in range(2))
Q_SCALE, P_SCALE = (torch.rand(2, 3, generator=GENERATOR, dtype=DOUBLE) + 0.3 for _ in range(2))


def perturbed_affine(dim: int = 3) -> Affine:
    affine = Affine(dim).double()
    with torch.no_grad():
        for parameter in affine.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=GENERATOR, dtype=DOUBLE))
    return affine


def same_as(loc: torch.Tensor, scale: torch.Tensor, kind: str):
    if kind == "ours":
        return DiagonalNormal(loc, scale)
    if kind == "torch":
        return Independent(Normal(loc, scale), 1)
    affine = perturbed_affine()
    factor = affine.log_scale.exp()
    base_loc, base_scale = (loc - affine.shift) / factor, scale / factor
    if kind == "flow of a batch":
        return Flow(Normal(base_loc, base_scale), affine)
    return Flow(Independent(Normal(base_loc, base_scale), 1), affine)


@pytest.mark.parametrize("q_kind", ["ours", "torch", "flow", "flow of a batch"])
@pytest.mark.parametrize("p_kind", ["ours", "torch", "flow", "flow of a batch"])
def test_kl_of_every_pair_of_normals_equals_torch(q_kind, p_kind):
    q, p = same_as(Q_LOC, Q_SCALE, q_kind), same_as(P_LOC, P_SCALE, p_kind)
    plain_q, plain_p = same_as(Q_LOC, Q_SCALE, "torch"), same_as(P_LOC, P_SCALE, "torch")
    expected = kl_divergence(plain_q, plain_p)
    torch.testing.assert_close(kl_divergence(q, p), expected, rtol=0, atol=1e-12)
    result = divergence(q, p)
    torch.testing.assert_close(result.kl, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.entropy, plain_q.entropy(), rtol=0, atol=1e-12)


def test_kl_of_a_full_matrix_on_torch_normals():
    transform = Compose(perturbed_affine(), LULinear(3, init_std=0.5).double(), Reverse(3)).requires_grad_(
        False
    )
    q = Flow(Independent(Normal(Q_LOC, Q_SCALE), 1), transform)
    offset = transform(torch.zeros(3, dtype=DOUBLE))[0]
    matrix = (transform(torch.eye(3, dtype=DOUBLE))[0] - offset).T
    plain = MultivariateNormal(Q_LOC @ matrix.T + offset, matrix @ torch.diag_embed(Q_SCALE**2) @ matrix.T)
    expected = kl_divergence(plain, MultivariateNormal(P_LOC, torch.diag_embed(P_SCALE**2)))
    actual = kl_divergence(q, Independent(Normal(P_LOC, P_SCALE), 1))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def test_kl_is_unchanged_by_a_common_bijection():
    planar = near_identity(3)
    q, p = Flow(Normal(Q_LOC, Q_SCALE), planar), Flow(Normal(P_LOC, P_SCALE), planar)
    expected = kl_divergence(Normal(Q_LOC, Q_SCALE), Normal(P_LOC, P_SCALE)).sum(-1)
    torch.testing.assert_close(kl_divergence(q, p), expected, rtol=0, atol=1e-12)


def test_batches_of_numbers_have_one_kl_each():
    """The KL of two batches of numbers has a value for each number."""
    q, p = Normal(Q_LOC[0], Q_SCALE[0]), Normal(P_LOC[0], P_SCALE[0])
    torch.manual_seed(0)
    count = 20_000
    x = q.sample((count,))
    error = (q.log_prob(x) - p.log_prob(x)).std(0) / count**0.5
    estimate = divergence(q, p, samples=count).kl
    assert estimate.shape == (3,)
    assert ((estimate - kl_divergence(q, p)).abs() < 4 * error).all()


@pytest.mark.parametrize(
    "pair",
    [
        (Flow(normal(3), near_identity(3)), normal(3)),
        (Flow(normal(3), near_identity(3)), Independent(Normal(P_LOC, P_SCALE), 1)),
        (Flow(normal(3), Affine(3)), Independent(Laplace(P_LOC, P_SCALE), 1)),
        (Independent(Laplace(P_LOC, P_SCALE), 1), normal(3)),
        (normal(3), Flow(normal(3), near_identity(3))),
    ],
)
def test_pairs_without_closed_form_raise_and_name_the_estimator(pair):
    with pytest.raises(NotImplementedError) as caught:
        kl_divergence(*pair)
    assert "divergence(q, p, samples=...)" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: divergence(normal(3), normal(1)), "shape", "prior"),
        (
            lambda: divergence(
                Independent(Laplace(P_LOC, P_SCALE), 1), normal(3), generator=torch.Generator()
            ),
            "unsupported",
            "generator",
        ),
    ],
)
def test_bad_input_raises(call, kind, argument):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "make"),
    [
        pytest.param("normal", Planar, marks=pytest.mark.slow),
        ("normal", LULinear),
        pytest.param("torch", Planar, marks=pytest.mark.slow),
        pytest.param("mixture", Affine, marks=pytest.mark.slow),
    ],
)
def test_divergence_compiles_without_a_graph_break(base, make):
    transform, prior = make(3), DiagonalNormal(torch.ones(3), torch.full((3,), 0.5))
    mixture = MixtureBase(3, 2)

    def total() -> torch.Tensor:
        start = {
            "normal": prior,
            "torch": Independent(Normal(prior.loc, prior.scale, validate_args=False), 1, validate_args=False),
            "mixture": mixture.distribution(),
        }[base]
        return sum(divergence(Flow(start, transform), prior))

    torch._dynamo.reset()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager" if make is LULinear else "eager")
    torch.manual_seed(0)
    actual = compiled()
    torch.manual_seed(0)
    torch.testing.assert_close(actual, total())


@pytest.mark.parametrize("prior", [D.Uniform(0.0, 1.0), D.Gamma(1.0, 1.0)])
def test_priors_with_a_smaller_support_are_refused(prior):
    with pytest.raises(FlowBNNError) as caught:
        divergence(D.Normal(0.0, 1.0), prior)
    assert (caught.value.kind, caught.value.argument) == ("range", "prior")
    assert "\n" not in str(caught.value)


def test_divergence_to_a_mixture_with_gaps():
    uniforms = D.Uniform(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0]))
    mixture = D.MixtureSameFamily(D.Categorical(torch.tensor([0.5, 0.5])), uniforms)
    assert divergence(D.Uniform(0.0, 1.0), mixture, samples=4).kl.item() == pytest.approx(math.log(2.0))
    assert divergence(D.Normal(0.0, 1.0), mixture, samples=64).kl.item() == math.inf


def test_divergence_needs_reparameterized_draws():
    q = Categorical(torch.ones(3))
    with pytest.raises(FlowBNNError) as caught:
        divergence(q, q)
    assert (caught.value.kind, caught.value.argument) == ("unsupported", "q")


@pytest.mark.parametrize(
    ("prior", "kind"), [("normal", "value"), (None, "value"), (Categorical(torch.ones(3)), "shape")]
)
def test_divergence_to_another_type_is_refused(prior, kind):
    with pytest.raises(FlowBNNError) as caught:
        divergence(DiagonalNormal(torch.zeros(3), torch.ones(3)), prior)
    assert (caught.value.kind, caught.value.argument) == (kind, "prior")
