"""What a training step needs of the noise of all layers, in few launches: KL and entropy, and the draws of the pass that comes next."""

from typing import Any

import torch
from torch import Tensor

from flowbnn.distributions import Divergence
from flowbnn.layers import mixtures
from flowbnn.layers.gaussians import Frame, draw, summarize
from flowbnn.layers.input_noise import InputNoise
from flowbnn.layers.noise import Noise
from flowbnn.layers.packing import (
    alike,
    flows_last,
    gather_all,
    in_full_precision,
    mixed_ends,
    normals,
    packable,
    push_all,
)
from flowbnn.layers.sharing import Share
from flowbnn.transforms import fused

__all__ = ["Divergences", "ahead", "divergences"]


class Divergences(dict[str, Divergence]):
    """KL and entropy by layer; ``total`` has their sums, or None where no layer has a density."""

    def __init__(self, parts: dict[str, Divergence], total: Divergence | None) -> None:
        super().__init__(parts)
        self.total = total


def divergences(layers: dict[str, Noise]) -> Divergences:
    """KL and entropy of every layer that has them."""
    return _joined(layers, {}, [])


def _normal_divergences(packed: list[Any]) -> tuple[list[Divergence], Divergence]:
    """Of layers that begin as Gaussians: KL and entropy of each and of all."""
    order, ordered = flows_last(packed)
    flows = [noise for noise in ordered if noise.rest]
    gathered = gather_all(ordered)
    _, mean, deviation, _ = gathered
    if not flows:
        return _summary(order, gathered, 0, None, [], None)
    width = sum(noise.layout.dim for noise in flows)
    normal = normals(flows, flows[0].kl_samples, width, mean)
    ends, log_dets = push_all(flows, draw(mean, deviation, normal, len(mean) - width))
    return _summary(order, gathered, len(flows), normal, ends, log_dets)


def _mixed_divergences(packed: list[Any]) -> tuple[list[Divergence], Divergence]:
    """The same of layers that begin as mixtures."""
    blended = mixtures.blend(packed)
    drawn = mixtures.draw(blended, *mixtures.start(packed, 0, packed[0].kl_samples))
    return mixtures.summarize(packed, blended, drawn, *mixed_ends(packed, drawn))


def ahead(layers: dict[str, Noise], rows: int) -> Divergences | None:
    """Draw the noise for the network's next pass, of ``rows`` rows, and fresh draws for the KL, all in one go.

    What a step needs of the noise then takes half the operations. The draws of the KL are others than those of the pass, as in
    :func:`divergences`, whose result this is. None where the layers cannot be laid end to end; then nothing has been drawn.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return None
    able, mixed = (
        {name: noise for name, noise in some.items() if packable(noise) and noise.group is not None}
        for some in (_together(layers), mixtures.together(layers))
    )
    able, mixed = (some if len(some) > 1 else {} for some in (able, mixed))
    if not able and not mixed:
        return _ahead_at_positions(layers, rows)
    found: dict[str, Divergence] = {}
    totals: list[Divergence] = []
    prepared: list[tuple[Noise, Tensor]] = []
    for some, make in ((able, _normal_ahead), (mixed, _mixed_ahead)):
        if some:
            packed = list(some.values())
            with in_full_precision(packed):
                draws, parts, total = make(packed, rows)
            prepared += draws
            found |= dict(zip(some, parts, strict=True))
            totals.append(total)
    _hand_over(prepared)
    return _joined(layers, found, totals)


def _hand_over(prepared: list[tuple[Any, Tensor]]) -> None:
    """Draws for the next pass, to the networks that their layers belong to."""
    for noise, _ in prepared:
        noise.group.prepared, noise.group.prepared_with_gradients = [], torch.is_grad_enabled()
    for noise, drawn in prepared:
        noise.group.prepared.append((noise, drawn))


Made = tuple[list[tuple[Noise, Tensor]], list[Divergence], Divergence]


def _normal_ahead(packed: list[Any], rows: int) -> Made:
    """Of layers that begin as Gaussians: the draws of the next pass, and KL and entropy of each and of all."""
    order, ordered = flows_last(packed)
    flows = [noise for noise in ordered if noise.rest]
    fresh = flows[0].kl_samples if flows else 0
    gathered = gather_all(ordered)
    frame, mean, deviation, _ = gathered
    cut = len(mean) - sum(noise.layout.dim for noise in flows)
    normal = _normal_for(packed, rows, fresh, mean)
    starts = draw(mean, deviation, normal)
    draws = list(starts[:rows, :cut].split(frame.sizes[: len(ordered) - len(flows)], -1)) if cut else []
    ends: list[Tensor] = []
    log_dets: Tensor | None = None
    if flows:
        pushed, found = push_all(flows, starts[:, cut:] if cut else starts)
        halves = [x.split([rows, fresh]) for x in pushed]
        draws, ends = [*draws, *(half[0] for half in halves)], [half[1] for half in halves]
        log_dets = None if found is None else found[:, rows:]
    of_kl = normal[rows:, cut:] if flows else None
    return list(zip(ordered, draws, strict=True)), *_summary(
        order, gathered, len(flows), of_kl, ends, log_dets
    )


def _mixed_ahead(packed: list[Any], rows: int) -> Made:
    """The same of layers that begin as mixtures."""
    fresh = packed[0].kl_samples
    blended = mixtures.blend(packed)
    starts = mixtures.draw(blended, *mixtures.start(packed, rows, fresh, packed[0].share))
    ends, log_dets = mixed_ends(packed, starts)
    draws = ends[:rows].split(blended.sizes, -1)
    log_dets = None if log_dets is None else log_dets[:, rows:]
    return list(zip(packed, draws, strict=True)), *mixtures.summarize(
        packed, blended, starts[rows:], ends[rows:], log_dets
    )


def _ahead_at_positions(layers: dict[str, Noise], rows: int) -> Divergences | None:
    """The same where noise is drawn anew at every position, which pays on a device with kernels for many flows at once.

    An earlier pass over as many rows has told how many positions each layer has. None where there was none, or nothing to gain.
    """
    able = _together(layers)
    order, ordered = flows_last(list(able.values()))
    flows = [noise for noise in ordered if noise.rest]
    told = [(noise, noise.foreseen(rows)) for noise in flows]
    drawn = [(noise, found) for noise, found in told if found is not None and noise.group is not None]
    if not drawn or any(noise.chain is None for noise in flows):
        return None
    if not fused.available(flows[0].start[1].shift):
        return None
    with in_full_precision(ordered):
        gathered = gather_all(ordered)
        _, mean, deviation, _ = gathered
        sizes = [noise.layout.dim for noise in flows]
        normal = normals(flows, flows[0].kl_samples, sum(sizes), mean)
        of_kl = draw(mean, deviation, normal, len(mean) - sum(sizes))
        groups = [fused.Group([noise.chain for noise in flows], of_kl, True)]
        for noise, (at, rounded) in drawn:
            start = noise.begin_rows(rows, at)
            groups.append(fused.Group([noise.chain], start.reshape(-1, start.shape[-1]), False, rounded))
        (ends, log_dets), *draws = fused.push_groups(groups)
        parts, total = _summary(order, gathered, len(flows), normal, list(ends.split(sizes, -1)), log_dets)
    _hand_over(
        [
            (noise, x.view(rows, *at, noise.layout.dim))
            for (noise, (at, _)), (x, _) in zip(drawn, draws, strict=True)
        ]
    )
    return _joined(layers, dict(zip(able, parts, strict=True)), [total])


def _normal_for(layers: list[Any], rows: int, fresh: int, like: Tensor) -> Tensor:
    """Normal numbers for ``rows`` rows and ``fresh`` more, in one draw, of which a process that has a share keeps its own rows."""
    share: Share | None = layers[0].share
    if share is None:
        return normals(layers, rows + fresh, len(like), like)
    drawn: list[Tensor] = []

    def whole(number: int) -> Tensor:
        drawn.append(normals(layers, number + fresh, len(like), like))
        return drawn[0][:number]

    mine = share.of(rows, whole)
    return torch.cat([mine, drawn[0][len(drawn[0]) - fresh :]]) if fresh else mine


def _together(layers: dict[str, Noise]) -> dict[str, Any]:
    """The layers whose noise begins as a learnable Gaussian and can be laid end to end; none where they differ."""
    able = {
        name: noise
        for name, noise in layers.items()
        if isinstance(noise, InputNoise) and noise.start is not None
    }
    if len({noise.kl_samples for noise in able.values() if noise.rest}) > 1:
        able = {name: noise for name, noise in able.items() if not noise.rest}
    return able if len(able) > 1 and alike(list(able.values())) else {}


def _joined(layers: dict[str, Noise], found: dict[str, Divergence], totals: list[Divergence]) -> Divergences:
    """What was found together, with its totals, and the other layers': together where that goes, else one by one."""
    rest = {name: noise for name, noise in layers.items() if name not in found}
    found, totals = dict(found), list(totals)
    for some, make in (
        (_together(rest), _normal_divergences),
        (mixtures.together(rest), _mixed_divergences),
    ):
        if some:
            packed = list(some.values())
            with in_full_precision(packed):
                each, whole = make(packed)
            found |= dict(zip(some, each, strict=True))
            totals.append(whole)
    parts: dict[str, Divergence] = {}
    alone = totals
    for name, noise in layers.items():
        part = found[name] if name in found else noise.divergence()
        if part is not None:
            parts[name] = part
            if name not in found:
                alone.append(part)
    total = alone[0] if alone else None
    if len(alone) > 1:
        total = Divergence(
            torch.stack([part.kl for part in alone]).sum(),
            torch.stack([part.entropy for part in alone]).sum(),
        )
    return Divergences(parts, total)


def _summary(
    order: list[int],
    gathered: tuple[Frame, Tensor, Tensor, Tensor],
    flows: int,
    normal: Tensor | None,
    ends: list[Tensor],
    log_dets: Tensor | None,
) -> tuple[list[Divergence], Divergence]:
    """Closed form for the Gaussians; for the flows the bracket of :func:`~flowbnn.distributions.divergence` on fresh draws."""
    frame, mean, deviation, log_scale = gathered
    kls, entropies = summarize(frame, flows, mean, deviation, log_scale, normal, log_dets, ends)
    pairs = dict(zip(order, zip(kls.unbind(), entropies.unbind(), strict=True), strict=True))
    each = [Divergence(*pairs[place]) for place in range(len(order))]
    return each, Divergence(kls.sum(), entropies.sum())
