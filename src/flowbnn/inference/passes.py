"""One pass of a network: in evaluation mode, without gradients, at a chosen precision, compiled where that is asked for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.inference.batches import call

__all__ = [
    "Compile",
    "casting",
    "compiled",
    "device_of",
    "dtype_of",
    "evaluating",
    "half_of",
    "parts_of",
    "uncompilable",
    "unguarded",
]

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


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The network's modules, each once and in its order, as ``modules()`` gives them, in a tenth of the time.

    >>> network = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    >>> parts_of(network) == list(network.modules())
    True
    """
    found: dict[nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting.extend(part for part in reversed(module._modules.values()) if part is not None)
    return list(found)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; every module's own training flag comes back afterwards.

    Modules that have a ``train`` of their own, which may do more than set flags (adapters that merge their weights), are told.
    """
    flags = [(module, module.training) for module in parts_of(model)]
    if any(training for _, training in flags):
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            if module.training != training and type(module).train is not nn.Module.train:
                module.train(training)
        for module, training in flags:
            if module.training != training:
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


def uncompilable() -> tuple[type[Exception], ...]:
    """What torch raises where a network does not compile."""
    from torch._dynamo import exc  # takes a second to load, which only those who compile should wait for

    names = ("TorchDynamoException", "FailOnRecompileLimitHit", "FailOnCacheLimitHit")
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


def unguarded() -> AbstractContextManager[Any]:
    """Compiled functions that have been called as they will be called are not checked again: half of what a call costs a processor.

    torch has this setting for all threads, so it is left alone where another one might run compiled functions of its own.
    """
    threads = threading.enumerate()
    alone = threading.current_thread() is threading.main_thread() and sum(not t.daemon for t in threads) == 1
    return torch.compiler.set_stance(skip_guard_eval_unsafe=True) if alone else nullcontext()


_COMPILED: WeakKeyDictionary[nn.Module, dict[Any, Callable[..., Tensor]]] = WeakKeyDictionary()


def _forward(model: nn.Module, inputs: Any) -> Tensor:
    return call(model, inputs)


def compiled(
    model: nn.Module, graphs: bool, forward: Any = _forward, whole: bool = False
) -> Callable[..., Tensor]:
    """The network's forward pass through ``torch.compile``, kept with the network; give it inputs of few shapes.

    Args:
        graphs: replay the kernels from a CUDA graph, for passes so short that launching them is what takes the time.
        forward: the function of a pass, ``forward(model, ..., inputs)``; it must not hold the network.
        whole: in one graph or not at all.
    """
    known = _COMPILED.setdefault(model, {})
    mode = "reduce-overhead" if graphs else "default"
    key = (forward, mode, whole)
    if key not in known:
        # torch keeps what it compiles with the code object, and gives up after eight: every network gets a copy of its own
        own = FunctionType(forward.__code__.replace(), forward.__globals__, "forward")
        known[key] = torch.compile(own, dynamic=False, mode=mode, fullgraph=whole)
    return known[key]
