"""
Variational inference of a density
==================================

``fb.fit_target`` fits a flow to a density that is known up to a constant. It returns the evidence by importance sampling, and k-hat
says whether to rely on it.
"""

import math
import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))


# %%
# A banana
# --------
# The density is that of two normal variables, bent by a parabola. Its integral is known, so that the estimate can be checked.
def log_density(points: torch.Tensor) -> torch.Tensor:
    """Returns the unnormalized log-density of points ``[N, 2]``."""
    x, y = points.unbind(-1)
    return -0.5 * x.square() - 0.5 * ((y - x.square() / 2) / 0.5).square()


# %%
# Fit a flow with cheap draws
# ---------------------------
torch.manual_seed(0)
flow = fb.flows.RealNVP(2, length=2 if QUICK else 6, hidden=(32,))
fitted = fb.fit_target(flow, log_density, epochs=1 if QUICK else 40, seed=0, progress=False)
evidence = fitted.evidence()
print({name: round(float(value), 3) for name, value in evidence.items() if isinstance(value, int | float)})
print(f"exact log-evidence: {math.log(2 * math.pi * 0.5):.3f}")

# %%
fb.plots.plot_density(fitted, samples=300, resolution=20 if QUICK else 150)
plt.show()
