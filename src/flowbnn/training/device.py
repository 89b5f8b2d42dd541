"""Devices and processes of a training run: device, precision, and settings of torch's compiler and memory allocator."""

import atexit
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from flowbnn.batches import convert_container, device_of, is_container
from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.training.options import TrainingOptions

Result = TypeVar("Result")

AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Process:
    """A process that trains on one device, without others.

    It is also the interface that :class:`flowbnn.training.distributed.Worker` implements for several processes.

    Args:
        options: Options of the training run.

    Attributes:
        rank: Index of this process among all processes.
        num_processes: Number of processes that train together.
        loss_weight: Factor of the loss of the current batch.
        global_rows: Number of rows of the current batch over all processes, or None for one process.
        device: Device of this process.
        autocast: Function that returns the autocast context of the forward pass.
        scaler: Gradient scaler of float16 training, or None.
    """

    rank: int = 0
    num_processes: int = 1
    loss_weight: float = 1.0
    global_rows: int | None = None

    def __init__(self, options: TrainingOptions) -> None:
        kind = device_kind(options.accelerator)
        index = torch.cuda.current_device() if kind == "cuda" else None
        self.device = torch.device(kind, index) if index is not None else torch.device(kind)
        self.autocast_dtype = AUTOCAST_DTYPES.get(options.precision)
        dtypes = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
        self.weight_dtype = dtypes.get(options.precision)
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if self.autocast_dtype is not None:
            self.autocast = partial(torch.autocast, kind, self.autocast_dtype)
        self.scaler = torch.amp.GradScaler(kind) if self.autocast_dtype == torch.float16 else None
        if kind == "cpu":
            raise_malloc_trim_threshold()

    def wrap(self, objective: nn.Module) -> nn.Module:
        """Moves the objective to the device and returns the module that the loop calls."""
        return objective.to(self.device, self.weight_dtype)

    def shard(self, loader: Any) -> Any:
        """Returns a loader of this process's rows of every batch."""
        return loader

    @contextmanager
    def synchronized_layers(self, objective: nn.Module) -> Iterator[None]:
        """Context manager in which dropout and BatchNorm treat the batch of all processes as one."""
        yield

    def average(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns scalars of a batch, averaged over the rows of all processes."""
        return values

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first process."""
        return value

    def synchronize_buffers(self, objective: nn.Module) -> None:
        """Waits for all processes and copies the buffers of the first one."""

    def describe_lost_worker(self, error: BaseException) -> str | None:
        """Returns a description of the process that died if that caused the error, else None."""
        return None


def move_batch(batch: Any, device: torch.device) -> Any:
    """Returns a nested batch with all of its tensors on a device.

    Args:
        batch: Tensor, or nested tuples, lists and mappings of tensors.
        device: Target device.

    >>> move_batch((torch.ones(1), {"label": [torch.zeros(1)]}), torch.device("cpu"))
    (tensor([1.]), {'label': [tensor([0.])]})
    """
    if isinstance(batch, Tensor):
        if not torch.compiler.is_compiling() and batch.is_inference():  # autograd cannot use these
            batch = batch.clone()
        return batch if batch.device == device else batch.to(device, non_blocking=device.type == "cuda")
    if is_container(batch):
        return convert_container(batch, lambda tensor: tensor.to(device))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([move_batch(value, device) for value in batch])
    if isinstance(batch, Mapping):
        return {key: move_batch(value, device) for key, value in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch


@contextmanager
def preserve_training_modes(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the training mode of every module at its end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Context manager that ignores warnings of torch's compiler, even where warnings are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._(dynamo|functorch|inductor)")
        # an empty graph is recorded on purpose: it reserves memory for later graphs
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty", category=UserWarning)
        yield


def unlimited_recompiles() -> AbstractContextManager[Any]:
    """Returns a context manager that raises torch's recompile limit.

    By default torch stops compiling a function after eight shapes, and it counts all runs of a process together.
    """
    return torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096)


@cache
def raise_malloc_trim_threshold() -> None:
    """Makes the C library keep freed memory for the next forward pass on a CPU.

    glibc returns free memory to the system beyond twice the largest block that was ever freed. The next pass then faults it in again,
    page by page, which costs networks with large feature maps a third of their time. Freeing one block of almost 32 MB, the largest
    that counts, raises that threshold to 64 MB for this process. The block is never written to. On other C libraries this has no
    effect.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


# -------------------- processes


def is_torchrun_worker() -> bool:
    """Returns True if torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def is_main_process() -> bool:
    """Returns True if this process is the only one or the first of several.

    The main process writes files and prints.
    """
    return num_processes() == 1 or distributed.get_rank() == 0


def num_processes() -> int:
    """Returns the number of connected processes, including this one."""
    connected = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if connected else 1


def connect(options: TrainingOptions) -> int:
    """Connects the processes that torchrun started, and returns their number.

    Args:
        options: Options with ``devices`` and ``num_nodes``.

    Raises:
        FlowBNNError: If several processes are requested and torchrun did not start them.

    >>> connect(TrainingOptions(accelerator="cpu"))
    1
    """
    kind, devices, num_nodes = resolve_devices(options)
    if devices * num_nodes > 1 and not is_torchrun_worker():
        text = f"devices={devices} needs {devices} processes: start the script with torchrun --nproc-per-node {devices} script.py"
        raise FlowBNNError(text, kind="devices", argument="devices")
    if devices * num_nodes > 1 and num_processes() == 1:
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        atexit.register(distributed.destroy_process_group)
    return devices * num_nodes


def resolve_devices(options: TrainingOptions) -> tuple[str, int, int]:
    """Returns the type of device, the number of devices per machine, and the number of machines.

    Under torchrun the numbers are those of the processes it started.

    Args:
        options: Options with ``accelerator``, ``devices``, ``num_nodes`` and ``precision``.

    Raises:
        FlowBNNError: If this machine or torchrun does not provide them.

    >>> resolve_devices(TrainingOptions(accelerator="cpu", num_nodes=1))
    ('cpu', 1, 1)
    """
    kind, num_nodes = device_kind(options.accelerator), options.num_nodes
    if options.precision == "16-mixed" and kind != "cuda":
        raise _device_error("precision='16-mixed' needs a CUDA device; use 'bf16-mixed'", "precision")
    available = torch.cuda.device_count() if kind == "cuda" else 1
    devices = available if options.devices == "auto" else int(options.devices)
    if is_torchrun_worker():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        machines = int(os.environ["WORLD_SIZE"]) // local
        if options.devices not in (1, "auto", local) or num_nodes not in (1, machines):
            setting = f"num_nodes={num_nodes}, devices={options.devices!r}"
            text = f"torchrun started {local} processes on each of {machines} machines, not {setting}; leave both out"
            raise _device_error(text, "devices")
        devices, num_nodes = local, machines
    elif num_nodes > 1:
        text = f"num_nodes={num_nodes}: start the script with torchrun on every machine (docs/devices.md)"
        raise _device_error(text, "num_nodes")
    # more processes per core would only wait for each other
    limit = 16 * (os.cpu_count() or 1) if kind == "cpu" else available
    if devices > limit:
        capacity = f"can run {limit} CPU processes" if kind == "cpu" else f"has {pluralize(limit, 'GPU')}"
        raise _device_error(f"devices={devices} is too many: this machine {capacity}", "devices")
    return kind, devices, num_nodes


def _device_error(message: str, argument: str) -> FlowBNNError:
    return FlowBNNError(message, kind="devices", argument=argument)


def device_kind(accelerator: str) -> str:
    """Returns ``"cpu"``, ``"cuda"`` or ``"mps"`` for an accelerator. Raises FlowBNNError if it is not available.

    >>> device_kind("cpu")
    'cpu'
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    choices = {"auto": list(available), "gpu": ["cuda", "mps"]}.get(accelerator, [accelerator])
    for kind in choices:
        if available[kind]:
            return kind
    reason = "built without CUDA" if torch.version.cuda is None else "no driver found"
    text = f"accelerator={accelerator!r} is not available to torch, {reason}; use accelerator='cpu'"
    raise _device_error(text, "accelerator")


def move_to_accelerator(network: nn.Module, accelerator: str) -> nn.Module:
    """Moves a network to a device of a type, in place. A network that is on such a device stays there.

    Args:
        network: Network to move.
        accelerator: Type of the device, as in :class:`TrainingOptions`.

    Returns:
        The network.
    """
    kind, device = device_kind(accelerator), device_of(network)
    return network.to(device if device.type == kind else torch.device(kind))


def run_on_main(function: Callable[[], Result]) -> Result:
    """Calls a function on the main process and returns its result on all processes.

    No process continues before all of them have the result. If the function raises a FlowBNNError, the main process raises it and
    the others exit with status 2.

    Args:
        function: Function without arguments whose result can be pickled.

    >>> run_on_main(lambda: 3)
    3
    """
    if num_processes() == 1:
        return function()
    message: list[Any] = [None, False]  # the result, and whether the function failed
    failure: BaseException = SystemExit(2)
    if is_main_process():
        try:
            message[0] = function()
        except FlowBNNError as error:
            failure, message[1] = error, True
    distributed.broadcast_object_list(message, 0)
    distributed.barrier()
    if message[1]:
        raise failure
    return message[0]
