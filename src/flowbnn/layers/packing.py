"""Many layers' noise in few launches.

A network of many small noise vectors spends its time on launching tiny operations, not on doing them. So the learnable Gaussians
of all layers are laid end to end: their KL is computed at once (:func:`divergences`), and so are their draws, when a forward pass of
the whole network begins (:class:`NoiseGroup`).
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions import DiagonalNormal, Divergence
from flowbnn.layers.input_noise import InputNoise
from flowbnn.layers.noise import Noise
from flowbnn.numerics import soft_clamp

__all__ = ["NoiseGroup", "divergences"]

_NORMAL_ENTROPY = 0.5 * (1.0 + math.log(2.0 * math.pi))  # of a standard normal, in nats


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
        for member in members:
            member.group = self

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of the root."""
        self._forget()
        self.inside, self.gradients = True, torch.is_grad_enabled()

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the root, called also when the pass fails."""
        self._forget()
        self.inside = False

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
            for member, draw in zip(together, _packed_draws(together, rows), strict=True):
                member.ready = draw
        else:
            noise.ready = noise.draw((rows,), noise.generator)
        assert noise.ready is not None
        return noise.ready


def _packable(noise: Noise) -> bool:
    able = isinstance(noise, InputNoise) and noise.gaussian is not None
    return able and noise.mode == "sample" and noise.site == "channel" and noise.ready is None


def _alike(layers: list[Any]) -> bool:
    """Whether the layers can be laid end to end: one bound, one generator, one dtype and device."""
    bound, generator, shift = layers[0].gaussian[1].bound, layers[0].generator, layers[0].gaussian[1].shift
    for noise in layers[1:]:
        affine = noise.gaussian[1]
        same = affine.bound == bound and noise.generator is generator
        if not same or affine.shift.dtype != shift.dtype or affine.shift.device != shift.device:
            return False
    return True


class _Packed:
    """The parameters of several learnable Gaussians, end to end."""

    def __init__(self, layers: list[Any]) -> None:
        base, affine, self.prior = zip(*(noise.gaussian for noise in layers), strict=True)
        self.sizes = tuple(noise.layout.dim for noise in layers)
        self.shift = torch.cat([a.shift for a in affine])
        self.log_scale = soft_clamp(torch.cat([a.raw_log_scale for a in affine]), affine[0].bound)
        self.factor = self.log_scale.exp()
        self.loc, self.scale = torch.cat([b.loc for b in base]), torch.cat([b.scale for b in base])
        constants = _constants if torch.compiler.is_compiling() else _cached_constants
        self.segments, self.center, self.counts, self.constant = constants(
            self.sizes,
            tuple(a.center for a in affine),
            tuple(noise.count for noise in layers),
            self.shift.device,
            self.shift.dtype,
        )

    @property
    def mean(self) -> Tensor:
        return torch.addcmul(self.shift + self.center, self.loc - self.center, self.factor)


def _packed_draws(layers: list[Any], rows: int) -> tuple[Tensor, ...]:
    packed = _Packed(layers)  # elementwise operations only: autocast leaves them in float32
    normal = DiagonalNormal(packed.mean, packed.scale * packed.factor)
    return normal.rsample((rows,), layers[0].generator).split(packed.sizes, -1)


def divergences(layers: dict[str, Noise]) -> dict[str, Divergence]:
    """KL and entropy of every layer that has them."""
    gaussian = {
        name: noise
        for name, noise in layers.items()
        if isinstance(noise, InputNoise) and noise.gaussian is not None
    }
    found: dict[str, Divergence | None] = {}
    if len(gaussian) > 1 and _alike(list(gaussian.values())):
        found.update(zip(gaussian, _packed_divergences(list(gaussian.values())), strict=True))
    for name, noise in layers.items():
        if name not in found:
            found[name] = noise.divergence()
    return {name: part for name in layers if (part := found[name]) is not None}


def _packed_divergences(layers: list[Any]) -> list[Divergence]:
    packed = _Packed(layers)
    width = torch.cat([prior.scale for prior in packed.prior])
    error = (packed.mean - torch.cat([prior.loc for prior in packed.prior])) / width
    square = (packed.factor * (packed.scale / width)).square() + error.square()
    both = torch.stack([0.5 * square - packed.log_scale, packed.log_scale])
    log_scale = packed.scale.log()
    fixed = torch.stack([width.log() - log_scale - 0.5, log_scale])
    sums = both.new_zeros(2, len(layers)).index_add(1, packed.segments, both + fixed)
    kls, entropies = sums[0] * packed.counts, (sums[1] + packed.constant) * packed.counts
    return [Divergence(*pair) for pair in zip(kls.unbind(), entropies.unbind(), strict=True)]


def _constants(
    sizes: tuple[int, ...],
    centers: tuple[float, ...],
    counts: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each layer lies, its centre, its count and its entropy's constant; made once, a copy to the device each."""
    segments = torch.repeat_interleave(torch.tensor(sizes))
    center = torch.tensor(centers, dtype=dtype)[segments]
    constant = torch.tensor([size * _NORMAL_ENTROPY for size in sizes], dtype=dtype)
    weights = torch.tensor(counts, dtype=dtype)
    return segments.to(device), center.to(device), weights.to(device), constant.to(device)


@lru_cache(maxsize=64)
def _cached_constants(*key: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.inference_mode(False):  # or a first call under inference mode would spoil them for training
        return _constants(*key)
