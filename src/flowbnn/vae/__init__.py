"""Autoencoders, and variational autoencoders with flows as posteriors and priors.

>>> import torch, flowbnn as fb
>>> images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)).round()
>>> vae = fb.vae.VAE((1, 8, 8), latent_dim=4, hidden=(32,), posterior="iaf")
>>> vae = fb.vae.fit_autoencoder(vae, images, epochs=2, seed=0, progress=False)
>>> vae.log_likelihood(images[:5], samples=20).shape, vae.sample(3).shape, vae.reconstruct(images[:2]).shape
(torch.Size([5]), torch.Size([3, 1, 8, 8]), torch.Size([2, 1, 8, 8]))
"""

from flowbnn.vae.autoencoder import Autoencoder, fit_autoencoder, load_autoencoder
from flowbnn.vae.decoders import BernoulliDecoder, Decoder, GaussianDecoder, LogisticDecoder
from flowbnn.vae.nets import GatedConvDecoder, GatedConvEncoder
from flowbnn.vae.variational import VAE

__all__ = [
    "VAE",
    "Autoencoder",
    "BernoulliDecoder",
    "Decoder",
    "GatedConvDecoder",
    "GatedConvEncoder",
    "GaussianDecoder",
    "LogisticDecoder",
    "fit_autoencoder",
    "load_autoencoder",
]
