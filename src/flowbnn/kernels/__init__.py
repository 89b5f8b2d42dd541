"""Kernels for chains of planar and LU maps (:mod:`flowbnn.kernels.flow_chains`), and for the moments of Gaussians
(:mod:`flowbnn.kernels.gaussian_moments`).
"""

from flowbnn.kernels.flow_chains import Chain, Group, available, evaluate, evaluate_many
from flowbnn.kernels.gaussian_moments import HALF_LOG_2PI, MomentsFunction, moments_available
from flowbnn.kernels.reference import ChainShape

__all__ = [
    "HALF_LOG_2PI",
    "Chain",
    "ChainShape",
    "Group",
    "MomentsFunction",
    "available",
    "evaluate",
    "evaluate_many",
    "moments_available",
]
