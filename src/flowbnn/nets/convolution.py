"""Convolutional conditioners with features on the last axis; those of sequences and of autoregressive images are causal."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.nets.mlp import Length, with_context, zero_init
from flowbnn.options import Count, checked


class GatedConvNet(nn.Module):
    r"""A residual network of gated convolutions, :math:`h \leftarrow h + a \odot \mathrm{sigmoid}(b)`.

    Here :math:`(a, b) = W_2 * \sigma(W_1 * \sigma(h))`: the conditioner of Flow++ (Ho et al. 2019, https://arxiv.org/abs/1902.00275)
    without its attention. It takes and gives images ``(..., height, width, channels)``. The last convolution starts at zero.

    Args:
        channels_in, channels_out: of the images.
        hidden: channels inside.
        blocks: number of residual blocks.
        context_dim: length of the context vectors, which are seen at every pixel; 0 ignores any context.
        bias: without biases an output is zero where all that it sees is.

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
        self.wide = nn.ModuleList(conv(hidden, hidden, 3, padding=1) for _ in range(blocks))
        self.gates = nn.ModuleList(conv(hidden, 2 * hidden, 1) for _ in range(blocks))
        self.last = zero_init(conv(hidden, channels_out, 3, padding=1))

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        value = with_context(value, context, self.context_dim, event_dim=3)
        h = self.first(value.reshape(value.shape[:-3].numel(), *value.shape[-3:]).movedim(-1, 1))
        for wide, gate in zip(self.wide, self.gates, strict=True):
            h = h + F.glu(gate(F.elu(wide(F.elu(h)))), dim=1)
        return self.last(F.elu(h)).movedim(1, -1).reshape(*value.shape[:-1], self.last.out_channels)


def _gate(value: Tensor) -> Tensor:
    a, b = value.chunk(2, 1)
    return torch.tanh(a) * torch.sigmoid(b)


class WaveNet(nn.Module):
    r"""Causal dilated convolutions with gates, :math:`\tanh(W_a * h) \odot \sigma(W_b * h)`, for sequences ``(..., time, channels)``.

    van den Oord et al. 2016, https://arxiv.org/abs/1609.03499. The numbers for a step depend on the steps before it, about
    ``(kernel - 1) * 2**layers`` of them, and on the context; the channels of one step do not see each other. Residual and skip
    connections as in the paper; the last layer starts at zero.

    Args:
        channels: of the sequences.
        params_per_entry: numbers for each channel of each step.
        hidden: channels inside.
        layers: number of gated layers, whose dilations are 1, 2, 4, ...
        kernel: steps that each convolution reads.
        context_dim: length of the context vectors, which are seen at every step; 0 ignores any context.

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
        self.place = nn.Conv1d(context_dim, hidden, 1) if context_dim else None
        apart = (2**layer for layer in range(layers))
        self.gates = nn.ModuleList(nn.Conv1d(hidden, 2 * hidden, kernel, dilation=gap) for gap in apart)
        self.steps = nn.ModuleList(nn.Conv1d(hidden, 2 * hidden, 1) for _ in range(layers))
        self.last = zero_init(nn.Conv1d(hidden, params_per_entry * channels, 1))

    def passes(self, shape: Any) -> int:
        """One for each step of a sequence."""
        return shape[0]

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """``value`` is ``(..., time, channels)``, ``context`` ``(..., context_dim)``."""
        rows = value.reshape(value.shape[:-2].numel(), *value.shape[-2:]).mT
        h = self.first(F.pad(rows, (self.kernel, 0)))[..., :-1]  # the step itself is left out
        if self.place is not None:
            h = h + self.place(_expand_context(value, context, self.context_dim, 1))
        skip: Any = 0.0
        for number, (gate, step) in enumerate(zip(self.gates, self.steps, strict=True)):
            changed, out = step(_gate(gate(F.pad(h, ((self.kernel - 1) * 2**number, 0))))).chunk(2, 1)
            h, skip = h + changed, skip + out
        result = self.last(F.elu(skip))
        return result.mT.reshape(*value.shape[:-1], result.shape[1])


class MaskedConv2d(nn.Conv2d):
    """A convolution with a fixed mask, kept in the ``state_dict``, that leaves height and width as they are."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        out, inside, high, wide = mask.shape
        super().__init__(inside, out, (high, wide), padding=(high // 2, wide // 2))
        self.register_buffer("mask", mask.to(self.weight.dtype))

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight * self.mask, self.bias, padding=self.padding)


class PixelCNN(nn.Module):
    r"""Gated PixelCNN: the numbers for a channel of a pixel depend on the pixels above and to the left, and on the channels before it.

    van den Oord et al. 2016, https://arxiv.org/abs/1606.05328. A vertical stack reads the rows above, a horizontal one the row so
    far and the vertical one, so that there is no blind spot. Both have gates :math:`\tanh \odot \sigma`. Images are ``(..., height,
    width, channels)``; the last layer starts at zero.

    Args:
        channels: of the images.
        params_per_entry: numbers for each channel of each pixel.
        hidden: channels inside, for each channel of the images.
        layers: number of gated layers.
        kernel: odd width of the convolutions.
        context_dim: length of the context vectors, which are seen at every pixel; 0 ignores any context.

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
        colours, inside = torch.arange(channels), torch.arange(channels).repeat(hidden)
        pairs = inside.repeat(2)
        self.place = nn.Conv2d(context_dim, 4 * len(inside), 1) if context_dim else None
        self.down, self.across = nn.ModuleList(), nn.ModuleList()
        self.joins, self.outs = nn.ModuleList(), nn.ModuleList()
        for layer in range(layers):
            # data see neither their row nor themselves
            before, itself = (colours, 0) if layer == 0 else (inside, 1)
            rows = torch.zeros(len(pairs), len(before), kernel, kernel)
            rows[:, :, : kernel // 2 + itself] = 1.0
            row = torch.zeros(len(pairs), len(before), 1, kernel)
            row[..., : kernel // 2] = 1.0
            row[..., 0, kernel // 2] = (pairs[:, None] + itself > before).float()
            self.down.append(MaskedConv2d(rows))
            self.across.append(MaskedConv2d(row))
            self.joins.append(nn.Conv2d(len(pairs), len(pairs), 1))
            self.outs.append(MaskedConv2d((inside[:, None] >= inside).float()[..., None, None]))
        outputs = colours.repeat(params_per_entry)
        self.last = zero_init(MaskedConv2d((outputs[:, None] >= inside).float()[..., None, None]))

    def passes(self, shape: Any) -> int:
        """One for each channel of each pixel."""
        return torch.Size(shape).numel()

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """``value`` is ``(..., height, width, channels)``, ``context`` ``(..., context_dim)``."""
        above = value.reshape(value.shape[:-3].numel(), *value.shape[-3:]).movedim(-1, 1)
        left, rest = above, None
        extra: Any = (0.0, 0.0)
        if self.place is not None:
            extra = self.place(_expand_context(value, context, self.context_dim, 2)).chunk(2, 1)
        for down, across, join, out in zip(self.down, self.across, self.joins, self.outs, strict=True):
            above = down(above) + extra[0]
            left = out(_gate(across(left) + join(above) + extra[1]))
            above, extra = _gate(above), (0.0, 0.0)
            left = rest = left if rest is None else rest + left
        result = self.last(F.elu(left))
        return result.movedim(1, -1).reshape(*value.shape[:-1], result.shape[1])


def _expand_context(value: Tensor, context: Tensor | None, size: int, axes: int) -> Tensor:
    """The context of each event of ``value`` with axes of length one for its places, channels second."""
    events = value.new_zeros(*value.shape[: -axes - 1], 0)
    return with_context(events, context, size).reshape(events.shape[:-1].numel(), size, *(1,) * axes)
