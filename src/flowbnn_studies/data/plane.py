"""Six distributions in the plane that densities are tried on, each with its exact density."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PI = math.pi


@dataclass(frozen=True)
class Plane:
    """A distribution in the plane: draws, and the logarithm of its density.

    >>> points = TOYS["rings"].sample(5, torch.Generator().manual_seed(0))
    >>> points.shape, TOYS["rings"].log_prob(points).shape
    (torch.Size([5, 2]), torch.Size([5]))
    """

    label: str
    reach: float = 3.0  # the square that pictures show, to either side of the origin

    def sample(self, number: int, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    def log_prob(self, points: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Curves(Plane):
    r"""Points on curves with Gaussian noise, :math:`p(x) = \int N(x; c(t), \sigma^2 I)\, p(t)\, dt`.

    The integral is a sum over nodes that are even in :math:`t`. They are less than :math:`\sigma` apart on the curve, where the
    rectangle rule has an error below :math:`10^{-8}` (but for the ends of the curve, below :math:`10^{-3}`).
    """

    kind: str = "moons"
    spread: float = 0.1
    nodes: int = 200

    def curve(self, share: Tensor, which: Tensor) -> Tensor:
        """Places on curve 0 or 1 at ``share`` of the range of its parameter."""
        sign = 1.0 - 2.0 * which
        if self.kind == "gaussians":  # eight places on a circle in place of a curve
            angle = 2 * PI * (share * 8).floor() / 8
            return 2 * torch.stack([angle.cos(), angle.sin()], -1)
        if self.kind == "moons":
            angle = PI * share
            return torch.stack(
                [sign * angle.cos() + which - 0.5, sign * angle.sin() + 0.5 * which - 0.25], -1
            )
        angle = 3 * PI * share
        return sign[..., None] * (angle / PI)[..., None] * torch.stack([-angle.cos(), angle.sin()], -1)

    def sample(self, number: int, generator: torch.Generator) -> Tensor:
        share = torch.rand(number, generator=generator)
        share = share.sqrt() if self.kind == "spirals" else share  # as dense outside as inside
        which = torch.randint(2, (number,), generator=generator).to(share)
        return self.curve(share, which) + self.spread * torch.randn(number, 2, generator=generator)

    def log_prob(self, points: Tensor) -> Tensor:
        which = torch.arange(2).repeat_interleave(self.nodes // 2).to(points)
        share = ((torch.arange(self.nodes // 2) + 0.5) / (self.nodes // 2)).repeat(2).to(points)
        weight = share if self.kind == "spirals" else torch.ones_like(share)
        square = (points.unsqueeze(-2) - self.curve(share, which)).square().sum(-1)
        logs = weight.log() - square / (2 * self.spread**2)
        return logs.logsumexp(-1) - weight.sum().log() - math.log(2 * PI * self.spread**2)


@dataclass(frozen=True)
class Rings(Plane):
    r"""Circles with Gaussian noise of the radius, :math:`p(x) = \frac{1}{2 \pi r} \frac1K \sum_k N(r; r_k, \sigma^2)`."""

    radii: tuple[float, ...] = (0.75, 1.5, 2.25, 3.0)
    spread: float = 0.1

    def sample(self, number: int, generator: torch.Generator) -> Tensor:
        radius = torch.tensor(self.radii)[torch.randint(len(self.radii), (number,), generator=generator)]
        radius = radius + self.spread * torch.randn(number, generator=generator)
        angle = 2 * PI * torch.rand(number, generator=generator)
        return radius[:, None] * torch.stack([angle.cos(), angle.sin()], -1)

    def log_prob(self, points: Tensor) -> Tensor:
        radius = points.norm(dim=-1, keepdim=True)
        both = torch.cat([radius, -radius], -1).unsqueeze(
            -1
        )  # a negative radius is one in the other direction
        square = (both - torch.tensor(self.radii).to(points)).square()
        logs = (-square / (2 * self.spread**2)).flatten(-2).logsumexp(-1)
        return logs - math.log(len(self.radii) * self.spread) - 1.5 * math.log(2 * PI) - radius[..., 0].log()


@dataclass(frozen=True)
class Checkerboard(Plane):
    """Uniform on the dark fields of a board of four by four, of side 4."""

    def sample(self, number: int, generator: torch.Generator) -> Tensor:
        row, column = (
            torch.randint(4, (number,), generator=generator),
            torch.randint(2, (number,), generator=generator),
        )
        corner = torch.stack([2 * column + row % 2, row], -1) - 2.0
        return corner + torch.rand(number, 2, generator=generator)

    def log_prob(self, points: Tensor) -> Tensor:
        field = points.floor()
        dark = (field.sum(-1) % 2 == 0) & ((field >= -2) & (field < 2)).all(-1)
        return torch.where(dark, -math.log(8.0), -torch.inf)


@dataclass(frozen=True)
class Pinwheel(Plane):
    r"""Five Gaussian arms, turned around the origin by an angle that grows with the distance from it.

    Such a turn preserves areas, so :math:`\log p(x)` is that of the straight arms at :math:`x` turned back.
    """

    arms: int = 5
    turn: float = 1.0

    def turned(self, points: Tensor, by: Tensor | float) -> Tensor:
        angle = torch.atan2(points[..., 1], points[..., 0]) + by
        return points.norm(dim=-1, keepdim=True) * torch.stack([angle.cos(), angle.sin()], -1)

    def sample(self, number: int, generator: torch.Generator) -> Tensor:
        straight = torch.tensor([1.6, 0.0]) + torch.tensor([0.45, 0.15]) * torch.randn(
            number, 2, generator=generator
        )
        arm = 2 * PI * torch.randint(self.arms, (number,), generator=generator) / self.arms
        return self.turned(straight, arm + self.turn * straight.norm(dim=-1))

    def log_prob(self, points: Tensor) -> Tensor:
        back = points.norm(dim=-1, keepdim=True) * self.turn
        arms = 2 * PI * torch.arange(self.arms).to(points) / self.arms
        straight = self.turned(points.unsqueeze(-2), -back - arms)
        scaled = (straight - torch.tensor([1.6, 0.0]).to(points)) / torch.tensor([0.45, 0.15]).to(points)
        logs = -0.5 * scaled.square().sum(-1) - math.log(2 * PI * 0.45 * 0.15)
        return logs.logsumexp(-1) - math.log(self.arms)


TOYS: Mapping[str, Plane] = {
    "moons": Curves("Two moons", 2.0, kind="moons"),
    "gaussians": Curves("Eight Gaussians", kind="gaussians", spread=0.2, nodes=16),
    "rings": Rings("Rings", 3.6),
    "checkerboard": Checkerboard("Checkerboard", 2.5),
    "spirals": Curves("Two spirals", 3.6, kind="spirals", nodes=640),
    "pinwheel": Pinwheel("Pinwheel"),
}
