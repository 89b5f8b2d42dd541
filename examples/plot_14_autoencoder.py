"""
Autoencoder with a flow posterior
=================================

A variational autoencoder learns images of digits. Its posterior over codes is an inverse autoregressive flow.
"""

import os

import matplotlib.pyplot as plt
import torch

import flowbnn as fb

QUICK = bool(os.environ.get("FLOWBNN_EXAMPLES_QUICK"))

# %%
# Fit
# ---
torch.manual_seed(0)
digits = fb.data.load_digits()
images = (digits.train[0] > 0.5).float()
vae = fb.vae.VAE((1, 8, 8), latent_dim=8, posterior="iaf", length=2, hidden=(128,), warmup=0.3)
vae = fb.vae.fit_autoencoder(
    vae, images, epochs=1 if QUICK else 80, batch_size=64, lr=5e-3, seed=0, progress=False
)
test = (digits.test[0][:50] > 0.5).float()
print(
    f"log-likelihood of a test image: {vae.log_likelihood(test, samples=10 if QUICK else 200).mean():.1f} nats"
)

# %%
# Reconstructions and samples
# ---------------------------
fb.plots.plot_reconstructions(vae, test[:8])
plt.show()

# %%
fb.plots.plot_samples(vae)
plt.show()
