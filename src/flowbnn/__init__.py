"""flowbnn: a trained PyTorch network becomes a Bayesian one by noise drawn from learned normalizing flows.

>>> import torch, flowbnn as fb
>>> network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
>>> bayesian = fb.to_stochastic(network, {"0": fb.NormalPlanar(length=2), "*": fb.NormalAffine()})
>>> bayesian(torch.ones(5, 2)).shape
torch.Size([5, 3])
"""

from flowbnn.compare import compare
from flowbnn.convert import describe, to_deterministic, to_stochastic
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian
from flowbnn.methods import (
    HMC,
    MAP,
    MLE,
    MNF,
    NUTS,
    SGLD,
    SWAG,
    Adaptive,
    BayesByBackprop,
    DeepEnsemble,
    Laplace,
    MCDropout,
    NodeNoise,
    PointPosterior,
    Temperature,
    evaluate,
    fit,
    load_posterior,
)
from flowbnn.noise import (
    Dropout,
    FlowNoise,
    NormalAffine,
    NormalCoupling,
    NormalGlow,
    NormalInvConv,
    NormalPlanar,
    NormalRadial,
    NormalSylvester,
    freeze,
    hold_noise,
    noise_mode,
    parameter_groups,
    unfreeze,
)
from flowbnn.posterior import NoisePosterior
from flowbnn.training import EarlyStop

__version__ = "0.1.0"

__all__ = [
    "HMC",
    "MAP",
    "MLE",
    "MNF",
    "NUTS",
    "SGLD",
    "SWAG",
    "Adaptive",
    "BayesByBackprop",
    "Bernoulli",
    "Categorical",
    "DeepEnsemble",
    "Dropout",
    "EarlyStop",
    "FlowBNNError",
    "FlowBNNWarning",
    "FlowNoise",
    "Gaussian",
    "Laplace",
    "MCDropout",
    "NodeNoise",
    "NoisePosterior",
    "NormalAffine",
    "NormalCoupling",
    "NormalGlow",
    "NormalInvConv",
    "NormalPlanar",
    "NormalRadial",
    "NormalSylvester",
    "PointPosterior",
    "Temperature",
    "compare",
    "describe",
    "evaluate",
    "fit",
    "freeze",
    "hold_noise",
    "load_posterior",
    "noise_mode",
    "parameter_groups",
    "to_deterministic",
    "to_stochastic",
    "unfreeze",
]
