"""The door for transforms of ``torch.distributions``, and so of zuko."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, transforms

from flowbnn.errors import FlowBNNError
from flowbnn.options import checked
from flowbnn.transforms.base import Transform
from flowbnn.transforms.compose import Compose, Inverse


@dataclass
class _Slot:
    """A place that a registered tensor or module of the wrapper fills."""

    name: str


class TorchTransform(Transform):
    """What :func:`from_torch` makes of one transform or one lazy module.

    A plain transform is taken apart: its parameters, other tensors and modules are registered here, and at each call it is put
    together again around what is registered *then*. So ``to``, ``load_state_dict``, ``deepcopy`` and ``functional_call`` reach it.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.lazy = isinstance(source, nn.Module) and not isinstance(source, transforms.Transform)
        self.title = type(source).__name__
        if isinstance(source, nn.Module):
            self.source = source
            self.plan: Any = _Slot("source")
        else:
            names: dict[int, str] = {}
            self.plan = _exchanged(source, lambda value: _Slot(self._register(value, names)))
        with suppress(TypeError):  # one that needs a context is known only at the first call
            transform = self._transform(None)
            _check(transform)
            self.event_dim = max(transform.domain.event_dim, transform.codomain.event_dim)
            self.linearity = _linearity(transform) if not self.lazy else "none"

    def _register(self, value: Tensor | nn.Module, names: dict[int, str]) -> str:
        """The name of a tensor or module; one that is held twice is registered once."""
        if id(value) not in names:
            kind = "buffer" if isinstance(value, Tensor) else "module"
            kind = "parameter" if isinstance(value, nn.Parameter) else kind
            name = f"{kind}_{sum(other.startswith(kind) for other in names.values())}"
            names[id(value)] = name
            if kind == "buffer":
                self.register_buffer(name, value)  # type: ignore[arg-type]
            else:
                setattr(self, name, value)
        return names[id(value)]

    def ends(self) -> tuple[Any, Any] | None:
        """Domain and range as torch's constraints, if they are known without a context."""
        transform = None if self.lazy else self._transform(None)
        return None if transform is None else (transform.domain, transform.codomain)

    def _transform(self, context: Tensor | None) -> Any:
        source = _exchanged(self.plan, lambda slot: getattr(self, slot.name))
        if not self.lazy:
            return source
        return source() if context is None else source(context)

    def _apply_transform(self, transform: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(transform, "call_and_ladj"):  # zuko computes both in one pass
            result, log_det = transform.call_and_ladj(value)
        else:
            result = transform(value)
            log_det = transform.log_abs_det_jacobian(value, result)
        if result.shape != value.shape:
            raise FlowBNNError(
                f"{self.title} turned shape {tuple(value.shape)} into {tuple(result.shape)}; a flow needs a map of a space "
                "onto itself, and a base that has the batch axes of the transform's parameters"
            )
        return result, log_det.expand(value.shape[: value.ndim - self.event_dim])

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._apply_transform(self._transform(context), z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._apply_transform(self._transform(context).inv, x)

    def extra_repr(self) -> str:
        return self.title


_BACKWARDS = transforms._InverseTransform


def _exchanged(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a transform, or of a distribution inside one, with its tensors and modules (or their slots) exchanged."""
    if isinstance(value, Tensor | nn.Module | _Slot):
        return function(value)
    if isinstance(value, transforms.Transform | Distribution):
        whole: Any = object.__new__(type(value))
        state = dict(vars(value))
        if isinstance(value, transforms.Transform):  # which remembers earlier calls
            state["_cached_x_y"] = (None, None)
            state["_inv"] = state["_inv"] if isinstance(value, _BACKWARDS) else None
        for name, part in state.items():
            setattr(whole, name, _exchanged(part, function))
        return whole
    if type(value) in (list, tuple):
        return type(value)([_exchanged(part, function) for part in value])
    if type(value) is dict:
        return {name: _exchanged(part, function) for name, part in value.items()}
    return value


def _shape_after(transform: Any, shape: torch.Size) -> torch.Size:
    if isinstance(transform, transforms.ComposeTransform):
        for part in transform.parts:
            shape = _shape_after(part, shape)
        return shape
    try:
        return transform.forward_shape(shape)
    except (RuntimeError, ValueError):  # made for another width, which says nothing about a change of it
        return shape


def _keeps_shape(transform: Any) -> bool:
    axes = transform.domain.event_dim
    shape = torch.Size([7] * axes)
    return transform.codomain.event_dim == axes and (
        not axes or _shape_after(transform, shape)[-axes:] == shape
    )


def _check(transform: Any) -> None:
    if transform.bijective and _keeps_shape(transform):
        return
    trouble = "changes the shape of its events; use torch.distributions.TransformedDistribution for it"
    if not transform.bijective:
        trouble = "is declared with bijective = False; if it is one, set bijective = True"
    raise FlowBNNError(
        f"a flow needs a bijection of a space onto itself, and {type(transform).__name__} {trouble}"
    )


def _linearity(transform: Any) -> Literal["diagonal", "affine", "none"]:
    if isinstance(transform, transforms.IndependentTransform):
        return _linearity(transform.base_transform)
    return "diagonal" if type(transform) is transforms.AffineTransform else "none"


@checked
def from_torch(source: transforms.Transform | nn.Module) -> Transform:
    """Let a ``torch.distributions`` transform serve as a flowbnn transform.

    Its parameters are registered and trained, its other tensors are buffers; compositions and inverses become
    :class:`~flowbnn.transforms.Compose` and :class:`~flowbnn.transforms.Inverse`.

    Args:
        source: a bijective ``torch.distributions.Transform`` that keeps the shape of its events, or a module that returns one
            when called, with the context if there is one, as zuko's lazy transforms do.
            Its call is taken as base to sample; zuko's flows map sample to base, so pass ``Inverse(from_torch(t))`` for those.

    >>> from torch.distributions.transforms import AffineTransform
    >>> transform = from_torch(AffineTransform(nn.Parameter(torch.zeros(2)), torch.full((2,), 3.0), event_dim=1))
    >>> transform(torch.ones(2))[0].tolist(), list(transform.state_dict())
    ([3.0, 3.0], ['parameter_0', 'buffer_0'])
    """
    if isinstance(source, Transform):
        return source
    if isinstance(source, _BACKWARDS):
        return Inverse(from_torch(source.inv))
    if type(source) is transforms.ComposeTransform:
        _check(source)
        if source.parts and all(_keeps_shape(part) for part in source.parts):
            return Compose(*(from_torch(part) for part in source.parts))
    return TorchTransform(source)
