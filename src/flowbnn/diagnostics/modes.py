r"""Search for the modes of the exact posterior density of the noise."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowbnn.diagnostics.noise_chains import NoiseChains
from flowbnn.diagnostics.noise_target import NoiseTarget, WhitenedDensity
from flowbnn.errors import warn
from flowbnn.options import Count, Seed, checked
from flowbnn.posterior.base import Posterior
from flowbnn.training import track


@dataclass(frozen=True, eq=False)
class Modes:
    r"""Distinct maxima of :math:`p(z \mid D)`, the highest first.

    Args:
        vectors: Noise at the maxima, ``[M, D]``.
        log_density: Log-densities :math:`\log p(D, z)` at the maxima, ``[M]``.
        counts: Number of optimizer runs that ended at each maximum.
        dips: Drops of the log-density on the line between two maxima, measured from the lower maximum, ``[M, M]`` in nats.
    """

    vectors: Tensor
    log_density: Tensor
    counts: tuple[int, ...]
    dips: Tensor

    def __len__(self) -> int:
        return len(self.vectors)

    def __repr__(self) -> str:
        heights = ", ".join(f"{height:.1f}" for height in self.log_density.tolist())
        return f"Modes({len(self)} modes from {sum(self.counts)} runs; log-density {heights}; runs per mode {self.counts})"

    def missed(self, chains: NoiseChains, depth: float = 10.0) -> int:
        """Returns the number of modes that the chains never visited.

        A mode is visited if it is the nearest mode of a draw.

        Args:
            chains: Chains of :func:`~flowbnn.diagnostics.noise_chains`.
            depth: Modes lower than the highest by more than this number of nats are ignored, because they carry hardly any mass.
        """
        high = self.log_density > self.log_density.max() - depth
        modes = chains.space.position(self.vectors[high].to(chains.target.device))
        draws = chains.position.to(modes).flatten(0, 1)
        return len(modes) - len(torch.cdist(draws, modes).argmin(1).unique())


@checked
def modes(posterior: Posterior, loader: Iterable[Any], starts: Count = 16, seed: Seed = 0) -> Modes:
    r"""Finds distinct maxima of the density that a posterior approximates, by L-BFGS from draws of the prior.

    Two results are the same maximum if the log-density on the line between them falls by less than one nat. A
    :class:`~flowbnn.FlowBNNWarning` of kind ``"modes"`` is raised if runs do not converge in 200 iterations.

    Args:
        posterior: Fitted posterior of noise.
        loader: Data that the posterior was fitted to.
        starts: Number of optimizer runs.
        seed: Seed of the initial points.

    >>> import flowbnn as fb
    >>> inputs = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    >>> data = [(inputs, inputs.sum(1, keepdim=True))]
    >>> method = fb.NodeNoise(fb.noise.NormalAffine(), epochs=20)
    >>> posterior = method.fit(torch.nn.Linear(3, 1), data, seed=0, progress=False)
    >>> len(modes(posterior, data, starts=4))  # a linear network has one
    1
    """
    return find_modes(NoiseTarget(posterior, loader, seed), starts)


def find_modes(
    target: NoiseTarget, starts: int = 16, max_iterations: int = 200, progress: bool = False
) -> Modes:
    """Finds distinct maxima of a density of noise, as :func:`modes` does.

    Args:
        target: Density of the noise given the data.
        starts: Number of optimizer runs.
        max_iterations: Largest number of L-BFGS iterations of a run.
        progress: If True, shows a progress bar.
    """
    space = target.whitening()
    positions = track(space.position(target.draw_prior(starts)), "optimizing", progress, "run")
    runs = [_maximize(space, start, max_iterations) for start in positions]
    ends, unconverged = torch.stack([end for end, _ in runs]), sum(not converged for _, converged in runs)
    if unconverged:
        text = f"{unconverged} of {starts} L-BFGS runs did not converge in {max_iterations} steps; the number of modes is unreliable"
        warn(text, kind="modes", unconverged=unconverged)
    heights = -space(ends)[0]
    order = heights.argsort(descending=True)
    ends, heights = ends[order], heights[order]
    indices, counts = _group_ends(space, ends)
    dips = torch.zeros(len(indices), len(indices), dtype=torch.float64)
    for row, first in enumerate(indices):
        for column, second in enumerate(indices[:row]):
            dips[row, column] = dips[column, row] = _dip(space, ends[first], ends[second])
    return Modes(space.vectors(ends[indices]), heights[indices], tuple(counts), dips)


def _group_ends(space: WhitenedDensity, ends: Tensor) -> tuple[list[int], list[int]]:
    """Returns the indices of distinct maxima among the ends of the runs, and the number of ends at each."""
    indices: list[int] = []
    counts: list[int] = []
    for index in range(len(ends)):
        dips = [_dip(space, ends[index], ends[other]) for other in indices]
        if dips and min(dips) < 1.0:  # nats
            counts[dips.index(min(dips))] += 1
        else:
            indices.append(index)
            counts.append(1)
    return indices, counts


def _maximize(space: WhitenedDensity, start: Tensor, max_iterations: int) -> tuple[Tensor, bool]:
    """Returns the end of an L-BFGS run, and whether it has converged."""
    from scipy.optimize import minimize  # this import changes the filters of warnings

    def energy(position: Any) -> tuple[float, Any]:
        value, slope = space(torch.as_tensor(position).to(start)[None])
        return float(value), slope[0].cpu().numpy()

    options = {"maxiter": max_iterations}
    result = minimize(energy, start.cpu().numpy(), jac=True, method="L-BFGS-B", options=options)
    return torch.as_tensor(result.x).to(start), result.status != 1


def _dip(space: WhitenedDensity, first: Tensor, second: Tensor) -> float:
    """Returns the drop of the log-density between two points, measured from the lower point, at 15 points of the line."""
    fractions = torch.linspace(0.0, 1.0, 15, dtype=first.dtype, device=first.device)[:, None]
    heights = space.target.log_joint(space.vectors(torch.lerp(first, second, fractions)))
    return float(torch.minimum(heights[0], heights[-1]) - heights.min())
