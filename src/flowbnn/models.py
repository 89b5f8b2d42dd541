"""Plain architectures: LeNet, MLP, ResNet18, SmallConv and VGG16, whose layers have names that rules can refer to."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from flowbnn.options import Bounds, Count, checked

__all__ = ["MLP", "VGG16", "LeNet", "ResNet18", "SmallConv"]

Scale = Annotated[float, Bounds(gt=0, le=8)]


class LeNet(nn.Module):
    """LeNet (LeCun et al., 1998) for images of 28x28 or 32x32: an adaptive pool brings either to 4x4, as in Xiong's code.

    >>> LeNet(channels=1)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    @checked
    def __init__(self, channels: Count = 1, classes: Count = 10) -> None:
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


class MLP(nn.Module):
    """Linear layers with ReLU between them, called ``fc1``, ``fc2``, ... so that rules can name them.

    Args:
        inputs: length of the input vectors; longer tensors are flattened to it.
        hidden: widths between; one width makes the two-layer network of figure 3 of Xiong's report.
        outputs: number of classes, or of regression targets.

    >>> network = MLP(2, (32,), 2)
    >>> [name for name, _ in network.named_children()], network(torch.zeros(5, 2)).shape
    (['fc1', 'fc2'], torch.Size([5, 2]))
    """

    @checked
    def __init__(self, inputs: Count = 2, hidden: Sequence[Count] = (32,), outputs: Count = 2) -> None:
        super().__init__()
        widths = (inputs, *hidden, outputs)
        self.depth = len(widths) - 1
        for index in range(self.depth):
            self.add_module(f"fc{index + 1}", nn.Linear(widths[index], widths[index + 1]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for index in range(self.depth):
            x = self.get_submodule(f"fc{index + 1}")(x if index == 0 else torch.relu(x))
        return x


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

    @checked
    def __init__(
        self, channels: Count = 1, classes: Count = 10, width: Count = 16, hidden: Count = 64
    ) -> None:
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

    @checked
    def __init__(
        self,
        channels: Count = 3,
        classes: Count = 10,
        hidden: Count = 512,
        width: Scale = 1.0,
    ) -> None:
        super().__init__()
        widths = [max(1, round(width * number)) for number in WIDTHS]
        for index, (before, after) in enumerate(zip([channels, *widths], widths, strict=False), start=1):
            self.add_module(f"conv{index}", nn.Conv2d(before, after, 3, padding=1, bias=False))
            self.add_module(f"norm{index}", nn.BatchNorm2d(after))
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(widths[-1], hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(1, len(WIDTHS) + 1):
            x = torch.relu(self.get_submodule(f"norm{index}")(self.get_submodule(f"conv{index}")(x)))
            if index in POOL_AFTER:
                x = self.pool(x)
        x = torch.relu(self.fc1(x.mean((2, 3))))
        return self.fc3(torch.relu(self.fc2(x)))


class Block(nn.Module):
    r"""Two 3x3 convolutions beside a shortcut: :math:`y = \mathrm{relu}(f(x) + s(x))`.

    ``conv1``, ``norm1``, ReLU, ``conv2``, ``norm2`` are :math:`f`; :math:`s` is the identity, or where the shape changes
    ``shortcut`` (a 1x1 convolution) and ``norm3``.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.changes = stride > 1 or before != after
        if self.changes:
            self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)
            self.norm3 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + (self.norm3(self.shortcut(x)) if self.changes else x))


class ResNet18(nn.Module):
    """ResNet18 (He et al., 2016) with BatchNorm for images of 32x32: a first convolution of 3x3 and no pool after it.

    After ``conv1`` and ``norm1`` come ``block1`` to ``block8``, two each of 64, 128, 256 and 512 channels, the first of each pair but
    the first with a stride of 2; what they leave is averaged to one position, and ``fc`` has the classes. The layers of a block are
    ``block3.conv1``, ``block3.conv2`` and, where its shape changes, ``block3.shortcut``.

    Args:
        channels: of the images.
        classes: outputs.
        width: multiplies the channels of all blocks; below 1 for a network that trains in a moment.

    >>> network = ResNet18(width=0.125)
    >>> network(torch.zeros(2, 3, 32, 32)).shape, network.block3.shortcut
    (torch.Size([2, 10]), Conv2d(8, 16, kernel_size=(1, 1), stride=(2, 2), bias=False))
    """

    @checked
    def __init__(self, channels: Count = 3, classes: Count = 10, width: Scale = 1.0) -> None:
        super().__init__()
        widths = [max(1, round(width * number)) for number in (64, 64, 64, 128, 128, 256, 256, 512, 512)]
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(widths[0])
        self.depth = len(widths) - 1
        for index in range(self.depth):
            stride = 2 if index in (2, 4, 6) else 1
            self.add_module(f"block{index + 1}", Block(widths[index], widths[index + 1], stride))
        self.fc = nn.Linear(widths[-1], classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        for index in range(self.depth):
            x = self.get_submodule(f"block{index + 1}")(x)
        return self.fc(x.mean((2, 3)))


def _initialize(network: nn.Module) -> None:
    """He's start for the convolutions."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
