"""One loop for every method: a step function gives the loss of a batch, the loop does the rest."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flowbnn.errors import FlowBNNError
from flowbnn.training.checkpoint import Trained
from flowbnn.training.history import History
from flowbnn.training.options import TrainingOptions
from flowbnn.training.run import Run, loader_length
from flowbnn.training.stepping import Step

__all__ = ["Step", "train"]


def train(
    model: nn.Module,
    step: Step,
    optimizer: Optimizer,
    loader: Iterable[Any],
    options: TrainingOptions | None = None,
    *,
    schedule: LRScheduler | None = None,
    validate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    generators: Iterable[torch.Generator] = (),
    extra: Mapping[str, Any] | None = None,
    names_below: str = "",
) -> History:
    """Train ``model`` in place and return the record of the run.

    A run that is killed and resumed ends, on CPU processes, in the same weights to the bit: the checkpoint holds
    the model, the optimizer, the schedule, early stopping, the position within the epoch and every random state.
    (Not kept: what a data set draws inside ``persistent_workers``.) It may be resumed on another number of devices.

    Args:
        model: any module. It is put into training mode for the run and stays on the device it was trained on.
        step: ``step(model, batch, clock)`` returns the scalar loss and a dictionary of scalars to record, such as
            ``elbo``, ``log_likelihood`` and ``kl``. Its ``model`` may be wrapped by Lightning Fabric: call it as
            ``model(inputs)``, and use :func:`flowbnn.training.unwrap` for everything else.
        optimizer: any optimizer whose ``step`` needs no closure.
        loader: a ``DataLoader``, or anything that can be iterated once per epoch, such as a list of batches.
        options: a :class:`TrainingOptions`.
        schedule: stepped as ``options.schedule_every`` says. ``ReduceLROnPlateau`` goes by epochs, and by the value
            that early stopping watches, or else the loss.
        validate: called at the end of every epoch with the plain model in evaluation mode, without gradients; its
            numbers are recorded under ``validation_...``.
        generators: generators that the step draws from, to be kept in the checkpoint.
        extra: JSON values to keep in the checkpoint, such as the weight of the KL; a resumed run in which one of them has changed
            says so.
        names_below: a submodule's name that messages leave out: with ``"network"``, a layer ``network.fc1`` of the
            ``model`` is called ``fc1``, as the user who made the network calls it. Files keep the whole names.

    >>> network = nn.Linear(1, 1)
    >>> batches = [(torch.ones(4, 1), torch.zeros(4, 1))] * 5
    >>> def squared_error(model, batch, clock):
    ...     inputs, targets = batch
    ...     loss = (model(inputs) - targets).square().mean()
    ...     return loss, {"log_likelihood": -loss}
    >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    >>> history = train(network, squared_error, optimizer, batches, TrainingOptions(epochs=8))
    >>> history.epochs, history["loss"][-1] < 1e-3
    (8, True)
    """
    options = options or TrainingOptions()
    keep = dict(extra or {})
    _check(optimizer, loader, options, schedule, keep)
    rule = options.early_stop
    if rule is not None and validate is None and rule.monitor.startswith("validation_"):
        raise FlowBNNError(
            f"early stopping watches {rule.monitor!r}, but this run has no validation: give it validation data, or "
            "watch one of the training's own numbers, such as EarlyStop('loss')"
        )
    if names_below and names_below not in dict(model.named_modules()):
        raise FlowBNNError(f"names_below is {names_below!r}, which is no submodule of the model")
    trained = Trained(model, optimizer, schedule, names_below)
    return Run(trained, step, loader, options, validate, generators, keep).go()


def _check(
    optimizer: Optimizer,
    loader: Any,
    options: TrainingOptions,
    schedule: LRScheduler | None,
    extra: dict[str, Any],
) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise FlowBNNError("LBFGS needs a closure, which this loop does not give; use Adam or SGD")
    if isinstance(schedule, ReduceLROnPlateau) and options.schedule_every == "step":
        raise FlowBNNError("ReduceLROnPlateau looks at whole epochs: set schedule_every='epoch'")
    if not hasattr(loader, "__iter__"):
        raise FlowBNNError(
            f"the loader must be a DataLoader or a list of batches, got a {type(loader).__name__}"
        )
    if options.epochs > 1 and hasattr(loader, "__next__"):
        raise FlowBNNError(
            "the loader is an iterator, which serves one epoch only: pass a list or a DataLoader"
        )
    if loader_length(loader) == 0:
        raise FlowBNNError("the loader is empty: give it data, or drop_last=False if the data fill no batch")
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise FlowBNNError(f"extra must hold JSON values only ({error})") from None
