"""Fits a small network, in one process or in two, of which one may fail in the middle."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb


class FailingLinear(nn.Linear):
    """Linear layer that fails in its seventh training pass.

    Attributes:
        failure: ``"killed"`` or ``"raises"`` on the second process, ``"interrupted"`` on all processes, or ``""``.
    """

    passes = 0
    failure = ""

    def forward(self, x):
        self.passes += self.training
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.passes == 7 and self.failure == "interrupted":
            raise KeyboardInterrupt
        if self.passes == 7 and rank == 1 and self.failure == "raises":
            raise ArithmeticError("an error in the user's code")
        if self.passes == 7 and rank == 1 and self.failure == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def fit(folder, failure="", **options):
    """Fits a network with a failing layer and writes checkpoints to a folder."""
    torch.manual_seed(0)
    network = nn.Sequential(FailingLinear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    network[0].failure = failure
    inputs = torch.randn(19, 3)
    loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4, shuffle=True)
    model = fb.to_stochastic(network, {"0": fb.noise.NormalPlanar(1), "*": fb.noise.NormalAffine()})
    defaults = {"accelerator": "cpu", "seed": 1, "epochs": 3, "noise_lr": 0.02, "progress": False}
    return fb.fit(
        model, loader, checkpoint=folder, checkpoint_every=3, **defaults, **options, validation=None
    )
