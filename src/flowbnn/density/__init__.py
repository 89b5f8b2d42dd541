r"""Densities: flows fitted to data by maximum likelihood, and to unnormalized densities by variational inference.

>>> import torch, flowbnn as fb
>>> data = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 30.0])
>>> density = fb.fit_density(fb.flows.RealNVP(2), data, epochs=2, seed=0, progress=False)
>>> density.log_prob(data[:5]).shape, density.sample(3, seed=0).shape
(torch.Size([5]), torch.Size([3, 2]))
>>> detector = density.novelty(data[:100], rate=0.05)
>>> detector.is_novel(torch.tensor([[0.0, 0.0], [9.0, 900.0]])).tolist()
[False, True]

A flow is any module that returns a distribution when it is called: a :class:`~flowbnn.flows.FlowModel`, a variational autoencoder, or a
user-defined module. If its ``log_prob`` is a lower bound (``lower_bound`` is True), so are the densities computed here.
"""

from flowbnn.density.density import Density, NoveltyDetector, load_density
from flowbnn.density.fit import DensityOptions, fit_density
from flowbnn.density.target import fit_target

__all__ = [
    "Density",
    "DensityOptions",
    "NoveltyDetector",
    "fit_density",
    "fit_target",
    "load_density",
]
