"""Flows of categories and integers: enumeration, exact inverses, straight-through gradients, and the map of Flow++."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import flowbnn as fb
from flowbnn.distributions import DiscretizedLogistic, DiscretizedLogisticBase
from flowbnn.distributions.discrete import discretized_logistic
from flowbnn.errors import FlowBNNError
from flowbnn.transforms import (
    Affine,
    Argmax,
    ChannelsFirst,
    Compose,
    Dequantization,
    Integers,
    IntegerShiftMap,
    Inverse,
    LogisticMixtureMap,
    ModularMap,
    OneHot,
    SigmoidalMap,
)

COVERED = (Integers, OneHot)


def perturb(flow: torch.nn.Module, size: float = 0.5) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in flow.parameters():
            if parameter.ndim:  # not the learned factors
                parameter += size * torch.randn(parameter.shape, generator=generator)
    return flow


def all_vectors(dim: int, categories: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(categories), repeat=dim)))


@pytest.mark.parametrize("kind", ["bipartite", "autoregressive"])
@pytest.mark.parametrize("learn_scale", [False, True])
def test_probabilities_of_categories_sum_to_one_and_the_inverse_is_exact(
    kind: str, learn_scale: bool
) -> None:
    torch.manual_seed(0)
    flow = perturb(
        fb.flows.DiscreteFlow(
            3, 4, context_dim=2, length=2, hidden=(8,), kind=kind, learn_scale=learn_scale
        ).double()
    )
    x, context = all_vectors(3, 4), torch.ones(2).double()
    probabilities = flow(context).log_prob(x).exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)
    assert not torch.allclose(probabilities, flow(-context).log_prob(x).exp())
    z, log_det = flow.transform.inverse(x, context)
    assert (log_det == 0).all()
    assert len(z.unique(dim=0)) == 64  # one to one
    assert torch.equal(flow.transform(z, context)[0], x)
    flow(context).log_prob(x[:9]).sum().backward()
    assert all((parameter.grad != 0).any() for parameter in flow.parameters())
    draws = flow(context).sample((20_000,))
    shares = torch.bincount((draws * torch.tensor([16, 4, 1])).sum(-1), minlength=64) / 20_000
    assert ((shares - probabilities).abs() < 5 * (probabilities / 20_000).sqrt() + 1e-4).all()


@pytest.mark.parametrize(
    ("call", "number", "hint"),
    [
        (lambda: Integers().inverse(torch.tensor([2**23 + 1])), 2**23 + 1, ".double()"),
        (lambda: fb.flows.IDF(2).bfloat16()().log_prob(torch.tensor([[3, 255]])), 255, ".float()"),
        (lambda: fb.flows.IDF(2)().log_prob(torch.tensor([[3, -(2**25)]])), -(2**25), ".double()"),
        (lambda: Dequantization().inverse(torch.tensor([2**18])), 2**18, ".double()"),
        (lambda: Dequantization(4).inverse(torch.tensor([0, 4])), 4, ""),
        (lambda: Dequantization(256).half().inverse(torch.tensor([17])), 17, ".float()"),
        (lambda: OneHot(2, 3).inverse(torch.tensor([0, 3])), 3, ""),
        (lambda: Argmax(2, 3).inverse(torch.tensor([0, -1])), -1, ""),
    ],
)
def test_integers_outside_the_levels_or_the_precision_raise(call, number: int, hint: str) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.fields["value"]) == ("range", number)
    assert hint in str(caught.value)


def test_integers_within_the_precision_are_exact() -> None:
    cases = ((Integers(), 2**23), (Integers().double(), 2**52), (Dequantization(), 2**17))
    for transform, limit in cases:
        x = torch.tensor([-limit, 1 - limit, limit - 1, limit])
        assert torch.equal(transform(transform.inverse(x)[0])[0], x)
    pixels = torch.tensor([0, 255], dtype=torch.uint8)
    assert torch.equal(Integers().inverse(pixels)[0], torch.tensor([0.0, 255.0]))


def test_compositions_declare_integers_of_base_and_sample() -> None:
    inverse = Inverse(Integers())
    assert (inverse.discrete, inverse.discrete_base) == (False, True)
    assert Inverse(inverse).discrete
    assert Compose(Integers(), ChannelsFirst()).discrete
    assert not Compose(Integers(), Inverse(Integers())).discrete
    assert Compose(Inverse(Dequantization()), Affine(1)).discrete_base


def test_modular_map_equals_modular_arithmetic() -> None:
    modular = ModularMap(6, learn_scale=True)
    for z, shift, scale in itertools.product(range(6), range(6), (0, 1)):
        logits = torch.zeros(2, 6)
        logits[0, shift] = logits[1, (1, 5)[scale]] = 1.0
        x, _ = modular.forward(torch.eye(6)[z], logits.flatten())
        assert x.argmax() == ((1, 5)[scale] * z + shift) % 6
        assert torch.equal(modular.inverse(x, logits.flatten())[0], torch.eye(6)[z])


@pytest.mark.parametrize("context_dim", [0, 2])
def test_probabilities_of_integers_sum_to_one(context_dim: int) -> None:
    torch.manual_seed(0)
    flow = perturb(fb.flows.IDF(2, context_dim, length=2, hidden=(8,), values=8, components=2).double(), 0.5)
    flow.base.raw.data *= 0.08  # most of its mass is on the integers below
    side = torch.arange(-60, 70)
    context = torch.ones(2).double() if context_dim else None
    log_prob = flow(context).log_prob(torch.cartesian_prod(side, side))
    assert log_prob.exp().sum().item() == pytest.approx(1, abs=1e-6)
    x = flow(context).sample((50,))
    assert not torch.equal(flow.transform.inverse(x, context)[0], x.double())
    assert torch.equal(flow.transform(flow.transform.inverse(x, context)[0], context)[0], x)
    assert not flow(context).has_rsample


def test_integer_images_have_exact_inverses_and_gradients() -> None:
    torch.manual_seed(0)
    flow = perturb(fb.flows.IDF((1, 4, 4), 3, length=1, hidden=(4,), levels=2), 0.1)
    x, context = torch.randint(256, (6, 1, 4, 4)), torch.randn(6, 3)
    split = flow.transform[0]
    z = flow.transform.inverse(x, context)[0]
    assert z.shape == (6, split.dim)
    assert torch.equal(z, z.round())
    assert not flow.transform.lower_bound
    log_prob = flow(context).log_prob(x)
    log_prob.sum().backward()
    assert log_prob.shape == (6,)
    assert all((parameter.grad != 0).any() for parameter in flow.parameters())
    assert flow(context).sample().shape == x.shape


def test_zeros_map_to_zeros_for_any_parameters() -> None:
    """If a training step could move the background of all images by one, training would diverge."""
    torch.manual_seed(0)
    flow = perturb(fb.flows.IDF((1, 16, 16), length=2, hidden=(4, 4), levels=1))
    image = torch.zeros(2, 1, 16, 16, dtype=torch.long)
    image[1, 0, 2:14, 2:14] = 200
    black, white = flow.transform.inverse(image)[0]
    assert (black == 0).all()
    assert not torch.isin(white, torch.tensor([0.0, 200.0])).all()


@pytest.mark.slow
def test_couplings_of_integers_learn_neighbours_quickly() -> None:
    """With a fixed small gain thousands of steps are needed to reach the differences of neighbouring pixels."""
    torch.manual_seed(0)
    x = (torch.randint(40, 200, (256, 1, 1, 1)) + 2 * torch.randn(256, 1, 8, 8)).round().long()
    flow = fb.flows.IDF((1, 8, 8), length=4, hidden=(16, 16), levels=2, data_init=True)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    for step in range(60):
        loss = -flow().log_prob(x[torch.arange(32) + 32 * (step % 8)]).mean() / (64 * math.log(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 5.2  # bits; 5.5 with a fixed gain, 7.3 for independent pixels


def test_rounding_passes_gradients_straight_through() -> None:
    shift = torch.tensor([0.3, -0.24], requires_grad=True)
    x, _ = IntegerShiftMap(10.0).forward(torch.tensor([1.0, 7.0]), shift)
    assert x.tolist() == [4.0, 5.0]
    assert torch.autograd.grad(x.sum(), shift)[0].tolist() == [10.0, 10.0]


def test_discretized_logistic_base_is_fitted_to_the_first_batch() -> None:
    """Pixels that are nearly always 0 then cost hundredths of a bit from the first step on."""
    base = DiscretizedLogisticBase(2, data_init=True)
    dark, uniform = 200.0 * (torch.arange(500) % 100 == 0), torch.arange(500.0) % 100
    pixels = torch.stack([dark, uniform], -1)
    assert base.eval()().log_prob(pixels).mean() < -10.0  # not initialized in evaluation mode
    loss = -base.train().distribution().expand((1,)).log_prob(pixels).mean()
    assert float(loss.detach()) < 0.056 + math.log(100) + 0.2  # the entropies, in nats
    loss.backward()
    assert base.raw.grad.isfinite().all()
    raw = base.raw.detach().clone()
    other = DiscretizedLogisticBase(2, data_init=True)
    other.load_state_dict(base.state_dict())
    for initialized in (base, other):
        initialized().log_prob(pixels + 7.0)
        assert torch.equal(initialized.raw, raw)


def test_noise_of_split_integers_is_fitted_to_data_and_depends_on_the_others() -> None:
    torch.manual_seed(0)
    flow = fb.flows.IDF((1, 4, 4), length=1, hidden=(4,), levels=2, components=2, data_init=True).double()
    x = 100 + 5 * torch.randn(64, 1, 4, 4).round().long()
    assert flow().log_prob(x).mean() > -16 * 4.5  # 16 * 7 without data_init
    *_, noise = (each.noise for each in flow.transform[0] if hasattr(each, "noise"))
    perturb(noise.net, 0.1)
    inputs = torch.randn(3, 2, 2, 2).double()
    integers = torch.arange(-2000.0, 2000.0).double().expand(2, 2, 2, 4000).movedim(-1, 0).unsqueeze(1)
    shares = noise(inputs).joint(integers).logsumexp(-1).exp().sum(0)  # for three images and eight integers
    torch.testing.assert_close(shares, torch.ones_like(shares), rtol=0.0, atol=1e-9)
    assert not torch.equal(noise(inputs).loc[0], noise(inputs).loc[1])


def test_cost_of_an_unexpected_integer_is_bounded() -> None:
    """Without the broad component a white pixel where black is expected costs thousands of bits and dominates the gradient."""
    locations, scales, logits = (
        [-0.25, -0.75],
        [-20.0, -20.0],
        [0.0, 0.0],
    )  # all at 0, with the smallest scale
    raw = torch.tensor([*locations, *scales, *logits]).double().requires_grad_()
    z = torch.arange(-3000, 3300).double().unsqueeze(-1)
    log_prob = discretized_logistic(raw, 2, 256.0).log_prob(z)
    assert log_prob.exp().sum().item() == pytest.approx(1, abs=1e-12)
    bits = -log_prob.detach() / math.log(2.0)
    assert bits[3000] < 4e-3
    assert bits[3001:3256].max() < 24.0  # 46,000 without the broad component
    (slope,) = torch.autograd.grad(log_prob[3001:3256].sum(), raw)
    assert slope.abs().max() < 256 * 16  # 4e6 without the broad component


def test_discretized_logistic_is_a_difference_of_distribution_functions() -> None:
    loc, scale, logits = torch.tensor([[[1.3, -4.0]], [[0.7, 2.0]], [[0.2, 1.0]]]).double()
    integers = DiscretizedLogistic(loc, scale, logits)
    z = torch.arange(-30, 30).double().unsqueeze(-1)
    weights = logits.softmax(-1)
    expected = weights * (torch.sigmoid((z + 0.5 - loc) / scale) - torch.sigmoid((z - 0.5 - loc) / scale))
    torch.testing.assert_close(integers.log_prob(z).exp(), expected.sum(-1), rtol=1e-9, atol=1e-15)
    assert integers.log_prob(torch.tensor([1e4]).double()).isfinite()
    draws = integers.sample((20_000,))
    mean = (weights * loc).sum()
    assert abs(draws.mean() - mean) < 5 * draws.std() / 20_000**0.5
    assert torch.equal(draws, draws.round())


def test_logistic_mixture_map_has_implicit_gradients() -> None:
    mixture = LogisticMixtureMap(components=3)
    generator = torch.Generator().manual_seed(1)
    parameters = torch.randn(5, 2 * 11, generator=generator, dtype=torch.float64)
    value = 3 * torch.randn(5, 2, generator=generator, dtype=torch.float64)
    for forward, back in ((mixture.forward, mixture.inverse), (mixture.inverse, mixture.forward)):
        point = value.clone().requires_grad_()
        image, log_slope = forward(point, parameters)
        torch.testing.assert_close(back(image, parameters)[0], value, rtol=1e-9, atol=1e-9)
        slope = torch.autograd.grad(image.sum(), point)[0]
        torch.testing.assert_close(log_slope, slope.log(), rtol=1e-8, atol=1e-8)
        leaf = parameters[:1].clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda parameters, forward=forward: forward(value[:1], parameters), leaf, atol=1e-5
        )


@pytest.mark.parametrize("kind", [LogisticMixtureMap, SigmoidalMap])
def test_slopes_of_mixtures_are_accurate_far_out(kind: type[LogisticMixtureMap]) -> None:
    mixture = kind(3)
    parameters = torch.randn(6, mixture.params_per_entry, generator=torch.Generator().manual_seed(0))
    distant = torch.tensor([[-1e10], [-1e6], [-1e4], [1e4], [1e6], [1e10]])
    for direction in (mixture.forward, mixture.inverse):
        log_slope = direction(distant, parameters)[1]
        exact = direction(distant.double(), parameters.double())[1]
        torch.testing.assert_close(log_slope.double(), exact, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: fb.flows.IDF(2)().log_prob(torch.rand(2)), "dtype", None),
        (lambda: fb.flows.DiscreteFlow(2, 3)().log_prob(torch.rand(2)), "dtype", None),
        (lambda: fb.flows.DiscreteFlow(2, 3)().log_prob(torch.ones(3).long()), "shape", None),
        (lambda: fb.flows.IDF(2, base=fb.distributions.NormalBase(3)), "shape", "base"),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


def test_categories_outside_the_range_have_probability_zero_and_no_rsample() -> None:
    flow = fb.flows.DiscreteFlow(2, 3, length=1)
    assert flow().log_prob(torch.tensor([0, 3])) == -torch.inf
    with pytest.raises(NotImplementedError):
        flow().rsample()


def test_sampling_zero_draws_gives_an_empty_tensor() -> None:
    assert fb.flows.IDF(2)().sample((0,)).shape == fb.flows.DiscreteFlow(2, 3)().sample((0,)).shape == (0, 2)
