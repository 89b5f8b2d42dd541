"""A small problem with two classes, and a network for it."""

import torch
from torch import nn

from flowbnn.likelihoods import Categorical
from flowbnn.posterior import PointPosterior

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 3, generator=GENERATOR)
Y = torch.arange(24) % 2


class Net(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, outputs)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def network(outputs=2):
    torch.manual_seed(0)
    return Net(outputs)


def posterior():
    return PointPosterior(network(), Categorical())
