"""Calls of networks with inputs on their device, and errors of these calls."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import Parameter, signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flowbnn.batches.containers import convert_container, graph_arguments, is_container, is_graph
from flowbnn.batches.rows import apply, tensors_of
from flowbnn.errors import FlowBNNError, quote_names

Result = TypeVar("Result")


def call(model: nn.Module, inputs: Any) -> Tensor:
    """Calls a network and returns its tensor of outputs, see :func:`output_tensor`.

    Args:
        model: Network.
        inputs: Tensor, tuple (called as ``model(*inputs)``) or mapping (called as ``model(**inputs)``). A network whose ``forward``
            cannot take the entries as arguments gets the tuple or mapping as one argument. A graph of torch_geometric and a packed
            sequence are one argument. A network with an argument ``edge_index`` gets the attributes of a graph by name.

    Raises:
        FlowBNNError: If the network does not return a tensor.
    """
    if isinstance(inputs, Tensor):
        outputs = model(inputs)
    elif is_container(inputs):
        names = _argument_names(getattr(type(model), "forward", nn.Module.forward))[0]
        arguments = graph_arguments(inputs, names) if is_graph(inputs) else None
        outputs = model(inputs) if arguments is None else model(**arguments)
    elif _takes_whole(model, inputs):
        outputs = model(inputs)
    elif isinstance(inputs, Mapping):
        outputs = model(**inputs)
    elif isinstance(inputs, list | tuple):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    return outputs if isinstance(outputs, Tensor) and outputs.ndim != 1 else output_tensor(outputs)


def _takes_whole(model: Any, inputs: Any) -> bool:
    """Returns True if the ``forward`` of a network has too few arguments for the entries of a tuple or a mapping."""
    names, variadic = _argument_names(getattr(type(model), "forward", nn.Module.forward))
    if not names or Parameter.VAR_POSITIONAL in variadic or not isinstance(inputs, Mapping | list | tuple):
        return False
    if isinstance(inputs, Mapping):
        return Parameter.VAR_KEYWORD not in variadic and not inputs.keys() & set(names)
    return len(inputs) > len(names)


@cache
def _argument_names(forward: Callable[..., Any]) -> tuple[list[str], set[Any]]:
    """Returns the names of the arguments of a ``forward`` without ``self``, and the kinds of its variadic ones."""
    parameters = list(signature(forward).parameters.values())[1:]
    variadic = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} & {value.kind for value in parameters}
    return [value.name for value in parameters if value.kind not in variadic], variadic


def output_tensor(outputs: Any) -> Tensor:
    """Returns the tensor of outputs among what a network returns.

    It is the tensor itself, ``.logits`` of an object, ``["logits"]`` of a dictionary, or the first tensor of a tuple. One number for
    each example, ``[B]``, becomes ``[B, 1]``. Use :func:`flowbnn.select_output` for other entries.

    Raises:
        FlowBNNError: If there is no such tensor.

    >>> output_tensor({"logits": torch.zeros(2, 3), "features": torch.ones(2, 8)}).shape, output_tensor(torch.zeros(4)).shape
    (torch.Size([2, 3]), torch.Size([4, 1]))
    """
    tensor = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if type(tensor) in (tuple, list):
        tensor = next((value for value in tensor if isinstance(value, Tensor)), None)
    if isinstance(tensor, Tensor):
        return tensor.unsqueeze(-1) if tensor.ndim == 1 else tensor
    names = [str(name) for name in outputs] if isinstance(outputs, Mapping) else []
    entries = f" with {quote_names(names)}" if names else ""
    example = names[0] if names else "logits"
    text = (
        f"the network returns a {type(outputs).__name__}{entries} instead of a tensor; "
        f"use flowbnn.select_output(network, {example!r})"
    )
    raise FlowBNNError(text, kind="network")


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the first real parameter, or None."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return None


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first parameter, or the CPU."""
    tensor = next(iter(model.parameters()), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def move(inputs: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Moves inputs to a device and converts real tensors to a dtype.

    Args:
        inputs: Tensor, or nested tuples, lists and mappings of tensors.
        device: Target device.
        dtype: Target dtype of real tensors, or None to keep theirs.
    """

    def convert(tensor: Tensor) -> Tensor:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if not torch.compiler.is_compiling() and tensor.is_inference():  # which autograd cannot use
            tensor = tensor.clone()
        return tensor.to(device, target, non_blocking=True)

    if isinstance(inputs, Tensor):
        return convert(inputs)
    return apply(inputs, convert, lambda value: convert_container(value, convert))


def move_data(data: tuple[Any, Tensor], network: nn.Module) -> tuple[Any, Tensor]:
    """Returns inputs on the device and in the dtype of a network, and targets on its device in their own dtype.

    Args:
        data: Inputs and targets.
        network: Network to call with the inputs.
    """
    inputs, targets = data
    return move(inputs, device_of(network), dtype_of(network)), move(targets, device_of(network))


class NetworkCaller(nn.Module):
    """Module that calls a network with a tensor, tuple or mapping, on the device and in the dtype of its weights.

    Args:
        network: Network to call.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Any) -> Tensor:
        return call(self.network, move(inputs, device_of(self.network), dtype_of(self.network)))


@contextmanager
def rewrap_forward_errors(inputs: Any, what: str = "the network fails on inputs of") -> Iterator[None]:
    """Context manager that re-raises errors of the forward pass with the input shapes and a hint.

    Args:
        inputs: Inputs of the forward pass.
        what: Beginning of the message, before the shapes.
    """
    try:
        yield
    except (FlowBNNError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        tensors, hint = tensors_of(inputs), ""
        sizes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        widths = re.search(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", message)
        if widths and any(tensor.ndim == 2 and tensor.shape[1] == int(widths[1]) for tensor in tensors):
            hint = f"; the network takes {widths[2]} columns, got {widths[1]}"
        elif "unexpected keyword argument" in message and isinstance(inputs, Mapping):
            hint = "; name the inputs with flowbnn.data.Columns(loader, inputs=[...], targets=...)"
        elif any(tensor.dtype == torch.uint8 for tensor in tensors):
            hint = "; use images.float() / 255"
        elif "same dtype" in message and any(not tensor.is_floating_point() for tensor in tensors):
            hint = "; use inputs.float()"
        elif any(tensor.ndim in (1, 3) for tensor in tensors) and re.search("shape|channels|dim", message):
            hint = "; use inputs[None] for one example"
        text = f"{what} shape {sizes}: {message}{hint}"
        raise FlowBNNError(
            text, kind="network", shapes=[tuple(tensor.shape) for tensor in tensors]
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an exception means that memory ran out, on a CUDA device or on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    phrases = "out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED"
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def halve_rows_on_oom(holder: Any, function: Callable[[], Result]) -> Result:
    """Calls a function, and again with half of ``holder.rows`` whenever memory runs out.

    Args:
        holder: Object whose attribute ``rows`` is the number of rows that the function computes at once.
        function: Function without arguments.
    """
    while True:
        try:
            return function()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or holder.rows < 2:
                raise
            holder.rows //= 2
