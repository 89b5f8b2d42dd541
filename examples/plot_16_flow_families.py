"""
Families of flows
=================

Five families of flows learn the same density. All have the same interface, so exchanging them is a change of one word.
"""

import os
import time

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Data
# ----
torch.manual_seed(0)
angles = 2 * torch.pi * torch.rand(1000)
points = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.1 * torch.randn(1000, 2)
points[:500] += torch.tensor([1.0, 0.5])

# %%
# Fits
# ----
# ``FFJORD`` is trained by flow matching, which needs no solver. Densities of ``Planar`` need a root search for each step.
flows = {  # flow, number of epochs, further options
    "couplings": (fb.flows.NSF(2, length=3, hidden=(32, 32)), 40, {}),
    "autoregressive": (fb.flows.NAF(2, length=2, hidden=(32, 32)), 60, {}),
    "planar": (fb.flows.Planar(2, length=12), 40, {}),
    "residual": (fb.flows.ResidualFlow(2, length=6, hidden=(32, 32)), 40, {}),
    "continuous": (fb.flows.FFJORD(2, hidden=(64, 64)), 200, {"objective": "flow-matching"}),
}
if QUICK:
    flows = {"couplings": flows["couplings"]}

# %%
for family, (flow, epochs, options) in flows.items():
    start = time.perf_counter()
    options |= {"epochs": 1 if QUICK else epochs, "batch_size": 128, "lr": 0.01}
    density = fb.fit_density(flow, points, seed=0, progress=False, **options)
    seconds = time.perf_counter() - start
    print(f"{family}: log-density {density.log_prob(points.numpy()).mean():.2f} nats, {seconds:.0f} s")
    ax = fb.plots.plot_density(density, points, samples=200, resolution=10 if QUICK else 60)
    ax.set_title(f"{family}: {type(flow).__name__}", loc="left")
plt.show()
