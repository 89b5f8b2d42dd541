"""Any flow as a module, and the named ones on a standard normal base."""

from collections.abc import Sequence
from dataclasses import InitVar, field
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import torch
from torch import Tensor, nn

from flowbnn.distributions import Base, Flow, NormalBase
from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length
from flowbnn.options import Count, Ge, checked, options
from flowbnn.transforms import Autoregressive, Compose, Coupling, Transform, Univariate

Widths = Sequence[Count]
Bins = Annotated[int, Ge(2)]
Cheap = Literal["forward", "inverse"]
Kind = TypeVar("Kind", bound=type)


class FlowModel(nn.Module):
    """Any flow as a module: the base and the transform it owns, and the distribution they make when it is called.

    Args:
        base: the owner of the base distribution.
        transform: from the base to the sample.
        context_dim: length of the context vectors that the transform reads; 0 for none.

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
        """Whether a density decides nothing on the host, so that a training step may be recorded as a CUDA graph."""
        return self.transform.solver in ("none", "forward") and self.transform.log_det_kind == "exact"

    def forward(self, context: Tensor | None = None) -> Flow:
        """The distribution, one for each context vector ``(..., context_dim)``."""
        shape = torch.Size([0]) if context is None else context.shape
        if shape[-1:] != (self.context_dim,):
            given = "no context" if context is None else f"a context of shape {tuple(shape)}"
            text = f"{type(self).__name__} was made with context_dim={self.context_dim}, and is given {given}"
            raise FlowBNNError(text, kind="shape", argument="context")
        return Flow(self.base.distribution(), self.transform, context)


@dataclass_transform(field_specifiers=(field,))
def recipe(kind: Kind) -> Kind:
    """Make the annotated attributes of a subclass of :class:`Named` its checked arguments, as a dataclass does."""
    made: Any = options(kind, frozen=False, eq=False, repr=False)
    made.__init__.__wrapped__.__annotations__["base"] = Base | None  # what users read and hand over
    if "base" in vars(made):
        made.__annotations__["base"] = Base | None
        del made.base  # a default that would hide the module
    return made


@recipe
class Named(FlowModel):
    """A flow by name: arguments as attributes, and :meth:`parts`, which makes the transforms of them.

    Args:
        dim: length of the vectors; of some flows also the shape of images.
        context_dim: length of the context; 0 for none.
        base: of the same length; a standard normal one unless :meth:`own_base` says another.
    """

    dim: Count
    context_dim: Length = 0
    base: InitVar[Base | None] = field(default=None, kw_only=True)

    def __post_init__(self, base: Base | None) -> None:
        transform = Compose(*self.parts())
        size = transform.inverse_shape([self.dim] if isinstance(self.dim, int) else self.dim)[-1]
        if base is not None and base.dim != size:
            text = f"{type(self).__name__}({self.dim}) needs a base of length {size}, not of {base.dim}"
            raise FlowBNNError(text, kind="shape", argument="base")
        super().__init__(base or self.own_base(size), transform, self.context_dim)

    def parts(self) -> Sequence[Transform]:
        """The transforms, from the base to the sample."""
        raise NotImplementedError

    def own_base(self, size: int) -> Base:
        """The base where none is given."""
        return NormalBase(size, 0.0, 1.0)


@recipe
class Steps(Named):
    """A named flow of so many steps, which :meth:`step` makes, and whose networks have layers of these widths."""

    length: Count = 4
    hidden: Widths = (64, 64)

    def parts(self) -> Sequence[Transform]:
        return [self.step(self.dim, number) for number in range(self.length)]

    def step(self, size: int, number: int) -> Transform:
        """One of the steps, for vectors (or so many channels of images)."""
        raise NotImplementedError

    def net(self, size: int, number: int, univariate: Univariate) -> dict[str, Any]:
        """The network of a coupling, and what it keeps: the halves in turn."""
        return {"flip": bool(number % 2), "hidden": self.hidden, "context_dim": self.context_dim}

    def coupling(self, size: int, number: int, univariate: Univariate) -> Transform:
        """A coupling; one entry has no other to read, and is moved alone."""
        if size == 1:
            return self.ordered(1, number, univariate)
        return Coupling(size, univariate, **self.net(size, number, univariate))

    def ordered(self, size: int, number: int, univariate: Univariate, cheap: Cheap = "inverse") -> Transform:
        """An autoregressive map, every second one backwards, so that each entry comes early and late."""
        order = range(size)[:: -1 if number % 2 else 1]
        return Autoregressive(size, univariate, cheap, self.hidden, order, context_dim=self.context_dim)
