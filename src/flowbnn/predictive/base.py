"""Base class for predictive distributions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from flowbnn import plots
from flowbnn.errors import FlowBNNError, check_entries, check_shape, nonfinite_error
from flowbnn.memory import check_memory
from flowbnn.metrics.checks import check_integers, to_floating_point
from flowbnn.numerics import is_concrete
from flowbnn.options import Bounds, Hint, NonEmpty, Probability, UnitInterval, check, checked

ABSTAIN = -1
"""Label of inputs for which a predictive of classes abstains. Real values are NaN there."""


class Decision(NamedTuple):
    """Predictions that are certain enough, and a mask of those that are not. Every ``decide`` returns one.

    Args:
        values: Labels, or means of real values. Where the predictive abstains, a label is -1 and a real value is NaN.
        abstained: True where the predictive abstains, in the shape of the values.

    >>> Decision.make(torch.tensor([2, 0]), torch.tensor([False, True]))
    Decision(values=tensor([ 2, -1]), abstained=tensor([False,  True]))
    """

    values: Tensor
    abstained: Tensor

    @classmethod
    def make(cls, values: Tensor, abstained: Tensor) -> Self:
        """Returns a decision without the values for which the predictive abstains.

        Args:
            values: Labels, or means of real values.
            abstained: True where the predictive abstains.
        """
        missing = math.nan if values.is_floating_point() else ABSTAIN
        return cls(values.masked_fill(abstained, missing), abstained)


class Predictive(ABC):
    """Base class for predictive distributions, with selection of inputs, moves between devices, and names of uncertainties.

    A subclass stores its tensors ``[S, B, K]`` in ``_tensors``, has a property for each name in :attr:`uncertainties`, and defines
    ``samples``, ``sampling_error``, ``nll``, ``sample``, ``quantiles``, ``decide`` and ``evaluate``.

    With adaptive sampling the inputs have different numbers of samples. An input then has only the first
    :attr:`sample_counts` samples, and its other samples are NaN. A subclass therefore averages over samples by :meth:`_mean` and
    :meth:`_log_mean_exp`.
    """

    uncertainties: tuple[str, ...] = ()
    normalized_uncertainties: tuple[str, ...] = ()  # uncertainties with values in [0, 1]
    # properties that predictions over large loaders keep instead of their samples; without any they keep the samples
    summary_properties: tuple[str, ...] = ()
    summary_scores: tuple[str, ...] = ()  # methods of the targets, whose results they keep
    _tensors: tuple[Tensor, ...]
    _sample_counts: Tensor | None = None  # [1, B], or None if all inputs have S samples
    shape: tuple[int, ...] | None = None  # shape of a target, or None for [K]
    log_density: Tensor | None = None  # log-density of each input, [B], if the posterior has a density gate

    @classmethod
    def _from_tensors(
        cls, *tensors: Tensor, sample_counts: Tensor | None = None, shape: tuple[int, ...] | None = None
    ) -> Self:
        """Returns a predictive with tensors that have been checked."""
        predictive = cls.__new__(cls)
        predictive._tensors, predictive._sample_counts, predictive.shape = tensors, sample_counts, shape
        return predictive

    def _copy(self, *tensors: Tensor) -> Self:
        """Returns a predictive of the same inputs and samples with other tensors."""
        predictive = self._from_tensors(*tensors, sample_counts=self._sample_counts, shape=self.shape)
        predictive.log_density = self.log_density
        return predictive

    def _to_target_shape(self, values: Tensor) -> Tensor:
        """Reshapes values ``[..., K]`` to the shape of the targets."""
        return values if self.shape is None else values.reshape(*values.shape[:-1], *self.shape)

    @property
    @abstractmethod
    def samples(self) -> Tensor:
        """Prediction of each sample, ``[S, B, K]``."""

    @property
    def num_samples(self) -> int:
        """Number of samples S. With adaptive sampling, the largest number of any input."""
        return self._tensors[0].shape[0]

    @property
    def sample_counts(self) -> Tensor:
        """Number of samples of each input, ``[B]``."""
        if self._sample_counts is not None:
            return self._sample_counts[0]
        # its shape, because len() would fix the number of inputs of an exported graph
        values = self._tensors[0]
        return torch.full((values.shape[1],), self.num_samples, device=values.device)

    @cached_property
    def _missing(self) -> Tensor:
        """Mask ``[S, B]`` of samples that an input does not have."""
        counts = self.sample_counts
        return torch.arange(self.num_samples, device=counts.device).unsqueeze(1) >= counts

    def _fill_missing(self, values: Tensor, fill: float) -> Tensor:
        """Replaces the samples that an input does not have in values ``[S, B, ...]``."""
        if self._sample_counts is None:
            return values
        mask = self._missing.view(*self._missing.shape, *(1,) * (values.ndim - 2))
        return values.masked_fill(mask, fill)

    def _counts_like(self, values: Tensor) -> Tensor:
        """Returns the number of samples of each input, in the dtype of values ``[S, B, ...]`` and with as many axes as their mean."""
        return self.sample_counts.to(values.dtype).view(-1, *(1,) * (values.ndim - 2))

    def _mean(self, values: Tensor) -> Tensor:
        """Returns the mean over the samples of each input."""
        if self._sample_counts is None:
            return values.mean(0)
        return self._fill_missing(values, 0.0).sum(0) / self._counts_like(values)

    def _variance_over_samples(self, values: Tensor) -> Tensor:
        """Returns the biased variance over samples. Unlike ``Tensor.var`` it accepts one sample, or no inputs, without a warning."""
        return self._mean((values - self._mean(values)).square())

    def _log_mean_exp(self, values: Tensor) -> Tensor:
        """Returns the logarithm of the mean of exponentials over samples."""
        if self._sample_counts is None:
            return values.logsumexp(0) - math.log(self.num_samples)
        return self._fill_missing(values, -math.inf).logsumexp(0) - self._counts_like(values).log()

    def __len__(self) -> int:
        return self._tensors[0].shape[1]

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Self:
        """Returns the predictive of some inputs. An integer selects a predictive of one input."""
        indices = [index] if isinstance(index, int) else index
        sample_counts = None if self._sample_counts is None else self._sample_counts[:, indices]
        tensors = [tensor[:, indices] for tensor in self._tensors]
        predictive = self._from_tensors(*tensors, sample_counts=sample_counts, shape=self.shape)
        predictive.log_density = None if self.log_density is None else self.log_density[indices]
        return predictive

    @checked
    def select_samples(self, samples: slice) -> Self:
        """Returns the predictive of some samples, which every input must have.

        Args:
            samples: Slice of the samples.
        """
        predictive = self._from_tensors(*(tensor[samples] for tensor in self._tensors), shape=self.shape)
        predictive.log_density = self.log_density
        return predictive

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the predictive on another device or in another dtype, with the arguments of :meth:`torch.Tensor.to`."""
        tensors = [tensor.to(*args, **kwargs) for tensor in self._tensors]
        sample_counts = None if self._sample_counts is None else self._sample_counts.to(tensors[0].device)
        predictive = self._from_tensors(*tensors, sample_counts=sample_counts, shape=self.shape)
        predictive.log_density = None if self.log_density is None else self.log_density.to(*args, **kwargs)
        return predictive

    def cpu(self) -> Self:
        """Returns the predictive on the CPU."""
        return self.to("cpu")

    @cached_property
    def standard_error(self) -> Tensor:
        r"""Monte Carlo standard error of the mean over samples, :math:`\sqrt{\hat\sigma^2 / S}`.

        It is infinite for one sample.
        """
        variance, counts = self._variance_over_samples(self.samples), self._counts_like(self.samples)
        error = (variance / (counts - 1.0).clamp(min=1.0)).sqrt()
        return self._to_target_shape(error.masked_fill(counts == 1.0, math.inf))

    @abstractmethod
    def nll(self, targets: Tensor) -> Tensor:
        """Returns the negative log-likelihood (NLL) of the target of each input, ``[B]``."""

    @checked
    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log-likelihood of the target of each input under the mixture, ``[B]``."""
        return -self.nll(targets)

    @abstractmethod
    def sample(self, number: int = 1, seed: int | None = None) -> Tensor:
        """Draws targets from the mixture, ``[number, B, ...]``. Each draw uses one of the S samples for all inputs."""

    def _draw_sample_indices(self, number: int, seed: int | None) -> tuple[Tensor, torch.Generator]:
        """Returns the index of the sample that each draw uses, ``[number, B]``, and the generator of the draws."""
        device = self._tensors[0].device
        num_bytes = number * sum([tensor[0].nbytes for tensor in self._tensors])
        check_memory("number", number, num_bytes, device)
        generator = torch.Generator(device)
        generator.manual_seed(int(torch.randint(2**31 - 1, ())) if seed is None else seed)
        uniform = torch.rand(number, 1, generator=generator, device=device, dtype=torch.float64)
        indices = (uniform * self.sample_counts).long()
        return torch.minimum(indices, self.sample_counts - 1), generator

    @property
    @abstractmethod
    def sampling_error(self) -> Tensor:
        """Monte Carlo error of the prediction of each input, ``[B]``, which adaptive sampling reduces."""

    def uncertainty(self, by: str) -> Tensor:
        """Returns an uncertainty, as :meth:`decide` compares it.

        Args:
            by: Name of the uncertainty, one of :attr:`uncertainties`.
        """
        check("by", by, Literal[self.uncertainties])
        return getattr(self, by)

    plot_functions, plot_novelty = plots.plot_functions, plots.plot_novelty

    def _describe_sample_counts(self) -> str:
        """Returns the number of samples as text."""
        if self._sample_counts is None or not len(self):
            return str(self.num_samples)
        counts = self._sample_counts
        return f"{int(counts.min())} to {int(counts.max())}, {counts.double().mean():.1f} on average"

    def _exceeds(self, threshold: float | Tensor, by: str) -> Tensor:
        """Returns a mask of the uncertainties above a threshold."""
        uncertainty = self.uncertainty(by)
        if isinstance(threshold, Tensor) and threshold.numel() == 1:  # such as a quantile
            threshold = threshold.item()
        if not (isinstance(threshold, float) and threshold == math.inf):
            bounds = Bounds(ge=0, le=1) if by in self.normalized_uncertainties else Bounds(ge=0)
            check("abstain_above", threshold, Annotated[float, bounds, Hint("infinity never abstains")])
        return uncertainty > threshold


class NonFiniteSamplesError(FlowBNNError):
    """Error about samples that are NaN or infinite. Its fields give the number of affected ``inputs`` and their ``total``."""


def check_finite_samples(invalid: Tensor) -> None:
    """Raises NonFiniteSamplesError if a sample is not finite.

    Args:
        invalid: Mask ``[S, B, ...]`` of values that are not finite.
    """
    if is_concrete(invalid) and invalid.any():
        finite, hint = ~invalid.flatten(2).any(-1).any(0), "look for NaN in inputs or weights"
        fields: dict[str, Any] = {"inputs": int((~finite).sum()), "total": len(finite)}
        raise nonfinite_error(
            "the samples", finite, hint, cls=NonFiniteSamplesError, kind="not finite", **fields
        )


def check_samples(
    values: Tensor,
    name: str,
    sample_counts: Tensor | None = None,
    min_size: int = 0,
    max_size: float = math.inf,
    positions: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns samples in at least single precision, and the number of samples of each input.

    Args:
        values: Samples ``[S, B, K]``.
        name: Name of the argument.
        sample_counts: Number of samples of each input, ``[B]``, or None if all inputs have S samples.
        min_size: Smallest K.
        max_size: Largest K.
        positions: If True, samples ``[S, B, *positions, K]`` are accepted.

    Returns:
        The samples, and the counts ``[1, B]`` or None.

    Raises:
        FlowBNNError: If the shape or the dtype is wrong.
    """
    allowed = values.ndim == 3 or (positions and values.ndim > 3)
    if not allowed or not len(values) or not min_size <= values.shape[-1] <= max_size:
        single = values.ndim == 3 and values.shape[-1] < min_size
        hint = "use from_bernoulli" if single else "flatten other axes"
        last = f"size >= {min_size}" if math.isinf(max_size) else int(max_size)
        check_shape(name, values, ("samples >= 1", "batch", last), hint)
    if values.dtype not in (torch.float32, torch.float64):
        values = to_floating_point(values, name)
    if sample_counts is None:
        return values, None
    samples, inputs = values.shape[:2]
    check_shape("sample_counts", sample_counts, (inputs,))
    check_integers("sample_counts", sample_counts)
    valid = (sample_counts >= 1) & (sample_counts <= samples)
    check_entries("sample_counts", sample_counts, valid, f"from 1 to {samples}")
    return values, sample_counts.to(values.device, torch.int64).unsqueeze(0)


def quantile_levels(q: float | Sequence[float] | Tensor, closed: bool) -> list[float]:
    """Returns the levels of quantiles as a list.

    Args:
        q: One level, or several.
        closed: If True, 0 and 1 are allowed.

    Raises:
        FlowBNNError: If there are no levels, or if one is outside of the interval.
    """
    values = q.flatten().tolist() if isinstance(q, Tensor) else [q] if isinstance(q, int | float) else q
    levels = [float(level) for level in values]
    level_type = UnitInterval if closed else Probability
    check("q", levels, Annotated[Sequence[level_type], NonEmpty()], kind="range")  # type: ignore[valid-type]
    return levels
