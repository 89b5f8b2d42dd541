"""Methods that fit posteriors, one file each: ``method.fit(network, loader)`` returns a posterior."""

from flowbnn.methods.base import METHODS, FitOptions, Method, register_method
from flowbnn.methods.calibrators.base import CalibratedPosterior, Calibrator, OutputCalibrator
from flowbnn.methods.calibrators.last_layer import LastLayerRefit
from flowbnn.methods.calibrators.scaling import MatrixScaling, ScaledPosterior, VectorScaling
from flowbnn.methods.calibrators.temperature import Temperature, TemperedPosterior
from flowbnn.methods.damp import DAMP
from flowbnn.methods.dropout import DropoutPosterior, MCDropout
from flowbnn.methods.ensemble import DeepEnsemble, EnsemblePosterior
from flowbnn.methods.gaussian.ivon import IVON
from flowbnn.methods.gaussian.vbll import VBLL, VBLLPosterior
from flowbnn.methods.gaussian.weights import GaussianWeightPosterior
from flowbnn.methods.laplace.laplace import Laplace
from flowbnn.methods.laplace.posterior import LaplacePosterior
from flowbnn.methods.mcmc.hmc import HMC, NUTS
from flowbnn.methods.mcmc.posterior import ChainDiagnostics, ChainPosterior, NoiseChainPosterior
from flowbnn.methods.mcmc.sgld import SGLD, SGLDPosterior
from flowbnn.methods.modes.mode_ensemble import ModeEnsemble, ModePosterior
from flowbnn.methods.node_noise import NodeNoise
from flowbnn.methods.point import MAP, MLE
from flowbnn.methods.swag import SWAG, SWAGPosterior
from flowbnn.methods.variational.bayes_by_backprop import BayesByBackprop
from flowbnn.methods.variational.mnf import MNF, MNFPosterior
from flowbnn.posterior.base import Posterior, load_posterior
from flowbnn.posterior.evaluate import evaluate
from flowbnn.posterior.weights import MemberPosterior, PointPosterior

__all__ = [
    "DAMP",
    "HMC",
    "IVON",
    "MAP",
    "METHODS",
    "MLE",
    "MNF",
    "NUTS",
    "SGLD",
    "SWAG",
    "VBLL",
    "BayesByBackprop",
    "CalibratedPosterior",
    "Calibrator",
    "ChainDiagnostics",
    "ChainPosterior",
    "DeepEnsemble",
    "DropoutPosterior",
    "EnsemblePosterior",
    "FitOptions",
    "GaussianWeightPosterior",
    "Laplace",
    "LaplacePosterior",
    "LastLayerRefit",
    "MCDropout",
    "MNFPosterior",
    "MatrixScaling",
    "MemberPosterior",
    "Method",
    "ModeEnsemble",
    "ModePosterior",
    "NodeNoise",
    "NoiseChainPosterior",
    "OutputCalibrator",
    "PointPosterior",
    "Posterior",
    "SGLDPosterior",
    "SWAGPosterior",
    "ScaledPosterior",
    "Temperature",
    "TemperedPosterior",
    "VBLLPosterior",
    "VectorScaling",
    "evaluate",
    "load_posterior",
    "register_method",
]
