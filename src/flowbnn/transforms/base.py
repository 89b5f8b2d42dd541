r"""Base class and contract of transforms.

A transform is an invertible map :math:`x = f(z)` from the base to the sample, so that

.. math:: \log p(x) = \log p(z) - \log\left|\det \frac{\partial f}{\partial z}\right| .

**Forward always means base to sample.** To write a transform, subclass :class:`Transform` and define ``forward(z, context=None)`` and
``inverse(x, context=None)``. CONTRIBUTING.md has a skeleton to copy. Each method returns ``(value, log_det)``, where ``log_det`` is
the log-determinant of the map that the method applies. The log-determinant of ``inverse`` is therefore minus that of ``forward`` at
the same point. ``log_det`` has the batch shape: the shape of the value without its last :attr:`Transform.event_dim` axes. Any number
of batch axes is allowed, and batches may be empty.

Class attributes declare what a transform can do:

===================  ==========================================================================================
``event_dim``        Number of trailing axes of one event: 0 for a map of numbers, 1 for a map of vectors.
``inverse_kind``     ``"exact"``, ``"numerical"`` (a root is found, correct to about 1e-6), or ``"none"``.
``linearity``        ``"diagonal"``, ``"affine"`` or ``"none"``: the structure that a closed-form KL may assume.
``draws``            Direction that draws random numbers: ``"none"``, ``"forward"``, ``"inverse"`` or ``"both"``.
``discrete``         True if samples are integers. No gradient passes through them, and p(x) is a probability.
``discrete_base``    True if values of the base are integers.
``sample_dim``       Number of trailing axes of one event of the sample, if it differs from ``event_dim``.
``cheap``            Directions that cost one pass: ``"both"``, ``"forward"``, ``"inverse"`` or ``"none"``.
                     The other direction costs one pass for every entry, or a solver.
``solver``           Directions that iterate until they converge: ``"none"``, ``"forward"``, ``"inverse"`` or
                     ``"both"``. They are as accurate as their solver and do not compile into one graph.
``log_det_kind``     ``"exact"``, or ``"estimate"`` if training may draw random numbers for it.
``domain``           Constraint of each number of the base, one of ``torch.distributions.constraints``.
``codomain``         Constraint of each number of the sample.
===================  ==========================================================================================

**Surjective and stochastic maps** (SurVAE flows, Nielsen et al. 2020) lose information in one direction and draw it in the other.
They follow the same contract with another second value. ``inverse(x)`` returns a draw of :math:`z` and a contribution
:math:`V(x, z)`, and ``forward(z)`` returns :math:`x` and :math:`-V`, so that

.. math:: E_{q(z \mid x)} \exp\left(\log p(z) + V(x, z)\right) = p(x) .

If only ``forward`` draws, :math:`\log p(z) + V` equals :math:`\log p(x)`. If ``inverse`` draws, it is a one-sample estimate of a
lower bound (Jensen), and :attr:`Transform.lower_bound` is true. At the flow's own draws the same expression is an upper bound, which
makes a Monte Carlo KL to a prior an upper bound. Draws come from torch's global generator.

A map between vectors of two lengths sets :attr:`Transform.lengths`. A map that changes the shape of its events in another way defines
:meth:`Transform.forward_shape` and :meth:`Transform.inverse_shape`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import constraints

from flowbnn.errors import FlowBNNError, warn
from flowbnn.numerics import is_concrete
from flowbnn.options import Bounds


class Transform(nn.Module):
    """Base class for transforms: invertible maps with a tractable log-determinant.

    The docstring of this module states the contract.

    >>> from flowbnn.transforms import Exp
    >>> isinstance(Exp(), Transform), Exp().event_dim, Exp().cheap
    (True, 0, 'both')
    """

    event_dim: int = 1
    inverse_kind: Literal["exact", "numerical", "none"] = "exact"
    linearity: Literal["diagonal", "affine", "none"] = "none"
    cheap: Literal["both", "forward", "inverse", "none"] = "both"
    solver: Literal["none", "forward", "inverse", "both"] = "none"
    log_det_kind: Literal["exact", "estimate"] = "exact"
    draws: Literal["none", "forward", "inverse", "both"] = "none"
    discrete: bool = False
    discrete_base: bool = False
    lengths: tuple[int, int] | None = None
    sample_axes: int | None = None
    domain: Any = constraints.real
    codomain: Any = constraints.real

    @property
    def sample_dim(self) -> int:
        """Number of trailing axes of one event of the sample: ``sample_axes``, or ``event_dim`` if that is None."""
        return self.event_dim if self.sample_axes is None else self.sample_axes

    @property
    def stochastic(self) -> bool:
        """True if a direction draws random numbers, for its value or for its log-determinant."""
        return self.draws != "none" or self.log_det_kind == "estimate"

    @property
    def lower_bound(self) -> bool:
        """True if log-densities are one-sample estimates of a lower bound."""
        return self.draws in ("inverse", "both")

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        """Returns the shape of ``forward(z)``.

        Args:
            shape: Shape of ``z``, whose last ``event_dim`` axes are one event.
        """
        return torch.Size(shape if self.lengths is None else (*shape[:-1], self.lengths[1]))

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        """Returns the shape of ``inverse(x)``.

        Args:
            shape: Shape of ``x``, whose last ``sample_dim`` axes are one event.
        """
        return torch.Size(shape if self.lengths is None else (*shape[:-1], self.lengths[0]))

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""Maps the sample to the base: returns ``(f^{-1}(x), log|det df^{-1}/dx|)``."""
        raise NotImplementedError(f"{type(self).__name__} has no inverse; use rsample_and_log_prob")


class BidirectionalTransform(Transform, ABC):
    """Base class for transforms that compute both directions in one method, :meth:`compute`."""

    @abstractmethod
    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        """Computes :meth:`forward`, or :meth:`inverse` if ``inverse`` is true."""

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.compute(z, context, inverse=False)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.compute(x, context, inverse=True)


def transform_error(owner: object, text: str, kind: str = "value", **fields: Any) -> FlowBNNError:
    """Returns an error whose message begins with the class name of a transform.

    Args:
        owner: The transform.
        text: Rest of the message.
        kind: Kind of the error.
        fields: Further fields of the error.
    """
    return FlowBNNError(f"{type(owner).__name__} {text}", kind=kind, **fields)


def convergence_error(owner: object, evaluations: int, hint: str) -> FlowBNNError:
    """Returns the error of a transform whose solver does not converge.

    Args:
        owner: The transform.
        evaluations: Number of evaluations of its net.
        hint: Remedy that ends the message.
    """
    text = f"did not converge in {evaluations} evaluations; {hint}"
    return transform_error(owner, text, "convergence", evaluations=evaluations)


def check_dense(value: Any, owner: object) -> None:
    """Raises FlowBNNError unless a value is a dense tensor of real numbers or integers."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
        description = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise transform_error(owner, f"needs a dense tensor of real numbers, got {description}", "dtype")


def check_tensor(value: Any, owner: object) -> None:
    """Raises FlowBNNError unless a value is a dense floating-point tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
        check_dense(value, owner)
        text = f"needs floating-point numbers, got {value.dtype}; use .float() or Dequantization"
        raise transform_error(owner, text, "dtype")


def check_range(value: Tensor, low: float, high: float, owner: str, hint: str = "") -> None:
    """Raises FlowBNNError if a number lies outside a closed interval.

    Nothing is checked while a graph is traced, because the numbers are not known there.

    Args:
        value: Numbers to check.
        low: Smallest number that is allowed.
        high: Largest number that is allowed.
        owner: First words of the message.
        hint: Last words of the message.
    """
    if is_concrete(value) and bool((outside := (value < low) | (value > high)).any()):
        number = value[outside][0].item()
        text = f"{owner} needs numbers {Bounds(ge=low, le=high)}, got {number:.8g}{hint}"
        raise FlowBNNError(text, kind="range", value=number)


def check_events(value: Tensor, shape: Sequence[int], owner: object) -> torch.Size:
    """Returns the batch shape of a value. Raises FlowBNNError if its events have another shape."""
    batch_dim = value.ndim - len(shape)
    if batch_dim < 0 or value.shape[batch_dim:] != torch.Size(shape):
        sizes = ", ".join(map(str, shape))
        raise transform_error(owner, f"needs shape (..., {sizes}), got {tuple(value.shape)}", "shape")
    return value.shape[:batch_dim]


def check_vectors(value: Tensor, dim: int, owner: object, parameter: Tensor | None = None) -> None:
    """Raises FlowBNNError unless a value holds real vectors of one length, in the dtype of the parameters.

    Args:
        value: Vectors on the last axis.
        dim: Length of the vectors.
        owner: Transform that is named in the message.
        parameter: Parameter whose dtype the vectors must have.
    """
    check_tensor(value, owner)
    if value.ndim == 0 or value.shape[-1] != dim:  # broadcasting would give a wrong log-determinant
        check_events(value, (dim,), owner)
    if parameter is not None and value.dtype != parameter.dtype:
        text = f"has {parameter.dtype} parameters, got {value.dtype} input; cast one with .to(dtype)"
        raise transform_error(owner, text, "dtype")


def check_distribution_module(flow: nn.Module) -> None:
    """Raises FlowBNNError if a module is a bare transform, which has no base and so no density."""
    if isinstance(flow, Transform):
        raise transform_error(flow, "has no base; use fb.flows.FlowModel(base, transform)", argument="flow")


def warn_slow_sampling(transform: Transform, owner: object) -> None:
    """Warns if one draw of a transform costs many passes, for users that draw at every training step."""
    if transform.cheap not in ("both", "forward"):
        text = f"{owner}: slow draws (cheap={transform.cheap!r}); use cheap='forward' or IAF"
        warn(text, kind="slow draws")
