"""Joint noise: one vector with one posterior for several layers, each of which multiplies its input by a slice of the vector.

A joint posterior represents correlations between layers, which posteriors of single layers cannot.
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

MAX_DENSE_DIM = 6_000  # a larger covariance matrix takes gigabytes


def joint_name(first_layer: str, names: Collection[str]) -> str:
    """Returns the name of joint noise: ``"joint"``, or for further vectors of a network one with its first layer."""
    return f"joint from {first_layer}" if "joint" in names else "joint"


class JointPart(Noise):
    """Noise of one layer that is a slice of joint noise.

    The first layer owns the joint noise, so that it is once in ``state_dict``. The KL of this layer is that of the whole vector.

    Args:
        layout: Position of the slice on the layer's tensor.
        vector: Noise of all joined layers.
        start: First index of the slice.
    """

    def __init__(self, layout: Layout, vector: InputNoise, start: int) -> None:
        super().__init__(layout, "channel")
        self.span = slice(start, start + layout.dim)
        self.label = vector.label
        if start == 0:
            self.owned = vector
        self.reference = (vector,)  # in a tuple, so that it is not registered as a submodule

    @property
    def joint_noise(self) -> InputNoise:
        return self.reference[0]

    @property
    def prior(self) -> Any:
        """Prior of the joint noise."""
        return self.joint_noise.prior

    def draw(self, shape: Shape, generator: OptionalGenerator = None) -> Tensor:
        return self.joint_noise.draw(shape, generator)[..., self.span]

    def draw_rows(
        self, rows: int, positions: Shape, generator: OptionalGenerator, shard: RowShard | None
    ) -> Tensor:
        text = "joint noise is drawn for the whole network; call the network, not a layer, and without activation checkpointing"
        raise FlowBNNError(text, kind="unsupported", argument="joint")

    def draw_each(self, positions: Shape, generators: Iterable[torch.Generator]) -> Tensor:
        return self.joint_noise.draw_each(positions, generators)[..., self.span]

    def mean(self) -> Tensor:
        return self.joint_noise.mean()[self.span]

    def divergence(
        self, samples: int | None = None, generator: OptionalGenerator = None
    ) -> Divergence | None:
        """Returns the divergence of the joint noise for the layer that owns it, and None for the others."""
        if self.span.start:
            return None
        return self.joint_noise.divergence(samples, generator or context_of(self).modes[self.key].generator)

    def extra_repr(self) -> str:
        return f"{self.label}, dim={self.layout.dim} of {self.joint_noise.layout.dim}"


def check_size(structure: str, sizes: Sequence[int], argument: str = "joint", width: int = 4) -> None:
    """Raises FlowBNNError if the largest matrix of a covariance is too large.

    Args:
        structure: Structure of the covariance.
        sizes: Dimensions of the layers.
        argument: Name of the argument that chooses the structure.
        width: Bytes of a number. Six numbers are stored for each entry.

    >>> check_size("chain", [5000, 5000])
    >>> check_size("full", [5000, 5000])
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: joint='full' needs 2.2 GiB for 10,000 x 10,000 matrices; use joint='chain', or ...
    """
    dim = sum(sizes) if structure == "full" else max(sizes)
    if dim > MAX_DENSE_DIM:
        smaller = "structure='factorized'" if argument == "structure" else "noise without joint"
        smaller = f"{argument}='chain'" if max(sizes) <= MAX_DENSE_DIM else smaller
        size = f"{6 * width * dim**2 / 2**30:.1f} GiB"
        text = f"{argument}={structure!r} needs {size} for {dim:,} x {dim:,} matrices; use {smaller}, or noise on fewer layers"
        raise FlowBNNError(text, kind="size", argument=argument, size=dim)


def join(vector: InputNoise, layouts: Sequence[Layout]) -> list[Noise]:
    """Returns the slices of joint noise for layers with these layouts, in their order."""
    starts = [0]
    for layout in layouts:
        starts.append(starts[-1] + layout.dim)
    return [JointPart(layout, vector, start) for layout, start in zip(layouts, starts, strict=False)]


def independent_vectors(model: nn.Module) -> list[tuple[InputNoise, list[str]]]:
    """Returns the independent noise vectors of a network, each with the names of the layers that use it, in order.

    Noise without a density, such as dropout, is left out.
    """
    vectors: dict[int, tuple[InputNoise, list[str]]] = {}
    for name, noise in noise_layers(model).items():
        vector = noise.joint_noise
        if isinstance(vector, InputNoise):
            vectors.setdefault(id(vector), (vector, []))[1].append(name)
    return list(vectors.values())
