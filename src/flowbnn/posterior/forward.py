"""A network run over rows of inputs, in passes that fit the device: what every kind of posterior does underneath."""

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FunctionType, TracebackType
from typing import Any, Literal, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning, nearest
from flowbnn.noise import noise_layers, noise_mode
from flowbnn.posterior.batches import call, move, pad, rows, take, tensors_of
from flowbnn.training.device import keep_memory

__all__ = [
    "Compile",
    "Limit",
    "Passes",
    "Piece",
    "PointPasses",
    "Result",
    "casting",
    "checked",
    "compiled",
    "device_of",
    "dtype_of",
    "evaluating",
    "even",
    "half_of",
    "max_rows",
    "out_of_memory",
    "parts_of",
    "uncompilable",
    "unguarded",
]

# -------------------- passes.py

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


# -------------------- memory.py

Result_memory = TypeVar("Result_memory")

# past its caches a CPU gains nothing from more rows at once, and loses where the C library gives memory back between passes: beyond
# 64 MB, see flowbnn.training.device.keep_memory
CPU_BYTES = 3 * 2**24
GPU_BYTES = 2**33  # nor does a GPU when it is full
LEAST, MOST = 16, 2**17
MEASURED = 64  # rows of the passes that are measured
WORDS = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a CUDA device or on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


class Limit:
    """The rows of one pass, halved whenever memory runs out.

    Args:
        rows: to begin with.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.told = False

    def attempt(self, work: Callable[[], Result_memory], tried: int) -> Result_memory | None:
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
                "memory ran out with a single row in the pass; free memory on the device, or predict in a lower precision"
            )
        self.rows = max(1, tried // 2)
        if not self.told:
            self.told = True
            warnings.warn(
                f"memory ran out with {tried} rows in one pass; going on with {self.rows}, and fewer if need be "
                f"(max_batch={self.rows} starts there)",
                FlowBNNWarning,
            )
        return None


_PER_ROW: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()


def max_rows(model: nn.Module, inputs: Any) -> int:
    """How many rows fit a pass: on a CUDA device by measuring small passes once, elsewhere by the network's widest place."""
    device = device_of(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free = torch.cuda.mem_get_info(device)[0] // 2
        if free < GPU_BYTES:  # torch's own counts take longer to read
            free += (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2
        free = min(free, GPU_BYTES)
        known = _PER_ROW.setdefault(model, {})
        key = (
            min(MEASURED, rows(inputs)),
            tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors_of(inputs)),
            dtype_of(model),
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        )
        if key not in known:
            known[key] = _measured(model, inputs, device)
        per_row = known[key]
    else:
        free, per_row = _free_memory(), 0
    # beside a layer's input and output live the noise and the product
    per_row = per_row or 3 * _widest(model, take(inputs, 0, min(2, rows(inputs))))
    return int(min(max(free // max(1, per_row), LEAST), MOST))


def _free_memory() -> int:
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (ValueError, OSError, AttributeError):
        pages = 2**30
    return min(pages, CPU_BYTES)


def _plainly(model: nn.Module, inputs: Any) -> None:
    with evaluating(model), noise_mode(model, "off") if noise_layers(model) else nullcontext():
        call(model, inputs)


def _measured(model: nn.Module, inputs: Any, device: torch.device) -> int:
    """Bytes that one more row adds to the peak, with half as much again for the noise; 0 if there are too few rows to tell."""
    many = min(MEASURED, rows(inputs))
    few = many // 2
    if few < 1:
        return 0
    peaks = []
    for count in (few, few, many):  # the first pass sets up libraries, whose memory is no row's
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _plainly(model, take(inputs, 0, count))
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    return 3 * max(0, peaks[2] - peaks[1]) // (2 * (many - few))


def _widest(model: nn.Module, few: Any) -> int:
    """Bytes of one row at the place where a module reads and writes the most."""
    widest = 0

    def measure(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal widest
        sizes = [t.numel() * t.element_size() for t in (*args, output) if isinstance(t, Tensor)]
        widest = max(widest, sum(sizes))

    handles = [module.register_forward_hook(measure) for module in model.modules()]
    try:
        _plainly(model, few)
    finally:
        for handle in handles:
            handle.remove()
    return widest // rows(few)


WORTH_COMPILING = 3e16  # floating-point operations of a job: minutes on a large GPU, where compiling takes the better part of one
GRAPHED = 7e11  # a pass with less work than this waits for its launches: replay it from a CUDA graph

# first and last row, the inputs, and whether they have the shape of a compiled pass
Piece = tuple[int, int, Any, bool]


class Passes:
    """A plain network run over rows of inputs, in passes that fit: what every kind of posterior does underneath.

    Used in a ``with`` block, in which the network is in evaluation mode and at the asked precision.

    Args:
        model: the network.
        max_batch: rows in one pass; None measures what the device holds.
        precision: ``"bf16"`` or ``"fp16"`` for autocast; None computes in the network's own.
        compile: pass the network through ``torch.compile``; ``"auto"`` does so on CUDA devices when a job is worth it.
    """

    def __init__(
        self,
        model: nn.Module,
        max_batch: int | None = None,
        precision: str | None = None,
        compile: Compile = "auto",
    ) -> None:
        if max_batch is not None and (not isinstance(max_batch, int) or max_batch < 1):
            raise FlowBNNError(f"max_batch is at least 1, and a whole number, not {max_batch!r}")
        if compile not in (True, False, "auto"):
            raise FlowBNNError(f"compile is True, False or 'auto', not {compile!r}")
        self.model, self.max_batch, self.half, self.compile = model, max_batch, half_of(precision), compile
        self.device, self.dtype = device_of(model), dtype_of(model)
        if self.device.type == "cpu":
            keep_memory()
        self.limit: Limit | None = None
        self.fixed = 0  # rows of a compiled pass
        self.total = 0  # rows of the whole job, where they are known
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        self.stack.enter_context(evaluating(self.model))
        self.stack.enter_context(casting(self.device, self.half))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.close()

    def ready(self, inputs: Any) -> Any:
        """The inputs on the network's device and in its precision; the first ones are measured."""
        inputs = move(inputs, self.device, self.dtype)
        if rows(inputs) == 0:
            raise FlowBNNError("there is nothing to predict: the batch holds no rows")
        if self.limit is None:
            few = min(2, rows(inputs))  # of the trial that measures
            tried = Limit(few)
            self.limit = Limit(
                self.max_batch or tried.attempt(partial(max_rows, self.model, inputs), few) or 1
            )
            self.limit.told = tried.told
        return inputs

    def full_pass(self, inputs: Any) -> int:
        """How many rows like these fill a pass."""
        self.ready(inputs)
        assert self.limit is not None
        return self.limit.rows

    def through(
        self,
        inputs: Any,
        write: Callable[[Tensor, int, int], None],
        fast: Callable[[nn.Module, Any], Tensor] | None = None,
    ) -> None:
        """Run all rows, and hand the outputs of each pass to ``write(outputs, start, stop)``.

        Args:
            fast: a compiled forward pass, which is given the same number of rows every time.
        """
        assert self.limit is not None
        count, start = rows(inputs), 0
        while start < count:
            size = even(count, self.limit.rows)
            if fast is not None:
                self.fixed = size = min(self.fixed or size, self.limit.rows)
            stop = min(start + size, count)
            some = take(inputs, start, stop)
            found = self.limit.attempt(partial(self._run, some, size, fast), stop - start)
            if found is None:
                self.fixed = 0
                continue
            write(checked(found, stop - start), start, stop)
            start = stop

    def _run(self, some: Any, size: int, fast: Any) -> Tensor:
        count = rows(some)
        if fast is None or 2 * count < size:
            return call(self.model, some)
        return fast(self.model, some if count == size else pad(some, size))[:count]

    def pieces(self, inputs: Any) -> list[Piece]:
        """The inputs cut for compiled passes of constant shape: a last piece that is nearly full is padded."""
        assert self.limit is not None
        count, found = rows(inputs), []
        self.fixed = size = min(self.fixed or even(count, self.limit.rows), self.limit.rows)
        for start in range(0, count, size):
            stop = min(start + size, count)
            some, fits = take(inputs, start, stop), 2 * (stop - start) >= size
            found.append((start, stop, pad(some, size) if fits and stop - start < size else some, fits))
        return found

    def worth_compiling(self, work: float) -> bool:
        """Whether to compile for a job of so many floating-point operations."""
        if self.compile == "auto":
            return self.device.type == "cuda" and work >= WORTH_COMPILING
        return self.compile

    def graphs(self, work: float) -> bool:
        """Whether to replay passes of so many floating-point operations from a CUDA graph."""
        return self.device.type == "cuda" and work < GRAPHED


class PointPasses(Passes):
    """Outputs of one network, as so many equal samples."""

    def __init__(
        self, model: nn.Module, samples: int, max_batch: int | None, precision: str | None, compile: Compile
    ) -> None:
        super().__init__(model, max_batch, precision, compile)
        self.samples = samples

    def __call__(
        self, inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        inputs = self.ready(inputs)
        result = Result(None if out is None else out[:1], 1, rows(inputs))

        def write(outputs: Tensor, start: int, stop: int) -> None:
            result.write(outputs.unsqueeze(0), 0, 1, start, stop)

        fast = compiled(self.model, graphs=False) if self.compile is True else None
        self.through(inputs, write, fast)
        one, count = result.tensor, (self.samples if high is None else high) - low
        if out is not None:
            out[1:] = one
            return out
        return one if count == 1 else one.expand(count, *(-1,) * (one.ndim - 1))


class Result:
    """Outputs ``[samples, batch, ...]``, allocated when the shape of a row is known, in float32 or better."""

    def __init__(self, out: Tensor | None, samples: int, batch: int) -> None:
        self.out, self.samples, self.batch = out, samples, batch

    def write(self, outputs: Tensor, low: int, high: int, start: int, stop: int) -> None:
        if self.out is None:
            dtype = torch.promote_types(outputs.dtype, torch.float32)
            self.out = outputs.new_empty((self.samples, self.batch, *outputs.shape[2:]), dtype=dtype)
        self.out[low:high, start:stop] = outputs

    @property
    def tensor(self) -> Tensor:
        assert self.out is not None
        return self.out


def even(count: int, limit: int) -> int:
    """Rows of a pass when ``count`` of them go through in as few and as equal passes as the limit allows."""
    passes = -(-count // limit)
    return -(-count // passes)


def checked(outputs: Tensor, count: int) -> Tensor:
    if outputs.shape[:1] != (count,):
        raise FlowBNNError(
            f"the network gave {tuple(outputs.shape[:1])} rows of outputs for {count} rows of inputs; "
            "prediction needs one row each, with the examples on the first axis"
        )
    return outputs
