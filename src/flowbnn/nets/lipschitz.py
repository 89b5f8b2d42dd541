"""Networks whose outputs move less than their inputs."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from flowbnn.nets.mlp import Length
from flowbnn.nets.smooth import SmoothMLP, applied, transposed
from flowbnn.options import Count, Probability, checked

SWISH_SLOPE = 1.1  # no Swish is steeper, whatever its rate
STEPS = 20  # of power iteration, where one is not enough


class LipschitzMLP(SmoothMLP):
    r"""A :class:`~flowbnn.nets.smooth.SmoothMLP` with :math:`\lVert g(x) - g(x') \rVert \le L \lVert x - x' \rVert`, :math:`L < 1`.

    A matrix whose largest singular value exceeds :math:`L^{1/n}` is scaled down to it (spectral normalization: Gouk et al. 2018,
    Behrmann et al. 2019); the activation is LipSwish, :math:`a\,\sigma(\beta a) / 1.1`, of slope at most one and with a bounded second
    derivative (Chen et al. 2019, section 3.4). A normalized matrix gives each of :math:`n` units about :math:`1 / \sqrt n` of its
    input, where Swish is nearly linear; so :math:`\beta`, on which the bound does not depend, starts at :math:`\sqrt n`. The
    context enters unbounded, since the map is inverted for one context at a time.

    In training the singular value is that of one step of power iteration, from vectors kept as buffers and saved; in ``eval()`` it is
    exact, so that the bound holds for the weights as they are, and nothing is changed.

    Args:
        dim_in, dim_out, hidden, context_dim, start: as in ``SmoothMLP``.
        lipschitz: the constant :math:`L`.

    >>> net = LipschitzMLP(2, 2, hidden=(8,), lipschitz=0.5).eval()
    >>> torch.nn.init.constant_(net.layers[0].weight, 100.0).shape
    torch.Size([8, 2])
    >>> round(torch.linalg.matrix_norm(net.weights()[0], 2).item() ** 2, 4)
    0.5
    """

    @checked
    def __init__(
        self,
        dim_in: Count,
        dim_out: Count,
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
        start: float = 0.1,
        lipschitz: Probability = 0.9,
    ) -> None:
        super().__init__(dim_in, dim_out, hidden, context_dim, start)
        self._limit(lipschitz, ())

    @staticmethod
    def _start_rate(width: int) -> float:
        return math.sqrt(width)

    def _limit(self, lipschitz: float, size: Sequence[int]) -> None:
        self.lipschitz = lipschitz
        for index, weight in enumerate(super().weights()):
            self.register_buffer(f"left_{index}", torch.randn(*size, len(weight)))
            for _ in range(STEPS):
                self._power_step(index, weight.detach())

    def weights(self) -> list[Tensor]:
        bound = self.lipschitz ** (1 / len(self.layers))
        scaled = []
        for index, weight in enumerate(super().weights()):
            size = self._power_step(index, weight) if self.training else self._size(index, weight, bound)
            gain = bound / (SWISH_SLOPE if index else 1.0)  # the activation before is divided here
            scaled.append(weight * (gain / size.clamp(min=bound)))
        return scaled

    def _power_step(self, index: int, weight: Tensor) -> Tensor:
        left = getattr(self, f"left_{index}")
        size, direction = power_step(weight, left)
        with torch.no_grad():
            left.copy_(direction)
        return size

    def _size(self, index: int, weight: Tensor, floor: float) -> Tensor:
        if weight.shape[2:].numel() == 1:  # a matrix, or a convolution that is one at each pixel
            return largest_singular_value(weight.flatten(1), floor)
        left = getattr(self, f"left_{index}")
        with torch.no_grad():
            for _ in range(STEPS):
                left = power_step(weight, left)[1]
        return power_step(weight, left)[0]


class LipschitzConv(LipschitzMLP):
    r"""A contraction of images with the channels last: convolutions in place of the matrices of a :class:`LipschitzMLP`.

    The first and the last convolution are 3x3 with zeros around the image, those between are 1x1 (Chen et al. 2019, appendix E). The
    largest singular value of a 3x3 convolution is that of the map of whole images (Gouk et al. 2018), by power iteration; in
    ``eval()`` 20 steps are taken from the vectors kept. It approaches the value from below, so that the bound is exceeded a little
    before the iteration has settled: keep :math:`L` away from one.

    Args:
        shape: height, width and channels of an image.
        hidden: channels of each hidden layer.
        context_dim, start, lipschitz: as in ``LipschitzMLP``; a context shifts the channels of the first hidden layer.

    >>> LipschitzConv((8, 8, 3), hidden=(16, 16))(torch.ones(5, 8, 8, 3)).shape
    torch.Size([5, 8, 8, 3])
    """

    @checked
    def __init__(
        self,
        shape: tuple[Count, Count, Count],
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
        start: float = 0.1,
        lipschitz: Probability = 0.9,
    ) -> None:
        nn.Module.__init__(self)
        *size, channels = shape
        widths = list(pairwise([channels, *hidden, channels]))
        kernels = [3 if index in (0, len(widths) - 1) else 1 for index in range(len(widths))]
        layers = [
            nn.Conv2d(*ends, kernel, padding=kernel // 2)
            for ends, kernel in zip(widths, kernels, strict=True)
        ]
        self._build(layers, context_dim, start)
        self._limit(lipschitz, size)


def power_step(weight: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """An estimate of the largest singular value, with its gradient, and the next left vector."""
    with torch.no_grad():
        right = transposed(left, weight)
        right = right / torch.linalg.vector_norm(right).clamp(min=1e-12)
    image = applied(right, weight)
    size = torch.linalg.vector_norm(image)
    return size, torch.where(
        size > 0, image / size.clamp(min=1e-12), left
    ).detach()  # zeros have no vector to find


def largest_singular_value(weight: Tensor, floor: float) -> Tensor:
    """Largest singular value of a matrix, or the floor if that is larger; from the smaller of its two Gram matrices."""
    wide = weight.shape[0] <= weight.shape[1]
    gram = weight @ weight.mT if wide else weight.mT @ weight
    return torch.linalg.eigvalsh(gram)[..., -1].clamp(min=floor**2).sqrt()
