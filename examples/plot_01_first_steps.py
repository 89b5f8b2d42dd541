"""
First steps
===========

A network is trained on two classes of points, turned into a Bayesian network, and fitted. The map shows its
predictions and where sampled networks disagree.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Data and network
# ----------------
# Four overlapping clusters of points, of which one is the second class. Any PyTorch network will do.
torch.manual_seed(0)
inputs, labels = fb.data.clusters(400, spread=1.95, generator=torch.Generator().manual_seed(0))
network = fb.models.MLP(2, (32, 32), 2)
train = fb.data.TensorLoader(inputs, labels, batch_size=100, shuffle=True)
plain = fb.MLE(epochs=5 if QUICK else 40, lr=0.01).fit(network, train, seed=0, progress=False)

# %%
# Add noise and fit it
# --------------------
# Each layer multiplies its inputs by noise from a planar flow. ``fb.describe`` lists the layers.
bayesian = fb.to_stochastic(plain.model, {"*": fb.noise.NormalPlanar(length=2)})
print(fb.describe(bayesian))

# %%
# ``validation=None`` uses all data. By default a tenth is held out to check that noise helps.
options = {"epochs": 2} if QUICK else {"epochs": 60}
posterior = fb.fit(bayesian, train, validation=None, seed=0, progress=False, **options)
print(posterior)

# %%
# Predict on a grid
# -----------------
# One call samples networks and averages their predictions. The epistemic part of the uncertainty is their disagreement.
side = torch.linspace(-10, 10, 20 if QUICK else 80)
grid = torch.cartesian_prod(side, side)
prediction = posterior.predict(grid, samples=8 if QUICK else 64, seed=0)
print(prediction)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
maps = {
    "Probability of the second class": prediction.probabilities[:, 1],
    "Epistemic uncertainty (nats)": prediction.epistemic,
}
for ax, (title, values) in zip(axes, maps.items(), strict=True):
    image = ax.pcolormesh(
        side.numpy(), side.numpy(), values.reshape(len(side), -1).T.numpy(), cmap="viridis", shading="auto"
    )
    ax.scatter(*inputs.T.numpy(), c=labels.numpy(), s=8, cmap="gray", edgecolors="white", linewidths=0.3)
    ax.set(title=title, xlabel="$x_1$")
    figure.colorbar(image, ax=ax)
axes[0].set_ylabel("$x_2$")
plt.show()
