"""What torch's compiler and the C library are told, so that steps and passes run undisturbed."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["keep_memory", "many_shapes", "unconcerned"]


@contextmanager
def unconcerned() -> Iterator[None]:
    """What torch's compiler remarks on its own choices is no error, even where warnings are made errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._(dynamo|functorch|inductor)")
        # recorded on purpose, to hold memory for those that follow
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty", category=UserWarning)
        yield


def many_shapes() -> AbstractContextManager[Any]:
    """torch gives up compiling a function after eight shapes, for good, and counts all runs of a process together.

    Batches, numbers of samples and runs come in more.
    """
    return torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096)


@cache
def keep_memory() -> None:
    """Let the C library keep what a pass on a processor frees, for the next one.

    glibc gives free memory back to the system beyond twice the largest block that was ever freed, and the next pass has it faulted in
    again, page by page, which costs large feature maps a third of their time. Freeing one block of almost 32 MB, the largest that
    counts, raises that bound to 64 MB for this process; nothing is ever written to it. Elsewhere this does nothing.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
