"""Distribution-free prediction sets, prediction intervals and risk control, for any posterior.

>>> import torch
>>> from flowbnn.likelihoods import Gaussian
>>> from flowbnn.posterior import PointPosterior
>>> generator = torch.Generator().manual_seed(0)
>>> inputs = torch.randn(199, 1, generator=generator)
>>> targets = inputs + 0.5 * torch.randn(199, 1, generator=generator)
>>> posterior = PointPosterior(torch.nn.Identity(), Gaussian(noise=0.1))  # overconfident
>>> intervals = conformalize(posterior, (inputs, targets), coverage=0.9, score="cqr")
>>> low, high = intervals.predict_interval(torch.zeros(1, 1))
>>> 1.4 < float(high - low) < 1.9  # 2 x 1.645 x 0.5
True
"""

from flowbnn.conformal.class_scores import APS, NLL, RAPS, ClassScore
from flowbnn.conformal.conformalize import ConformalClassifier, ConformalRegressor, conformalize
from flowbnn.conformal.interval_scores import (
    CQR,
    AbsoluteResidual,
    IntervalScore,
    NegativeLogDensity,
    NormalizedResidual,
)
from flowbnn.conformal.risk import LabelSets, SelectiveClassifier, control_risk
from flowbnn.conformal.thresholds import conformal_quantile, risk_threshold

__all__ = [
    "APS",
    "CQR",
    "NLL",
    "RAPS",
    "AbsoluteResidual",
    "ClassScore",
    "ConformalClassifier",
    "ConformalRegressor",
    "IntervalScore",
    "LabelSets",
    "NegativeLogDensity",
    "NormalizedResidual",
    "SelectiveClassifier",
    "conformal_quantile",
    "conformalize",
    "control_risk",
    "risk_threshold",
]
