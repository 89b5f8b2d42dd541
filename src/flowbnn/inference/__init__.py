"""One file for each method; fit gives a posterior, a posterior predicts."""

from flowbnn.inference.adaptive import Adaptive
from flowbnn.inference.evaluation import evaluate
from flowbnn.inference.node_noise import NoisePosterior, fit
from flowbnn.inference.point import fit_point
from flowbnn.inference.posterior import PointPosterior, Posterior

__all__ = ["Adaptive", "NoisePosterior", "PointPosterior", "Posterior", "evaluate", "fit", "fit_point"]
