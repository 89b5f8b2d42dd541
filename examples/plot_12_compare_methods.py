"""
Compare methods
===============

``fb.compare`` fits methods to your network and data, and returns one table with the time of each. Differences between methods
are often smaller than between seeds, so use several.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# One table
# ---------
torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
train, test = fb.data.clusters(300, 1.95, generator), fb.data.clusters(2000, 1.95, generator)
keys = (
    ["map", "mc-dropout"]
    if QUICK
    else ["map", "mc-dropout", "swag", "deep-ensemble", "bayes-by-backprop", "node-noise-planar"]
)
comparison = fb.compare(
    fb.models.MLP(2, (32,), 2),
    train,
    test,
    methods=keys,
    epochs=1 if QUICK else 40,
    lr=0.01,
    samples=8 if QUICK else 64,
    seeds=1 if QUICK else 3,
    progress=False,
)
print(comparison)

# %%
fb.plots.plot_comparison(comparison)
plt.show()
