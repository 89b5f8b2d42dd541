"""Contract of an observation model, and functions that all of them share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.options import checked


class Likelihood(nn.Module, ABC):
    """``log_prob(outputs, targets)`` for each example, and the predictive distribution made of samples of outputs."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``[B]``."""

    @abstractmethod
    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> Any:
        """From outputs ``[S, B, ...]`` to a :class:`~flowbnn.predictive.Predictive`; each input had ``spent`` of the S samples."""

    def problem(self, outputs: Tensor, targets: Tensor) -> str:
        """What is wrong with targets that do not fit the outputs, in one line; empty where they fit."""
        return ""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse outputs and targets that do not fit each other."""
        if problem := self.problem(outputs, targets):
            raise FlowBNNError(problem, kind="targets", argument="targets")

    def initialize(self, outputs: Tensor, targets: Tensor) -> None:
        """Set initial values from the first batch, before training."""

    def canonical(self, targets: Tensor) -> Tensor:
        """Targets in the form that predictives and metrics take."""
        return targets

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        """The outputs whose prediction is the mean of the predictions of these, which are of one shape."""
        raise FlowBNNError(
            f"a {type(self).__name__} likelihood cannot average predictions; leave out views", kind="views"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"likelihood": type(self).__name__}


def mean_log_prob(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over examples; log-likelihoods of pixels, say, must be sums over them, to weigh right beside a KL."""
    each = likelihood.log_prob(outputs, targets)
    if each.shape != outputs.shape[:1]:
        one = f"one number for each of {pluralize(len(outputs), 'example')}"
        raise FlowBNNError(
            f"{type(likelihood).__name__}.log_prob must give {one}, not {tuple(each.shape)}; sum over all but the first axis",
            kind="shape",
            argument="likelihood",
        )
    return each.mean()


def single_precision(outputs: Tensor) -> Tensor:
    """In single precision, where outputs come in half."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def stacked(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([single_precision(part) for part in outputs])
