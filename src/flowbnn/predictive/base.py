"""The contract of a predictive, and what all of them share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.options import Bounds, Hint, check, checked


class Predictive(ABC):
    """What every predictive can do: be cut along its inputs, be moved, and name its uncertainties.

    A subclass keeps its tensors ``[S, B, K]`` in ``_tensors``, has a property for each name in :attr:`uncertainties`, and
    defines ``samples``, ``sampling_error``, ``nll``, ``sample``, ``quantiles``, ``decide`` and ``evaluate``. Means over samples go
    through :meth:`_mean` and sums of probabilities through :meth:`_log_mean_exp`, which know that inputs may have had different numbers
    of samples (adaptive sampling): the first :attr:`sample_counts` of the S are then an input's own, and the others are NaN.
    """

    uncertainties: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()  # those of them that lie in [0, 1]
    _tensors: tuple[Tensor, ...]
    _sample_counts: Tensor | None = None  # [1, B], where inputs differ in it
    shape: tuple[int, ...] | None = None  # of one target, where that is not [K]

    @classmethod
    def _of(
        cls, *tensors: Tensor, sample_counts: Tensor | None = None, shape: tuple[int, ...] | None = None
    ) -> Self:
        made = cls.__new__(cls)
        made._tensors, made._sample_counts, made.shape = tensors, sample_counts, shape
        return made

    def _shaped(self, values: Tensor) -> Tensor:
        """Values ``[..., K]`` in the shape of the targets."""
        return values if self.shape is None else values.reshape(*values.shape[:-1], *self.shape)

    @property
    @abstractmethod
    def samples(self) -> Tensor:
        """What each sample predicts, ``[S, B, K]``."""

    @property
    def num_samples(self) -> int:
        """S, or the most that any input had."""
        return self._tensors[0].shape[0]

    @property
    def sample_counts(self) -> Tensor:
        """How many samples each input had, ``[B]``."""
        if self._sample_counts is not None:
            return self._sample_counts[0]
        return torch.full((len(self),), self.num_samples, device=self._tensors[0].device)

    @cached_property
    def _absent(self) -> Tensor | None:
        """Where an input did not have a sample, ``[S, B]``; None if each had all."""
        if self._sample_counts is None:
            return None
        return (
            torch.arange(self.num_samples, device=self._sample_counts.device).unsqueeze(1)
            >= self._sample_counts
        )

    def _present(self, values: Tensor, otherwise: float) -> Tensor:
        """Values ``[S, B, ...]`` with ``otherwise`` in place of the samples an input did not have."""
        if self._absent is None:
            return values
        return values.masked_fill(
            self._absent.view(*self._absent.shape, *(1,) * (values.ndim - 2)), otherwise
        )

    def _counts(self, values: Tensor) -> Tensor:
        """Samples of each input, to divide sums over samples of ``values`` ``[S, B, ...]``."""
        return self.sample_counts.to(values.dtype).view(-1, *(1,) * (values.ndim - 2))

    def _mean(self, values: Tensor) -> Tensor:
        """Mean over the samples that each input had."""
        if self._sample_counts is None:
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
        sample_counts = None if self._sample_counts is None else self._sample_counts[:, chosen]
        return self._of(
            *(tensor[:, chosen] for tensor in self._tensors), sample_counts=sample_counts, shape=self.shape
        )

    @checked
    def part(self, samples: slice) -> Self:
        """The same predictive of some of the samples, each of which every input must have."""
        return self._of(*(tensor[samples] for tensor in self._tensors), shape=self.shape)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert, with the arguments of :meth:`torch.Tensor.to`."""
        tensors = [tensor.to(*args, **kwargs) for tensor in self._tensors]
        sample_counts = None if self._sample_counts is None else self._sample_counts.to(tensors[0].device)
        return self._of(*tensors, sample_counts=sample_counts, shape=self.shape)

    def cpu(self) -> Self:
        return self.to("cpu")

    @cached_property
    def standard_error(self) -> Tensor:
        r"""Monte Carlo error of the mean over samples, :math:`\sqrt{\hat\sigma^2 / S}`: how much more samples would move it.

        Infinite with one sample, which says nothing about its spread.
        """
        variance = self._spread(self.samples)
        error = (variance / (self._counts(self.samples) - 1.0).clamp(min=1.0)).sqrt()
        return self._shaped(error.masked_fill(self._counts(self.samples) == 1.0, math.inf))

    @abstractmethod
    def nll(self, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each input's target, ``[B]``."""

    @checked
    def log_prob(self, targets: Tensor) -> Tensor:
        """Log-likelihood of each input's target in the mixture, ``[B]``."""
        return -self.nll(targets)

    @abstractmethod
    def sample(self, number: int = 1, seed: int | None = None) -> Tensor:
        """Targets drawn from the mixture, ``[number, B, ...]``; each draw takes one of the S samples for all inputs."""

    def _chosen(self, number: int, seed: int | None) -> tuple[Tensor, torch.Generator]:
        """The sample that each draw takes, ``[number, B]``, and the generator of the draws."""
        device = self._tensors[0].device
        generator = torch.Generator(device)
        generator.manual_seed(int(torch.randint(2**31 - 1, ())) if seed is None else seed)
        share = torch.rand(number, 1, generator=generator, device=device, dtype=torch.float64)
        chosen = (share * self.sample_counts).long()
        return torch.minimum(chosen, self.sample_counts - 1), generator

    @property
    @abstractmethod
    def sampling_error(self) -> Tensor:
        """How far more samples would move an input's prediction, ``[B]``: what adaptive sampling watches."""

    def uncertainty(self, by: str) -> Tensor:
        """The uncertainty called ``by``, one of :attr:`uncertainties`, as :meth:`decide` compares it."""
        check("by", by, Literal[self.uncertainties])
        return getattr(self, by)

    def _samples_text(self) -> str:
        """The number of samples, for the representation."""
        if self._sample_counts is None or not len(self):
            return str(self.num_samples)
        counts = self._sample_counts
        return f"{int(counts.min())} to {int(counts.max())}, {counts.double().mean():.1f} on average"

    def _above(self, threshold: float | Tensor, by: str) -> Tensor:
        uncertainty = self.uncertainty(by)
        # a quantile of other inputs' uncertainties, say
        if isinstance(threshold, Tensor) and threshold.numel() == 1:
            threshold = threshold.item()
        if not (isinstance(threshold, float) and threshold == math.inf):
            bounds = Bounds(ge=0, le=1) if by in self.shares else Bounds(ge=0)
            check("abstain_above", threshold, Annotated[float, bounds, Hint("or infinity to answer always")])
        return uncertainty > threshold


class NotFinite(FlowBNNError):
    """Samples that hold NaN or infinity, for ``inputs`` of ``total`` inputs, which its fields say."""


def check_finite(bad: Tensor) -> None:
    """Refuse samples; ``bad`` is ``[S, B, K]``, true where one is not finite."""
    if bad.any():
        inputs, total = int(bad.any(-1).any(0).sum()), bad.shape[1]
        line = f"samples are not finite for {inputs} of {total} inputs; look for NaN in the inputs or weights"
        raise NotFinite(line, kind="not finite", inputs=inputs, total=total)


def check_samples(
    values: Tensor,
    name: str,
    wanted: str,
    sample_counts: Tensor | None = None,
    least: int = 0,
    most: float = math.inf,
) -> tuple[Tensor, Tensor | None]:
    """Samples ``[S, B, K]`` in at least single precision, and those spent on each input, ``[1, B]``.

    Args:
        wanted: their shape, for the message.
        sample_counts: samples that each input had, ``[B]``; None where each had all.
        least: the smallest K.
        most: the largest K.
    """
    trouble = ""
    if not values.is_floating_point():
        trouble = f"{name} must be a floating point tensor, not {values.dtype}"
    elif values.ndim != 3 or not len(values) or not least <= values.shape[-1] <= most:
        single = values.ndim == 3 and values.shape[-1] < least
        advice = "for one logit per input use from_bernoulli" if single else "flatten other axes into B"
        trouble = f"{name} must be {wanted}, samples first, with at least one sample, not {list(values.shape)}; {advice}"
    elif sample_counts is not None:
        samples, inputs = values.shape[:2]
        fits = sample_counts.shape == (inputs,) and not sample_counts.is_floating_point()
        if not fits or not bool(((sample_counts >= 1) & (sample_counts <= samples)).all()):
            given = f"{sample_counts.dtype} {list(sample_counts.shape)}"
            trouble = f"sample_counts must be a vector of {inputs} integers from 1 to {samples}, not {given}"
    if trouble:
        raise FlowBNNError(trouble, argument=name)
    sample_counts = (
        None if sample_counts is None else sample_counts.to(values.device, torch.int64).unsqueeze(0)
    )
    return values.to(torch.promote_types(values.dtype, torch.float32)), sample_counts


def quantile_levels(q: float | Sequence[float] | Tensor, closed: bool) -> list[float]:
    levels = [float(level) for level in torch.as_tensor(q, dtype=torch.float64).flatten()]
    if not levels or not all(0.0 <= level <= 1.0 if closed else 0.0 < level < 1.0 for level in levels):
        ends = "from 0 to 1" if closed else "between 0 and 1, ends excluded"
        raise FlowBNNError(f"quantiles must be one or more numbers {ends}, not {levels}", argument="q")
    return levels
