r"""Convergence diagnostics of Markov chains, computed by ``arviz-stats``.

Every chain is split in halves. Ranks replace values, which makes the diagnostics invariant to monotone transformations and robust to
heavy tails (Vehtari et al. 2021, https://arxiv.org/abs/1903.08008).

.. math:: \hat R = \sqrt{\frac{\frac{n-1}{n} W + \frac1n B}{W}}, \qquad
          \mathrm{ESS} = \frac{m n}{-1 + 2 \sum_{t=0}^{K} (\hat\rho_{2t} + \hat\rho_{2t+1})}

:math:`W` and :math:`B` are the variances within and between :math:`m` half chains of :math:`n` draws. :math:`\hat\rho` are their
autocorrelations, which Geyer's initial monotone sequence truncates.
"""

from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flowbnn.errors import check_entries, check_shape, optional_import
from flowbnn.options import checked

MIN_DRAWS = 4  # half chains of fewer than two draws have no variance


def array_statistics() -> Any:
    """Returns the array functions of ``arviz-stats``.

    The package is imported on first use, because importing it takes longer than importing flowbnn.

    Raises:
        MissingPackageError: If the package is not installed.
    """
    with optional_import("flowbnn.diagnostics", "arviz-stats", "arviz-stats"):
        from arviz_stats.base import array_stats
    return array_stats


def arviz_is_installed() -> bool:
    """Returns True if ``arviz-stats`` is installed, without importing it."""
    return find_spec("arviz_stats") is not None


@checked
def split_rhat(draws: Tensor) -> Tensor:
    r"""Returns the rank-normalized split :math:`\hat R` of Markov chains.

    It is the larger of the :math:`\hat R` of the draws and the :math:`\hat R` of their distances from the median. A value of 1 means
    that the chains agree. Chains with a value above 1.01 to 1.05 have not mixed.

    Args:
        draws: Draws of the chains, ``[chains, draws, ...]``. One chain is compared by its two halves.

    Returns:
        One value for each remaining axis. It is 1 for a quantity that is constant over all draws, and infinite for one that differs
        between chains but not within them.

    >>> draws = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    >>> bool(split_rhat(draws) < 1.01), bool(split_rhat(draws + torch.arange(4.0)[:, None]) > 1.3)
    (True, True)
    """
    values = _to_array(draws)
    half = values.shape[-1] // 2
    halves = np.concatenate([values[..., :half], values[..., -half:]], -2)
    with np.errstate(divide="ignore", invalid="ignore"):  # constant quantities, which are set below
        if values.shape[-2] > 1:
            rhat = array_statistics().rhat(values)
        else:
            rhat = _rhat_of_halves(halves)
    constant_within_chains = (halves == halves[..., :1]).all((-2, -1))
    constant = (halves == halves[..., :1, :1]).all((-2, -1))
    rhat = np.where(constant, 1.0, np.where(constant_within_chains, np.inf, rhat))
    return torch.as_tensor(rhat, device=draws.device)


@checked
def effective_sample_size(draws: Tensor, kind: Literal["bulk", "tail", "mean"] = "bulk") -> Tensor:
    """Returns the effective sample size (ESS): the number of independent draws that carry the same information.

    Args:
        draws: Draws of the chains, ``[chains, draws, ...]``.
        kind: Type of the ESS. ``"bulk"`` is the rank-normalized ESS of the center of the distribution. ``"tail"`` is the smaller ESS of
            the 5 % and 95 % quantiles. ``"mean"`` is the ESS of the mean, which gives its standard error.

    Returns:
        One value for each remaining axis.

    >>> draws = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    >>> bool((effective_sample_size(draws) - 2000).abs() < 300)
    True
    """
    quantiles = {"prob": (0.05, 0.95)} if kind == "tail" else {}
    size = array_statistics().ess(_to_array(draws), method=kind, **quantiles)
    return torch.as_tensor(size, device=draws.device)


@checked
def standard_error(draws: Tensor) -> Tensor:
    r"""Returns the Monte Carlo standard error of the mean, :math:`\hat\sigma / \sqrt{\mathrm{ESS}}`.

    Args:
        draws: Draws of the chains, ``[chains, draws, ...]``.

    Returns:
        One value for each remaining axis.

    >>> draws = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    >>> bool((standard_error(draws) - 2000**-0.5).abs() < 0.003)
    True
    """
    error = array_statistics().mcse(_to_array(draws), method="mean")
    return torch.as_tensor(error, device=draws.device)


def _to_array(draws: Tensor) -> Any:
    """Returns draws ``[chains, draws, ...]`` as a float64 array ``[..., chains, draws]``, as arviz-stats expects them.

    Raises:
        FlowBNNError: If there are too few draws, or some are not finite.
    """
    check_shape("draws", draws, ("chains", f"draws >= {MIN_DRAWS}", "..."))
    check_entries("draws", draws, torch.isfinite(draws), "finite", kind="not finite")
    return draws.detach().cpu().double().movedim((0, 1), (-2, -1)).numpy()


def _rhat_of_halves(halves: Any) -> Any:
    """Returns the rank-normalized R-hat of half chains ``[..., 2, draws]``, because arviz-stats does not split a single chain."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    folded = np.abs(halves - np.median(halves, (-2, -1), keepdims=True))
    rhats = []
    for values in (halves, folded):
        ranks = rankdata(values.reshape(*values.shape[:-2], -1), axis=-1)
        scores = ndtri((ranks - 0.375) / (ranks.shape[-1] + 0.25)).reshape(values.shape)  # Blom 1958
        rhats.append(array_statistics().rhat(scores, method="identity"))
    return np.fmax(*rhats)
