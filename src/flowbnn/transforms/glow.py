"""The step of flow of Glow."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from flowbnn.options import Count, Positive, checked
from flowbnn.transforms.compose import Compose
from flowbnn.transforms.coupling import AffineCoupling, AtLeastTwo, Mask
from flowbnn.transforms.linear import LULinear
from flowbnn.transforms.normalization import ActNorm


class GlowStep(Compose):
    r"""ActNorm, then an invertible linear map, then an affine coupling (Kingma & Dhariwal 2018, figure 2).

    On the last axis of ``(B, H, W, C)`` the linear map is the invertible 1x1 convolution. Every scale in it is bounded
    softly and it starts next to the identity, so that neither direction blows up however long it trains.

    Args:
        dim: length of the vectors, at least 2.
        hidden, activation, context_dim: of the coupling's net.
        mask, flip: what the coupling keeps; see :class:`~flowbnn.transforms.coupling.Coupling`.
        bound: largest size of the coupling's log-scale.
        permute: draw a random permutation for the linear map, which mixes the halves of stacked steps sooner.
        data_start: normalise the first training batch as Glow does when it learns the density of data. By default
            ActNorm starts at the identity, because noise that multiplies a trained network must keep its mean of one.
        generator: where the draws of the linear map come from; torch's own by default.
        net: of the coupling, in place of an MLP; with a :class:`~flowbnn.nets.GatedConvNet` it is a step of images, channels last.

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
        hidden: Sequence[Count] = (64, 64),
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: int = 0,
        mask: Mask = "half",
        flip: bool = False,
        bound: Positive = 2.0,
        permute: bool = False,
        data_start: bool = False,
        generator: torch.Generator | None = None,
        net: nn.Module | None = None,
    ) -> None:
        super().__init__(
            ActNorm(dim, data_start=data_start),
            LULinear(dim, permute=permute, generator=generator),
            AffineCoupling(dim, mask, flip, hidden, activation, context_dim, net, bound=bound),
        )
