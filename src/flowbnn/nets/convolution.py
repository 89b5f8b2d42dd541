"""Convolutional networks with features on the last axis. Those of sequences and of autoregressive images are causal."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.nets.mlp import Length, with_context, zero_init
from flowbnn.options import Count, checked


class GatedConvNet(nn.Module):
    r"""Residual network of gated convolutions, :math:`h \leftarrow h + a \odot \mathrm{sigmoid}(b)`.

    Here :math:`(a, b) = W_2 * \sigma(W_1 * \sigma(h))`: the conditioner of Flow++ (Ho et al. 2019, https://arxiv.org/abs/1902.00275)
    without its attention. It maps images ``(..., height, width, channels)``. The last convolution starts at zero.

    Args:
        channels_in: Number of channels of the input.
        channels_out: Number of channels of the output.
        hidden: Number of hidden channels.
        blocks: Number of residual blocks.
        context_dim: Length of the context vectors, which every pixel reads; 0 ignores the context.
        bias: If True, convolutions have biases. If False, the output is zero wherever all its inputs are zero.

    >>> net = GatedConvNet(2, 6, hidden=8, blocks=1)
    >>> net(torch.ones(5, 4, 4, 2)).shape
    torch.Size([5, 4, 4, 6])
    """

    event_dim = 3

    @checked
    def __init__(
        self,
        channels_in: Count,
        channels_out: Count,
        hidden: Count = 64,
        blocks: Count = 2,
        context_dim: Length = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.context_dim = context_dim
        conv = partial(nn.Conv2d, bias=bias)
        self.first = conv(channels_in + context_dim, hidden, 3, padding=1)
        self.convolutions = nn.ModuleList(conv(hidden, hidden, 3, padding=1) for _ in range(blocks))
        self.gates = nn.ModuleList(conv(hidden, 2 * hidden, 1) for _ in range(blocks))
        self.last = zero_init(conv(hidden, channels_out, 3, padding=1))

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        value = with_context(value, context, self.context_dim, event_dim=3)
        h = self.first(value.reshape(value.shape[:-3].numel(), *value.shape[-3:]).movedim(-1, 1))
        for convolution, gate in zip(self.convolutions, self.gates, strict=True):
            h = h + F.glu(gate(F.elu(convolution(F.elu(h)))), dim=1)
        return self.last(F.elu(h)).movedim(1, -1).reshape(*value.shape[:-1], self.last.out_channels)


def _gate(value: Tensor) -> Tensor:
    """Returns the product of the tanh of one half of the channels and the sigmoid of the other."""
    a, b = value.chunk(2, 1)
    return torch.tanh(a) * torch.sigmoid(b)


class WaveNet(nn.Module):
    r"""Causal dilated convolutions with gates, :math:`\tanh(W_a * h) \odot \sigma(W_b * h)`, for sequences ``(..., time, channels)``.

    van den Oord et al. 2016, https://arxiv.org/abs/1609.03499. The outputs of a step depend on the context and on about
    ``(kernel - 1) * 2**layers`` steps before it. The channels of one step do not depend on each other. Residual and skip connections
    are those of the paper. The last layer starts at zero.

    Args:
        channels: Number of channels of the sequences.
        params_per_entry: Number of outputs for each channel of each step.
        hidden: Number of hidden channels.
        layers: Number of gated layers, whose dilations are 1, 2, 4, ...
        kernel: Number of steps that each convolution reads.
        context_dim: Length of the context vectors, which every step reads; 0 ignores the context.

    >>> net = WaveNet(1, 2, hidden=8, layers=3)
    >>> net(torch.ones(5, 20, 1)).shape, net.passes((20, 1))
    (torch.Size([5, 20, 2]), 20)
    """

    event_dim = 2

    @checked
    def __init__(
        self,
        channels: Count,
        params_per_entry: Count,
        hidden: Count = 32,
        layers: Count = 4,
        kernel: Count = 2,
        context_dim: Length = 0,
    ) -> None:
        super().__init__()
        self.kernel, self.context_dim = kernel, context_dim
        self.first = nn.Conv1d(channels, hidden, kernel)
        self.context_layer = nn.Conv1d(context_dim, hidden, 1) if context_dim else None
        dilations = (2**layer for layer in range(layers))
        self.gates = nn.ModuleList(nn.Conv1d(hidden, 2 * hidden, kernel, dilation=d) for d in dilations)
        self.steps = nn.ModuleList(nn.Conv1d(hidden, 2 * hidden, 1) for _ in range(layers))
        self.last = zero_init(nn.Conv1d(hidden, params_per_entry * channels, 1))

    def passes(self, shape: Any) -> int:
        """Returns the number of steps of a sequence."""
        return shape[0]

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the outputs ``(..., time, params_per_entry * channels)``.

        Args:
            value: Sequences ``(..., time, channels)``.
            context: Context vectors ``(..., context_dim)``.
        """
        rows = value.reshape(value.shape[:-2].numel(), *value.shape[-2:]).mT
        h = self.first(F.pad(rows, (self.kernel, 0)))[..., :-1]  # without the step itself
        if self.context_layer is not None:
            h = h + self.context_layer(_expand_context(value, context, self.context_dim, 1))
        skip: Any = 0.0
        for number, (gate, step) in enumerate(zip(self.gates, self.steps, strict=True)):
            residual, output = step(_gate(gate(F.pad(h, ((self.kernel - 1) * 2**number, 0))))).chunk(2, 1)
            h, skip = h + residual, skip + output
        result = self.last(F.elu(skip))
        return result.mT.reshape(*value.shape[:-1], result.shape[1])


class MaskedConv2d(nn.Conv2d):
    """Convolution with a fixed mask, which is saved in the ``state_dict``. Height and width stay unchanged.

    Args:
        mask: Mask of the shape of the weight.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        channels_out, channels_in, height, width = mask.shape
        padding = height // 2, width // 2
        super().__init__(channels_in, channels_out, (height, width), padding=padding)
        self.register_buffer("mask", mask.to(self.weight.dtype))

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight * self.mask, self.bias, padding=self.padding)


class PixelCNN(nn.Module):
    r"""Gated PixelCNN: the outputs of a channel of a pixel depend on the pixels above and to the left, and on the channels before it.

    van den Oord et al. 2016, https://arxiv.org/abs/1606.05328. A vertical stack reads the rows above. A horizontal stack reads the
    pixels to the left and the vertical stack, so that there is no blind spot. Both have gates :math:`\tanh \odot \sigma`. Images are
    ``(..., height, width, channels)``. The last layer starts at zero.

    Args:
        channels: Number of channels of the images.
        params_per_entry: Number of outputs for each channel of each pixel.
        hidden: Number of hidden channels for each channel of the images.
        layers: Number of gated layers.
        kernel: Odd width of the convolutions.
        context_dim: Length of the context vectors, which every pixel reads; 0 ignores the context.

    >>> net = PixelCNN(3, 2, hidden=4, layers=2)
    >>> net(torch.ones(5, 8, 8, 3)).shape, net.passes((8, 8, 3))
    (torch.Size([5, 8, 8, 6]), 192)
    """

    event_dim = 3
    interleaved = False

    @checked
    def __init__(
        self,
        channels: Count,
        params_per_entry: Count,
        hidden: Count = 16,
        layers: Count = 3,
        kernel: Count = 3,
        context_dim: Length = 0,
    ) -> None:
        super().__init__()
        self.context_dim = context_dim
        kernel += 1 - kernel % 2
        # Image channel of each input, and of each hidden unit.
        inputs, units = torch.arange(channels), torch.arange(channels).repeat(hidden)
        gate_units = units.repeat(2)
        self.context_layer = nn.Conv2d(context_dim, 4 * len(units), 1) if context_dim else None
        self.vertical, self.horizontal = nn.ModuleList(), nn.ModuleList()
        self.joins, self.outputs = nn.ModuleList(), nn.ModuleList()
        for layer in range(layers):
            # The first layer reads neither the row of a pixel in the vertical stack nor the pixel itself.
            sources, center = (inputs, 0) if layer == 0 else (units, 1)
            rows = torch.zeros(len(gate_units), len(sources), kernel, kernel)
            rows[:, :, : kernel // 2 + center] = 1.0
            row = torch.zeros(len(gate_units), len(sources), 1, kernel)
            row[..., : kernel // 2] = 1.0
            row[..., 0, kernel // 2] = (gate_units[:, None] + center > sources).float()
            self.vertical.append(MaskedConv2d(rows))
            self.horizontal.append(MaskedConv2d(row))
            self.joins.append(nn.Conv2d(len(gate_units), len(gate_units), 1))
            self.outputs.append(MaskedConv2d((units[:, None] >= units).float()[..., None, None]))
        last_units = inputs.repeat(params_per_entry)
        self.last = zero_init(MaskedConv2d((last_units[:, None] >= units).float()[..., None, None]))

    def passes(self, shape: Any) -> int:
        """Returns the number of channels of all pixels."""
        return torch.Size(shape).numel()

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the outputs ``(..., height, width, params_per_entry * channels)``.

        Args:
            value: Images ``(..., height, width, channels)``.
            context: Context vectors ``(..., context_dim)``.
        """
        vertical_state = value.reshape(value.shape[:-3].numel(), *value.shape[-3:]).movedim(-1, 1)
        horizontal_state, residual = vertical_state, None
        shift: Any = (0.0, 0.0)
        if self.context_layer is not None:
            shift = self.context_layer(_expand_context(value, context, self.context_dim, 2)).chunk(2, 1)
        layers = zip(self.vertical, self.horizontal, self.joins, self.outputs, strict=True)
        for vertical, horizontal, join, output in layers:
            vertical_state = vertical(vertical_state) + shift[0]
            horizontal_state = output(_gate(horizontal(horizontal_state) + join(vertical_state) + shift[1]))
            vertical_state, shift = _gate(vertical_state), (0.0, 0.0)
            horizontal_state = residual = (
                horizontal_state if residual is None else residual + horizontal_state
            )
        result = self.last(F.elu(horizontal_state))
        return result.movedim(1, -1).reshape(*value.shape[:-1], result.shape[1])


def _expand_context(value: Tensor, context: Tensor | None, size: int, axes: int) -> Tensor:
    """Returns the context of each event with channels second, followed by axes of length one.

    Args:
        value: Events.
        context: Context vectors.
        size: Length of the context vectors.
        axes: Number of axes of length one.
    """
    events = value.new_zeros(*value.shape[: -axes - 1], 0)
    return with_context(events, context, size).reshape(events.shape[:-1].numel(), size, *(1,) * axes)
