r"""Do Markov chains agree, and how many independent draws are they worth?

Vehtari et al. 2021 (https://arxiv.org/abs/1903.08008). Every chain is split in halves; ranks in place of values make the answers
invariant to monotone changes of scale and robust to heavy tails.

.. math:: \hat R = \sqrt{\frac{\frac{n-1}{n} W + \frac1n B}{W}}, \qquad
          \mathrm{ESS} = \frac{m n}{-1 + 2 \sum_{t=0}^{K} (\hat\rho_{2t} + \hat\rho_{2t+1})}

with :math:`W` and :math:`B` the variances within and between :math:`m` half chains of :math:`n` draws, and :math:`\hat\rho` their
autocorrelations, summed in Geyer's monotone pairs as long as these are positive.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.options import checked

FEWEST = 4  # draws of a chain below which halves have no variance


@checked
def split_rhat(draws: Tensor) -> Tensor:
    r"""Rank-normalised split :math:`\hat R`, the larger of that of the values and that of their distances from the median.

    At 1 the chains agree; above 1.01 to 1.05 they have not mixed yet.

    Args:
        draws: ``[chains, draws, ...]``.

    Returns:
        One number for every remaining axis. A quantity that is the same in all draws has 1, one that differs between chains but not
        within them infinity.

    >>> draws = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    >>> bool(split_rhat(draws) < 1.01), bool(split_rhat(draws + torch.arange(4.0)[:, None]) > 1.3)
    (True, True)
    """
    halves, shape = _halves(draws)
    folded = (halves - _quantile(halves.flatten(0, 1).sort(0).values, 0.5)).abs()
    return torch.maximum(_rhat(_normal_scores(halves)), _rhat(_normal_scores(folded))).reshape(shape)


@checked
def effective_sample_size(draws: Tensor, kind: Literal["bulk", "tail", "mean"] = "bulk") -> Tensor:
    """The number of independent draws with the same information.

    Args:
        draws: ``[chains, draws, ...]``.
        kind: ``"bulk"``, of the middle of the distribution, by ranks; ``"tail"``, the smaller of those of the 5 % and 95 % quantiles;
            ``"mean"``, of the mean of the values themselves, for its standard error.

    >>> draws = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    >>> bool((effective_sample_size(draws) - 2000).abs() < 300)
    True
    """
    halves, shape = _halves(draws)
    if kind != "tail":
        return _ess(halves if kind == "mean" else _normal_scores(halves)).reshape(shape)
    ordered = draws.detach().double().reshape(-1, halves.shape[-1]).sort(0).values
    sizes = [_ess((halves <= _quantile(ordered, level)).double()) for level in (0.05, 0.95)]
    return torch.minimum(*sizes).reshape(shape)


@checked
def standard_error(draws: Tensor) -> Tensor:
    """Monte Carlo standard error of the mean of draws ``[chains, draws, ...]``."""
    size = effective_sample_size(draws, "mean")
    return draws.flatten(0, 1).double().std(0) / size.sqrt()


def _halves(draws: Tensor) -> tuple[Tensor, torch.Size]:
    """Half chains ``[2 m, n, K]`` in float64, and the shape of the K quantities."""
    if draws.ndim < 2 or draws.shape[1] < FEWEST or not bool(torch.isfinite(draws).all()):
        raise FlowBNNError(
            f"draws must be [chains, draws, ...] with at least {FEWEST} draws of each chain, none NaN or infinity, got "
            f"{tuple(draws.shape)}",
            argument="draws",
        )
    values = draws.detach().double().reshape(*draws.shape[:2], -1)
    half = draws.shape[1] // 2
    return torch.cat([values[:, :half], values[:, -half:]]), draws.shape[2:]


def _quantile(ordered: Tensor, level: float) -> Tensor:
    """A quantile of sorted values on the first axis, between the two nearest ones."""
    place = level * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low)


def _normal_scores(halves: Tensor) -> Tensor:
    """Ranks over all chains, those of equals averaged, as quantiles of the normal distribution."""
    values = halves.flatten(0, 1).T.contiguous()  # [K, S]
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values)
    upto = torch.searchsorted(ordered, values, right=True)
    ranks = 0.5 * (below + upto + 1).double()
    share = (ranks - 0.375) / (values.shape[-1] + 0.25)
    return torch.special.ndtri(share).T.reshape(halves.shape)


def _rhat(halves: Tensor) -> Tensor:
    count = halves.shape[1]
    within = halves.var(1).mean(0)
    between = halves.mean(1).var(0)
    rhat = ((count - 1) / count + between / within).sqrt()
    stuck = torch.where(between <= 1e-24, 1.0, torch.inf).double()
    return torch.where(within == 0, stuck, rhat)


def _ess(halves: Tensor) -> Tensor:
    chains, count, _ = halves.shape
    centred = halves - halves.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * count, dim=1)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=2 * count, dim=1)[:, :count].mean(0) / count
    within = covariance[0] * count / (count - 1)
    total = covariance[0] + (halves.mean(1).var(0) if chains > 1 else 0.0)
    constant = total <= 1e-24 * (1.0 + halves.square().mean((0, 1)))
    total = torch.where(constant, torch.ones_like(total), total)
    rho = 1.0 - (within - covariance) / total
    rho[0] = 1.0
    most = max(1, math.ceil((count - 2) / 2) - 1)  # the last pair of lags with enough draws
    pairs = rho[: 2 * (count // 2)].reshape(count // 2, 2, -1)
    sums, even = pairs.sum(1), pairs[:, 0]
    index = torch.arange(len(sums), device=halves.device)[:, None]
    ended = ((sums <= 0) & (index > 0)) | (index >= min(most, len(sums) - 1))
    end = ended.int().argmax(0)
    counted = torch.where(index < end, sums.cummin(0).values, torch.zeros_like(sums))
    tail = even.gather(0, end[None])[0].clamp_min(0.0)
    number = float(chains * count)
    tau = (2.0 * counted.sum(0) - 1.0 + tail).clamp_min(1.0 / math.log10(number))
    return torch.where(constant, torch.full_like(tau, number), number / tau)
