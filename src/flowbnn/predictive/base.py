"""The contract of a predictive, and what all of them share."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, nearest

__all__ = ["Predictive", "check_samples", "check_shape", "quantile_levels", "spread"]


class Predictive:
    """What every predictive can do: be cut, joined and moved along its inputs, and name its uncertainties.

    A subclass keeps its tensors ``[S, B, K]`` in ``_tensors``, has a property for each name in :attr:`uncertainties`, and
    defines ``samples``, ``nll``, ``quantiles``, ``decide`` and ``evaluate``.
    """

    uncertainties: tuple[str, ...] = ()
    _tensors: tuple[Tensor, ...]

    @classmethod
    def _of(cls, *tensors: Tensor) -> Self:
        made = cls.__new__(cls)
        made._tensors = tensors
        return made

    def _each(self, function: Callable[[Tensor], Tensor]) -> Self:
        return self._of(*(function(tensor) for tensor in self._tensors))

    @property
    def samples(self) -> Tensor:
        """What each sample predicts, ``[S, B, K]``."""
        raise NotImplementedError(f"{type(self).__name__} must define samples")

    @property
    def num_samples(self) -> int:
        """S."""
        return self._tensors[0].shape[0]

    def __len__(self) -> int:
        return self._tensors[0].shape[1]

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Self:
        """The same predictive for some of the inputs; one integer gives a predictive of one input."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"input {index} of {len(self)}")
            index = slice(index % len(self), index % len(self) + 1)
        try:
            return self._each(lambda tensor: tensor[:, index])
        except IndexError as error:
            raise FlowBNNError(f"cannot pick those of {len(self)} inputs: {error}".splitlines()[0]) from None

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Predictives of several batches as one; all need the same number of samples."""
        parts = list(parts)
        if not parts:
            raise FlowBNNError("there are no predictives to join; was the loader empty?")
        shapes = {(part.num_samples, part._tensors[0].shape[-1]) for part in parts}
        if len(shapes) > 1 or len({type(part) for part in parts}) > 1:
            raise FlowBNNError(
                f"predictives to join must be of one kind, with the same samples and outputs, not (S, K) {sorted(shapes)}"
            )
        return parts[0]._of(
            *(torch.cat(tensors, 1) for tensors in zip(*(p._tensors for p in parts), strict=True))
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert, with the arguments of :meth:`torch.Tensor.to`."""
        return self._each(lambda tensor: tensor.to(*args, **kwargs))

    def cpu(self) -> Self:
        return self.to("cpu")

    def detach(self) -> Self:
        return self._each(Tensor.detach)

    @cached_property
    def standard_error(self) -> Tensor:
        r"""Monte Carlo error of the mean over samples, :math:`\sqrt{\hat\sigma^2 / S}`: how much more samples would move it.

        Infinite with one sample, which says nothing about its spread.
        """
        if self.num_samples == 1:
            return torch.full_like(self.samples[0], math.inf)
        return (spread(self.samples) / (self.num_samples - 1)).sqrt()

    def uncertainty(self, by: str) -> Tensor:
        """The uncertainty called ``by``, one of :attr:`uncertainties`, as :meth:`decide` compares it."""
        if by not in self.uncertainties:
            raise FlowBNNError(f"unknown uncertainty '{by}'{nearest(by, self.uncertainties)}")
        return getattr(self, by)

    def _above(self, threshold: float, by: str) -> Tensor:
        if math.isnan(threshold):
            raise FlowBNNError("abstain_above is NaN; give a number, or infinity to answer always")
        return self.uncertainty(by) > threshold


def spread(samples: Tensor) -> Tensor:
    """Variance over samples, divided by S; unlike ``Tensor.var`` it takes one sample or no inputs without a warning."""
    return (samples - samples.mean(0)).square().mean(0)


def check_samples(bad: Tensor) -> None:
    """Refuse samples; ``bad`` is ``[S, B, K]``, true where one cannot be used."""
    if bad.any():
        raise FlowBNNError(
            f"samples are not finite for {int(bad.any(-1).any(0).sum())} of {bad.shape[1]} inputs; "
            "look for NaN in the inputs or weights"
        )


def check_shape(values: Tensor, name: str, wanted: str) -> None:
    if values.ndim != 3:
        raise FlowBNNError(
            f"{name} must be {wanted}, samples first, not {list(values.shape)}; flatten other axes into B"
        )
    if not values.shape[0]:
        raise FlowBNNError(f"{name} {list(values.shape)} hold no samples; draw at least one")


def quantile_levels(q: float | Sequence[float], closed: bool) -> list[float]:
    levels = [float(level) for level in torch.as_tensor(q, dtype=torch.float64).flatten()]
    for level in levels:
        if not (0.0 <= level <= 1.0 if closed else 0.0 < level < 1.0):
            ends = "from 0 to 1" if closed else "between 0 and 1, ends excluded"
            raise FlowBNNError(f"quantiles must lie {ends}, not {level}")
    if not levels:
        raise FlowBNNError("there are no quantiles to give; name at least one")
    return levels
