"""Convolutional conditioners for images with channels on the last axis."""

from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.nets.mlp import Length, with_context, zeroed
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

    >>> import torch
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
    ) -> None:
        super().__init__()
        self.context_dim = context_dim
        self.first = nn.Conv2d(channels_in + context_dim, hidden, 3, padding=1)
        self.wide = nn.ModuleList(nn.Conv2d(hidden, hidden, 3, padding=1) for _ in range(blocks))
        self.gates = nn.ModuleList(nn.Conv2d(hidden, 2 * hidden, 1) for _ in range(blocks))
        self.last = zeroed(nn.Conv2d(hidden, channels_out, 3, padding=1))

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        value = with_context(value, context, self.context_dim, event_dim=3)
        h = self.first(value.reshape(value.shape[:-3].numel(), *value.shape[-3:]).movedim(-1, 1))
        for wide, gate in zip(self.wide, self.gates, strict=True):
            h = h + F.glu(gate(F.elu(wide(F.elu(h)))), dim=1)
        return self.last(F.elu(h)).movedim(1, -1).reshape(*value.shape[:-1], self.last.out_channels)
