r"""Compiled passes: ``torch.compile`` of one network, or of several sampled networks by ``torch.func.vmap``.

The draws are arguments of the compiled function, so that :math:`z \circ x` is fused into the kernels before it. All passes have the
same shape: the last rows and samples are padded.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flowbnn.batches import call, pad, rows, take
from flowbnn.noise.contexts import UnexpectedNoiseShape, forward_sample
from flowbnn.noise.gaussians import SharedDraws
from flowbnn.posterior.operation_rules import OperationRules
from flowbnn.posterior.prediction import Prediction, check_rows, even_size
from flowbnn.posterior.trace import ForwardTrace
from flowbnn.training.device import quiet_compiler, unlimited_recompiles

# floating-point operations of a pass that keep the device busy: 8,192 images of VGG16 on a large GPU, 600 of LeNet on a CPU
FULL_PASS_FLOPS = {"cpu": 5e8, "cuda": 5.5e12}


def compile_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that torch raises for a network that does not compile."""
    from torch._dynamo import exc  # takes a second to import

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def skip_guards() -> AbstractContextManager[Any]:
    """Returns a context in which functions that have been called before skip their guards, half of the cost of a call.

    Torch has this setting for all threads, so it is used only if no other thread may run compiled functions.
    """
    other_threads = [t for t in threading.enumerate() if not t.daemon and t is not threading.current_thread()]
    if other_threads or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return torch.compiler.set_stance(skip_guard_eval_unsafe=True)


def forward_with_weights(model: nn.Module, weights: Mapping[str, Tensor], inputs: Any) -> Tensor:
    """Runs the network with other weights by ``functional_call``, which does not change the network."""
    if not weights:
        return call(model, inputs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return functional_call(model, dict(weights), args, kwargs)

    return call(forward, inputs)  # type: ignore[arg-type]


def forward_sample_by_rules(*args: Any, **options: Any) -> Tensor:
    """Runs :func:`forward_sample` with :class:`~flowbnn.posterior.operation_rules.OperationRules`."""
    with OperationRules():
        return forward_sample(*args, **options)


def forward_samples(
    model: nn.Module, keys: tuple[tuple[int, int], ...], rules: bool, draws: list[Tensor], inputs: Any
) -> Tensor:
    """Returns outputs ``[samples, rows, ...]`` of several sampled networks in one pass, by ``torch.func.vmap``.

    Every sample is one network, even if rows interact. Layers before the first noise are computed once. Networks that draw random
    numbers or branch on values raise a RuntimeError.

    Args:
        model: Stochastic network in evaluation mode.
        keys: Layer key and number of earlier calls of each draw.
        rules: If True, operations run by :class:`~flowbnn.posterior.operation_rules.OperationRules`.
        draws: Draws ``[samples, *positions, dim]``.
        inputs: Inputs of all samples.
    """
    forward = partial(forward_sample_by_rules if rules else forward_sample, model, keys)
    if len(draws[0]) == 1:
        return forward([tensor[0] for tensor in draws], inputs).unsqueeze(0)
    return torch.vmap(forward, in_dims=(0, None))(draws, inputs)


def compile_once(
    prediction: Prediction, function: Callable[..., Tensor], graphs: bool, fullgraph: bool
) -> Any:
    """Returns the compiled function from the cache of the posterior.

    Args:
        prediction: Prediction.
        function: Function to compile.
        graphs: If True, its kernels are replayed from a CUDA graph.
        fullgraph: If True, a network that does not compile in one graph raises an error.
    """
    mode = "reduce-overhead" if graphs else "default"
    make = partial(torch.compile, function, dynamic=False, mode=mode, fullgraph=fullgraph)
    return prediction.cache.get(("compiled", function.__name__, mode), make)


def compiled_forward(prediction: Prediction, weights: Mapping[str, Tensor], inputs: Any) -> Tensor:
    """Runs one compiled pass of a network with these weights. Few rows run uncompiled, because padding would cost more."""
    count, size, model = rows(inputs), prediction.compiled_rows, prediction.model
    with quiet_compiler(), unlimited_recompiles():
        if 2 * count < size:
            return forward_with_weights(model, weights, inputs)
        graphs = prediction.device.type == "cuda" and size <= 1024
        function = compile_once(prediction, forward_with_weights, graphs, fullgraph=False)
        return function(model, dict(weights), inputs if count == size else pad(inputs, size))[:count]


class CompiledSampler:
    """Runs sampled networks in compiled passes of constant shape.

    Args:
        prediction: Prediction.
        shared_draws: Draws of all samples.
        trace: Measurements of the network.
    """

    def __init__(self, prediction: Prediction, shared_draws: SharedDraws, trace: ForwardTrace) -> None:
        self.prediction, self.shared_draws, self.trace = prediction, shared_draws, trace
        self.keys = tuple([(key, call) for key, call, _ in trace.noise_shapes])

    def try_outputs(self, inputs: Any, samples: range) -> Tensor | None:
        """Returns outputs ``[len(samples), rows, ...]``, or None after a warning if the network does not compile."""
        if not self.trace.compile_error:
            # compiled kernels assert strides, which torch's libraries may change later
            errors: tuple[type[Exception], ...] = (*compile_errors(), UnexpectedNoiseShape, AssertionError)
            try:
                return self.outputs(inputs, samples)
            except errors as error:
                self.trace.compile_error = _summary(error)
        self.prediction.warn_once(
            "compile",
            f"the network does not compile in one graph ({self.trace.compile_error}) and runs uncompiled",
        )
        return None

    def outputs(self, inputs: Any, samples: range) -> Tensor:
        """Returns outputs ``[len(samples), rows, ...]``."""
        prediction, first_sample, result = self.prediction, samples.start, None
        count, graphs, chunks = self.plan_passes(inputs, len(samples))
        with quiet_compiler(), unlimited_recompiles(), ExitStack() as stack:
            while first_sample < samples.stop:
                last_sample = min(first_sample + count, samples.stop)
                run_pass = partial(self.run_chunks, chunks, graphs, first_sample, last_sample, count)
                outputs = prediction.attempt(run_pass, prediction.compiled_rows * count)
                if outputs is None:
                    stack.close()
                    prediction.compiled_rows = 0
                    count, graphs, chunks = self.plan_passes(inputs, len(samples))
                    continue
                if result is None:
                    result = outputs.new_empty((len(samples), *outputs.shape[1:]))
                    if graphs:
                        stack.enter_context(skip_guards())
                result[first_sample - samples.start : last_sample - samples.start] = outputs
                first_sample = last_sample
        assert result is not None
        return result

    def run_chunks(self, chunks: list[Any], graphs: bool, first: int, last: int, count: int) -> Tensor:
        """Returns outputs ``[last - first, rows, ...]`` of some samples for all chunks of rows.

        Args:
            chunks: Number of rows and padded inputs of each chunk.
            graphs: If True, passes are replayed from a CUDA graph.
            first: First sample.
            last: End of the range of samples.
            count: Number of samples in a pass, to which the draws are padded.
        """
        model, chunk_outputs = self.prediction.model, []
        tensors = self.shared_draws.tensors(self.trace.noise_shapes, first, last)
        draws = [pad(tensors[key], count) if last - first < count else tensors[key] for key in self.keys]
        function = compile_once(self.prediction, forward_samples, graphs, fullgraph=True)
        for size, inputs in chunks:
            run = function if rows(inputs) == self.prediction.compiled_rows else forward_samples
            outputs = run(model, self.keys, self.trace.operation_rules, draws, inputs)
            check_rows(outputs[0], rows(inputs))
            dtype = torch.promote_types(outputs.dtype, torch.float32)
            # a copy, because the next replay of a CUDA graph overwrites its outputs
            chunk_outputs.append(outputs[: last - first, :size].to(dtype, copy=True))
        return torch.cat(chunk_outputs, 1) if len(chunk_outputs) > 1 else chunk_outputs[0]

    def plan_passes(self, inputs: Any, num_samples: int) -> tuple[int, bool, list[tuple[int, Any]]]:
        """Returns the number of samples in a pass, whether to use CUDA graphs, and the chunks of the inputs.

        A chunk consists of its number of rows and its inputs. A last chunk of at least half the size is padded.
        """
        prediction, total, chunks = self.prediction, rows(inputs), []
        size = min(prediction.compiled_rows or even_size(total, prediction.row_limit), prediction.row_limit)
        prediction.compiled_rows = size
        for start in range(0, total, size):
            chunk = take(inputs, start, min(start + size, total))
            count = rows(chunk)
            chunks.append((count, pad(chunk, size) if size <= 2 * count < 2 * size else chunk))
        samples = self.samples_per_pass(num_samples)
        flops = self.trace.flops_per_row * size * samples
        # short passes wait for their launches, so they are replayed from a CUDA graph
        return samples, prediction.device.type == "cuda" and flops < 7e11, chunks

    def samples_per_pass(self, num_samples: int) -> int:
        """Returns the number of samples in a pass that fill the device.

        Each number needs a compilation of its own, so it is a power of two. It is 1 for adaptive sampling, which requests few samples.
        """
        prediction, kind = self.prediction, "cpu" if self.prediction.device.type == "cpu" else "cuda"
        if num_samples < prediction.samples:
            return 1
        flops_per_sample = max(1.0, self.trace.flops_per_row * prediction.compiled_rows)
        count = min(
            int(FULL_PASS_FLOPS[kind] / flops_per_sample), prediction.row_limit // prediction.compiled_rows
        )
        layers = self.shared_draws.layers
        draw_size = sum(
            prod(positions) * layers[key].layout.dim for key, _, positions in self.trace.noise_shapes
        )
        count = max(1, min(count, num_samples, 2**28 // (4 * draw_size)))  # at most 256 MB of draws
        count = 2 ** (count.bit_length() - 1)
        while -num_samples % count > 0.25 * num_samples:  # at most a quarter of the samples is padding
            count //= 2
        return count


def _summary(error: BaseException) -> str:
    """Returns the first line of an error message, and the second line if the first only names the failed component."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith("raised:") else lines[0]
    return text[:160].rstrip(" .:")
