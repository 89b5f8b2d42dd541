"""What one pass over a few rows shows of a network: its width and its work, and whether it could move rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flowbnn.batches import call, evaluation_mode, is_out_of_memory, rows, watch_modules
from flowbnn.noise import Noise, noise_layers
from flowbnn.noise.base import settings_of
from flowbnn.noise.passes import NoisePass
from flowbnn.numerics import is_concrete

Result = TypeVar("Result")


def outcome(work: Callable[[], Result]) -> Result | Exception:
    """What ``work`` gives, or the error that it raises; that memory ran out says nothing about the work."""
    try:
        return work()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error


@dataclass
class Call:
    """The first call of a module in a recorded pass: shapes, and floating-point operations of all layers up to it."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    before: float
    after: float
    count: int = 1


@dataclass
class Recording:
    """What one pass over a few rows shows of a network.

    Args:
        rows: of the inputs.
        widest: bytes of one row where a module reads and writes the most; 0 if unknown.
        flops: floating-point operations of one row in matrix products and convolutions; None if unknown.
        calls: the calls of the layers with noise, by name, in the order of the pass.
        outputs: of the network, with the noise of :class:`TrialDraws` where it has any.
        unusual: an operation that could move rows by what they hold (routing, early exit), if there was one.
        read_elsewhere: layers with noise whose weight something else reads too.
        asked: the positions at which layers have drawn noise, by the layer's key, and how often.
        error: what the network raised, if it failed.
        plan: what a posterior has made of this.
    """

    rows: int
    widest: int = 0
    flops: float | None = None
    calls: dict[str, Call] = field(default_factory=dict)
    outputs: Tensor | None = None
    unusual: str = ""
    read_elsewhere: set[str] = field(default_factory=set)
    asked: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    error: Exception | None = None
    plan: Any = None


class TrialDraws:
    """Noise between a half and one and a half in place of the posterior's, which may be too narrow to tell two samples apart."""

    def __init__(self, samples: int, asked: dict[tuple[int, tuple[int, ...]], int] | None = None) -> None:
        self.samples, self.asked = samples, asked

    def draws(self, layer: Noise, at: tuple[int, ...], device: torch.device) -> Tensor:
        """The draws of a layer at some positions."""
        if self.asked is not None:
            self.asked[layer.key, at] = self.asked.get((layer.key, at), 0) + 1
        source = torch.Generator(device).manual_seed(layer.key)
        drawn = torch.rand((2, *at, layer.layout.dim), generator=source, device=device)
        return 0.5 + drawn[: self.samples]


# operations that decide by values, or move rows; those with a number do so where their argument of this number is axis 0
MOVING = {
    "_local_scalar_dense": None, "nonzero": None, "masked_select": None, "unique": None, "_unique": None, "_unique2": None,
    "unique_consecutive": None, "unique_dim": None, "bincount": None, "equal": None, "is_nonzero": None, "masked_scatter": None,
    "repeat_interleave": None, "index": 1, "index_put": 1, "index_put_": 1, "_index_put_impl_": 1, "index_select": 1, "index_add": 1,
    "index_copy": 1, "index_fill": 1, "gather": 1, "scatter": 1, "scatter_": 1, "scatter_add": 1, "scatter_add_": 1,
    "scatter_reduce": 1, "sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2, "flip": 1, "roll": 2, "take_along_dim": 2, "take": None,
    "_embedding_bag": None, "_embedding_bag_forward_only": None,
}  # fmt: skip


# operations in which rows meet where their argument of this number names axis 0 or is left out
MEETING = {
    "cumsum": 1, "cumprod": 1, "cummax": 1, "cummin": 1, "logcumsumexp": 1, "max": 1, "min": 1, "amax": 1, "amin": 1, "aminmax": 1,
    "argmax": 1, "argmin": 1, "median": 1, "nanmedian": 1, "mode": 1, "any": 1, "all": 1, "sum": 1, "mean": 1, "prod": 1,
    "logsumexp": 1, "var": 1, "std": 1, "var_mean": 1, "std_mean": 1, "linalg_vector_norm": 2, "_softmax": 1, "_log_softmax": 1,
}  # fmt: skip


def _moves_rows(name: str, args: Any, rows: int) -> bool:
    """Whether an operation could move rows by what they hold, or lets rows meet."""
    if name not in MOVING and name not in MEETING:
        return False
    place = MOVING.get(name, MEETING.get(name))
    if place is None:
        return True
    meets = name in MEETING
    size = args[0].shape[0] if isinstance(args[0], Tensor) and args[0].ndim else 1
    if meets and (isinstance(args[0], nn.Parameter) or size < rows or size % rows):
        return False  # a weight, or an axis that is not that of the rows
    axis = args[place] if len(args) > place else None if meets else -1
    if name.startswith(("index", "_index")) and isinstance(axis, list | tuple):
        return bool(axis) and axis[0] is not None  # one index for each axis
    axes = axis if isinstance(axis, list | tuple) else [axis]
    everything = not axes or axes[0] is None
    return everything or any(isinstance(one, int) and one % max(1, args[0].ndim) == 0 for one in axes)


class _Operations(TorchDispatchMode):
    """Looks at every operation of a pass: its work, whether it could move rows, whose weights it reads.

    The work is counted where torch's own counter knows it; what it cannot count makes the total unknown, never an error.
    """

    def __init__(self, recording: Recording, owners: dict[int, str]) -> None:
        super().__init__()
        self.recording, self.owners = recording, owners
        self.total, self.known = 0.0, True
        self.inside: list[str] = []  # the modules that are running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if _moves_rows(name, args, self.recording.rows):
            self.recording.unusual = name
        for value in args:
            owner = self.owners.get(value.data_ptr()) if isinstance(value, Tensor) else None
            if owner is not None and self.inside[-1:] != [owner]:
                self.recording.read_elsewhere.add(owner)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            try:
                self.total += count(*args, **(kwargs or {}), out_val=out)
            except Exception:
                self.known = False
        return out


def record(model: nn.Module, inputs: Any) -> Recording:
    """One pass over these inputs, and what it shows; a network that fails gives a recording with its error.

    >>> shown = record(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.zeros(2, 4))
    >>> shown.widest, shown.flops
    (64, 64.0)
    """
    recording, begun, noisy = Recording(max(1, rows(inputs))), [], noise_layers(model)
    weights = {name: model.get_submodule(name)._parameters.get("weight") for name in noisy}
    operations = _Operations(recording, {w.data_ptr(): name for name, w in weights.items() if w is not None})

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append(operations.total)
        operations.inside.append(name)

    def end(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        operations.inside.pop()
        before, given, size = begun.pop(), next(iter((*args, *kwargs.values())), None), 0
        for value in (*args, output):
            size += value.numel() * value.element_size() if isinstance(value, Tensor) else 0
        recording.widest = max(recording.widest, size // recording.rows)
        if name in recording.calls:
            recording.calls[name].count += 1
        elif name in noisy:
            recording.calls[name] = Call(_shape(given), _shape(output), before, operations.total)

    noise: AbstractContextManager[Any] = nullcontext()
    if noisy:
        noise = NoisePass(settings_of(model, "shared", 1, 0), shares=False)
        noise.given = TrialDraws(1, recording.asked)
    with watch_modules(dict(model.named_modules()), begin, end), evaluation_mode(model), noise, operations:
        shown = outcome(partial(call, model, inputs))
    if isinstance(shown, Exception):  # the real pass will say what is wrong
        recording.error = shown
    else:
        recording.outputs = shown
        recording.flops = operations.total / recording.rows if operations.known else None
    return recording


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


class Sigmoids(TorchFunctionMode):
    """Notes what sigmoids give in a pass.

    >>> with Sigmoids() as sigmoids:
    ...     one, other = torch.sigmoid(torch.ones(2, 1)), torch.ones(2, 1)
    >>> sigmoids.gave(one.squeeze(1)), sigmoids.gave(other)
    (True, False)
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = getattr(func, "__name__", "") in ("sigmoid", "sigmoid_", "special_expit")
        if known and type(result) is Tensor and is_concrete(result):
            self.given.append(result)
        return result

    def gave(self, outputs: Tensor) -> bool:
        """Whether a tensor is one of these, in another shape or precision perhaps, or clamped."""
        alike = (one.flatten().to(outputs) for one in self.given if one.numel() == outputs.numel())
        return any(torch.allclose(one, outputs.flatten(), atol=1e-5) for one in alike)
