"""Equally weighted mixture of points or Gaussians over the noise of all layers, for :class:`~flowbnn.ModeEnsemble`."""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from flowbnn.distributions import Base, NormalBase
from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError
from flowbnn.noise import Layout, Noise, Recipe
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.joint import join
from flowbnn.options import Count, options
from flowbnn.transforms import Compose

Covariance = Literal["none", "diagonal", "full"]


@options
class ModeNoise(Recipe):
    """Recipe of a mixture of points, or of Gaussians, over the noise of all layers jointly.

    Args:
        modes: Number of components.
        covariance: Covariance of the components: ``"none"`` (points), ``"diagonal"`` or ``"full"``.
        joint: Always ``"full"``, because the mixture covers all layers.

    >>> ModeNoise(modes=4).covariance
    'none'
    """

    modes: Count = field(default=16, kw_only=True)
    covariance: Covariance = field(default="none", kw_only=True)
    joint: Literal["full"] = field(default="full", kw_only=True)

    def build_joint(self, layouts: Sequence[Layout]) -> list[Noise]:
        dim = sum(layout.dim for layout in layouts)
        base = ModeBase(dim, self.modes, self.covariance)
        prior = NormalBase(dim, self.prior_loc, self.prior_scale)
        noise = InputNoise(base, Compose(), prior, Layout(dim), kl_samples=self.kl_samples, label=str(self))
        return join(noise, layouts)


class ModeBase(Base):
    """Base distribution that stores modes, their energies and the roots of their covariances; none of them is trained.

    Args:
        dim: Dimension of the noise of all layers.
        modes: Number of components.
        covariance: Covariance of the components, ``"none"``, ``"diagonal"`` or ``"full"``.
    """

    def __init__(self, dim: int, modes: int, covariance: Covariance) -> None:
        super().__init__()
        self.dim = dim
        self.loc = nn.Parameter(torch.ones(modes, dim), requires_grad=False)
        self.energy = nn.Parameter(torch.zeros(modes, dtype=torch.float64), requires_grad=False)
        shape = {"none": None, "diagonal": (modes, dim), "full": (modes, dim, dim)}[covariance]
        self.root = None if shape is None else nn.Parameter(torch.zeros(shape), requires_grad=False)

    @torch.no_grad()
    def assign(self, modes: Tensor, energy: Tensor, roots: Tensor | None) -> None:
        """Stores modes ``[K, D]``, energies ``[K]`` and roots ``[K, D, D]`` or ``[K, D]``."""
        self.loc.copy_(modes)
        self.energy.copy_(energy)
        if self.root is not None and roots is not None:
            self.root.copy_(roots)

    def distribution(self) -> "ModeMixture":
        return ModeMixture(self.loc, self.root)


class ModeMixture(Distribution):
    r"""Equally weighted mixture of Gaussians :math:`\mathcal N(\mu_k, L_k L_k^T)`, or of points.

    Samples are stratified: every component is drawn once before one is repeated.

    Args:
        loc: Means ``[K, D]``.
        root: Lower triangular roots ``[K, D, D]``, diagonal roots ``[K, D]``, or None for points.

    >>> mixture = ModeMixture(torch.tensor([[-1.0], [1.0]]))
    >>> mixture.sample((2,)).sort(0).values.flatten()
    tensor([-1.,  1.])
    """

    has_rsample = True
    support = constraints.independent(constraints.real, 1)
    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, loc: Tensor, root: Tensor | None = None) -> None:
        self.loc, self.root = loc, root
        super().__init__(torch.Size(), loc.shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc.mean(0)

    @property
    def variance(self) -> Tensor:
        between = self.loc.var(0, correction=0)
        if self.root is None:
            return between
        squares = self.root.square()
        return between + (squares if squares.ndim == 2 else squares.sum(-1)).mean(0)

    def rsample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        shape, device = torch.Size(sample_shape), self.loc.device
        number, count = shape.numel(), len(self.loc)
        orders = [
            torch.randperm(count, generator=generator, device=device) for _ in range(-(-number // count))
        ]
        index = torch.cat(orders)[:number]
        samples = self.loc[index]
        if self.root is not None:
            normal = standard_normal(samples.shape, samples.dtype, device, generator)
            if self.root.ndim == 2:
                samples = torch.addcmul(samples, self.root[index], normal)
            else:
                for component in index.unique().tolist():  # one root per sample would take too much memory
                    mask = index == component
                    samples[mask] += normal[mask] @ self.root[component].mT
        return samples.view(*shape, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        if self.root is None:
            text = "width='point' has no density; use ModeEnsemble(width='laplace')"
            raise FlowBNNError(text, kind="unsupported")
        deviation = value.unsqueeze(-2) - self.loc
        if self.root.ndim == 2:
            scaled, log_det = deviation / self.root, self.root.log().sum(-1)
        else:
            scaled = torch.linalg.solve_triangular(self.root, deviation.unsqueeze(-1), upper=False).squeeze(
                -1
            )
            log_det = self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_densities = (
            -0.5 * (scaled.square().sum(-1) + self.loc.shape[-1] * math.log(2.0 * math.pi)) - log_det
        )
        return torch.logsumexp(log_densities, -1) - math.log(len(self.loc))
