"""Scores of class labels."""

import itertools

import pytest
import torch

from flowbnn.conformal import APS, NLL, RAPS

PROBABILITIES = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.3, 0.5]], dtype=torch.float64)


def brute_force(probabilities, uniform, penalty=0.0, rank=1):
    """Returns the scores of APS and RAPS by loops over classes."""
    result = torch.zeros_like(probabilities)
    for row, (values, u) in enumerate(zip(probabilities.tolist(), uniform.flatten().tolist(), strict=True)):
        for label, value in enumerate(values):
            above = [other for other in values if other > value]
            result[row, label] = sum(above) + u * value + penalty * max(0, len(above) + 1 - rank)
    return result


def test_the_negative_log_likelihood_orders_classes_by_probability():
    scores = NLL().scores(PROBABILITIES.log(), torch.ones(2, 1))
    torch.testing.assert_close(scores, -PROBABILITIES.log())


@pytest.mark.parametrize("randomized", [False, True])
def test_adaptive_scores_equal_their_definition(randomized):
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(50, 6, generator=generator, dtype=torch.float64).softmax(-1)
    uniform = torch.rand(50, 1, generator=generator, dtype=torch.float64)
    share = uniform if randomized else torch.zeros_like(uniform)
    torch.testing.assert_close(
        APS(randomized).scores(probabilities.log(), uniform), brute_force(probabilities, share)
    )
    torch.testing.assert_close(
        RAPS(randomized, penalty=0.2, rank=2).scores(probabilities.log(), uniform),
        brute_force(probabilities, share, 0.2, 2),
    )


def test_tuning_chooses_the_rank_and_the_penalty_of_the_smallest_sets():
    """A few probable classes and a long tail: a penalty removes the tail from the sets."""
    generator = torch.Generator().manual_seed(0)
    logits = 0.5 * torch.randn(400, 50, generator=generator, dtype=torch.float64)
    logits[torch.arange(400), torch.arange(400) % 50] += 3.0
    targets = torch.multinomial((2.0 * logits).softmax(-1), 1, generator=generator).flatten()
    log_probabilities, uniform = logits.log_softmax(-1), torch.ones(400, 1, dtype=torch.float64)
    tuned = RAPS().tuned(log_probabilities, targets, uniform, 0.9)
    ranks = (log_probabilities >= log_probabilities.gather(1, targets[:, None])).sum(1)
    sizes = {}
    for penalty, rank in itertools.product(
        (0.0, 0.001, 0.01, 0.1, 0.2, 0.5), range(1, int(ranks.sort().values[360]) + 1)
    ):
        scores = RAPS(penalty=penalty, rank=rank).scores(log_probabilities, uniform)
        own = scores.gather(1, targets[:, None]).flatten()
        sizes[penalty, rank] = float((scores <= own.sort().values[360]).double().sum(1).mean())
    assert sizes[tuned.penalty, tuned.rank] == min(sizes.values()) < sizes[0.0, 1]
    assert not tuned.needs_tuning
    assert RAPS(penalty=0.3).tuned(log_probabilities, targets, uniform, 0.9).penalty == 0.3
    assert RAPS(rank=3).tuned(log_probabilities, targets, uniform, 0.9).rank == 3
