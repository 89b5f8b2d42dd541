"""The door for transforms of ``torch.distributions``, and so of zuko."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, transforms

from flowbnn.errors import FlowBNNError
from flowbnn.transforms.base import Transform
from flowbnn.transforms.compose import Compose, Inverse

__all__ = ["TorchTransform", "from_torch"]


@dataclass
class _Slot:
    """A place that a registered tensor or module of the wrapper fills."""

    name: str


@dataclass
class _Object:
    """A transform (or a distribution inside one) taken apart."""

    kind: type
    state: dict[str, Any]


class TorchTransform(Transform):
    """What :func:`from_torch` makes of one transform or one lazy module.

    A plain transform is taken apart: its parameters, other tensors and modules are registered here, and at each call it is put
    together again around what is registered *then*. So ``to``, ``load_state_dict``, ``deepcopy`` and ``functional_call`` reach it.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.lazy = isinstance(source, nn.Module) and not isinstance(source, transforms.Transform)
        self.title = type(source).__name__
        self.plan = _Slot("source") if isinstance(source, nn.Module) else _Registry(self).take(source)
        if isinstance(source, nn.Module):
            self.source = source
        transform = self._transform(None)
        if transform is not None:
            _check(transform)
            self.event_dim = max(transform.domain.event_dim, transform.codomain.event_dim)
            self.linearity = _linearity(transform) if not self.lazy else "none"

    def ends(self) -> tuple[Any, Any] | None:
        """Domain and range as torch's constraints, if they are known without a context."""
        transform = None if self.lazy else self._transform(None)
        return None if transform is None else (transform.domain, transform.codomain)

    def _transform(self, context: Tensor | None) -> Any:
        source = _put_together(self.plan, self)
        if not self.lazy:
            return source
        try:
            return source() if context is None else source(context)
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
        if result.shape != value.shape:
            raise FlowBNNError(
                f"{self.title} turned shape {tuple(value.shape)} into {tuple(result.shape)}; a flow needs a map of a space "
                "onto itself, and a base that has the batch axes of the transform's parameters"
            )
        return result, log_det.expand(value.shape[: value.ndim - self.event_dim])

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._apply_transform(self._transform(context), z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        transform = self._transform(context)
        return self._apply_transform(None if transform is None else transform.inv, x)

    def extra_repr(self) -> str:
        return self.title


class _Registry:
    """Takes objects apart and registers what they hold; a tensor that is held twice is registered once."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.names: dict[int, str] = {}

    def take(self, value: Any) -> Any:
        if isinstance(value, Tensor | nn.Module):
            return _Slot(self._register(value))
        if isinstance(value, transforms.Transform | Distribution):
            state = {name: self.take(part) for name, part in vars(value).items() if name not in _MEMORIES}
            if isinstance(value, transforms.Transform):
                state["_inv"] = self.take(value.inv) if isinstance(value, _BACKWARDS) else None
                state["_cached_x_y"] = (None, None)
            return _Object(type(value), state)
        if type(value) in (list, tuple):
            return type(value)(self.take(part) for part in value)
        if type(value) is dict:
            return {name: self.take(part) for name, part in value.items()}
        return value

    def _register(self, value: Tensor | nn.Module) -> str:
        if id(value) not in self.names:
            kind = (
                "parameter"
                if isinstance(value, nn.Parameter)
                else "buffer"
                if isinstance(value, Tensor)
                else "module"
            )
            name = f"{kind}_{sum(other.startswith(kind) for other in self.names.values())}"
            if isinstance(value, nn.Parameter):
                self.owner.register_parameter(name, value)
            elif isinstance(value, Tensor):
                self.owner.register_buffer(name, value)
            else:
                self.owner.add_module(name, value)
            self.names[id(value)] = name
        return self.names[id(value)]


_MEMORIES = ("_inv", "_cached_x_y")  # what a transform remembers of earlier calls
_BACKWARDS = transforms._InverseTransform


def _put_together(plan: Any, owner: nn.Module) -> Any:
    if isinstance(plan, _Slot):
        return getattr(owner, plan.name)
    if isinstance(plan, _Object):
        whole: Any = object.__new__(plan.kind)
        for name, part in plan.state.items():
            setattr(whole, name, _put_together(part, owner))
        return whole
    if type(plan) in (list, tuple):
        return type(plan)([_put_together(part, owner) for part in plan])
    if type(plan) is dict:
        return {name: _put_together(part, owner) for name, part in plan.items()}
    return plan


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
    name = type(transform).__name__
    if not transform.bijective:
        raise FlowBNNError(
            f"a flow needs a bijection, and {name} is declared with bijective = False; if it is one, set bijective = True"
        )
    if not _keeps_shape(transform):
        raise FlowBNNError(
            f"a flow needs a map of a space onto itself, and {name} changes the shape of its events; "
            "use torch.distributions.TransformedDistribution for it"
        )


def _linearity(transform: Any) -> Literal["diagonal", "affine", "none"]:
    if isinstance(transform, transforms.IndependentTransform):
        return _linearity(transform.base_transform)
    return "diagonal" if type(transform) is transforms.AffineTransform else "none"


def from_torch(source: Any) -> Transform:
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
    if not isinstance(source, transforms.Transform | nn.Module):
        raise FlowBNNError(
            f"from_torch takes a torch.distributions Transform or a module that returns one, not {type(source).__name__}"
        )
    if isinstance(source, Transform):
        return source
    if isinstance(source, _BACKWARDS):
        return Inverse(from_torch(source.inv))
    if type(source) is transforms.ComposeTransform:
        _check(source)
        if source.parts and all(_keeps_shape(part) for part in source.parts):
            return Compose(*(from_torch(part) for part in source.parts))
    return TorchTransform(source)
