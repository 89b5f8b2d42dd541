r"""The contract of a transform.

A transform is an invertible map :math:`x = f(z)` from the base to the sample, so that

.. math:: \log p(x) = \log p(z) - \log\left|\det \frac{\partial f}{\partial z}\right| .

**Forward means base to sample, everywhere.** To write one, subclass :class:`Transform` and give two methods::

    class Shift(Transform):
        def __init__(self, dim):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(dim))

        def forward(self, z, context=None):
            return z + self.shift, z.new_zeros(z.shape[:-1])

        def inverse(self, x, context=None):
            return x - self.shift, x.new_zeros(x.shape[:-1])

Each method returns ``(value, log_det)`` where ``log_det`` is the log-determinant *of the map it applied*: that of
``inverse`` is minus that of ``forward`` at the same point. ``log_det`` has the batch shape: the value's shape less its
last :attr:`Transform.event_dim` axes. Any number of batch axes, zero rows included, is allowed.

What a transform cannot do it declares in class attributes; nothing is caught and skipped:

===================  ==========================================================================================
``event_dim``        how many trailing axes one event has: 0 for a map of numbers, 1 for a map of vectors
``inverse_kind``     ``"exact"``, ``"numerical"`` (a root is found; correct to about 1e-6), or ``"none"``
``linearity``        ``"diagonal"``, ``"affine"`` or ``"none"``: what a closed-form KL may assume of the map
===================  ==========================================================================================
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError


class Transform(nn.Module):
    """A bijection with a tractable log-determinant. The contract is at the top of this file."""

    event_dim: int = 1
    inverse_kind: Literal["exact", "numerical", "none"] = "exact"
    linearity: Literal["diagonal", "affine", "none"] = "none"

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""Sample to base: ``(f^{-1}(x), log|det df^{-1}/dx|)``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no inverse, so a density is known only at its own draws: use rsample_and_log_prob"
        )


def check_tensor(value: Any, owner: object) -> None:
    """Refuse what is no tensor of real numbers; cheap, since a flow asks at every step."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
        given = (
            f"a tensor of {value.dtype}, {value.layout}"
            if isinstance(value, Tensor)
            else f"a {type(value).__name__}"
        )
        raise FlowBNNError(
            f"{type(owner).__name__} takes a dense floating point tensor, not {given}", kind="dtype"
        )


def check_vectors(value: Tensor, dim: int, owner: object, parameter: Tensor | None = None) -> None:
    """Refuse vectors of another length, which would broadcast to a wrong log-det, and of another dtype than the parameters."""
    check_tensor(value, owner)
    short = value.ndim == 0 or value.shape[-1] != dim
    if short or (parameter is not None and value.dtype != parameter.dtype):
        needs = f"takes vectors of length {dim} on the last axis, not shape {tuple(value.shape)}"
        if not short and parameter is not None:
            needs = f"has {parameter.dtype} parameters but got {value.dtype} input; cast one with .to(dtype)"
        raise FlowBNNError(f"{type(owner).__name__} {needs}", kind="shape" if short else "dtype")
