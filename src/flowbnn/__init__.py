"""flowbnn: a trained PyTorch network becomes a Bayesian one by noise drawn from learned normalizing flows.

>>> import torch, flowbnn as fb
>>> network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
>>> bayesian = fb.to_stochastic(network, {"0": fb.NormalPlanar(length=2), "*": fb.NormalAffine()})
>>> bayesian(torch.ones(5, 2)).shape
torch.Size([5, 3])
"""

from flowbnn.convert import describe, to_deterministic, to_stochastic
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.inference import Adaptive, NoisePosterior, PointPosterior, evaluate, fit, fit_point
from flowbnn.layers import (
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
    noise,
    parameter_groups,
    unfreeze,
)
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian
from flowbnn.training import EarlyStop

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "Bernoulli",
    "Categorical",
    "Dropout",
    "EarlyStop",
    "FlowBNNError",
    "FlowBNNWarning",
    "FlowNoise",
    "Gaussian",
    "NoisePosterior",
    "NormalAffine",
    "NormalCoupling",
    "NormalGlow",
    "NormalInvConv",
    "NormalPlanar",
    "NormalRadial",
    "NormalSylvester",
    "PointPosterior",
    "describe",
    "evaluate",
    "fit",
    "fit_point",
    "freeze",
    "hold_noise",
    "noise",
    "parameter_groups",
    "to_deterministic",
    "to_stochastic",
    "unfreeze",
]
