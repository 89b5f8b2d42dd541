"""The step of flow of Glow."""

from typing import Any

import torch

from flowbnn.options import checked
from flowbnn.transforms.compose import Compose
from flowbnn.transforms.coupling import AffineCoupling, AtLeastTwo
from flowbnn.transforms.linear import LULinear
from flowbnn.transforms.normalization import ActNorm


class GlowStep(Compose):
    r"""ActNorm, then an invertible linear map, then an affine coupling (Kingma & Dhariwal 2018, figure 2).

    On the last axis of ``(B, H, W, C)`` the linear map is the invertible 1x1 convolution. Every scale in it is bounded
    softly and it starts next to the identity, so that neither direction blows up however long it trains.

    Args:
        dim: length of the vectors, at least 2.
        permute: draw a random permutation for the linear map, which mixes the halves of stacked steps sooner.
        data_start: normalise the first training batch as Glow does when it learns the density of data. By default
            ActNorm starts at the identity, because noise that multiplies a trained network must keep its mean of one.
        generator: where the draws of the linear map come from; torch's own by default.
        coupling: ``hidden``, ``flip``, ``net`` and so on, as in :class:`~flowbnn.transforms.AffineCoupling`; with a
            :class:`~flowbnn.nets.GatedConvNet` it is a step of images, channels last.

    >>> step = GlowStep(4, hidden=(16,))
    >>> z = torch.ones(2, 4)
    >>> x, log_det = step(z)
    >>> torch.allclose(step.inverse(x)[0], z, atol=1e-5), log_det.shape
    (True, torch.Size([2]))
    """

    @checked
    def __init__(
        self,
        dim: AtLeastTwo,
        permute: bool = False,
        data_start: bool = False,
        generator: torch.Generator | None = None,
        **coupling: Any,
    ) -> None:
        super().__init__(
            ActNorm(dim, data_start=data_start),
            LULinear(dim, permute=permute, generator=generator),
            AffineCoupling(dim, **coupling),
        )
