"""Base distributions and flows, as ``torch.distributions``."""

from flowbnn.distributions.bases import (
    Base,
    CircularBase,
    LaplaceBase,
    LogisticBase,
    MixtureBase,
    NormalBase,
    StudentBase,
)
from flowbnn.distributions.discrete import (
    CategoricalBase,
    DiscretizedLogistic,
    DiscretizedLogisticBase,
    OneHotVectors,
)
from flowbnn.distributions.flow import Divergence, Flow, divergence
from flowbnn.distributions.vectors import (
    CircularUniform,
    DiagonalLaplace,
    DiagonalLogistic,
    DiagonalNormal,
    DiagonalStudent,
    NormalMixture,
)

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
