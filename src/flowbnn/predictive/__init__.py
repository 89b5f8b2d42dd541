r"""Predictive distributions of networks with samples, and their uncertainties.

A :class:`Predictive` is made from a tensor ``[S, B, ...]`` of S samples for B inputs. They may come from flow noise, dropout, an
ensemble or HMC. All its quantities belong to the equally weighted mixture of the S sampled predictions,

.. math:: p(y \mid x) = \frac1S \sum_{s=1}^S p(y \mid x, z_s) ,

so means over samples divide by S, not by S - 1.
"""

from flowbnn.predictive.base import ABSTAIN, Decision, Predictive
from flowbnn.predictive.categorical import CategoricalPredictive
from flowbnn.predictive.continuous import ContinuousPredictive, Interval
from flowbnn.predictive.counts import CountPredictive
from flowbnn.predictive.flow import FlowPredictive
from flowbnn.predictive.gaussian import GaussianPredictive
from flowbnn.predictive.heads import HeadsPredictive
from flowbnn.predictive.mixture import MixturePredictive
from flowbnn.predictive.quantiles import QuantilePredictive
from flowbnn.predictive.summary import PredictionSummary, SummaryCollector, summarize
from flowbnn.predictive.survival import LogNormalPredictive, SurvivalPredictive, WeibullPredictive

__all__ = [
    "ABSTAIN",
    "CategoricalPredictive",
    "ContinuousPredictive",
    "CountPredictive",
    "Decision",
    "FlowPredictive",
    "GaussianPredictive",
    "HeadsPredictive",
    "Interval",
    "LogNormalPredictive",
    "MixturePredictive",
    "PredictionSummary",
    "Predictive",
    "QuantilePredictive",
    "SummaryCollector",
    "SurvivalPredictive",
    "WeibullPredictive",
    "summarize",
]
