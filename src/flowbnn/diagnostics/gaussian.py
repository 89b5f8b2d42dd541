r"""What correlation costs a posterior that does not have it, in nats, and how far two sets of draws are from each other."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.options import Count, Seed, checked


def correlation_nats(
    precision: Tensor, sizes: Sequence[int], freedom: float | None = None
) -> tuple[float, float]:
    r"""By how much the ELBO of a Gaussian falls when it loses its correlations within blocks, and those across them.

    Of a Gaussian with precision :math:`\Lambda`, in blocks :math:`l` with entries :math:`i`, the best approximation by independent
    blocks, or by independent numbers, has its diagonal blocks, or its diagonal, as precision, and

    .. math:: \mathrm{across} = \tfrac12 \Big(\sum_l \log|\Lambda_{ll}| - \log|\Lambda|\Big), \qquad
              \mathrm{within} = \tfrac12 \Big(\sum_i \log\Lambda_{ii} - \sum_l \log|\Lambda_{ll}|\Big)

    (Turner and Sahani 2011, https://doi.org/10.1017/CBO9780511984679.006).

    Args:
        precision: ``[D, D]``.
        sizes: of the blocks, D in all.
        freedom: where it is the inverse of a sample covariance, the degrees of freedom of that, draws less one: the bias of the
            determinants of Wishart matrices is taken out.

    Returns:
        ``(within, across)``.

    >>> precision = torch.linalg.inv(torch.tensor([[1.0, 0.8], [0.8, 1.0]]))  # correlation 0.8: -log(1 - 0.64) / 2 = 0.51
    >>> [[round(value, 2) for value in correlation_nats(precision, sizes)] for sizes in ([2], [1, 1])]
    [[0.51, 0.0], [0.0, 0.51]]
    """
    dim = len(precision)

    def log_det(matrix: Tensor) -> float:
        value, own = float(torch.linalg.slogdet(matrix.double())[1]), len(matrix)
        if freedom is None:
            return value
        # the inverse of a diagonal block is Wishart with the degrees of freedom that the other dimensions leave
        ranks = freedom - (dim - own) - torch.arange(own, dtype=torch.float64)
        return value + float(torch.special.digamma(ranks / 2.0).sum()) + own * math.log(2.0 / freedom)

    blocks = [block.split(list(sizes), 1)[at] for at, block in enumerate(precision.split(list(sizes)))]
    diagonal = sum(log_det(entry.reshape(1, 1)) for entry in precision.diagonal())
    between = sum(log_det(block) for block in blocks)
    return 0.5 * (diagonal - between), 0.5 * (between - log_det(precision))


@checked
def sliced_wasserstein(one: Tensor, other: Tensor, directions: Count = 256, seed: Seed = 0) -> float:
    r"""Mean over directions :math:`\theta` of the 1-Wasserstein distance of the draws' projections :math:`\theta^\top z`.

    Args:
        one, other: ``[S, D]``; numbers of draws may differ.

    >>> draws = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    >>> moved = torch.tensor([3.0, 0.0, 0.0])  # the mean of |cos| on the sphere is 1 / 2
    >>> abs(sliced_wasserstein(draws, draws + moved, directions=500) - 1.5) < 0.1
    True
    """
    source = torch.Generator().manual_seed(seed)
    theta = torch.randn(one.shape[-1], directions, generator=source, dtype=torch.float64)
    theta = (theta / theta.norm(dim=0)).to(one.device)
    places = (torch.arange(256, dtype=torch.float64, device=one.device) + 0.5) / 256
    each = [torch.quantile((draws.double() @ theta), places, dim=0) for draws in (one, other)]
    return float((each[0] - each[1]).abs().mean())
