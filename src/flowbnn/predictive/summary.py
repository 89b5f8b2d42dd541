"""Predictions without their samples: the means, uncertainties and scores of each input.

A prediction for N inputs by S networks needs the memory of S x N outputs. Predictions over large loaders are therefore reduced, batch
by batch, to what does not grow with S. Predictions for pixels or tokens keep the mean log-probabilities and a few numbers for each
position, from which the other properties are computed on demand.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flowbnn import plots
from flowbnn.batches import enlarge
from flowbnn.errors import FlowBNNError
from flowbnn.metrics import ReliabilityBin, RiskCoverage, reliability, root_mean_squared_error
from flowbnn.metrics.checks import IGNORED, mean_as_float
from flowbnn.options import check
from flowbnn.predictive.base import Decision, Predictive
from flowbnn.predictive.categorical import CategoricalPredictive, entropy_of, risk_coverage_of


class MissingSamples(FlowBNNError, AttributeError):
    """Raised if a summary is asked for something that needs samples. ``hasattr`` returns False for it."""

    @classmethod
    def of(cls, name: str) -> "MissingSamples":
        """Returns the error about a property or method that needs samples."""
        text = f"{name} needs samples, which were not kept; use predict(..., keep_samples=True)"
        return cls(text, kind="samples", argument="keep_samples")


class PredictionSummary:
    """Prediction without its samples: means and uncertainties of each input, and scores of its targets.

    It has the properties of :class:`CategoricalPredictive` or :class:`GaussianPredictive` that do not depend on single samples, and
    their methods ``decide``, ``uncertainty`` and ``evaluate``. Quantiles, intervals and draws need the samples:
    ``posterior.predict(loader, keep_samples=True)``.

    Args:
        values: Properties of the prediction by name, each ``[B, ...]``.
        scores: Scores of the targets by name, each ``[B, ...]``, with the targets themselves. Empty if there are no targets.
        kind: Class of the prediction.

    >>> prediction = CategoricalPredictive(torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]]]))
    >>> summary = summarize(prediction)
    >>> torch.equal(summary.probabilities, prediction.probabilities), summary
    (True, PredictionSummary(CategoricalPredictive, inputs=1))
    >>> summary.quantiles(0.5)
    Traceback (most recent call last):
    flowbnn.predictive.summary.MissingSamples: quantiles needs samples, which were not kept; use predict(..., keep_samples=True)
    """

    # properties of classes that the mean probabilities determine
    _derived: ClassVar[dict[str, Callable[[Any], Tensor]]] = {
        "probabilities": lambda summary: summary.log_probabilities.exp(),
        "labels": lambda summary: summary.log_probabilities.argmax(-1),
        "confidence": lambda summary: summary.log_probabilities.amax(-1).exp(),
        "risk": lambda summary: 1.0 - summary.confidence,
        "entropy": lambda summary: entropy_of(summary.log_probabilities),
        "aleatoric": lambda summary: summary.expected_entropy,
        "epistemic": lambda summary: summary.mutual_information,
    }

    def __init__(
        self, values: Mapping[str, Tensor], scores: Mapping[str, Tensor], kind: type[Predictive]
    ) -> None:
        self._values, self._scores, self._kind = dict(values), dict(scores), kind
        self.uncertainties = kind.uncertainties

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while an object is copied
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        if name in self._derived and "log_probabilities" in self._values:
            return self._derived[name](self)
        if hasattr(self._kind, name):
            raise MissingSamples.of(name)
        raise AttributeError(f"{self._kind.__name__} has no attribute {name!r}")

    def __len__(self) -> int:
        return len(self._values["sample_counts"])

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> "PredictionSummary":
        """Returns the summary of some inputs. An integer selects a summary of one input."""
        indices = [index] if isinstance(index, int) else index
        return self._map(lambda value: value[indices])

    def __repr__(self) -> str:
        return f"PredictionSummary({self._kind.__name__}, inputs={len(self)})"

    def _map(self, function: Any) -> "PredictionSummary":
        """Returns a summary whose tensors are results of a function."""
        values, scores = (
            {name: function(value) for name, value in group.items()} for group in (self._values, self._scores)
        )
        return PredictionSummary(values, scores, self._kind)

    def to(self, *args: Any, **kwargs: Any) -> "PredictionSummary":
        """Returns the summary on another device, with the arguments of :meth:`torch.Tensor.to`."""

        def convert(value: Tensor) -> Tensor:
            result = value.to(*args, **kwargs)
            # labels and counts stay integers
            return result if value.is_floating_point() else result.to(value.dtype)

        return self._map(convert)

    def cpu(self) -> "PredictionSummary":
        """Returns the summary on the CPU."""
        return self.to("cpu")

    @property
    def num_samples(self) -> int:
        """Number of samples that the values are computed from. With adaptive sampling, the largest number of any input."""
        return int(self.sample_counts.max()) if len(self) else 0

    @property
    def log_density(self) -> Tensor | None:
        """Log-density of each input, ``[B]``, if the posterior has a density gate."""
        return self._values.get("log_density")

    @property
    def _mixture(self) -> CategoricalPredictive:
        """Predictive of the mean probabilities, for what depends on nothing else."""
        return CategoricalPredictive(self.log_probabilities.unsqueeze(0))

    def uncertainty(self, by: str) -> Tensor:
        """Returns an uncertainty, as :meth:`decide` compares it.

        Args:
            by: Name of the uncertainty, one of :attr:`uncertainties`.
        """
        check("by", by, Literal[self.uncertainties])
        return (
            self._mixture.uncertainty(by) if by in self._kind.normalized_uncertainties else getattr(self, by)
        )

    def decide(self, abstain_above: float | Tensor, by: str = "") -> Decision:
        """Returns labels or means, and a mask of uncertain ones, as :meth:`CategoricalPredictive.decide` does.

        Args:
            abstain_above: Uncertainty above which the prediction abstains.
            by: Name of the :meth:`uncertainty`. The default is the first one.
        """
        abstained = self.uncertainty(by or self.uncertainties[0]) > abstain_above
        return Decision.make(self.labels if "log_probabilities" in self._values else self.mean, abstained)

    def credible_set(self, mass: float = 0.9) -> Tensor:
        """Returns the smallest set of classes with at least this predictive probability, as booleans ``[B, C]``.

        Args:
            mass: Probability of the set.
        """
        return self._mixture.credible_set(mass)

    def reliability(self, targets: Tensor, bins: int = 15) -> list[ReliabilityBin]:
        """Returns the bars of a reliability diagram, as :meth:`CategoricalPredictive.reliability` does.

        Args:
            targets: Class indices or soft labels.
            bins: Number of bins of the confidence.
        """
        return reliability(self.probabilities, self._mixture._check_targets(targets), bins)

    def risk_coverage(self, targets: Tensor, by: str = "entropy") -> RiskCoverage:
        """Returns the error rate on the most certain inputs, as :meth:`CategoricalPredictive.risk_coverage` does.

        Args:
            targets: Class indices.
            by: Name of the :meth:`uncertainty`.
        """
        targets = self._mixture._check_targets(targets)
        return risk_coverage_of(targets, self.labels, self.uncertainty(by))

    def nll(self, targets: Tensor) -> Tensor:
        """Returns the negative log-likelihood of the target of each input, ``[B]``.

        Args:
            targets: Targets. For real values they must be those of the loader.
        """
        if "log_probabilities" in self._values:
            return self._mixture.nll(targets)
        return self._score("nll", targets)

    def crps(self, targets: Tensor) -> Tensor:
        """Returns the continuous ranked probability score (CRPS) of each target.

        Args:
            targets: Targets of the loader.
        """
        return self._score("crps", targets)

    def cdf(self, targets: Tensor) -> Tensor:
        """Returns the predictive distribution function at each target.

        Args:
            targets: Targets of the loader.
        """
        return self._score("cdf", targets)

    plot_reliability, plot_risk_coverage = plots.plot_reliability, plots.plot_risk_coverage
    plot_pit, plot_coverage, plot_novelty = plots.plot_pit, plots.plot_coverage, plots.plot_novelty

    def _score(self, name: str, targets: Tensor) -> Tensor:
        """Returns a score that :func:`summarize` computed from the samples. Raises MissingSamples for other targets."""
        stored = self._scores.get("targets")
        if (
            stored is None
            or stored.numel() != targets.numel()
            or not bool((stored == targets.view_as(stored)).all())
        ):
            raise MissingSamples.of(f"{name} of other targets")
        return self._scores[name]

    def evaluate(self, targets: Tensor) -> dict[str, float]:
        """Returns the metrics of :meth:`CategoricalPredictive.evaluate` or :meth:`GaussianPredictive.evaluate`.

        Args:
            targets: Targets. For real values they must be those of the loader.
        """
        if "log_probabilities" in self._values:
            return self._mixture.evaluate(targets)
        return {
            "rmse": root_mean_squared_error(self.mean.reshape(-1, 1), targets.to(self.mean).reshape(-1, 1)),
            "nll": mean_as_float(self.nll(targets)),
            "crps": mean_as_float(self.crps(targets)),
            "coverage_90": mean_as_float(self._score("covered", targets)),
        }


def summarize(predictive: Any, targets: Tensor | None = None) -> PredictionSummary | None:
    """Returns a prediction without its samples, or None if the class of the prediction has no summary.

    Args:
        predictive: Prediction with samples.
        targets: Targets of the inputs, whose scores are computed while there are samples.
    """
    names = getattr(predictive, "summary_properties", ())
    if not names:
        return None
    if isinstance(predictive, CategoricalPredictive) and predictive.log_samples.ndim > 3:
        names = predictive.position_properties
    values = {name: getattr(predictive, name) for name in names}
    if predictive.log_density is not None:
        values["log_density"] = predictive.log_density
    scores: dict[str, Tensor] = {}
    if targets is not None and predictive.summary_scores:
        scores = {name: getattr(predictive, name)(targets) for name in predictive.summary_scores}
        scores["targets"] = targets
    return PredictionSummary(values, scores, type(predictive))


class SummaryCollector:
    """Collects the summaries of consecutive inputs.

    The values are copied to tensors that double their size when they are full. Separate tensors of all summaries would lie between
    freed samples in memory, which could then not be used again.

    Args:
        summaries: First summaries, all of the same kind.

    >>> prediction = CategoricalPredictive(torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]]]))
    >>> collector = SummaryCollector([summarize(prediction), summarize(prediction)])
    >>> collector.result()
    PredictionSummary(CategoricalPredictive, inputs=2)
    """

    def __init__(self, summaries: Iterable[PredictionSummary] = ()) -> None:
        self.num_rows, self.num_classes = 0, 1
        self.kind: type[Any] = Predictive
        self.buffers: dict[tuple[str, str], Tensor] = {}
        for summary in summaries:
            self.add(summary)

    def add(self, summary: PredictionSummary) -> None:
        """Adds the summary of the next inputs."""
        start, stop, self.kind = self.num_rows, self.num_rows + len(summary), summary._kind
        if "log_probabilities" in summary._values:
            self.num_classes = summary._values["log_probabilities"].shape[-1]
        for group in ("_values", "_scores"):
            for name, value in getattr(summary, group).items():
                buffer = self.buffers.get((group, name), value[:0])
                if buffer.shape[1:] != value.shape[1:]:  # other numbers of pixels or tokens
                    buffer, value = self._pad(name, buffer, value)
                    self.buffers[group, name] = buffer
                if stop > len(buffer):
                    shape = max(stop, 2 * len(buffer)), *value.shape[1:]
                    larger = torch.empty(shape, dtype=value.dtype, device=value.device)
                    larger[:start] = buffer[:start]
                    self.buffers[group, name] = buffer = larger
                buffer[start:stop] = value
        self.num_rows = stop

    def _pad(self, name: str, buffer: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Pads two values to the larger sizes, by what the summary of equal outputs of all classes has."""
        widest = [max(sizes) for sizes in zip(buffer.shape[1:], value.shape[1:], strict=True)]
        equal = CategoricalPredictive(torch.zeros(1, 1, 1, self.num_classes))
        fill = float(getattr(equal, name).flatten()[0]) if name in equal.position_properties else IGNORED
        return enlarge(buffer, (len(buffer), *widest), fill), enlarge(value, (len(value), *widest), fill)

    def result(self) -> PredictionSummary:
        """Returns one summary of all inputs. The collector is empty afterwards."""
        groups: dict[str, dict[str, Tensor]] = {"_values": {}, "_scores": {}}
        while self.buffers:  # one value after the other, so that memory for a single copy is needed
            (group, name), buffer = self.buffers.popitem()
            groups[group][name] = buffer if len(buffer) == self.num_rows else buffer[: self.num_rows].clone()
        self.num_rows = 0
        return PredictionSummary(groups["_values"], groups["_scores"], self.kind)
