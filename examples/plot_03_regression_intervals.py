"""
Regression with intervals in units
==================================

A deep ensemble predicts a curve with 50 and 90 % intervals, in the units of the targets. Its uncertainty has two
parts: noise of the measurements, and disagreement of the networks. The disagreement is larger outside of the data,
but smooth networks agree more in the gap than they should.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Temperatures over a day
# -----------------------
# Targets may have any unit. Networks are trained on standardized targets, and predictions come back in degrees.
torch.manual_seed(0)
hours = torch.cat([6 * torch.rand(60, 1), 12 + 6 * torch.rand(60, 1)])  # nothing was measured from 6 to 12
degrees = 15 + 6 * torch.sin((hours - 9) * torch.pi / 12) + 0.8 * torch.randn_like(hours)


def standardized(hours: torch.Tensor) -> torch.Tensor:
    """Scales the inputs, which flowbnn leaves to you."""
    return (hours - 9) / 6


network = torch.nn.Sequential(
    torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
)

# %%
# Fit an ensemble
# ---------------
method = fb.DeepEnsemble(2 if QUICK else 5, epochs=20 if QUICK else 300, lr=0.01)
posterior = method.fit(network, (standardized(hours), degrees), seed=0, progress=False)
print(posterior)

# %%
# Predict
# -------
# ``interval(0.9)`` has its bounds in degrees. ``decide(abstain_above=...)`` takes a standard deviation in degrees.
grid = torch.linspace(-2, 20, 200)[:, None]
prediction = posterior.predict(standardized(grid))
noise, disagreement = prediction.aleatoric.sqrt(), prediction.epistemic.sqrt()

# %%
figure, (top, bottom) = plt.subplots(
    2, 1, figsize=(8, 6), layout="constrained", sharex=True, height_ratios=[2, 1]
)
prediction.plot_intervals(grid, data=(hours, degrees), ax=top)
top.set(xlabel="", ylabel="temperature (°C)")
bottom.plot(grid.numpy(), noise.numpy(), color="#E69F00", label="noise (aleatoric)")
bottom.plot(grid.numpy(), disagreement.numpy(), color="#009E73", label="disagreement (epistemic)")
bottom.set(xlabel="hour", ylabel="std (°C)")
bottom.legend()
plt.show()

# %%
# Check the coverage
# ------------------
# On new measurements about 90 % of the targets lie in their intervals.
test_hours = torch.cat([6 * torch.rand(500, 1), 12 + 6 * torch.rand(500, 1)])
test_degrees = 15 + 6 * torch.sin((test_hours - 9) * torch.pi / 12) + 0.8 * torch.randn_like(test_hours)
print(posterior.predict(standardized(test_hours)).evaluate(test_degrees))
