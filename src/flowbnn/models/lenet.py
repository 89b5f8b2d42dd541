"""LeNet, as in document 000's code: two convolutions, three linear layers, an adaptive pool between."""

import torch
from torch import Tensor, nn

__all__ = ["LeNet"]


class LeNet(nn.Module):
    """LeNet (LeCun et al., 1998) for images of 28x28 or 32x32: the pool brings either to 4x4.

    >>> LeNet(channels=1)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2)
        self.adapt = nn.AdaptiveAvgPool2d(4)
        self.fc1 = nn.Linear(16 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.adapt(self.pool(torch.relu(self.conv2(x))))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))
