"""Base distributions and flows, as ``torch.distributions``."""

from flowbnn.distributions.bases import (
    Base,
    CircularBase,
    CircularUniform,
    DiagonalLaplace,
    DiagonalLogistic,
    DiagonalNormal,
    DiagonalStudent,
    LaplaceBase,
    LogisticBase,
    MixtureBase,
    NormalBase,
    NormalMixture,
    StudentBase,
)
from flowbnn.distributions.discrete import (
    CategoricalBase,
    DiscretizedLogistic,
    DiscretizedLogisticBase,
    OneHotVectors,
)
from flowbnn.distributions.flow import Divergence, Flow, divergence

__all__ = [
    "Base",
    "CategoricalBase",
    "CircularBase",
    "CircularUniform",
    "DiagonalLaplace",
    "DiagonalLogistic",
    "DiagonalNormal",
    "DiagonalStudent",
    "DiscretizedLogistic",
    "DiscretizedLogisticBase",
    "Divergence",
    "Flow",
    "LaplaceBase",
    "LogisticBase",
    "MixtureBase",
    "NormalBase",
    "NormalMixture",
    "OneHotVectors",
    "StudentBase",
    "divergence",
]
