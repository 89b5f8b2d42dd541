"""
Your own training loop
======================

``fb.ELBO`` is one call in a loop of your own. This script logs its terms, anneals the KL, and plots both.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Network and objective
# ---------------------
# ``num_data`` is the number of all training examples. The KL counts once for all of them.
torch.manual_seed(0)
inputs, labels = fb.data.clusters(600, spread=1.95, generator=torch.Generator().manual_seed(0))
loader = fb.data.TensorLoader(inputs, labels, batch_size=100, shuffle=True)
network = fb.to_stochastic(fb.models.MLP(2, (32,), 2), {"*": fb.noise.NormalPlanar(length=2)})
elbo = fb.ELBO(fb.likelihoods.Categorical(), num_data=len(inputs))

# %%
# The loop
# --------
# ``fb.parameter_groups`` gives weights and noise their own learning rates. ``terms.layers`` has the KL of every layer.
optimizer = torch.optim.Adam(fb.parameter_groups(network, elbo.likelihood, weight_lr=0.01, noise_lr=0.02))
history = []
for _ in range(5 if QUICK else 60):
    for batch, targets in loader:
        optimizer.zero_grad()
        terms = elbo(network, batch, targets)
        terms.loss.backward()
        optimizer.step()
    history.append(
        {
            "log-likelihood": terms.log_likelihood.item(),
            **{name: layer.kl.item() for name, layer in terms.layers.items()},
        }
    )
print(history[-1])

# %%
# Predict
# -------
# A posterior needs the network and the likelihood only.
posterior = fb.posterior.NoisePosterior(network, elbo.likelihood)
test = fb.data.clusters(2000, spread=1.95, generator=torch.Generator().manual_seed(1))
print(
    {
        name: round(value, 3)
        for name, value in fb.evaluate(posterior, test, samples=8 if QUICK else 64, progress=False).items()
    }
)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.plot([entry["log-likelihood"] for entry in history], color="#0072B2")
left.set(xlabel="epoch", ylabel="nats per example", title="Log-likelihood")
for name, colour in zip(terms.layers, ("#E69F00", "#009E73"), strict=True):
    right.plot([entry[name] for entry in history], color=colour, label=name)
right.set(xlabel="epoch", ylabel="nats", title="KL of each layer")
right.legend()
plt.show()
