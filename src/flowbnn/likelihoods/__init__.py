"""Observation models: the distribution of a target given the outputs of a network.

A likelihood has ``log_prob(outputs, targets)``, the log-likelihood of each example, and ``predictive(outputs)``, the predictive
distribution of samples of outputs ``[S, B, ...]``. To write one, subclass :class:`Likelihood` and define these two methods.
"""

from flowbnn.likelihoods.base import Likelihood
from flowbnn.likelihoods.classes import Bernoulli, Categorical
from flowbnn.likelihoods.densities import ConditionalDensity, Flow, Mixture
from flowbnn.likelihoods.factory import make_likelihood
from flowbnn.likelihoods.regression import (
    Gaussian,
    RealLikelihood,
    append_log_variance,
    learns_noise,
    log_variance,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "ConditionalDensity",
    "Flow",
    "Gaussian",
    "Likelihood",
    "Mixture",
    "RealLikelihood",
    "append_log_variance",
    "learns_noise",
    "log_variance",
    "make_likelihood",
]
