"""One prediction: its options, and passes of a network over rows of inputs, in chunks that fit the memory of the device."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flowbnn.batches import (
    call,
    device_of,
    dtype_of,
    first_nonfinite_tensor,
    has_row_axis,
    is_batch,
    move,
    rewrap_forward_errors,
    rows,
    split_weighted_batch,
    take,
    tensors_of,
)
from flowbnn.distributions.draws import GENERATOR_LOCK
from flowbnn.errors import FlowBNNError, check_shape, pluralize, quote_names, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.memory import check_memory, is_out_of_memory
from flowbnn.networks import deepcopy_network, evaluation_mode
from flowbnn.noise import Noise
from flowbnn.options import Count, Positive, SampleCount
from flowbnn.posterior.adaptive import Adaptive
from flowbnn.posterior.operation_rules import OperationRules
from flowbnn.posterior.trace import ForwardTrace, trace_forward
from flowbnn.training import first_nonfinite_layer
from flowbnn.training.device import AUTOCAST_DTYPES, raise_malloc_trim_threshold
from flowbnn.training.options import MixedPrecision

Result = TypeVar("Result")
View = Callable[[Any], Any]
Outputs = Callable[[Any, range, Any], Tensor]

# larger passes are not faster on a CPU, whose caches they exceed, nor on a GPU that is busy
PASS_BYTES = {"cpu": 3 * 2**24, "cuda": 2**33}
MAX_TRACES = 1000  # measurements that a posterior keeps, for as many shapes of inputs
# largest number of bytes of samples in memory by the option keep_samples: 2**27 are those of 20,000 images, 10 classes and 128 samples;
# 2**22 are reduced to a summary at once, whose entropies and variances take about ten times as much memory
KEPT_BYTES: dict[str | bool, float] = {"auto": 2**27, True: math.inf, False: 2**22}


@dataclass(frozen=True)
class PredictOptions:
    """Options of a prediction, which :meth:`Posterior.predict` checks.

    Args:
        samples: Number of sampled networks to average. The default is ``default_samples`` of the posterior.
        shared: If True, all inputs share the same draws. Every sample is then one network, predictions are cheaper, and they do not
            depend on the other inputs of the batch. If False, every example has its own draws, as in Xiong's report.
        seed: Seed of the draws.
        max_batch: Maximum number of rows in one pass. None estimates it from the memory of the device.
        adaptive: Standard error of the probabilities at which sampling stops for an input, or a
            :class:`~flowbnn.posterior.Adaptive` rule. ``samples`` is then the maximum, and ``sample_counts`` of the result has the
            number of samples of each input.
        views: Functions from a batch of inputs to as many equivalent inputs, such as their mirror images. Every sampled network
            averages its predictions over the input and its views (test-time augmentation), which takes one more pass per view.
        precision: ``"32-true"``, or ``"bf16-mixed"`` or ``"16-mixed"`` to run layers in half precision (autocast). Weights, noise and
            flows keep their precision.
        compile: If True, the network runs through ``torch.compile`` in passes of constant shape. Compiling takes up to a minute per
            posterior, so ``"auto"`` does it only on CUDA devices for jobs of minutes.
        sharded: If several processes are connected (torchrun), all must call this with the same loader. Each process predicts a part,
            and all return the complete prediction in the order of the loader. False lets this process predict everything.
        progress: If True, a progress bar is shown for loaders on a terminal.
        keep_samples: If True, the result has the outputs of all samples. If False, the outputs are reduced, some rows at a time, to a
            :class:`~flowbnn.predictive.PredictionSummary` of means and uncertainties, whose memory does not grow with the samples.
            ``"auto"`` keeps up to 128 MB of samples. Processes that share a loader always keep them.
    """

    samples: SampleCount | None = None
    shared: bool = True
    seed: int | None = None
    max_batch: Count | None = None
    adaptive: Adaptive | Positive | None = None
    views: Sequence[View] = ()
    precision: MixedPrecision = "32-true"
    compile: bool | Literal["auto"] = "auto"
    sharded: bool | Literal["auto"] = "auto"
    progress: bool = True
    keep_samples: bool | Literal["auto"] = "auto"


def new_seed() -> int:
    """Returns a seed from torch's global generator, for predictions without one.

    It waits until no other thread is inside a block that seeds this generator.
    """
    with GENERATOR_LOCK:
        return int(torch.randint(2**31 - 1, ()))


def clone_sharing_tensors(network: nn.Module) -> nn.Module:
    """Returns a copy of a network that shares its parameters, buffers and noise, but has modules of its own.

    Weights, hooks and modes of the copy can be changed while other threads use the network. If the network cannot be copied
    (TorchScript, tensors with a history), it is returned itself.

    >>> network = nn.Linear(2, 1)
    >>> clone = clone_sharing_tensors(network)
    >>> clone.weight is network.weight, clone is network
    (True, False)
    """
    noises: dict[int, Any] = {}
    for module in network.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return network
        if isinstance(module, Noise):
            noises[id(module)] = module
    try:
        return deepcopy_network(network, noises, shares_tensors=True)
    except Exception:  # an attribute that cannot be copied
        return network


def is_training(network: nn.Module) -> bool:
    """Returns True if a module of the network is in training mode. ``network.modules()`` takes four times as long."""
    stack: list[nn.Module | None] = [network]
    for module in stack:  # the list grows during the loop
        if module is not None:
            if module.training:
                return True
            stack += module._modules.values()
    return False


class PredictionCache:
    """Lock of a posterior, and values that are reused between predictions, such as measurements and compiled functions.

    The cache is not saved. A copy of the posterior starts with an empty one.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], Result]) -> Result:
        """Returns the value of a key. The first call computes it with ``make``."""
        if key not in self.values:
            self.values[key] = make()
        return self.values[key]

    def __reduce__(self) -> Any:
        return PredictionCache, ()


class Prediction:
    """One call of ``predict``.

    Use it in a ``with`` block, which holds the lock of the posterior, disables gradients, and sets the precision.

    Args:
        model: Network of the posterior.
        options: Options of the prediction.
        samples: Number of samples if the options have none.
        cache: Cache of the posterior, which has its lock.

    Attributes:
        model: Network in evaluation mode. Other threads may use it, so it must not be changed. It is the network of the posterior, or
            :attr:`clone` if that is in training mode.
        samples, seed, shared, autocast_dtype, device: Values of the options and the network.
        total_rows: Number of rows of the loader, or 0 if it is unknown or without a loader.
        batch_index: Index of the batch in the loader, which seeds its draws if ``shared`` is False.
        row_limit: Maximum number of rows in a pass, halved whenever memory runs out. It is 0 before the first inputs.
        compiled_rows: Number of rows in a compiled pass, or 0 before the first one.
        uses_rules: True if passes of single networks run by :class:`~flowbnn.posterior.operation_rules.OperationRules`. False before
            the first inputs.
        state: Objects that the posterior makes at the first batch of this prediction and reuses for later batches.
    """

    def __init__(
        self, model: nn.Module, options: PredictOptions, samples: int, cache: PredictionCache
    ) -> None:
        self.model, self.options, self.cache = model, options, cache
        self.device, self.dtype = device_of(model), dtype_of(model)
        self.autocast_dtype = AUTOCAST_DTYPES.get(options.precision)
        self.samples, self.shared = options.samples or samples, options.shared
        self.seed = new_seed() if options.seed is None else int(options.seed)
        self.total_rows = self.batch_index = self.row_limit = self.compiled_rows = 0
        self.uses_rules = False
        self.state = PredictionCache()
        self.stack = ExitStack()
        if self.device.type == "cpu":
            raise_malloc_trim_threshold()

    def __enter__(self) -> Self:
        with ExitStack() as self.stack:  # closed if an error occurs in this block
            self.stack.enter_context(self.cache.lock)
            self.stack.enter_context(torch.no_grad())
            if self.autocast_dtype is not None:
                self.stack.enter_context(torch.autocast(self.device.type, self.autocast_dtype))
            if is_training(self.model):
                self.model = self.clone
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    @cached_property
    def clone(self) -> nn.Module:
        """Clone of the network in evaluation mode, whose weights and hooks the posterior may change."""
        clone = clone_sharing_tensors(self.model)
        self.stack.enter_context(evaluation_mode(clone))
        return clone

    def warn_once(self, kind: str, message: str, **fields: Any) -> None:
        """Raises a warning, at most once per kind and prediction."""
        self.state.get(kind, lambda: warn(message, kind=kind, **fields))

    def rows_per_group(self, inputs: Any) -> int:
        """Returns the number of rows to read from the loader at a time."""
        if not self.shared:
            return 0  # the draws depend on the batch, so each is predicted by itself
        bytes_per_row = max(1, self.samples * self.measure(inputs).output_bytes_per_row)
        # outputs of all samples: 65,536 rows of 64 samples and two classes
        limit = min(self.row_limit, 2**25 // bytes_per_row)
        # adaptive sampling drops converged inputs, so it needs many at a time to fill its passes
        return max(limit, 0 if self.options.adaptive is None else 4096)

    def output_bytes(self, inputs: Any) -> int:
        """Returns the bytes of the outputs of all samples for a batch, or 0 if it must not be split."""
        if not self.shared or not has_row_axis(inputs):
            return 0
        return rows(inputs) * self.samples * self.measure(inputs).output_bytes_per_row

    def check_outputs(self, inputs: Any) -> None:
        """Raises FlowBNNError if the outputs of all samples do not fit the memory. Only the first inputs are checked."""
        keep = self.options.keep_samples is True
        count = max(rows(inputs), self.total_rows if keep else 0)
        # outputs, and as much for the log-probabilities or moments of the predictive distribution
        num_bytes = 2 * count * self.samples * self.measure(inputs).output_bytes_per_row
        hint = "use keep_samples=False, or fewer" if keep else "use fewer"
        self.state.get(
            "memory of outputs", lambda: check_memory("samples", self.samples, num_bytes, self.device, hint)
        )

    def to_device(self, inputs: Any) -> Any:
        """Returns the inputs on the device of the network and in its precision, and sets the row limit."""
        if not self.row_limit:
            self.measure(inputs)
        return move(inputs, self.device, self.dtype)

    def measure(self, inputs: Any) -> ForwardTrace:
        """Returns the measurements of a pass over two rows of the inputs, and sets the row limit if it is 0.

        The memory of a pass holds input and output of the widest layer, its noise, and the product of input and noise. The measurements
        are empty if memory runs out.
        """
        if rows(inputs) == 0:
            raise FlowBNNError("batch is empty", kind="empty")
        key: tuple[Any, ...] = (self.autocast_dtype,)
        for tensor in tensors_of(inputs):
            key += (tensor.shape[1:], tensor.dtype)
        traces = self.cache.get("traces", dict[Any, ForwardTrace])
        trace = traces.get(key)
        if trace is None:  # the first inputs of this shape and dtype
            two_rows = take(inputs, 0, 2) if has_row_axis(inputs) else inputs
            two_rows = move(two_rows, self.device, self.dtype)
            trace = self.attempt(partial(trace_forward, self.model, two_rows), 2)
            if trace is None:
                return ForwardTrace(1)
            if len(traces) == MAX_TRACES:
                del traces[next(iter(traces))]
            traces[key] = trace
            self.warn_dependence(trace, inputs)
        # compiled, torch makes fast kernels of its own operations
        self.uses_rules = (
            trace.operation_rules and self.device.type == "cpu" and self.options.compile is not True
        )
        if not self.row_limit:
            rows_in_memory = self.free_bytes() // max(1, 3 * trace.bytes_per_row)
            self.row_limit = self.options.max_batch or int(min(max(rows_in_memory, 16), 2**17))
        return trace

    def free_bytes(self) -> int:
        """Returns the bytes that one pass may take."""
        if self.device.type != "cuda":
            return PASS_BYTES["cpu"]
        free = torch.cuda.mem_get_info(self.device)[0] // 2
        if free < PASS_BYTES["cuda"]:  # the memory statistics of torch take longer to read
            reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free += reserved // 2
        return min(free, PASS_BYTES["cuda"])

    def warn_dependence(self, trace: ForwardTrace, inputs: Any) -> None:
        """Warns, once per posterior, if a seed does not determine predictions, or if they depend on how inputs are batched."""
        text, layers = "", list[str]()
        if trace.dependence == "random":
            problem = (
                "the network draws random numbers in evaluation mode, so a seed does not fix predictions"
            )
            text = f"{problem}; use F.dropout(x, p, self.training)"
        elif trace.dependence == "rows" and has_row_axis(inputs):
            text = "the outputs of the network depend on the other rows of a batch, so predictions depend on batches"
            modules = self.model.named_modules()
            layers = [
                name
                for name, module in modules
                if isinstance(module, _BatchNorm) and module.running_mean is None
            ]
            if layers:
                text += f"; use track_running_stats=True in {quote_names(layers)}"
        if text:
            kind = "batch" if trace.dependence == "rows" else "random"
            self.cache.get(("warning", kind), lambda: warn(text, kind=kind, layers=layers))

    def attempt(self, function: Callable[[], Result], num_rows: int) -> Result | None:
        """Returns the result of a function of ``num_rows`` rows. If memory runs out, halves the row limit and returns None."""
        try:
            return function()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # the exception is gone here, and with it the tensors of the failed pass
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        text = f"memory ran out with {pluralize(num_rows, 'row')} in a pass"
        if num_rows <= 1:
            raise FlowBNNError(f"{text}; free memory, or lower the precision", kind="memory")
        self.row_limit = max(1, num_rows // 2)
        self.warn_once("memory", f"{text}; continuing with max_batch={self.row_limit}", rows=num_rows)
        return None

    def run(
        self, inputs: Any, networks: Iterable[Callable[[Any], Tensor]] | None = None, count: int = 1
    ) -> Tensor:
        """Runs the networks sequentially over all rows, in chunks, and returns the outputs ``[count, rows, ...]``.

        Args:
            inputs: Inputs.
            networks: Iterable of ``count`` functions from inputs to outputs. The default is the network itself.
            count: Number of networks.
        """
        inputs, result = self.to_device(inputs), None
        for index, network in enumerate((partial(call, self.model),) if networks is None else networks):
            for outputs, start, stop, total in self._chunks(inputs, network):
                if result is None:
                    dtype = torch.promote_types(outputs.dtype, torch.float32)
                    if count == 1 and stop - start == total and not self.compiled_rows:
                        return outputs.to(dtype).unsqueeze(0)
                    result = outputs.new_empty((count, total, *outputs.shape[1:]), dtype=dtype)
                result[index, start:stop] = outputs
        assert result is not None
        return result

    def _chunks(
        self, inputs: Any, network: Callable[[Any], Tensor]
    ) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yields the outputs of each chunk, its first and last row, and the number of all rows."""
        if not has_row_axis(inputs):
            outputs = network(inputs)
            yield outputs, 0, len(outputs), len(outputs)
            return
        total, start = rows(inputs), 0
        while start < total:
            size = even_size(total, self.row_limit)
            if self.options.compile is True:
                self.compiled_rows = size = min(self.compiled_rows or size, self.row_limit)
            stop = min(start + size, total)
            chunk = inputs if stop - start == total else take(inputs, start, stop)
            with OperationRules() if self.uses_rules else nullcontext():
                chunk_outputs = self.attempt(partial(network, chunk), stop - start)
            if chunk_outputs is None:
                self.compiled_rows = 0
                continue
            yield check_rows(chunk_outputs, stop - start), start, stop, total
            start = stop

    def find_nonfinite(self, inputs: Any, precision: MixedPrecision) -> str:
        """Returns the parameter or layer that makes outputs of the first batches not finite, and what to do.

        Args:
            inputs: Inputs or a loader.
            precision: Precision of the prediction that failed.
        """
        name = first_nonfinite_tensor(self.model.named_parameters())
        if name is not None:
            return f"parameter '{name}' is not finite; load or train the posterior again"
        network, autocast_dtype = self.clone, AUTOCAST_DTYPES.get(precision)
        layers: dict[torch.dtype | None, str] = {}
        for dtype in {None, autocast_dtype}:
            for batch in [inputs] if is_batch(inputs) else islice(inputs, 8):
                values = move(
                    batch if is_batch(inputs) else split_weighted_batch(batch).inputs, self.device, self.dtype
                )
                with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                    name = first_nonfinite_layer(network, partial(call, network, values))
                if name:
                    layers[dtype] = f"layer '{name}'"
                    break
        if autocast_dtype is not None and None not in layers:
            return (
                f"{layers.get(autocast_dtype, 'a layer')} overflows in {precision}; use precision='32-true'"
            )
        layer = layers.get(None, "a layer")
        return f"{layer} returns NaN or infinity; check its weights, and inputs far from the data"


def even_size(count: int, limit: int) -> int:
    """Returns the chunk size that splits ``count`` rows into the smallest number of nearly equal chunks of at most ``limit`` rows."""
    chunks = -(-count // limit)
    return -(-count // chunks)


def check_rows(outputs: Tensor, count: int) -> Tensor:
    """Returns the outputs. Raises FlowBNNError unless they have ``count`` rows."""
    if outputs.shape[:1] != (count,):
        is_one_example = outputs.ndim > 0 and (outputs.shape[0] == 1 or outputs.shape[1:] == (1,))
        hint = "use inputs[None] for one example" if is_one_example else "return one row for each example"
        check_shape("the network's output", outputs, (count, "..."), hint, argument=None)
    return outputs


def average_views(outputs: Outputs, likelihood: Likelihood) -> Outputs:
    """Returns a function like :meth:`Posterior.outputs` that averages every sample over the input and its views."""

    def average(inputs: Any, samples: range, prediction: Any) -> Tensor:
        views = [inputs, *(_apply_view(view, inputs) for view in prediction.options.views)]
        return likelihood.average_outputs([outputs(view, samples, prediction) for view in views])

    return average


def _apply_view(view: View, inputs: Any) -> Any:
    name = getattr(view, "__name__", type(view).__name__)
    with rewrap_forward_errors(inputs, f"view {name} fails on"):
        result = view(inputs)
    if type(result) is not type(inputs) or rows(result) != rows(inputs):
        text = f"view {name} must return {rows(inputs)} rows of type {type(inputs).__name__}"
        raise FlowBNNError(text, kind="shape", argument="views")
    return result
