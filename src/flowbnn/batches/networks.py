"""Networks on the device and in the precision of their inputs, and checks of what they return."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from flowbnn.batches.containers import convert_container
from flowbnn.batches.inputs import (
    apply,
    call,
    check_finite_tensors,
    device_of,
    dtype_of,
    is_finite,
    move,
    named_tensors,
)
from flowbnn.memory import is_out_of_memory

Result = TypeVar("Result")


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


class InputCloneHook:
    """Forward pre-hook that clones the inputs of a network that modifies them in place."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return clone_tensors((args, kwargs))


def clone_tensors(inputs: Any) -> Any:
    """Returns inputs with clones of all tensors."""
    return apply(inputs, Tensor.clone, lambda value: convert_container(value, Tensor.clone))


def clone_inputs_of(network: nn.Module) -> None:
    """Adds a hook to a network that modifies its inputs in place, which passes clones to it, so that inputs do not change.

    >>> import torch
    >>> network, x = nn.ReLU(inplace=True), -torch.ones(2)
    >>> clone_inputs_of(network)
    >>> network(x), x
    (tensor([0., 0.]), tensor([-1., -1.]))
    """
    if not clones_inputs(network):
        network.register_forward_pre_hook(InputCloneHook(), with_kwargs=True)


def clones_inputs(network: nn.Module) -> bool:
    """Returns True if :func:`clone_inputs_of` has added its hook to a network."""
    return any(isinstance(hook, InputCloneHook) for hook in network._forward_pre_hooks.values())


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


def first_nonfinite_tensor(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor that is not finite, or None."""
    return next((name for name, tensor in named if not is_finite(tensor)), None)


def check_finite_batch(batch: Any, epoch: int | None, index: int) -> None:
    """Raises an error if a nested batch has NaN or infinite values, or a tensor without rows.

    Args:
        batch: Tensor, or nested tuples, lists and mappings of tensors.
        epoch: Index of the epoch for the message, or None if there are no epochs.
        index: Index of the batch for the message.

    >>> import torch
    >>> check_finite_batch((torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 1])), epoch=2, index=5)
    Traceback (most recent call last):
    ...
    flowbnn.errors.FlowBNNError: NaN or infinity in 1 of 2 rows of tensor '0' of epoch 3, batch 6, first in row 1; ...
    """
    check_finite_tensors(named_tensors(batch), epoch, index)
