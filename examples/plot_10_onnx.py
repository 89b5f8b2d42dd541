"""
Ship to ONNX
============

``fb.export`` writes all sampled networks to one file. ONNX Runtime then returns probabilities and both uncertainties,
without PyTorch and without flowbnn.
"""

import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import onnxruntime
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Fit a network with noise
# ------------------------
torch.manual_seed(0)
inputs, labels = fb.data.clusters(400, spread=1.95, generator=torch.Generator().manual_seed(0))
method = fb.NodeNoise("gaussian", epochs=2 if QUICK else 60, lr=0.01)
posterior = method.fit(fb.models.MLP(2, (16,), 2), (inputs, labels), batch_size=100, seed=0, progress=False)

# %%
# Export it
# ---------
# The batch size is free. The draws of the seed are stored in the file, so every runtime gives the same answer.
path = Path(tempfile.mkdtemp()) / "model.onnx"
file = fb.export(posterior, path, inputs[:8], samples=4 if QUICK else 32, seed=0)
print(file)

# %%
# Run it
# ------
session = onnxruntime.InferenceSession(path)
name = session.get_inputs()[0].name
probabilities, epistemic, aleatoric = session.run(None, {name: inputs.numpy()})
expected = posterior.predict(inputs, 4 if QUICK else 32, seed=0)
print(f"largest difference to flowbnn: {abs(probabilities - expected.probabilities.numpy()).max():.1e}")

# %%
figure, ax = plt.subplots(figsize=(5, 4), layout="constrained")
points = ax.scatter(*inputs.T.numpy(), c=epistemic + aleatoric, s=12, cmap="viridis")
figure.colorbar(points, label="entropy (nats), from ONNX Runtime")
ax.set(xlabel="$x_1$", ylabel="$x_2$")
plt.show()
