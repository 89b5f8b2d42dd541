r"""
Your own transform and recipe
=============================

A transform needs two methods. It then works in flows and densities. A recipe makes it the noise of a network.
"""

import os

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.noise import Recipe
from flowbnn.options import Count, options
from flowbnn.transforms import Transform

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))


# %%
# The transform
# -------------
# ``forward`` maps base points to samples. Both directions return their value and their log-determinant. This one makes tails
# lighter or heavier: :math:`x = \sinh(a \, \mathrm{asinh}(z - 1)) + 1` with a learned :math:`a > 0` for each entry.
class TailWeight(Transform):
    """Sinh-arcsinh transform of vectors around one (Jones & Pewsey 2009)."""

    event_dim = 1
    inverse_kind = "exact"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.zeros(dim))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._apply_weight(z, self.log_weight)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._apply_weight(x, -self.log_weight)

    @staticmethod
    def _apply_weight(value: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.asinh(value - 1)
        scaled = log_weight.exp() * angle
        log_det = log_weight + torch.log(torch.cosh(scaled)) - torch.log(torch.cosh(angle))
        return torch.sinh(scaled) + 1, log_det.sum(-1)


# %%
# Check it against autograd
# -------------------------
torch.manual_seed(0)
transform = TailWeight(2)
nn.init.constant_(transform.log_weight, 0.4)
point = torch.tensor([0.3, -1.2])
jacobian = torch.autograd.functional.jacobian(lambda z: transform(z)[0], point)
print(f"log-determinant {transform(point)[1].item():.4f}, by autograd {jacobian.det().log().item():.4f}")


# %%
# The recipe
# ----------
# ``transforms`` returns the steps for a vector of ``dim`` factors. They follow the Gaussian that every recipe begins with. Settings
# are fields. Those of :class:`~flowbnn.noise.Recipe`, such as ``prior_scale`` and ``joint``, are inherited.
@options
class TailNoise(Recipe):
    """Gaussian noise whose tails are learned.

    Args:
        length: Number of transforms.
    """

    length: Count = 1

    def transforms(self, dim: int) -> list[Transform]:
        return [TailWeight(dim) for _ in range(self.length)]


# %%
# Use it as noise of a network
# ----------------------------
points, labels = fb.data.clusters(400, 1.95, torch.Generator().manual_seed(0))
network = fb.to_stochastic(fb.models.MLP(2, (32,), 2), {"*": TailNoise(prior_scale=0.7)})
print(fb.describe(network))

# %%
epochs = 2 if QUICK else 60
posterior = fb.fit(
    network, (points, labels), epochs=epochs, weight_lr=0.01, validation=None, seed=0, progress=False
)
print(posterior)

# %%
fb.plots.plot_pairs(posterior, layer="fc2", samples=50 if QUICK else 1000)
plt.show()
