"""
Conditional density of the targets
==================================

Targets with two possible values cannot be described by a Gaussian. A flow-shaped likelihood learns their
density for every input, and highest density regions have a gap where no target lies.
"""

import os

import matplotlib.pyplot as plt
import torch
from torch import nn

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Two branches
# ------------
torch.manual_seed(0)
inputs = 2 * torch.rand(1500, 1) - 1
branch = 2 * torch.randint(0, 2, (1500, 1)) - 1
targets = branch * (0.3 + inputs.clamp(min=0)) + 0.1 * torch.randn(1500, 1)

# %%
# Only the likelihood and the width of the last layer change
# ----------------------------------------------------------
fits = {}
for name, likelihood in {
    "Gaussian": fb.likelihoods.Gaussian("predicted"),
    "flow": fb.likelihoods.Flow("nsf", bins=8),
}.items():
    outputs = 2 if name == "Gaussian" else likelihood.num_outputs
    network = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
    method = fb.MLE(epochs=2 if QUICK else 60, lr=0.005)
    fits[name] = method.fit(
        network, (inputs, targets), likelihood=likelihood, batch_size=128, seed=0, progress=False
    )

# %%
# Scores on new data
# ------------------
new_inputs = 2 * torch.rand(1000, 1) - 1
new_branch = 2 * torch.randint(0, 2, (1000, 1)) - 1
new_targets = new_branch * (0.3 + new_inputs.clamp(min=0)) + 0.1 * torch.randn(1000, 1)
for name, posterior in fits.items():
    print(
        name,
        {
            metric: round(value, 3)
            for metric, value in posterior.predict(new_inputs).evaluate(new_targets).items()
        },
    )

# %%
x, y = torch.linspace(-1, 1, 20 if QUICK else 100)[:, None], torch.linspace(-2, 2, 40 if QUICK else 160)
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
for ax, (name, posterior) in zip(axes, fits.items(), strict=True):
    prediction = posterior.predict(x)
    values = torch.stack([prediction.log_prob(torch.full_like(x, float(value))).exp() for value in y])
    ax.pcolormesh(x[:, 0].numpy(), y.numpy(), values.numpy(), cmap="viridis", shading="auto")
    ax.scatter(inputs[:300], targets[:300], s=2, color="white", alpha=0.6)
    ax.set(title=f"{name}: density of the target", xlabel="input")
axes[0].set_ylabel("target")
plt.show()
