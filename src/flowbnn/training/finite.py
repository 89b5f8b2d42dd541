"""Numbers that are not finite: noticed at once, traced to the layer that made them, never written to disk."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError

__all__ = [
    "batch_size",
    "check_finite_batch",
    "explain_single_row",
    "first_nonfinite_layer",
    "first_nonfinite_tensor",
    "is_finite",
    "name_below",
    "named_tensors",
    "watch_layers",
]


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


def name_below(name: str, root: str) -> str:
    """The name of a module or parameter as seen from the submodule ``root``; one outside it keeps its name.

    >>> name_below("network.fc1.weight", "network"), name_below("likelihood.scale", "network")
    ('fc1.weight', 'likelihood.scale')
    """
    if not root:
        return name
    return "" if name == root else name.removeprefix(root + ".")


def batch_size(batch: Any) -> int:
    """Rows of the batch's first tensor; 1 where it has no tensor or the tensor no axes.

    >>> batch_size((torch.zeros(8, 3), torch.zeros(8)))
    8
    """
    tensors = named_tensors(batch)
    return tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 1


def explain_single_row(error: Exception, batch: Any, epoch: int, index: int) -> None:
    """Say in one line where it is BatchNorm, which has nothing to normalize in a single example, that raised an error."""
    if "more than 1 value per channel" in str(error) and batch_size(batch) == 1:
        raise FlowBNNError(
            f"epoch {epoch + 1}, batch {index + 1}: the batch has a single example, which BatchNorm cannot be trained on; "
            "give the loader drop_last=True or another batch size",
            kind="batch",
        ) from error


def check_finite_batch(batch: Any, epoch: int, index: int) -> None:
    """Refuse a batch that holds NaN or infinite numbers, or no rows; ``epoch`` and ``index`` count from 0.

    >>> check_finite_batch((torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 1])), epoch=2, index=5)
    Traceback (most recent call last):
    ...
    flowbnn.errors.FlowBNNError: epoch 3, batch 6: 1 of 2 rows of tensor '0' hold NaN or infinite values; ...
    """
    for name, tensor in named_tensors(batch):
        empty = tensor.dim() > 0 and tensor.shape[0] == 0
        if not empty and is_finite(tensor):
            continue
        trouble = f"tensor {name!r} has no rows; leave empty batches out of the loader"
        if not empty:
            bad = ~torch.isfinite(tensor)
            rows = int(bad.flatten(1).any(1).sum()) if tensor.dim() > 1 else int(bad.sum())
            trouble = (
                f"{rows} of {tensor.shape[0] if tensor.dim() else 1} rows of tensor {name!r} hold NaN or infinite values; "
                "clean the data or leave these rows out"
            )
        raise FlowBNNError(f"epoch {epoch + 1}, batch {index + 1}: {trouble}", kind="batch")


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


def first_nonfinite_layer(model: nn.Module, call: Callable[[], Any]) -> str | None:
    """The first module, in the order they finish, that turned finite inputs into a non-finite output.

    Args:
        model: its modules are watched by hooks that are removed afterwards.
        call: runs the model, without arguments: ``lambda: model(inputs)``.

    Returns:
        the module's name (``""`` for the model itself), or None when every module kept its numbers finite.

    >>> network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> _ = nn.init.constant_(network[1].weight, float("inf"))
    >>> first_nonfinite_layer(network, lambda: network(torch.ones(1, 2)))
    '1'
    """
    return watch_layers(model, call)[0]


def watch_layers(model: nn.Module, call: Callable[[], Any]) -> tuple[str | None, str | None]:
    """The first module that made a non-finite output of finite inputs, and the first that was given bad inputs."""
    sources: list[str] = []
    receivers: list[str] = []
    inputs_finite: list[bool] = []

    def before(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs_finite.append(first_nonfinite_tensor(named_tensors([args, kwargs])) is None)
            if not inputs_finite[-1]:
                receivers.append(name)

        return hook

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if inputs_finite.pop() and not sources and first_nonfinite_tensor(named_tensors(output)):
                sources.append(name)

        return hook

    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(after(name)))
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(sources), None), next(iter(receivers), None)
