"""Metrics of predictions, as functions of tensors.

Probabilities are ``[B, C]``, averaged over samples, and targets are class indices ``[B]``. Predictions for pixels, tokens or several
labels have further axes, ``[B, *positions, C]`` and ``[B, *positions]``. Scores are then means over all positions, and the label -100
marks positions without a target. Predictions come first, then targets, then options. Every function checks its input, returns a
``float`` or plain Python data, and states its formula, because the same name has different definitions in different papers.

These metrics are not taken from torchmetrics. Its calibration error puts a confidence of exactly 1 into a separate bin, and its
binary calibration error uses the positive class instead of the predicted class. The other metrics take one line each.
"""

from flowbnn.metrics.confusion import confusion_matrix, f1_score, intersection_over_union
from flowbnn.metrics.ranking import RiskCoverage, novelty_aupr, novelty_auroc, risk_coverage
from flowbnn.metrics.scores import (
    ReliabilityBin,
    accuracy,
    brier_score,
    calibration_error,
    calibration_floor,
    interval_coverage,
    negative_log_likelihood,
    reliability,
    root_mean_squared_error,
)

__all__ = [
    "ReliabilityBin",
    "RiskCoverage",
    "accuracy",
    "brier_score",
    "calibration_error",
    "calibration_floor",
    "confusion_matrix",
    "f1_score",
    "intersection_over_union",
    "interval_coverage",
    "negative_log_likelihood",
    "novelty_aupr",
    "novelty_auroc",
    "reliability",
    "risk_coverage",
    "root_mean_squared_error",
]
