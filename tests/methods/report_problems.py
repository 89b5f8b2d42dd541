"""Data and trained networks on which the report of a fit is tested."""

import math
from functools import cache

import torch
from problems import QUIET
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.models import MLP


def rings(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns two noisy rings that overlap, so that no network separates them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (number,), generator=generator)
    angle = 2 * math.pi * torch.rand(number, generator=generator)
    radius = 1.0 + labels + 0.4 * torch.randn(number, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1), labels


def curve(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns a sine with noise of standard deviation 0.05."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(number, 1, generator=generator) - 2
    return x, (2 * x).sin() + 0.05 * torch.randn(number, 1, generator=generator)


@cache
def trained(data, outputs: int, epochs: int = 60) -> tuple[nn.Module, TensorLoader, fb.Posterior]:
    """Returns a trained network, its training data and its point posterior."""
    torch.manual_seed(0)
    loader = TensorLoader(*data(300, 1), batch_size=32, shuffle=True)
    width = 2 if data is rings else 1
    plain = fb.MLE(epochs=epochs, lr=0.01).fit(MLP(width, (32,), outputs), loader, seed=0, **QUIET)
    return plain.model, loader, plain
