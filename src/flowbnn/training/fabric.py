"""Lightning Fabric, opened: on one device, or on several with a process for each."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.training.launching import settled_devices, start_processes
from flowbnn.training.options import TrainingOptions

__all__ = ["connect", "open_fabric", "quiet_lightning"]

KNOWN = ("auto", "cpu", "cuda", "gpu", "mps")  # of others Lightning tells whether they are there


def connect(options: TrainingOptions) -> int:
    """Start, or join, the processes that the options ask for, ahead of any run; returns their number.

    >>> connect(TrainingOptions(accelerator="cpu"))
    1
    """
    devices, num_nodes = settled_devices(options.accelerator, options.devices, options.num_nodes)
    if str(devices) == "1" and num_nodes == 1 and options.accelerator in KNOWN:
        return 1
    return int(open_fabric(options).world_size)


def open_fabric(options: TrainingOptions) -> Any:
    """A launched Fabric; where it is to have several processes and nobody has started them, they are started."""
    devices, num_nodes = settled_devices(options.accelerator, options.devices, options.num_nodes)
    asked: dict[str, Any] = {
        "accelerator": options.accelerator,
        "devices": devices,
        "num_nodes": num_nodes,
        "strategy": options.strategy,
        "precision": options.precision,
    }
    with quiet_lightning():
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

        class Together(DDPStrategy):
            """Processes whose gradients the loop averages itself, so that what the forward pass does not see takes part."""

            def setup_module(self, module: nn.Module) -> Any:
                return module

        try:
            several = options.strategy != "auto" or num_nodes > 1 or devices not in (1, "1")
            if several and Fabric(**asked).world_size * num_nodes > 1:
                asked["strategy"] = Together()
            fabric = Fabric(**asked)
            place = getattr(fabric.strategy, "cluster_environment", None)
            number = getattr(fabric.strategy, "num_processes", 1)
            if place is not None and number * num_nodes > 1 and not place.creates_processes_externally:
                start_processes(number, num_nodes)
            fabric.launch()
        except FlowBNNError:
            raise
        except Exception as error:
            asked_for = ", ".join(f"{name}={getattr(options, name)!r}" for name in asked)
            reason = " ".join(str(error).split())[:300]
            raise FlowBNNError(f"Lightning Fabric refuses {asked_for}: {reason}") from None
    return fabric


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's advice, and the warning filters that its import adds, out of the user's process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning(\.|_utilities|$)")
        warnings.filterwarnings(
            "ignore", category=DeprecationWarning, module=r"(pkg_resources|torchmetrics|torch)"
        )
        import lightning.fabric  # noqa: F401

        # its import sets the level, so this comes after it
        loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
