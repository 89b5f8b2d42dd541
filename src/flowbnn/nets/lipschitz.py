"""Networks whose outputs move less than their inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.nets.mlp import Length
from flowbnn.nets.smooth import SmoothMLP
from flowbnn.options import Count, Probability, checked

SWISH_SLOPE = 1.1  # no Swish is steeper, whatever its rate


class LipschitzMLP(SmoothMLP):
    r"""A :class:`~flowbnn.nets.smooth.SmoothMLP` with :math:`\lVert g(x) - g(x') \rVert \le L \lVert x - x' \rVert`, :math:`L < 1`.

    A matrix whose largest singular value exceeds :math:`L^{1/n}` is scaled down to it (spectral normalization: Gouk et al. 2018,
    Behrmann et al. 2019); the activation is LipSwish, :math:`a\,\sigma(\beta a) / 1.1`, of slope at most one and with a bounded second
    derivative (Chen et al. 2019, section 3.4). The context enters unbounded, since the map is inverted for one context at a time.

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
        self.lipschitz = lipschitz
        for index, layer in enumerate(self.layers):
            weight = layer.weight.detach()  # type: ignore[operator]
            self.register_buffer(f"left_{index}", torch.linalg.svd(weight)[0][:, 0].clone())

    def weights(self) -> list[Tensor]:
        bound = self.lipschitz ** (1 / len(self.layers))
        scaled = []
        for index, weight in enumerate(super().weights()):
            size = self._power_step(index, weight) if self.training else largest_singular_value(weight, bound)
            gain = bound / (
                SWISH_SLOPE if index else 1.0
            )  # the activation's division, done to the matrix that follows
            scaled.append(weight * (gain / size.clamp(min=bound)))
        return scaled

    def _power_step(self, index: int, weight: Tensor) -> Tensor:
        left = getattr(self, f"left_{index}")
        with torch.no_grad():
            right = F.normalize(left @ weight, dim=0)
        image = weight @ right
        size = torch.linalg.vector_norm(image)  # its gradient is that of the singular value
        with torch.no_grad():
            left.copy_(image / size.clamp(min=1e-12))
        return size


def largest_singular_value(weight: Tensor, floor: float) -> Tensor:
    """Largest singular value of a matrix, or the floor if that is larger; from the smaller of its two Gram matrices."""
    wide = weight.shape[0] <= weight.shape[1]
    gram = weight @ weight.mT if wide else weight.mT @ weight
    return torch.linalg.eigvalsh(gram)[..., -1].clamp(min=floor**2).sqrt()
