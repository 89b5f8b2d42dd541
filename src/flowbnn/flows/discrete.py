"""Recipes for integers and categories, without dequantization: probabilities are exact, and nothing changes volume."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from flowbnn.distributions import Base, CategoricalBase, DiscretizedLogistic, DiscretizedLogisticBase
from flowbnn.distributions.discrete import discretized_logistic
from flowbnn.errors import FlowBNNError
from flowbnn.flows.base import Bins, FlowModel, Widths
from flowbnn.flows.images import image_net, scales_of
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


class IDF(FlowModel):
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

    @checked
    def __init__(
        self,
        dim: Count | Sequence[Count],
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        levels: Count = 2,
        values: Positive = 256,
        components: Count = 5,
        base: Base | None = None,
    ) -> None:
        shift = IntegerShiftMap(float(values))

        def step(channels: int, number: int) -> Transform:
            kept = channels // 2
            net = image_net(kept, channels - kept, shift, hidden, context_dim)
            return Compose(Shuffle(channels), Coupling(channels, shift, net=net))

        def noise(kept: int, added: int) -> nn.Module:
            net = GatedConvNet(kept + context_dim, 3 * components * added, hidden[0], len(hidden))
            return _ConditionalLogistic(net, components, values, kept)

        if isinstance(dim, int):
            settings = {"hidden": hidden, "context_dim": context_dim}
            parts: list[Transform] = [
                Coupling(dim, shift, "alternating", bool(number % 2), **settings)  # type: ignore[arg-type]
                for number in range(length if dim > 1 else 0)
            ]
            size = dim
        else:
            scales = scales_of(dim, levels, length, step, hidden, context_dim, noise)
            parts, size = [scales], scales.dim
        last = [] if isinstance(dim, int) else [ChannelsFirst()]
        own = base or DiscretizedLogisticBase(size, components, values)
        if own.dim != size:
            text = f"IDF needs a base of length {size} here, not of {own.dim}"
            raise FlowBNNError(text, kind="shape", argument="base")
        super().__init__(own, Compose(*parts, Integers(), *last), context_dim)


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
