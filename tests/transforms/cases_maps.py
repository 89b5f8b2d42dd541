"""Cases: monotone maps, linear maps, normalizations and couplings."""

import torch
from case import Case
from torch import Tensor

from flowbnn.transforms.base import Transform
from flowbnn.transforms.coupling import AdditiveCoupling, AffineCoupling, GlowStep
from flowbnn.transforms.elementwise import ActNorm, BatchNorm, Exp, Logit, Sigmoid, Softplus, Tanh
from flowbnn.transforms.linear import BlockTriangular, LULinear, Permutation, Reverse, Shuffle

__all__ = ["CASES"]

COUPLED = "a coupling needs at least 2 dimensions"
# Hidden layers, which get no gradient through the zero last layer until the second step.
HIDDEN = ("layers.0.", "layers.2.")


def with_data(transform: Transform, dim: int) -> Transform:
    """Returns a normalization after batches of mean 2 and standard deviation 3, in evaluation mode."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(5):
        transform(2 + 3 * torch.randn(256, dim, generator=generator))
    return transform.eval()


def between(value: Tensor) -> Tensor:
    return torch.sigmoid(value)


def tanh_range(value: Tensor) -> Tensor:
    return torch.tanh(value)


def half_line(value: Tensor) -> Tensor:
    return torch.nn.functional.softplus(value)


def cyclic(dim: int) -> Permutation:
    return Permutation([*range(1, dim), 0])


def odd_mask(dim: int) -> list[bool]:
    return [index in (0, dim - 1) for index in range(dim)] if dim > 2 else [True, False]


CASES: list[Case] = [
    Case("tanh", Tanh, lambda dim: Tanh(), to_range=tanh_range),
    Case("sigmoid", Sigmoid, lambda dim: Sigmoid(), to_range=between),
    Case("sigmoid with a margin", Sigmoid, lambda dim: Sigmoid(margin=0.05), to_range=between),
    Case(
        "logit",
        Logit,
        lambda dim: Logit(),
        to_domain=between,
        quadrature=(),
        no_quadrature="starts in (0, 1)",
    ),
    Case("softplus", Softplus, lambda dim: Softplus(), to_range=half_line),
    Case("exp", Exp, lambda dim: Exp(), to_range=half_line),
    Case("lu-linear", LULinear, LULinear),
    Case("lu-linear-permuted", LULinear, lambda dim: LULinear(dim, bias=True, permute=True), dim=5),
    Case("block-triangular", BlockTriangular, lambda dim: BlockTriangular((dim,))),
    *(
        Case(
            f"block-triangular-{coupling}",
            BlockTriangular,
            lambda dim, coupling=coupling: BlockTriangular(
                (1, 1) if dim == 2 else (2, dim - 3, 1), coupling, rank=2, loc=1.0, scale=0.5
            ),
            dim=5,
            quadrature=(2,),
            no_quadrature="one dimension has no two blocks",
        )
        for coupling in ("none", "chain", "low-rank")
    ),
    Case("permutation", Permutation, cyclic),
    Case("reverse", Reverse, Reverse),
    Case("shuffle", Shuffle, Shuffle, dim=5),
    Case("actnorm", ActNorm, lambda dim: with_data(ActNorm(dim), dim)),
    Case("batch-norm", BatchNorm, lambda dim: with_data(BatchNorm(dim), dim)),
    Case(
        "additive-coupling",
        AdditiveCoupling,
        lambda dim: AdditiveCoupling(dim, hidden=(16, 16)),
        quadrature=(2,),
        no_quadrature=COUPLED,
        zero_gradient_at_start=HIDDEN,
    ),
    Case(
        "affine-coupling",
        AffineCoupling,
        lambda dim: AffineCoupling(dim, mask="alternating", hidden=(16, 16)),
        quadrature=(2,),
        no_quadrature=COUPLED,
        zero_gradient_at_start=HIDDEN,
    ),
    Case(
        "affine-coupling-custom",
        AffineCoupling,
        lambda dim: AffineCoupling(
            dim, mask=odd_mask(dim), flip=True, hidden=(16, 16), activation=torch.nn.Tanh
        ),
        dim=5,
        quadrature=(2,),
        no_quadrature=COUPLED,
        zero_gradient_at_start=HIDDEN,
    ),
    Case(
        "glow-step",
        GlowStep,
        lambda dim: with_data(GlowStep(dim, hidden=(16, 16), data_init=True), dim),
        dim=5,
        quadrature=(2,),
        no_quadrature=COUPLED,
        spread=0.3,  # at 0.5 the error of its float32 round trip exceeds 1e-5 for some seeds
        zero_gradient_at_start=HIDDEN,
    ),
]
