"""Posteriors, which every fit returns: prediction, sampling, evaluation, saving and loading."""

from flowbnn.posterior.adaptive import Adaptive
from flowbnn.posterior.base import Posterior, Prediction, PredictOptions, load_posterior
from flowbnn.posterior.evaluate import evaluate, novelty_scores
from flowbnn.posterior.files import read_card
from flowbnn.posterior.gated import GatedPosterior, gated
from flowbnn.posterior.mixture import MixturePosterior
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.weights import MemberPosterior, PointPosterior, WeightPosterior

__all__ = [
    "Adaptive",
    "GatedPosterior",
    "MemberPosterior",
    "MixturePosterior",
    "NoisePosterior",
    "PointPosterior",
    "Posterior",
    "PredictOptions",
    "Prediction",
    "WeightPosterior",
    "evaluate",
    "gated",
    "load_posterior",
    "novelty_scores",
    "read_card",
]
