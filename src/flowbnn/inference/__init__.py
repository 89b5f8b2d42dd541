"""One file for each method; ``method.fit`` gives a posterior, a posterior predicts."""

from flowbnn.inference.adaptive import Adaptive
from flowbnn.inference.bayes_by_backprop import BayesByBackprop
from flowbnn.inference.chain_posterior import ChainDiagnostics, ChainPosterior, NoiseChainPosterior
from flowbnn.inference.dropout import DropoutPosterior, MCDropout
from flowbnn.inference.ensemble import DeepEnsemble
from flowbnn.inference.ensemble_posterior import EnsemblePosterior
from flowbnn.inference.evaluation import evaluate
from flowbnn.inference.gaussian_weights import GaussianWeightPosterior
from flowbnn.inference.hmc import HMC
from flowbnn.inference.laplace import Laplace
from flowbnn.inference.laplace_posterior import LaplacePosterior
from flowbnn.inference.loading import load_posterior
from flowbnn.inference.map import MAP, MLE
from flowbnn.inference.members import MemberPosterior
from flowbnn.inference.method import METHODS, Method, make_method, register_method
from flowbnn.inference.mnf import MNF, MNFPosterior
from flowbnn.inference.node_noise import NoisePosterior, fit
from flowbnn.inference.node_noise_method import NodeNoise
from flowbnn.inference.nuts import NUTS
from flowbnn.inference.point import fit_point
from flowbnn.inference.point_posterior import PointPosterior
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.sgld import SGLD, SGLDPosterior
from flowbnn.inference.swag import SWAG
from flowbnn.inference.swag_posterior import SWAGPosterior
from flowbnn.inference.temperature import Temperature, temper
from flowbnn.inference.temperature_posterior import TemperedPosterior
from flowbnn.inference.weights import WeightPosterior

__all__ = [
    "HMC",
    "MAP",
    "METHODS",
    "MLE",
    "MNF",
    "NUTS",
    "SGLD",
    "SWAG",
    "Adaptive",
    "BayesByBackprop",
    "ChainDiagnostics",
    "ChainPosterior",
    "DeepEnsemble",
    "DropoutPosterior",
    "EnsemblePosterior",
    "GaussianWeightPosterior",
    "Laplace",
    "LaplacePosterior",
    "MCDropout",
    "MNFPosterior",
    "MemberPosterior",
    "Method",
    "NodeNoise",
    "NoiseChainPosterior",
    "NoisePosterior",
    "PointPosterior",
    "Posterior",
    "SGLDPosterior",
    "SWAGPosterior",
    "Temperature",
    "TemperedPosterior",
    "WeightPosterior",
    "evaluate",
    "fit",
    "fit_point",
    "load_posterior",
    "make_method",
    "register_method",
    "temper",
]
