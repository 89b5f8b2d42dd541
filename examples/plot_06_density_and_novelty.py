"""
Density and novelty
===================

A neural spline flow learns the density of points by maximum likelihood. The density flags new points, with a
chosen rate of false alarms.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Two moons
# ---------
torch.manual_seed(0)


def moons(number: int) -> torch.Tensor:
    """Draws points near two half circles."""
    angle = torch.pi * torch.rand(number)
    upper = (torch.rand(number) < 0.5).float()
    points = torch.stack(
        [torch.cos(angle) + (1 - upper), (2 * upper - 1) * torch.sin(angle) + 0.5 * (1 - upper)], dim=1
    )
    return points + 0.08 * torch.randn(number, 2)


data, held_out = moons(1500), moons(500)

# %%
# Fit a flow
# ----------
# A tenth of the data is held out to stop early. Log-densities are in the units of the data.
flow = fb.flows.NSF(dim=2, length=2 if QUICK else 4, hidden=(32, 32))
density = fb.fit_density(flow, data, epochs=1 if QUICK else 60, lr=0.005, seed=0, progress=False)
print(f"log-density of a held-out point: {density.log_prob(held_out).mean():.2f} nats")

# %%
# Detect novel points
# -------------------
# The rate of false alarms holds for any flow, because it is measured on held-out points.
detector = density.novelty(held_out, rate=0.05)
fresh, strange = moons(1000), 3 * torch.randn(1000, 2)
print(
    f"false alarms {detector.is_novel(fresh).float().mean():.3f}, detected {detector.is_novel(strange).float().mean():.3f}"
)

# %%
side_x, side_y = (
    torch.linspace(-1.8, 2.8, 30 if QUICK else 120),
    torch.linspace(-1.4, 1.8, 30 if QUICK else 120),
)
grid = torch.cartesian_prod(side_x, side_y)
values = density.log_prob(grid.numpy()).exp().reshape(len(side_x), -1).T
novel = detector.is_novel(grid).float().reshape(len(side_x), -1).T
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained", sharex=True, sharey=True)
axes[0].scatter(*data.T, s=2, color="black")
axes[0].set(title="data")
axes[1].pcolormesh(side_x.numpy(), side_y.numpy(), values.numpy(), cmap="viridis", shading="auto")
axes[1].contour(side_x.numpy(), side_y.numpy(), novel.numpy(), levels=[0.5], colors="white")
axes[1].set(title="density; novel outside the line")
axes[2].scatter(*density.sample(1500, seed=0).T, s=2, color="#0072B2")
axes[2].set(title="samples", xlim=(-1.8, 2.8), ylim=(-1.4, 1.8))
plt.show()
