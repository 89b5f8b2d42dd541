"""Bounds on the evidence of a linear regression, and a network of several layers, for the tests of variational methods."""

import torch
from problems import NOISE, PRIOR
from torch import nn
from torch.distributions import MultivariateNormal


def cosine(optimizer, steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def evidence(problem) -> torch.Tensor:
    covariance = (
        NOISE**2 * torch.eye(len(problem.targets)).double() + PRIOR**2 * problem.design @ problem.design.T
    )
    return MultivariateNormal(torch.zeros_like(problem.targets), covariance).log_prob(problem.targets)


def mean_field_bound(problem) -> torch.Tensor:
    r"""Returns the best ELBO of a factorized Gaussian: :math:`\log p(D) - \frac12 (\sum_j \log \Lambda_{jj} - \log|\Lambda|)`."""
    gap = problem.precision.diagonal().log().sum() - torch.linalg.slogdet(problem.precision)[1]
    return evidence(problem) - 0.5 * gap


def repeat_rows(batches, times: int = 32) -> list:
    """Repeats the data, so that a step averages over as many draws, because every row has its own noise."""
    return [tuple(tensor.repeat(times, 1) for tensor in batch) for batch in batches]


class Reader(nn.Module):
    """Network with an embedding, a recurrent layer and attention, whose output weight is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.words.weight

    def forward(self, x):
        y = self.recurrent(self.words(x))[0]
        y = self.norm(y + self.attention(y, y, y, need_weights=False)[0])
        return self.head(y.mean(1))
