"""Batches of inputs: a tensor, or a tuple or mapping of tensors, with the examples on the first axis; networks called with them."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flowbnn.errors import FlowBNNError

Result = TypeVar("Result")


def split_batch(batch: Any) -> tuple[Any, Any]:
    """``(inputs, targets)`` of a batch; targets are None for a bare tensor.

    The inputs may be a tensor, a tuple (passed as ``model(*inputs)``) or a mapping (``model(**inputs)``).
    """
    if not isinstance(batch, list | tuple):
        return batch, None
    if len(batch) <= 1:
        return batch[0], None
    inputs, targets = (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    if not isinstance(targets, Tensor):
        text = f"targets are a tensor, not a {type(targets).__name__}; give torch.as_tensor(targets)"
        if isinstance(batch[0], float | int) and isinstance(targets, float | int):
            text = "a batch holds tensors, not numbers; of a list of rows make one by torch.tensor(rows)"
        raise FlowBNNError(text, kind="targets")
    return inputs, targets


def apply(inputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The inputs with ``function`` applied to each of their tensors."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: apply(value, function) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(apply(value, function) for value in inputs)
    raise FlowBNNError(
        f"inputs are tensors, or tuples or mappings of them, not {type(inputs).__name__}{_from_numpy(inputs)}"
    )


def _from_numpy(inputs: Any) -> str:
    """What to do with an array, as the tail of an error message."""
    return "; give torch.from_numpy(inputs).float()" if type(inputs).__name__ == "ndarray" else ""


def repeat_each(inputs: Any, times: int) -> Any:
    """``times`` copies of every row, one row after the other: rows of one example stay together."""
    return apply(inputs, lambda tensor: tensor.repeat_interleave(times, 0))


def tensors_of(inputs: Any) -> list[Tensor]:
    """All tensors of the inputs."""
    return [inputs] if isinstance(inputs, Tensor) else [tensor for _, tensor in named_tensors(inputs)]


def rows(inputs: Any) -> int:
    """The number of examples."""
    if isinstance(inputs, Tensor) and inputs.ndim:
        return inputs.shape[0]
    tensors = tensors_of(inputs)
    if not tensors or tensors[0].ndim == 0:
        raise FlowBNNError(f"inputs are tensors with the examples on their first axis{_from_numpy(inputs)}")
    return tensors[0].shape[0]


def call(model: nn.Module, inputs: Any) -> Tensor:
    """Run the network and take its tensor of outputs (``.logits`` where it returns an object that has one)."""
    if isinstance(inputs, Mapping):
        outputs = model(**inputs)
    elif isinstance(inputs, list | tuple):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise FlowBNNError(
        f"the network returns a {type(outputs).__name__}; flowbnn needs one tensor of outputs, so wrap it in a module that picks it",
        kind="network",
    )


def copy_network(
    network: nn.Module,
    advice: str = "for weight_norm and spectral_norm take those of torch.nn.utils.parametrizations",
) -> nn.Module:
    """A deep copy, of what ``torch.compile`` was given where it is compiled, whose layers have their own names and take hooks.

    A network of which torch makes none, or none that can be worked with, is refused.
    """
    trouble = ""
    for module in network.modules():
        if isinstance(module, torch.jit.ScriptModule):
            trouble, advice = "it is TorchScript", "give the network that it was made from"
        elif any(value.is_meta for value in module.parameters(recurse=False)):
            trouble, advice = "its weights are meta tensors, without numbers", "load them first"
        elif any(map(is_lazy, module.parameters(recurse=False))):
            trouble = f"a {type(module).__name__} has no input width yet"
            advice = "run one batch through the lazy network first"
    try:
        if not trouble:
            return unwrap_compiled(deepcopy(network))
    except RuntimeError as error:
        trouble = str(error).splitlines()[0]
    raise FlowBNNError(
        f"this network cannot be copied ({trouble}); {advice}", kind="network", argument="network"
    )


def unwrap_compiled(network: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given, of the network and, in place, of its parts."""
    for parent in list(network.modules()):
        for name, child in parent._modules.items():  # named_children names a shared part once
            if child is not None:
                parent._modules[name] = child._modules.get("_orig_mod", child)
    return network._modules.get("_orig_mod", network)  # type: ignore[return-value]


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """The precision of the network's weights, which its inputs are brought to."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return None


def device_of(model: nn.Module) -> torch.device:
    tensor = next(iter(model.parameters()), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def move(inputs: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """To the device, and real numbers to the network's own precision where it is given."""

    def to(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, wanted, non_blocking=True)

    return apply(inputs, to)


class NetworkCaller(nn.Module):
    """A network called with whatever form its inputs have: a tensor, a tuple or a dictionary, in the precision of the weights."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Any) -> Tensor:
        return call(self.network, move(inputs, device_of(self.network), dtype_of(self.network)))


def take(inputs: Any, start: int, stop: int) -> Any:
    return apply(inputs, lambda tensor: tensor[start:stop])


def has_row_axis(inputs: Any) -> bool:
    """Whether all tensors have the examples on their first axis, so that some can be taken; not so a graph with its edges, say."""
    if isinstance(inputs, Tensor):
        return inputs.ndim > 0
    sizes = {tensor.shape[:1] for tensor in tensors_of(inputs)}
    return len(sizes) == 1 and len(sizes.pop()) == 1


def pick(inputs: Any, index: Tensor) -> Any:
    """The rows of these numbers."""
    return apply(inputs, lambda tensor: tensor[index.to(tensor.device)])


def pad(inputs: Any, count: int) -> Any:
    """As many rows as asked for, the last one repeated."""
    return apply(
        inputs,
        lambda tensor: torch.cat([tensor, tensor[-1:].expand(count - len(tensor), *tensor.shape[1:])]),
    )


def join(parts: Sequence[Any]) -> Any:
    """Batches of one shape as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: join([part[name] for part in parts]) for name in first}
    return tuple(join(column) for column in zip(*parts, strict=True))


def shapes(inputs: Any) -> Any:
    """What two batches must have in common to be joined: the names or places of their tensors, and each one's row."""
    if isinstance(inputs, Tensor):
        return (inputs.shape[1:], inputs.dtype, inputs.device)
    if isinstance(inputs, Mapping):
        return tuple((name, shapes(value)) for name, value in inputs.items())
    return tuple(shapes(value) for value in inputs) if isinstance(inputs, list | tuple) else type(inputs)


def repeat(inputs: Any, times: int) -> Any:
    """``times`` copies of the batch, one block after the other."""
    return apply(inputs, lambda tensor: tensor.repeat(times, *(1,) * (tensor.ndim - 1)))


def count_data(loader: Any) -> int:
    """The number of examples one pass over the loader (all of its workers together) sees, which weighs the KL."""
    number = getattr(loader, "num_data", None)  # loaders that hold their data on the device say it themselves
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
    raise FlowBNNError(
        "this loader does not say how many examples it gives; say it with num_data=", kind="loader"
    )


def is_batch(inputs: Any) -> bool:
    """Whether this is one batch of inputs; else it may be a loader of them."""
    if isinstance(inputs, Tensor) or hasattr(inputs, "keys"):
        return True
    return isinstance(inputs, tuple) and bool(inputs) and all(isinstance(part, Tensor) for part in inputs)


def as_loader(data: Any) -> Any:
    """One pair of tensors, inputs and targets, is a loader of one batch."""
    pair = isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    return [data] if pair else data


def check_finite(inputs: Any, what: str = "inputs") -> None:
    """Refuse inputs that hold NaN or infinity."""
    for tensor in tensors_of(inputs):
        if tensor.layout is not torch.strided or tensor.is_meta:
            odd = (
                "meta, without numbers"
                if tensor.is_meta
                else f"{tensor.layout}, x.to_dense() gives a dense one"
            )
            raise FlowBNNError(f"the {what} are a tensor of {odd}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero()
            raise FlowBNNError(
                f"the {what} hold NaN or infinity in {len(bad)} of {len(tensor)} rows (the first is row {int(bad[0])}); "
                "clean them first",
                kind="finite",
            )


@contextmanager
def rewrap_forward_errors(inputs: Any, what: str = "the network fails on inputs of") -> Iterator[None]:
    """Where a function of the inputs fails in the ``with`` block, one line has their shapes, what it said, and what may help."""
    try:
        yield
    except (FlowBNNError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        tensors, advice = tensors_of(inputs), ""
        sizes = ", ".join(str(tuple(part.shape)) for part in tensors)
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if any(part.dtype == torch.uint8 for part in tensors):
            advice = "; bytes become numbers by images.float() / 255"
        elif "same dtype" in said and any(not part.is_floating_point() for part in tensors):
            advice = "; integers are made real numbers by inputs.float()"
        elif any(part.ndim in (1, 3) for part in tensors) and re.search("shape|channels|dim", said):
            advice = "; the examples come first: a single one is given as inputs[None]"
        raise FlowBNNError(f"{what} shape {sizes}: {said}{advice}", kind="network") from error


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; every module's own training flag comes back afterwards.

    Modules that have a ``train`` of their own, which may do more than set flags (adapters that merge their weights), have it called.
    """
    flags, training = [], False
    for module in model.modules():
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


@contextmanager
def watch_modules(
    modules: Mapping[str, nn.Module], before: Callable[..., None] | None, after: Callable[..., None] | None
) -> Iterator[None]:
    """Meanwhile modules call ``before(name, module, args, kwargs)`` and ``after(name, module, args, kwargs, output)``."""
    with ExitStack() as hooks:
        for name, module in modules.items():
            if before is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            if after is not None:
                hooks.enter_context(module.register_forward_hook(partial(after, name), with_kwargs=True))
        yield


class ModuleCall(NamedTuple):
    """One call of a module in a forward pass.

    Args:
        name: Name of the module.
        inputs: First argument of the call.
        output: Result of the call.
    """

    name: str
    inputs: Any
    output: Any


@contextmanager
def record_calls(modules: Mapping[str, nn.Module]) -> Iterator[list[ModuleCall]]:
    """Context manager that records all calls of some modules, in the order in which they end.

    >>> layers = {"linear": nn.Linear(2, 3)}
    >>> with record_calls(layers) as calls:
    ...     _ = layers["linear"](torch.ones(4, 2))
    >>> [(call.name, call.inputs.shape, call.output.shape) for call in calls]
    [('linear', torch.Size([4, 2]), torch.Size([4, 3]))]
    """
    calls: list[ModuleCall] = []

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(ModuleCall(name, next(iter((*args, *kwargs.values())), None), output))

    with watch_modules(modules, None, record):
        yield calls


WORDS = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a CUDA device or on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


def halve_rows_on_oom(holder: Any, work: Callable[[], Result]) -> Result:
    """What ``work`` gives, with half of ``holder.rows`` at once whenever memory runs out."""
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or holder.rows < 2:
                raise
            holder.rows //= 2


# -------------------- batches of a loader, in any nesting


def named_tensors(batch: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Every tensor of a nested batch with its place in it.

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
    for key, part in pairs:
        place = f"{name}.{key}" if name else str(key)
        tensors += [(place, part)] if isinstance(part, Tensor) else named_tensors(part, place)
    return tensors


def batch_size(batch: Any) -> int:
    """Rows of the batch's first tensor; 1 where it has no tensor or the tensor no axes.

    >>> batch_size((torch.zeros(8, 3), torch.zeros(8)))
    8
    """
    tensors = named_tensors(batch)
    return tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 1


def fingerprint(batch: Any) -> list[int]:
    """A checksum of every tensor of a nested batch: of its shape, kind and bytes.

    >>> fingerprint((torch.zeros(2), torch.ones(2))) == fingerprint((torch.zeros(2), torch.ones(2, dtype=torch.int32)))
    False
    """
    dense = [tensor for _, tensor in named_tensors(batch) if tensor.layout == torch.strided]
    tensors = [tensor.detach().cpu().contiguous() for tensor in dense]
    kinds = [f"{tensor.dtype} {tuple(tensor.shape)}".encode() for tensor in tensors]
    raw = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return [crc32(part, crc32(kind)) for kind, part in zip(kinds, raw, strict=True)]


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite. The sum tells in one pass; only a sum that overflowed needs a second look."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    total = tensor.sum() if tensor.is_floating_point() else torch.view_as_real(tensor).sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())


def first_nonfinite_tensor(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first name whose tensor is not finite."""
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
