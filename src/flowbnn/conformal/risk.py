r"""Control of risks other than the coverage: missed labels of multi-label sets, and errors of accepted predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from flowbnn.conformal.conformalize import class_labels, keep_samples, predict_data
from flowbnn.conformal.thresholds import (
    exact,
    least_examples,
    loss_threshold,
    no_threshold,
    too_few_examples,
)
from flowbnn.errors import FlowBNNError, describe_value, requirement_error
from flowbnn.metrics.checks import IGNORED
from flowbnn.options import Probability, checked
from flowbnn.posterior import Posterior
from flowbnn.predictive import Decision


@dataclass(frozen=True)
class LabelSets:
    """Sets of labels with a bounded false-negative rate, made by :func:`control_risk`.

    Args:
        posterior: Posterior with several labels or a mask of pixels (``fb.likelihoods.Bernoulli``).
        threshold: Smallest probability of a label in the set.
        level: Largest expected fraction of missed labels.
        options: Options of ``posterior.predict``.
    """

    posterior: Posterior
    threshold: float
    level: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def predict_set(self, inputs: Any) -> Tensor:
        """Returns the labels of each input as booleans, ``[B, L]`` or ``[B, *positions]``.

        Args:
            inputs: Inputs, as in ``posterior.predict``.
        """
        log_probabilities = self.posterior.predict(inputs, **self.options).log_probabilities
        return log_probabilities[..., 1].double().exp() >= self.threshold

    def evaluate(self, data: Any) -> dict[str, float]:
        """Returns the false-negative rate and the mean number of labels in a set, on labelled data.

        Args:
            data: Loader, ``Dataset`` or pair of inputs and targets.
        """
        predictive, targets = predict_data(self.posterior, data, self.options)
        sets = predictive.log_probabilities[..., 1].double().exp() >= self.threshold
        positive = targets.to(sets.device) == 1
        missed = (positive & ~sets).flatten(1).sum(-1) / positive.flatten(1).sum(-1).clamp(min=1)
        size = sets.flatten(1).sum(-1).double().mean()
        return {"false_negative_rate": float(missed.double().mean()), "size": float(size)}


@dataclass(frozen=True)
class SelectiveClassifier:
    """Classifier that abstains, whose accepted predictions have a bounded error rate, made by :func:`control_risk`.

    Args:
        posterior: Posterior of a classifier.
        threshold: Largest predicted risk, ``1 - confidence``, of an accepted prediction.
        level: Largest error rate of accepted predictions.
        confidence: Probability, over held-out data, that the error rate is at most the level.
        options: Options of ``posterior.predict``.
    """

    posterior: Posterior
    threshold: float
    level: float
    confidence: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def decide(self, inputs: Any) -> Decision:
        """Returns labels ``[B]``, with -1 for inputs that are not accepted, and a mask of these.

        Args:
            inputs: Inputs, as in ``posterior.predict``.
        """
        labels, risk = _labels_and_risk(self.posterior.predict(inputs, **self.options))
        return Decision.make(labels, risk > self.threshold)

    def evaluate(self, data: Any) -> dict[str, float]:
        """Returns the error rate of accepted predictions, and the fraction of accepted ones, on labelled data.

        Args:
            data: Loader, ``Dataset`` or pair of inputs and targets.
        """
        predictive, targets = predict_data(self.posterior, data, self.options)
        labels, risk = _labels_and_risk(predictive)
        accepted = risk <= self.threshold
        wrong = (labels != targets.to(labels.device)) & accepted
        rate = float(wrong.sum() / accepted.sum()) if bool(accepted.any()) else 0.0
        return {"error": rate, "accepted": float(accepted.double().mean())}


@checked
def control_risk(
    posterior: Posterior,
    held_out: Any,
    risk: Literal["false-negative-rate", "selective-error"],
    level: Probability = 0.1,
    *,
    confidence: Probability = 0.9,
    seed: int = 0,
    **options: Any,
) -> Any:
    r"""Returns decisions whose risk is at most a level, by a threshold from held-out data.

    * ``"false-negative-rate"``: sets of labels, for posteriors with several labels or a mask of pixels. The set has all labels of
      probability :math:`1 - \hat\lambda` or more. The expected fraction of true labels that are missed is at most the level, by
      conformal risk control ([Angelopoulos 2022](https://arxiv.org/abs/2208.02814)).
    * ``"selective-error"``: labels, or -1 if the predicted risk ``1 - confidence`` is above a threshold. With probability
      ``confidence`` over held-out data, the error rate of accepted predictions is at most the level. A binomial test on all data
      decides first whether all predictions can be accepted. Otherwise, half of the data order 50 thresholds, and the other half tests
      them in this order, until one fails ([Angelopoulos 2021](https://arxiv.org/abs/2110.01052)).

    Args:
        posterior: Posterior of any method.
        held_out: Data that neither the network nor its calibration has seen: a loader, ``Dataset`` or pair of inputs and targets.
        risk: Kind of risk.
        level: Largest risk.
        confidence: Probability that the selective error is at most the level.
        seed: Seed of the sampled networks and of the split of held-out data.
        options: Other options of ``posterior.predict``, which predictions of the result use too.

    Returns:
        :class:`LabelSets` with ``predict_set``, or a :class:`SelectiveClassifier` with ``decide``.

    Raises:
        FlowBNNError: If there are too few held-out examples, if no threshold has a small enough risk, or if the risk is not defined
            for this posterior.

    >>> from flowbnn.likelihoods import Bernoulli
    >>> from flowbnn.posterior import PointPosterior
    >>> logits = 3.0 * torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> posterior = PointPosterior(torch.nn.Identity(), Bernoulli())
    >>> labels = torch.bernoulli(logits.sigmoid(), generator=torch.Generator().manual_seed(1))
    >>> sets = control_risk(posterior, (logits, labels), "false-negative-rate", level=0.1)
    >>> sets.evaluate((logits, labels))["false_negative_rate"] <= 0.1
    True
    """
    options = {"keep_samples": keep_samples(posterior), "seed": seed, **options}
    predictive, targets = predict_data(posterior, held_out, options)
    positions = hasattr(predictive, "log_probabilities") and predictive.log_probabilities.ndim > 2
    if risk == "false-negative-rate":
        if not positions or predictive.log_probabilities.shape[-1] != 2:
            raise _unsupported(risk, "several binary labels", predictive)
        threshold = _false_negative_threshold(predictive.log_probabilities, targets, level)
        return LabelSets(posterior, threshold, level, options)
    if positions or not hasattr(predictive, "log_probabilities"):
        raise _unsupported(risk, "single labels", predictive)
    labels, uncertainty = _labels_and_risk(predictive)
    wrong = labels != class_labels(targets).to(labels.device)
    threshold = _selective_threshold(uncertainty, wrong, level, 1.0 - confidence, seed)
    return SelectiveClassifier(posterior, threshold, level, confidence, options)


def _unsupported(risk: str, requirement: str, predictive: Any) -> FlowBNNError:
    """Returns the error about predictions that have no risk of a kind."""
    return requirement_error(f"risk='{risk}'", requirement, describe_value(predictive), argument="risk")


def _labels_and_risk(predictive: Any) -> tuple[Tensor, Tensor]:
    """Returns the predicted labels and their probabilities of being wrong, ``[B]``."""
    top = predictive.log_probabilities.double().max(-1)
    return top.indices, -torch.expm1(top.values)


def _false_negative_threshold(log_probabilities: Tensor, targets: Tensor, level: float) -> float:
    """Returns the smallest probability of labels in a set, for predictions ``[N, *positions, 2]``."""
    probabilities, labels = log_probabilities[..., 1].double().exp(), targets.to(log_probabilities.device)
    number = int((labels != IGNORED).flatten(1).any(-1).sum())
    alpha = exact(level)
    if number < least_examples(alpha):
        raise too_few_examples("level", level, number, alpha)
    positive = labels == 1
    counts = positive.flatten(1).sum(-1).clamp(min=1).double().view(-1, *(1,) * (labels.ndim - 1))
    weights = (1.0 / counts).expand(labels.shape)[positive]
    return -loss_threshold(-probabilities[positive], weights, number, alpha)


def _selective_threshold(uncertainty: Tensor, wrong: Tensor, level: float, delta: float, seed: int) -> float:
    """Returns the largest uncertainty of accepted predictions.

    Args:
        uncertainty: Uncertainties ``[N]``, at most 1.
        wrong: True for wrong predictions, ``[N]``.
        level: Largest error rate.
        delta: Probability that the error rate is larger.
        seed: Seed of the split into halves.

    Raises:
        FlowBNNError: If no threshold has a small enough error rate.
    """
    from scipy.stats import binom  # its import takes longer than all of flowbnn

    # accepting all needs no order of thresholds, so all data test it; simulations lose little with a fifth of the probability
    all_delta = 0.2 * delta
    if binom.cdf(int(wrong.sum()), len(wrong), level) <= all_delta:
        return 1.0
    order = torch.randperm(len(wrong), generator=torch.Generator().manual_seed(seed)).to(wrong.device)
    tuning, testing = order[: len(order) // 2], order[len(order) // 2 :]
    ordered = uncertainty[tuning].sort().values
    # 50 thresholds, at quantiles of the tuning data
    places = torch.linspace(0, len(ordered) - 1, 50, device=wrong.device).round().long()
    candidates = ordered[places].unique() if len(ordered) else ordered

    def p_values(rows: Tensor) -> list[float]:
        """Returns the probability of so few errors among accepted predictions, if the error rate is the level."""
        accepted = uncertainty[rows] <= candidates.unsqueeze(-1)
        errors = (accepted & wrong[rows]).sum(-1)
        return binom.cdf(errors.cpu().numpy(), accepted.sum(-1).cpu().numpy(), level).tolist()

    accepted_thresholds = []
    tests = p_values(testing)
    for index in sorted(range(len(candidates)), key=p_values(tuning).__getitem__):
        if tests[index] > delta - all_delta:
            break
        accepted_thresholds.append(float(candidates[index]))
    if not accepted_thresholds:
        raise no_threshold(level, "increase level, or add data", argument="level")
    return max(accepted_thresholds)
