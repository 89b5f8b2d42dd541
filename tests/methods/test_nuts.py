"""The No-U-Turn sampler: its kernel on densities that are known, its tree against a recursive one, and networks."""

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
    begin,
    leapfrog,
    nuts_kernel,
    turning,
    with_gradient,
)


def test_a_transition_leaves_a_gaussian_as_it_is():
    state = begin(gaussian, exact_draws(2000, 1))
    before, generator = state.position, torch.Generator().manual_seed(0)
    for _ in range(3):
        state, transition = nuts_kernel(gaussian, state, 0.6, torch.tensor([1.0, 4.0]), generator)
    assert (state.position != before).any(1).double().mean() > 0.9
    assert transition.depth.double().mean() > 1.5  # trees that have something to turn
    assert_gaussian(state.position)


def test_a_transition_leaves_a_logistic_density_as_it_is():
    uniform = torch.rand(2000, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    state, generator = begin(logistic, torch.logit(uniform)), torch.Generator().manual_seed(0)
    for _ in range(3):
        state, _ = nuts_kernel(logistic, state, 1.5, torch.ones(1), generator)
    for values, true in (
        (state.position, 0.0),
        (state.position**2, math.pi**2 / 3),
        ((state.position > 3.0).double(), 1 / (1 + math.exp(3.0))),
    ):
        assert abs(values.mean() - true) < 4 * values.std() / math.sqrt(2000)


@pytest.mark.parametrize("size", [0.1, 0.2])
def test_a_transition_leaves_a_narrow_banana_as_it_is(size):
    """At a step size for its middle and at one that its tails diverge at."""
    noise = torch.randn(3000, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    banana = with_gradient(lambda q: 0.5 * (q[:, 0] ** 2 + ((q[:, 1] - q[:, 0] ** 2) / 0.3) ** 2))
    state = begin(banana, torch.stack([noise[:, 0], noise[:, 0] ** 2 + 0.3 * noise[:, 1]], 1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        state, _ = nuts_kernel(banana, state, size, torch.tensor([1.0, 2.09]), generator)
    x, y = state.position.unbind(1)
    for values, true in ((x, 0.0), (x**2, 1.0), (x**4, 3.0), ((y - 1) ** 2, 2.09), ((y - x**2) ** 2, 0.09)):
        assert abs(values.mean() - true) < 4 * values.std() / math.sqrt(3000)


def turns_recursively(momenta: list[torch.Tensor]) -> bool:
    """Whether a whole binary tree of leaves, or one of its subtrees, turns back, by the definition."""
    if len(momenta) == 1:
        return False
    half = len(momenta) // 2
    if turns_recursively(momenta[:half]) or turns_recursively(momenta[half:]):
        return True
    ones = torch.ones(1, momenta[0].shape[-1], dtype=torch.float64)
    return bool(turning(momenta[0], momenta[-1], torch.stack(momenta).sum(0), ones))


@pytest.mark.parametrize("size", [0.05, 0.25, 0.4, -0.08])
def test_the_subtrees_are_those_of_the_recursion(size):
    """A doubling is given up exactly when the recursive definition finds a turn in it, and has then stopped at that leaf."""
    ended = []
    for seed in range(12):
        state = begin(gaussian, exact_draws(1, seed))
        momentum = torch.randn(1, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ones, column = torch.ones(1, 2, dtype=torch.float64), torch.full((1, 1), size, dtype=torch.float64)
        tree = _Subtree(state, momentum, ones, torch.zeros(1, dtype=torch.float64), level=4)
        tree.grow(gaussian, column, torch.zeros(1, 16, dtype=torch.float64))
        momenta, end, kick = [], state, momentum
        for _ in range(16):
            end, kick = leapfrog(gaussian, end, kick, column, ones)
            momenta.append(kick)
        assert (len(tree.live) == 0) == turns_recursively(momenta)
        ended.append(len(tree.live) == 0)
        if len(tree.live):
            assert torch.allclose(tree.total, torch.stack(momenta).sum(0))
            assert torch.allclose(tree.end.position, end.position)
        else:
            turn = int(tree.leaves)
            complete = [
                momenta[low : low + 2**level]
                for level in range(1, 5)
                for low in range(0, 16, 2**level)
                if low + 2**level == turn
            ]
            assert any(turns_recursively(part) for part in complete)
    assert size != -0.08 or len(set(ended)) == 2  # both outcomes are among these cases


def test_chains_do_not_disturb_each_other():
    starts = exact_draws(3, 4)

    def run(which):
        sources = [torch.Generator().manual_seed(chain) for chain in which]
        state, gradients = begin(gaussian, starts[which]), []
        for _ in range(6):
            state, transition = nuts_kernel(gaussian, state, 0.3, torch.ones(2), sources)
            gradients.append(transition.gradients)
        return state.position, torch.stack(gradients, 1)

    together, counts = run([0, 1, 2])
    assert len(set(counts.sum(1).tolist())) > 1  # their trees differ
    for chain in range(3):
        position, count = run([chain])
        assert torch.allclose(position[0], together[chain], atol=1e-12)
        assert torch.equal(count[0], counts[chain])


def test_trajectories_grow_with_the_width_and_stop_at_the_depth():
    narrow, wide = (with_gradient(lambda q, s=s: 0.5 * (q / s).square().sum(-1)) for s in (1.0, 16.0))
    lengths = []
    for potential in (narrow, wide):
        state = begin(potential, torch.zeros(20, 2, dtype=torch.float64))
        _, transition = nuts_kernel(potential, state, 0.4, torch.ones(2), torch.Generator().manual_seed(0))
        lengths.append(transition.gradients.double().mean().item())
    assert lengths[1] > 6 * lengths[0]
    state = begin(wide, torch.zeros(20, 2, dtype=torch.float64))
    _, transition = nuts_kernel(
        wide, state, 0.01, torch.ones(2), torch.Generator().manual_seed(0), max_depth=3
    )
    assert (transition.gradients == 7).all()
    assert (transition.depth == 3).all()


def test_a_step_that_is_far_too_large_is_a_divergence_and_goes_nowhere():
    state = begin(gaussian, exact_draws(4, 5))
    after, transition = nuts_kernel(gaussian, state, 500.0, torch.ones(2), torch.Generator().manual_seed(0))
    assert transition.divergent.all()
    assert (transition.gradients == 1).all()
    assert torch.equal(after.position, state.position)


def test_a_conjugate_regression_is_recovered():
    problem, posterior = conjugate(bias=True)[0], fitted_line("nuts")
    assert_recovered(posterior, problem.mean, problem.covariance)
    diagnostics = posterior.diagnostics()
    assert diagnostics.rhat_outputs < 1.05
    assert diagnostics.divergences == 0
    assert diagnostics.depth > 1.0


def test_a_network_is_sampled_and_learns():
    inputs, labels = blobs().tensors
    method = fb.NUTS(samples=8, warmup=10, chains=2, max_depth=4, epochs=3, lr=0.03, prior_scale=0.5)
    posterior = method.fit(network(), [(inputs, labels)], seed=0, **QUIET)
    accuracy = (posterior.predict(inputs).probabilities.argmax(-1) == labels).double().mean()
    assert accuracy > 0.9
    assert posterior.record["depth"].max() <= 4
    assert repr(posterior) == "ChainPosterior(NUTS, 2 chains of 8 draws, Categorical())"


def test_one_chain_of_one_draw_is_told_in_the_singular():
    method = fb.NUTS(samples=1, warmup=1, chains=1, max_depth=1, epochs=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fb.FlowBNNWarning)
        posterior = method.fit(network(), [blobs().tensors], seed=0, **QUIET)
    assert repr(posterior) == "ChainPosterior(NUTS, 1 chain of 1 draw, Categorical())"
