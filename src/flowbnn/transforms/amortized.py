"""Any transform with parameters of its own for every context, as the posteriors of autoencoders have."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import MLP, check_context
from flowbnn.options import Count, checked
from flowbnn.transforms.base import Transform
from flowbnn.transforms.compose import Inverse


class Amortized(Transform):
    r"""A transform whose parameters are :math:`\theta + \mathrm{net}(c)`, others for every context :math:`c`.

    This is how planar, radial and Sylvester flows are conditioned on an encoder (Rezende and Mohamed 2015; van den Berg et al. 2018).
    The net's last layer starts at zero: at first every context has the transform's own parameters :math:`\theta`.

    Args:
        transform: of vectors, which reads no context itself.
        context_dim: length of the context.
        hidden: widths between; ``()`` makes the net linear.

    >>> from flowbnn.transforms import Radial
    >>> flow = Amortized(Radial(3), context_dim=5)
    >>> flow(torch.ones(2, 3), torch.ones(2, 5))[0].shape
    torch.Size([2, 3])
    """

    @checked
    def __init__(self, transform: Transform, context_dim: Count, hidden: Sequence[Count] = ()) -> None:
        super().__init__()
        self.transform = transform
        self.context_dim = context_dim
        for declared in ("event_dim", "inverse_kind", "linearity", "cheap", "solver"):
            setattr(self, declared, getattr(transform, declared))
        self.shapes = {name: parameter.shape for name, parameter in transform.named_parameters()}
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        if transform.event_dim != 1 or transform.stochastic or not sum(sizes):
            text = f"Amortized takes a transform of vectors that has parameters and draws nothing, not {type(transform).__name__}"
            raise FlowBNNError(text, argument="transform")
        ways: dict[str, Any] = {"forward": (transform, "")}
        if transform.inverse_kind != "none":
            ways["inverse"] = Inverse(transform), "part."
        self._ways = ways  # in a dictionary, so that its parameters are not counted twice
        self.net = MLP(context_dim, sum(sizes), hidden)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._apply_rows(z, context, "forward")

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return (
            self._apply_rows(x, context, "inverse")
            if "inverse" in self._ways
            else super().inverse(x, context)
        )

    def _apply_rows(self, value: Tensor, context: Tensor | None, direction: str) -> tuple[Tensor, Tensor]:
        context = check_context(context, self.context_dim)
        batch = torch.broadcast_shapes(value.shape[:-1], context.shape[:-1])
        value = value.expand(*batch, value.shape[-1])
        if not value.numel():  # vmap takes no empty batch
            return getattr(self.transform, direction)(value)
        flat = self.net(context)
        parts = flat.expand(*batch, flat.shape[-1]).flatten(0, -2) if batch else flat.unsqueeze(0)
        parts = parts.split([math.prod(shape) for shape in self.shapes.values()], -1)
        whole, prefix = self._ways[direction]
        given = {
            prefix + name: own + part.reshape(-1, *own.shape)
            for (name, own), part in zip(self.transform.named_parameters(), parts, strict=True)
        }
        rows = value.reshape(-1, value.shape[-1])
        result, log_det = vmap(lambda row, given: functional_call(whole, given, (row,)))(rows, given)
        return result.reshape(*batch, result.shape[-1]), log_det.reshape(batch)
