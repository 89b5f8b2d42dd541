r"""The mixtures of many layers, end to end: their draws and their KL in few launches.

Layer :math:`l` starts its noise at an equal mixture of :math:`K` normals :math:`\mathcal N(\mu_k, \sigma_k^2)`, which the affine map
that follows sends to :math:`\mathcal N(m_k, d_k^2)` with :math:`m_k = c + t + e^s (\mu_k - c)` and :math:`d_k = e^s \sigma_k` (see
:mod:`flowbnn.noise.batched_gaussian`): again a mixture, whose density needs no Jacobian. A layer draws one component for each row.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import chosen_normal, components_of, standard_normal
from flowbnn.noise.base import Noise, Share
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.numerics import soft_clamp

__all__ = ["Blend", "alike", "blend", "draw", "start", "summarize", "together"]

# numbers of a layer from which on it had better draw by itself: sums of gradients then take longer than launches
MANY = 2**17
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Blend(NamedTuple):
    """Components of all layers, ``[components, numbers]`` each, the layers end to end; and the length of each layer's vector."""

    mean: Tensor
    deviation: Tensor
    log_deviation: Tensor
    sizes: tuple[int, ...]


def together(layers: dict[str, Noise]) -> dict[str, Any]:
    """The layers whose noise begins as a mixture and can be laid end to end; none where they differ."""
    able: dict[str, Any] = {
        name: noise
        for name, noise in layers.items()
        if isinstance(noise, InputNoise) and noise.mixed is not None
    }
    one_number = len({noise.kl_samples for noise in able.values()}) == 1
    return able if len(able) > 1 and one_number and alike(list(able.values())) else {}


def alike(layers: list[Any]) -> bool:
    """As many components, one bound, one generator, one dtype and device."""
    # generators by `is`: not every version of torch.compile knows the id of None
    generator = layers[0].generator
    kinds = {
        (len(base.loc), affine.bound, base.loc.dtype, base.loc.device)
        for base, affine, _ in (noise.mixed for noise in layers)
    }
    return len(kinds) == 1 and all(noise.generator is generator for noise in layers)


def blend(layers: list[Any]) -> Blend:
    """The components of the layers after their affine maps."""
    bases, affines, _ = zip(*(noise.mixed for noise in layers), strict=True)
    loc, log_scale = torch.cat([base.loc for base in bases], -1), torch.cat([b.log_scale for b in bases], -1)
    shift = torch.cat([affine.shift for affine in affines])
    grow = soft_clamp(torch.cat([affine.raw_log_scale for affine in affines]), affines[0].bound)
    sizes = tuple(noise.layout.dim for noise in layers)
    centers = [affine.center for affine in affines]
    center: Any = centers[0]
    if any(other != center for other in centers):
        center = torch.cat([torch.full_like(a.shift, a.center, requires_grad=False) for a in affines])
    mean = torch.addcmul(shift + center, loc - center, grow.exp())
    log_deviation = bases[0].bounded(log_scale) + grow
    return Blend(mean, log_deviation.exp(), log_deviation, sizes)


def start(layers: list[Any], rows: int, fresh: int = 0, share: Share | None = None) -> tuple[Tensor, Tensor]:
    """Components ``[rows + fresh, layers]`` and normal numbers ``[rows + fresh, numbers]``; of shared rows those that are here."""
    loc = layers[0].mixed[0].loc
    whole = (rows if share is None else share.whole(rows)) + fresh
    source = layers[0].generator
    which = components_of(len(loc), (whole, len(layers)), loc.device, source)
    width = sum(noise.layout.dim for noise in layers)
    normal = standard_normal(torch.Size((whole, width)), loc.dtype, loc.device, source)
    if share is None:
        return which, normal
    cut = whole - fresh
    mine = [torch.cat([share.take(drawn[:cut], rows), drawn[cut:]]) for drawn in (which, normal)]
    return mine[0], mine[1]


def draw(blended: Blend, which: Tensor, normal: Tensor) -> Tensor:
    r""":math:`m_k + d_k \epsilon` with the component ``which`` of each row and layer, ``[rows, numbers]``."""
    columns = enumerate(blended.sizes)
    if normal.numel() >= MANY * len(blended.sizes):
        tables = (tensor.split(blended.sizes, -1) for tensor in (blended.mean, blended.deviation, normal))
        parts = enumerate(zip(*tables, strict=True))
        return torch.cat([chosen_normal(m, d, which[:, i], some) for i, (m, d, some) in parts], -1)
    index = torch.cat([which[:, i : i + 1].expand(-1, size) for i, size in columns], -1)
    return torch.addcmul(blended.mean.gather(0, index), blended.deviation.gather(0, index), normal)


def summarize(
    layers: list[Any], blended: Blend, drawn: Tensor, ends: Tensor, log_dets: Tensor | None
) -> tuple[list[Divergence], Divergence]:
    """KL and entropy of each layer, and their sums: the bracket of :func:`~flowbnn.distributions.divergence` on fresh draws.

    Args:
        drawn: of the mixtures, ``[draws, numbers]``.
        ends: what the flows after them made of these.
        log_dets: of the flows, ``[layers, draws]``; None where there are none.
    """
    priors = [noise.mixed[2] for noise in layers]
    loc, scale = torch.cat([p.loc for p in priors]), torch.cat([p.scale for p in priors])
    components = len(blended.mean)
    of_each = (drawn.unsqueeze(1) - blended.mean) / blended.deviation  # [draws, components, numbers]
    of_prior = ((ends - loc) / scale).unsqueeze(1)
    logs = torch.cat([blended.log_deviation, scale.log().unsqueeze(0)]) + _HALF_LOG_2PI
    numbers = -0.5 * torch.cat([of_each, of_prior], 1).square() - logs
    # [layers, draws, components + 1]
    sums = torch.stack([part.sum(-1) for part in numbers.split(blended.sizes, -1)])
    log_q = torch.logsumexp(sums[..., :components], -1) - math.log(components)
    if log_dets is not None:
        log_q = log_q - log_dets
    counts = [float(noise.count) for noise in layers]
    kls, entropies = (log_q - sums[..., components]).mean(-1), -log_q.mean(-1)
    if any(count != 1.0 for count in counts):
        weights = torch.cat([kls.new_full((1,), count) for count in counts])
        kls, entropies = kls * weights, entropies * weights
    each = [Divergence(*pair) for pair in zip(kls.unbind(), entropies.unbind(), strict=True)]
    return each, Divergence(kls.sum(), entropies.sum())
