r"""The contract of a predictive, and what all of them share.

A predictive holds the outputs of S samples for B inputs, **samples first**: ``[S, B, K]``. It stands for the equal mixture of the S
sampled predictions, :math:`p(y \mid x) = \frac1S \sum_s p(y \mid x, z_s)`, and every number it gives is one of that mixture, with
the batch axis first: mean, variance, entropy ``[B, ...]``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, nearest, shown

__all__ = ["Predictive", "check_samples", "check_shape", "quantile_levels", "spent_samples"]


class Predictive(ABC):
    """What every predictive can do: be cut, joined and moved along its inputs, and name its uncertainties.

    A subclass keeps its tensors ``[S, B, K]`` in ``_tensors``, has a property for each name in :attr:`uncertainties`, and
    defines ``samples``, ``sampling_error``, ``nll``, ``quantiles``, ``decide`` and ``evaluate``. Means over samples go through
    :meth:`_mean` and sums of probabilities through :meth:`_log_mean_exp`, which know that inputs may have had different numbers
    of samples (adaptive sampling): the first :attr:`samples_spent` of the S are then an input's own, and the others are NaN.
    """

    uncertainties: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()  # those of them that lie in [0, 1]
    _tensors: tuple[Tensor, ...]
    _spent: Tensor | None = None  # [1, B], where inputs differ in it

    @classmethod
    def _of(cls, *tensors: Tensor, spent: Tensor | None = None) -> Self:
        made = cls.__new__(cls)
        made._tensors, made._spent = tensors, spent
        return made

    def _each(self, function: Callable[[Tensor], Tensor]) -> Self:
        spent = None if self._spent is None else function(self._spent)
        return self._of(*(function(tensor) for tensor in self._tensors), spent=spent)

    @property
    @abstractmethod
    def samples(self) -> Tensor:
        """What each sample predicts, ``[S, B, K]``."""

    @property
    def num_samples(self) -> int:
        """S, or the most that any input had."""
        return self._tensors[0].shape[0]

    @property
    def samples_spent(self) -> Tensor:
        """How many samples each input had, ``[B]``."""
        if self._spent is not None:
            return self._spent[0]
        return torch.full((len(self),), self.num_samples, device=self._tensors[0].device)

    @cached_property
    def _absent(self) -> Tensor | None:
        """Where an input did not have a sample, ``[S, B]``; None if each had all."""
        if self._spent is None:
            return None
        return torch.arange(self.num_samples, device=self._spent.device).unsqueeze(1) >= self._spent

    def _present(self, values: Tensor, otherwise: float) -> Tensor:
        """Values ``[S, B, ...]`` with ``otherwise`` in place of the samples an input did not have."""
        if self._absent is None:
            return values
        return values.masked_fill(
            self._absent.view(*self._absent.shape, *(1,) * (values.ndim - 2)), otherwise
        )

    def _counts(self, values: Tensor) -> Tensor:
        """Samples of each input, to divide sums over samples of ``values`` ``[S, B, ...]``."""
        return self.samples_spent.to(values.dtype).view(-1, *(1,) * (values.ndim - 2))

    def _mean(self, values: Tensor) -> Tensor:
        """Mean over the samples that each input had."""
        if self._spent is None:
            return values.mean(0)
        return self._present(values, 0.0).sum(0) / self._counts(values)

    def _spread(self, values: Tensor) -> Tensor:
        """Variance over samples, divided by their number; unlike ``Tensor.var`` it takes one sample or no inputs without a warning."""
        return self._mean((values - self._mean(values)).square())

    def _log_mean_exp(self, values: Tensor) -> Tensor:
        """Log of the mean of exponentials over samples."""
        return self._present(values, -math.inf).logsumexp(0) - self._counts(values).log()

    def __len__(self) -> int:
        return self._tensors[0].shape[1]

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Self:
        """The same predictive for some of the inputs; one integer gives a predictive of one input."""
        chosen = [index] if isinstance(index, int) else index
        return self._each(lambda tensor: tensor[:, chosen])

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Predictives of several batches as one; all need the same number of samples."""
        parts = list(parts)
        kinds = {(type(part), part.num_samples, part._tensors[0].shape[-1]) for part in parts}
        if len(kinds) != 1:
            raise FlowBNNError(
                f"predictives to join must be of one kind, with the same samples and outputs; there are {len(kinds)} kinds "
                f"in {len(parts)} parts",
                kind="shape",
            )
        ragged = any(part._spent is not None for part in parts)
        spent = torch.cat([part.samples_spent for part in parts]).unsqueeze(0) if ragged else None
        tensors = zip(*(part._tensors for part in parts), strict=True)
        return parts[0]._of(*(torch.cat(column, 1) for column in tensors), spent=spent)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert, with the arguments of :meth:`torch.Tensor.to`."""
        tensors = [tensor.to(*args, **kwargs) for tensor in self._tensors]
        spent = None if self._spent is None else self._spent.to(tensors[0].device)
        return self._of(*tensors, spent=spent)

    def cpu(self) -> Self:
        return self.to("cpu")

    def detach(self) -> Self:
        return self._each(Tensor.detach)

    @cached_property
    def standard_error(self) -> Tensor:
        r"""Monte Carlo error of the mean over samples, :math:`\sqrt{\hat\sigma^2 / S}`: how much more samples would move it.

        Infinite with one sample, which says nothing about its spread.
        """
        variance = self._spread(self.samples)
        error = (variance / (self._counts(self.samples) - 1.0).clamp(min=1.0)).sqrt()
        return error.masked_fill(self._counts(self.samples) == 1.0, math.inf)

    @property
    @abstractmethod
    def sampling_error(self) -> Tensor:
        """How far more samples would move an input's prediction, ``[B]``: what adaptive sampling watches."""

    def uncertainty(self, by: str) -> Tensor:
        """The uncertainty called ``by``, one of :attr:`uncertainties`, as :meth:`decide` compares it."""
        if by not in self.uncertainties:
            raise FlowBNNError(
                f"unknown uncertainty '{by}'{nearest(by, self.uncertainties)}", kind="value", argument="by"
            )
        return getattr(self, by)

    def _samples_text(self) -> str:
        """The number of samples, for the representation."""
        if self._spent is None or not len(self):
            return str(self.num_samples)
        return f"{int(self._spent.min())} to {int(self._spent.max())}, {self._spent.double().mean():.1f} on average"

    def _above(self, threshold: float, by: str) -> Tensor:
        uncertainty, most = self.uncertainty(by), 1.0 if by in self.shares else math.inf
        try:
            limit = float(threshold)  # a quantile of other inputs' uncertainties is a tensor
        except (TypeError, ValueError, RuntimeError):
            limit = math.nan
        if not (0.0 <= limit <= most or limit == math.inf):
            bounds = "from 0 to 1" if by in self.shares else "of at least 0"
            raise FlowBNNError(
                f"abstain_above must be a number {bounds} by={by!r}, or infinity to answer always, got {shown(threshold)}",
                kind="value",
                argument="abstain_above",
            )
        return uncertainty > limit


class NotFinite(FlowBNNError):
    """Samples that hold NaN or infinity, for ``inputs`` of ``total`` inputs."""

    def __init__(self, inputs: int, total: int) -> None:
        message = (
            f"samples are not finite for {inputs} of {total} inputs; look for NaN in the inputs or weights"
        )
        super().__init__(message, kind="not finite", inputs=inputs, total=total)


def check_samples(bad: Tensor) -> None:
    """Refuse samples; ``bad`` is ``[S, B, K]``, true where one cannot be used."""
    if bad.any():
        raise NotFinite(int(bad.any(-1).any(0).sum()), bad.shape[1])


def check_shape(values: Tensor, name: str, wanted: str) -> None:
    if values.ndim != 3 or not values.shape[0]:
        raise FlowBNNError(
            f"{name} must be {wanted}, samples first, with at least one sample, not {list(values.shape)}; flatten other axes into B",
            kind="shape",
            argument=name,
        )


def spent_samples(spent: Tensor | None, values: Tensor) -> Tensor | None:
    """The samples spent on each input, ``[1, B]``; None when each had all of ``values`` ``[S, B, ...]``."""
    if spent is None:
        return None
    samples, inputs = values.shape[:2]
    fits = spent.shape == (inputs,) and not spent.is_floating_point()
    if not fits or (inputs and (int(spent.min()) < 1 or int(spent.max()) > samples)):
        raise FlowBNNError(
            f"spent must be a vector of {inputs} integers from 1 to {samples}, not {spent.dtype} {list(spent.shape)}",
            kind="value",
            argument="spent",
        )
    return spent.to(values.device, torch.int64).unsqueeze(0)


def quantile_levels(q: float | Sequence[float], closed: bool) -> list[float]:
    levels = [float(level) for level in torch.as_tensor(q, dtype=torch.float64).flatten()]
    if not levels or not all(0.0 <= level <= 1.0 if closed else 0.0 < level < 1.0 for level in levels):
        ends = "from 0 to 1" if closed else "between 0 and 1, ends excluded"
        raise FlowBNNError(
            f"quantiles must be one or more numbers {ends}, not {levels}", kind="value", argument="q"
        )
    return levels
