"""Small classification problem that a network learns in a second."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"progress": False, "accelerator": "cpu"}


def blobs(count: int = 240, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    centres = 3 * torch.eye(classes, 4)
    return TensorDataset(centres[labels] + torch.randn(count, 4, generator=generator), labels)


def loader(data: TensorDataset | None = None, **options) -> DataLoader:
    return DataLoader(data or blobs(), batch_size=40, shuffle=True, **options)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
