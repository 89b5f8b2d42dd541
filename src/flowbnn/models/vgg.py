"""VGG16 with BatchNorm, in the form used on images of 32x32."""

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError

__all__ = ["VGG16"]

WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
POOL_AFTER = (2, 4, 7, 10, 13)  # convolutions, counted from 1


class VGG16(nn.Module):
    """VGG16 (Simonyan & Zisserman, 2015) with BatchNorm: 13 convolutions, 3 linear layers, for images of 32x32 or larger.

    The convolutions are ``conv1`` to ``conv13``, each followed by its ``norm`` and a ReLU, with a pool after the 2nd, 4th, 7th,
    10th and 13th; the linear layers are ``fc1`` to ``fc3``. What the pools leave is averaged to one position.

    Args:
        channels: of the images.
        classes: outputs.
        hidden: width of the first two linear layers.
        width: multiplies the channels of all convolutions; below 1 for a network that trains in a moment.

    >>> VGG16(width=0.125)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, channels: int = 3, classes: int = 10, hidden: int = 512, width: float = 1.0) -> None:
        super().__init__()
        if not 0.0 < width <= 8.0:
            raise FlowBNNError(f"width multiplies the channels and lies above 0 and up to 8, not {width}")
        widths = [max(1, round(width * number)) for number in WIDTHS]
        for index, (before, after) in enumerate(zip([channels, *widths], widths, strict=False), start=1):
            self.add_module(f"conv{index}", nn.Conv2d(before, after, 3, padding=1, bias=False))
            self.add_module(f"norm{index}", nn.BatchNorm2d(after))
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(widths[-1], hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        for index in range(1, len(WIDTHS) + 1):
            x = torch.relu(self.get_submodule(f"norm{index}")(self.get_submodule(f"conv{index}")(x)))
            if index in POOL_AFTER:
                x = self.pool(x)
        x = torch.relu(self.fc1(x.mean((2, 3))))
        return self.fc3(torch.relu(self.fc2(x)))
