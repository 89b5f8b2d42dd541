"""
All methods on one problem
==========================

Each method fits the same small network to the same 200 points. Colours fade where the prediction is uncertain. The methods differ most
away from the data.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Methods
# -------
# A method is a frozen dataclass of settings. All have the same ``fit`` and return a posterior.
torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
points, labels = fb.data.clusters(200, 1.95, generator)
held_out = fb.data.clusters(200, 1.95, generator)
short = {"epochs": 2 if QUICK else 60, "lr": 0.01}
methods = {
    "NodeNoise": fb.NodeNoise("planar", **short),
    "MLE": fb.MLE(**short),
    "MAP": fb.MAP(**short),
    "DAMP": fb.DAMP(**short),
    "Temperature": fb.Temperature(fb.MAP(**short)),
    "VectorScaling": fb.VectorScaling(fb.MAP(**short)),
    "MatrixScaling": fb.MatrixScaling(fb.MAP(**short)),
    "LastLayerRefit": fb.LastLayerRefit(fb.MAP(**short)),
    "MCDropout": fb.MCDropout(**short),
    "DeepEnsemble": fb.DeepEnsemble(5, **short),
    "ModeEnsemble": fb.ModeEnsemble(8, **short),
    "SWAG": fb.SWAG(**short),
    "Laplace": fb.Laplace(**short),
    "BayesByBackprop": fb.BayesByBackprop(**short),
    "IVON": fb.IVON(epochs=short["epochs"]),
    "VBLL": fb.VBLL(**short),
    "MNF": fb.MNF(**short),
    "SGLD": fb.SGLD(epochs=60),
    "HMC": fb.HMC(samples=50, warmup=50, chains=2, steps=16, **short),
    "NUTS": fb.NUTS(samples=50, warmup=50, chains=2, max_depth=4, **short),
}
if QUICK:
    methods = {name: methods[name] for name in ("MLE", "MCDropout")}

# %%
# One figure each
# ---------------
scores = {}
for name, method in methods.items():
    posterior = method.fit(fb.models.MLP(2, (16,), 2), (points, labels), seed=0, progress=False)
    scores[name] = fb.evaluate(posterior, held_out, samples=32, progress=False)["nll"]
    resolution = 10 if QUICK else 80
    ax = fb.plots.plot_class_map(
        posterior, points, targets=labels, samples=32, resolution=resolution, margin=0.4
    )
    ax.set_title(f"{name}: NLL {scores[name]:.3f} on new points")
plt.show()

# %%
# The differences are small: one seed and 200 test points decide nothing. Use ``fb.compare`` with several seeds.
print({name: round(score, 3) for name, score in scores.items()})
