"""The door for transforms of ``torch.distributions``, and so of zuko."""

from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution, transforms

from flowbnn.errors import FlowBNNError
from flowbnn.options import checked
from flowbnn.transforms.base import Transform
from flowbnn.transforms.compose import Compose, Inverse


class TorchTransform(Transform):
    """What :func:`from_torch` makes of one transform, or of one module that gives it."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        self.made = isinstance(source, transforms.Transform)
        with suppress(TypeError):  # one that needs a context is known only at the first call
            transform = self._transform(None)
            if not transform.bijective or transform.domain.event_dim != transform.codomain.event_dim:
                raise FlowBNNError(
                    f"a flow needs a bijection of a space onto itself, which {type(transform).__name__} does not declare to be"
                )
            self.event_dim = transform.domain.event_dim

    def ends(self) -> tuple[Any, Any] | None:
        return (self.source.domain, self.source.codomain) if self.made else None

    def _transform(self, context: Tensor | None) -> Any:
        if self.made:
            return self.source
        return self.source() if context is None else self.source(context)

    def _apply_transform(self, transform: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(transform, "call_and_ladj"):  # zuko computes both in one pass
            result, log_det = transform.call_and_ladj(value)
        else:
            result = transform(value)
            log_det = transform.log_abs_det_jacobian(value, result)
        if result.shape != value.shape:
            raise FlowBNNError(
                f"{type(self.source).__name__} turned shape {tuple(value.shape)} into {tuple(result.shape)}; a flow needs a map of a "
                "space onto itself, and a base that has the batch axes of the transform's parameters"
            )
        return result, log_det.expand(value.shape[: value.ndim - self.event_dim])

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._apply_transform(self._transform(context), z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._apply_transform(self._transform(context).inv, x)

    def extra_repr(self) -> str:
        return type(self.source).__name__


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, transforms.Transform | Distribution):
        value = {name: part for name, part in vars(value).items() if name not in ("_cached_x_y", "_inv")}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor | nn.Module) or any(map(_holds_tensors, parts))


@checked
def from_torch(source: transforms.Transform | nn.Module) -> Transform:
    """Let a ``torch.distributions`` transform serve as a flowbnn transform.

    Compositions and inverses become :class:`~flowbnn.transforms.Compose` and :class:`~flowbnn.transforms.Inverse`.

    Args:
        source: a bijective ``torch.distributions.Transform`` without tensors, or a module that returns one when called, with the
            context if there is one, as zuko's lazy transforms do; what it learns are the module's parameters.
            Its call is taken as base to sample; zuko's flows map sample to base, so pass ``Inverse(from_torch(t))`` for those.

    >>> import torch
    >>> class Scale(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scale = nn.Parameter(torch.full((2,), 3.0))
    ...     def forward(self):
    ...         return transforms.AffineTransform(0.0, self.scale, event_dim=1)
    >>> from_torch(Scale())(torch.ones(2))[0].tolist()
    [3.0, 3.0]
    """
    if isinstance(source, Transform):
        return source
    if isinstance(source, transforms._InverseTransform):
        return Inverse(from_torch(source.inv))
    if type(source) is transforms.ComposeTransform:
        return Compose(*(from_torch(part) for part in source.parts))
    if not isinstance(source, nn.Module) and _holds_tensors(source):
        raise FlowBNNError(
            f"{type(source).__name__} holds tensors, which would neither move nor be saved with the flow: give a module that makes it "
            "when it is called",
            argument="source",
        )
    return TorchTransform(source)
