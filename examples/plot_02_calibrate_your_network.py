"""
Calibrate your own network
==========================

A trained network is too confident. ``fb.calibrate`` compares several calibrators on held-out data and returns
the best. The reliability diagram shows the network before and after.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# A trained network
# -----------------
# Replace this part by your own network. It has fitted 500 noisy examples almost perfectly, so it is too confident.
torch.manual_seed(0)
inputs = torch.randn(4500, 8)
scores = torch.stack([inputs[:, 0] * inputs[:, 1], inputs[:, 2], inputs[:, 3] - inputs[:, 4]], dim=1)
labels = torch.distributions.Categorical(logits=2 * scores).sample()
train, held_out, test = [
    (inputs[rows], labels[rows]) for rows in (slice(500), slice(500, 1500), slice(1500, None))
]
network = (
    fb.MLE(epochs=20 if QUICK else 100, lr=0.01)
    .fit(fb.models.MLP(8, (64, 64), 3), train, seed=0, progress=False)
    .model
)

# %%
# Calibrate it
# ------------
# The held-out data must be data that the weights have not seen. Your network is copied, never modified.
candidates = ["plain", "temperature"] if QUICK else "auto"
posterior = fb.calibrate(network, held_out, candidates=candidates, seed=0, progress=False)
print(posterior.calibration)

# %%
# Compare on test data
# --------------------
plain = fb.posterior.PointPosterior(network, fb.likelihoods.Categorical())
predictions = {
    name: model.predict(test[0], samples=64, seed=0)
    for name, model in {"before": plain, "after": posterior}.items()
}
for name, prediction in predictions.items():
    print(name, {metric: round(value, 3) for metric, value in prediction.evaluate(test[1]).items()})

# %%
# Points on the diagonal mean that confidence is accuracy. The band is what chance allows for a perfectly calibrated network.
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
for ax, (name, prediction) in zip(axes, predictions.items(), strict=True):
    prediction.plot_reliability(test[1], bins=10, ax=ax)
    ax.set_title(name)
plt.show()
