"""The door for transforms of ``torch.distributions``, and so of zuko."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.transforms.base import Transform

__all__ = ["from_torch"]


class _TorchTransform(Transform):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.lazy = isinstance(source, nn.Module)
        self.source = source
        if not self.lazy:
            for index, parameter in enumerate(_parameters(source)):
                self.register_parameter(f"parameter_{index}", parameter)
        transform = self._transform(None)
        if transform is not None:
            self.event_dim = max(transform.domain.event_dim, transform.codomain.event_dim)

    def _transform(self, context: Tensor | None) -> Any:
        if not self.lazy:
            return self.source
        try:
            return self.source() if context is None else self.source(context)
        except TypeError:
            if context is None:
                return None  # needs a context: known only at the first call
            raise

    def _apply_transform(self, transform: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        if transform is None:
            raise FlowBNNError("this transform needs a context; pass one to forward and inverse")
        if hasattr(transform, "call_and_ladj"):  # zuko computes both in one pass
            result, log_det = transform.call_and_ladj(value)
        else:
            result = transform(value)
            log_det = transform.log_abs_det_jacobian(value, result)
        return result, log_det.expand(value.shape[: value.ndim - self.event_dim])

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._apply_transform(self._transform(context), z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        transform = self._transform(context)
        return self._apply_transform(None if transform is None else transform.inv, x)


def _parameters(source: Any, seen: set[int] | None = None) -> Iterator[nn.Parameter]:
    seen = set() if seen is None else seen
    if id(source) in seen:
        return
    seen.add(id(source))
    if isinstance(source, nn.Parameter):
        yield source
    elif isinstance(source, list | tuple):
        for part in source:
            yield from _parameters(part, seen)
    elif isinstance(source, torch.distributions.Transform):
        for part in vars(source).values():
            yield from _parameters(part, seen)


def from_torch(source: Any) -> Transform:
    """Let a ``torch.distributions`` transform serve as a flowbnn transform.

    Args:
        source: a ``torch.distributions.Transform`` (its ``nn.Parameter`` attributes are registered and trained), or a
            module that returns one when called, with the context if there is one, as zuko's lazy transforms do.
            Its call is taken as base to sample; zuko's flows map sample to base, so pass ``Inverse(from_torch(t))`` for those.

    >>> from torch.distributions.transforms import AffineTransform
    >>> transform = from_torch(AffineTransform(nn.Parameter(torch.zeros(2)), torch.full((2,), 3.0), event_dim=1))
    >>> transform(torch.ones(2))[0].tolist(), len(list(transform.parameters()))
    ([3.0, 3.0], 1)
    """
    if not isinstance(source, torch.distributions.Transform | nn.Module):
        raise FlowBNNError(
            f"from_torch takes a torch.distributions Transform or a module that returns one, not {type(source).__name__}"
        )
    if isinstance(source, Transform):
        return source
    return _TorchTransform(source)
