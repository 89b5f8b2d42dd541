"""Flows as modules: the base classes of named flows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flowbnn import transforms
from flowbnn.distributions import Base, Flow, NormalBase
from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length, check_context
from flowbnn.options import Count, Depth, Dim, checked
from flowbnn.transforms import Autoregressive, Compose, Coupling, Transform, Univariate

Widths = Sequence[Count]
Direction = Literal["forward", "inverse"]


class FlowModel(torch.nn.Module):
    """Module that owns a base and a transform, and returns their flow when it is called.

    Args:
        base: Module of the base distribution.
        transform: Transform from the base to the sample.
        context_dim: Length of the context vectors that the transform reads; 0 for none.

    >>> from flowbnn.transforms import Radial
    >>> FlowModel(NormalBase(2, 0.0, 1.0), Radial(2))().event_shape
    torch.Size([2])
    """

    @checked
    def __init__(self, base: Base, transform: Transform, context_dim: Length = 0) -> None:
        super().__init__()
        self.base, self.transform, self.context_dim = base, transform, context_dim

    @property
    def capturable(self) -> bool:
        """True if a density needs no decision on the host, so that a CUDA graph can capture a training step."""
        return self.transform.solver in ("none", "forward") and self.transform.log_det_kind == "exact"

    def forward(self, context: Tensor | None = None) -> Flow:
        """Returns the distribution.

        Args:
            context: Context vectors ``(..., context_dim)``. There is one distribution for each.
        """
        if context is not None or self.context_dim:
            check_context(context, self.context_dim, type(self).__name__)
        return Flow(self.base.distribution(), self.transform, context)


class NamedFlow(FlowModel, ABC):
    """Base class for named flows. A subclass defines :meth:`make_transforms`.

    A subclass with further options sets them as attributes and then calls ``super().__init__``, which builds the transforms.

    Args:
        dim: Length of the vectors; for some flows also the shape of images.
        context_dim: Length of the context vectors; 0 for none.
        base: Base of the same length; by default that of :meth:`default_base`.
    """

    dim: Any

    def __init__(self, dim: Any, context_dim: int = 0, base: Base | None = None) -> None:
        self.dim, self.context_dim = dim, context_dim
        transform = Compose(*self.make_transforms())
        size = transform.inverse_shape([dim] if isinstance(dim, int) else dim)[-1]
        default = self.default_base(size)
        expected = f"{size} {default.value_kind}"
        if base is not None and (actual := f"{base.dim} {base.value_kind}") != expected:
            text = f"{type(self).__name__}(base=...) must model {expected}, got {actual}"
            raise FlowBNNError(text, kind="shape", argument="base")
        super().__init__(base or default, transform, context_dim)

    @abstractmethod
    def make_transforms(self) -> Sequence[Transform]:
        """Returns the transforms from the base to the sample."""

    def default_base(self, size: int) -> Base:
        """Returns the default base of this length."""
        return NormalBase(size, 0.0, 1.0)


class StackedFlow(NamedFlow):
    """Base class for flows of several steps with networks. A subclass defines :meth:`make_step`.

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of steps.
        hidden: Widths of the hidden layers of the networks.
        base: Base of the same length; standard normal by default.
    """

    @checked
    def __init__(
        self,
        dim: Dim,
        context_dim: Length = 0,
        length: Depth = 4,
        hidden: Widths = (64, 64),
        *,
        base: Base | None = None,
    ) -> None:
        self.length, self.hidden = length, hidden
        super().__init__(dim, context_dim, base)

    def make_transforms(self) -> Sequence[Transform]:
        return [self.make_step(self.dim, index) for index in range(self.length)]

    @abstractmethod
    def make_step(self, size: int, index: int) -> Transform:
        """Returns one step.

        Args:
            size: Length of the vectors, or number of channels of images.
            index: Number of the step.
        """

    def coupling_options(self, size: int, index: int, univariate: Univariate) -> dict[str, Any]:
        """Returns the options of a coupling: its network, and the half that stays unchanged, in turn."""
        return {"flip": bool(index % 2), "hidden": self.hidden, "context_dim": self.context_dim}

    def make_coupling(self, size: int, index: int, univariate: Univariate) -> Transform:
        """Returns a coupling. A single entry has no other entry to condition on and is moved alone."""
        if size == 1:
            return self.make_autoregressive(1, index, univariate)
        return Coupling(size, univariate, **self.coupling_options(size, index, univariate))

    def make_autoregressive(
        self, size: int, index: int, univariate: Univariate, cheap: Direction = "inverse"
    ) -> Transform:
        """Returns an autoregressive transform. Every second one has the reversed order."""
        order = range(size)[:: -1 if index % 2 else 1]
        return Autoregressive(size, univariate, cheap, self.hidden, order, context_dim=self.context_dim)


class ParametricFlow(NamedFlow):
    """Base class for flows without networks. A subclass defines :meth:`make_maps`. A context gets its own parameters of the maps.

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of maps.
        base: Base of the same length; standard normal by default.
    """

    @checked
    def __init__(
        self, dim: Dim, context_dim: Length = 0, length: Depth = 4, *, base: Base | None = None
    ) -> None:
        self.length = length
        super().__init__(dim, context_dim, base)

    @abstractmethod
    def make_maps(self) -> Sequence[Transform]:
        """Returns the transforms without a context."""

    def make_transforms(self) -> Sequence[Transform]:
        maps = self.make_maps()
        return [transforms.Amortized(each, self.context_dim) for each in maps] if self.context_dim else maps
