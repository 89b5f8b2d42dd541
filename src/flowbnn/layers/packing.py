"""Many layers' noise in few launches.

A network of many small noise vectors spends its time on launching tiny operations, not on doing them. So the learnable Gaussians
of all layers are laid end to end: their KL is computed at once (:func:`divergences`), and so are their draws, when a forward pass of
the whole network begins (:class:`NoiseGroup`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.layers.gaussians import Frame, draw, frame_of, gather, summarize
from flowbnn.layers.input_noise import InputNoise
from flowbnn.layers.noise import Noise
from flowbnn.layers.sharing import Share
from flowbnn.transforms import fused

__all__ = ["Divergences", "NoiseGroup", "ahead", "divergences", "shared_draws"]


class NoiseGroup:
    """The noise of one network, told by hooks on its root when a pass begins and ends.

    In a pass, a layer of site ``channel`` that draws per example draws once: called again, it keeps its draw, as noise that belongs
    to the network should. The first learnable Gaussian that asks draws for all of them. Outside a pass of the root, and inside a part
    of it that runs twice (activation checkpointing), a layer draws for itself, so that torch's generator, which is put back for
    the second run, gives it the same draw again.
    """

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
        self.inside = False

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a pass, which copies and pickles must not carry along."""
        return {**self.__dict__, "prepared": [], "inside": False}

    def _forget(self) -> None:
        for member in self.members:
            member.ready = None

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
        together = [member for member in self.members if _packable(member)] if _packable(noise) else []
        if len(together) > 1 and _alike(together):
            for member, draw in zip(together, _packed_draws(together, rows, noise.share), strict=True):
                member.ready = draw
        else:
            noise.ready = noise.draw_rows(rows, ())
        assert noise.ready is not None
        return noise.ready


def _packable(noise: Noise) -> bool:
    if not isinstance(noise, InputNoise) or noise.start is None or noise.reads_batch:
        return False
    return noise.mode == "sample" and noise.site == "channel" and noise.ready is None


def _alike(layers: list[Any]) -> bool:
    """Whether the layers can be laid end to end: one bound, one generator, one dtype and device."""
    bound, generator, shift = layers[0].start[1].bound, layers[0].generator, layers[0].start[1].shift
    for noise in layers[1:]:
        affine = noise.start[1]
        same = affine.bound == bound and noise.generator is generator
        if not same or affine.shift.dtype != shift.dtype or affine.shift.device != shift.device:
            return False
    return True


def _gathered(layers: list[Any]) -> tuple[Frame, Tensor, Tensor, Tensor]:
    affines = [noise.start[1] for noise in layers]
    frame = frame_of(layers)
    return frame, *gather(frame, [a.shift for a in affines], [a.raw_log_scale for a in affines])


def _packed_draws(layers: list[Any], rows: int, share: Share | None = None) -> list[Tensor]:
    def normal(ordered: list[Any], like: Tensor) -> Tensor:
        def whole(number: int) -> Tensor:
            return _normal(ordered, number, len(like), like)

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
        if len(able) > 1 and _alike(able):
            found = {id(layer): drawn for layer, drawn in zip(able, _drawn_from(normal, able), strict=True)}
        return [found[id(layer)] if id(layer) in found else layer.shared_vectors(device) for layer in layers]


def _drawn_from(normal: Callable[[list[Any], Tensor], Tensor], layers: list[Any]) -> list[Tensor]:
    """Draws of several layers, made of ``normal(layers, like)``: normals for these layers, which lie end to end."""
    order, layers = _flows_last(layers)
    frame, mean, deviation, _ = _gathered(
        layers
    )  # elementwise operations only: autocast leaves them in float32
    starts = draw(mean, deviation, normal(layers, mean))
    flows = [noise for noise in layers if noise.rest]
    cut = len(mean) - sum(noise.layout.dim for noise in flows)
    draws = list(starts[:, :cut].split(frame.sizes[: len(layers) - len(flows)], -1)) if cut else []
    if flows:
        with _in_full_precision(layers):
            draws += _pushed(flows, starts[:, cut:] if cut else starts, log_det=False)[0]
    return [draws[order.index(place)] for place in range(len(layers))]


def _flows_last(layers: list[Any]) -> tuple[list[int], list[Any]]:
    """The Gaussians first, so that the flows lie together: their places, and the layers in that order."""
    order = sorted(range(len(layers)), key=lambda i: len(layers[i].rest) > 0)
    return order, [layers[i] for i in order]


def _pushed(flows: list[Any], starts: Tensor, log_det: bool = True) -> tuple[list[Tensor], Tensor | None]:
    """The flows of several layers at once where the device has kernels for that, else one by one."""
    sizes = [noise.layout.dim for noise in flows]
    chains = [noise.chain for noise in flows if noise.chain is not None]
    if len(chains) == len(flows) and fused.available(starts):
        ends, log_dets = fused.push_packed(chains, starts, log_det)
        return list(ends.split(sizes, -1)), log_dets
    pushed = [noise.push(start, log_det) for noise, start in zip(flows, starts.split(sizes, -1), strict=True)]
    return [x for x, _ in pushed], torch.stack([found for _, found in pushed]) if log_det else None


def _in_full_precision(layers: list[Any]) -> AbstractContextManager[Any]:
    """Flows lose their footing in bfloat16."""
    device = layers[0].start[1].shift.device.type
    if torch.is_autocast_enabled(device) and any(noise.rest for noise in layers):
        return torch.autocast(device, enabled=False)
    return nullcontext()


class Divergences(dict[str, Divergence]):
    """KL and entropy by layer; ``total`` has their sums, or None where no layer has a density."""

    def __init__(self, parts: dict[str, Divergence], total: Divergence | None) -> None:
        super().__init__(parts)
        self.total = total


def divergences(layers: dict[str, Noise]) -> Divergences:
    """KL and entropy of every layer that has them."""
    able = _together(layers)
    if len(able) < 2:
        return _joined(layers, {}, None)
    packed = list(able.values())
    with _in_full_precision(packed):
        order, ordered = _flows_last(packed)
        flows = [noise for noise in ordered if noise.rest]
        gathered = _gathered(ordered)
        _, mean, deviation, _ = gathered
        normal: Tensor | None = None
        ends: list[Tensor] = []
        log_dets: Tensor | None = None
        if flows:
            width = sum(noise.layout.dim for noise in flows)
            normal = _normal(flows, flows[0].kl_samples, width, mean)
            ends, log_dets = _pushed(flows, draw(mean, deviation, normal, len(mean) - width))
        parts, total = _summary(order, gathered, len(flows), normal, ends, log_dets)
    return _joined(layers, dict(zip(able, parts, strict=True)), total)


def ahead(layers: dict[str, Noise], rows: int) -> Divergences | None:
    """Draw the noise for the network's next pass, of ``rows`` rows, and fresh draws for the KL, all in one go.

    What a step needs of the noise then takes half the operations. The draws of the KL are others than those of the pass, as in
    :func:`divergences`, whose result this is. None where the layers cannot be laid end to end; then nothing has been drawn.
    """
    able = {name: noise for name, noise in _together(layers).items() if _packable(noise)}
    if torch._C._functorch.maybe_current_level() is not None:
        return None
    if len(able) < 2:
        return _ahead_at_positions(layers, rows)
    packed = list(able.values())
    order, ordered = _flows_last(packed)
    flows = [noise for noise in ordered if noise.rest]
    fresh = flows[0].kl_samples if flows else 0
    with _in_full_precision(packed):
        gathered = _gathered(ordered)
        frame, mean, deviation, _ = gathered
        cut = len(mean) - sum(noise.layout.dim for noise in flows)
        normal = _normal_for(packed, rows, fresh, mean)
        starts = draw(mean, deviation, normal)
        draws = list(starts[:rows, :cut].split(frame.sizes[: len(ordered) - len(flows)], -1)) if cut else []
        ends: list[Tensor] = []
        log_dets: Tensor | None = None
        if flows:
            pushed, found = _pushed(flows, starts[:, cut:] if cut else starts)
            halves = [x.split([rows, fresh]) for x in pushed]
            draws, ends = [*draws, *(half[0] for half in halves)], [half[1] for half in halves]
            log_dets = None if found is None else found[:, rows:]
        of_kl = normal[rows:, cut:] if flows else None
        parts, total = _summary(order, gathered, len(flows), of_kl, ends, log_dets)
    group = packed[0].group
    group.prepared = list(zip(ordered, draws, strict=True))
    group.prepared_with_gradients = torch.is_grad_enabled()
    return _joined(layers, dict(zip(able, parts, strict=True)), total)


def _ahead_at_positions(layers: dict[str, Noise], rows: int) -> Divergences | None:
    """The same where noise is drawn anew at every position, which pays on a device with kernels for many flows at once.

    An earlier pass over as many rows has told how many positions each layer has. None where there was none, or nothing to gain.
    """
    able = _together(layers)
    order, ordered = _flows_last(list(able.values()))
    flows = [noise for noise in ordered if noise.rest]
    told = [(noise, noise.foreseen(rows)) for noise in flows]
    drawn = [(noise, found) for noise, found in told if found is not None and noise.group is not None]
    if not drawn or any(noise.chain is None for noise in flows):
        return None
    if not fused.available(flows[0].start[1].shift):
        return None
    with _in_full_precision(ordered):
        gathered = _gathered(ordered)
        _, mean, deviation, _ = gathered
        sizes = [noise.layout.dim for noise in flows]
        normal = _normal(flows, flows[0].kl_samples, sum(sizes), mean)
        of_kl = draw(mean, deviation, normal, len(mean) - sum(sizes))
        groups = [fused.Group([noise.chain for noise in flows], of_kl, True)]
        for noise, (at, rounded) in drawn:
            start = noise.begin_rows(rows, at)
            groups.append(fused.Group([noise.chain], start.reshape(-1, start.shape[-1]), False, rounded))
        (ends, log_dets), *draws = fused.push_groups(groups)
        parts, total = _summary(order, gathered, len(flows), normal, list(ends.split(sizes, -1)), log_dets)
    for noise, _ in drawn:
        noise.group.prepared = []
    for (noise, (at, _)), (x, _) in zip(drawn, draws, strict=True):
        noise.group.prepared.append((noise, x.view(rows, *at, noise.layout.dim)))
        noise.group.prepared_with_gradients = torch.is_grad_enabled()
    return _joined(layers, dict(zip(able, parts, strict=True)), total)


def _normal_for(layers: list[Any], rows: int, fresh: int, like: Tensor) -> Tensor:
    """Normal numbers for ``rows`` rows and ``fresh`` more, in one draw, of which a process that has a share keeps its own rows."""
    share: Share | None = layers[0].share
    if share is None:
        return _normal(layers, rows + fresh, len(like), like)
    drawn: list[Tensor] = []

    def whole(number: int) -> Tensor:
        drawn.append(_normal(layers, number + fresh, len(like), like))
        return drawn[0][:number]

    mine = share.of(rows, whole)
    return torch.cat([mine, drawn[0][len(drawn[0]) - fresh :]]) if fresh else mine


def _normal(layers: list[Any], rows: int, width: int, like: Tensor) -> Tensor:
    return standard_normal(torch.Size((rows, width)), like.dtype, like.device, layers[0].generator)


def _together(layers: dict[str, Noise]) -> dict[str, Any]:
    """The layers whose noise begins as a learnable Gaussian and can be laid end to end; none where they differ."""
    able = {
        name: noise
        for name, noise in layers.items()
        if isinstance(noise, InputNoise) and noise.start is not None
    }
    if len({noise.kl_samples for noise in able.values() if noise.rest}) > 1:
        able = {name: noise for name, noise in able.items() if not noise.rest}
    return able if len(able) > 1 and _alike(list(able.values())) else {}


def _joined(layers: dict[str, Noise], found: dict[str, Divergence], total: Divergence | None) -> Divergences:
    """What was found together and, one by one, the other layers'."""
    parts: dict[str, Divergence] = {}
    alone: list[Divergence] = [] if total is None else [total]
    for name, noise in layers.items():
        part = found[name] if name in found else noise.divergence()
        if part is not None:
            parts[name] = part
            if name not in found:
                alone.append(part)
    if len(alone) > 1:
        total = Divergence(
            torch.stack([part.kl for part in alone]).sum(),
            torch.stack([part.entropy for part in alone]).sum(),
        )
    elif len(alone) == 1:
        total = alone[0]
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
