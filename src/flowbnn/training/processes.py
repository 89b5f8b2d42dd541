"""Which of several connected processes this one is, and what they do one at a time."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flowbnn.errors import FlowBNNError

__all__ = ["alone", "is_main_process", "processes"]

Result = TypeVar("Result")


def is_main_process() -> bool:
    """Whether this process is the only one, or the first of several: the one that writes and speaks.

    >>> is_main_process()
    True
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not several or torch.distributed.get_rank() == 0


def processes() -> int:
    """How many processes are connected to each other, this one counted.

    >>> processes()
    1
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if several else 1


def alone(function: Callable[[], Result]) -> Result:
    """What the first of all processes makes of a function, which only it calls, told to all; none goes on before all have it.

    Where that is an error, the first process tells it and the others end in silence.

    >>> alone(lambda: 3)
    3
    """
    if processes() == 1:
        return function()
    box: list[Any] = [None, False]
    trouble: FlowBNNError | None = None
    if is_main_process():
        try:
            box[0] = function()
        except FlowBNNError as error:
            trouble, box[1] = error, True
    torch.distributed.broadcast_object_list(box, 0)
    torch.distributed.barrier()
    if trouble is not None:
        raise trouble
    if box[1]:
        raise SystemExit(2)
    return box[0]
