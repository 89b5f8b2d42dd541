"""Observation models: the distribution of a target given the outputs of a network.

A likelihood gives ``log_prob(outputs, targets)`` for each example and, from samples of outputs ``[S, B, ...]``, the predictive
distribution. To write one, subclass :class:`Likelihood` and define these two; the other methods have defaults.
"""

from flowbnn.likelihoods.base import Likelihood
from flowbnn.likelihoods.classes import Bernoulli, Categorical
from flowbnn.likelihoods.factory import make_likelihood
from flowbnn.likelihoods.regression import Gaussian, learns_noise, log_variance, with_level

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "learns_noise",
    "log_variance",
    "make_likelihood",
    "with_level",
]
