"""A network run over rows of inputs, in passes that fit the device: what every kind of posterior does underneath."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import call, move, pad, rows, take
from flowbnn.inference.memory import Limit, max_rows
from flowbnn.inference.passes import Compile, casting, compiled, device_of, dtype_of, evaluating, half_of
from flowbnn.training.machine import keep_memory

__all__ = ["Passes", "Piece", "PointPasses", "Result", "checked", "even"]

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
