"""The noise of many layers in few launches.

A network of many small noise vectors spends its time on launching tiny operations, not on doing them. So the layers whose noise begins
as a learnable Gaussian are laid end to end, and so are those that begin as mixtures (:mod:`flowbnn.noise.batched_normals`): each block
has its draws and its KL computed at once. Layers that are in no block draw for themselves, which means the same.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn import kernels
from flowbnn.distributions import Divergence
from flowbnn.kernels import Group
from flowbnn.noise.base import BLOCK, Noise, blocks
from flowbnn.noise.batched_normals import Gaussians, Mixtures
from flowbnn.noise.joint import JointPart, joint_name
from flowbnn.noise.passes import Forward, NoisePass, Setting, governing, innermost, pass_of


class NoiseGroup:
    """The noise of one network. Hooks on the network's root say when a forward pass begins and ends.

    In a pass, a layer of site ``channel`` that draws per example draws once: called again, it keeps its draw, as noise that belongs
    to the network should. The first learnable Gaussian that asks draws for all of them, and so does the first mixture.
    """

    def __init__(self, layers: list[Noise]) -> None:
        self.layers = layers

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the root."""
        state = governing(self.layers[0])
        for layer in self.layers:
            if state is None or layer.key not in state.settings:  # no pass governs all layers
                state = NoisePass({one.key: pass_of(one).settings[one.key] for one in self.layers})
                state.passing = True
                state.__enter__()
                break
        assert state is not None
        sizes: tuple[int, ...] = ()
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                sizes = tuple(value.shape[:2])
                break
        draws: dict[int, Tensor] = {}
        if state.prepared:
            # draws that were made with gradients belong to a pass with gradients: without them it is the first of two runs
            for layer in self.layers:
                prepared = state.prepared.pop(layer.key, None)
                if prepared is not None and state.gradients == torch.is_grad_enabled():
                    draws[layer.key] = prepared
        held = {} if state.held is None else state.held
        state.forward = Forward(self, sizes, draws, state.forward, held)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the root, called also when the pass fails."""
        state = innermost(self)
        if state is not None and state.forward is not None:
            state.forward = state.forward.outer
            if state.passing:
                state.__exit__()

    def draw_for(self, noise: Noise, rows: int, state: NoisePass) -> Tensor:
        """This pass's draw of a layer for ``rows`` examples, ``[rows, dim]``."""
        forward, generator = state.forward, state.settings[noise.key].generator
        assert forward is not None
        if isinstance(noise, JointPart):
            drawn = noise.whole.draw_rows(rows, (), generator, state.share)
            for layer in self.layers:
                if layer.whole is noise.whole and isinstance(layer, JointPart):
                    forward.draws[layer.key] = drawn[:, layer.span]
            return forward.draws[noise.key]
        kind, block, generators = _kind(noise), [], []
        for layer in self.layers if kind is not None else ():
            if _kind(layer) is kind and batchable(layer, state) and layer.key not in forward.draws:
                block.append(layer)
                generators.append(state.settings[layer.key].generator)
        fits = len(block) > 1 and any(layer is noise for layer in block)
        if fits and kind is not None and kind.alike(block, generators):
            with in_full_precision(block):
                forward.draws |= kind(block).draws(rows, generator, state.share)
        else:
            forward.draws[noise.key] = noise.draw_rows(rows, (), generator, state.share)
        return forward.draws[noise.key]


Kind = type[Gaussians] | type[Mixtures]


def _kind(noise: Noise) -> Kind | None:
    """What the noise begins as; None where that is not for many layers at once."""
    return Gaussians if noise.start is not None else Mixtures if noise.mixed is not None else None


def batchable(noise: Any, state: NoisePass) -> bool:
    """Whether a layer that begins as a normal or a mixture may be drawn with others."""
    if noise.site != "channel" or not noise.draws_plainly or (noise.normalising and noise.reads_batch):
        return False
    return state.settings[noise.key].mode == "sample"


def in_full_precision(layers: list[Any]) -> AbstractContextManager[Any]:
    """Flows are not accurate in bfloat16."""
    device = (layers[0].start or layers[0].mixed)[1].shift.device.type
    if torch.is_autocast_enabled(device) and any(noise.rest for noise in layers):
        return torch.autocast(device, enabled=False)
    return nullcontext()


# -------------------- KL and entropy


class Divergences(dict[str, Divergence]):
    """KL and entropy by layer; ``total`` has their sums, or None where no layer has a density."""

    def __init__(self, parts: dict[str, Divergence], total: Divergence | None) -> None:
        super().__init__(parts)
        self.total = total


def divergences(layers: dict[str, Noise]) -> Divergences:
    """KL and entropy of every layer that has them."""
    settings = {noise.key: pass_of(noise).settings[noise.key] for noise in layers.values()}
    return _completed(layers, settings, {}, [])


def _blocks(layers: Iterable[Any], settings: dict[int, Setting]) -> list[tuple[Kind, list[Any]]]:
    """The layers that can be laid end to end, as many draws for the KL of each; a block has at least two."""
    kinds: dict[Any, list[Any]] = {Gaussians: [], Mixtures: [], None: []}
    for noise in layers:
        kinds[_kind(noise)].append(noise)
    blocks: list[tuple[Kind, list[Any]]] = []
    for kind in (Gaussians, Mixtures):
        block = kinds[kind]
        if len({noise.kl_samples for noise in block if kind is Mixtures or noise.rest}) > 1:
            block = [noise for noise in block if kind is Gaussians and not noise.rest]
        if len(block) > 1 and kind.alike(block, [settings[noise.key].generator for noise in block]):
            blocks.append((kind, block))
    return blocks


def _completed(
    layers: dict[str, Noise],
    settings: dict[int, Setting],
    parts: dict[int, Divergence],
    totals: list[Divergence],
) -> Divergences:
    """What is known already by the keys of layers, with its totals, and the others': in blocks where that goes, else one by one."""
    others = [noise for noise in layers.values() if noise.key not in parts]
    for kind, block in _blocks(others, settings) if others else ():
        with in_full_precision(block):
            each, total = kind(block).divergences(settings[block[0].key].generator)
        parts |= each
        totals.append(total)
    named: dict[str, Divergence] = {}
    for name, noise in layers.items():
        part = parts.get(noise.key)
        if part is None:
            part = noise.divergence()
            if part is None:
                continue
            totals.append(part)
        named[joint_name(name, named) if isinstance(noise, JointPart) else name] = part
    if len(totals) > 1:
        kls, entropies = zip(*totals, strict=True)
        totals = [Divergence(torch.stack(kls).sum(), torch.stack(entropies).sum())]
    return Divergences(named, totals[0] if totals else None)


# -------------------- drawing ahead


def ahead(layers: dict[str, Noise], rows: int, state: NoisePass) -> Divergences | None:
    """Draw the noise for the network's next pass, of ``rows`` rows, and fresh draws for the KL, all in one go.

    What a step needs of the noise then takes half the operations. The draws of the KL are others than those of the pass, as in
    :func:`divergences`, whose result this is. None where the layers cannot be laid end to end; then nothing has been drawn.

    Args:
        state: of the pass, which is given the draws; what an earlier pass over as many rows has asked for is in its ``asked``.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return None
    state.gradients = torch.is_grad_enabled()
    parts: dict[int, Divergence] = {}
    totals: list[Divergence] = []
    blocks = _blocks(layers.values(), state.settings)
    for kind, block in blocks:
        members = [noise for noise in block if batchable(noise, state)]
        if len(members) > 1:
            generator = state.settings[members[0].key].generator
            with in_full_precision(members):
                draws, each, total = kind(members).ahead(rows, generator, state.share)
            state.prepared |= draws
            parts |= each
            totals.append(total)
    if totals:
        return _completed(layers, state.settings, parts, totals)
    if not state.asked or not blocks or blocks[0][0] is not Gaussians:
        return None
    return _at_positions(layers, blocks[0][1], rows, state)


def _at_positions(
    layers: dict[str, Noise], together: list[Any], rows: int, state: NoisePass
) -> Divergences | None:
    """The same where noise is drawn anew at every position, which pays on a device with kernels for many flows at once.

    An earlier pass over as many rows has told how many positions each layer has. None where there is nothing to gain.
    """
    block = Gaussians(together)
    drawn = [
        noise
        for noise in block.flows
        if noise.key in state.asked and state.settings[noise.key].mode == "sample"
    ]
    if not drawn or any(noise.chain is None for noise in block.flows) or not kernels.available(block.mean):
        return None
    with in_full_precision(block.layers):
        generator = state.settings[block.layers[0].key].generator
        sizes = [noise.layout.dim for noise in block.flows]
        normal = block.normal(block.fresh, sum(sizes), generator)
        of_kl = block.starts(normal)
        groups = [Group([noise.chain for noise in block.flows], of_kl, True)]
        for noise in drawn:
            at, rounded = state.asked[noise.key]
            start = noise.begin_rows(rows, at, generator, state.share)
            groups.append(Group([noise.chain], start.reshape(-1, start.shape[-1]), False, rounded))
        (ends, log_dets), *draws = kernels.evaluate_many(groups)
        parts, total = block.summary(normal, list(ends.split(sizes, -1)), log_dets)
    for noise, (x, _) in zip(drawn, draws, strict=True):
        state.prepared[noise.key] = x.view(rows, *state.asked[noise.key][0], noise.layout.dim)
    return _completed(layers, state.settings, parts, [total])


def shared_draws(layers: list[Noise], state: NoisePass, device: torch.device) -> list[Tensor]:
    """The fixed draws of mode ``shared`` of layers of site ``channel``, ``[samples, dim]`` each, in few launches."""
    block: list[Any] = [layer for layer in layers if layer.start is not None]
    block = [layer for layer in block if layer.draws_plainly and not layer.reads_batch]
    drawn: dict[int, Tensor] = {}
    with torch.no_grad():
        if len(block) > 1 and Gaussians.alike(block, [None] * len(block)):
            gaussians, source, normals = Gaussians(block), torch.Generator(device), []
            for layer in gaussians.layers:
                _, samples, seed, _ = state.settings[layer.key]
                dim = layer.layout.dim
                parts = [gaussians.normal(BLOCK, dim, one) for one in blocks(samples, seed, source)]
                normals.append(torch.cat(parts)[:samples])
            with in_full_precision(block):
                drawn = gaussians.draws_from(torch.cat(normals, -1))
        for layer in layers:
            if layer.key not in drawn:
                drawn[layer.key] = layer.shared_vectors(*state.settings[layer.key][1:3], device)
    return [drawn[layer.key] for layer in layers]
