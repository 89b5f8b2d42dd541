"""Noise of many layers in few launches.

A network of many small noise vectors spends its time on launching tiny operations. Layers whose noise begins with a learnable Gaussian
are therefore concatenated (:mod:`flowbnn.noise.gaussians`), and so are those that begin with mixtures (:mod:`flowbnn.noise.mixtures`).
The draws and the KL of each group are computed at once. All other layers draw for themselves, with the same meaning.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowbnn import kernels
from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.kernels import Group
from flowbnn.noise.base import Noise
from flowbnn.noise.contexts import (
    ForwardState,
    NoiseContext,
    NoiseGroup,
    NoiseMode,
    PreparedDraws,
    Shape,
    ShapeRecord,
    current_modes,
    current_row_shard,
)
from flowbnn.noise.gaussians import Gaussians, without_autocast
from flowbnn.noise.joint import JointPart, joint_name
from flowbnn.noise.mixtures import Mixtures

Kind = type[Gaussians] | type[Mixtures]


def _kind(noise: Noise) -> Kind | None:
    """Returns the class that draws such noise for many layers at once, or None."""
    return (
        Gaussians if noise.gaussian_base is not None else Mixtures if noise.mixture_base is not None else None
    )


def is_batchable(noise: Any, modes: Mapping[int, NoiseMode]) -> bool:
    """Returns True if a layer whose noise begins with a normal or a mixture can be drawn together with others."""
    if noise.site != "channel" or not noise.uses_default_draw or (noise.normalizing and noise.reads_batch):
        return False
    return modes[noise.key].mode == "sample"


def draw_examples(noise: Noise, rows: int, context: NoiseContext) -> Tensor:
    """Returns the draws of a layer for ``rows`` examples, ``[rows, dim]``, and stores them in the forward state.

    The first learnable Gaussian that needs a draw draws for all of them, and so does the first mixture.

    Args:
        noise: Noise module of site ``channel``.
        rows: Number of examples.
        context: Context of a forward pass.
    """
    forward, generator = context.forward, context.modes[noise.key].generator
    assert forward is not None
    if isinstance(noise, JointPart):
        vectors = noise.joint_noise.draw_rows(rows, (), generator, context.shard)
        for layer in forward.group.layers:
            if layer.joint_noise is noise.joint_noise and isinstance(layer, JointPart):
                forward.draws[layer.key] = vectors[:, layer.span]
        return forward.draws[noise.key]
    kind, group, generators = _kind(noise), [], []
    for layer in forward.group.layers if kind is not None else ():
        if _kind(layer) is kind and is_batchable(layer, context.modes) and layer.key not in forward.draws:
            group.append(layer)
            generators.append(context.modes[layer.key].generator)
    included = len(group) > 1 and any(layer is noise for layer in group)
    if included and kind is not None and kind.are_compatible(group, generators):
        with without_autocast(group):
            block = kind(group)
            draws, _ = block.sample(block.draw_base(rows, 0, generator, context.shard), rows)
        forward.draws.update(zip(block.keys, draws, strict=True))
    else:
        forward.draws[noise.key] = noise.draw_rows(rows, (), generator, context.shard)
    return forward.draws[noise.key]


# -------------------- KL and entropy


class Divergences(dict[str, Divergence]):
    """KL and entropy by layer.

    Args:
        by_layer: KL and entropy by the name of the layer.
        total: Their sums, or None if no layer has a density.
    """

    def __init__(self, by_layer: dict[str, Divergence], total: Divergence | None) -> None:
        super().__init__(by_layer)
        self.total = total


def divergences(layers: dict[str, Noise]) -> Divergences:
    """Returns KL and entropy of every layer that has them."""
    return _add_missing(layers, current_modes(layers.values()), {}, [])


def _group_layers(layers: Iterable[Any], modes: Mapping[int, NoiseMode]) -> list[tuple[Kind, list[Any]]]:
    """Returns groups of at least two layers that can be concatenated, with as many draws for the KL of each."""
    by_kind: dict[Any, list[Any]] = {Gaussians: [], Mixtures: [], None: []}
    for noise in layers:
        by_kind[_kind(noise)].append(noise)
    groups: list[tuple[Kind, list[Any]]] = []
    for kind in (Gaussians, Mixtures):
        group = by_kind[kind]
        if len(group) < 2:
            continue
        if len({noise.kl_samples for noise in group if kind is Mixtures or noise.flow_tail}) > 1:
            group = [noise for noise in group if kind is Gaussians and not noise.flow_tail]
        if len(group) > 1 and kind.are_compatible(group, [modes[noise.key].generator for noise in group]):
            groups.append((kind, group))
    return groups


def _add_missing(
    layers: dict[str, Noise],
    modes: Mapping[int, NoiseMode],
    by_key: dict[int, Divergence],
    totals: list[Divergence],
) -> Divergences:
    """Returns the divergences of all layers.

    Args:
        layers: Noise modules by the names of their layers.
        modes: Modes by layer key.
        by_key: Divergences that have been computed, by layer key.
        totals: Sums of these.
    """
    missing = [noise for noise in layers.values() if noise.key not in by_key]
    for kind, group in _group_layers(missing, modes) if missing else ():
        with without_autocast(group):
            each, total = kind(group).divergences(modes[group[0].key].generator)
        by_key |= each
        totals.append(total)
    named: dict[str, Divergence] = {}
    for name, noise in layers.items():
        value = by_key.get(noise.key)
        if value is None:
            value = noise.divergence()
            if value is None:
                continue
            totals.append(value)
        named[joint_name(name, named) if isinstance(noise, JointPart) else name] = value
    if len(totals) > 1:
        kls, entropies = zip(*totals, strict=True)
        totals = [Divergence(torch.stack(kls).sum(), torch.stack(entropies).sum())]
    return Divergences(named, totals[0] if totals else None)


# -------------------- draws together with the KL


def draw_with_kl(
    layers: dict[str, Noise], rows: int, modes: Mapping[int, NoiseMode], shapes: ShapeRecord
) -> tuple[PreparedDraws, Divergences] | None:
    """Draws the noise of the next pass together with further noise for the KL, which takes half the operations.

    The draws of the KL are independent of those of the pass, as in :func:`divergences`.

    Args:
        layers: Noise modules by the names of their layers.
        rows: Number of rows of the pass.
        modes: Modes of the layers, by layer key.
        shapes: Positions that layers drew for in an earlier pass over as many rows.

    Returns:
        Draws for :class:`~flowbnn.noise.contexts.NoiseContext` and the divergences, or None if layers cannot be concatenated. In that
        case nothing has been drawn.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return None
    tensors: dict[int, Tensor] = {}
    by_key: dict[int, Divergence] = {}
    totals: list[Divergence] = []
    groups = _group_layers(layers.values(), modes)
    for kind, group in groups:
        members = [noise for noise in group if is_batchable(noise, modes)]
        if len(members) > 1:
            generator = modes[members[0].key].generator
            with without_autocast(members):
                block = kind(members)
                base_draws = block.draw_base(rows, block.kl_samples, generator, current_row_shard())
                draws, log_dets = block.sample(base_draws, rows)
                each, total = block.divergences_of_draws(base_draws, draws, log_dets, rows)
            for key, vectors in zip(block.keys, draws, strict=True):
                tensors[key] = vectors[:rows] if len(vectors) > rows else vectors
            by_key |= each
            totals.append(total)
    if totals:
        prepared = PreparedDraws(tensors, torch.is_grad_enabled())
        return prepared, _add_missing(layers, modes, by_key, totals)
    if not shapes or not groups or groups[0][0] is not Gaussians:
        return None
    return _draw_positions_with_kl(layers, groups[0][1], rows, modes, shapes)


def _draw_positions_with_kl(
    layers: dict[str, Noise],
    group: list[Any],
    rows: int,
    modes: Mapping[int, NoiseMode],
    shapes: ShapeRecord,
) -> tuple[PreparedDraws, Divergences] | None:
    """Does the same for noise at every position, or returns None on devices without kernels for many flows at once."""
    block = Gaussians(group)
    chains: list[Any] = block.chains
    sampled = [
        (noise, chain)
        for noise, chain in zip(block.flows, chains, strict=True)
        if noise.key in shapes and modes[noise.key].mode == "sample"
    ]
    if not sampled or None in chains or not kernels.available(block.mean):
        return None
    with without_autocast(block.layers):
        generator = modes[block.layers[0].key].generator
        sizes = [noise.layout.dim for noise in block.flows]
        shape = torch.Size((block.kl_samples, sum(sizes)))
        normal = standard_normal(shape, block.mean.dtype, block.mean.device, generator)
        groups = [Group(chains, block.scale_and_shift(normal), True)]
        for noise, chain in sampled:
            positions, half = shapes[noise.key]
            base_draws = noise.draw_base_rows(rows, positions, generator, current_row_shard())
            groups.append(Group([chain], base_draws.flatten(0, -2), False, half))
        (flow_draws, log_dets), *draws = kernels.evaluate_many(groups)
        by_key, total = block.compute_divergences(normal, list(flow_draws.split(sizes, -1)), log_dets)
    tensors: dict[int, Tensor] = {}
    for (noise, _), (x, _) in zip(sampled, draws, strict=True):
        tensors[noise.key] = x.view(rows, *shapes[noise.key][0], noise.layout.dim)
    prepared = PreparedDraws(tensors, torch.is_grad_enabled())
    return prepared, _add_missing(layers, modes, by_key, [total])


def example_draws(
    layers: list[Noise], shapes: Iterable[tuple[int, int, Shape]], rows: int, modes: Mapping[int, NoiseMode]
) -> dict[tuple[int, int], Tensor]:
    """Returns draws of mode ``sample`` ``[rows, *positions, dim]``, by layer key and call, for a pass over ``rows`` rows.

    Args:
        layers: Noise modules of the network.
        shapes: Layer key, number of earlier calls, and positions of each call of a layer, in the order of the pass.
        rows: Number of rows.
        modes: Modes by layer key.
    """
    by_key = {layer.key: layer for layer in layers}
    forward = ForwardState(NoiseGroup(layers, draw_examples), (), {})
    context = NoiseContext(modes, sharded=False, forward=forward)
    result: dict[tuple[int, int], Tensor] = {}
    for key, call, positions in shapes:
        layer = by_key[key]
        if layer.site == "position":
            result[key, call] = layer.draw_rows(rows, positions, modes[key].generator, None)
        else:
            if key not in forward.draws:
                draw_examples(layer, rows, context)
            result[key, call] = forward.draws[key]
    return result
