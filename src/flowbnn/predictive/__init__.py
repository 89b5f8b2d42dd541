r"""What a network with samples predicts, and how sure it is.

A :class:`Predictive` is made from a tensor of samples, samples first ``[S, B, ...]``, whoever drew them: flow noise, dropout,
an ensemble, HMC. All its numbers are those of the equal mixture of the S sampled predictions

.. math:: p(y \mid x) = \frac1S \sum_{s=1}^S p(y \mid x, z_s) ,

so means over samples divide by S, not by S - 1.
"""

from flowbnn.predictive.base import Predictive
from flowbnn.predictive.categorical import ABSTAIN, CategoricalPredictive
from flowbnn.predictive.gaussian import Decision, GaussianPredictive, Interval

__all__ = ["ABSTAIN", "CategoricalPredictive", "Decision", "GaussianPredictive", "Interval", "Predictive"]
