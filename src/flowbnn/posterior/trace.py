"""Measurements of one forward pass over a few rows: memory, floating-point operations, and the shapes of the noise."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flowbnn.batches import (
    apply,
    call,
    device_of,
    has_row_axis,
    is_container,
    is_graph,
    rows,
    take,
)
from flowbnn.memory import is_out_of_memory
from flowbnn.networks import evaluation_mode, watch_modules
from flowbnn.noise import Noise, noise_layers
from flowbnn.noise.base import make_noise_modes
from flowbnn.noise.contexts import NoiseContext, Shape
from flowbnn.posterior.operation_rules import RuleFinder

Dependence = Literal["none", "rows", "random"]  # result of find_dependence
Result = TypeVar("Result")


def try_call(function: Callable[[], Result]) -> Result | Exception:
    """Returns the result of ``function``, or the error that it raises. Raises only if memory runs out."""
    try:
        return function()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error


@dataclass
class ForwardTrace:
    """Measurements of one forward pass.

    Args:
        rows: Number of rows of the inputs.
        bytes_per_row: Bytes of one row in the input and output of the widest module, or 0 if unknown.
        noisy_bytes_per_row: The same for the part of the network after the first noise.
        output_bytes_per_row: Bytes of one row in the output of the network, or 0 if unknown.
        flops_per_row: Floating-point operations of one row in matrix products and convolutions, or 0 if unknown.
        prefix_share: Share of these operations before the first noise.
        noise_shapes: Layer key, number of earlier calls, and positions of each draw, in the order of the pass.
        operation_rules: True if the pass has an operation that :class:`~flowbnn.posterior.operation_rules.OperationRules` change.
        dependence: Result of :func:`find_dependence` on these rows.
        vmap_works: True once vmap has run on such inputs.
        vmap_error: Message of the error that vmap raised, or empty.
        compile_error: Message of the error that ``torch.compile`` raised, or empty.
    """

    rows: int
    bytes_per_row: int = 0
    noisy_bytes_per_row: int = 0
    output_bytes_per_row: int = 0
    flops_per_row: float = 0.0
    prefix_share: float = 0.0
    noise_shapes: list[tuple[int, int, Shape]] = field(default_factory=list)
    operation_rules: bool = False
    dependence: Dependence = "none"
    vmap_works: bool = False
    vmap_error: str = ""
    compile_error: str = ""


class FlopCounter(TorchDispatchMode):
    """Counts floating-point operations with the formulas of :mod:`torch.utils.flop_counter`, in this thread only."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            with suppress(Exception):  # operations in an unusual form count as none
                self.total += formula(*args, **(kwargs or {}), out_val=output)
        return output


class ProbeDraws:
    """Source of draws that are all one. It records the shapes that layers request.

    Args:
        counter: Counter of operations. Its value at the first request is stored.
    """

    def __init__(self, counter: FlopCounter) -> None:
        self.counter, self.prefix_flops = counter, 0.0
        self.shapes: list[tuple[int, int, Shape]] = []

    def draws(self, layer: Noise, positions: Shape, call: int, device: torch.device) -> Tensor:
        if not self.shapes:
            self.prefix_flops = self.counter.total
        if (layer.key, call, positions) not in self.shapes:
            self.shapes.append((layer.key, call, positions))
        return torch.ones(1, *positions, layer.layout.dim, device=device)


def trace_forward(model: nn.Module, inputs: Any) -> ForwardTrace:
    """Runs the network on a few rows, with the noise at one, and measures the pass.

    Args:
        model: Network.
        inputs: Few rows of inputs on the device of the network.

    Returns:
        The measurements. If the network fails, they hold its error.

    >>> trace = trace_forward(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.zeros(2, 4))
    >>> trace.bytes_per_row, trace.flops_per_row
    (64, 64.0)
    """
    trace, counter = ForwardTrace(max(1, rows(inputs))), FlopCounter()
    probe_draws, noise_before = ProbeDraws(counter), list[bool]()

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        noise_before.append(bool(probe_draws.shapes))

    def end(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        noisy_input = noise_before.pop()
        input_size, output_size = _size(args) // trace.rows, _size((output,)) // trace.rows
        trace.bytes_per_row = max(trace.bytes_per_row, input_size + output_size)
        noisy = (input_size if noisy_input else 0) + (output_size if probe_draws.shapes else 0)
        trace.noisy_bytes_per_row = max(trace.noisy_bytes_per_row, noisy)

    context: AbstractContextManager[Any] = nullcontext()
    if noise_layers(model):
        context = NoiseContext(make_noise_modes(model, "shared", 1, 0), probe_draws, sharded=False)
    modules, rules = dict(model.named_modules()), RuleFinder()
    with watch_modules(modules, begin, end), evaluation_mode(model), context, counter, rules:
        outputs = try_call(partial(call, model, inputs))
    if isinstance(outputs, Exception):  # the prediction itself reports it
        return trace
    trace.operation_rules = rules.needs_rules
    trace.output_bytes_per_row = _size((outputs,)) // trace.rows
    trace.flops_per_row, trace.noise_shapes = counter.total / trace.rows, probe_draws.shapes
    trace.prefix_share = probe_draws.prefix_flops / counter.total if counter.total else 0.0
    with evaluation_mode(model), context:
        trace.dependence = find_dependence(partial(call, model), inputs, outputs)
    return trace


def find_dependence(
    forward: Callable[[Any], Tensor], inputs: Any, outputs: Tensor | None = None
) -> Dependence:
    """Tests whether outputs are random or depend on other rows of the batch, by passes in which other rows are replaced.

    Half of the rows are replaced, then the other half, because a network may compare all rows with one of them.

    Args:
        forward: Function that runs the network, with its noise fixed.
        inputs: Few rows of inputs.
        outputs: Outputs for these inputs, if they are known.

    Returns:
        ``"rows"`` if outputs depend on other rows, ``"random"`` if two passes over the same inputs differ, otherwise ``"none"``. A
        network that fails on the replaced rows counts as ``"none"``.

    >>> x = torch.arange(8.0).view(4, 2)
    >>> find_dependence(torch.exp, x), find_dependence(lambda x: x - x.mean(0), x)
    ('none', 'rows')
    """
    if is_container(inputs):
        return "none"  # rows of containers cannot be replaced
    known, total = forward(inputs) if outputs is None else outputs, rows(inputs)
    if not known.is_floating_point():
        return "none"
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    halves = order[: (total + 1) // 2], order[(total + 1) // 2 :]

    def differs(other: Tensor | Exception, row_index: Tensor) -> bool:
        if isinstance(other, Exception) or known.shape != other.shape or known.shape[:1] != (total,):
            return False
        index = row_index.to(known.device)
        return rows_differ(known, other[index], index)

    def changes(source_rows: Tensor, replaced_rows: Tensor) -> bool:
        row_index = torch.arange(total)
        row_index[replaced_rows] = source_rows.repeat(2)[: len(replaced_rows)]

        def replace_rows(tensor: Tensor) -> Tensor:
            return tensor[row_index.to(tensor.device)] if tensor.shape[:1] == (total,) else tensor

        return differs(try_call(partial(forward, apply(inputs, replace_rows))), source_rows)

    state = _generator_state(known.device)
    rows_interact = any(changes(*pair) for pair in (halves, halves[::-1]) if len(pair[0]))
    # dropout may draw the same mask again, so a network that draws runs several times
    tries = 1 if torch.equal(state, _generator_state(known.device)) else 8
    if (rows_interact or tries > 1) and any(
        differs(try_call(partial(forward, inputs)), order) for _ in range(tries)
    ):
        return "random"
    return "rows" if rows_interact else "none"


def rows_differ(outputs: Tensor, subset_outputs: Tensor, index: slice | Tensor) -> bool:
    """Returns True if outputs of the same rows in two batches differ by more than rounding.

    Args:
        outputs: Outputs for a batch.
        subset_outputs: Outputs for some of its rows, in another batch.
        index: Indices of these rows in the first batch.
    """
    if outputs[index].shape != subset_outputs.shape:
        return True
    if not outputs.is_floating_point():
        return False
    outputs, subset_outputs = outputs.detach(), subset_outputs.detach()
    tolerance = max(1e-4, 10.0 * torch.finfo(outputs.dtype).eps) * float(outputs.abs().max())
    return float((outputs[index] - subset_outputs).abs().max()) > tolerance  # False for NaN


def _generator_state(device: torch.device) -> Tensor:
    """Returns the state of torch's global generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def examples_interact(model: nn.Module, inputs: Any, max_rows: int = 8) -> bool:
    """Returns True if outputs of a network in evaluation mode depend on other examples of the batch, as in a graph.

    Random numbers that the network draws are the same in all passes.

    Args:
        model: Network. Its noise is off.
        inputs: Batch of inputs on the device of the network.
        max_rows: Number of examples to run, unless they cannot be separated.
    """
    if is_container(inputs):
        return is_graph(inputs)  # nodes of a graph interact, sequences do not
    if has_row_axis(inputs) and rows(inputs) > max_rows:
        inputs = take(inputs, 0, max_rows)
    if rows(inputs) < 2:
        return False
    devices = [device] if (device := device_of(model)).type == "cuda" else []

    def forward(batch: Any) -> Tensor:
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            return call(model, batch)

    modes = make_noise_modes(layers, "off") if (layers := noise_layers(model)) else {}
    with evaluation_mode(model), NoiseContext(modes, sharded=False):
        dependence = try_call(partial(find_dependence, forward, inputs))
    return dependence == "rows"


def _size(values: Any) -> int:
    """Returns the bytes of the tensors among these values."""
    return sum([value.numel() * value.element_size() for value in values if isinstance(value, Tensor)])
