"""The zoo of transforms: one file for each family, all under the contract of :mod:`flowbnn.transforms.base`."""

from flowbnn.transforms.base import Transform
from flowbnn.transforms.compose import Amortized, Compose, Inverse
from flowbnn.transforms.continuous import NeuralODE, flow_matching_loss
from flowbnn.transforms.coupling import AdditiveCoupling, AffineCoupling, Autoregressive, Coupling, GlowStep
from flowbnn.transforms.discrete import Argmax, Integers, IntegerShiftMap, ModularMap, OneHot
from flowbnn.transforms.elementwise import ActNorm, Affine, BatchNorm, Exp, Logit, Sigmoid, Softplus, Tanh
from flowbnn.transforms.images import ChannelsFirst, Checkerboard, MultiScale, Reshape, Squeeze
from flowbnn.transforms.linear import BlockTriangular, Householder, LULinear, Permutation, Reverse, Shuffle
from flowbnn.transforms.planar import Planar, PlanarLU, Radial, Sylvester
from flowbnn.transforms.residual import Residual
from flowbnn.transforms.splines import CircularSplineMap, SplineMap
from flowbnn.transforms.surjective import AbsoluteValue, Augment, Dequantization, MaxPool, Slice, VAELayer
from flowbnn.transforms.univariate import (
    AffineMap,
    LogisticMixtureMap,
    ShiftMap,
    SigmoidalMap,
    Univariate,
)

__all__ = [
    "AbsoluteValue",
    "ActNorm",
    "AdditiveCoupling",
    "Affine",
    "AffineCoupling",
    "AffineMap",
    "Amortized",
    "Argmax",
    "Augment",
    "Autoregressive",
    "BatchNorm",
    "BlockTriangular",
    "ChannelsFirst",
    "Checkerboard",
    "CircularSplineMap",
    "Compose",
    "Coupling",
    "Dequantization",
    "Exp",
    "GlowStep",
    "Householder",
    "IntegerShiftMap",
    "Integers",
    "Inverse",
    "LULinear",
    "LogisticMixtureMap",
    "Logit",
    "MaxPool",
    "ModularMap",
    "MultiScale",
    "NeuralODE",
    "OneHot",
    "Permutation",
    "Planar",
    "PlanarLU",
    "Radial",
    "Reshape",
    "Residual",
    "Reverse",
    "ShiftMap",
    "Shuffle",
    "Sigmoid",
    "SigmoidalMap",
    "Slice",
    "Softplus",
    "SplineMap",
    "Squeeze",
    "Sylvester",
    "Tanh",
    "Transform",
    "Univariate",
    "VAELayer",
    "flow_matching_loss",
]
