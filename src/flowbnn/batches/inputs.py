"""Batches of one forward pass: inputs and targets, rows, checks, and calls of networks."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.batches.arrays import is_array
from flowbnn.batches.containers import (
    container_rows,
    container_tensors,
    convert_container,
    graph_arguments,
    graph_targets,
    is_container,
    is_graph,
    is_leaf,
    needs_whole_batch,
)
from flowbnn.batches.conversion import as_targets, as_tensors, split_labels
from flowbnn.errors import (
    FlowBNNError,
    describe_value,
    nonfinite_error,
    quote_names,
    requirement_error,
    value_error,
)

_names_of_forwards: WeakKeyDictionary[Callable[..., Any], tuple[list[str], set[Any]]] = WeakKeyDictionary()


class Batch(NamedTuple):
    """Batch with named parts.

    Args:
        inputs: Inputs of the network.
        targets: Targets, or None.
        weights: Weight of the log-likelihood of every example, ``[B]``, or None.
    """

    inputs: Any
    targets: Any = None
    weights: Tensor | None = None


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Splits a batch into inputs and targets. Targets are None if the batch has none.

    * Tuple or list: the last entry has the targets, all others are inputs. Three tensors are therefore two inputs and the targets.
      Name the columns with :class:`~flowbnn.data.Columns` if the third is something else. A single entry has inputs alone.
    * Mapping with ``labels``, ``label`` or ``label_ids``: these are the targets, and are not passed to the network.
    * Graph of torch_geometric: ``y`` has the targets. The network gets the graph.
    * Everything else has inputs alone. Arrays become tensors.

    Args:
        batch: Batch of a loader. The inputs may be a tensor, a tuple (called as ``model(*inputs)``) or a mapping (called as
            ``model(**inputs)``).

    Raises:
        FlowBNNError: If the targets are not numbers, or if the batch has weights, which :func:`split_weighted_batch` returns.

    >>> import torch
    >>> split_batch((torch.zeros(1), torch.ones(1)))
    (tensor([0.]), tensor([1.]))
    >>> split_batch({"input_ids": torch.zeros(1), "labels": torch.ones(1)})
    ({'input_ids': tensor([0.])}, tensor([1.]))
    """
    inputs, targets, weights = split_weighted_batch(batch)
    if weights is not None:
        text = "this method cannot use weights of examples; remove weights= of flowbnn.data.Columns"
        raise FlowBNNError(text, kind="weights", argument="loader")
    return inputs, targets


def split_weighted_batch(batch: Any) -> Batch:
    """Returns the inputs, the targets and the weights of a batch, as :func:`split_batch`. Weights are None if there are none."""
    if isinstance(batch, Batch):
        return batch
    if type(batch) in (tuple, list) and len(batch) == 2:
        inputs, targets = batch
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return Batch(inputs, targets)
    if isinstance(batch, Mapping):
        inputs, targets = split_labels(batch)
        return Batch(as_tensors(inputs), as_targets(targets))
    if is_graph(batch):
        return Batch(batch, graph_targets(batch))
    if is_leaf(batch) or not isinstance(batch, list | tuple):
        return Batch(as_tensors(batch))
    targets = None if len(batch) == 1 else as_targets(batch[-1])
    inputs = as_tensors(batch[0] if len(batch) <= 2 else tuple(batch[:-1]))
    # DataLoader collates a tuple of inputs as a list
    return Batch(tuple(inputs) if isinstance(inputs, list) else inputs, targets)


def is_batch(inputs: Any) -> bool:
    """Returns True for one batch of inputs, and False for a loader."""
    if isinstance(inputs, Tensor) or is_container(inputs) or hasattr(inputs, "keys"):
        return True
    if not isinstance(inputs, tuple) or not all(is_leaf(value) for value in inputs):
        return False
    return any(isinstance(value, Tensor) or is_container(value) for value in inputs)


def apply(
    inputs: Any, function: Callable[[Tensor], Tensor], container: Callable[[Any], Any] | None = None
) -> Any:
    """Applies a function to each tensor of the inputs. Numbers, strings, flags and None are left unchanged.

    Args:
        inputs: Tensor, or nested tuples, lists and mappings of tensors.
        function: Function of a tensor.
        container: Function of a graph or a packed sequence. By default an error is raised, because their rows cannot be selected.

    >>> apply({"x": torch.ones(1), "return_dict": True}, torch.neg)
    {'x': tensor([-1.]), 'return_dict': True}
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    if is_container(inputs):
        if container is None:
            raise no_rows_error(inputs, "this function")
        return container(inputs)
    if isinstance(inputs, Mapping):
        return {name: apply(value, function, container) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple) and not needs_whole_batch(inputs):
        values = [apply(value, function, container) for value in inputs]
        if isinstance(inputs, list):
            return values
        return type(inputs)(*values) if hasattr(inputs, "_fields") else tuple(values)
    return inputs


def no_rows_error(inputs: Any, purpose: str) -> FlowBNNError:
    """Returns the error for graphs, packed sequences and lists of strings, whose rows cannot be selected.

    Args:
        inputs: Inputs of a batch.
        purpose: Name of the operation that selects rows.
    """
    value, hint = describe_value(inputs), "use fb.Temperature or fb.fit"
    return requirement_error(purpose, "inputs with rows", value, hint, kind="rows", argument="inputs")


def tensors_of(inputs: Any) -> list[Tensor]:
    """Returns all tensors of the inputs."""
    return [inputs] if isinstance(inputs, Tensor) else [tensor for _, tensor in named_tensors(inputs)]


def named_tensors(batch: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Returns every tensor of a nested batch with the path to it.

    >>> [name for name, _ in named_tensors((torch.zeros(2), {"label": torch.zeros(2)}))]
    ['0', '1.label']
    """
    if isinstance(batch, Tensor):
        return [(name or "0", batch)]
    pairs: Iterable[tuple[Any, Any]] = ()
    if type(batch) in (list, tuple):
        pairs = enumerate(batch)
    elif is_container(batch):
        pairs = container_tensors(batch)
    elif isinstance(batch, Mapping):
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


def rows(inputs: Any) -> int:
    """Returns the number of examples.

    >>> rows({"x": torch.zeros(3, 2)}), rows({"text": ["a", "b"]})
    (3, 2)
    """
    if isinstance(inputs, Tensor) and inputs.ndim:
        return inputs.shape[0]
    if is_container(inputs):
        return container_rows(inputs)
    tensors = tensors_of(inputs)
    if not tensors or tensors[0].ndim == 0:
        expected, value = "tensors or arrays with the examples on the first axis", describe_value(inputs)
        if tensors:
            hint = "use DataLoader(examples, batch_size=64) for a list of examples"
            raise value_error("inputs", expected, "one number", hint, kind="examples")
        entries = inputs.values() if isinstance(inputs, Mapping) else ()
        texts = next((entry for entry in entries if needs_whole_batch(entry)), None)
        if texts is not None:
            return len(texts)
        raise value_error("inputs", expected, value)
    return tensors[0].shape[0]


def take(inputs: Any, start: int, stop: int) -> Any:
    """Returns the rows from ``start`` to ``stop`` of the inputs. Tensors without axes serve all rows."""
    return apply(inputs, lambda tensor: tensor[start:stop] if tensor.ndim else tensor)


def has_row_axis(inputs: Any) -> bool:
    """Returns True if all tensors have the same number of rows, so that rows can be selected.

    Rows of a graph with edges, of a packed sequence and of a list of strings cannot be selected.
    """
    if isinstance(inputs, Tensor):
        return inputs.ndim > 0
    if needs_whole_batch(inputs) or _has_indivisible_entries(inputs):
        return False
    sizes = {tensor.shape[:1] for tensor in tensors_of(inputs)}
    return len(sizes) == 1 and len(sizes.pop()) == 1


def _has_indivisible_entries(inputs: Any) -> bool:
    """Returns True if an entry of a tuple or a mapping cannot be split into rows."""
    entries: Iterable[Any] = ()
    if isinstance(inputs, Mapping):
        entries = inputs.values()
    elif isinstance(inputs, list | tuple):
        entries = inputs
    non_tensors = [value for value in entries if not isinstance(value, Tensor)]
    return any(needs_whole_batch(value) or _has_indivisible_entries(value) for value in non_tensors)


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
        names = _arguments_of(model)[0]
        arguments = graph_arguments(inputs, names) if is_graph(inputs) else None
        outputs = model(inputs) if arguments is None else model(**arguments)
    elif _takes_one_argument(model, inputs):
        outputs = model(inputs)
    elif isinstance(inputs, Mapping):
        outputs = model(**inputs)
    elif isinstance(inputs, list | tuple):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    return outputs if isinstance(outputs, Tensor) and outputs.ndim != 1 else output_tensor(outputs)


def _takes_one_argument(model: Any, inputs: Any) -> bool:
    """Returns True if the ``forward`` of a network has too few arguments for the entries of a tuple or a mapping."""
    names, variadic = _arguments_of(model)
    if not names or Parameter.VAR_POSITIONAL in variadic or not isinstance(inputs, Mapping | list | tuple):
        return False
    if isinstance(inputs, Mapping):
        return Parameter.VAR_KEYWORD not in variadic and not inputs.keys() & set(names)
    return len(inputs) > len(names)


def _arguments_of(model: Any) -> tuple[list[str], set[Any]]:
    """Returns the arguments of a network, see :func:`_argument_names`. A wrapper with ``*args`` has those of the network inside."""
    names, variadic = _argument_names(getattr(type(model), "forward", nn.Module.forward))
    inner = getattr(model, "network", getattr(model, "module", None))
    if names or inner is None or Parameter.VAR_POSITIONAL not in variadic:
        return names, variadic
    return _arguments_of(inner)


def _argument_names(forward: Callable[..., Any]) -> tuple[list[str], set[Any]]:
    """Returns the names of the arguments of a ``forward`` without ``self``, and the kinds of its variadic ones."""
    found = _names_of_forwards.get(forward)
    if found is None:
        parameters = list(signature(forward).parameters.values())[1:]
        variadic = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} & {value.kind for value in parameters}
        names = [value.name for value in parameters if value.kind not in variadic]
        found = _names_of_forwards[forward] = names, variadic
    return found


def output_tensor(outputs: Any) -> Tensor:
    """Returns the tensor of outputs from the return value of a network.

    It is the tensor itself, ``.logits`` of an object, ``["logits"]`` of a dictionary, or the first tensor of a tuple. One number for
    each example, ``[B]``, becomes ``[B, 1]``. Use :func:`flowbnn.select_output` for other entries.

    Raises:
        FlowBNNError: If there is no such tensor.

    >>> output_tensor({"logits": torch.zeros(2, 3), "features": torch.ones(2, 8)}).shape, output_tensor(torch.zeros(4)).shape
    (torch.Size([2, 3]), torch.Size([4, 1]))
    """
    tensor = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(tensor, tuple | list):
        tensor = next((value for value in tensor if isinstance(value, Tensor)), None)
    if isinstance(tensor, Tensor):
        return tensor.unsqueeze(-1) if tensor.ndim == 1 else tensor
    names = [str(name) for name in outputs] if isinstance(outputs, Mapping) else []
    value = f"a {type(outputs).__name__}" + (f" with {quote_names(names)}" if names else "")
    hint = f"use flowbnn.select_output(network, {names[0] if names else 'logits'!r})"
    if names and all("loss" in name for name in names):
        hint = "return the outputs in training mode as well"
    elif outputs is None or is_array(outputs):
        hint = "return a tensor from forward"
    raise value_error("the network's output", "a tensor", value, hint, kind="network", argument=None)


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the first real parameter, or None."""
    first = first_parameter(model)
    if first is not None and first.is_floating_point():
        return first.dtype
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return None


def first_parameter(model: nn.Module) -> nn.Parameter | None:
    """Returns the first parameter of a network, or None, in a fifth of the time of ``next(model.parameters())``.

    >>> first_parameter(nn.Sequential(nn.ReLU(), nn.Linear(2, 3))).shape
    torch.Size([3, 2])
    """
    for parameter in model._parameters.values():
        if parameter is not None:
            return parameter
    for module in model._modules.values():
        parameter = None if module is None else first_parameter(module)
        if parameter is not None:
            return parameter
    return None


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first parameter, or the CPU."""
    tensor = first_parameter(model)
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
        if not torch.compiler.is_compiling() and tensor.is_inference():  # autograd cannot use these
            tensor = tensor.clone()
        return tensor.to(device, target, non_blocking=True)

    if isinstance(inputs, Tensor):
        return convert(inputs)
    return apply(inputs, convert, lambda value: convert_container(value, convert))


def check_finite(inputs: Any, name: str = "inputs") -> None:
    """Raises an error if inputs have NaN or infinite values, or are sparse or meta tensors.

    Args:
        inputs: Tensor, or nested tuples, lists and mappings of tensors.
        name: Name of the inputs in the message.
    """
    for tensor in tensors_of(inputs):
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "a meta tensor" if tensor.is_meta else f"a {tensor.layout} tensor; use x.to_dense()"
            raise FlowBNNError(f"the {name} are {kind}")
        if tensor.is_floating_point() and not bool((finite := torch.isfinite(tensor)).all()):
            raise nonfinite_error(f"the {name}", finite, "clean or remove them", kind="finite")


def is_finite(tensor: Tensor) -> bool:
    """Returns True if all values of a tensor are finite.

    A finite sum proves this in one pass. Only a sum that overflowed needs a second one.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    total = tensor.sum() if tensor.is_floating_point() else torch.view_as_real(tensor).sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())


def check_finite_tensors(tensors: Sequence[tuple[str, Tensor]], epoch: int | None, index: int) -> None:
    """Raises an error if a named tensor has NaN or infinite values or no rows, like :func:`check_finite_batch`."""
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
        place = ("" if epoch is None else f"epoch {epoch + 1}, ") + f"batch {index + 1}"
        if empty:
            text = f"{place}: tensor {name!r} has no rows; drop empty batches"
            raise FlowBNNError(text, kind="batch", tensor=name)
        finite, hint = torch.isfinite(torch.atleast_1d(tensor)), "clean or remove them"
        raise nonfinite_error(f"tensor {name!r} of {place}", finite, hint, kind="batch", tensor=name)


@contextmanager
def rewrap_forward_errors(inputs: Any, problem: str = "the network fails on inputs of") -> Iterator[None]:
    """Context manager that re-raises errors of the forward pass with the input shapes and a hint.

    Args:
        inputs: Inputs of the forward pass.
        problem: Beginning of the message, before the shapes.
    """
    try:
        yield
    except (FlowBNNError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        tensors, hint = tensors_of(inputs), ""
        sizes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        widths = re.search(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", message)
        if widths and any(tensor.ndim == 2 and tensor.shape[1] == int(widths[1]) for tensor in tensors):
            hint = f"; the network takes {widths[2]} columns, got {widths[1]}"
        elif "unexpected keyword argument" in message and isinstance(inputs, Mapping):
            hint = "; use flowbnn.data.Columns(loader, inputs=[...], targets=...)"
        elif isinstance(inputs, Mapping) and "not dict" in message:
            problem = f"no argument of the network is named {quote_names([str(name) for name in inputs])}: {problem}"
            hint = "; name the entries after the arguments of forward"
        elif isinstance(inputs, tuple) and re.search("(not|got a) tuple|takes .* positional", message):
            message, hint = "a tuple has several arguments of forward", "; leave out targets"
        elif any(tensor.dtype == torch.uint8 for tensor in tensors):
            hint = "; use images.float() / 255"
        elif "same dtype" in message and any(not tensor.is_floating_point() for tensor in tensors):
            hint = "; use inputs.float()"
        elif (
            isinstance(inputs, Tensor) and inputs.ndim in (1, 3) and re.search("shape|channels|dim", message)
        ):
            hint = "; use inputs[None] for one example"
        text = f"{problem} shape {sizes}: {message}{hint}"
        raise FlowBNNError(
            text, kind="network", shapes=[tuple(tensor.shape) for tensor in tensors]
        ) from error
