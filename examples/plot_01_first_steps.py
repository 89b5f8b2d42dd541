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
# Predict
# -------
# One call samples networks and averages their predictions. The epistemic part of the uncertainty is their disagreement.
samples = 8 if QUICK else 64
prediction = posterior.predict(inputs, samples, seed=0)
print(prediction)

# %%
# Colours fade where the network is uncertain. Far from the points both networks are confident, because noise does not detect
# unfamiliar inputs. ``fb.gated`` does.
resolution = 20 if QUICK else 120
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
for ax, (title, model) in zip(
    axes, {"without noise": plain, "with flow noise": posterior}.items(), strict=True
):
    fb.plots.plot_class_map(model, inputs, targets=labels, samples=samples, resolution=resolution, ax=ax)
    ax.set_title(title)
plt.show()

# %%
# Noise of the second layer
# -------------------------
# Each point is one draw of three noise variables. Flows may bend and skew the Gaussian that they start from.
fb.plots.plot_pairs(posterior, layer="fc2", samples=50 if QUICK else 1000)
plt.show()
