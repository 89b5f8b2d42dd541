"""
Segmentation
============

A network labels every pixel. Its posterior has an uncertainty for every pixel, which is largest at the borders of objects.
"""

import os

import matplotlib.pyplot as plt
import torch
from torch import nn

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Noisy images of discs
# ---------------------
# Targets are class indices ``[B, H, W]``. Pixels with the label -100 would be ignored.
torch.manual_seed(0)


def discs(number: int, size: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws images of one disc each, and their masks."""
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = 6 + (size - 12) * torch.rand(number, 2, 1, 1)
    radius = 3 + 4 * torch.rand(number, 1, 1)
    masks = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 < radius**2).long()
    return (masks + 0.7 * torch.randn(number, size, size))[:, None], masks


train, test = discs(40 if QUICK else 200), discs(50)

# %%
# Fit it as any other classifier
# ------------------------------
network = nn.Sequential(
    nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 1)
)
method = fb.NodeNoise("gaussian", epochs=1 if QUICK else 25, lr=0.01)
posterior = method.fit(network, train, batch_size=20, seed=0, progress=False)
prediction = posterior.predict(test[0], samples=4 if QUICK else 32, seed=0)
print({name: round(value, 3) for name, value in prediction.evaluate(test[1]).items()})
print("intersection over union:", fb.metrics.intersection_over_union(prediction.labels, test[1], 2))

# %%
figure, axes = plt.subplots(3, 4, figsize=(9, 7), layout="constrained")
columns = {
    "image": test[0][:, 0],
    "mask": test[1],
    "predicted": prediction.labels,
    "entropy": prediction.entropy,
}
for row in range(3):
    for ax, (title, images) in zip(axes[row], columns.items(), strict=True):
        ax.imshow(images[row].numpy(), cmap="viridis" if title == "entropy" else "gray")
        ax.set(xticks=[], yticks=[], title=title if row == 0 else "")
plt.show()
