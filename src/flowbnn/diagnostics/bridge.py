r"""The evidence from draws of the posterior and of a proposal: bridge sampling.

.. math:: p(D) = \frac{E_g[h(z)\, p(D, z)]}{E_{p(z \mid D)}[h(z)\, g(z)]}, \qquad
          h(z) \propto \frac{1}{s_1\, p(D, z) + s_2\, p(D)\, g(z)}

with the optimal bridge :math:`h` of Meng and Wong 1996 found by iteration (Gronau et al. 2017, https://arxiv.org/abs/1703.05984). Both
expectations are of bounded quantities, so that the proposal :math:`g` may have lighter tails than the posterior.
"""

import math

import torch
from torch import Tensor

from flowbnn.diagnostics.chains import effective_sample_size
from flowbnn.options import checked


@checked
def bridge_sampling(chains: Tensor, proposal: Tensor) -> tuple[float, float]:
    r"""The log-evidence and its standard error.

    Args:
        chains: :math:`\log p(D, z) - \log g(z)` at draws of the posterior, ``[chains, draws]``.
        proposal: the same at draws of :math:`g`, ``[S]``.

    >>> source = torch.Generator().manual_seed(0)
    >>> draws = torch.randn(4, 1000, generator=source, dtype=torch.float64)
    >>> others = 1.5 * torch.randn(4000, generator=source, dtype=torch.float64)
    >>> def ratio(z):  # exp(-z^2 / 2), whose integral is 2.5066, over N(0, 1.5^2)
    ...     return -z**2 / 2 + (z / 1.5) ** 2 / 2 + math.log(1.5 * math.sqrt(2 * math.pi))
    >>> log_evidence, error = bridge_sampling(ratio(draws), ratio(others))
    >>> abs(log_evidence - math.log(math.sqrt(2 * math.pi))) < 3 * error < 0.1
    True
    """
    chains, proposal = chains.double(), proposal.double().to(chains.device)
    own = float(effective_sample_size(chains, "mean").clamp(max=chains.numel()))
    first, second = (math.log(n / (own + len(proposal))) for n in (own, float(len(proposal))))
    low = float(proposal.median())
    inner, outer = chains.flatten() - low, proposal - low
    log_evidence = torch.zeros((), dtype=torch.float64, device=chains.device)
    for _ in range(1000):
        top = (outer - torch.logaddexp(first + outer, second + log_evidence)).logsumexp(0) - math.log(
            len(outer)
        )
        bottom = (-torch.logaddexp(first + inner, second + log_evidence)).logsumexp(0) - math.log(len(inner))
        before, log_evidence = log_evidence, top - bottom
        if abs(float(log_evidence - before)) < 1e-9:
            break
    bridge = torch.full_like(log_evidence, second)
    # relative mean squared error, Fruehwirth-Schnatter 2004
    above = torch.exp(outer - log_evidence - torch.logaddexp(first + outer - log_evidence, bridge))
    below = torch.exp(-torch.logaddexp(first + inner - log_evidence, bridge)).reshape(chains.shape)
    count = float(effective_sample_size(below, "mean"))
    square = above.var() / above.mean().square() / len(outer) + below.var() / below.mean().square() / count
    return float(log_evidence) + low, math.sqrt(float(square))
