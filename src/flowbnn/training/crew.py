r"""Several processes that train one model: each holds a share of every batch, and all take the same step.

The loss is a mean over rows, so the gradient of the whole batch is the mean of the processes' gradients, each weighed by its
share of the rows. They are averaged after the backward pass, in one message with the step's numbers and the running statistics
of normalising layers, and not by hooks on the forward pass: the KL, and parameters that only the optimizer knows, are no part
of that pass. All processes draw from generators in the same state (:class:`flowbnn.layers.Share`).
"""

import os
import re
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.layers import Noise, Share
from flowbnn.layers.gaussian_weights import DrawnWeights
from flowbnn.layers.multiplicative import MultiplicativeWeights
from flowbnn.training.engine import FabricEngine
from flowbnn.training.interrupt import Terminated
from flowbnn.training.options import TrainingOptions
from flowbnn.training.sharing import SharedLoader, shared_dropout, synchronised_statistics
from flowbnn.training.storage import is_alive

__all__ = ["CrewEngine", "WorkerLost", "is_connection_loss"]

LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|peer|timed out", re.IGNORECASE)

DRAWING = (Noise, DrawnWeights, MultiplicativeWeights)  # what draws for every row of a batch


class WorkerLost(FlowBNNError):
    """Another process has died."""


def is_connection_loss(error: BaseException) -> bool:
    """Whether an error of torch says that another process does not answer.

    >>> is_connection_loss(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:3021"))
    True
    >>> is_connection_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, (distributed.DistError, WorkerLost)):
        return True
    return type(error) is RuntimeError and LOST.search(str(error)) is not None


class CrewEngine(FabricEngine):
    """Lightning Fabric with several processes, on one machine or more."""

    def __init__(self, options: TrainingOptions, fabric: Any = None) -> None:
        super().__init__(options, fabric)
        self.share: Share | None = None
        self.weight = 1.0
        self.noise: list[Any] = []
        self.running: list[tuple[nn.Module, Tensor]] = []
        self.everyone: list[Any] = [None] * self.processes
        distributed.all_gather_object(self.everyone, (socket.gethostname(), os.getpid()))

    def setup(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        wrapped, updating = super().setup(model, optimizer)
        known = {id(p) for p in model.parameters()}
        outside = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        tensors = [*model.parameters(), *model.buffers(), *outside]
        with torch.no_grad():  # all begin where the first process begins
            first = self.agree([tensor.cpu() for tensor in tensors] if self.rank == 0 else None)
            for tensor, value in zip(tensors, first, strict=True):
                tensor.copy_(value)
        return wrapped, updating

    @contextmanager
    def sharing(self, model: nn.Module) -> Iterator[None]:
        self.noise = [module for module in model.modules() if isinstance(module, DRAWING)]
        self.running = [
            (module, buffer)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name.startswith("running_") and buffer.is_floating_point()
        ]
        with ExitStack() as stack:
            stack.callback(self.tell, None, 1.0)
            stack.enter_context(shared_dropout(model, lambda: self.share))
            whole = stack.enter_context(synchronised_statistics(model, self.device))
            if not whole and self.rank == 0:
                warnings.warn(
                    f"on a CPU, BatchNorm in {self.processes} processes takes its statistics from each one's own rows (torch "
                    "synchronises them on GPUs only), so the result depends on their number",
                    FlowBNNWarning,
                )
            yield

    def prepare_loader(self, loader: Any) -> Any:
        return SharedLoader(loader, self.rank, self.processes, self.tell)

    def tell(self, share: Share | None, weight: float) -> None:
        """Which rows of the global batch the next step holds."""
        self.weight = weight
        if share != self.share:
            self.share = share
            for layer in self.noise:
                layer.share = share

    def rows(self, here: int) -> int:
        return here if self.share is None else self.share.total

    def backward(self, loss: Tensor) -> None:
        super().backward(loss if self.weight == 1.0 else loss * self.weight)

    def exchange(
        self, parameters: list[nn.Parameter], numbers: Mapping[str, Tensor | float]
    ) -> Mapping[str, Tensor | float]:
        present = [parameter.grad is not None for parameter in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        if any(gradient.is_sparse for gradient in gradients):
            raise FlowBNNError(
                "sparse gradients cannot be averaged over devices: make the layer with sparse=False"
            )
        names = sorted(numbers)
        scalars = [torch.as_tensor(numbers[name], device=self.device).detach() for name in names]
        kind = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
        flags = torch.tensor(present, dtype=kind).to(self.device)
        told = torch.cat([torch.stack([scalar.to(kind) for scalar in scalars]) * self.weight, flags])
        measured = [buffer for module, buffer in self.running if module.training]
        statistics = [buffer * self.weight for buffer in measured]
        self.average([*gradients, *statistics, told])
        torch._foreach_copy_(measured, statistics) if measured else None
        if not all(present):
            anywhere = told[len(names) :].tolist()
            for parameter, gradient, share in zip(parameters, gradients, anywhere, strict=True):
                parameter.grad = gradient if share > 0 else None
        return dict(zip(names, told[: len(names)].unbind(), strict=True))

    def average(self, tensors: list[Tensor]) -> None:
        """Means over the processes, in place, with one message for each kind of number."""
        for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
            some = [tensor for tensor in tensors if tensor.dtype == kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in some])
            distributed.all_reduce(flat)
            flat /= self.processes
            parts = flat.split([tensor.numel() for tensor in some])
            torch._foreach_copy_(some, [part.view_as(t) for part, t in zip(parts, some, strict=True)])

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        # one tensor in sorted order: the processes must agree on what they exchange
        names = sorted(values)
        packed = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        self.average([packed])
        return dict(zip(names, packed.tolist(), strict=True))

    def agree(self, value: Any) -> Any:
        return self.fabric.broadcast(value)

    def barrier(self) -> None:
        self.fabric.barrier()

    def lost(self, error: BaseException) -> str | None:
        terminated = isinstance(error, Terminated)
        if not terminated and not is_connection_loss(error):
            return None
        gone = self.gone(0.5 if terminated else 3.0)
        if gone:
            names = " and ".join(str(rank) for rank in gone)
            return f"worker{'s' if len(gone) > 1 else ''} {names} of {self.processes} died"
        if terminated:
            return f"worker {self.rank} of {self.processes} was told to end (SIGTERM)"
        return f"one of {self.processes} workers does not answer"

    def gone(self, seconds: float) -> list[int]:
        """The processes of this machine that are no more, looked for until there is one."""
        until = time.monotonic() + seconds
        here = self.everyone[self.rank][0]
        while True:
            found = [
                rank
                for rank, (host, process) in enumerate(self.everyone)
                if host == here and not is_alive(process)
            ]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.05)
