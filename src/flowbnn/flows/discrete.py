"""Recipes for integers and categories, without dequantization: probabilities are exact, and nothing changes volume."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from flowbnn.distributions import Base, CategoricalBase, DiscretizedLogistic, DiscretizedLogisticBase
from flowbnn.distributions.discrete import discretized_logistic
from flowbnn.flows.base import Bins, FlowModel, Widths, recipe
from flowbnn.flows.images import ImageFlow, image_net
from flowbnn.nets.convolution import GatedConvNet
from flowbnn.nets.masked import MaskedMLP
from flowbnn.nets.mlp import Length
from flowbnn.options import Count, Positive, checked
from flowbnn.transforms import (
    Autoregressive,
    ChannelsFirst,
    Compose,
    Coupling,
    Integers,
    IntegerShiftMap,
    ModularMap,
    OneHot,
    Shuffle,
    Transform,
)


@recipe
class IDF(ImageFlow):
    """Integer discrete flow: couplings that shift integers by integers (Hoogeboom et al. 2019, https://arxiv.org/abs/1905.07376).

    Args:
        dim: length of the vectors, or the shape ``(channels, height, width)`` of images.
        length: number of couplings; of images, at each level.
        hidden: widths of the networks; of images, one residual block of so many channels for each.
        levels: of images; at every level but the last half of the channels leave.
        values: about the number of values that an integer takes, which sets the units of networks and base; all integers are allowed.
        components: of the mixtures of discretized logistics that the integers have in the end.
        context_dim, base: as in :class:`~flowbnn.flows.NICE`; the base has integers.

    >>> flow = IDF(2, length=2, values=10)
    >>> flow().sample((5,)).dtype, flow.transform.lower_bound
    (torch.int64, False)
    """

    levels: Count = 2
    values: Positive = 256
    components: Count = 5

    def parts(self) -> Sequence[Transform]:
        if not isinstance(self.dim, int):
            return [self.scales(self.noise), Integers(), ChannelsFirst()]
        given = {"hidden": self.hidden, "context_dim": self.context_dim}
        steps = [
            Coupling(self.dim, self.shift, "alternating", bool(number % 2), **given)  # type: ignore[arg-type]
            for number in range(self.length if self.dim > 1 else 0)
        ]
        return [*steps, Integers()]

    def own_base(self, size: int) -> Base:
        return DiscretizedLogisticBase(size, self.components, self.values)

    @property
    def shift(self) -> IntegerShiftMap:
        return IntegerShiftMap(float(self.values))

    def step(self, channels: int, number: int) -> Transform:
        kept = channels // 2
        net = image_net(kept, channels - kept, self.shift, self.hidden, self.context_dim)
        return Compose(Shuffle(channels), Coupling(channels, self.shift, net=net))

    def noise(self, kept: int, added: int) -> nn.Module:
        """The distribution of the channels that leave early."""
        width, blocks = self.hidden[0], len(self.hidden)
        net = GatedConvNet(kept + self.context_dim, 3 * self.components * added, width, blocks)
        return _ConditionalLogistic(net, self.components, self.values, kept)


class _ConditionalLogistic(nn.Module):
    """Integers whose mixtures of discretized logistics a net computes from other integers."""

    event_dim = 3

    def __init__(self, net: nn.Module, components: int, values: float, kept: int) -> None:
        super().__init__()
        self.net, self.components, self.values, self.kept = net, components, values, kept

    def forward(self, given: Tensor) -> DiscretizedLogistic:
        known = torch.cat([given[..., : self.kept] / self.values, given[..., self.kept :]], dim=-1)
        return discretized_logistic(self.net(known), self.components, self.values)


class DiscreteFlow(FlowModel):
    """Discrete flow over categories: shifts and scales modulo their number (Tran et al. 2019, https://arxiv.org/abs/1905.10347).

    Args:
        dim, categories: of the vectors, which have integers from 0 to ``categories - 1``.
        kind: ``"bipartite"``, couplings, or ``"autoregressive"``, whose draws cost ``dim`` passes and probabilities one.
        scaled, temperature: of each :class:`~flowbnn.transforms.ModularMap`.
        context_dim, length, hidden: as in :class:`~flowbnn.flows.NICE`.

    >>> flow = DiscreteFlow(3, categories=4)
    >>> flow().log_prob(torch.tensor([[0, 3, 1]])).exp()
    tensor([0.0156], grad_fn=<ExpBackward0>)
    """

    @checked
    def __init__(
        self,
        dim: Bins,
        categories: Bins,
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        kind: Literal["bipartite", "autoregressive"] = "bipartite",
        scaled: bool = False,
        temperature: Positive = 1.0,
    ) -> None:
        modular = ModularMap(categories, scaled, temperature)
        size = dim * categories
        parts: list[Transform] = []
        for number in range(length):
            if kind == "bipartite":
                mask = (torch.arange(dim) % 2 == number % 2).repeat_interleave(categories)
                parts.append(Coupling(size, modular, mask, hidden=hidden, context_dim=context_dim))
                continue
            numbers = modular.per_entry * categories
            order = range(dim - 1, -1, -1) if number % 2 else range(dim)
            net = MaskedMLP(
                dim, numbers, hidden, order, context_dim=context_dim, interleaved=True, features=categories
            )
            parts.append(Autoregressive(size, modular, net=net))
        transform = Compose(*parts, OneHot(dim, categories))
        super().__init__(CategoricalBase(dim, categories), transform, context_dim)
