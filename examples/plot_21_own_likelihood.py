r"""
Your own likelihood
===================

A tenth of the measurements are wrong. A likelihood with heavy tails mostly ignores them. It needs two methods, and then works
in all fits.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.likelihoods import Likelihood
from flowbnn.predictive import GaussianPredictive

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))


# %%
# The likelihood
# --------------
# ``log_prob`` returns the log-likelihood of each example, and ``predictive`` the distribution of new targets. This one is a Student-t
# distribution around the output of the network, with a learned scale. Settings are attributes with the names of the arguments, so
# that posteriors can be saved.
class StudentNoise(Likelihood):
    """Student-t distribution of real targets.

    Args:
        df: Degrees of freedom. Fewer of them mean heavier tails.
    """

    def __init__(self, df: float = 3.0) -> None:
        super().__init__()
        self.df = df
        self.log_scale = nn.Parameter(torch.zeros(()))

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        student = torch.distributions.StudentT(self.df, outputs, self.log_scale.exp())
        return student.log_prob(targets.reshape(outputs.shape)).flatten(1).sum(1)

    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> GaussianPredictive:
        variance = self.log_scale.exp() ** 2 * self.df / (self.df - 2)
        return GaussianPredictive(outputs, variance.item(), sample_counts)


# %%
# Data with outliers
# ------------------
torch.manual_seed(0)
x = 6 * torch.rand(200, 1) - 3
y = torch.sin(2 * x) + 0.15 * torch.randn_like(x)
wrong = torch.rand(200) < 0.1
y[wrong] = 4 * torch.rand(int(wrong.sum()), 1)

# %%
# Two fits
# --------
method = fb.NodeNoise("gaussian", epochs=5 if QUICK else 400, lr=0.01)
posteriors = {
    "Gaussian": method.fit(fb.models.MLP(1, (32, 32), 1), (x, y), seed=0, progress=False),
    "Student-t": method.fit(
        fb.models.MLP(1, (32, 32), 1), (x, y), likelihood=StudentNoise(), seed=0, progress=False
    ),
}
grid = torch.linspace(-3, 3, 200)[:, None]
curves = {name: posterior.predict(grid, 64, seed=0).mean for name, posterior in posteriors.items()}
for name, curve in curves.items():
    print(f"{name}: mean distance to the true curve {(curve - torch.sin(2 * grid)).abs().mean():.2f}")

# %%
# Save and load
# -------------
# The file has the name of the class. Pass the class if its module has not been imported.
with TemporaryDirectory() as folder:
    posteriors["Student-t"].save(Path(folder) / "curve.safetensors")
    loaded = fb.load_posterior(
        Path(folder) / "curve.safetensors", fb.models.MLP(1, (32, 32), 1), likelihood=StudentNoise
    )
print(f"scale {loaded.likelihood.log_scale.exp().item():.2f}")

# %%
with fb.plots.style():
    figure, ax = plt.subplots(figsize=(8, 4))
    ax.plot(x[~wrong], y[~wrong], ".", color="0.55", ms=4, label="measurements")
    ax.plot(x[wrong], y[wrong], "x", color="0.35", ms=5, label="wrong measurements")
    ax.plot(grid, torch.sin(2 * grid), "--", color="0.35", lw=1.2, label="true curve")
    for name, curve in curves.items():
        ax.plot(grid, curve, label=f"{name} likelihood")
    ax.set(xlabel="x", ylabel="y")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()
