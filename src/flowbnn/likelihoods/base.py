"""Base class for observation models."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.options import checked


class Likelihood(nn.Module, ABC):
    """Base class for observation models, the distribution of a target given the outputs of a network.

    A subclass defines :meth:`log_prob` and :meth:`predictive`. The other methods have defaults.
    """

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-likelihood of each example, ``[B]``.

        Args:
            outputs: Outputs of the network, ``[B, ...]``.
            targets: Targets, ``[B, ...]``.
        """

    @abstractmethod
    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> Any:
        """Returns the :class:`~flowbnn.predictive.Predictive` of samples of outputs.

        Args:
            outputs: Samples of the outputs, ``[S, B, ...]``.
            sample_counts: Number of samples of each input, ``[B]``, with adaptive sampling.
        """

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises FlowBNNError if outputs and targets do not fit each other. The default accepts everything.

        Args:
            outputs: Outputs of the network, ``[B, ...]``.
            targets: Targets, ``[B, ...]``.
        """

    def outputs_like(self, row: Tensor, targets: Tensor) -> Tensor:
        """Returns outputs of one example as outputs for some targets, whose values :meth:`check` does not use.

        Args:
            row: Outputs of one example, ``[1, ...]``.
            targets: Targets of a batch.
        """
        return row.expand(len(targets), *row.shape[1:])

    def initialize(self, outputs: Tensor, targets: Tensor) -> None:
        """Sets initial values from the first batch, before training.

        Args:
            outputs: Outputs of the network, ``[B, ...]``.
            targets: Targets, ``[B, ...]``.
        """

    def canonical_targets(self, targets: Tensor) -> Tensor:
        """Returns targets in the form that predictives and metrics expect."""
        return targets

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the outputs whose prediction is the mean of the predictions of several outputs.

        Args:
            outputs: Outputs of equal shape.

        Raises:
            FlowBNNError: If the likelihood does not define the mean.
        """
        text = f"{type(self).__name__} does not support views, because it does not define average_outputs"
        raise FlowBNNError(text, kind="views")

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the settings as plain values.

        The settings are the attributes with the names of the arguments of ``__init__``. A likelihood that stores its arguments under
        other names overrides this method.

        Raises:
            FlowBNNError: If an argument is not stored as a plain value, so that a saved posterior could not be loaded.
        """
        result = {"likelihood": type(self).__name__}
        first = next(c for c in type(self).__mro__ if "to_dict" in vars(c) or "__init__" in vars(c))
        if "to_dict" in vars(first) and first is not Likelihood:  # it adds the settings of its own __init__
            return result
        kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY  # arguments that have names
        parameters = signature(type(self)).parameters.items()
        names = [name for name, argument in parameters if argument.kind in kinds]
        settings = {name: getattr(self, name, self) for name in names}
        for name, value in settings.items():
            if not isinstance(value, bool | int | float | str | None):
                text = f"{type(self).__name__} cannot be saved, because self.{name} is no number or string; define to_dict"
                raise FlowBNNError(text, kind="unsupported", argument=name)
        return {**result, **settings}


def to_single_precision(outputs: Tensor) -> Tensor:
    """Returns outputs in single precision if they are in half precision."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def stack_outputs(outputs: Sequence[Tensor]) -> Tensor:
    """Stacks outputs in at least single precision."""
    return torch.stack([to_single_precision(tensor) for tensor in outputs])
