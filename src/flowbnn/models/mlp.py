"""The plain multilayer perceptron."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError

__all__ = ["MLP"]


class MLP(nn.Module):
    """Linear layers with ReLU between them, called ``fc1``, ``fc2``, ... so that rules can name them.

    Args:
        inputs: length of the input vectors; longer tensors are flattened to it.
        hidden: widths between; one width makes the two-layer network of document 000's figure 3.
        outputs: number of classes, or of regression targets.

    >>> network = MLP(2, (32,), 2)
    >>> [name for name, _ in network.named_children()], network(torch.zeros(5, 2)).shape
    (['fc1', 'fc2'], torch.Size([5, 2]))
    """

    def __init__(self, inputs: int = 2, hidden: Sequence[int] = (32,), outputs: int = 2) -> None:
        super().__init__()
        widths = (inputs, *hidden, outputs)
        if min(widths) < 1:
            raise FlowBNNError(f"every width of an MLP is at least 1, not {widths}")
        self.depth = len(widths) - 1
        for index in range(self.depth):
            self.add_module(f"fc{index + 1}", nn.Linear(widths[index], widths[index + 1]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for index in range(self.depth):
            x = self.get_submodule(f"fc{index + 1}")(x if index == 0 else torch.relu(x))
        return x
