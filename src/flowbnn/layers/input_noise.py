"""Noise from a flow: the stochastic part of document 000."""

from typing import Any, Literal

import torch
from torch import Tensor

from flowbnn.distributions import Base, DiagonalNormal, Divergence, Flow, NormalBase, divergence
from flowbnn.layers.layout import Layout
from flowbnn.layers.noise import Noise, Site
from flowbnn.transforms import Affine, Compose, Transform

__all__ = ["InputNoise"]


class InputNoise(Noise):
    r"""Noise whose posterior is a flow: a base pushed through a transform, with a prior on the result.

    .. math:: \mathrm{KL}[q(z) \| p(z)] = E_{q_0}\Big[\log q_0(z_0) - \sum_i \log|\det J_{g_i}| - \log p(z_k)\Big]

    Args:
        base: where the noise starts, :math:`q_0`.
        transform: the flow.
        prior: :math:`p`, on the *transformed* noise.
        layout: how the vector lies on the layer's tensor.
        site: ``"channel"``, one vector for the whole feature map, or ``"position"``, an independent one at every position.
        positions: for site ``"position"``: ``"mean"`` counts the KL of one position, as document 000 does (a KL tempered
            by the number of positions); an integer counts that many, which is exact when it is the map's size.
        kl_samples: fresh draws for a KL without closed form.
        label: what the conversion's table shows.
    """

    def __init__(
        self,
        base: Base,
        transform: Transform,
        prior: Base,
        layout: Layout,
        site: Site = "channel",
        positions: int | Literal["mean"] = "mean",
        kl_samples: int = 16,
        label: str = "flow",
    ) -> None:
        super().__init__(layout, site)
        self.base, self.transform, self.prior = base, transform, prior
        self.positions, self.kl_samples, self.label = positions, kl_samples, label
        # a normal base, one elementwise affine map and a normal prior: what can be done for many layers at once
        parts = list(transform) if isinstance(transform, Compose) else [transform]
        gaussian = isinstance(base, NormalBase) and isinstance(prior, NormalBase) and len(parts) == 1
        self.gaussian: Any = (base, parts[0], prior) if gaussian and isinstance(parts[0], Affine) else None

    @property
    def count(self) -> int:
        """How many vectors the KL of this layer counts."""
        return 1 if self.site == "channel" or self.positions == "mean" else int(self.positions)

    def posterior(self) -> Flow:
        """The distribution of one noise vector."""
        return Flow(self.base.distribution(), self.transform)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Noise vectors, always in float32 or better: flows lose their footing in bfloat16."""
        device = next(
            self.base.buffers() if isinstance(self.base, NormalBase) else self.base.parameters()
        ).device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._draw(shape, generator)
        return self._draw(shape, generator)

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        if self.gaussian is not None:  # no log-det, and the two affine maps in one: half the launches
            base, affine, _ = self.gaussian
            mean, deviation, _ = affine.push_normal(base.loc, base.scale)
            return DiagonalNormal(mean, deviation).rsample(shape, generator)
        return self.posterior().rsample(shape, generator)

    def mean(self) -> Tensor:
        base = self.base.distribution()
        if self.transform.linearity != "none":
            return self.transform(base.mean)[0]
        generator = torch.Generator(base.mean.device).manual_seed(0)
        return self.posterior().rsample((4096,), generator).mean(0)

    def divergence(self, samples: int | None = None, generator: torch.Generator | None = None) -> Divergence:
        device = self.base.distribution().mean.device.type
        with torch.autocast(device, enabled=False):
            kl, entropy = divergence(
                self.posterior(),
                self.prior.distribution(),
                samples or self.kl_samples,
                generator or self.generator,
            )
        return Divergence(kl * self.count, entropy * self.count)

    def extra_repr(self) -> str:
        return f"{self.label}, dim={self.layout.dim}, site={self.site}"
