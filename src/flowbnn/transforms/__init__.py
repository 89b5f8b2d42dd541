"""The zoo of transforms: one file for each family, all under the contract of :mod:`flowbnn.transforms.base`."""

from flowbnn.transforms.affine import Affine
from flowbnn.transforms.base import Transform
from flowbnn.transforms.compose import Compose, Inverse
from flowbnn.transforms.coupling import AdditiveCoupling, AffineCoupling
from flowbnn.transforms.elementwise import Exp, LeakyReLU, Logit, Sigmoid, Softplus, Tanh
from flowbnn.transforms.glow import GlowStep
from flowbnn.transforms.linear import LULinear
from flowbnn.transforms.normalization import ActNorm, BatchNorm
from flowbnn.transforms.permutation import Permutation, Reverse, Shuffle
from flowbnn.transforms.planar import Planar, PlanarLU
from flowbnn.transforms.radial import Radial
from flowbnn.transforms.sylvester import HouseholderSylvester, OrthogonalSylvester, TriangularSylvester
from flowbnn.transforms.triangular import BlockTriangular

__all__ = [
    "ActNorm",
    "AdditiveCoupling",
    "Affine",
    "AffineCoupling",
    "BatchNorm",
    "BlockTriangular",
    "Compose",
    "Exp",
    "GlowStep",
    "HouseholderSylvester",
    "Inverse",
    "LULinear",
    "LeakyReLU",
    "Logit",
    "OrthogonalSylvester",
    "Permutation",
    "Planar",
    "PlanarLU",
    "Radial",
    "Reverse",
    "Shuffle",
    "Sigmoid",
    "Softplus",
    "Tanh",
    "Transform",
    "TriangularSylvester",
]
