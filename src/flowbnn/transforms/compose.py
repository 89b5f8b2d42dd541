"""Transforms made of transforms."""

from collections.abc import Iterator
from typing import Annotated

from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.numerics import sum_rightmost
from flowbnn.options import Hint, checked
from flowbnn.transforms.base import Transform, check_tensor


class Compose(Transform):
    r"""One transform after another: ``Compose(f, g)`` maps :math:`z \mapsto g(f(z))`, the order of application.

    Its ``event_dim`` is the largest of its parts', whose log-dets are summed to that shape. An empty ``Compose()`` is the
    identity on vectors.

    >>> import torch
    >>> from flowbnn.transforms import Exp, Reverse
    >>> x, log_det = Compose(Exp(), Reverse(3))(torch.tensor([0.0, 1.0, 2.0]))
    >>> x, log_det
    (tensor([7.3891, 2.7183, 1.0000]), tensor(3.))
    """

    @checked
    def __init__(self, *parts: Annotated[Transform, Hint("for a list write Compose(*parts)")]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.event_dim = max((part.event_dim for part in parts), default=1)
        # the weakest of the parts
        kinds = [part.linearity for part in parts]
        self.linearity = min(kinds, key=("none", "affine", "diagonal").index, default="diagonal")
        inverses = [part.inverse_kind for part in parts]
        self.inverse_kind = min(inverses, key=("none", "numerical", "exact").index, default="exact")

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        total = z.new_zeros(z.shape[: z.ndim - self.event_dim])
        for part in self:
            z, log_det = part.forward(z, context)
            total = total + sum_rightmost(log_det, self.event_dim - part.event_dim)
        return z, total

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(x, self)
        total = x.new_zeros(x.shape[: x.ndim - self.event_dim])
        for part in reversed(list(self)):
            x, log_det = part.inverse(x, context)
            total = total + sum_rightmost(log_det, self.event_dim - part.event_dim)
        return x, total

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.parts)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Transform:
        return self.parts[index]  # type: ignore[return-value]


class Inverse(Transform):
    r"""The same bijection run backwards: its forward is the part's inverse.

    >>> import torch
    >>> from flowbnn.transforms import Exp
    >>> Inverse(Exp())(torch.tensor([1.0]))[0]
    tensor([0.])
    """

    @checked
    def __init__(self, part: Transform) -> None:
        super().__init__()
        if part.inverse_kind == "none":
            raise FlowBNNError(f"{type(part).__name__} has no inverse, so Inverse cannot run it backwards")
        self.part = part
        self.event_dim = part.event_dim
        self.linearity = part.linearity
        self.inverse_kind = part.inverse_kind

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.part.inverse(z, context)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.part.forward(x, context)
