"""Fast evaluation of chains of planar and LU maps, by the best code for the device (:mod:`flowbnn.kernels.flow_chains`)."""

from flowbnn.kernels.flow_chains import Chain, Group, available, evaluate, evaluate_many
from flowbnn.kernels.reference import ChainShape

__all__ = ["Chain", "ChainShape", "Group", "available", "evaluate", "evaluate_many"]
