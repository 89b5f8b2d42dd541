"""Networks that users bring, as subjects of the stress tests: unusual layers, inputs, outputs and calls.

Every subject returns a network and a list of batches ``(inputs, targets)``, both small. ``variant`` changes widths and sizes, so that
a subject stands for many networks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

__all__ = ["SUBJECTS", "Subject"]

Batches = list[tuple[Any, Tensor]]
Subject = Callable[[int], tuple[nn.Module, Batches]]
SUBJECTS: dict[str, Subject] = {}
NUM_CLASSES = 3
NUM_ROWS = 6


def subject(function: Subject) -> Subject:
    """Registers a subject under the name of its function."""
    SUBJECTS[function.__name__] = function
    return function


def classes_of(make_inputs: Callable[[], Any], num_batches: int = 2) -> Batches:
    """Returns batches with class labels."""
    return [(make_inputs(), torch.arange(NUM_ROWS) % NUM_CLASSES) for _ in range(num_batches)]


def images(channels: int = 2, side: int = 6) -> Callable[[], Tensor]:
    return lambda: torch.randn(NUM_ROWS, channels, side, side)


def rows(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(NUM_ROWS, width)


class Calls(nn.Module):
    """Network whose forward pass is a function of its layers and the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self, *args, **kwargs)


@subject
def resnet(variant: int) -> tuple[nn.Module, Batches]:
    """Residual network with batch norm and in-place activations."""
    width = 3 + variant

    def forward(net: Any, x: Tensor) -> Tensor:
        x = F.relu(net.norm1(net.conv1(x)), inplace=True)
        x = (x + net.norm2(net.conv2(x))).relu_()
        return net.head(x.mean((2, 3)))

    layers = {
        "conv1": nn.Conv2d(2, width, 3, padding=1, bias=False),
        "norm1": nn.BatchNorm2d(width),
        "conv2": nn.Conv2d(width, width, 3, padding=1),
        "norm2": nn.BatchNorm2d(width),
        "head": nn.Linear(width, NUM_CLASSES),
    }
    return Calls(forward, **layers), classes_of(images())


@subject
def convnext(variant: int) -> tuple[nn.Module, Batches]:
    """Depthwise convolution, layer norm on permuted axes, and a learned scale per channel."""
    width = 4 + 2 * variant

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(2, width, 2, stride=2)
            self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
            self.norm, self.expand, self.project = (
                nn.LayerNorm(width),
                nn.Linear(width, 8),
                nn.Linear(8, width),
            )
            self.scale, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, NUM_CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            y = self.scale * self.project(F.gelu(self.expand(y)))
            return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))

    return Block(), classes_of(images())


@subject
def vision_transformer(variant: int) -> tuple[nn.Module, Batches]:
    """Fused attention, class token and positions as raw parameters."""
    width = 4 * (1 + variant)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.qkv = nn.Conv2d(2, width, 3, stride=3), nn.Linear(width, 3 * width)
            self.out, self.norm = nn.Linear(width, width), nn.RMSNorm(width)
            self.token, self.place = (
                nn.Parameter(torch.randn(1, 1, width)),
                nn.Parameter(torch.randn(1, 5, width)),
            )
            self.head = nn.Linear(width, NUM_CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patch(x).flatten(2).mT
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return self.head(x[:, 0])

    return Transformer(), classes_of(images())


@subject
def weight_norm_tcn(variant: int) -> tuple[nn.Module, Batches]:
    """Dilated causal convolutions with parametrized weight norm."""
    width = 3 + variant

    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.relu(net.first(F.pad(x, (2, 0))))
        return net.head(net.second(F.pad(x, (4, 0)))[..., -1])

    first = parametrizations.weight_norm(nn.Conv1d(2, width, 3))
    second = nn.Conv1d(width, width, 3, dilation=2)
    network = Calls(forward, first=first, second=second, head=nn.Linear(width, NUM_CLASSES))
    return network, classes_of(lambda: torch.randn(NUM_ROWS, 2, 8))


@subject
def old_weight_norm(variant: int) -> tuple[nn.Module, Batches]:
    """Hook-based weight norm, whose weight is no parameter."""
    first = nn.utils.weight_norm(nn.Linear(4, 5 + variant))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(5 + variant, NUM_CLASSES)), classes_of(rows(4))


@subject
def pruned(variant: int) -> tuple[nn.Module, Batches]:
    """Layer with pruned weights, whose weight is no parameter."""
    network = nn.Sequential(nn.Linear(4, 5 + variant), nn.Tanh(), nn.Linear(5 + variant, NUM_CLASSES))
    prune.l1_unstructured(network[0], "weight", amount=0.3)
    return network, classes_of(rows(4))


@subject
def masked_sets(variant: int) -> tuple[nn.Module, Batches]:
    """Sets with a mask as second input."""
    width = 4 + variant

    def forward(net: Any, x: Tensor, mask: Tensor) -> Tensor:
        return net.head((torch.relu(net.encode(x)) * mask[..., None]).sum(1))

    network = Calls(forward, encode=nn.Linear(3, width), head=nn.Linear(width, NUM_CLASSES))
    return network, classes_of(lambda: (torch.randn(NUM_ROWS, 5, 3), (torch.rand(NUM_ROWS, 5) > 0.3).float()))


@subject
def recurrent_cell(variant: int) -> tuple[nn.Module, Batches]:
    """Linear recurrence in a Python loop, which calls one layer several times."""
    width = 4 + variant

    def forward(net: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), width)
        for step in x.unbind(1):
            state = torch.tanh(net.inputs(step) + net.states(state))
        return net.head(state)

    layers = {
        "inputs": nn.Linear(3, width),
        "states": nn.Linear(width, width),
        "head": nn.Linear(width, NUM_CLASSES),
    }
    return Calls(forward, **layers), classes_of(lambda: torch.randn(NUM_ROWS, 4, 3))


@subject
def packed_lstm(variant: int) -> tuple[nn.Module, Batches]:
    """Padded sequences with lengths, packed inside the network."""
    width = 4 + variant

    def forward(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return net.head(net.lstm(packed)[1][0][-1])

    network = Calls(forward, lstm=nn.LSTM(3, width, batch_first=True), head=nn.Linear(width, NUM_CLASSES))
    return network, classes_of(lambda: (torch.randn(NUM_ROWS, 5, 3), torch.randint(1, 6, (NUM_ROWS,))))


@subject
def bilinear(variant: int) -> tuple[nn.Module, Batches]:
    """Bilinear layer followed by a linear one."""
    width = 4 + variant
    network = Calls(
        lambda net, x: net.head(net.pair(x, x)),
        pair=nn.Bilinear(3, 3, width),
        head=nn.Linear(width, NUM_CLASSES),
    )
    return network, classes_of(rows(3))


@subject
def raw_parameter(variant: int) -> tuple[nn.Module, Batches]:
    """First layer as a raw parameter, and a parameter without axes."""

    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.scale = (
                nn.Parameter(torch.randn(4, 5 + variant)),
                nn.Parameter(torch.tensor(0.5)),
            )
            self.head = nn.Linear(5 + variant, NUM_CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.scale * torch.tanh(x @ self.matrix))

    return Raw(), classes_of(rows(4))


@subject
def mixture_of_experts(variant: int) -> tuple[nn.Module, Batches]:
    """Every row goes to one expert."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 2 + variant)
            self.experts = nn.ModuleList(nn.Linear(4, NUM_CLASSES) for _ in range(2 + variant))

        def forward(self, x: Tensor) -> Tensor:
            choice = self.gate(x).argmax(1)
            outputs = x.new_zeros(len(x), NUM_CLASSES)
            for number, expert in enumerate(self.experts):
                taken = choice == number
                if taken.any():
                    outputs[taken] = expert(x[taken])
            return outputs

    return Experts(), classes_of(rows(4))


@subject
def early_exit(variant: int) -> tuple[nn.Module, Batches]:
    """A head that is never reached."""
    network = Calls(
        lambda net, x: net.first(x) if x.abs().sum() > 0 else net.second(x),
        first=nn.Linear(4, NUM_CLASSES),
        second=nn.Linear(4, NUM_CLASSES),
    )
    return network, classes_of(rows(4))


@subject
def dictionary_inputs(variant: int) -> tuple[nn.Module, Batches]:
    """Inputs by keyword: numbers and categories."""
    width = 3 + variant

    def forward(net: Any, numbers: Tensor, category: Tensor) -> Tensor:
        return net.head(torch.tanh(net.linear(numbers) + net.table(category)))

    layers = {
        "linear": nn.Linear(4, width),
        "table": nn.Embedding(5, width),
        "head": nn.Linear(width, NUM_CLASSES),
    }
    inputs = lambda: {"numbers": torch.randn(NUM_ROWS, 4), "category": torch.randint(5, (NUM_ROWS,))}  # noqa: E731
    return Calls(forward, **layers), classes_of(inputs)


@subject
def frozen_trunk(variant: int) -> tuple[nn.Module, Batches]:
    """Trunk without gradients and a trainable head."""
    network = nn.Sequential(nn.Linear(4, 5 + variant), nn.Tanh(), nn.Linear(5 + variant, NUM_CLASSES))
    network[0].requires_grad_(False)
    return network, classes_of(rows(4))


@subject
def activation_checkpointing(variant: int) -> tuple[nn.Module, Batches]:
    """Activations that are computed again in the backward pass."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(checkpoint(lambda value: torch.tanh(net.first(value)), x, use_reentrant=False))

    return Calls(
        forward, first=nn.Linear(4, 5 + variant), head=nn.Linear(5 + variant, NUM_CLASSES)
    ), classes_of(rows(4))


@subject
def functional_dropout(variant: int) -> tuple[nn.Module, Batches]:
    """Dropout by function and by module, off in evaluation mode."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(net.drop(F.dropout(torch.relu(net.first(x)), 0.2, net.training)))

    layers = {
        "first": nn.Linear(4, 5 + variant),
        "drop": nn.Dropout(0.1),
        "head": nn.Linear(5 + variant, NUM_CLASSES),
    }
    return Calls(forward, **layers), classes_of(rows(4))


@subject
def double_data(variant: int) -> tuple[nn.Module, Batches]:
    """Double data for a network in single precision."""
    network = nn.Sequential(nn.Linear(4, 5 + variant), nn.PReLU(), nn.Linear(5 + variant, NUM_CLASSES))
    return network, classes_of(lambda: torch.randn(NUM_ROWS, 4, dtype=torch.float64))


@subject
def instance_norm(variant: int) -> tuple[nn.Module, Batches]:
    """Instance norm, max-pooling with indices and unpooling."""
    width = 3 + variant

    def forward(net: Any, x: Tensor) -> Tensor:
        x = F.prelu(net.norm(net.conv(x)), x.new_tensor([0.1]))
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        return net.head(F.max_unpool2d(pooled, indices, [2, 2], output_size=x.shape[2:]).mean((2, 3)))

    layers = {
        "conv": nn.Conv2d(2, width, 3, padding=1),
        "norm": nn.InstanceNorm2d(width, affine=True),
        "head": nn.Linear(width, NUM_CLASSES),
    }
    return Calls(forward, **layers), classes_of(images())


@subject
def tied_weights(variant: int) -> tuple[nn.Module, Batches]:
    """Two layers with one weight."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, NUM_CLASSES))
    network[2].weight = network[0].weight
    return network, classes_of(rows(4))


@subject
def two_targets(variant: int) -> tuple[nn.Module, Batches]:
    """Regression with two targets."""
    network = nn.Sequential(nn.Linear(4, 5 + variant), nn.SiLU(), nn.Linear(5 + variant, 2))
    return network, [(torch.randn(NUM_ROWS, 4), torch.randn(NUM_ROWS, 2)) for _ in range(2)]


@subject
def transposed_convolution(variant: int) -> tuple[nn.Module, Batches]:
    """Transposed and grouped convolutions with channels last."""
    width = 4 + 2 * variant

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(torch.relu(net.up(net.down(x))).mean((2, 3)))

    layers = {
        "down": nn.Conv2d(2, width, 3, stride=2, groups=2),
        "up": nn.ConvTranspose2d(width, width, 2, stride=2),
        "head": nn.Linear(width, NUM_CLASSES),
    }
    network = Calls(forward, **layers)
    for weight in network.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return network, classes_of(images())
