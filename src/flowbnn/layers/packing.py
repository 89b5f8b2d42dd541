"""Many layers' noise in few launches.

A network of many small noise vectors spends its time on launching tiny operations, not on doing them. So the learnable Gaussians of
all layers are laid end to end, and so are mixtures of them: their KL is computed at once (:mod:`flowbnn.layers.preparing`), and so
are their draws, when a forward pass of the whole network begins (:class:`NoiseGroup`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions.draws import standard_normal
from flowbnn.layers import mixtures
from flowbnn.layers.gaussians import Frame, draw, frame_of, gather
from flowbnn.layers.input_noise import InputNoise
from flowbnn.layers.noise import Noise
from flowbnn.layers.sharing import Share
from flowbnn.transforms import fused

__all__ = [
    "NoiseGroup",
    "alike",
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
    if len(chains) == len(flows) and fused.available(starts):
        ends, log_dets = fused.push_packed(chains, starts, log_det)
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
