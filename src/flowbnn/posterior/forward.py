"""A network run over rows of inputs, in chunks that fit the device's memory."""

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flowbnn.batches import device_of, dtype_of
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.noise import Noise, NoisePass, noise_layers, settings_of
from flowbnn.posterior.batches import call, divisible, move, pad, rows, take, tensors_of
from flowbnn.training.device import keep_memory

__all__ = [
    "Forward",
    "Kept",
    "Limit",
    "Recording",
    "TrialDraws",
    "casting",
    "checked",
    "compiled",
    "evaluating",
    "even",
    "out_of_memory",
    "parts_of",
    "record",
    "uncompilable",
    "unguarded",
]

Result = TypeVar("Result")


class Kept:
    """What a posterior keeps from one prediction to the next: its lock, measurements, plans, compiled passes and their buffers.

    It is not saved, and a copy of the posterior begins with nothing kept.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], Result]) -> Result:
        """The value of this key, made on first use."""
        if key not in self.values:
            self.values[key] = make()
        return self.values[key]

    def __deepcopy__(self, memo: Any) -> "Kept":
        return Kept()

    def __reduce__(self) -> Any:
        return Kept, ()


# -------------------- the network


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
            for part in reversed(module._modules.values()):
                if part is not None:
                    waiting.append(part)
    return list(found)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; every module's own training flag comes back afterwards.

    Modules that have a ``train`` of their own, which may do more than set flags (adapters that merge their weights), have it called.
    """
    flags, training = [], False
    for module in parts_of(model):
        flags.append((module, module.training))
        training = training or module.training
    if training:
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


def casting(device: torch.device, half: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to ``half``: layers compute in it, noise and flows stay in float32."""
    return nullcontext() if half is None else torch.autocast(device.type, half)


# -------------------- a recorded pass


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
        calls: the calls of the watched modules, by name, in the order of the pass.
        outputs: of the network, with the noise of :class:`TrialDraws` where it has any.
        unusual: an operation that could move rows by what they hold (routing, early exit), if there was one.
        read_elsewhere: watched modules whose weight something else reads too.
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


def _moves_rows(name: str, args: Any) -> bool:
    """Whether an operation could move rows by what they hold."""
    if name not in MOVING:
        return False
    place = MOVING[name]
    if place is None:
        return True
    axis = args[place] if len(args) > place else -1
    if name.startswith(("index", "_index")) and isinstance(axis, list | tuple):
        return bool(axis) and axis[0] is not None  # one index for each axis
    axes = axis if isinstance(axis, list | tuple) else [axis]
    return not axes or any(isinstance(one, int) and one % max(1, args[0].ndim) == 0 for one in axes)


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
        if _moves_rows(name, args):
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


def record(model: nn.Module, inputs: Any, watch: Iterable[str] = ()) -> Recording:
    """One pass over these inputs, and what it shows; a network that fails gives a recording with its error.

    >>> shown = record(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.zeros(2, 4), watch=["1"])
    >>> shown.widest, shown.flops, shown.calls["1"].inputs
    (64, 64.0, (2, 8))
    """
    recording, begun, watched = Recording(max(1, rows(inputs))), [], set(watch)
    weights = {name: model.get_submodule(name)._parameters.get("weight") for name in watched}
    operations = _Operations(recording, {w.data_ptr(): name for name, w in weights.items() if w is not None})

    def begin(name: str, module: nn.Module, args: Any) -> None:
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
        elif name in watched:
            recording.calls[name] = Call(_shape(given), _shape(output), before, operations.total)

    noise: AbstractContextManager[Any] = nullcontext()
    if noise_layers(model):
        noise = NoisePass(settings_of(model, "shared", 1, 0), shares=False)
        noise.given = TrialDraws(1, recording.asked)
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(begin, name)))
        handles.append(module.register_forward_hook(partial(end, name), with_kwargs=True))
    try:
        with evaluating(model), noise, operations:
            recording.outputs = call(model, inputs)
        recording.flops = operations.total / recording.rows if operations.known else None
    except Exception as error:  # the real pass will say what is wrong
        if out_of_memory(error):
            raise
        recording.error = error
    finally:
        for handle in handles:
            handle.remove()
    return recording


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


# -------------------- memory

# past its caches a CPU gains nothing from more rows at once, and loses where the C library gives memory back between passes: beyond
# 64 MB, see flowbnn.training.device.keep_memory
CPU_BYTES = 3 * 2**24
GPU_BYTES = 2**33  # nor does a GPU when it is full
LEAST, MOST = 16, 2**17
WORDS = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a CUDA device or on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


def free_bytes(device: torch.device) -> int:
    """What a pass may use: half of the free memory of a GPU, a quarter of that of a CPU, up to what makes it quick."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] // 2
        if free < GPU_BYTES:  # torch's own counts take longer to read
            free += (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2
        return min(free, GPU_BYTES)
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (ValueError, OSError, AttributeError):
        free = 2**30
    return min(free, CPU_BYTES)


class Limit:
    """The rows of one pass, halved whenever memory runs out.

    Args:
        rows: to begin with.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.warned = False

    def attempt(self, work: Callable[[], Result], tried: int) -> Result | None:
        """Do ``work``, which takes ``tried`` rows; None when memory ran out, after which :attr:`rows` is smaller."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        # here the exception, and with it what the failed pass held, is gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if tried <= 1:
            raise FlowBNNError(
                "memory ran out with a single row in the pass; free memory on the device, or predict in a lower precision",
                kind="memory",
            )
        self.rows = max(1, tried // 2)
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"memory ran out with {tried} rows in one pass; going on with {self.rows}, and fewer if need be "
                f"(max_batch={self.rows} starts there)",
                FlowBNNWarning,
            )
        return None


# -------------------- compiling


def uncompilable() -> tuple[type[Exception], ...]:
    """What torch raises where a network does not compile."""
    from torch._dynamo import exc  # takes a second to load, which only those who compile should wait for

    names = ("TorchDynamoException", "FailOnRecompileLimitHit", "FailOnCacheLimitHit")
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


def unguarded() -> AbstractContextManager[Any]:
    """Compiled functions that have been called as they will be called are not checked again: half of what a call costs a CPU.

    torch has this setting for all threads, so it is left alone where another one might run compiled functions of its own.
    """
    threads = threading.enumerate()
    alone = threading.current_thread() is threading.main_thread() and sum(not t.daemon for t in threads) == 1
    return torch.compiler.set_stance(skip_guard_eval_unsafe=True) if alone else nullcontext()


def _forward(model: nn.Module, inputs: Any) -> Tensor:
    return call(model, inputs)


def compiled(
    kept: Kept, graphs: bool, forward: Callable[..., Tensor] = _forward, whole: bool = False
) -> Callable[..., Tensor]:
    """The network's forward pass through ``torch.compile``, kept with the posterior; give it inputs of few shapes.

    Args:
        graphs: replay the kernels from a CUDA graph, for passes so short that launching them is what takes the time.
        forward: the function of a pass, ``forward(model, ..., inputs)``; it must not hold the network.
        whole: in one graph or not at all.
    """
    mode = "reduce-overhead" if graphs else "default"

    def make() -> Callable[..., Tensor]:
        # torch keeps what it compiles with the code object, and gives up after eight: every network gets a copy of its own
        own = FunctionType(forward.__code__.replace(), forward.__globals__, "forward")
        return torch.compile(own, dynamic=False, mode=mode, fullgraph=whole)

    return kept.get(("compiled", forward, mode, whole), make)


# -------------------- chunks


class Forward:
    """Runs a network over rows of inputs, in chunks that fit the device.

    Args:
        model: the network.
        kept: what earlier predictions measured and compiled.
        max_batch: rows in one pass; None estimates what the device holds.
        half: the precision of autocast, or None.
        compile: pass the network through ``torch.compile``.
    """

    def __init__(
        self,
        model: nn.Module,
        kept: Kept,
        max_batch: int | None = None,
        half: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        self.model, self.kept, self.max_batch, self.half = model, kept, max_batch, half
        self.device, self.dtype = device_of(model), dtype_of(model)
        self.compiles, self.fixed = compile, 0  # rows of a compiled pass
        self.limit: Limit | None = None
        if self.device.type == "cpu":
            keep_memory()

    def ready(self, inputs: Any) -> Any:
        """The inputs on the network's device and in its precision; the first ones set the limit of a pass."""
        if rows(inputs) == 0:
            raise FlowBNNError("there is nothing to predict: the batch holds no rows", kind="empty")
        self.full_pass(inputs)
        return move(inputs, self.device, self.dtype)

    def full_pass(self, inputs: Any) -> int:
        """How many rows like these fill a pass."""
        if self.limit is None:
            few = Limit(2)
            self.limit = Limit(self.max_batch or few.attempt(partial(self._fitting, inputs), 2) or 1)
            self.limit.warned = few.warned
        return self.limit.rows

    def _fitting(self, inputs: Any) -> int:
        """How many rows fit a pass: beside the input and output of the widest layer live its noise and their product."""
        per_row = 3 * self.recorded(inputs).widest
        return int(min(max(free_bytes(self.device) // max(1, per_row), LEAST), MOST))

    def recorded(self, inputs: Any) -> Recording:
        """One pass over two rows of the inputs, made once for every shape of a row and kept with the posterior."""
        key = ("recorded", self.half, tuple([(part.shape[1:], part.dtype) for part in tensors_of(inputs)]))
        if key not in self.kept.values:
            few = move(take(inputs, 0, 2) if divisible(inputs) else inputs, self.device, self.dtype)
            self.kept.values[key] = record(self.model, few, noise_layers(self.model))
        return self.kept.values[key]

    def network(self, inputs: Any) -> Tensor:
        """One pass of the network as it stands, compiled where that is asked for."""
        if not self.compiles or 2 * (count := rows(inputs)) < self.fixed:
            return call(self.model, inputs)
        graphs = self.device.type == "cuda" and self.fixed <= 1024
        one_pass = compiled(self.kept, graphs)
        return one_pass(self.model, inputs if count == self.fixed else pad(inputs, self.fixed))[:count]

    def run(
        self,
        inputs: Any,
        networks: Iterable[Callable[[Any], Tensor]] | None = None,
        count: int = 1,
    ) -> Tensor:
        """Outputs ``[count, rows, ...]`` of one network after the other, each run over all rows in chunks.

        Args:
            networks: gives ``count`` functions from inputs to outputs, one after the other; the network as it stands unless given.
        """
        inputs, result = self.ready(inputs), None
        for index, network in enumerate((self.network,) if networks is None else networks):
            for outputs, start, stop, total in self.chunks(inputs, network):
                if result is None:
                    if count == 1 and stop - start == total and not self.compiles:
                        return at_least_float32(outputs).unsqueeze(0)
                    dtype = torch.promote_types(outputs.dtype, torch.float32)
                    result = outputs.new_empty((count, total, *outputs.shape[1:]), dtype=dtype)
                result[index, start:stop] = outputs
        assert result is not None
        return result

    def chunks(self, inputs: Any, network: Callable[[Any], Tensor]) -> Iterator[tuple[Tensor, int, int, int]]:
        """Outputs of chunk after chunk, with its first and last row and the number of all."""
        assert self.limit is not None
        if not divisible(inputs):
            outputs = network(inputs)
            yield outputs, 0, len(outputs), len(outputs)
            return
        total, start = rows(inputs), 0
        while start < total:
            size = even(total, self.limit.rows)
            if self.compiles:
                self.fixed = size = min(self.fixed or size, self.limit.rows)
            stop = min(start + size, total)
            some = inputs if stop - start == total else take(inputs, start, stop)
            found = self.limit.attempt(partial(network, some), stop - start)
            if found is None:
                self.fixed = 0
                continue
            yield checked(found, stop - start), start, stop, total
            start = stop


def at_least_float32(outputs: Tensor) -> Tensor:
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def even(count: int, limit: int) -> int:
    """Rows of a pass when ``count`` of them go through in as few and as equal passes as the limit allows."""
    passes = -(-count // limit)
    return -(-count // passes)


def checked(outputs: Tensor, count: int) -> Tensor:
    """The outputs, if there is one row for each row of the inputs."""
    if outputs.shape[:1] != (count,):
        raise FlowBNNError(
            f"the network gave {tuple(outputs.shape[:1])} rows of outputs for {count} rows of inputs; "
            "prediction needs one row each, with the examples on the first axis (a single one is given as inputs[None])",
            kind="shape",
        )
    return outputs
