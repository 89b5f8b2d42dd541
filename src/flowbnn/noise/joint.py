"""Noise that is one vector over all layers, with one posterior: each layer multiplies its input by its part of the vector.

The noise of a layer depends on that of other layers as strongly as on itself, which no posterior of single layers can say.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError
from flowbnn.noise.base import Noise, noise_layers
from flowbnn.noise.contexts import OptionalGenerator, RowShard, Shape, context_of
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.layout import Layout

DENSE = 6_000  # dimensions up to which a covariance has a matrix of its own


def joint_name(first: str, taken: Collection[str]) -> str:
    """What noise that layers share is called: a network's second such vector is named after its first layer."""
    return f"joint from {first}" if "joint" in taken else "joint"


class JointPart(Noise):
    """One layer's part of a vector that layers share.

    The layer that comes first owns the vector, so that the network's ``state_dict`` has it once; its KL is that of all.

    Args:
        layout: how the part lies on the layer's tensor.
        vector: the noise of all layers that are joined.
        start: where the part begins.
    """

    def __init__(self, layout: Layout, vector: InputNoise, start: int) -> None:
        super().__init__(layout, "channel")
        self.span = slice(start, start + layout.dim)
        self.label = vector.label
        if start == 0:
            self.owned = vector
        self.held = (vector,)  # in a tuple, so that it is no part of this module

    @property
    def joint_noise(self) -> InputNoise:
        return self.held[0]

    @property
    def prior(self) -> Any:
        """The prior of the whole vector."""
        return self.joint_noise.prior

    def draw(self, shape: Shape, generator: OptionalGenerator = None) -> Tensor:
        return self.joint_noise.draw(shape, generator)[..., self.span]

    def draw_rows(self, rows: int, at: Shape, generator: OptionalGenerator, shard: RowShard | None) -> Tensor:
        raise FlowBNNError(
            "joint noise is drawn for the whole network at once: call the network and not a part of it, without activation "
            "checkpointing, or leave out joint=",
            kind="unsupported",
            argument="joint",
        )

    def draw_each(self, at: Shape, generators: Iterable[torch.Generator]) -> Tensor:
        return self.joint_noise.draw_each(at, generators)[..., self.span]

    def mean(self) -> Tensor:
        return self.joint_noise.mean()[self.span]

    def divergence(
        self, samples: int | None = None, generator: OptionalGenerator = None
    ) -> Divergence | None:
        """That of the whole vector for the layer that owns it, None for the others."""
        if self.span.start:
            return None
        return self.joint_noise.divergence(samples, generator or context_of(self).modes[self.key].generator)

    def extra_repr(self) -> str:
        return f"{self.label}, dim={self.layout.dim} of {self.joint_noise.layout.dim}"


def check_size(structure: str, sizes: Sequence[int], argument: str = "joint", width: int = 4) -> None:
    """Refuse a covariance whose largest matrix is too large; ``width``: bytes of a number, six of which are held for each.

    >>> check_size("chain", [5000, 5000])
    >>> check_size("full", [5000, 5000])
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: joint='full' needs matrices of 10,000 x 10,000 numbers, 2.2 GiB in all; take joint='chain', or ...
    """
    dim = sum(sizes) if structure == "full" else max(sizes)
    if dim > DENSE:
        free = "structure='factorized'" if argument == "structure" else "noise without joint="
        other = f"{argument}='chain'" if max(sizes) <= DENSE else free
        raise FlowBNNError(
            f"{argument}={structure!r} needs matrices of {dim:,} x {dim:,} numbers, {6 * width * dim**2 / 2**30:.1f} GiB in all; "
            f"take {other}, or noise on fewer layers by the rules",
            kind="size",
            argument=argument,
            size=dim,
        )


def join(vector: InputNoise, layouts: Sequence[Layout]) -> list[Noise]:
    """The parts of a vector for layers with these layouts, in their order."""
    starts = [0]
    for layout in layouts:
        starts.append(starts[-1] + layout.dim)
    return [JointPart(layout, vector, start) for layout, start in zip(layouts, starts, strict=False)]


def independent_vectors(model: nn.Module) -> list[tuple[InputNoise, list[str]]]:
    """The vectors of a network's noise that are independent of each other, each with the layers that multiply by it, in its order.

    Noise without a density, such as dropout, is left out.
    """
    vectors: dict[int, tuple[InputNoise, list[str]]] = {}
    for name, noise in noise_layers(model).items():
        vector = noise.joint_noise
        if isinstance(vector, InputNoise):
            vectors.setdefault(id(vector), (vector, []))[1].append(name)
    return list(vectors.values())
