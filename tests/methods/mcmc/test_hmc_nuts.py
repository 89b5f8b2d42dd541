"""Tests of NUTS: its kernel on known densities, its tree against a recursive one, and networks."""

import math
import warnings

import pytest
import torch
from chain_problems import assert_gaussian, assert_recovered, exact_draws, gaussian, logistic
from method_cases import fitted_line
from problems import conjugate
from small_problem import QUIET, blobs, network

import flowbnn as fb
from flowbnn.methods.mcmc.hamiltonian import (
    _Subtree,
    has_turned,
    initial_state,
    leapfrog,
    make_potential,
    nuts_kernel,
)


def test_nuts_preserves_a_gaussian():
    state = initial_state(gaussian, exact_draws(2000, 1))
    before, generator = state.position, torch.Generator().manual_seed(0)
    for _ in range(3):
        state, transition = nuts_kernel(gaussian, state, 0.6, torch.tensor([1.0, 4.0]), generator)
    assert (state.position != before).any(1).double().mean() > 0.9
    assert transition.depth.double().mean() > 1.5  # trees of several levels
    assert_gaussian(state.position)


def test_nuts_preserves_a_logistic_density():
    uniform = torch.rand(2000, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    state, generator = initial_state(logistic, torch.logit(uniform)), torch.Generator().manual_seed(0)
    for _ in range(3):
        state, _ = nuts_kernel(logistic, state, 1.5, torch.ones(1), generator)
    for values, expected in (
        (state.position, 0.0),
        (state.position**2, math.pi**2 / 3),
        ((state.position > 3.0).double(), 1 / (1 + math.exp(3.0))),
    ):
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(2000)


@pytest.mark.parametrize("size", [0.1, 0.2])
def test_nuts_preserves_a_narrow_banana(size):
    """The smaller step size suits its middle, the larger one diverges in its tails."""
    noise = torch.randn(3000, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    banana = make_potential(lambda q: 0.5 * (q[:, 0] ** 2 + ((q[:, 1] - q[:, 0] ** 2) / 0.3) ** 2))
    state = initial_state(banana, torch.stack([noise[:, 0], noise[:, 0] ** 2 + 0.3 * noise[:, 1]], 1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        state, _ = nuts_kernel(banana, state, size, torch.tensor([1.0, 2.09]), generator)
    x, y = state.position.unbind(1)
    for values, expected in (
        (x, 0.0),
        (x**2, 1.0),
        (x**4, 3.0),
        ((y - 1) ** 2, 2.09),
        ((y - x**2) ** 2, 0.09),
    ):
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(3000)


def turns_recursively(momenta: list[torch.Tensor]) -> bool:
    """Returns True if a binary tree of leaves, or one of its subtrees, turns, by the recursive definition."""
    if len(momenta) == 1:
        return False
    half = len(momenta) // 2
    if turns_recursively(momenta[:half]) or turns_recursively(momenta[half:]):
        return True
    ones = torch.ones(1, momenta[0].shape[-1], dtype=torch.float64)
    return bool(has_turned(momenta[0], momenta[-1], torch.stack(momenta).sum(0), ones))


@pytest.mark.parametrize("size", [0.05, 0.25, 0.4, -0.08])
def test_subtrees_equal_the_recursive_definition(size):
    """A doubling ends exactly if the recursive definition finds a turn in it, and ends at that leaf."""
    ended = []
    for seed in range(12):
        state = initial_state(gaussian, exact_draws(1, seed))
        momentum = torch.randn(1, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ones, column = torch.ones(1, 2, dtype=torch.float64), torch.full((1, 1), size, dtype=torch.float64)
        tree = _Subtree(state, momentum, ones, torch.zeros(1, dtype=torch.float64), level=4)
        tree.grow(gaussian, column, torch.zeros(1, 16, dtype=torch.float64))
        momenta, end = [], state
        for _ in range(16):
            end, momentum = leapfrog(gaussian, end, momentum, column, ones)
            momenta.append(momentum)
        assert (len(tree.active) == 0) == turns_recursively(momenta)
        ended.append(len(tree.active) == 0)
        if len(tree.active):
            assert torch.allclose(tree.momentum_sum, torch.stack(momenta).sum(0))
            assert torch.allclose(tree.end.position, end.position)
        else:
            turn = int(tree.num_leaves)
            complete = [
                momenta[low : low + 2**level]
                for level in range(1, 5)
                for low in range(0, 16, 2**level)
                if low + 2**level == turn
            ]
            assert any(turns_recursively(subtree) for subtree in complete)
    assert size != -0.08 or len(set(ended)) == 2  # these cases have both outcomes


def test_chains_are_independent_of_each_other():
    starts = exact_draws(3, 4)

    def run(chains):
        generators = [torch.Generator().manual_seed(chain) for chain in chains]
        state, gradients = initial_state(gaussian, starts[chains]), []
        for _ in range(6):
            state, transition = nuts_kernel(gaussian, state, 0.3, torch.ones(2), generators)
            gradients.append(transition.gradients)
        return state.position, torch.stack(gradients, 1)

    together, counts = run([0, 1, 2])
    assert len(set(counts.sum(1).tolist())) > 1  # their trees differ
    for chain in range(3):
        position, count = run([chain])
        assert torch.allclose(position[0], together[chain], atol=1e-12)
        assert torch.equal(count[0], counts[chain])


def test_trajectory_length_grows_with_the_width_up_to_the_depth():
    narrow, wide = (make_potential(lambda q, s=s: 0.5 * (q / s).square().sum(-1)) for s in (1.0, 16.0))
    lengths = []
    for potential in (narrow, wide):
        state = initial_state(potential, torch.zeros(20, 2, dtype=torch.float64))
        _, transition = nuts_kernel(potential, state, 0.4, torch.ones(2), torch.Generator().manual_seed(0))
        lengths.append(transition.gradients.double().mean().item())
    assert lengths[1] > 6 * lengths[0]
    state = initial_state(wide, torch.zeros(20, 2, dtype=torch.float64))
    _, transition = nuts_kernel(
        wide, state, 0.01, torch.ones(2), torch.Generator().manual_seed(0), max_depth=3
    )
    assert (transition.gradients == 7).all()
    assert (transition.depth == 3).all()


def test_divergent_transition_is_rejected():
    state = initial_state(gaussian, exact_draws(4, 5))
    after, transition = nuts_kernel(gaussian, state, 500.0, torch.ones(2), torch.Generator().manual_seed(0))
    assert transition.divergent.all()
    assert (transition.gradients == 1).all()
    assert torch.equal(after.position, state.position)


def test_conjugate_regression_is_exact():
    problem, posterior = conjugate(bias=True)[0], fitted_line("nuts")
    assert_recovered(posterior, problem.mean, problem.covariance)
    diagnostics = posterior.diagnostics()
    assert diagnostics.rhat_outputs < 1.05
    assert diagnostics.divergences == 0
    assert diagnostics.depth > 1.0


def test_network_posterior_is_accurate():
    inputs, labels = blobs().tensors
    method = fb.NUTS(samples=8, warmup=10, chains=2, max_depth=4, epochs=3, lr=0.03, prior_scale=0.5)
    posterior = method.fit(network(), [(inputs, labels)], seed=0, **QUIET)
    accuracy = (posterior.predict(inputs).probabilities.argmax(-1) == labels).double().mean()
    assert accuracy > 0.9
    assert posterior.record["depth"].max() <= 4
    assert repr(posterior) == "ChainPosterior(NUTS, 2 chains of 8 draws, Categorical())"


def test_repr_of_one_chain_is_singular():
    method = fb.NUTS(samples=1, warmup=1, chains=1, max_depth=1, epochs=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fb.FlowBNNWarning)
        posterior = method.fit(network(), [blobs().tensors], seed=0, **QUIET)
    assert repr(posterior) == "ChainPosterior(NUTS, 1 chain of 1 draw, Categorical())"
