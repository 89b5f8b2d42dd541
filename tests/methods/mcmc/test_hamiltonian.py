"""Tests of the kernels of HMC and Metropolis on known densities, and of the warm-up."""

import math
from functools import partial

import pytest
import torch
from chain_problems import assert_gaussian, exact_draws, gaussian, logistic

from flowbnn.methods.mcmc.chain_sampler import ChainSampler
from flowbnn.methods.mcmc.hamiltonian import (
    hmc_kernel,
    initial_state,
    kinetic_energy,
    leapfrog,
    make_potential,
    metropolis_kernel,
    nuts_kernel,
)
from flowbnn.methods.mcmc.warmup import Warmup, find_step_size, window_ends


def test_leapfrog_is_reversible():
    state = initial_state(gaussian, exact_draws(5, 0))
    momentum, size = torch.randn(5, 2, dtype=torch.float64), torch.full((5, 1), 0.3, dtype=torch.float64)
    mass = torch.tensor([1.0, 4.0], dtype=torch.float64).expand(5, 2)
    end, end_momentum = state, momentum
    for _ in range(20):
        end, end_momentum = leapfrog(gaussian, end, end_momentum, size, mass)
    assert (end.position - state.position).abs().max() > 0.5
    back, back_momentum = end, -end_momentum
    for _ in range(20):
        back, back_momentum = leapfrog(gaussian, back, back_momentum, size, mass)
    assert torch.allclose(back.position, state.position, atol=1e-11)
    assert torch.allclose(back_momentum, -momentum, atol=1e-11)


def test_energy_error_is_of_second_order():
    def error(size: float) -> torch.Tensor:
        state, momentum = (
            initial_state(logistic, torch.full((1, 1), 1.5, dtype=torch.float64)),
            torch.ones(1, 1).double(),
        )
        ones = torch.ones(1, 1, dtype=torch.float64)
        before = state.energy + kinetic_energy(momentum, ones)
        for _ in range(round(1.6 / size)):
            state, momentum = leapfrog(logistic, state, momentum, size * ones, ones)
        return (state.energy + kinetic_energy(momentum, ones) - before).abs()

    for size in (0.2, 0.1, 0.05):
        assert error(size) / error(size / 2) == pytest.approx(4.0, rel=0.15)


@pytest.mark.parametrize(("steps", "size"), [(1, 0.9), (6, 0.7)])
def test_hmc_preserves_a_gaussian(steps, size):
    state = initial_state(gaussian, exact_draws(3000, 1))
    before = state.position
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        state, transition = hmc_kernel(gaussian, state, size, torch.tensor([1.0, 4.0]), steps, generator)
    assert 0.3 < transition.acceptance.mean() < 0.95  # some proposals are rejected
    assert (state.position != before).any(1).double().mean() > 0.5
    assert_gaussian(state.position)


def test_metropolis_preserves_a_gaussian_without_gradients():
    def wrong_gradient(position):
        energy, gradient = gaussian(position)
        return energy, torch.full_like(gradient, 7.0)

    state = initial_state(wrong_gradient, exact_draws(3000, 1))
    before, generator = state.position, torch.Generator().manual_seed(0)
    for _ in range(5):
        state, transition = metropolis_kernel(wrong_gradient, state, 0.8, torch.tensor([1.0, 4.0]), generator)
    assert 0.2 < transition.acceptance.mean() < 0.8
    assert (state.position != before).any(1).double().mean() > 0.8
    assert transition.gradients.tolist() == [1] * 3000
    assert_gaussian(state.position)


def test_metropolis_proposals_have_the_step_size():
    flat = make_potential(lambda q: 0.0 * q.sum(-1))  # accepts every proposal
    state = initial_state(flat, torch.zeros(20_000, 2, dtype=torch.float64))
    mass = torch.tensor([1.0, 9.0], dtype=torch.float64)
    after, transition = metropolis_kernel(flat, state, 0.5, mass, torch.Generator().manual_seed(0))
    assert transition.acceptance.eq(1.0).all()
    assert after.position.std(0).tolist() == pytest.approx([0.5, 1.5], rel=0.03)


def test_hmc_preserves_a_logistic_density():
    uniform = torch.rand(3000, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    state = initial_state(logistic, torch.logit(uniform))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        state, _ = hmc_kernel(logistic, state, 2.0, torch.ones(1), 3, generator)
    for values, expected in (
        (state.position, 0.0),
        (state.position**2, math.pi**2 / 3),
        ((state.position > 3.0).double(), 1 / (1 + math.exp(3.0))),
    ):
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(3000)


def test_chains_are_independent_of_each_other():
    starts = exact_draws(3, 4)
    counts = torch.tensor([2, 7, 4])

    def run(chains):
        generators = [torch.Generator().manual_seed(chain) for chain in chains]
        state = initial_state(gaussian, starts[chains])
        for _ in range(5):
            state, _ = hmc_kernel(gaussian, state, 0.4, torch.ones(2), counts[chains], generators)
        return state.position

    together = run([0, 1, 2])
    for chain in range(3):
        assert torch.allclose(run([chain])[0], together[chain], atol=1e-12)


def test_divergent_transition_is_rejected():
    state = initial_state(gaussian, exact_draws(4, 5))
    after, transition = hmc_kernel(gaussian, state, 50.0, torch.ones(2), 10, torch.Generator().manual_seed(0))
    assert transition.divergent.all()
    assert transition.acceptance.max() == 0.0
    assert torch.equal(after.position, state.position)


def test_windows_are_the_same_as_in_stan():
    assert window_ends(1000) == (75, [100, 150, 250, 450, 950])
    assert window_ends(150) == (75, [100])
    assert window_ends(200) == (75, [100, 150])


def test_warmup_finds_the_scales():
    scales = torch.tensor([0.3, 1.0, 3.0], dtype=torch.float64)
    potential = make_potential(lambda q: 0.5 * (q / scales).square().sum(-1))
    starts = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scales
    generators = [torch.Generator().manual_seed(chain) for chain in range(8)]

    def kernel(state, size, mass, generators):
        return hmc_kernel(potential, state, size, mass, 5, generators)

    sampler = ChainSampler(potential, kernel, starts, generators, warmup=200, samples=60, target=0.8)
    record = sampler.run(progress=False)
    ratio = sampler.warmup.inverse_mass.mean(0).sqrt() / scales
    assert ((ratio > 0.7) & (ratio < 1.4)).all()
    assert record["acceptance"].mean() > 0.75
    assert not record["divergent"].any()


def test_extended_chains_continue_with_more_transitions_per_draw(tmp_path):
    def sampler(samples, path=None):
        generators = [torch.Generator().manual_seed(chain) for chain in range(2)]
        starts = torch.zeros(2, 2, dtype=torch.float64)
        kernel = partial(nuts_kernel, gaussian)
        return ChainSampler(gaussian, kernel, starts, generators, warmup=6, samples=samples, path=path)

    def extended(sampler):
        sampler.run(progress=False)
        sampler.extend()
        return sampler.run(progress=False)["position"]

    expected = sampler(5 + 10).run(progress=False)["position"][:, 6::2]
    assert torch.equal(extended(sampler(5)), expected)
    interrupted = sampler(5, tmp_path / "chains.safetensors")
    interrupted.run(progress=False)
    interrupted.extend()
    for _ in range(3):
        interrupted.advance(interrupted.number)
    interrupted.save(interrupted.snapshot())
    resumed = sampler(5, tmp_path / "chains.safetensors").run(resume=True, progress=False)["position"]
    assert torch.equal(resumed, expected)


def test_extended_chains_adapt_again_if_they_accept_too_little(tmp_path):
    """The density is narrow, and the chains have the step size of a wide one. A resumed warm-up ends at the same draws."""
    narrow = make_potential(lambda q: 0.5 * (100.0 * q).square().sum(-1))

    def kernel(state, size, mass, generators):
        return hmc_kernel(narrow, state, size, mass, 5, generators)

    def make_sampler(name):
        generators = [torch.Generator().manual_seed(chain) for chain in range(2)]
        starts, path = torch.zeros(2, 2, dtype=torch.float64), tmp_path / name
        return ChainSampler(narrow, kernel, starts, generators, warmup=60, samples=20, path=path)

    sampler = make_sampler("finished.safetensors")
    sampler.run(progress=False)
    sampler.extend()
    assert (sampler.warmup_start, sampler.first_draw) == (0, 80)  # they have accepted enough
    sampler.warmup.step_size = 100.0 * sampler.warmup.step_size
    assert sampler.run(progress=False)["acceptance"].mean() < 0.4
    sampler.extend()
    assert (sampler.warmup_start, sampler.first_draw) == (120, 180)
    sampler.advance(sampler.number)
    sampler.path = tmp_path / "interrupted.safetensors"
    sampler.save(sampler.snapshot())
    sampler.path = None
    record = sampler.run(progress=False)
    assert record["acceptance"].mean() > 0.6
    resumed = make_sampler("interrupted.safetensors").run(resume=True, progress=False)
    assert torch.equal(resumed["position"], record["position"])


@pytest.mark.parametrize("start", [0.01, 30.0])
def test_dual_averaging_reaches_its_target(start):
    """If a step of size e is accepted with probability exp(-e), the target 0.8 is reached at e = -log 0.8."""
    state = initial_state(gaussian, exact_draws(2, 6))
    warmup = Warmup(gaussian, [], state.position, 10_000, 0.8)
    warmup.ends = []
    warmup.center = torch.full((2,), math.log(start), dtype=torch.float64)
    for number in range(2000):
        warmup.update(number, state, torch.exp(-warmup.step_size))
    assert torch.allclose(warmup.average.exp(), torch.full((2,), -math.log(0.8)).double(), rtol=0.02)


def test_step_size_suits_the_steepest_chain():
    """Seven chains accept a step of size e with probability exp(-e), one with exp(-100 e).

    The latter is half of the target 0.8 at e = -log(0.4) / 100.
    """
    state, steep = initial_state(gaussian, exact_draws(8, 6)), torch.tensor([1.0] * 7 + [100.0]).double()
    warmup = Warmup(gaussian, [], state.position, 10_000, 0.8)
    warmup.ends = []
    for number in range(2000):
        warmup.update(number, state, torch.exp(-steep * warmup.step_size))
    assert torch.allclose(warmup.average.exp(), torch.full((8,), -math.log(0.4) / 100).double(), rtol=0.05)


def test_step_size_search_from_distant_guesses():
    state = initial_state(gaussian, exact_draws(2, 6))
    generators = [torch.Generator().manual_seed(chain) for chain in range(2)]
    mass = torch.ones(2, 2, dtype=torch.float64)
    for guess in (1e-6, 1e6):
        size = find_step_size(gaussian, state, mass, generators, torch.full((2,), guess, dtype=torch.float64))
        assert ((size > 0.05) & (size < 10.0)).all()


def test_warmup_state_is_restored():
    state = initial_state(gaussian, exact_draws(2, 6))
    generators = [torch.Generator().manual_seed(chain) for chain in range(2)]
    warmup, restored = (Warmup(gaussian, generators, state.position, 60, 0.8) for _ in range(2))
    warmup.restart(state)
    for number in range(10):
        warmup.update(number, state, torch.tensor([0.3, 0.9]))
    restored.load(warmup.state())
    for key, value in warmup.state().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(restored.state()[key])), key
