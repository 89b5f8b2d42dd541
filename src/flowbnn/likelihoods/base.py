"""Base class for observation models."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from inspect import Parameter, isabstract, signature
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import (
    FlowBNNError,
    describe_value,
    nearest,
    requirement_error,
    value_error,
    with_hint,
)
from flowbnn.numerics import at_least_single
from flowbnn.options import all_subclasses, checked


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

    def attach(self, network: nn.Module) -> None:
        """Prepares a network whose outputs are no tensor, before its first call. The default does nothing.

        Args:
            network: Network, to which hooks may be added.
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
        raise requirement_error(
            "views", f"{type(self).__name__}.average_outputs", hint="define it", kind="views"
        )

    def information(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the curvature of the negative log-likelihood in the outputs, ``[B, C, C]``, or its diagonal ``[B, C]``.

        It must be positive semidefinite. The default is :func:`observed_information`, which noise is fitted with.
        :class:`~flowbnn.Laplace` needs a likelihood that defines its own, such as the Fisher information.

        Args:
            outputs: Outputs of the network, ``[B, ...]``, with ``C`` numbers per example.
            targets: Targets, ``[B, ...]``.
        """
        return observed_information(self, outputs, targets)

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
                attribute, fields = f"{type(self).__name__}.{name}", {"kind": "unsupported", "argument": name}
                hint = "define to_dict"
                raise value_error(attribute, "a number or string", describe_value(value), hint, **fields)
        return {**result, **settings}


def build_likelihood(likelihood: Likelihood | str | Mapping[str, Any]) -> Likelihood:
    """Returns a likelihood by its name, or from the result of its ``to_dict``. A class of the library precedes others of its name.

    Args:
        likelihood: Likelihood, which is returned unchanged, the name of its class in any case, or its settings.

    Raises:
        FlowBNNError: If the name is unknown.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    settings = dict(likelihood) if isinstance(likelihood, Mapping) else {"likelihood": likelihood}
    name = str(settings.pop("likelihood", None)).lower().replace("_", "")
    concrete = [cls for cls in all_subclasses(Likelihood) if not isabstract(cls)]  # type: ignore[type-abstract]
    concrete.sort(key=lambda cls: cls.__module__.startswith("flowbnn."))
    classes: dict[str, Any] = {cls.__name__.lower(): cls for cls in concrete}
    if name not in classes:
        hint = nearest(name, ["auto", *classes])
        if isinstance(likelihood, Mapping):  # from a file
            hint = "; import its module, or use load_posterior(..., likelihood=...)"
        raise FlowBNNError(f"unknown likelihood '{name}'{hint}", argument="likelihood")
    shape = settings.pop("shape", None)  # stored in files
    result = classes[name](**settings)
    if shape is not None:
        result.shape = tuple(map(int, shape))
    return result


def observed_information(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the Hessian of the negative log-likelihood in the outputs, ``[B, C, C]``, without its negative eigenvalues.

    A likelihood that is piecewise linear in its outputs has no Hessian. The outer product of its gradient is then returned.

    Args:
        likelihood: Likelihood of the targets.
        outputs: Outputs of the network, ``[B, ...]``, with ``C`` numbers per example.
        targets: Targets, ``[B, ...]``.

    >>> from flowbnn.likelihoods import Poisson
    >>> observed_information(Poisson(), torch.zeros(1, 1), torch.ones(1))
    tensor([[[1.]]])
    """
    with torch.enable_grad():
        # torch has no eigenvalues in half precision
        leaf = outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32)).requires_grad_()
        loss = -likelihood.log_prob(leaf, targets).sum()
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        flat = gradient.flatten(1)
        rows = [
            torch.autograd.grad(total, leaf, retain_graph=True, materialize_grads=True)[0].flatten(1)
            for total in (flat.sum(0).unbind() if flat.requires_grad else ())
        ]
    hessian = torch.stack(rows, 1) if rows else flat.new_zeros(*flat.shape, flat.shape[1])
    if not bool(hessian.any()):
        return (flat.unsqueeze(2) * flat.unsqueeze(1)).detach().to(outputs.dtype)
    values, vectors = torch.linalg.eigh(hessian)
    return ((vectors * values.clamp_min(0.0).unsqueeze(1)) @ vectors.mT).to(outputs.dtype)


def misfit_error(outputs: Tensor, targets: Tensor, hint: str, argument: str) -> FlowBNNError:
    """Returns the error for outputs and targets whose shapes do not fit each other.

    Args:
        outputs: Outputs of the network.
        targets: Targets.
        hint: Advice that follows the message.
        argument: Argument at fault, ``"outputs"`` or ``"targets"``.
    """
    text = f"outputs of shape {tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}"
    return FlowBNNError(with_hint(text, hint), kind=argument, argument=argument)


def with_columns(outputs: Tensor, ndim: int) -> Tensor:
    """Returns outputs with ``ndim`` axes. An axis of outputs is added if a network with one output has none."""
    return outputs.unsqueeze(-1) if outputs.ndim == ndim - 1 else outputs


def stack_outputs(outputs: Sequence[Tensor]) -> Tensor:
    """Stacks outputs in at least single precision."""
    return torch.stack([at_least_single(tensor) for tensor in outputs])
