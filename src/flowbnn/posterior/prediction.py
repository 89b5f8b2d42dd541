"""One prediction: its options, and a network run over rows of inputs, in chunks that fit the device's memory."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import FunctionType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    device_of,
    dtype_of,
    evaluation_mode,
    has_row_axis,
    is_out_of_memory,
    move,
    pad,
    rewrap_forward_errors,
    rows,
    take,
    tensors_of,
)
from flowbnn.errors import FlowBNNError, pluralize, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.options import Count, Positive, options
from flowbnn.posterior.adaptive import Adaptive
from flowbnn.posterior.recording import Recording, record
from flowbnn.posterior.twin import twin
from flowbnn.training.device import AUTOCAST_DTYPES, raise_malloc_trim_threshold
from flowbnn.training.options import MixedPrecision

Result = TypeVar("Result")
View = Callable[[Any], Any]
Outputs = Callable[[Any, range, Any], Tensor]

TOGETHER = 4096  # inputs that adaptive sampling takes through its rounds together
# past its caches a CPU gains nothing from more rows at once, and loses where the C library gives memory back between passes: beyond
# 64 MB, see flowbnn.training.device.raise_malloc_trim_threshold
CPU_BYTES = 3 * 2**24
GPU_BYTES = 2**33  # nor does a GPU when it is full
LEAST, MOST = 16, 2**17  # rows of a pass


@options(of="predict")
class PredictOptions:
    """The options of a prediction.

    Args:
        samples: networks to average; the posterior's own number (``default_samples``) unless given.
        shared: the same draws for all inputs, which are then functions: cheaper, and a prediction does not depend on what else is in
            its batch. False draws anew for every example, as Xiong's report does.
        seed: of the draws; the same seed gives the same numbers.
        max_batch: rows in one pass; None estimates what the device holds.
        adaptive: stop sampling an input when the standard error of its probabilities is at most this number or its decision is
            certain; an :class:`~flowbnn.posterior.Adaptive` says more. ``samples`` is then the most that an
            input gets, and ``sample_counts`` of the result says what each had.
        views: functions from a batch of inputs to as many others that mean the same, such as their mirror images: every
            sampled network answers by the mean of its predictions for the input and for its views (test-time augmentation), at the
            price of as many more passes.
        precision: as in a fit: ``"bf16-mixed"`` or ``"16-mixed"`` lets layers compute in half precision (autocast), while weights,
            noise and flows stay as they are.
        compile: run the network through ``torch.compile``, in passes of constant shape. It takes the better part of a minute once per
            posterior, so ``"auto"`` does it on CUDA devices for jobs of minutes, and never on a CPU.
        sharded: where several processes are connected (torchrun, ``devices``), all call this with the same loader; each predicts a
            share of it and all get the whole, in the loader's order. False lets this process predict all of it.
        progress: show a bar over a loader, on a terminal.
    """

    samples: Count | None = None
    shared: bool = True
    seed: int | None = None
    max_batch: Count | None = None
    adaptive: Adaptive | Positive | None = None
    views: Sequence[View] = ()
    precision: MixedPrecision = "32-true"
    compile: bool | Literal["auto"] = "auto"
    sharded: bool | Literal["auto"] = "auto"
    progress: bool = True


def new_seed() -> int:
    """The seed of a prediction that is given none: one number of torch's generator, which predictions do not touch otherwise."""
    return int(torch.randint(2**31 - 1, ()))


class PredictionCache:
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

    def __reduce__(self) -> Any:
        return PredictionCache, ()


class Prediction:
    """One call of ``predict``: its options made definite, and what the posterior draws once for all of it.

    Used in a ``with`` block, which holds the posterior's lock and has ``model`` in evaluation mode and at the asked precision.
    ``run`` runs a network over rows of inputs in chunks that fit the device.

    Args:
        model: the network.
        options: of the prediction.
        samples: how many there are, where the options leave it open.
        kept: what the posterior keeps from one prediction to the next.

    Attributes:
        own: the posterior's network, which other threads may be using.
        model: what runs: a twin of it (:func:`~flowbnn.posterior.twin.twin`), in which a posterior may put other weights and hooks;
            ``own`` itself where passes are compiled.
        samples, seed, shared, half, device: as the options and the network have them.
        total: rows of the whole loader, 0 where it does not say or there is none.
        batch: the number of the batch in the loader, with which draws of its own begin where ``shared`` is False.
        limit: rows of one pass, halved whenever memory runs out; 0 before the first inputs.
        fixed: rows of a compiled pass; 0 before the first.
        drawn: what the posterior makes at its first batch and uses for all others of this prediction.
        stack: contexts of the posterior's own that last as long as the prediction.
    """

    def __init__(
        self, model: nn.Module, options: PredictOptions, samples: int, kept: PredictionCache
    ) -> None:
        self.own, self.options, self.cache = model, options, kept
        # what is compiled is compiled for these very modules
        self.model = model if options.compile is True else twin(model)
        self.device, self.dtype, self.half = (
            device_of(model),
            dtype_of(model),
            AUTOCAST_DTYPES.get(options.precision),
        )
        self.samples, self.shared = options.samples or samples, options.shared
        self.seed = new_seed() if options.seed is None else int(options.seed)
        self.total = self.batch = self.limit = self.fixed = 0
        self.state = PredictionCache()
        self.stack = ExitStack()
        if self.device.type == "cpu":
            raise_malloc_trim_threshold()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.cache.lock)
            stack.enter_context(evaluation_mode(self.model))
            stack.enter_context(casting(self.device, self.half))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def warn_once(self, kind: str, line: str) -> None:
        """A warning of a kind that a prediction gives once."""
        self.state.get(kind, lambda: warn(line, kind=kind))

    def at_once(self, inputs: Any) -> int:
        """How many rows like these to take from a loader: those of a full pass, and several where settled inputs leave gaps."""
        if not self.shared:
            return 0  # every batch by itself
        return max(self.full_pass(inputs), 0 if self.options.adaptive is None else TOGETHER)

    def ready(self, inputs: Any) -> Any:
        """The inputs on the network's device and in its precision; the first ones set the limit of a pass."""
        if rows(inputs) == 0:
            raise FlowBNNError("there is nothing to predict: the batch holds no rows", kind="empty")
        self.full_pass(inputs)
        return move(inputs, self.device, self.dtype)

    def full_pass(self, inputs: Any) -> int:
        """How many rows like these fill a pass: beside the input and output of the widest layer live its noise and their product."""
        self.limit = self.limit or self.options.max_batch or 0
        if self.limit:
            return self.limit
        free = CPU_BYTES
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0] // 2
            if free < GPU_BYTES:  # torch's own counts take longer to read
                reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
                free += reserved // 2
            free = min(free, GPU_BYTES)
        if (shown := self.attempt(partial(self.recorded, inputs), 2)) is not None:
            self.limit = int(min(max(free // max(1, 3 * shown.widest), LEAST), MOST))
        return self.limit

    def recorded(self, inputs: Any) -> Recording:
        """One pass over two rows of the inputs, made once for every shape of a row and kept with the posterior."""
        key = ("recorded", self.half, tuple([(part.shape[1:], part.dtype) for part in tensors_of(inputs)]))
        if key not in self.cache.values:
            few = move(take(inputs, 0, 2) if has_row_axis(inputs) else inputs, self.device, self.dtype)
            self.cache.values[key] = record(self.model, few)
        return self.cache.values[key]

    def attempt(self, work: Callable[[], Result], tried: int) -> Result | None:
        """Do ``work``, which takes ``tried`` rows; None when memory ran out, after which :attr:`limit` is smaller."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # here the exception, and with it what the failed pass held, is gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if tried <= 1:
            raise FlowBNNError(
                "memory ran out with a single row in the pass; free memory on the device, or predict in a lower precision",
                kind="memory",
            )
        self.limit = max(1, tried // 2)
        self.warn_once(
            "memory",
            f"memory ran out with {tried} rows in one pass; going on with {self.limit}, and fewer if need be "
            f"(max_batch={self.limit} starts there)",
        )
        return None

    def network(self, inputs: Any) -> Tensor:
        """One pass of the network as it stands, compiled where that is asked for."""
        if self.options.compile is not True or 2 * (count := rows(inputs)) < self.fixed:
            return call(self.model, inputs)
        graphs = self.device.type == "cuda" and self.fixed <= 1024
        one_pass = compiled(self.cache, graphs)
        return one_pass(self.model, inputs if count == self.fixed else pad(inputs, self.fixed))[:count]

    def run(
        self, inputs: Any, networks: Iterable[Callable[[Any], Tensor]] | None = None, count: int = 1
    ) -> Tensor:
        """Outputs ``[count, rows, ...]`` of one network after the other, each run over all rows in chunks.

        Args:
            networks: gives ``count`` functions from inputs to outputs, one after the other; the network as it stands unless given.
        """
        inputs, result = self.ready(inputs), None
        for index, network in enumerate((self.network,) if networks is None else networks):
            for outputs, start, stop, total in self._chunks(inputs, network):
                if result is None:
                    dtype = torch.promote_types(outputs.dtype, torch.float32)
                    if count == 1 and stop - start == total and not self.fixed:
                        return outputs.to(dtype).unsqueeze(0)
                    result = outputs.new_empty((count, total, *outputs.shape[1:]), dtype=dtype)
                result[index, start:stop] = outputs
        assert result is not None
        return result

    def _chunks(
        self, inputs: Any, network: Callable[[Any], Tensor]
    ) -> Iterator[tuple[Tensor, int, int, int]]:
        """Outputs of chunk after chunk, with its first and last row and the number of all."""
        if not has_row_axis(inputs):
            outputs = network(inputs)
            yield outputs, 0, len(outputs), len(outputs)
            return
        total, start = rows(inputs), 0
        while start < total:
            size = even(total, self.limit)
            if self.options.compile is True:
                self.fixed = size = min(self.fixed or size, self.limit)
            stop = min(start + size, total)
            some = inputs if stop - start == total else take(inputs, start, stop)
            given = self.attempt(partial(network, some), stop - start)
            if given is None:
                self.fixed = 0
                continue
            yield check_rows(given, stop - start), start, stop, total
            start = stop


def casting(device: torch.device, half: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to ``half``: layers compute in it, noise and flows stay in float32."""
    return nullcontext() if half is None else torch.autocast(device.type, half)


def compiled(
    kept: PredictionCache, graphs: bool, forward: Callable[..., Tensor] = call, whole: bool = False
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


def even(count: int, limit: int) -> int:
    """Rows of a pass when ``count`` of them go through in as few and as equal passes as the limit allows."""
    passes = -(-count // limit)
    return -(-count // passes)


def check_rows(outputs: Tensor, count: int) -> Tensor:
    """The outputs, if there is one row for each row of the inputs."""
    if outputs.shape[:1] != (count,):
        raise FlowBNNError(
            f"the network gave {tuple(outputs.shape[:1])} rows of outputs for {pluralize(count, 'row')} of inputs; "
            "one row each is needed, with the examples on the first axis (a single one is given as inputs[None])",
            kind="shape",
        )
    return outputs


def averaged(outputs: Outputs, likelihood: Likelihood) -> Outputs:
    """As :meth:`Posterior.outputs`, with every sample's answers averaged over the input and its views (test-time augmentation)."""

    def average(inputs: Any, samples: range, prediction: Any) -> Tensor:
        seen = [inputs, *(_seen(view, inputs) for view in prediction.options.views)]
        return likelihood.average([outputs(view, samples, prediction) for view in seen])

    return average


def _seen(view: View, inputs: Any) -> Any:
    name = getattr(view, "__name__", type(view).__name__)
    with rewrap_forward_errors(inputs, f"the view {name} fails on inputs of"):
        seen = view(inputs)
    if type(seen) is not type(inputs) or rows(seen) != rows(inputs):
        given = f"{rows(seen)} rows" if type(seen) is type(inputs) else f"a {type(seen).__name__}"
        raise FlowBNNError(
            f"the view {name} must give as many inputs as it is given, of the same kind: {rows(inputs)} rows, not {given}",
            kind="shape",
            argument="views",
        )
    return seen
