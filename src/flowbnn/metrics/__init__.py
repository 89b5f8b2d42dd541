"""How good are predicted probabilities: functions on tensors, whoever made the predictions.

Probabilities are ``[B, C]`` (for a network with samples: their mean), targets are class indices ``[B]``. Every function
checks its input, gives a plain ``float`` (or plain Python data) and states its formula, because the same name means
different numbers in different papers.
"""

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
    "interval_coverage",
    "negative_log_likelihood",
    "novelty_aupr",
    "novelty_auroc",
    "reliability",
    "risk_coverage",
    "root_mean_squared_error",
]
