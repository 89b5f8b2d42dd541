"""A small convolutional network for images of 8x8, LeNet's shape in miniature."""

import torch
from torch import Tensor, nn

__all__ = ["SmallConv"]


class SmallConv(nn.Module):
    """Two convolutions with pooling, two linear layers: ``conv1``, ``conv2``, ``fc1``, ``fc2``.

    Args:
        channels: of the image.
        classes: number of outputs.
        width: channels of the first convolution; the second has twice as many.
        hidden: width between the linear layers.

    >>> SmallConv()(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 16, hidden: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(2 * width * 4, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))
