"""Dropout as noise."""

from collections.abc import Iterable

import torch
from torch import Tensor

from flowbnn.noise.base import Noise, Site
from flowbnn.noise.layout import Layout

__all__ = ["DropoutNoise"]


class DropoutNoise(Noise):
    r"""Dropout as multiplicative noise: :math:`z_i = b_i / (1 - p)`, :math:`b_i \sim \mathrm{Bernoulli}(1 - p)`.

    Kept on at prediction this is MC dropout (Gal & Ghahramani, 2016). It has nothing to train and no KL.
    """

    def __init__(self, layout: Layout, rate: float, site: Site = "position") -> None:
        super().__init__(layout, site)
        self.rate = rate
        self.label = f"Dropout({rate:g})"
        self.register_buffer("_device", torch.empty(0), persistent=False)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        return self._kept(self._uniform(shape, generator))

    def draw_each(self, at: tuple[int, ...], generators: Iterable[torch.Generator]) -> Tensor:
        return self._kept(torch.stack([self._uniform(at, generator) for generator in generators]))

    def _uniform(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        device = self.get_buffer("_device").device
        return torch.rand((*shape, self.layout.dim), generator=generator, device=device)

    def _kept(self, uniform: Tensor) -> Tensor:
        return (uniform >= self.rate).float() / (1.0 - self.rate)

    def mean(self) -> Tensor:
        return torch.ones(self.layout.dim, device=self.get_buffer("_device").device)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, dim={self.layout.dim}, site={self.site}"
