"""
Conformal sets
==============

Conformal prediction turns any posterior into sets of classes that contain the true class with a chosen probability,
whatever the network. Uncertain inputs get larger sets.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# A classifier of three overlapping classes
# -----------------------------------------
torch.manual_seed(0)
labels = torch.randint(0, 3, (3000,))
angles = labels * 2 * torch.pi / 3
inputs = 2 * torch.stack([angles.cos(), angles.sin()], dim=1) + 1.2 * torch.randn(3000, 2)
train, held_out, test = [
    (inputs[rows], labels[rows]) for rows in (slice(500), slice(500, 1500), slice(1500, None))
]
method = fb.MAP(epochs=2 if QUICK else 40, lr=0.01)
posterior = method.fit(fb.models.MLP(2, (32,), 3), train, seed=0, progress=False)

# %%
# Choose the coverage
# -------------------
# The held-out data must be new to the network. The guarantee holds on average over data like these.
coverages = (0.8, 0.9, 0.95, 0.99)
reports = {}
for coverage in coverages:
    sets = fb.conformalize(posterior, held_out, coverage=coverage)
    reports[coverage] = sets.evaluate(test)
    print(coverage, {name: round(float(reports[coverage][name]), 3) for name in ("coverage", "size")})

# %%
# Sets at 95 %
# ------------
# Between the classes the sets have two or three members.
sets = fb.conformalize(posterior, held_out, coverage=0.95).predict_set(test[0])
sizes = sets.sum(-1)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for size, colour in zip((0, 1, 2, 3), ("#999999", "#0072B2", "#E69F00", "#D55E00"), strict=True):
    points = test[0][sizes == size]
    if len(points):
        left.scatter(
            *points.T.numpy(), s=5, color=colour, label=f"{size} classes" if size != 1 else "1 class"
        )
left.set(title="size of the set", xlabel="$x_1$", ylabel="$x_2$")
left.legend()
right.plot(coverages, [float(report["coverage"]) for report in reports.values()], "o-", color="#0072B2")
right.plot([0.8, 1], [0.8, 1], "--", color="gray")
right.set(title="coverage on test data", xlabel="requested", ylabel="measured", xticks=coverages)
plt.show()
