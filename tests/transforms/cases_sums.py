"""Cases: the affine map, compositions and inverses, and planar, radial and Sylvester flows."""

from case import Case

from flowbnn.transforms.compose import Compose, Inverse
from flowbnn.transforms.elementwise import Affine
from flowbnn.transforms.planar import Planar, PlanarLU, Radial, Sylvester

__all__ = ["CASES"]

CASES: list[Case] = [
    Case("affine", Affine, Affine),
    Case("compose", Compose, lambda dim: Compose(Affine(dim), Planar(dim), Radial(dim))),
    Case("compose-empty", Compose, lambda dim: Compose()),
    Case("inverse", Inverse, lambda dim: Inverse(Affine(dim))),
    Case("inverse-planar", Inverse, lambda dim: Inverse(Planar(dim))),
    Case("planar", Planar, Planar),
    Case("planar-lu", PlanarLU, lambda dim: PlanarLU(dim, [("planar", 2), ("lu", 2), ("planar", 1)])),
    Case("planar-lu-planar", PlanarLU, lambda dim: PlanarLU(dim, [("planar", 3)])),
    Case("planar-lu-linear", PlanarLU, lambda dim: PlanarLU(dim, [("lu", 1)])),
    Case("planar-lu-empty", PlanarLU, lambda dim: PlanarLU(dim, [("planar", 0)])),
    Case("radial", Radial, Radial),
    Case("sylvester-orthogonal", Sylvester, lambda dim: Sylvester(dim, "orthogonal", max(1, dim - 1))),
    Case("sylvester-householder", Sylvester, lambda dim: Sylvester(dim, "householder", 2)),
    Case("sylvester-triangular", Sylvester, lambda dim: Sylvester(dim, "identity")),
    Case("sylvester-reversed", Sylvester, lambda dim: Sylvester(dim, "reversal")),
]
