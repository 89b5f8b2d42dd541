"""
Flows of images, integers, symmetric and positive data
======================================================

Flows are not only for points in the plane. Other transforms let them describe images, integers, symmetric data and positive numbers.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb
from flowbnn.distributions import NormalBase
from flowbnn.flows import FlowModel
from flowbnn.transforms import AbsoluteValue, Compose, Exp, Inverse, LULinear, Softplus

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))
SHORT = {"epochs": 1 if QUICK else 8, "seed": 0, "progress": False}
LONG = {**SHORT, "epochs": 1 if QUICK else 100}

# %%
# Images
# ------
# ``Glow`` squeezes squares of pixels to channels, and models integers by dequantization. These digits have 8 x 8 pixels of 17 levels.
torch.manual_seed(0)
images = (16 * fb.data.load_digits().train[0]).round().long()
glow = fb.flows.Glow((1, 8, 8), length=4, levels=2, hidden=(32, 32), values=17, data_init=True)
density = fb.fit_density(glow, images, batch_size=64, lr=3e-3, **SHORT)
print(
    f"{density.bits_per_dimension(images):.2f} bits per pixel, uniform noise {torch.log2(torch.tensor(17.0)):.2f}"
)
samples = density.sample(24, seed=0)
figure, axes = plt.subplots(3, 8, figsize=(8, 3.2))
for ax, image in zip(axes.flat, samples, strict=True):
    ax.imshow(image[0].numpy(), cmap="gray_r", vmin=0, vmax=16)
    ax.axis("off")
figure.suptitle("samples of Glow")

# %%
# Symmetric data
# --------------
# A spline flow describes one quadrant. The inverse of ``AbsoluteValue`` draws the signs, so that the density is symmetric exactly.
angles = 2 * torch.pi * torch.rand(800)
rings = 1.5 + torch.stack([angles.cos(), angles.sin()], dim=1) + 0.1 * torch.randn(800, 2)
points = rings * (2 * torch.randint(2, (800, 2)) - 1)
quadrant = fb.flows.NSF(2, length=3, hidden=(32, 32))
symmetric = FlowModel(quadrant.base, Compose(quadrant.transform, Softplus(), Inverse(AbsoluteValue())))
density = fb.fit_density(symmetric, points, lr=0.01, standardize=False, **LONG)
at = torch.tensor([[0.5, 1.5], [-0.5, 1.5], [0.5, -1.5]])
print("log-density at three reflections:", [round(value, 4) for value in density.log_prob(at).tolist()])
fb.plots.plot_density(density, points, samples=200, resolution=10 if QUICK else 80)

# %%
# Integers
# --------
# ``IDF`` shifts integers by rounded numbers. Its probabilities are exact, and sum to one.
means = 6 + 5 * torch.rand(2000, 1).bernoulli()
counts = torch.poisson(means.expand(-1, 2) * torch.tensor([1.0, 0.6])).long()
density = fb.fit_density(
    fb.flows.IDF(2, length=2, values=32, hidden=(32, 32), data_init=True), counts, lr=3e-3, **LONG
)
grid = torch.cartesian_prod(torch.arange(24), torch.arange(18))
probabilities = density.log_prob(grid).exp().detach()
print(f"probability of the grid {probabilities.sum():.3f}")
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, sharey=True, layout="constrained")
observed = torch.zeros(24, 18).index_put(
    (counts[:, 0].clamp(max=23), counts[:, 1].clamp(max=17)), torch.tensor(1 / 2000), accumulate=True
)
for ax, table, title in ((left, observed, "data"), (right, probabilities.view(24, 18), "IDF")):
    ax.imshow(table.T.numpy(), origin="lower", cmap="viridis", vmin=0, vmax=observed.max().item())
    ax.set(title=title, xlabel="first count", ylabel="second count")

# %%
# Positive data
# -------------
# Elementwise and linear transforms are building blocks: a triangular map for the correlation, and ``Exp`` for positive numbers.
sizes = (torch.randn(800, 2) @ torch.tensor([[0.5, 0.4], [0.0, 0.3]])).exp()
lognormal = FlowModel(NormalBase(2, 0.0, 1.0), Compose(LULinear(2, bias=True), Exp()))
density = fb.fit_density(lognormal, sizes, lr=0.02, standardize=False, **LONG)
print(f"smallest sample {density.sample(1000, seed=0).min():.2f}")
fb.plots.plot_density(density, sizes, samples=200, resolution=10 if QUICK else 100)
plt.show()
