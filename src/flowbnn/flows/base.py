"""Any flow as a module, and the named ones on a standard normal base."""

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor, nn

from flowbnn.distributions import Base, Flow, NormalBase
from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length
from flowbnn.options import Count, Ge, checked
from flowbnn.transforms import Compose, Transform

Widths = Sequence[Count]
Bins = Annotated[int, Ge(2)]


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
        given = 0 if context is None else context.shape[-1] if context.ndim else -1
        if given != self.context_dim:
            raise FlowBNNError(
                f"{type(self).__name__} was made with context_dim={self.context_dim}, and is given "
                + ("no context" if context is None else f"a context of shape {tuple(context.shape)}"),
                kind="shape",
                argument="context",
            )
        return Flow(self.base.distribution(), self.transform, context)


class Named(FlowModel):
    """A flow on a standard normal base, unless another of the same length is given."""

    def __init__(self, dim: int, context_dim: int, base: Base | None, *parts: Transform) -> None:
        if base is not None and base.dim != dim:
            raise FlowBNNError(
                f"{type(self).__name__}({dim}) needs a base of that length, not of {base.dim}",
                kind="shape",
                argument="base",
            )
        super().__init__(base or NormalBase(dim, 0.0, 1.0), Compose(*parts), context_dim)
