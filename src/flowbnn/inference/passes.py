"""One pass of a network: in evaluation mode, without gradients, at a chosen precision, compiled where that is asked for."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.inference.batches import call

__all__ = ["Compile", "casting", "compiled", "device_of", "dtype_of", "evaluating", "half_of"]

Compile = bool | Literal["auto"]

_HALF = {
    "bf16": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "fp16": torch.float16,
    "16-mixed": torch.float16,
}
_FULL = (None, "32", "32-true", "float32")


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """The precision of the network's weights, which its inputs are brought to."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def device_of(model: nn.Module) -> torch.device:
    tensor = next(iter(model.parameters()), None)
    return tensor.device if tensor is not None else torch.device("cpu")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; every module's own training flag comes back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


def half_of(precision: str | None) -> torch.dtype | None:
    """The half precision that a name asks for, or None for the network's own.

    >>> half_of("bf16"), half_of(None)
    (torch.bfloat16, None)
    """
    if precision in _FULL:
        return None
    if precision not in _HALF:
        raise FlowBNNError(
            f"there is no precision {precision!r} to predict in{nearest(str(precision), [*_HALF, '32'])}"
        )
    return _HALF[precision]


def casting(device: torch.device, half: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to ``half``: layers compute in it, noise and flows stay in float32."""
    return nullcontext() if half is None else torch.autocast(device.type, half)


_COMPILED: WeakKeyDictionary[nn.Module, dict[str, Callable[[nn.Module, Any], Tensor]]] = WeakKeyDictionary()


def _forward(model: nn.Module, inputs: Any) -> Tensor:
    return call(model, inputs)


def compiled(model: nn.Module, graphs: bool) -> Callable[[nn.Module, Any], Tensor]:
    """The network's forward pass through ``torch.compile``, kept with the network; give it inputs of few shapes.

    Args:
        graphs: replay the kernels from a CUDA graph, for passes so short that launching them is what takes the time.
    """
    known = _COMPILED.setdefault(model, {})
    mode = "reduce-overhead" if graphs else "default"
    if mode not in known:
        # torch keeps what it compiles with the code object, and gives up after eight: every network gets a copy of its own
        own = FunctionType(_forward.__code__.replace(), globals(), "forward")
        known[mode] = torch.compile(own, dynamic=False, mode=mode)
    return known[mode]
