"""Observation models: the distribution of a target given the outputs of a network.

A likelihood has ``log_prob(outputs, targets)``, the log-likelihood of each example, and ``predictive(outputs)``, the predictive
distribution of samples of outputs ``[S, B, ...]``. To write one, subclass :class:`Likelihood` and define these two methods.
"""

from flowbnn.likelihoods.base import Likelihood
from flowbnn.likelihoods.classes import Bernoulli, Categorical
from flowbnn.likelihoods.counts import CountLikelihood, NegativeBinomial, Poisson
from flowbnn.likelihoods.densities import ConditionalDensity, Flow, Mixture
from flowbnn.likelihoods.factory import make_likelihood
from flowbnn.likelihoods.heads import Heads
from flowbnn.likelihoods.quantiles import Quantiles
from flowbnn.likelihoods.regression import (
    Gaussian,
    RealLikelihood,
    append_log_variance,
    learns_noise,
    log_variance,
)
from flowbnn.likelihoods.survival import Survival

__all__ = [
    "Bernoulli",
    "Categorical",
    "ConditionalDensity",
    "CountLikelihood",
    "Flow",
    "Gaussian",
    "Heads",
    "Likelihood",
    "Mixture",
    "NegativeBinomial",
    "Poisson",
    "Quantiles",
    "RealLikelihood",
    "Survival",
    "append_log_variance",
    "learns_noise",
    "log_variance",
    "make_likelihood",
]
