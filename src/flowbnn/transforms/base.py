r"""The contract of a transform.

A transform is an invertible map :math:`x = f(z)` from the base to the sample, so that

.. math:: \log p(x) = \log p(z) - \log\left|\det \frac{\partial f}{\partial z}\right| .

**Forward means base to sample, everywhere.** To write one, subclass :class:`Transform` and give ``forward(z, context=None)`` and
``inverse(x, context=None)``; CONTRIBUTING.md has a skeleton to copy. Each returns ``(value, log_det)`` where ``log_det`` is the
log-determinant *of the map it applied*: that of ``inverse`` is minus that of ``forward`` at the same point. ``log_det`` has the batch
shape: the value's shape less its last :attr:`Transform.event_dim` axes. Any number of batch axes, zero rows included, is allowed.

What a transform cannot do it declares in class attributes; nothing is caught and skipped:

===================  ==========================================================================================
``event_dim``        how many trailing axes one event has: 0 for a map of numbers, 1 for a map of vectors
``inverse_kind``     ``"exact"``, ``"numerical"`` (a root is found; correct to about 1e-6), or ``"none"``
``linearity``        ``"diagonal"``, ``"affine"`` or ``"none"``: what a closed-form KL may assume of the map
``draws``            ``"none"``, or which direction draws random numbers: ``"forward"``, ``"inverse"`` or ``"both"``
``discrete``         whether samples are integers, so that no gradient passes through them and p(x) is a probability
``discrete_base``   the same of the base's side
``sample_dim``       how many trailing axes an event has on the side of the sample, if not ``event_dim``
``cheap``            ``"both"``, ``"forward"``, ``"inverse"`` or ``"none"``: the directions that cost one pass; another costs
                     a pass for every entry, or a solver
``solver``           ``"none"``, or the directions that iterate until they settle: ``"forward"``, ``"inverse"``, ``"both"``;
                     they are as accurate as their solver, and do not compile into one graph
``log_det_kind``     ``"exact"``, or ``"estimate"`` where random numbers may be drawn for it in training
===================  ==========================================================================================

**Surjective and stochastic maps** (SurVAE flows, Nielsen et al. 2020) lose information one way and draw it the other way. Theirs
is the same contract with another second value: ``inverse(x)`` returns a draw of :math:`z` and a contribution :math:`V(x, z)`,
and ``forward(z)`` returns :math:`x` and :math:`-V`, so that everywhere

.. math:: E_{q(z \mid x)} \exp\left(\log p(z) + V(x, z)\right) = p(x) .

Where only ``forward`` draws, :math:`\log p(z) + V` is :math:`\log p(x)` itself. Where ``inverse`` draws, it is a one-sample estimate
of a lower bound on it (Jensen), and the transform says so: :attr:`Transform.lower_bound` is true. At the flow's own draws, the same
expression is a bound from above, which makes a Monte Carlo KL to a prior an upper bound. Draws come from torch's global generator.

A map between vectors of two lengths says them in :attr:`Transform.lengths`; one that changes the shape of its events otherwise defines
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
    """A bijection with a tractable log-determinant. The contract is at the top of this file."""

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

    @property
    def sample_dim(self) -> int:
        """How many trailing axes one event has on the side of the sample: ``sample_axes``, or as many as on the other side."""
        return self.event_dim if self.sample_axes is None else self.sample_axes

    @property
    def stochastic(self) -> bool:
        """Whether a direction draws random numbers, for its value or for its log-det."""
        return self.draws != "none" or self.log_det_kind == "estimate"

    @property
    def lower_bound(self) -> bool:
        """Whether log-densities are one-sample estimates of a lower bound."""
        return self.draws in ("inverse", "both")

    def ends(self) -> tuple[Any, Any]:
        """What each number is before and after, as torch's constraints."""
        return constraints.real, constraints.real

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        """The shape of ``forward(z)`` for a ``z`` of this shape, whose last ``event_dim`` axes are one event."""
        return torch.Size(shape if self.lengths is None else (*shape[:-1], self.lengths[1]))

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        """The shape of ``inverse(x)`` for an ``x`` of this shape."""
        return torch.Size(shape if self.lengths is None else (*shape[:-1], self.lengths[0]))

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""Sample to base: ``(f^{-1}(x), log|det df^{-1}/dx|)``."""
        text = "has no inverse, so a density is known only at its own draws: use rsample_and_log_prob"
        raise NotImplementedError(f"{type(self).__name__} {text}")


class BidirectionalTransform(Transform, ABC):
    """A transform whose directions are one computation, which a subclass gives as :meth:`run`."""

    @abstractmethod
    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        """:meth:`forward`, or :meth:`inverse` if ``backwards``."""

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.compute(z, context, inverse=False)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.compute(x, context, inverse=True)


def transform_error(owner: object, text: str, kind: str) -> FlowBNNError:
    """What a transform says of its arguments."""
    return FlowBNNError(f"{type(owner).__name__} {text}", kind=kind)


def check_dense(value: Any, owner: object, wanted: str = "dense tensor of real numbers") -> None:
    """Refuse what is no dense tensor of real numbers or integers."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
        known = isinstance(value, Tensor)
        given = f"tensor of {value.dtype}, {value.layout}" if known else type(value).__name__
        raise transform_error(owner, f"takes a {wanted}, not a {given}", "dtype")


def check_tensor(value: Any, owner: object) -> None:
    """Refuse what is no tensor of real numbers; cheap, since a flow asks at every step."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
        check_dense(value, owner, "dense floating point tensor")
        text = f"takes a dense floating point tensor, not a tensor of {value.dtype}; dequantize integers: end the flow with"
        raise transform_error(owner, f"{text} Dequantization, or give it .float()", "dtype")


def check_range(value: Tensor, low: float, high: float, owner: str, hint: str = "") -> None:
    """Refuse numbers outside an interval, where they can be looked at; the ends belong to it."""
    if is_concrete(value) and bool((wrong := (value < low) | (value > high)).any()):
        worst = value[wrong][0].item()
        text = f"{owner} takes numbers {Bounds(ge=low, le=high)}, not {worst:.8g}{hint}"
        raise FlowBNNError(text, kind="range", value=worst)


def check_events(value: Tensor, shape: Sequence[int], owner: object) -> torch.Size:
    """The batch shape; events of another shape are refused."""
    cut = value.ndim - len(shape)
    if cut < 0 or value.shape[cut:] != torch.Size(shape):
        raise transform_error(
            owner, f"takes events of shape {tuple(shape)}, not shape {tuple(value.shape)}", "shape"
        )
    return value.shape[:cut]


def check_vectors(value: Tensor, dim: int, owner: object, parameter: Tensor | None = None) -> None:
    """Refuse what is no real vector of this length, and another dtype than that of the parameters."""
    check_tensor(value, owner)
    if value.ndim == 0 or value.shape[-1] != dim:  # which would broadcast to a wrong log-det
        text = f"takes vectors of length {dim} on the last axis, not shape {tuple(value.shape)}"
        raise transform_error(owner, text, "shape")
    if parameter is not None and value.dtype != parameter.dtype:
        text = f"has {parameter.dtype} parameters but got {value.dtype} input; cast one with .to(dtype)"
        raise transform_error(owner, text, "dtype")


def check_distribution_module(flow: nn.Module) -> None:
    """Refuse a transform where a module that gives a distribution is wanted: it has no base."""
    if isinstance(flow, Transform):
        text = "is a transform, which has no base: give fb.flows.FlowModel(base, transform)"
        raise FlowBNNError(f"{type(flow).__name__} {text}", argument="flow")


def warn_slow_sampling(transform: Transform, owner: object) -> None:
    """Where something that draws at every step is made of a transform whose forward direction costs many passes."""
    if transform.cheap not in ("both", "forward"):
        text = "a draw costs many passes; take a flow with cheap draws, such as IAF in place of MAF, or cheap='forward' if it has that"
        warn(f"{owner}: {text}", kind="slow draws")
