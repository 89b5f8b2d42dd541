r"""A shared draw multiplied into the weights, so that a sample is the plain network with other weights.

.. math:: \mathrm{layer}_W(z \circ x) = \mathrm{layer}_{W \mathrm{diag}\, z}(x)

The scaled weights are written to buffers that stand in for the weights while samples are taken. The network's own parameters are not
written to: they step aside and come back.
"""

from collections import Counter
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.inference.passes import parts_of
from flowbnn.layers import Noise, absorbs, noise_layers, weight_scale

__all__ = ["ScaledWeights", "absorbable"]

_BUFFERS: WeakKeyDictionary[nn.Module, dict[Any, nn.Parameter]] = WeakKeyDictionary()


def absorbable(model: nn.Module) -> tuple[str, ...]:
    """Layers whose shared noise their weights can take: torch's linear and convolution layers with a weight of their own.

    Noise at site ``position`` has one vector for a linear layer that reads plain vectors; whether it does, a trial must tell.
    """
    uses = Counter(
        id(own) for part in parts_of(model) for own in part._parameters.values() if own is not None
    )
    found = []
    for name, layer in noise_layers(model).items():
        module = model.get_submodule(name)
        fits = layer.site == "channel" or isinstance(module, nn.Linear)
        if fits and layer.layout.side == "input" and absorbs(module) and uses[id(module.weight)] == 1:
            found.append(name)
    return tuple(found)


class ScaledWeights:
    """Stand-ins for the weights of some layers, to be filled with those of one sample after the other.

    Inside the ``with`` block these layers have no noise of their own. Whatever happens in it, the network gets its weights back.

    Args:
        model: a stochastic network that holds shared draws.
        names: of the layers, as :func:`absorbable` gives them.
        half: precision of the stand-ins, where the layers run in it; None is that of the weights.
        keep: use the same memory in every prediction, which compiled passes and CUDA graphs need.
    """

    def __init__(
        self, model: nn.Module, names: tuple[str, ...], half: torch.dtype | None = None, keep: bool = False
    ) -> None:
        self.names = names
        layers = noise_layers(model)
        self.layers: list[Noise] = [layers[name] for name in names]
        self.modules = [model.get_submodule(name) for name in names]
        self.weights: list[nn.Parameter] = [module._parameters["weight"] for module in self.modules]  # type: ignore[misc]
        with torch.no_grad():
            self.draws: list[Tensor] = [
                layer.shared_vectors(weight.device)
                for layer, weight in zip(self.layers, self.weights, strict=True)
            ]
        kept = _BUFFERS.setdefault(model, {}) if keep else {}
        self.buffers = []
        for name, weight in zip(names, self.weights, strict=True):
            dtype = half if half is not None and weight.dtype == torch.float32 else weight.dtype
            key = (name, tuple(weight.shape), weight.stride(), dtype, weight.device)
            if key not in kept:
                kept[key] = nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=False)
            self.buffers.append(kept[key])

    def fill(self, index: int) -> None:
        """Make the network the sample of this index."""
        parts = zip(self.modules, self.weights, self.draws, self.buffers, strict=True)
        for module, weight, draws, buffer in parts:
            torch.mul(weight, weight_scale(module, draws[index]), out=buffer.data)

    def __enter__(self) -> "ScaledWeights":
        self.modes = [layer.mode for layer in self.layers]
        for module, layer, buffer in zip(self.modules, self.layers, self.buffers, strict=True):
            module._parameters["weight"], layer.mode = buffer, "off"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        parts = zip(self.modules, self.layers, self.weights, self.modes, strict=True)
        for module, layer, weight, mode in parts:
            module._parameters["weight"], layer.mode = weight, mode
