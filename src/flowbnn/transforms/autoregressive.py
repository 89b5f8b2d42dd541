"""Autoregressive maps: every entry is transformed by parameters that a masked network computes from the entries before it."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length, MaskedMLP
from flowbnn.numerics import sum_rightmost
from flowbnn.options import Count, checked
from flowbnn.transforms.univariate import AffineMap, Conditioned, Direction, Univariate


class Autoregressive(Conditioned):
    r"""Each entry moved by an increasing map whose parameters depend on the entries before it.

    .. math:: x_i = g(z_i;\, \mathrm{net}_i(q(x_{<i}), c)) \quad\text{(cheap inverse)}, \qquad
              x_i = g(z_i;\, \mathrm{net}_i(q(z_{<i}), c)) \quad\text{(cheap forward)}

    What the net reads is known at once in one direction, which costs one pass, and has to be found entry by entry in the
    other, which costs ``net.passes(event_shape)`` of them, one for each entry. ``cheap`` says which:

    - ``"inverse"``: densities in one pass, draws in D: the masked autoregressive flow (Papamakarios, Pavlakou & Murray 2017);
    - ``"forward"``: draws, and their own densities, in one pass, densities of other points in D: the inverse autoregressive flow
      (Kingma et al. 2016), which is what noise and posteriors want.

    The net reads :math:`q(z) = z / (1 + |z| / 5)`, as in :class:`~flowbnn.transforms.Coupling`. Starts at the identity, or next to it.

    Args:
        dim: length of the vectors.
        univariate: the map :math:`g` of single numbers.
        cheap: the direction that costs one pass.
        hidden, order, activation, context_dim: of the :class:`~flowbnn.nets.MaskedMLP` that is made when no net is given.
        net: a module called as ``net(q(value), context)`` that gives ``univariate.per_entry`` numbers for each entry, laid
            out as ``univariate.interleaved`` says; its ``passes(event_shape)`` is the longest chain of entries that depend on
            each other. Sequences have :class:`~flowbnn.nets.WaveNet`, images :class:`~flowbnn.nets.PixelCNN`.
        compress: whether the net reads :math:`q`, or else the values themselves, as the papers have it.
        event_dim: trailing axes of one event: 2 for sequences, 3 for images, features last.

    >>> flow = Autoregressive(3, cheap="forward", hidden=(16,))
    >>> x, log_det = flow(torch.ones(2, 3))
    >>> x.shape, log_det.detach()
    (torch.Size([2, 3]), tensor([0., 0.]))
    """

    @checked
    def __init__(
        self,
        dim: Count,
        univariate: Univariate = AffineMap(),  # noqa: B008
        cheap: Literal["forward", "inverse"] = "inverse",
        hidden: Sequence[Count] = (64, 64),
        order: Sequence[int] | None = None,
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Length = 0,
        net: nn.Module | None = None,
        compress: bool = True,
        event_dim: Count = 1,
    ) -> None:
        if net is None:
            width = univariate.width
            layout = univariate.interleaved, univariate.features if compress else width
            sizes = dim // width, univariate.per_entry * width
            net = MaskedMLP(*sizes, hidden, order, activation, context_dim, *layout)
        super().__init__(dim, univariate, net, compress)
        self.event_dim = event_dim
        if not callable(getattr(self.net, "passes", None)):
            text = f"the net of an autoregressive map says its passes(event_shape), which {type(net).__name__} does not"
            raise FlowBNNError(text, argument="net")
        self.reads = cheap  # the input of which direction the net reads
        self.cheap = cheap if event_dim > 1 or self._passes(torch.Size([dim])) > 1 else "both"

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        run = self._at_once if self.reads == "forward" else self._by_entry
        return run(self.univariate.forward, z, context)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        run = self._at_once if self.reads == "inverse" else self._by_entry
        return run(self.univariate.inverse, x, context)

    def _at_once(self, function: Direction, value: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        self._check(value)
        result, log_slope = function(value, self._parameters_for(value, context, self.dim))
        return result, sum_rightmost(log_slope, self.event_dim)

    def _by_entry(self, function: Direction, value: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        self._check(value)
        result = torch.zeros_like(value)
        # after pass k the first k entries of the order are right, and no later pass changes them or the path of their gradients
        for _ in range(self._passes(value.shape[value.ndim - self.event_dim :])):
            result, log_slope = function(value, self._parameters_for(result, context, self.dim))
        return result, sum_rightmost(log_slope, self.event_dim)

    def _passes(self, shape: torch.Size) -> int:
        return self.net.passes(shape)  # type: ignore[operator]
