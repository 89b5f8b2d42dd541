"""Fits a small network, alone or in two processes, of which one may die in the middle."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb


class Mortal(nn.Linear):
    """Dies in the seventh training pass: ``killed`` or ``raises`` on the second process, ``interrupted`` on all."""

    passes = 0
    fate = "lives"

    def forward(self, x):
        self.passes += self.training
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.passes == 7 and self.fate == "interrupted":
            raise KeyboardInterrupt
        if self.passes == 7 and rank == 1 and self.fate == "raises":
            raise ArithmeticError("a fault of the user's own")
        if self.passes == 7 and rank == 1 and self.fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def fit(folder, fate="lives", **options):
    torch.manual_seed(0)
    network = nn.Sequential(Mortal(3, 4), nn.Tanh(), nn.Linear(4, 2))
    network[0].fate = fate
    inputs = torch.randn(19, 3)
    loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4, shuffle=True)
    model = fb.to_stochastic(network, {"0": fb.noise.NormalPlanar(1), "*": fb.noise.NormalAffine()})
    usual = {"accelerator": "cpu", "seed": 1, "epochs": 3, "noise_lr": 0.02, "progress": False}
    return fb.fit(model, loader, checkpoint=folder, checkpoint_every=3, **usual, **options)
