"""
Several labels
==============

An input may have any number of labels at once. Each has a probability and uncertainties of its own.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Three labels of points
# ----------------------
# Targets are zeros and ones ``[B, labels]``. The likelihood is a Bernoulli distribution for each label.
torch.manual_seed(0)
inputs = 2 * torch.randn(1500, 2)
logits = 3 * torch.stack([inputs[:, 0], inputs[:, 1] - 1, 2 - inputs.norm(dim=1)], dim=1)
targets = torch.bernoulli(logits.sigmoid()).long()
train, test = (inputs[:500], targets[:500]), (inputs[500:], targets[500:])

# %%
# Fit
# ---
method = fb.NodeNoise("gaussian", epochs=2 if QUICK else 60, lr=0.01)
posterior = method.fit(fb.models.MLP(2, (32,), 3), train, likelihood="bernoulli", seed=0, progress=False)
prediction = posterior.predict(test[0], samples=8 if QUICK else 64, seed=0)
print({name: round(value, 3) for name, value in prediction.evaluate(test[1]).items()})

# %%
# Uncertain where a label is
# --------------------------
entropy = prediction.entropy
print("entropy of each label of the first input:", [round(value, 3) for value in entropy[0].tolist()])
figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained", sharex=True, sharey=True)
for label, ax in enumerate(axes):
    points = ax.scatter(*test[0].T.numpy(), c=entropy[:, label].numpy(), s=6, cmap="viridis")
    ax.set(title=f"label {label}", xlabel="$x_1$")
figure.colorbar(points, ax=axes, label="entropy (nats)")
axes[0].set_ylabel("$x_2$")
plt.show()
