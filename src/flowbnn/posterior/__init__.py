"""Posteriors, which every fit returns: prediction, sampling, evaluation, saving and loading."""

from flowbnn.posterior.adaptive import Adaptive
from flowbnn.posterior.base import Posterior, Prediction, PredictOptions, load_posterior
from flowbnn.posterior.evaluate import evaluate
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.point import PointPosterior
from flowbnn.posterior.weights import MemberPosterior, WeightPosterior

__all__ = [
    "Adaptive",
    "MemberPosterior",
    "NoisePosterior",
    "PointPosterior",
    "Posterior",
    "PredictOptions",
    "Prediction",
    "WeightPosterior",
    "evaluate",
    "load_posterior",
]
