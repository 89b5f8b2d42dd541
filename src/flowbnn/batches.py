"""Batches of inputs (a tensor, or a tuple or mapping of tensors, with the examples on the first axis) and calls of networks."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import Parameter, signature
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError

Result = TypeVar("Result")


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Splits a batch into inputs and targets. Targets are None if the batch has none.

    Args:
        batch: Tensor or mapping of inputs, or a tuple whose last entry is the targets. The inputs may be a tensor, a tuple (called as
            ``model(*inputs)``) or a mapping (called as ``model(**inputs)``).

    Raises:
        FlowBNNError: If the targets are no tensor.

    >>> split_batch((torch.zeros(1), torch.ones(1)))
    (tensor([0.]), tensor([1.]))
    """
    if not isinstance(batch, list | tuple):
        return batch, None
    if len(batch) <= 1:
        return batch[0], None
    inputs, targets = (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    if not isinstance(targets, Tensor):
        kind = type(targets).__name__
        text = f"the targets of a batch must be a tensor, not a {kind}; use torch.as_tensor"
        raise FlowBNNError(text, kind="targets")
    return inputs, targets


def apply(inputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies a function to each tensor of the inputs.

    Args:
        inputs: Tensor, or nested tuples, lists and mappings of tensors.
        function: Function of a tensor.

    >>> apply({"x": torch.ones(1)}, torch.neg)
    {'x': tensor([-1.])}
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: apply(value, function) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(apply(value, function) for value in inputs)
    raise _input_error(inputs)


def _input_error(inputs: Any) -> FlowBNNError:
    """Returns the error for inputs that are no tensors with the examples on the first axis."""
    kind = type(inputs).__name__
    hint = "; use torch.from_numpy(inputs).float()" if kind == "ndarray" else ""
    return FlowBNNError(f"inputs must be tensors with the examples on the first axis, not a {kind}{hint}")


def repeat_each(inputs: Any, times: int) -> Any:
    """Repeats every row ``times`` times. The copies of a row are adjacent."""
    return apply(inputs, lambda tensor: tensor.repeat_interleave(times, 0))


def tensors_of(inputs: Any) -> list[Tensor]:
    """Returns all tensors of the inputs."""
    return [inputs] if isinstance(inputs, Tensor) else [tensor for _, tensor in named_tensors(inputs)]


def rows(inputs: Any) -> int:
    """Returns the number of examples.

    >>> rows({"x": torch.zeros(3, 2)})
    3
    """
    if isinstance(inputs, Tensor) and inputs.ndim:
        return inputs.shape[0]
    tensors = tensors_of(inputs)
    if not tensors or tensors[0].ndim == 0:
        raise _input_error(inputs)
    return tensors[0].shape[0]


def call(model: nn.Module, inputs: Any) -> Tensor:
    """Calls a network and returns its tensor of outputs, or ``.logits`` if it returns an object that has them.

    Args:
        model: Network.
        inputs: Tensor, tuple (called as ``model(*inputs)``) or mapping (called as ``model(**inputs)``). A network whose ``forward``
            cannot take the entries as arguments gets the tuple or mapping as one argument.

    Raises:
        FlowBNNError: If the network does not return a tensor.
    """
    if isinstance(inputs, Tensor) or _takes_whole(model, inputs):
        outputs = model(inputs)
    elif isinstance(inputs, Mapping):
        outputs = model(**inputs)
    elif isinstance(inputs, list | tuple):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    return outputs if isinstance(outputs, Tensor) else output_tensor(outputs)


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
    """Returns the tensor that a network returns, or ``.logits`` of an object, or ``["logits"]`` of a dictionary.

    Raises:
        FlowBNNError: If the object has none.
    """
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    text = f"the network returns a {type(outputs).__name__} instead of a tensor; wrap it in a module that returns one"
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

    return convert(inputs) if isinstance(inputs, Tensor) else apply(inputs, convert)


def move_data(data: tuple[Any, Tensor], network: nn.Module) -> tuple[Any, Tensor]:
    """Returns inputs on the device and in the dtype of a network, and targets on its device in their own dtype.

    Args:
        data: Inputs and targets.
        network: Network to call with the inputs.
    """
    inputs, targets = data
    return move(inputs, device_of(network), dtype_of(network)), targets.to(device_of(network))


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


def take(inputs: Any, start: int, stop: int) -> Any:
    """Returns the rows from ``start`` to ``stop`` of the inputs."""
    return apply(inputs, lambda tensor: tensor[start:stop])


def has_row_axis(inputs: Any) -> bool:
    """Returns True if all tensors have the same number of rows, so that rows can be selected.

    This is not the case for a graph with its edges, for example.
    """
    if isinstance(inputs, Tensor):
        return inputs.ndim > 0
    sizes = {tensor.shape[:1] for tensor in tensors_of(inputs)}
    return len(sizes) == 1 and len(sizes.pop()) == 1


def pick(inputs: Any, index: Tensor) -> Any:
    """Returns the rows with the given indices."""
    return apply(inputs, lambda tensor: tensor[index.to(tensor.device)])


def pad(inputs: Any, count: int) -> Any:
    """Repeats the last row until there are ``count`` rows."""
    return apply(
        inputs,
        lambda tensor: torch.cat([tensor, tensor[-1:].expand(count - len(tensor), *tensor.shape[1:])]),
    )


def join(batches: Sequence[Any]) -> Any:
    """Concatenates batches of the same structure along the first axis."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {name: join([batch[name] for batch in batches]) for name in first}
    return tuple(join(column) for column in zip(*batches, strict=True))


def shapes(inputs: Any) -> Any:
    """Returns the structure, row shapes, dtypes and devices of a batch. Batches can be joined if these are equal."""
    if isinstance(inputs, Tensor):
        return (inputs.shape[1:], inputs.dtype, inputs.device)
    if isinstance(inputs, Mapping):
        return tuple((name, shapes(value)) for name, value in inputs.items())
    return tuple(shapes(value) for value in inputs) if isinstance(inputs, list | tuple) else type(inputs)


def repeat(inputs: Any, times: int) -> Any:
    """Repeats the whole batch ``times`` times."""
    return apply(inputs, lambda tensor: tensor.repeat(times, *(1,) * (tensor.ndim - 1)))


def reported_size(loader: Any) -> int | None:
    """Returns the number of examples in one pass over a loader, over all processes, or None if the loader does not report it.

    Args:
        loader: ``DataLoader``, list of batches, or an object with an attribute ``num_data``.
    """
    number = getattr(loader, "num_data", None)
    if isinstance(number, int):
        return number
    if isinstance(loader, list | tuple):
        return sum([rows(split_batch(batch)[0]) for batch in loader])
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    size = getattr(batches, "batch_size", None)
    if sampler is not None and isinstance(size, int) and hasattr(sampler, "__len__"):
        count = len(sampler)
        if getattr(batches, "drop_last", False):
            count = count // size * size
        return count * int(getattr(sampler, "num_replicas", 1))
    return None


def check_repeatable(loader: Any, argument: str = "loader") -> None:
    """Raises FlowBNNError if a loader is an iterator, which serves one pass only."""
    if hasattr(loader, "__next__"):
        text = (
            f"{argument} is an iterator, which can be read only once; use a DataLoader or a list of batches"
        )
        raise FlowBNNError(text, kind="loader", argument=argument)


def is_batch(inputs: Any) -> bool:
    """Returns True for one batch of inputs, and False for a loader."""
    if isinstance(inputs, Tensor) or hasattr(inputs, "keys"):
        return True
    return isinstance(inputs, tuple) and bool(inputs) and all(isinstance(value, Tensor) for value in inputs)


def as_loader(data: Any) -> Any:
    """Returns a pair of tensors as a list of one batch, and other data unchanged."""
    is_pair = isinstance(data, tuple) and len(data) == 2 and all(isinstance(value, Tensor) for value in data)
    return [data] if is_pair else data


def check_finite(inputs: Any, what: str = "inputs") -> None:
    """Raises an error if inputs have NaN or infinite values, or are sparse or meta tensors.

    Args:
        inputs: Tensor, or nested tuples, lists and mappings of tensors.
        what: Name of the inputs in the message.
    """
    for tensor in tensors_of(inputs):
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "a meta tensor" if tensor.is_meta else f"a {tensor.layout} tensor; use x.to_dense()"
            raise FlowBNNError(f"the {what} are {kind}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero()
            text = f"the {what} have NaN or infinite values in {len(bad)} of {len(tensor)} rows, first in row {int(bad[0])}; clean them"
            raise FlowBNNError(text, kind="finite")


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
        if any(tensor.dtype == torch.uint8 for tensor in tensors):
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


# -------------------- nested batches


def named_tensors(batch: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Returns every tensor of a nested batch with the path to it.

    >>> [name for name, _ in named_tensors((torch.zeros(2), {"label": torch.zeros(2)}))]
    ['0', '1.label']
    """
    if isinstance(batch, Tensor):
        return [(name or "0", batch)]
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(batch, Mapping):
        pairs = batch.items()
    elif isinstance(batch, (list, tuple)):
        pairs = enumerate(batch)
    tensors = []
    for key, value in pairs:
        path = f"{name}.{key}" if name else str(key)
        tensors += [(path, value)] if isinstance(value, Tensor) else named_tensors(value, path)
    return tensors


def batch_size(batch: Any) -> int:
    """Returns the number of rows of the first tensor of a batch, or 1 if there is none.

    >>> batch_size((torch.zeros(8, 3), torch.zeros(8)))
    8
    """
    tensors = named_tensors(batch)
    return tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 1


def fingerprint(batch: Any) -> list[int]:
    """Returns a checksum of the shape, dtype and bytes of every tensor of a nested batch.

    >>> fingerprint((torch.zeros(2), torch.ones(2))) == fingerprint((torch.zeros(2), torch.ones(2, dtype=torch.int32)))
    False
    """
    dense = [tensor for _, tensor in named_tensors(batch) if tensor.layout == torch.strided]
    tensors = [tensor.detach().cpu().contiguous() for tensor in dense]
    headers = [f"{tensor.dtype} {tuple(tensor.shape)}".encode() for tensor in tensors]
    contents = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return [crc32(content, crc32(header)) for header, content in zip(headers, contents, strict=True)]


def is_finite(tensor: Tensor) -> bool:
    """Returns True if all values of a tensor are finite.

    A finite sum proves this in one pass. Only a sum that overflowed needs a second one.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    total = tensor.sum() if tensor.is_floating_point() else torch.view_as_real(tensor).sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())


def first_nonfinite_tensor(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor that is not finite, or None."""
    return next((name for name, tensor in named if not is_finite(tensor)), None)


def check_finite_batch(batch: Any, epoch: int | None, index: int) -> None:
    """Raises an error if a nested batch has NaN or infinite values, or a tensor without rows.

    Args:
        batch: Tensor, or nested tuples, lists and mappings of tensors.
        epoch: Index of the epoch for the message, or None if there are no epochs.
        index: Index of the batch for the message.

    >>> check_finite_batch((torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 1])), epoch=2, index=5)
    Traceback (most recent call last):
    ...
    flowbnn.errors.FlowBNNError: epoch 3, batch 6: 1 of 2 rows of tensor '0' have NaN or infinite values; ...
    """
    check_finite_tensors(named_tensors(batch), epoch, index)


def check_finite_tensors(tensors: Sequence[tuple[str, Tensor]], epoch: int | None, index: int) -> None:
    """Raises an error if a named tensor has NaN or infinite values or no rows, as :func:`check_finite_batch`."""
    for name, tensor in tensors:
        empty = tensor.dim() > 0 and tensor.shape[0] == 0
        if not empty:
            # a finite sum proves that all values are finite, in one pass
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            if tensor.is_floating_point() and math.isfinite(tensor.detach().sum().item()):
                continue
            if is_finite(tensor):
                continue
        problem = f"tensor {name!r} has no rows; leave empty batches out of the loader"
        if not empty:
            bad = ~torch.isfinite(tensor)
            count = int(bad.flatten(1).any(1).sum()) if tensor.dim() > 1 else int(bad.sum())
            rows = tensor.shape[0] if tensor.dim() else 1
            problem = (
                f"{count} of {rows} rows of tensor {name!r} have NaN or infinite values; clean or remove them"
            )
        place = "" if epoch is None else f"epoch {epoch + 1}, "
        raise FlowBNNError(f"{place}batch {index + 1}: {problem}", kind="batch", tensor=name)
