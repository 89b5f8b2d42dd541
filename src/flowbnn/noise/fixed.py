"""Noise that has become a constant: what is left of it in a network that was sampled, where no weight can take it."""

from collections.abc import Callable

import torch
from torch import Tensor

from flowbnn.noise.base import Noise
from flowbnn.noise.passes import Setting, Sizes, Source


def constant(make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` gives, as a plain tensor also while ``torch.export`` traces: a constant of the graph, not operations in it."""
    if not torch.compiler.is_exporting():
        return make()
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        return make()


class FixedNoise(Noise):
    """A buffer that multiplies the layer's input; :func:`~flowbnn.noise.noise_layers` does not count it as noise.

    Args:
        noise: whose place it takes.
        vector: the factors.
        seed: of the draw, at site ``position``: its maps are made at the first input of their size, and kept.
    """

    fixed = True

    def __init__(self, noise: Noise, vector: Tensor, seed: int | None = None) -> None:
        super().__init__(noise.layout, "channel" if seed is None else noise.site)
        self.label, self.setting = "fixed", Setting("shared", 1)
        self.register_buffer("vector", vector.detach().clone())
        # in a tuple, so that the noise is no part of the network
        self.source = (noise, seed or 0, vector.device) if self.site == "position" else None

    def draw(self, shape: Sizes, generator: Source = None) -> Tensor:
        return self.mean().expand(*shape, -1)

    def mean(self) -> Tensor:
        return self.get_buffer("vector")

    def shared_vectors(self, samples: int, seed: int, device: torch.device) -> Tensor:
        return self.mean()[None]

    def shared_maps(
        self, at: Sizes, start: int, stop: int, seed: int, device: torch.device, call: int = 0
    ) -> Tensor:
        name = "_".join(map(str, ("map", call, *at)))
        if self._buffers.get(name) is None:
            assert self.source is not None
            noise, own, where = self.source
            drawn = constant(lambda: noise.shared_maps(at, 0, 1, own, where, call).to(device))
            if torch.compiler.is_exporting():
                return drawn
            self.register_buffer(name, drawn, persistent=False)
        return self.get_buffer(name)
