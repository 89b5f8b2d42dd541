"""Recipes for integers and categories, without dequantization: probabilities are exact, and nothing changes volume."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.distributions import Base, CategoricalBase, DiscretizedLogistic, DiscretizedLogisticBase
from flowbnn.distributions.discrete import discretized_logistic
from flowbnn.flows.base import Bins, FlowModel, Widths, recipe
from flowbnn.flows.images import ImageFlow
from flowbnn.nets.mlp import Length
from flowbnn.options import Count, Positive, checked
from flowbnn.transforms import (
    Autoregressive,
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

    def step(self, size: int, number: int) -> Transform:
        coupling = self.coupling(size, number, IntegerShiftMap(float(self.values)))
        return Compose(Shuffle(size), coupling) if self.images else coupling

    def door(self) -> Sequence[Transform]:
        return [Integers(), *super().door()]

    def own_base(self, size: int) -> Base:
        return DiscretizedLogisticBase(size, self.components, self.values)

    def split_noise(self, kept: int, added: int) -> nn.Module:
        net = self.conv(kept + self.context_dim, 3 * self.components * added)
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
        modular, size = ModularMap(categories, scaled, temperature), dim * categories
        given: dict[str, Any] = {"hidden": hidden, "context_dim": context_dim}
        parts: list[Transform] = []
        for turned in (bool(number % 2) for number in range(length)):
            if kind == "bipartite":
                parts.append(Coupling(size, modular, "alternating", turned, **given))
            else:
                order = range(dim)[:: -1 if turned else 1]
                parts.append(Autoregressive(size, modular, order=order, **given))
        transform = Compose(*parts, OneHot(dim, categories))
        super().__init__(CategoricalBase(dim, categories), transform, context_dim)
