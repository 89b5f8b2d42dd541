"""Many layers' noise in few launches.

A network of many small noise vectors spends its time on launching tiny operations, not on doing them. So the learnable Gaussians of
all layers are laid end to end, and so are mixtures of them: their KL is computed at once (:mod:`flowbnn.noise.batched`), and so
are their draws, when a forward pass of the whole network begins (:class:`NoiseGroup`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn import kernels
from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.kernels import Group
from flowbnn.noise import batched_mixture as mixtures
from flowbnn.noise.base import Noise, Share
from flowbnn.noise.batched_gaussian import Frame, draw, frame_of, gather, summarize
from flowbnn.noise.flow_noise import InputNoise

__all__ = [
    "Divergences",
    "NoiseGroup",
    "ahead",
    "alike",
    "divergences",
    "flows_last",
    "gather_all",
    "in_full_precision",
    "mixed_ends",
    "normals",
    "packable",
    "push_all",
    "shared_draws",
]


class NoiseGroup:
    """The noise of one network, told by hooks on its root when a pass begins and ends.

    In a pass, a layer of site ``channel`` that draws per example draws once: called again, it keeps its draw, as noise that belongs
    to the network should. The first learnable Gaussian that asks for as many rows as the network was given draws for all of them, and
    so does the first mixture; one that asks for others (a layer that sees each time step as a row) draws for itself. Outside a pass
    of the root, and inside a part of it that runs twice (activation checkpointing), a layer draws for itself, so that torch's
    generator, which is put back for the second run, gives it the same draw again.
    """

    # the first sizes of what the pass that is going on was given; none where nothing tells
    given: tuple[int, ...] = ()

    def __init__(self, members: list[Noise]) -> None:
        self.members = members
        self.inside = self.gradients = False
        self.prepared: list[tuple[Noise, Tensor]] = []  # draws made for the pass that comes next
        self.prepared_with_gradients = False
        for member in members:
            member.group = self

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of the root."""
        if self.members and self.members[0].given is not None:  # the pass is handed its draws
            return
        self._forget()
        self.inside, self.gradients = True, torch.is_grad_enabled()
        self.given = next((tuple(given.shape[:2]) for given in args if isinstance(given, Tensor)), ())
        if (
            self.gradients == self.prepared_with_gradients
        ):  # else it is the first of two runs, which draw for themselves
            for noise, drawn in self.prepared:
                noise.ready = drawn
        self.prepared = []

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the root, called also when the pass fails."""
        if self.members and self.members[0].given is not None:
            return
        self._forget()
        self.inside, self.given = False, ()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a pass, which copies and pickles must not carry along."""
        return {**self.__dict__, "prepared": [], "inside": False, "given": ()}

    def _forget(self) -> None:
        for member in self.members:
            member.ready, member.calls = None, 0

    def serves(self) -> bool:
        """Whether a layer may take part: inside a pass, and not in a part of it that will run again."""
        if not self.inside or torch.is_grad_enabled() != self.gradients:
            return False
        return (
            torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        )

    def draw_for(self, noise: Noise, rows: int) -> Tensor:
        """This pass's draw of a layer for ``rows`` rows."""
        if noise.ready is not None and noise.ready.shape[0] == rows:
            return noise.ready
        together: list[Noise] = []
        if packable(noise) and (not self.given or any(rows == size for size in self.given)):
            together = [
                member for member in self.members if packable(member) and _kind(member) == _kind(noise)
            ]
        packed: list[Tensor] = []
        if len(together) > 1 and _kind(noise) == "mixture" and mixtures.alike(together):
            packed = _mixed_draws(together, rows, noise.share)
        elif len(together) > 1 and _kind(noise) == "normal" and alike(together):
            packed = _packed_draws(together, rows, noise.share)
        if packed:
            for member, draw in zip(together, packed, strict=True):
                member.ready = draw
        else:
            noise.ready = noise.draw_rows(rows, ())
        assert noise.ready is not None
        return noise.ready


def packable(noise: Noise) -> bool:
    if not isinstance(noise, InputNoise) or not _kind(noise) or noise.reads_batch or not noise.draws_plainly:
        return False
    return noise.mode == "sample" and noise.site == "channel" and noise.ready is None


def _kind(noise: Any) -> str:
    """What the noise begins as; nothing where that is not for many layers at once."""
    if not isinstance(noise, InputNoise):
        return ""
    return "normal" if noise.start is not None else "mixture" if noise.mixed is not None else ""


def _mixed_draws(layers: list[Any], rows: int, share: Share | None) -> list[Tensor]:
    blended = mixtures.blend(layers)
    starts = mixtures.draw(blended, *mixtures.start(layers, rows, share=share)).split(blended.sizes, -1)
    with in_full_precision(layers):
        return [noise.push(z, False)[0] for noise, z in zip(layers, starts, strict=True)]


def mixed_ends(layers: list[Any], drawn: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the flows after the mixtures make of their draws, ``[draws, numbers]``, and the log-dets ``[layers, draws]``."""
    if not any(noise.rest for noise in layers):
        return drawn, None
    sizes = [noise.layout.dim for noise in layers]
    pushed = [noise.push(z) for noise, z in zip(layers, drawn.split(sizes, -1), strict=True)]
    return torch.cat([x for x, _ in pushed], -1), torch.stack([found for _, found in pushed])


def alike(layers: list[Any]) -> bool:
    """Whether the layers can be laid end to end: one bound, one generator, one dtype and device."""
    bound, generator, shift = layers[0].start[1].bound, layers[0].generator, layers[0].start[1].shift
    for noise in layers[1:]:
        affine = noise.start[1]
        same = affine.bound == bound and noise.generator is generator
        if not same or affine.shift.dtype != shift.dtype or affine.shift.device != shift.device:
            return False
    return True


def gather_all(layers: list[Any]) -> tuple[Frame, Tensor, Tensor, Tensor]:
    affines = [noise.start[1] for noise in layers]
    frame = frame_of(layers)
    return frame, *gather(frame, [a.shift for a in affines], [a.raw_log_scale for a in affines])


def _packed_draws(layers: list[Any], rows: int, share: Share | None = None) -> list[Tensor]:
    def normal(ordered: list[Any], like: Tensor) -> Tensor:
        def whole(number: int) -> Tensor:
            return normals(ordered, number, len(like), like)

        # several processes draw for the whole batch; the flows see the rows that are here
        return whole(rows) if share is None else share.of(rows, whole)

    return _drawn_from(normal, layers)


def shared_draws(layers: list[Noise], device: torch.device) -> list[Tensor]:
    """The fixed draws of mode ``shared`` of layers of site ``channel``, ``[samples, dim]`` each, in few launches."""
    able: list[Any] = [
        layer
        for layer in layers
        if isinstance(layer, InputNoise)
        and layer.start is not None
        and layer.draws_plainly
        and not layer.reads_batch
    ]
    found: dict[int, Tensor] = {}

    def normal(ordered: list[Any], like: Tensor) -> Tensor:
        source, parts = torch.Generator(device), []
        for layer in ordered:
            shape = torch.Size((layer.samples, layer.layout.dim))
            parts.append(standard_normal(shape, like.dtype, like.device, source.manual_seed(layer.seed)))
        return torch.cat(parts, -1)

    with torch.no_grad():
        if len(able) > 1 and alike(able):
            found = {id(layer): drawn for layer, drawn in zip(able, _drawn_from(normal, able), strict=True)}
        return [found[id(layer)] if id(layer) in found else layer.shared_vectors(device) for layer in layers]


def _drawn_from(normal: Callable[[list[Any], Tensor], Tensor], layers: list[Any]) -> list[Tensor]:
    """Draws of several layers, made of ``normal(layers, like)``: normals for these layers, which lie end to end."""
    order, layers = flows_last(layers)
    frame, mean, deviation, _ = gather_all(
        layers
    )  # elementwise operations only: autocast leaves them in float32
    starts = draw(mean, deviation, normal(layers, mean))
    flows = [noise for noise in layers if noise.rest]
    cut = len(mean) - sum(noise.layout.dim for noise in flows)
    draws = list(starts[:, :cut].split(frame.sizes[: len(layers) - len(flows)], -1)) if cut else []
    if flows:
        with in_full_precision(layers):
            draws += push_all(flows, starts[:, cut:] if cut else starts, log_det=False)[0]
    return [draws[order.index(place)] for place in range(len(layers))]


def flows_last(layers: list[Any]) -> tuple[list[int], list[Any]]:
    """The Gaussians first, so that the flows lie together: their places, and the layers in that order."""
    order = sorted(range(len(layers)), key=lambda i: len(layers[i].rest) > 0)
    return order, [layers[i] for i in order]


def push_all(flows: list[Any], starts: Tensor, log_det: bool = True) -> tuple[list[Tensor], Tensor | None]:
    """The flows of several layers at once where the device has kernels for that, else one by one."""
    sizes = [noise.layout.dim for noise in flows]
    chains = [noise.chain for noise in flows if noise.chain is not None]
    if len(chains) == len(flows) and kernels.available(starts):
        ends, log_dets = kernels.evaluate_many([Group(chains, starts, log_det)])[0]
        return list(ends.split(sizes, -1)), log_dets
    pushed = [noise.push(start, log_det) for noise, start in zip(flows, starts.split(sizes, -1), strict=True)]
    return [x for x, _ in pushed], torch.stack([found for _, found in pushed]) if log_det else None


def in_full_precision(layers: list[Any]) -> AbstractContextManager[Any]:
    """Flows lose their footing in bfloat16."""
    device = (layers[0].start or layers[0].mixed)[1].shift.device.type
    if torch.is_autocast_enabled(device) and any(noise.rest for noise in layers):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def normals(layers: list[Any], rows: int, width: int, like: Tensor) -> Tensor:
    return standard_normal(torch.Size((rows, width)), like.dtype, like.device, layers[0].generator)


# -------------------- preparing.py


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
    if not kernels.available(flows[0].start[1].shift):
        return None
    with in_full_precision(ordered):
        gathered = gather_all(ordered)
        _, mean, deviation, _ = gathered
        sizes = [noise.layout.dim for noise in flows]
        normal = normals(flows, flows[0].kl_samples, sum(sizes), mean)
        of_kl = draw(mean, deviation, normal, len(mean) - sum(sizes))
        groups = [Group([noise.chain for noise in flows], of_kl, True)]
        for noise, (at, rounded) in drawn:
            start = noise.begin_rows(rows, at)
            groups.append(Group([noise.chain], start.reshape(-1, start.shape[-1]), False, rounded))
        (ends, log_dets), *draws = kernels.evaluate_many(groups)
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
