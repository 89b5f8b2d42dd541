r"""
Nodes of a graph
================

A graph network learns from the friendships of a small school to which of three groups a pupil belongs. In a large school its
uncertainty shows where groups meet.
"""

import os

import matplotlib.pyplot as plt
import torch
from matplotlib.collections import LineCollection
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))
GROUPS = ("music", "sports", "chess")


# %%
# Two schools
# -----------
# Pupils have two features. Pupils are friends if their features are near, and by chance within a group. ``y`` has the group.
def make_school(pupils, generator):
    """Returns a graph with features x [pupils, 2], edges and groups y [pupils]."""
    groups = torch.arange(pupils) % 3
    angles = 2 * torch.pi * groups / 3
    noise = 0.7 * torch.randn(pupils, 2, generator=generator)
    features = torch.stack([angles.cos(), angles.sin()], dim=1) + noise
    distances = torch.cdist(features, features) * pupils**0.5  # as many friends in schools of any size
    by_chance = torch.rand(pupils, pupils, generator=generator) < 3 / pupils
    friends = torch.triu((distances < 4) | (by_chance & (groups[:, None] == groups)), diagonal=1)
    return Data(x=features, edge_index=(friends | friends.T).nonzero().T, y=groups)


generator = torch.Generator().manual_seed(0)
small, large = make_school(60, generator), make_school(300, generator)
print(f"{small.num_edges // 2} and {large.num_edges // 2} friendships")

# %%
# A graph network with and without noise
# --------------------------------------
# One graph is one batch, whose examples are its nodes. All layers of torch-geometric that are built on ``Linear`` have noise.
torch.manual_seed(0)
network = GCN(in_channels=2, hidden_channels=32, num_layers=2, out_channels=len(GROUPS))
epochs = 5 if QUICK else 300
methods = {
    "deterministic": fb.MLE(epochs=epochs, lr=0.01),
    "Gaussian noise": fb.NodeNoise("gaussian", epochs=epochs, lr=0.01),
}
predictions = {}
for name, method in methods.items():
    posterior = method.fit(network, small, seed=0, progress=False)
    predictions[name] = prediction = posterior.predict(large, 8 if QUICK else 64, seed=0)
    scores = prediction.evaluate(large.y)
    print(f"{name}: accuracy {scores['accuracy']:.3f}, NLL {scores['nll']:.3f}, ECE {scores['ece']:.3f}")

# %%
# Where groups meet
# -----------------
# The colour is the predicted group, the size the entropy of the prediction. Rings are pupils whose group is predicted wrongly.
lines = large.x[large.edge_index.T].numpy()
for name, prediction in predictions.items():
    with fb.plots.style():
        figure, ax = plt.subplots(figsize=(6.5, 5))
        ax.add_collection(LineCollection(lines, colors="0.85", linewidths=0.5, zorder=0))
        for group, label in enumerate(GROUPS):
            x, y = large.x[prediction.labels == group].T
            size = 8 + 100 * prediction.entropy[prediction.labels == group]
            ax.scatter(x, y, s=size, color=f"C{group}", alpha=0.8, lw=0, label=label)
        wrong = prediction.labels != large.y
        ax.scatter(*large.x[wrong].T, s=130, facecolors="none", edgecolors="black", label="wrong")
        ax.set(title=name, xlabel="feature 1", ylabel="feature 2", aspect="equal")
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), markerscale=0.6)
plt.show()
