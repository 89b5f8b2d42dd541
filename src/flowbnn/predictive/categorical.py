"""Predictive distribution of class labels."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn import plots
from flowbnn.metrics import (
    ReliabilityBin,
    RiskCoverage,
    accuracy,
    brier_score,
    calibration_error,
    reliability,
    risk_coverage,
)
from flowbnn.metrics.checks import (
    IGNORED,
    as_binary_labels,
    check_any_target,
    check_classes,
    check_hard_labels,
    check_probabilities,
    expected_value,
    mean_as_float,
)
from flowbnn.options import Count, Probability, checked
from flowbnn.predictive.base import Decision, Predictive, check_finite_samples, check_samples, quantile_levels


class CategoricalPredictive(Predictive):
    r"""Predictive distribution of class labels from S samples of the logits.

    Predictions for pixels, tokens or several labels have axes of positions before the classes, ``[S, B, *positions, C]``. All
    quantities of shape ``[B]`` below are then ``[B, *positions]``, and ``[B, C]`` is ``[B, *positions, C]``. Three are sums or extremes
    over positions: :meth:`nll` and :attr:`sampling_error` have the shape ``[B]``, and :meth:`evaluate` averages over all positions. The
    target -100 marks positions without a label.

    Args:
        logits: Unnormalized logits ``[S, B, C]`` or ``[S, B, *positions, C]``. Minus infinity excludes a class.
        sample_counts: Number of samples of each input, ``[B]``, with adaptive sampling. Only the first samples of an input are used, up
            to its count.

    >>> logits = torch.tensor([[[2.0, 0.0], [3.0, 0.0]], [[2.0, 0.0], [-3.0, 0.0]]])  # 2 samples, 2 inputs, 2 classes
    >>> prediction = CategoricalPredictive(logits)
    >>> prediction
    CategoricalPredictive(samples=2, inputs=2, classes=2; confidence 0.690, entropy 0.529 = aleatoric 0.278 + epistemic 0.251)
    >>> prediction.epistemic  # the samples agree on the first input only
    tensor([0.0000, 0.5023])
    >>> prediction.decide(abstain_above=0.9)
    Decision(values=tensor([ 0, -1]), abstained=tensor([False,  True]))
    """

    uncertainties = ("entropy", "risk", "epistemic", "total_variance", "aleatoric")
    normalized_uncertainties = ("entropy", "risk")
    summary_properties = (
        "sample_counts",
        "standard_error",
        "sampling_error",
        "log_probabilities",
        "variance",
        "expected_entropy",
        "mutual_information",
        "probabilities",
        "labels",
        "confidence",
        "risk",
        "total_variance",
        "entropy",
        "aleatoric",
        "epistemic",
        "confidence_error",
        "decision_strength",
        "energy",
    )
    # properties of positions that the mean probabilities do not determine; the others are computed from these
    position_properties = (
        "sample_counts",
        "sampling_error",
        "log_probabilities",
        "mutual_information",
        "expected_entropy",
        "total_variance",
        "confidence_error",
        "energy",
    )

    @checked
    def __init__(self, logits: Tensor, sample_counts: Tensor | None = None) -> None:
        logits, self._sample_counts = check_samples(
            logits, "logits", sample_counts, min_size=2, positions=True
        )
        self._tensors = (logits,)
        normalizers = logits.logsumexp(-1, keepdim=True)
        log_samples = self._fill_missing(F.log_softmax(logits, dim=-1), math.nan)
        self._tensors = (log_samples, self._fill_missing(normalizers, math.nan))
        check_finite_samples(self._fill_missing(self._tensors[0], 0.0).isnan())

    @classmethod
    @checked
    def from_probabilities(cls, probabilities: Tensor) -> Self:
        """Returns the predictive of samples of probabilities.

        Args:
            probabilities: Class probabilities ``[S, B, C]`` or ``[S, B, *positions, C]``.

        >>> CategoricalPredictive.from_probabilities(torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]])).probabilities
        tensor([[0.7500, 0.2500]])
        """
        probabilities, _ = check_samples(probabilities, "probabilities", positions=True)
        check_finite_samples(~torch.isfinite(probabilities))
        return cls(torch.log(check_probabilities(probabilities, ("samples", "batch"))))

    @classmethod
    @checked
    def from_bernoulli(cls, logits: Tensor, sample_counts: Tensor | None = None) -> Self:
        r"""Returns the predictive of two classes from one logit per label. Class 1 has the probability :math:`\sigma(l)`.

        Args:
            logits: Logits ``[S, B]`` of one label, or ``[S, B, *positions]`` of several labels or pixels. The axis after the inputs is
                left out if its size is one.
            sample_counts: Number of samples of each input, ``[B]``, with adaptive sampling.

        >>> CategoricalPredictive.from_bernoulli(torch.zeros(3, 1)).probabilities
        tensor([[0.5000, 0.5000]])
        """
        logits = logits.squeeze(2) if logits.ndim > 2 and logits.shape[2] == 1 else logits
        logits, _ = check_samples(logits.unsqueeze(-1), "logits", max_size=1, positions=True)
        # half of the logit for each class, so that the energy depends on its absolute value only
        return cls(torch.cat([-0.5 * logits, 0.5 * logits], dim=-1), sample_counts)

    @property
    def log_samples(self) -> Tensor:
        """Log-probabilities of each sample, ``[S, B, C]``. NaN for samples that an input does not have."""
        return self._tensors[0]

    @property
    def logits(self) -> Tensor:
        """Unnormalized logits of each sample, ``[S, B, C]``."""
        return self._tensors[0] + self._tensors[1]

    @property
    def samples(self) -> Tensor:
        """Probabilities of each sample, ``[S, B, C]``. NaN for samples that an input does not have."""
        return self.log_samples.exp()

    @cached_property
    def log_probabilities(self) -> Tensor:
        r"""Logarithms of the mean probabilities, :math:`\log \frac1S \sum_s p_s`, ``[B, C]``, without underflow."""
        return self._log_mean_exp(self.log_samples)

    @cached_property
    def probabilities(self) -> Tensor:
        """Mean probabilities, ``[B, C]``."""
        return self.log_probabilities.exp()

    @property
    def labels(self) -> Tensor:
        """Most probable class, ``[B]``."""
        return self.probabilities.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class, ``[B]``."""
        return self.probabilities.amax(-1)

    @property
    def confidence_error(self) -> Tensor:
        """Monte Carlo standard error of the :attr:`confidence`, ``[B]``."""
        return self.standard_error.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1)

    @property
    def risk(self) -> Tensor:
        """Predicted probability that the label is wrong, ``1 - confidence``, ``[B]``."""
        return 1.0 - self.confidence

    @cached_property
    def variance(self) -> Tensor:
        r"""Variance of the probability of each class over samples, :math:`\frac1S \sum_s (p_{sc} - \bar p_c)^2`, ``[B, C]``."""
        return self._variance_over_samples(self.samples)

    @property
    def total_variance(self) -> Tensor:
        """Sum of :attr:`variance` over classes, ``[B]``."""
        return self.variance.sum(-1)

    @cached_property
    def entropy(self) -> Tensor:
        r"""Entropy of the mean, :math:`-\sum_c \bar p_c \log \bar p_c`, in nats, ``[B]``: the total uncertainty."""
        return entropy_of(self.log_probabilities)

    @cached_property
    def expected_entropy(self) -> Tensor:
        r"""Mean entropy of the samples, :math:`\frac1S \sum_s H[p_s]`, in nats, ``[B]``: the uncertainty of a single network."""
        return self._mean(entropy_of(self.log_samples))

    @cached_property
    def mutual_information(self) -> Tensor:
        r"""Mutual information of label and network (Houlsby et al., 2011, "BALD"), in nats, ``[B]``.

        .. math:: I = H[\bar p] - \frac1S \sum_s H[p_s] = \frac1S \sum_s \mathrm{KL}(p_s \,\|\, \bar p) \ge 0 .

        It is computed as a sum of the non-negative terms :math:`p \log(p/q) - p + q`, because the difference of the entropies is
        inaccurate if the samples nearly agree.
        """
        p, q, ratio = self.samples, self.probabilities, self.log_samples - self.log_probabilities
        near = p * (ratio + torch.expm1(-ratio.clamp(min=-1.0)))
        far = torch.where(p > 0, p * ratio, 0.0) - p + q
        return self._mean(torch.where(ratio > -1.0, near, far).clamp(min=0.0).sum(-1))

    @property
    def energy(self) -> Tensor:
        r"""Mean energy of the samples, :math:`-\frac1S \sum_s \log \sum_c e^{f_{sc}}` for logits :math:`f`, ``[B]``.

        It is large for inputs with small logits, which are often novel (Liu et al. 2020, https://arxiv.org/abs/2010.03759). It is zero
        for predictives that are made from probabilities.
        """
        return -self._mean(self._tensors[1]).squeeze(-1)

    @property
    def aleatoric(self) -> Tensor:
        """Aleatoric uncertainty, the :attr:`expected_entropy`, ``[B]``."""
        return self.expected_entropy

    @property
    def epistemic(self) -> Tensor:
        """Epistemic uncertainty, the :attr:`mutual_information`, ``[B]``."""
        return self.mutual_information

    @property
    def sampling_error(self) -> Tensor:
        """Largest :attr:`standard_error` of the class probabilities of an input, ``[B]``, over all positions."""
        return self.standard_error.flatten(1).amax(-1)

    @cached_property
    def decision_strength(self) -> Tensor:
        r"""Lead of the most probable class over the second most probable class, in standard errors, ``[B]``.

        .. math:: \min_{c \ne \hat y} \; \bar d_c \sqrt n / \hat\sigma(d_c), \qquad d_{sc} = p_{s \hat y} - p_{sc} .

        The differences are paired within samples. The lead is infinite if all samples are equal, and zero for one sample.
        """
        samples, top = self.samples, self.labels.unsqueeze(-1)
        lead = samples.gather(-1, top.expand(self.num_samples, *top.shape)) - samples
        mean = self._mean(lead)
        error = (self._variance_over_samples(lead) / (self._counts_like(lead) - 1.0).clamp(min=1.0)).sqrt()
        strength = torch.where(mean > 0, mean / error, 0.0).scatter(-1, top, math.inf).amin(-1)
        return strength.masked_fill(self._counts_like(strength.unsqueeze(0)) == 1.0, 0.0)

    def uncertainty(self, by: str) -> Tensor:
        r"""Returns an uncertainty ``[B]``, as :meth:`decide` compares it.

        Args:
            by: Name of the uncertainty. ``"entropy"`` is divided by :math:`\log C`, so that it is in [0, 1]. ``"risk"`` is one minus
                the confidence. ``"epistemic"`` and ``"aleatoric"`` are in nats. ``"total_variance"`` is summed over classes.
        """
        value = super().uncertainty(by)
        return (value / math.log(self.log_samples.shape[-1])).clamp(max=1.0) if by == "entropy" else value

    @checked
    def nll(self, targets: Tensor | None = None) -> Tensor:
        r"""Returns the negative log-likelihood :math:`-\log \bar p_y` of each input, ``[B]``, summed over positions.

        Args:
            targets: Class indices ``[B]`` or ``[B, *positions]``, or soft labels ``[B, C]`` or ``[B, *positions, C]``, whose value is
                the expectation over labels. The default is the predicted labels. Positions with the label -100 add nothing, so an
                input without labels has the value 0.
        """
        if targets is None:
            values = -self.log_probabilities.amax(-1)
        else:
            values = self._position_nll(self._check_targets(targets))
        return values.flatten(1).sum(-1) if values.ndim > 1 else values

    def _position_nll(self, targets: Tensor) -> Tensor:
        """Returns the negative log-likelihood of each position, ``[B, *positions]``, zero for ignored ones."""
        if targets.is_floating_point():
            return -expected_value(self.log_probabilities, targets)
        values = -self.log_probabilities.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return values.masked_fill(targets == IGNORED, 0.0) if targets.ndim > 1 else values

    @checked
    def sample(self, number: Count = 1, seed: int | None = None) -> Tensor:
        """Draws labels from the mixture, ``[number, B]``. Each draw uses one of the S samples for all inputs and positions.

        Args:
            number: Number of draws.
            seed: Seed of the draws. None uses torch's global generator.
        """
        indices, generator = self._draw_sample_indices(number, seed)
        shape = self.log_samples.shape[1:]
        indices = indices.view(*indices.shape, *(1,) * (len(shape) - 1)).expand(number, *shape)
        probabilities = self.samples.gather(0, indices)
        labels = torch.multinomial(probabilities.reshape(-1, shape[-1]), 1, generator=generator)
        return labels.reshape(number, *shape[:-1])

    @checked
    def quantiles(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Returns quantiles over samples of the probability of each class, ``[Q, B, C]``, by linear interpolation.

        Args:
            q: Levels from 0 to 1.

        >>> samples = torch.tensor([[[0.2, 0.8]], [[0.4, 0.6]], [[0.9, 0.1]]])
        >>> CategoricalPredictive.from_probabilities(samples).quantiles([0.0, 0.5])[:, 0, 0]
        tensor([0.2000, 0.4000])
        """
        levels = quantile_levels(q, closed=True)
        # torch.quantile is limited to 16 million numbers; NaN, for missing samples, is sorted to the end
        ordered = self.samples.sort(0).values
        last = (self._counts_like(ordered) - 1.0).unsqueeze(0).expand(1, *ordered.shape[1:])
        quantiles = []
        for level in levels:
            position = level * last
            low, high = (ordered.gather(0, end.long()) for end in (position.floor(), position.ceil()))
            quantiles.append(torch.lerp(low, high, position - position.floor()))
        return torch.cat(quantiles)

    @checked
    def credible_set(self, mass: Probability = 0.9) -> Tensor:
        """Returns the smallest set of classes with at least this predictive probability, as booleans ``[B, C]``.

        Args:
            mass: Probability of the set.

        >>> CategoricalPredictive.from_probabilities(torch.tensor([[[0.6, 0.1, 0.3]]])).credible_set(0.9)
        tensor([[ True, False,  True]])
        """
        ordered, order = self.probabilities.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        # 0.6 + 0.3 must count as 0.9 despite rounding
        included = mass_before < mass - 8 * torch.finfo(ordered.dtype).eps
        return torch.zeros_like(included).scatter(-1, order, included)

    def decide(self, abstain_above: float | Tensor, by: str = "entropy") -> Decision:
        """Returns labels ``[B]``, with -1 for inputs whose uncertainty is above a threshold, and a mask of these.

        Args:
            abstain_above: Uncertainty above which the predictive abstains.
            by: Name of the :meth:`uncertainty`.
        """
        return Decision.make(self.labels, self._exceeds(abstain_above, by))

    def with_fallback(self, novel: Tensor, fallback: Tensor) -> Self:
        """Returns the predictive with fixed class probabilities for some inputs.

        Each sample predicts one or two classes there, and their mean has the fixed probabilities. The uncertainty is thus epistemic.

        Args:
            novel: Booleans ``[B]``, True for inputs to replace.
            fallback: Class probabilities ``[C]``.

        >>> prediction = CategoricalPredictive(torch.zeros(4, 2, 2))
        >>> prediction = prediction.with_fallback(torch.tensor([True, False]), torch.tensor([0.25, 0.75]))
        >>> prediction.probabilities, prediction.epistemic
        (tensor([[0.2500, 0.7500],
                [0.5000, 0.5000]]), tensor([0.5623, 0.0000]))
        """
        counts = self.sample_counts.to(self.log_samples.dtype)
        start = torch.arange(self.num_samples, device=counts.device).unsqueeze(1) / counts
        stop = start + 1.0 / counts  # each sample covers an interval of the cumulated probabilities
        high = fallback.to(counts).cumsum(0)
        low = high - fallback.to(counts)
        overlap = torch.minimum(stop.unsqueeze(-1), high) - torch.maximum(start.unsqueeze(-1), low)
        log_samples = torch.log(overlap.clamp_min(0.0) * counts.unsqueeze(-1))
        replaced = self._fill_missing(torch.log_softmax(log_samples, -1), math.nan)
        log_samples = torch.where(novel.to(counts.device)[:, None], replaced, self.log_samples)
        return self._copy(log_samples, self._tensors[1])

    @checked
    def reliability(self, targets: Tensor, bins: Count = 15) -> list[ReliabilityBin]:
        """Returns the bars of a reliability diagram, as :func:`flowbnn.metrics.reliability` does.

        Args:
            targets: Class indices or soft labels, as in :meth:`evaluate`.
            bins: Number of bins of the confidence.
        """
        return reliability(self.probabilities, self._check_targets(targets), bins)

    @checked
    def risk_coverage(self, targets: Tensor, by: str = "entropy") -> RiskCoverage:
        """Returns the error rate on the most certain inputs at each coverage, as :func:`flowbnn.metrics.risk_coverage` does.

        Args:
            targets: Class indices ``[B]`` or ``[B, *positions]``, of which -100 is ignored.
            by: Name of the :meth:`uncertainty`.

        >>> prediction = CategoricalPredictive(torch.tensor([[[2.0, 0.0], [1.0, 0.0]]]))
        >>> prediction.risk_coverage(torch.tensor([0, 1])).risk.tolist()
        [0.0, 0.5]
        """
        return risk_coverage_of(self._check_targets(targets), self.labels, self.uncertainty(by))

    @checked
    def evaluate(self, targets: Tensor) -> dict[str, float]:
        """Returns accuracy, NLL, Brier score and expected calibration error with 15 bins, as in :mod:`flowbnn.metrics`.

        Args:
            targets: Class indices ``[B]`` or ``[B, *positions]``, or soft labels ``[B, C]`` or ``[B, *positions, C]``, over which all
                scores are expectations. The scores are means over all positions whose label is not -100.

        Raises:
            FlowBNNError: If the targets do not fit, or if all are ignored.
        """
        targets = self._check_targets(targets)
        nll = self._position_nll(targets)  # in the log domain, where probabilities do not underflow
        if targets.ndim > 1 and not targets.is_floating_point():
            nll = nll[targets != IGNORED]
        return {
            "accuracy": accuracy(self.probabilities, targets),
            "nll": mean_as_float(nll),
            "brier": brier_score(self.probabilities, targets),
            "ece": calibration_error(self.probabilities, targets),
        }

    plot_reliability, plot_risk_coverage = plots.plot_reliability, plots.plot_risk_coverage

    def _check_targets(self, targets: Tensor) -> Tensor:
        *shape, classes = self.log_samples.shape[1:]
        targets = as_binary_labels(targets, shape) if classes == 2 else targets
        return check_classes(targets, shape, classes).to(self.log_samples.device)

    def __repr__(self) -> str:
        _, inputs, *positions, classes = self.log_samples.shape
        text = ""
        if inputs:
            properties = (self.confidence, self.entropy, self.aleatoric, self.epistemic)
            means = [mean_as_float(values) for values in properties]
            text = "; confidence {:.3f}, entropy {:.3f} = aleatoric {:.3f} + epistemic {:.3f}".format(*means)
            if self._sample_counts is not None:
                text = text.replace(",", f" ± {mean_as_float(self.confidence_error):.3f},", 1)
        samples = self._describe_sample_counts()
        places = f", positions={'x'.join(map(str, positions))}" if positions else ""
        return f"CategoricalPredictive(samples={samples}, inputs={inputs}{places}, classes={classes}{text})"


def risk_coverage_of(targets: Tensor, labels: Tensor, uncertainty: Tensor) -> RiskCoverage:
    """Returns the risk-coverage curve of labels at all positions that have a target.

    Args:
        targets: Class indices ``[B]`` or ``[B, *positions]``, of which -100 is ignored.
        labels: Predicted classes in the shape of the targets.
        uncertainty: Uncertainties in the shape of the targets.

    Raises:
        FlowBNNError: If the targets are soft labels.
    """
    check_hard_labels(targets, "risk_coverage")
    scored = targets != IGNORED
    check_any_target(scored)
    return risk_coverage(uncertainty[scored], (labels == targets)[scored])


def entropy_of(log_probabilities: Tensor) -> Tensor:
    """Returns the entropy over the last axis."""
    p = log_probabilities.exp()
    return -torch.where(p > 0, p * log_probabilities, 0.0).sum(-1)
