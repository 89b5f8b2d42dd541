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
# Regions of 20, 50, 80 and 95 % of the probability, with samples of the flow.
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharex=True, sharey=True)
fb.plots.plot_density(density, data, samples=300, resolution=20 if QUICK else 150, ax=left)
novel = detector.is_novel(strange)
for mask, colour, label in ((novel, "#D55E00", "novel"), (~novel, "#0072B2", "familiar")):
    right.scatter(*strange[mask].T.numpy(), s=5, color=colour, label=label)
right.set(title="random points, as the detector sees them", xlim=(-2.5, 3.5), ylim=(-2, 2.5))
right.legend()
plt.show()
