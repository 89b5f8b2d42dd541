r"""A running average of the parameters, :math:`\bar\theta \leftarrow \bar\theta + (1 - a_t)(\theta - \bar\theta)`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers, noise_mode

__all__ = ["Average"]

KEY, COUNT = "average", "average_steps"


class Average:
    """Averages what an optimizer trains, and puts the average in its place at the end.

    The averages lie in the optimizer's state, beside the momenta, so that a checkpoint holds them. The decay grows as
    ``t / (t + 9)`` up to ``decay``: early values are forgotten fast.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> average = Average(layer, decay=0.5)
    >>> optimizer = average.follow(torch.optim.SGD(layer.parameters(), lr=1.0))
    >>> with torch.no_grad():
    ...     _ = layer.weight.fill_(4.0)
    >>> for _ in range(2):
    ...     layer.weight.grad = torch.ones(1, 1)  # 4 -> 3 -> 2
    ...     optimizer.step()
    >>> average.settle([])
    >>> round(layer.weight.item(), 3)  # 3 + (1 - 2/11) * (2 - 3)
    2.182
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise FlowBNNError(f"the decay of an average lies between 0 and 1, not {decay}")
        self.model, self.decay = model, decay
        self.optimizer: Optimizer | None = None

    def follow(self, optimizer: Optimizer) -> Optimizer:
        """Average after each step of this optimizer from now on."""
        self.optimizer = optimizer
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        new = [p for p in parameters if KEY not in optimizer.state[p]]
        for parameter in new:
            optimizer.state[parameter][KEY] = parameter.detach().clone()
        first = optimizer.state[parameters[0]]
        if COUNT not in first:
            first[COUNT] = torch.zeros((), device=parameters[0].device)
        first[COUNT] += 1
        weight = 1.0 - (first[COUNT] / (first[COUNT] + 9)).clamp(max=self.decay)
        averages = [optimizer.state[p][KEY] for p in parameters]
        # tensors throughout: a step that is captured and replayed on the device keeps counting
        torch._foreach_add_(averages, torch._foreach_mul(torch._foreach_sub(parameters, averages), weight))

    @torch.no_grad()
    def settle(self, loader: Iterable[Any]) -> None:
        """The average into the network, whose BatchNorm statistics are then taken anew over one pass of the loader."""
        if self.optimizer is None:
            raise FlowBNNError("this average has followed no optimizer")
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if KEY in self.optimizer.state[parameter]:
                    parameter.copy_(self.optimizer.state[parameter][KEY])
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        if norms:
            _measure(self.model, norms, loader)


def _measure(model: nn.Module, norms: list[_BatchNorm], loader: Iterable[Any]) -> None:
    """BatchNorm's running mean and variance as plain averages over the batches, with the noise as in training."""
    momenta = [norm.momentum for norm in norms]
    model.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        for inputs, _ in loader:
            if noise_layers(model):
                with noise_mode(model, "sample"):
                    model(inputs)
            else:
                model(inputs)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.eval()
