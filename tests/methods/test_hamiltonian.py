"""The kernel of Hamiltonian Monte Carlo on densities that are known, and its warm-up."""

import math

import pytest
import torch
from chain_problems import assert_gaussian, exact_draws, gaussian, logistic

from flowbnn.methods.mcmc.hamiltonian import (
    begin,
    hmc_kernel,
    kinetic,
    leapfrog,
    metropolis_kernel,
    with_gradient,
)
from flowbnn.methods.mcmc.warmup import Chains, Warmup, reasonable_step, window_ends


def test_leapfrog_goes_back_the_way_it_came():
    state = begin(gaussian, exact_draws(5, 0))
    momentum, size = torch.randn(5, 2, dtype=torch.float64), torch.full((5, 1), 0.3, dtype=torch.float64)
    mass = torch.tensor([1.0, 4.0], dtype=torch.float64).expand(5, 2)
    there, kick = state, momentum
    for _ in range(20):
        there, kick = leapfrog(gaussian, there, kick, size, mass)
    assert (there.position - state.position).abs().max() > 0.5
    back, kick = there, -kick
    for _ in range(20):
        back, kick = leapfrog(gaussian, back, kick, size, mass)
    assert torch.allclose(back.position, state.position, atol=1e-11)
    assert torch.allclose(kick, -momentum, atol=1e-11)


def test_the_error_of_the_energy_is_of_second_order():
    def error(size: float) -> torch.Tensor:
        state, momentum = (
            begin(logistic, torch.full((1, 1), 1.5, dtype=torch.float64)),
            torch.ones(1, 1).double(),
        )
        ones = torch.ones(1, 1, dtype=torch.float64)
        before = state.energy + kinetic(momentum, ones)
        for _ in range(round(1.6 / size)):
            state, momentum = leapfrog(logistic, state, momentum, size * ones, ones)
        return (state.energy + kinetic(momentum, ones) - before).abs()

    for size in (0.2, 0.1, 0.05):
        assert error(size) / error(size / 2) == pytest.approx(4.0, rel=0.15)


@pytest.mark.parametrize(("steps", "size"), [(1, 0.9), (6, 0.7)])
def test_a_transition_leaves_a_gaussian_as_it_is(steps, size):
    state = begin(gaussian, exact_draws(3000, 1))
    before = state.position
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        state, transition = hmc_kernel(gaussian, state, size, torch.tensor([1.0, 4.0]), steps, generator)
    assert 0.3 < transition.acceptance.mean() < 0.95  # the accept step has something to do
    assert (state.position != before).any(1).double().mean() > 0.5
    assert_gaussian(state.position)


def test_a_random_walk_leaves_a_gaussian_as_it_is_and_needs_no_gradient():
    def blind(position):  # a gradient that would lead astray
        energy, gradient = gaussian(position)
        return energy, torch.full_like(gradient, 7.0)

    state = begin(blind, exact_draws(3000, 1))
    before, generator = state.position, torch.Generator().manual_seed(0)
    for _ in range(5):
        state, transition = metropolis_kernel(blind, state, 0.8, torch.tensor([1.0, 4.0]), generator)
    assert 0.2 < transition.acceptance.mean() < 0.8
    assert (state.position != before).any(1).double().mean() > 0.8
    assert transition.gradients.tolist() == [1] * 3000
    assert_gaussian(state.position)


def test_a_random_walk_makes_steps_of_the_size_it_is_given():
    flat = with_gradient(lambda q: 0.0 * q.sum(-1))  # where every proposal is accepted
    state = begin(flat, torch.zeros(20_000, 2, dtype=torch.float64))
    mass = torch.tensor([1.0, 9.0], dtype=torch.float64)
    moved, transition = metropolis_kernel(flat, state, 0.5, mass, torch.Generator().manual_seed(0))
    assert transition.acceptance.eq(1.0).all()
    assert moved.position.std(0).tolist() == pytest.approx([0.5, 1.5], rel=0.03)


def test_a_transition_leaves_a_logistic_density_as_it_is():
    uniform = torch.rand(3000, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    state = begin(logistic, torch.logit(uniform))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        state, _ = hmc_kernel(logistic, state, 2.0, torch.ones(1), 3, generator)
    for values, true in (
        (state.position, 0.0),
        (state.position**2, math.pi**2 / 3),
        ((state.position > 3.0).double(), 1 / (1 + math.exp(3.0))),
    ):
        assert abs(values.mean() - true) < 4 * values.std() / math.sqrt(3000)


def test_chains_do_not_disturb_each_other():
    starts = exact_draws(3, 4)
    counts = torch.tensor([2, 7, 4])

    def run(which):
        sources = [torch.Generator().manual_seed(chain) for chain in which]
        state = begin(gaussian, starts[which])
        for _ in range(5):
            state, _ = hmc_kernel(gaussian, state, 0.4, torch.ones(2), counts[which], sources)
        return state.position

    together = run([0, 1, 2])
    for chain in range(3):
        assert torch.allclose(run([chain])[0], together[chain], atol=1e-12)


def test_a_step_that_is_far_too_large_is_a_divergence_and_goes_nowhere():
    state = begin(gaussian, exact_draws(4, 5))
    after, transition = hmc_kernel(gaussian, state, 50.0, torch.ones(2), 10, torch.Generator().manual_seed(0))
    assert transition.divergent.all()
    assert transition.acceptance.max() == 0.0
    assert torch.equal(after.position, state.position)


# warm-up


def test_windows_are_those_of_stan():
    assert window_ends(1000) == (75, [100, 150, 250, 450, 950])
    assert window_ends(150) == (75, [100])
    assert window_ends(200) == (75, [100, 150])


def test_warmup_finds_the_scales():
    scales = torch.tensor([0.3, 1.0, 3.0], dtype=torch.float64)
    potential = with_gradient(lambda q: 0.5 * (q / scales).square().sum(-1))
    starts = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scales
    sources = [torch.Generator().manual_seed(chain) for chain in range(8)]

    def kernel(state, size, mass, given):
        return hmc_kernel(potential, state, size, mass, 5, given)

    chains = Chains(potential, kernel, starts, sources, warmup=200, samples=60, target=0.8)
    record = chains.run(progress=False)
    ratio = chains.adapting.inverse_mass.mean(0).sqrt() / scales
    assert ((ratio > 0.7) & (ratio < 1.4)).all()
    assert record["acceptance"].mean() > 0.75
    assert not record["divergent"].any()


@pytest.mark.parametrize("start", [0.01, 30.0])
def test_dual_averaging_comes_to_its_target(start):
    """Where a step of size e is accepted with probability exp(-e), the target 0.8 is met at e = -log 0.8."""
    state = begin(gaussian, exact_draws(2, 6))
    warmup = Warmup(gaussian, [], state.position, 10_000, 0.8)
    warmup.ends = []
    warmup.centre = torch.full((2,), math.log(start), dtype=torch.float64)
    for number in range(2000):
        warmup.update(number, state, torch.exp(-warmup.step_size))
    assert torch.allclose(warmup.smooth.exp(), torch.full((2,), -math.log(0.8)).double(), rtol=0.02)


def test_steps_suit_a_chain_where_the_density_is_steep():
    """Seven accept a step of size e with probability exp(-e), one with exp(-100 e), which is half of 0.8 at e = -log(0.4) / 100."""
    state, steep = begin(gaussian, exact_draws(8, 6)), torch.tensor([1.0] * 7 + [100.0]).double()
    warmup = Warmup(gaussian, [], state.position, 10_000, 0.8)
    warmup.ends = []
    for number in range(2000):
        warmup.update(number, state, torch.exp(-steep * warmup.step_size))
    assert torch.allclose(warmup.smooth.exp(), torch.full((8,), -math.log(0.4) / 100).double(), rtol=0.05)


def test_a_reasonable_step_is_found_from_afar():
    state = begin(gaussian, exact_draws(2, 6))
    sources = [torch.Generator().manual_seed(chain) for chain in range(2)]
    mass = torch.ones(2, 2, dtype=torch.float64)
    for guess in (1e-6, 1e6):
        size = reasonable_step(gaussian, state, mass, sources, torch.full((2,), guess, dtype=torch.float64))
        assert ((size > 0.05) & (size < 10.0)).all()


def test_warmup_is_put_back_from_its_state():
    state = begin(gaussian, exact_draws(2, 6))
    sources = [torch.Generator().manual_seed(chain) for chain in range(2)]
    one, other = (Warmup(gaussian, sources, state.position, 60, 0.8) for _ in range(2))
    one.restart(state)
    for number in range(10):
        one.update(number, state, torch.tensor([0.3, 0.9]))
    other.load(one.state())
    for key, value in one.state().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state()[key])), key
